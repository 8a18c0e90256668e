"""A model's tokeniser: converts text to exact token ids. The fork server and worker processes have one.

Common texts are encoded piece by piece (:class:`Pieces`), others by the ``tokenizers`` library, one text at a time. Long texts are
encoded in slices at safe cuts, so that a text that is too long for a model is refused early, with memory and time bounded by the
model's context.

Pieces are several times as fast as the library. A tokeniser first divides a text into pieces and then encodes each by itself.
Most pieces of a text are common words. So the text is divided here, by Python's ``re``, and the ids of each distinct piece come
from the library once and are kept. They are exact because the pieces are:

- A byte-level BPE tokeniser divides by an expression that ``cuts.py`` knows, into words with the space before them, digits and
  punctuation. A piece alone is divided into itself, because no alternative looks behind, and at the end of a text the lookahead
  of whitespace holds (:func:`by_expression`).
- BERT's tokeniser, and a SentencePiece model whose ``tokenizer.json`` splits at whitespace, drop the whitespace between words, and
  read no character beyond a word (:func:`by_words`).

But for BERT's, texts that are divided here have only characters whose properties are the same in all versions of Unicode
(:func:`_safe_characters`). Others are left to the library: those with combining marks, emoji or newer characters.

All tenants share the kept pieces, as they share the library's own cache. Only single words are kept, never texts, so the time of a
request can tell at most that somebody has used a word.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import Any

import msgspec
import tokenizers

from yardstick_llm.engine.wire import CONTROL_TOKEN, TokenizerFiles
from yardstick_llm.gateway.output.constraint import GrammarCompiler
from yardstick_llm.gateway.text.cuts import cuts_of
from yardstick_llm.gateway.text.prepared import TooManyTokens
from yardstick_llm.gateway.text.special import ControlTokens, Marked, any_of
from yardstick_llm.gateway.text.vocabulary import Spelling, TokenizerError, Vocabulary, VocabularyTable, spelling_of

MAX_HOLES = 1 << 18
"""Ids without a token below the highest one. Filling them takes the process of all models' text workers 15 s."""


def table_of(library: tokenizers.Tokenizer, added: list[dict[str, Any]], spelling: Spelling) -> VocabularyTable:
    """Return the bytes of all tokens of ``library``, those of its ``added`` tokens included. Raises :class:`TokenizerError`."""
    pieces = {id: spelling.bytes_of(piece) for piece, id in library.get_vocab(with_added_tokens=True).items()}
    pieces |= {token["id"]: token["content"].encode() for token in added}
    ends, end, last = array("I"), 0, max(pieces)
    if last - len(pieces) >= MAX_HOLES:
        raise TokenizerError(
            f"tokenizer.json has {len(pieces)} tokens with ids up to {last}; at most {MAX_HOLES} may be without one"
        )
    for id in range(last + 1):
        end += len(pieces.get(id, b""))
        ends.append(end)
    return VocabularyTable(
        b"".join(pieces[id] for id in sorted(pieces)),
        ends.tobytes(),
        [id for id in range(len(ends)) if id not in pieces],
        [token["id"] for token in added if token["special"]],
        spelling.strips_leading_space,
    )


MAX_PIECES = 1 << 15
"""Most pieces that are kept, of some 300 bytes each. English prose of 400 kB has 6,000."""
MAX_PIECE_CHARACTERS = 32
"""Longest piece that is kept."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Expression of the library's ``ByteLevel`` pre-tokeniser."""

_BLOCKS = [range(0x0250), range(0x0370, 0x0530), range(0x2000, 0x2600), range(0x3040, 0x3100), range(0x4E00, 0x9FA6)]
"""Latin, Greek, Cyrillic, punctuation and symbols, Japanese syllables, Chinese characters."""
_CLASSES = re.compile(r"\\p\{(\w+)\}|\\([sS])")


Divide = Callable[[str], list[str] | None]
"""Returns the pieces of a text; None if the library must encode it."""


