"""The tokeniser, chat template and preset of one model for short texts, on the event loop.

A round trip to a worker costs several times the work for a short text: both processes sleep before it, and find cold caches. So the
event loop reads short texts by itself, as long as their work is bounded: the template is metered (``metered_template.py``), and a
text is divided by a known expression into pieces whose ids are known or computed from compact tables (``merges.py``). It raises
:class:`NeedsWorker` for all others. Ids are exactly those of :class:`Tokenizer`.

A preset only joins texts, so its length bounds its work. All prompts of a request share the allowance of the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import tokenizers

from gateway.presets.fitted import Fitted
from gateway.presets.preset import Preset
from gateway.text.bounds import NeedsWorker, TooManyTokens
from gateway.text.chat_template import ChatTemplate
from gateway.text.cuts import Cuts
from gateway.text.merges import Merges, SmallTable
from gateway.text.metered_template import MeteredTemplate
from gateway.text.pieces import Pieces
from gateway.text.preset_template import PresetTemplate
from gateway.text.special import ControlTokens, Marked
from gateway.text.tokenizer import CHARACTERS_PER_TOKEN, UNBOUNDED, Tokenizer, divides
from gateway.text.vocabulary import Vocabulary, VocabularyTable

MAX_CHARACTERS = 6 << 10
"""Most characters that are encoded for one request, which takes at most some 1 ms."""
TEXT_CHARACTERS = 64
"""Characters that take as long as a text takes besides its own."""
MAX_PIECE_CHARACTERS = 96
MAX_NEW_CHARACTERS = 256
"""Longest piece, and most characters of all pieces of a request, that are encoded because their ids are not known."""
MAX_PRESET_CHARACTERS = 4 << 10
"""Most characters of a preset's texts, which the event loop may copy for each document."""


class SmallTokenizer(Tokenizer):
    """Encodes short texts without the ``tokenizers`` library. Every method may raise :class:`NeedsWorker`."""

    def __init__(self, table: VocabularyTable, small: SmallTable) -> None:
        Vocabulary.__init__(self, table)
        self._library = cast(tokenizers.Tokenizer, _Absent())
        self.controls = ControlTokens(small.added_tokens)
        self._added = {token["content"]: token["id"] for token in small.added_tokens}
        self.characters_per_token = small.characters_per_token
        self.affixes = (small.begin, small.end)
        self.image_marks = []
        self._cuts = Cuts(small.added_tokens)
        self._merges = Merges(small.merges, self.token_bytes)
        dividing = self._added if all(map(divides, small.added_tokens)) else None
        self._pieces = Pieces(small.expression, self._added, self._encode_pieces, dividing)
        self.begin()

    def begin(self) -> None:
        """Begin a request."""
        self._left, self._new_left = MAX_CHARACTERS, MAX_NEW_CHARACTERS

    def encode_marked(self, text: Marked, *, limit: int = UNBOUNDED, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a rendered chat template in which users wrote no part of a control token."""
        if text.mark:
            raise NeedsWorker
        return super().encode_marked(text, limit=limit, add_special_tokens=add_special_tokens)

    def check_room(self, texts: int, characters: int) -> None:
        """Raise :class:`NeedsWorker` if ``texts`` texts with ``characters`` characters in all exceed what this request may still
        encode."""
        if characters + texts * TEXT_CHARACTERS > self._left:
            raise NeedsWorker

    def shorten(self, text: str, most: int, *, left: bool = False) -> tuple[str, bool]:  # noqa: ARG002 - as in the base class
        """Return ``text`` and False if it has at most ``most`` tokens."""
        if len(text) > (most + 1) * CHARACTERS_PER_TOKEN or len(self._encode(text, UNBOUNDED, False, False)) > most:
            raise NeedsWorker
        return text, False

    def _encode(self, text: str, limit: int, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        assert self._pieces is not None
        self._left -= len(text) + TEXT_CHARACTERS
        ids = self._pieces.encode(text, parses=parse_special_tokens) if self._left >= 0 else None
        if ids is None:
            raise NeedsWorker
        begin, end = self.affixes if add_special_tokens else ([], [])
        ids = [*begin, *ids, *end]
        if len(ids) > limit:
            raise TooManyTokens(len(ids), exact=True)
        return ids

    def _encode_pieces(self, pieces: list[str]) -> list[list[int]]:
        """Return the ids of new pieces. Those of a text with too many are kept up to the bound, so that a later text has fewer."""
        assert self._pieces is not None
        found: dict[str, list[int]] = {}
        for piece in pieces:
            self._new_left -= len(piece)
            if self._new_left < 0 or len(piece) > MAX_PIECE_CHARACTERS:
                self._pieces.keep(found)
                raise NeedsWorker
            found[piece] = self._merges.encode(piece.encode())
        return list(found.values())


class _Absent:
    def __getattr__(self, name: str) -> NoReturn:
        raise NeedsWorker

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise NeedsWorker


class _WorkersTemplate(ChatTemplate):
    """A chat template that the event loop must not run."""

    bounded = True

    def _run(self, messages: Any, variables: Mapping[str, Any]) -> NoReturn:  # noqa: ARG002 - as in the base class
        raise NeedsWorker

    def reads(self, name: str) -> NoReturn:  # noqa: ARG002 - as in the base class
        raise NeedsWorker


@dataclass(frozen=True)
class SmallTexts:
    """Tokeniser, chat template and preset of one model for short texts."""

    tokenizer: SmallTokenizer
    template: ChatTemplate
    preset: PresetTemplate | None
    """None if there is none, or if it is long."""

    def begin(self) -> None:
        """Begin a request, which may use the whole allowance of the tokeniser and of the template."""
        self.tokenizer.begin()
        if isinstance(self.template, MeteredTemplate):
            self.template.begin()

    @classmethod
    def of(cls, table: VocabularyTable, source: str | None, special_tokens: Mapping[str, str]) -> SmallTexts | None:
        """Create from what the fork server sent; None if all texts are left to workers. ``source``: the chat template."""
        if table.small is None:
            return None
        template: ChatTemplate = _WorkersTemplate(source, special_tokens)
        if table.template is not None and source is not None:
            template = MeteredTemplate(source, special_tokens, table.template)
        tokenizer = SmallTokenizer(table, table.small)
        return cls(tokenizer, template, _preset_of(table.fitted, tokenizer))


def _preset_of(fitted: Fitted | None, tokenizer: SmallTokenizer) -> PresetTemplate | None:
    if fitted is None or _characters(fitted.preset) > MAX_PRESET_CHARACTERS:
        return None
    return PresetTemplate(fitted.preset, tokenizer, fitted)


def _characters(preset: Preset) -> int:
    return sum(map(len, (*preset.template, *preset.instructed, preset.instruction, preset.label_prefix)))
