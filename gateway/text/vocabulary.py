"""Decoding of token ids to text, from plain tables with the bytes of every token: whole texts, streams and stop strings.

The event loop needs only this half of a tokeniser. Texts are encoded in worker processes (``tokenizer.py``), because loading a
large ``tokenizer.json`` holds the interpreter's lock for seconds.

Three families of tokenisers are supported, which cover every model that the engine runs: byte-level BPE (GPT-2, Qwen, Llama 3),
where each character of a token represents a byte, SentencePiece style (Llama 2, Mistral, XLM-RoBERTa), where ``▁`` is a space and
``<0xE2>`` a byte, and WordPiece (BERT), where ``##`` begins a token that continues a word.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from yardstick_llm.gateway.presets.preset import Fitted

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A model's ``tokenizer.json`` cannot be used."""


class Spelling(msgspec.Struct, frozen=True):
    """Mapping from tokens to bytes."""

    family: Literal["byte_level", "sentencepiece", "wordpiece"]
    space: str = "▁"
    """Representation of a space in a SentencePiece-style token."""
    byte_fallback: bool = False
    strips_leading_space: bool = False
    """Whether encoding puts a space before the text, so that decoding must remove it."""

    def bytes_of(self, piece: str) -> bytes:
        """Return the bytes of a token of the vocabulary."""
        if self.family == "byte_level":
            return _byte_level(piece)
        if self.family == "wordpiece":
            return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
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
    if by_type.get("WordPiece", {}).get("prefix") == "##":
        return Spelling("wordpiece", strips_leading_space=True)
    byte_fallback = "ByteFallback" in by_type
    if metaspace := by_type.get("Metaspace"):
        return Spelling("sentencepiece", metaspace["replacement"], byte_fallback, metaspace["prepend_scheme"] != "never")
    replace = by_type.get("Replace", {})
    if replace.get("content") == " " and "String" in replace["pattern"]:
        strip = by_type.get("Strip", {"content": " ", "start": 0})
        strips = strip["content"] == " " and strip["start"] > 0
        return Spelling("sentencepiece", replace["pattern"]["String"], byte_fallback, strips)
    kinds = ", ".join(by_type)
    raise TokenizerError(f"tokenizer.json decodes with {kinds}; byte-level BPE, SentencePiece-style and WordPiece are supported")


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


T = TypeVar("T")

MOST_ENCODED = 1 << 15
"""Most tokens whose log-probabilities, and whose texts, are kept as JSON; by estimate they take 8 MB and 5 MB."""


class VocabularyTable(msgspec.Struct, frozen=True):
    """The content of a :class:`Vocabulary`, in a form that is cheap to send."""

    spelled: bytes
    """Bytes of all tokens, in the order of their ids."""
    ends: bytes
    """End of each id's bytes in ``spelled``, as uint32. They begin at the end of the previous id's bytes."""
    missing: list[int]
    """Ids below the highest one that have no token."""
    special: list[int]
    """Ids of special tokens."""
    strips_leading_space: bool
    """Whether the tokeniser adds one space at the start of a text."""
    cuttable: bool = False
    """Whether texts can be cut safely (``cuts.py``), so that a query is tokenised once."""
    fitted: Fitted | None = None
    """The model's preset; None if it has none."""


class Vocabulary:
    """Decodes from the exact bytes of each token, so that whole texts, streams (:class:`Detokenizer`) and log-probabilities agree,
    and an invalid byte affects one character and not its neighbours."""

    def __init__(self, table: VocabularyTable) -> None:
        self.table = table
        self._ends = array("I", table.ends)
        self._missing = frozenset(table.missing)
        self.special_ids = frozenset(table.special)
        self.strips_leading_space = table.strips_leading_space
        self.vocab_size = len(self._ends)
        """Highest id with a token, plus 1; the model's head may have more rows (padding)."""
        self._spellings = _Table(self.vocab_size, self._spelling, {})
        self._without: dict[frozenset[int], Mapping[int, bytes]] = {}
        """Bytes of the tokens by id, by the special tokens among them that have bytes."""
        self._shown = self._hiding(frozenset())
        self._quoted = {skip: self._quoting(self.spellings(skip_special_tokens=skip)) for skip in (False, True)}
        self.texts: Mapping[int, str] = _Table(self.vocab_size, self._text, {})
        """The result of :meth:`token_text` for every id."""
        self.encoded: Mapping[int, tuple[bytes, bytes]] = _Table(self.vocab_size, self._around_logprob, {}, most=MOST_ENCODED)
        """JSON of a log-probability of every id: the bytes before and after the number, without the closing brace."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids`` from the start of a text. Bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(map(self.spellings(skip_special_tokens=skip_special_tokens).__getitem__, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def spellings(self, *, skip_special_tokens: bool, shown: Sequence[int] = ()) -> Mapping[int, bytes]:
        """Return a mapping from every id to the bytes that it adds to a text: none for special tokens that are skipped. Those in
        ``shown`` are not."""
        if not skip_special_tokens:
            return self._spellings
        return self._hiding(frozenset(shown)) if shown else self._shown

    def quoted(self, *, skip_special_tokens: bool) -> Mapping[int, bytes | None]:
        """Return a mapping from every id to the JSON string of the text that it adds: empty if it adds none, and None if its bytes
        are no complete characters."""
        return self._quoted[skip_special_tokens]

    def has_token(self, id: int) -> bool:
        """Return True for vocabulary and added tokens, False for the padding of the model's head."""
        return 0 <= id < self.vocab_size and id not in self._missing

    def token_text(self, id: int) -> str:
        """Return one token as text, for log-probabilities. A part of a character becomes U+FFFD."""
        return self.texts[id]

    def _hiding(self, shown: frozenset[int]) -> Mapping[int, bytes]:
        """Return bytes by id, none for special tokens but ``shown``. Models have one or two formats, so few mappings are kept."""
        if shown not in self._without:
            hidden = dict.fromkeys(self.special_ids - shown, b"")
            self._without[shown] = _Table(self.vocab_size, self._spellings.__getitem__, hidden)
        return self._without[shown]

    def _quoting(self, spellings: Mapping[int, bytes]) -> Mapping[int, bytes | None]:
        def quote(id: int) -> bytes | None:
            try:
                return msgspec.json.encode(spelling.decode()) if (spelling := spellings[id]) else b""
            except UnicodeDecodeError:
                return None

        return _Table(self.vocab_size, quote, {}, most=MOST_ENCODED)

    def _spelling(self, id: int) -> bytes:
        if not 0 <= id < self.vocab_size:
            return b""
        return self.table.spelled[self._ends[id - 1] if id else 0 : self._ends[id]]

    def _text(self, id: int) -> str:
        return self._spellings[id].decode("utf-8", "replace")

    def _around_logprob(self, id: int) -> tuple[bytes, bytes]:
        text, spelling = msgspec.json.encode(self.texts[id]), msgspec.json.encode(list(self._spellings[id]))
        return b'{"token":%b,"logprob":' % text, b',"bytes":%b' % spelling