class Pieces:
    """The pieces of one tokeniser whose ids are known. Not safe to use from several threads."""

    def __init__(
        self,
        divide: Divide,
        added_tokens: Iterable[str],
        encode: Callable[[list[str]], list[list[int]]],
        dividing: Mapping[str, int] | None = None,
        *,
        literal: bool = True,
    ) -> None:
        """``encode``: returns the library's ids of each of several texts. ``dividing``: ids of the added tokens, if the library
        divides texts at them before all else. ``literal``: it finds no added token in a text that does not spell one."""
        self._literal = literal
        self._dividing = dividing or {}
        self._divide = divide
        self._added = any_of(added_tokens)
        self._encode = encode
        self._ids: dict[str, tuple[int, ...]] = {}  # the garbage collector skips tuples of integers, and this dictionary

    def encode(self, text: str, *, parses: bool = False) -> list[int] | None:
        """Return the ids of ``text``; None if the library must encode it. ``parses``: added tokens in it are tokens."""
        match = self._added.search(text)
        if parses and not self._literal:
            return None
        if match is None:
            return self._encode_text(text)
        ids: list[int] = []
        start = 0
        while match is not None:
            id, before = self._dividing.get(match[0]) if parses else None, self._encode_text(text[start : match.start()])
            if id is None or before is None:
                return None
            ids += before
            ids.append(id)
            start = match.end()
            match = self._added.search(text, start)
        rest = self._encode_text(text[start:])
        return None if rest is None else ids + rest

    def _encode_text(self, text: str) -> list[int] | None:
        """Return the ids of a text without added tokens; None if the library must encode it."""
        pieces = self._divide(text)
        if pieces is None:
            return None
        known = self._ids
        if new := [piece for piece in pieces if piece not in known]:
            new = list(set(new))
            encoded = dict(zip(new, map(tuple, self._encode(new)), strict=True))
            known |= encoded
            ids = list(chain.from_iterable(map(known.__getitem__, pieces)))
            self._forget(encoded)
            return ids
        return list(chain.from_iterable(map(known.__getitem__, pieces)))

    def _forget(self, encoded: dict[str, tuple[int, ...]]) -> None:
        """Forget the long ones of pieces that were just added, and the earlier pieces if there are too many."""
        for piece in encoded:
            if len(piece) > MAX_PIECE_CHARACTERS:
                del self._ids[piece]
        if len(self._ids) > MAX_PIECES:
            latest = [piece for piece in encoded if piece in self._ids][:MAX_PIECES]
            kept = {piece: encoded[piece] for piece in latest}
            self._ids.clear()
            self._ids |= kept


def by_expression(expression: str) -> Divide:
    """Divide as the pre-tokeniser of a byte-level BPE tokeniser."""
    findall, unsafe = re.compile(_translated(expression)).findall, _unsafe()

    def divide(text: str) -> list[str] | None:
        if not text.isascii() and unsafe.search(text):
            return None
        pieces: list[str] = findall(text)
        return pieces if len("".join(pieces)) == len(text) else None

    return divide


