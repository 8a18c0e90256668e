"""A model's tokeniser: converts text to exact token ids. The fork server and worker processes have one.

Common texts are encoded piece by piece (``pieces.py``), others by the ``tokenizers`` library, one text at a time. Long texts are
encoded in slices at safe cuts, so that a text that is too long for a model is refused early, with memory and time bounded by the
model's context.
"""

from __future__ import annotations

import secrets
from itertools import pairwise
from typing import Any

import msgspec
import tokenizers

from engine.wire import CONTROL_TOKEN, TokenizerFiles
from gateway.output.compile import GrammarCompiler
from gateway.text.bounds import TooManyTokens
from gateway.text.cuts import cuts_of
from gateway.text.pieces import Pieces, expression_of
from gateway.text.sizes import characters_per_token
from gateway.text.special import ControlTokens, Marked
from gateway.text.spelling import TokenizerError, spelling_of
from gateway.text.vocabulary import Vocabulary
from gateway.text.vocabulary_table import table_of

UNBOUNDED = 2**31
SLICE_CHARACTERS = 1 << 16
"""Characters of a slice of a long text, which takes some 50 ms and 20 MiB."""
CHARACTERS_PER_TOKEN = 8
"""Characters for each token that are tried first where a text is cut; more than a token of prose has."""
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
        self.characters_per_token = characters_per_token(document, spelling)
        """Most characters that one token represents; None if there is no bound."""
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
        contents = [*(token["content"] for token in added), *(token.content for token in [*self._sentinels.values(), *marks])]
        dividing = self._added if all(map(_divides, added)) else None
        if expression:
            self._pieces = Pieces(expression, contents, self._by_library, dividing)

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
            return self._encode(text, UNBOUNDED, add_special_tokens=False, parse_special_tokens=False)

        try:
            return GrammarCompiler(tokens, self._named, encode)
        except ValueError:
            return None

    def least_tokens(self, characters: int) -> int:
        """Return a lower bound on the tokens of a text of ``characters``."""
        return -(-characters // self.characters_per_token) if self.characters_per_token else 0

    def encode(
        self, text: str, *, limit: int = UNBOUNDED, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of one text. With ``parse_special_tokens`` False, spelled control tokens are plain text.

        Raises :class:`TooManyTokens` for more than ``limit`` ids, without encoding all of a long text.
        """
        self._check_length(text, limit)
        return self._encode(text, limit, add_special_tokens, parse_special_tokens)

    def encode_marked(self, text: Marked, *, limit: int = UNBOUNDED, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a rendered chat template: marked control tokens, which come from users, are plain text, and unmarked
        ones are control tokens. Raises :class:`TooManyTokens`."""
        if not text.mark:
            return self.encode(text.text, limit=limit, add_special_tokens=add_special_tokens)
        self._check_length(text.text, limit)
        plain, own = self.lift(text)
        return self.restore(self._encode(plain, limit, add_special_tokens, parse_special_tokens=False), own)

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

    def kept_places(self, ids: list[int]) -> int:
        """Return the number of sentinels that :meth:`restore` would replace."""
        return sum(id in self._sentinel_ids for id in ids)

    def cut(self, text: str, *, last: bool) -> int | None:
        """Return the last, or the first, safe cut of ``text``, whatever precedes or follows it; None if there is none."""
        if self._cuts is None:
            return None
        return self._cuts.last(text) if last else self._cuts.first(text)

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

    def _check_length(self, text: str, limit: int) -> None:
        if self.least_tokens(len(text)) > limit:
            raise TooManyTokens(limit, exact=False)

    def _encode(self, text: str, limit: int, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        self._library.encode_special_tokens = not parse_special_tokens
        if len(text) <= SLICE_CHARACTERS:
            ids = self._whole(text, add_special_tokens)
        else:
            ids = self._sliced(text, limit, add_special_tokens)
        if len(ids) > limit:
            raise TooManyTokens(len(ids), exact=True)
        return ids

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
