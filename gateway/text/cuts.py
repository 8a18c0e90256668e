"""Safe cuts: places where a text may be cut so that the tokens of both parts, joined, are the tokens of the whole text.

A byte-level BPE tokeniser merges only inside the pieces that its pre-tokeniser's regular expression produces, so a cut is safe
where a piece always ends, whatever follows. The proof needs these properties of each alternative of the expressions that models use
(:data:`_ALTERNATIVES`):

- An alternative matches no space after a character that is not whitespace, so a piece ends before such a space.
- After a newline it matches only whitespace or "/", so a piece ends between a newline and a letter or digit.
- It has no lookbehind, and only whitespace alternatives look ahead. A cut after a character that is not whitespace, or after a
  single newline, therefore changes no piece on the left.

Such a cut splits no NFC composition, because a space and a newline compose with nothing before them, and a letter after a newline
starts a new composition. An added token could span the cut, so the two characters at the cut must not be adjacent in any added
token. An added token with ``lstrip`` or ``rstrip`` absorbs adjacent whitespace, which must be on the token's side of the cut.
A tokeniser of another structure (SentencePiece style, an unknown expression, ``single_word`` tokens) has no cuts.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from yardstick_llm.gateway.text.vocabulary import BYTE_OF

_CUT = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=[^\W_])")
_WINDOW = 2048
"""Characters that are searched at a time, from the end."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ALTERNATIVES = {
    *_CONTRACTIONS.split("|"),
    f"(?i:{_CONTRACTIONS})",
    "'(?:[sdmt]|ll|ve|re)",
    "'(?i:[sdmt]|ll|ve|re)",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
}
"""Alternatives of the expressions of GPT-2, Qwen 2 to 3.5, Llama 3 and o200k (gpt-oss)."""


class Cuts:
    """Finds safe cuts in texts for one tokeniser."""

    def __init__(self, added_tokens: list[dict[str, Any]]) -> None:
        contents = [token["content"] for token in added_tokens]
        self._spanned = {content[place : place + 2] for content in contents for place in range(len(content) - 1)}
        self._absorbs_after = {token["content"][-1] for token in added_tokens if token.get("rstrip")}
        self._absorbs_before = {token["content"][0] for token in added_tokens if token.get("lstrip")}

    def last(self, text: str) -> int | None:
        """Return the last safe cut of ``text``; None if there is none."""
        end = len(text)
        while end > 0:
            begin = max(0, end - _WINDOW)
            places = [match.start() for match in _CUT.finditer(text, begin, min(end + 1, len(text)))]
            found = next((place for place in reversed(places) if place < end and self._safe(text, place)), None)
            if found is not None:
                return found
            end = begin
        return None

    def between(self, text: str, begin: int, end: int) -> int | None:
        """Return the first safe cut from ``begin`` up to and excluding ``end``; None if there is none."""
        for match in _CUT.finditer(text, begin, min(end + 1, len(text))):
            if match.start() < end and self._safe(text, match.start()):
                return match.start()
        return None

    def _safe(self, text: str, place: int) -> bool:
        left, right = text[place - 1], text[place]
        if left in self._absorbs_after or (right != " " and right in self._absorbs_before):
            return False
        return left + right not in self._spanned


def may_be_cut(text: str) -> bool:
    """Whether ``text`` has a possible cut, for a tokeniser that has cuts and no added token across them."""
    return _CUT.search(text) is not None


def cuts_of(document: dict[str, Any], added: list[dict[str, Any]]) -> Cuts | None:
    """Return the cuts of the tokeniser in a ``tokenizer.json`` with ``added`` tokens; None for an unknown structure."""
    model = document["model"]
    normalizer = document.get("normalizer")
    known = (
        model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and BYTE_OF.keys() <= model["vocab"].keys()
        and _splits(document.get("pre_tokenizer"))
        and not any(token.get("single_word") for token in added)
        and (normalizer is None or (normalizer["type"] == "NFC" and not any(map(_may_compose, added))))
    )
    return Cuts(added) if known else None


def _splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a pre-tokeniser ends pieces as the module's docstring requires."""
    if pre_tokenizer is None:
        return False
    *before, last = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return False
    splitting = [step for step in before if step["type"] == "Split"]
    others = [step for step in before if step["type"] not in ("Split", "Digits")]
    if others or len(splitting) > 1 or bool(splitting) == bool(last.get("use_regex", True)):
        return False
    return all(map(_is_known, splitting))


def _is_known(split: dict[str, Any]) -> bool:
    expression = split["pattern"].get("Regex", "")
    alternatives = _top_level(expression)
    isolated = split["behavior"].lower() == "isolated" and not split.get("invert")
    return isolated and r"\s+" in alternatives and alternatives <= _ALTERNATIVES


def _top_level(expression: str) -> set[str]:
    """Return the top-level alternatives of a regular expression, outside parentheses."""
    parts, depth = [""], 0
    for char in expression:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return set(parts)


def _may_compose(token: dict[str, Any]) -> bool:
    """Whether normalisation may produce an added token across a cut that the original text does not show."""
    content = token["content"]
    return any(not left.isascii() and right in " \n" for left, right in itertools.pairwise(content))
