"""A model's tokeniser: exact ids in, exact bytes out.

Encoding is the ``tokenizers`` library's. Decoding is done here from the exact bytes of each token, so that whole texts, streams
(``detokenizer.py``) and log-probabilities agree, and so that an invalid byte spoils one character instead of its neighbours.
Two families are known, those of every model that the engine runs: byte-level BPE (GPT-2, Qwen, Llama 3), where each character
of a token stands for a byte, and SentencePiece style (Llama 2, Mistral), where ``▁`` is a space and ``<0xE2>`` a byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import tokenizers

from engine.wire import TokenizerFiles

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_ID = 2**31


class TokenizerError(ValueError):
    """A model's ``tokenizer.json`` cannot be used."""


class _Decoding(msgspec.Struct, frozen=True):
    """How tokens spell bytes."""

    family: Literal["byte_level", "sentencepiece"]
    space: str = "▁"
    """What a space looks like in a SentencePiece-style token."""
    byte_fallback: bool = False
    strips_leading_space: bool = False
    """Encoding put a space before the text, so decoding takes it away again."""


class Tokenizer:
    """Safe to use from several threads at once; the library releases the interpreter's lock while it encodes."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        """Take over ``library``. Raises :class:`TokenizerError` where its way of decoding is unknown or it has no tokens."""
        library.no_truncation()
        library.no_padding()
        vocabulary = library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError("tokenizer.json has no tokens")
        added = library.get_added_tokens_decoder()
        self._library = library
        self._decoding = _decoding(json.loads(library.to_str())["decoder"])
        self._added = {id: token.content.encode() for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max(vocabulary.values()) + 1
        """Highest true id + 1; the model's head may have more rows (padding)."""

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> Tokenizer:
        """Read what an engine sent. Raises :class:`TokenizerError`."""
        try:
            library = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        return cls(library)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text, in one call on all cores. Slow for long lists: call it in a worker thread."""
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``, which stand at the start of a text. Bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.pieces(ids, skip_special_tokens=skip_special_tokens)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def pieces(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> Iterator[bytes]:
        """The bytes of each token that is seen."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return (self.token_bytes(id) for id in ids if id not in skipped)

    @property
    def strips_leading_space(self) -> bool:
        """True where one space at the start of a text is the tokeniser's own."""
        return self._decoding.strips_leading_space

    def has_token(self, id: int) -> bool:
        """True for the vocabulary and added tokens, false for the padding of the model's head."""
        return self._piece(id) is not None

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of a token; none where there is no such token."""
        if id in self._added:
            return self._added[id]
        piece = self._piece(id)
        if piece is None:
            return b""
        return _byte_level(piece) if self._decoding.family == "byte_level" else _sentencepiece(piece, self._decoding)

    def token_text(self, id: int) -> str:
        """A token as text of its own, as log-probabilities show it. A part of a character becomes U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _piece(self, id: int) -> str | None:
        return self._library.id_to_token(id) if 0 <= id < _MAX_ID else None


def _decoding(decoder: dict[str, Any] | None) -> _Decoding:
    """Read the ``decoder`` part of a ``tokenizer.json``."""
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder or {"type": "none"}]
    )
    by_type = {step["type"]: step for step in steps}
    if "ByteLevel" in by_type:
        return _Decoding("byte_level")
    byte_fallback = "ByteFallback" in by_type
    if metaspace := by_type.get("Metaspace"):
        return _Decoding("sentencepiece", metaspace["replacement"], byte_fallback, metaspace["prepend_scheme"] != "never")
    replace = by_type.get("Replace", {})
    if replace.get("content") == " " and "String" in replace["pattern"]:
        strip = by_type.get("Strip", {"content": " ", "start": 0})
        return _Decoding(
            "sentencepiece", replace["pattern"]["String"], byte_fallback, strip["content"] == " " and strip["start"] > 0
        )
    kinds = ", ".join(by_type)
    raise TokenizerError(f"tokenizer.json decodes with {kinds}; byte-level BPE and SentencePiece-style tokenisers are supported")


def _byte_values() -> dict[str, int]:
    """GPT-2's alphabet, in which each byte is a printable character: Latin-1 where that prints, from U+0100 on where not."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_values()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in piece)
    except KeyError:  # outside the alphabet a token spells itself
        return piece.encode()


def _sentencepiece(piece: str, decoding: _Decoding) -> bytes:
    if decoding.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace(decoding.space, " ").encode()