class _Table(dict[int, T]):
    """Entries by token id. Each is made when it is first looked up; ids without a token are not kept. ``most``: entries after which
    the table begins anew; None: there is no limit."""

    def __init__(self, size: int, make: Callable[[int], T], known: Mapping[int, T], most: int | None = None) -> None:
        super().__init__(known)
        self._size = size
        self._make = make
        self._most = size if most is None else most

    def __missing__(self, id: int) -> T:
        made = self._make(id)
        if 0 <= id < self._size:
            if len(self) >= self._most:
                self.clear()
            self[id] = made
        return made


_UNFINISHED = 3
"""Length of the longest incomplete UTF-8 character, in bytes."""
_LOOK_BACK = 64
"""Tokens at the prompt's end that may hold an incomplete character: more than 3, as special tokens add no bytes."""


class Detokenizer:
    """Converts the tokens of one sequence to text. It never splits a character or returns a part of one as U+FFFD.

    The joined results of ``push`` and ``finish`` are the text that the tokens add to the prompt. With an empty prompt they equal
    ``tokenizer.decode`` of all tokens; after a prompt, the space that a SentencePiece-style tokeniser has before the first word is
    kept. A character that began in the prompt is returned whole. The state is at most one incomplete character, so each token
    costs the same.
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: Sequence[int] = (),
    ) -> None:
        """``shown``: special tokens that are not skipped."""
        self._spelling = tokenizer.spellings(skip_special_tokens=skip_special_tokens, shown=shown).__getitem__
        context = self._last_bytes(prompt_ids)
        _, used = codecs.utf_8_decode(context, "replace", False)
        self._unfinished = context[used:]
        """The bytes of an incomplete character."""
        self._strip_space = tokenizer.strips_leading_space and not context
        self.clean = not (self._unfinished or self._strip_space)
        """Whether the next token's text depends on its bytes alone."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` complete; "" while a character is incomplete."""
        data = b"".join(map(self._spelling, ids))
        if not self.clean:
            return self._decode(data, final=False)
        text, used = codecs.utf_8_decode(data, "replace", False)
        if used < len(data):
            self._unfinished, self.clean = data[used:], False
        return text

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else ""."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        if self._unfinished:
            data = self._unfinished + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[used:]
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        self.clean = not (self._unfinished or self._strip_space)
        return text

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Return enough bytes of the prompt's end to complete its last character."""
        context = b""
        for piece in map(self._spelling, reversed(prompt_ids[-_LOOK_BACK:])):
            context = piece + context
            if len(context) >= _UNFINISHED:
                break
        return context


class StopStrings:
    """Passes text through until one of ``stops`` is complete, and drops that stop string and all that follows.

    If several could match, the one that is complete first wins (of those, the one that begins first), so the result does not depend
    on the division of the text into chunks. Only text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ``ValueError`` for an empty stop string, which would match everywhere."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in stops]
        self._begun = [0] * len(stops)  # number of characters of each stop string that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string is complete. Push nothing after that."""
        for place, stop in enumerate(self._stops):
            self._begun[place] = _advanced(stop, self._borders[place], self._begun[place], text)
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        begin = len(text) - max(self._begun, default=0)
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """Return the held-back text at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of ``stop``, the length of its longest proper prefix that is also its suffix (Knuth, Morris and
    Pratt). With these the work is linear in the text, however long and repetitive the stop strings are."""
    borders, length = [0] * len(stop), 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        length += stop[place] == stop[length]
        borders[place] = length
    return borders


def _advanced(stop: str, borders: list[int], begun: int, text: str) -> int:
    """Return the number of characters of ``stop`` that the text ends with, after ``text``; ``begun`` is the number before."""
    for char in text:
        while begun and (begun == len(stop) or stop[begun] != char):
            begun = borders[begun - 1]
        begun += stop[begun] == char
    return begun
