"""The mapping from the tokens of a ``tokenizer.json`` to bytes.

Two families are supported, which cover every model that the engine runs: byte-level BPE (GPT-2, Qwen, Llama 3), where each
character of a token represents a byte, and SentencePiece style (Llama 2, Mistral), where ``▁`` is a space and ``<0xE2>`` a byte.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A model's ``tokenizer.json`` cannot be used."""


class Spelling(msgspec.Struct, frozen=True):
    """Mapping from tokens to bytes."""

    family: Literal["byte_level", "sentencepiece"]
    space: str = "▁"
    """Representation of a space in a SentencePiece-style token."""
    byte_fallback: bool = False
    strips_leading_space: bool = False
    """Whether encoding puts a space before the text, so that decoding must remove it."""

    def bytes_of(self, piece: str) -> bytes:
        """Return the bytes of a token of the vocabulary."""
        if self.family == "byte_level":
            return _byte_level(piece)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(self.space, " ").encode()


def spelling_of(decoder: dict[str, Any] | None) -> Spelling:
    """Read the ``decoder`` part of a ``tokenizer.json``. Raises :class:`TokenizerError`."""
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder or {"type": "none"}]
    )
    by_type = {step["type"]: step for step in steps}
    if "ByteLevel" in by_type:
        return Spelling("byte_level")
    byte_fallback = "ByteFallback" in by_type
    if metaspace := by_type.get("Metaspace"):
        return Spelling("sentencepiece", metaspace["replacement"], byte_fallback, metaspace["prepend_scheme"] != "never")
    replace = by_type.get("Replace", {})
    if replace.get("content") == " " and "String" in replace["pattern"]:
        strip = by_type.get("Strip", {"content": " ", "start": 0})
        strips = strip["content"] == " " and strip["start"] > 0
        return Spelling("sentencepiece", replace["pattern"]["String"], byte_fallback, strips)
    kinds = ", ".join(by_type)
    raise TokenizerError(f"tokenizer.json decodes with {kinds}; byte-level BPE and SentencePiece-style tokenisers are supported")


def _byte_values() -> dict[str, int]:
    """Return GPT-2's alphabet: each byte is a printable character, its own in Latin-1 if that prints, else from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF = _byte_values()
"""The byte that each character of a byte-level token represents."""


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(BYTE_OF[char] for char in piece)
    except KeyError:  # a token outside the alphabet is spelled as it is
        return piece.encode()
