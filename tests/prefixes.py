"""A prefix cache with the semantics of an engine's: single tokens, one namespace for each salt, nothing of callers that keep
nothing."""

from __future__ import annotations

from yardstick_llm.engine import wire


class PrefixCache:
    """A trie of all prompts that were computed."""

    def __init__(self) -> None:
        self._roots: dict[str, dict[int, dict]] = {}

    def match_and_insert(self, caller: wire.Caller, tokens: list[int]) -> int:
        """How many tokens of ``tokens`` were there; afterwards all are."""
        if not caller.keep_prefix:
            return 0
        node = self._roots.setdefault(caller.cache_salt, {})
        matched, new = 0, False
        for token in tokens:
            new = new or token not in node
            matched += not new
            node = node.setdefault(token, {})
        return matched
