"""A lower bound on the number of tokens of a text from its length alone."""

from __future__ import annotations

from typing import Any

from gateway.text.spelling import BYTE_OF, Spelling

_NFC_SHRINKS = 3
"""Upper bound on the characters of a text for each byte of its NFC form. The worst known is 1.5 (u, diaeresis and macron become
U+01D6)."""


def characters_per_token(document: dict[str, Any], spelling: Spelling) -> int | None:
    """Return the most characters of a text that one token can represent; None if there is no bound.

    The bound is the length of the longest token. A byte-level token of n bytes represents at most n characters, and more if NFC
    composes. There is no bound if characters may vanish (a vocabulary without all bytes, fused unknown tokens), if added tokens
    absorb adjacent whitespace, or if the normaliser is of another kind.
    """
    model, added = document["model"], document.get("added_tokens") or []
    if not isinstance(model["vocab"], dict) or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    shrinks = _byte_level(document) if spelling.family == "byte_level" else _sentencepiece(document)
    if shrinks is None:
        return None
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in added)]))
    return longest * shrinks


def _byte_level(document: dict[str, Any]) -> int | None:
    if not BYTE_OF.keys() <= document["model"]["vocab"].keys():
        return None
    normalizer = document.get("normalizer")
    if normalizer is None:
        return 1
    return _NFC_SHRINKS if normalizer["type"] == "NFC" else None


def _sentencepiece(document: dict[str, Any]) -> int | None:
    model, normalizer = document["model"], document.get("normalizer")
    if not model.get("byte_fallback") or not {f"<0x{byte:02X}>" for byte in range(256)} <= model["vocab"].keys():
        return None
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    return 1 if all(map(_keeps_length, steps)) else None


def _keeps_length(step: dict[str, Any] | None) -> bool:
    """Whether a step of a normaliser never shortens a text."""
    if step is None or step["type"] == "Prepend":
        return True
    return step["type"] == "Replace" and len(step["pattern"].get("String", "  ")) == 1 and len(step["content"]) >= 1
