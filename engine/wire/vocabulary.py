"""The vocabulary of a model as llguidance takes it, in the gateway and in engines. Does not import the library."""

from __future__ import annotations

from collections.abc import Callable


class GrammarVocabulary:
    """The interface that llguidance expects of a tokeniser."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int, encode: Callable[[bytes], list[int]]
    ) -> None:
        """``tokens``: bytes of every token; empty for one that is never allowed. ``special_token_ids``: tokens that only a name
        in a grammar matches. ``encode``: UTF-8 bytes to token ids, without these tokens."""
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)