def by_words(document: dict[str, Any]) -> Divide | None:
    """Divide at whitespace, and as BERT around each punctuation mark. None for another tokeniser than those that the module's
    docstring names, and for one with added tokens that are found in normalised texts.

    BERT's normaliser reads one character at a time; combining marks and removed characters stay in their word. SentencePiece's
    reads a character with the marks behind it, which may stand behind a space.
    """
    normalizers, splits = _steps(document.get("normalizer")), _steps(document.get("pre_tokenizer"))
    if any(token.get("normalized") and not token["special"] for token in document.get("added_tokens") or []):
        return None
    kinds, words, unsafe = [step["type"] for step in splits], re.compile(r"[^ \t\n\r]+").findall, _unsafe()
    if kinds == ["BertPreTokenizer"] and all(step["type"] == "BertNormalizer" for step in normalizers):
        plain, marks = re.compile(r"[ -~\t\n\r]*"), re.compile(r"[A-Za-z0-9]+|[^ \t\n\rA-Za-z0-9]").findall
        return lambda text: marks(text) if plain.fullmatch(text) else words(text)
    last = splits[-1] if kinds == ["WhitespaceSplit", "Metaspace"] else {}
    prepends = last.get("prepend_scheme", "always" if last.get("add_prefix_space") else "never") == "always"
    if prepends and all(map(_is_local, normalizers)):
        return lambda text: words(text) if text.isascii() or not unsafe.search(text) else None
    return None


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps in a step of a ``tokenizer.json``."""
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [found for each in inner for found in _steps(each)] if step["type"] == "Sequence" else [step]


_LOCAL = {"Precompiled", "Strip", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents"}


def _is_local(normalizer: dict[str, Any]) -> bool:
    """Whether a normaliser changes characters of :func:`_safe_characters` one by one, or whitespace between words."""
    return normalizer["type"] in _LOCAL or (normalizer["type"] == "Replace" and normalizer["pattern"] == {"Regex": " {2,}"})


def expression_of(document: dict[str, Any]) -> str | None:
    """Return the expression that divides texts in a ``tokenizer.json`` which has safe cuts; None if more than one step divides."""
    pre_tokenizer = document["pre_tokenizer"]
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return GPT2
    return str(steps[0]["pattern"]["Regex"]) if kinds == ["Split", "ByteLevel"] else None


@cache
def _safe_characters() -> list[str]:
    """Return the characters of :data:`_BLOCKS` that every version of Unicode since 3.2 classifies alike, that NFC keeps and
    composes with nothing, and that are no other case of an ASCII letter."""
    old = unicodedata.ucd_3_2_0
    chars = [chr(code) for block in _BLOCKS for code in block]
    return [char for char in chars if old.category(char) == unicodedata.category(char) and _is_safe(char)]


def _is_safe(char: str) -> bool:
    if unicodedata.category(char)[0] in "MC" and not char.isascii():
        return False
    folded = {char.lower(), char.upper(), char.casefold()}
    return char.isascii() or (unicodedata.normalize("NFC", char) == char and not any(map(str.isascii, folded)))


@cache
def _unsafe() -> re.Pattern[str]:
    return re.compile(f"[^{_ranges(_safe_characters())}]")


@cache
def _members(name: str) -> str:
    """Return the members of a class of characters, as they are written inside brackets. ``name``: as in ``\\p{L}``, or ``s``."""
    if name == "s":
        return _ranges([char for char in _safe_characters() if char.isspace() and char not in "\x1c\x1d\x1e\x1f"])
    return _ranges([char for char in _safe_characters() if unicodedata.category(char).startswith(name)])


def _ranges(chars: list[str]) -> str:
    """Return ascending characters as ranges of a class."""
    ranges: list[list[int]] = []
    for code in map(ord, chars):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def _translated(expression: str) -> str:
    """Return an expression of ``cuts.py`` for Python's ``re``, which has no ``\\p{...}`` and another ``\\s``."""
    parts, start, inside = [], 0, False
    for match in _CLASSES.finditer(expression):
        before = expression[start : match.start()]
        inside = _is_inside(before, inside)
        parts += [before, _written(match, inside=inside)]
        start = match.end()
    return "".join([*parts, expression[start:]])


def _is_inside(text: str, inside: bool) -> bool:
    """Whether brackets are open behind ``text``."""
    opened, closed = text.rfind("["), text.rfind("]")
    return inside if opened == closed else opened > closed


def _written(match: re.Match[str], *, inside: bool) -> str:
    name = match[1] or match[2]
    if inside:
        assert name != "S", "no known expression has this inside brackets"
        return _members(name) or ""
    members = _members(name.lower() if name == "S" else name)
    return f"[{'^' * (name == 'S')}{members}]" if members else "(?!)"


UNBOUNDED = 2**31
SLICE_CHARACTERS = 1 << 16
"""Characters of a slice of a long text, which takes some 50 ms and 20 MiB."""
CHARACTERS_PER_TOKEN = 8
"""Characters for each token that are tried first where a text is cut; more than a token of prose has."""
BEYOND_CUT = 64
"""Tokens beyond a cut that are tokenised too; a word of WordPiece has at most 100 characters."""
_UNSAFE_MARGIN = 8
"""A text without safe cuts is cut anywhere for counting. It is refused if the count exceeds the limit by more than one part in this
number; the margin covers the tokens next to the cuts, which may differ."""


class Tokenizer(Vocabulary):
    """Encodes and decodes. It is not safe to use from several threads."""

    def __init__(self, library: tokenizers.Tokenizer, document: dict[str, Any] | None = None) -> None:
        """Take over ``library``, which was created from ``document``. Raises :class:`TokenizerError` if it cannot be used."""
        document = document or msgspec.json.decode(library.to_str().encode())
        library.no_truncation()
        library.no_padding()
        if not library.get_vocab_size():
            raise TokenizerError("tokenizer.json has no tokens")
        added: list[dict[str, Any]] = document.get("added_tokens") or []
        spelling = spelling_of(document.get("decoder"))
        super().__init__(table_of(library, added, spelling))
        self._library = library
        self._named = [token["id"] for token in added if token["special"] or CONTROL_TOKEN.fullmatch(token["content"])]
        self.controls = ControlTokens(added)
        """The control tokens, for texts that must not contain any."""
        self._added = {token["content"]: token["id"] for token in added}
        self._sentinels = {flags: _sentinel(*flags) for flags in self.controls.flags}
        self._pieces: Pieces | None = None
        marks = [_sentinel(lstrip=False, rstrip=False) for _ in range(2)]
        beyond = self._add_beyond([*self._sentinels.values(), *marks])
        self.image_marks = [mark.content for mark in marks]
        """Texts that stand for images, of a query and of an item. No text of a client has them."""
        self.image_mark_ids = [library.token_to_id(mark) or 0 for mark in self.image_marks]
        self._sentinel_ids = beyond.difference(self.image_mark_ids)
        affixes = self._find_affixes()
        self.affixes = affixes or ([], [])
        """Special tokens that are added before and after every text."""
        self._cuts = cuts_of(document, [*added, *map(_described, [*self._sentinels.values(), *marks])]) if affixes else None
        self.table = msgspec.structs.replace(self.table, cuttable=self._cuts is not None)
        expression = expression_of(document) if self._cuts else None
        divide = by_words(document) if expression is None else by_expression(expression)
        contents = [*(token["content"] for token in added), *(token.content for token in [*self._sentinels.values(), *marks])]
        dividing = self._added if all(map(_divides, added)) else None
        if divide is not None:
            literal = expression is not None or not any(token.get("normalized") for token in added)
            self._pieces = Pieces(divide, contents, self._by_library, dividing, literal=literal)

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> Tokenizer:
        """Load an engine's tokeniser files. Raises :class:`TokenizerError`."""
        try:
            document = msgspec.json.decode(files.tokenizer_json)
            library = tokenizers.Tokenizer.from_buffer(_all_controls_special(document, files.tokenizer_json))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        return cls(library, document)

    def grammar_compiler(self) -> GrammarCompiler | None:
        """Return a compiler of grammars for this vocabulary; making it for 150,000 tokens takes a third of a second. None if the
        library cannot use the vocabulary."""
        tokens = [self.table.spelled[begin:end] for begin, end in pairwise([0, *self._ends])]

        def encode(text: str) -> list[int]:
            return self.encode(text, add_special_tokens=False, parse_special_tokens=False)

        try:
            return GrammarCompiler(tokens, self._named, encode)
        except ValueError:
            return None

    def encode(
        self, text: str, *, limit: int = UNBOUNDED, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of one text. With ``parse_special_tokens`` False, spelled control tokens are plain text.

        Raises :class:`TooManyTokens` for more than ``limit`` ids, without encoding all of a long text.
        """
        self._library.encode_special_tokens = not parse_special_tokens
        if len(text) <= SLICE_CHARACTERS:
            ids = self._whole(text, add_special_tokens)
        else:
            ids = self._sliced(text, limit, add_special_tokens)
        if len(ids) > limit:
            raise TooManyTokens(len(ids), exact=True)
        return ids

    def encode_marked(self, text: Marked, *, limit: int = UNBOUNDED, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a rendered chat template: marked control tokens, which come from users, are plain text, and unmarked
        ones are control tokens. Raises :class:`TooManyTokens`."""
        if not text.mark:
            return self.encode(text.text, limit=limit, add_special_tokens=add_special_tokens)
        plain, own = self.lift(text)
        ids = self.encode(plain, limit=limit, add_special_tokens=add_special_tokens, parse_special_tokens=False)
        return self.restore(ids, own)

    def spelled(self, ids: list[int]) -> list[str]:
        """Return the spelling of each token in ``tokenizer.json``, such as ``Ġred`` or ``<0xE2>``; empty for an id without one."""
        known: dict[int, str] = {id: self._library.id_to_token(id) or "" for id in set(ids)}
        return [known[id] for id in ids]

    def token_of(self, text: str) -> int | None:
        """Return the id of the added token with exactly the spelling ``text``, such as ``<think>``; None if there is none."""
        return self._added.get(text)

    def grammar_token_of(self, text: str) -> int | None:
        """Return the id of ``text`` if it is a control token in grammars: an added token that is special, or in angle brackets. It
        never matches text there."""
        id = self._added.get(text)
        return id if id in self.special_ids or (text.startswith("<") and text.endswith(">")) else None

    def lift(self, text: Marked) -> tuple[str, list[int]]:
        """Return a text to encode with ``parse_special_tokens`` False, and the ids for :meth:`restore`."""
        return self.controls.lift(text, {flags: token.content for flags, token in self._sentinels.items()})

    def restore(self, ids: list[int], own: list[int]) -> list[int]:
        """Return ``ids`` with the template's control tokens ``own`` in place of the sentinels of :meth:`lift`."""
        following = iter(own)
        return [next(following) if id in self._sentinel_ids else id for id in ids]

    def id_of(self, token: str) -> int | None:
        """Return the id of the token with this spelling in ``tokenizer.json``; None if there is none."""
        return self._library.token_to_id(token)

    def kept_places(self, ids: list[int]) -> int:
        """Return the number of sentinels that :meth:`restore` would replace."""
        return sum(id in self._sentinel_ids for id in ids)

    def cut(self, text: str, *, last: bool) -> int | None:
        """Return the last, or the first, safe cut of ``text``, whatever precedes or follows it; None if there is none."""
        if self._cuts is None:
            return None
        return self._cuts.last(text) if last else self._cuts.between(text, 1, len(text))

    def encode_ends(self, text: str, most: int, side: str) -> tuple[list[int], bool]:
        """Return at most ``most`` ids of ``text``, with control tokens as plain text, and whether it has more. They are the first
        ones, as transformers cuts them, or those of another ``side`` (left, middle). The time depends on ``most`` and not on the
        length of the text; it is tokenised some way beyond the cut, because words are tokenised whole."""
        self._library.encode_special_tokens = True
        size = (most + BEYOND_CUT) * CHARACTERS_PER_TOKEN
        while True:
            near = text[max(0, len(text) - size) :] if side == "left" else text[:size]
            ids = self._whole(near, False)
            if len(near) == len(text) or len(ids) > most + BEYOND_CUT:
                break
            size *= 2
        if len(ids) <= most:
            return ids, False
        if side == "middle":
            end = self.encode_ends(text, most // 2, "left")[0] if most > 1 else []
            return [*ids[: most - len(end)], *end], True
        return ids[len(ids) - most :] if side == "left" else ids[:most], True

    @cached_property
    def pair_affixes(self) -> tuple[list[int], list[int], list[int], bool]:
        """Special tokens before, between and after a pair of texts, and whether the second text has a token type of its own."""
        encoding = self._library.encode("a", "b")
        places = encoding.sequence_ids
        first, second = ([place for place, each in enumerate(places) if each == number] for number in (0, 1))
        if not first or not second:
            return ([], [], [], False)
        ids, typed = encoding.ids, encoding.type_ids[second[0]] != encoding.type_ids[first[0]]
        return ids[: first[0]], ids[first[-1] + 1 : second[0]], ids[second[-1] + 1 :], typed

    def shorten(self, text: str, most: int, *, left: bool = False) -> tuple[str, bool]:
        """Return ``text`` cut to at most ``most`` tokens, with control tokens as plain text, and whether it was cut.

        It is cut at its end, or at its beginning with ``left``, and never inside a character. The tokens of a text next to other
        text may differ by a few from those counted here. The time depends on ``most`` and not on the length of the text.
        """
        self._library.encode_special_tokens = True
        size = (most + 1) * CHARACTERS_PER_TOKEN
        ids = self._pieces.encode(text) if self._pieces and len(text) <= size else None
        if ids is not None and len(ids) <= most:
            return text, False
        while True:
            near = text[max(0, len(text) - size) :] if left else text[:size]
            offsets = self._library.encode(near, add_special_tokens=False).offsets
            if len(offsets) > most or len(near) == len(text):
                break
            size *= 2
        if len(offsets) <= most:
            return text, False
        if most == 0:
            return "", True
        if left:
            # Tokens of one character share its offsets, so the cut goes behind a character that would be divided.
            begin = offsets[-most][0]
            return near[begin if offsets[-most - 1][1] <= begin else offsets[-most][1] :], True
        end = offsets[most - 1][1]
        return near[: min(end, offsets[most][0])], True

    def cut_middle(self, text: str, most: int) -> tuple[str, bool]:
        """Return ``text`` without its middle, so that at most ``most`` tokens are left, and whether it was cut.

        Both ends keep about half of the tokens, and are joined without anything between. They are cut as :meth:`shorten` cuts.
        """
        begin, cut = self.shorten(text, most)
        if not cut:
            return text, False
        room = most
        while room > 0:
            begin, _ = self.shorten(text, room - room // 2)
            end, _ = self.shorten(text[len(begin) :], room // 2, left=True)
            joined = begin + end
            self._library.encode_special_tokens = True
            if (excess := len(self._whole(joined, False)) - most) <= 0:
                return joined, True
            room -= excess  # tokens at the seam, and of ends that are divided otherwise than in the text
        return "", True

    def _whole(self, text: str, add_special_tokens: bool) -> list[int]:
        ids, parses = None, not self._library.encode_special_tokens
        if self._pieces and len(text) <= 2 * SLICE_CHARACTERS:
            ids = self._pieces.encode(text, parses=parses)
        if ids is None:
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        begin, end = self.affixes if add_special_tokens else ([], [])
        return [*begin, *ids, *end] if begin or end else ids

    def _by_library(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False)]

    def _sliced(self, text: str, limit: int, add_special_tokens: bool) -> list[int]:
        """Encode a long text in slices; see :meth:`encode`."""
        ids: list[int] = []
        count, safe, start = 0, True, 0
        while start < len(text):
            stop = self._slice_end(text, start)
            if stop is None:
                stop, safe = start + SLICE_CHARACTERS, False
            part = self._whole(text[start:stop], False)
            count += len(part)
            if count > limit + (0 if safe else limit // _UNSAFE_MARGIN):
                raise TooManyTokens(limit, exact=False)
            ids += part if safe else []
            start = stop
        if not safe:
            return self._whole(text, add_special_tokens)
        begin, end = self.affixes if add_special_tokens else ([], [])
        return [*begin, *ids, *end]

    def _slice_end(self, text: str, begin: int) -> int | None:
        """Return the end of the slice at ``begin``; None if there is no safe cut."""
        least = begin + SLICE_CHARACTERS
        if least >= len(text):
            return len(text)
        return self._cuts.between(text, least, least + SLICE_CHARACTERS) if self._cuts else None

    def _add_beyond(self, tokens: list[tokenizers.AddedToken]) -> frozenset[int]:
        """Add ``tokens`` with ids beyond the vocabulary. The library assigns ids from the token count, which may be in use."""
        first = _sentinel(lstrip=False, rstrip=False)
        self._library.add_tokens([first])
        used = max(0, self.vocab_size - (self._library.token_to_id(first.content) or 0))
        self._library.add_tokens([_sentinel(lstrip=False, rstrip=False) for _ in range(used)])
        self._library.add_tokens(tokens)
        return frozenset(id for token in tokens if (id := self._library.token_to_id(token.content)) is not None)

    def _find_affixes(self) -> tuple[list[int], list[int]] | None:
        """Return the tokens added before and after every text; None if they cannot be told apart from the text."""
        body, whole = self._whole("a", False), self._whole("a", True)
        places = [place for place in range(len(whole) - len(body) + 1) if whole[place : place + len(body)] == body]
        return (whole[: places[0]], whole[places[0] + len(body) :]) if len(places) == 1 else None


def _sentinel(lstrip: bool, rstrip: bool) -> tokenizers.AddedToken:
    """Return a token with a secret spelling, which replaces a control token while the library treats these as plain text."""
    return tokenizers.AddedToken(f"\ue000{secrets.token_hex(16)}\ue001", lstrip=lstrip, rstrip=rstrip, normalized=False)


def _divides(token: dict[str, Any]) -> bool:
    """Whether the library divides texts at an added token exactly where it is spelled, before it normalises them."""
    return not any(token.get(name) for name in ("lstrip", "rstrip", "normalized", "single_word"))


def _described(token: tokenizers.AddedToken) -> dict[str, Any]:
    """Return an added token in the format of ``tokenizer.json``."""
    return {"content": token.content, "lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}


def _all_controls_special(document: dict[str, Any], given: bytes) -> bytes:
    """Return ``tokenizer.json`` with all control tokens marked as special, so that the library can treat them as plain text."""
    unmarked = ControlTokens(document.get("added_tokens") or []).unmarked
    if not unmarked:
        return given
    added = [token | {"special": token["special"] or token["content"] in unmarked} for token in document["added_tokens"]]
    return msgspec.json.encode(document | {"added_tokens": added})
