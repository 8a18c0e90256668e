"""Registered items: their template, the seam between an item and a query, and the packed form of an item in a store.

=========  ==================================================================================
bytes      meaning
=========  ==================================================================================
16         digest of the content: equal items have equal digests, in every catalogue
4          number of token ids
4 × ids    token ids, in the machine's byte order
the rest   *tail*: the last characters of the item, as UTF-8, whose tokens depend on the query
=========  ==================================================================================
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from yardstick_llm.gateway.presets.preset import Preset, fill
from yardstick_llm.gateway.text.prepared import ID_BYTES, Bounds, PlacedIds, TooManyTokens
from yardstick_llm.gateway.text.prompts import common_suffix
from yardstick_llm.gateway.text.tokenizer import Tokenizer

ITEM, QUERY = "{item}", "{query}"


class Template(msgspec.Struct, frozen=True, array_like=True):
    """The form of a catalogue's prompts."""

    pieces: tuple[str, ...] = (ITEM + QUERY,)
    add_special_tokens: bool = True
    """Add the tokens that the tokeniser puts around every text."""
    max_item_tokens: int | None = None
    """Longer items are cut to this many tokens. None: never cut."""
    max_query_tokens: int | None = None
    """Longer queries are cut to this many tokens. None: never cut."""


class TemplateError(ValueError):
    """A template cannot be used. The message says why."""


def template_of(preset: Preset) -> Template:
    """Return the template of a catalogue with the prompts of ``preset`` and its default instruction. Raises
    :class:`TemplateError`."""
    if not preset.item_first:
        problem = f"the preset {preset.name!r} puts the query before the document, so no item can be computed before its query"
        raise TemplateError(f"{problem}; give a `template`, or use a model that was trained with the document first")
    values = {"document": ITEM, "query": QUERY, "instruction": preset.instruction}
    return Template(
        tuple(fill(piece, values) for piece in preset.template),
        preset.add_special_tokens,
        preset.max_tokens_per_doc,
        preset.max_tokens_per_query,
    )


class Seams(NamedTuple):
    """The tokens of a query behind items: those after each distinct tail, and those that all prompts end with."""

    rows: list[list[int]]
    suffix: list[int]
    cut: bool
    """Whether the query was cut."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An item: its tokens up to the tail, and the tail."""

    ids: list[int]
    tail: str
    tokens: int
    """Number of tokens of both."""


class Frame:
    """A template, divided for one tokeniser. It is not safe to use from several threads, like the tokeniser."""

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        """Raises :class:`TemplateError`."""
        self._tokenizer = tokenizer
        self._max_item, self._max_query = template.max_item_tokens, template.max_query_tokens
        parts = [part for piece in template.pieces for part in tokenizer.controls.divide(piece)]
        item, query = _place(parts, ITEM), _place(parts, QUERY)
        begin, end = tokenizer.affixes if template.add_special_tokens else ([], [])
        text = parts[item]
        assert isinstance(text, str)
        self._left, _, rest = text.partition(ITEM)
        self._before = [*begin, *self._encode_all(parts[:item])]
        self._after = [*self._encode_all(parts[query + 1 :]), *end]
        self._joined = item == query
        self._between: list[int] = []
        if self._joined:
            if QUERY not in rest:
                raise TemplateError("`{query}` must come after `{item}`")
            self._middle, _, self._query_right = rest.partition(QUERY)
            self._query_left = ""
        elif query < item:
            raise TemplateError("`{query}` must come after `{item}`")
        else:
            self._middle = rest
            self._between = self._encode_all(parts[item + 1 : query])
            asked = parts[query]
            assert isinstance(asked, str)
            self._query_left, _, self._query_right = asked.partition(QUERY)

    def check(self, template: Template) -> None:
        """Check that the parts' tokens are those of each whole piece. Raises :class:`TemplateError`."""
        controls = self._tokenizer.controls
        for piece in template.pieces:
            parts = controls.divide(piece)
            if any(isinstance(part, int) and controls.strips(part) for part in parts):
                raise TemplateError("a control token in it absorbs whitespace, which is not supported")
            if self._encode_all(parts) != self._tokenizer.encode(piece, add_special_tokens=False):
                raise TemplateError("the tokeniser does not keep its control tokens apart from text")

    @property
    def around_query(self) -> int:
        """Number of tokens of the template around the query, apart from tokens that the query joins."""
        return len(self._encode(self._query_left)) + len(self._encode(self._query_right)) + len(self._after)

    @property
    def around_item(self) -> int:
        """Number of characters that are tokenised with each item."""
        return len(self._left) + len(self._middle)

    def store(self, items: Sequence[str | list[int]], limit: int) -> list[Stored]:
        """Tokenise items. Token ids stand as they are; the template's text next to them is tokenised by itself. Raises
        :class:`ItemTooLong` for an item with more than ``limit`` tokens."""
        stored, checked = [], False
        for index, item in enumerate(items):
            item = self._shortened(item, self._max_item)[0]
            try:
                if isinstance(item, list):
                    ids = [*self._encode(self._left, limit), *item, *self._encode(self._middle, limit)]
                    stored.append(self._whole(ids))
                elif self._joined:
                    stored.append(self._up_to_tail(self._left + item + self._middle, limit, check=not checked))
                    checked = True
                else:
                    ids = self._encode(self._left + item + self._middle, limit)
                    stored.append(self._whole(ids))
            except TooManyTokens as error:
                raise ItemTooLong(index, error) from None
            if stored[-1].tokens > limit:
                raise ItemTooLong(index, TooManyTokens(stored[-1].tokens, exact=True))
        return stored

    def seams(self, tails: Sequence[str], query: str | list[int], limit: int, bounds: Bounds) -> Seams:
        """Return the tokens of ``query`` behind each of ``tails``, which are distinct. Raises :class:`TooManyTokens`, and
        :class:`InvalidRequest` for more than ``bounds``."""
        query, shortened = self._shortened(query, self._max_query)
        if isinstance(query, list):
            shared = [*self._encode(self._query_left, limit), *query, *self._encode(self._query_right, limit), *self._after]
            return Seams([self._encode(tail, limit) for tail in tails], shared, shortened)
        text = self._query_left + query + self._query_right
        if not self._joined or not tails:
            return Seams([[] for _ in tails], [*self._encode(text, limit), *self._after], shortened)
        cut = self._tokenizer.cut(text, last=False)
        if cut is None or not self._exact(tails[0] + text, len(tails[0]) + cut, limit):
            cut = len(text)
        characters = len(text) + sum(map(len, tails)) + cut * len(tails)
        bounds.check("max_request_characters", characters, "characters that must be tokenised", "query")
        rest = [*self._encode(text[cut:], limit), *self._after]
        rows = [self._encode(tail + text[:cut], limit) for tail in tails]
        # Tokens of the query that all rows end with belong to the suffix, so that an item's own tokens are what engines keep.
        shared_length = common_suffix(rows, len(self._encode(text[:cut], limit)))
        kept = [row[: len(row) - shared_length] for row in rows]
        return Seams(kept, [*rows[0][len(rows[0]) - shared_length :], *rest], shortened)

    def _shortened(self, text: str | list[int], most: int | None) -> tuple[str | list[int], bool]:
        """Return a text with at most ``most`` tokens, and whether it was cut."""
        if most is None:
            return text, False
        if isinstance(text, list):
            return text[:most], len(text) > most
        return self._tokenizer.shorten(text, most)

    def _up_to_tail(self, text: str, limit: int, *, check: bool) -> Stored:
        """Divide an item at its last safe cut. ``check``: compare with the tokens of the whole text."""
        cut = self._tokenizer.cut(text, last=True)
        if cut is None or (check and not self._exact(text, cut, limit)):
            cut = 0
        ids = [*self._before, *self._encode(text[:cut], limit)]
        return Stored(ids, text[cut:], len(ids) + len(self._encode(text[cut:], limit)))

    def _whole(self, ids: list[int]) -> Stored:
        """Return an item whose tokens do not depend on the query. ``ids``: its own, with the text around it."""
        whole = [*self._before, *ids, *self._between]
        return Stored(whole, "", len(whole))

    def _exact(self, text: str, cut: int, limit: int) -> bool:
        """Whether the parts of ``text`` have the tokens of the whole. Raises :class:`TooManyTokens`."""
        whole = self._encode(text, limit)
        return [*self._encode(text[:cut]), *self._encode(text[cut:])] == whole

    def _encode(self, text: str, limit: int = 1 << 31) -> list[int]:
        """Return the ids of plain text."""
        return self._tokenizer.encode(text, limit=limit, add_special_tokens=False, parse_special_tokens=False) if text else []

    def _encode_all(self, parts: Sequence[int | str]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self._encode(part)
        return ids


class ItemTooLong(ValueError):
    """An item has more tokens than the model's context."""

    def __init__(self, index: int, tokens: TooManyTokens) -> None:
        super().__init__(str(tokens))
        self.index = index
        self.tokens = tokens


def _place(parts: Sequence[int | str], name: str) -> int:
    """Return the place of the one part with ``name``. Raises :class:`TemplateError`."""
    found = [place for place, part in enumerate(parts) if isinstance(part, str) and name in part]
    texts = [parts[place] for place in found]
    if len(found) != 1 or sum(text.count(name) for text in texts if isinstance(text, str)) != 1:
        raise TemplateError(f"`{name}` must occur exactly once")
    return found[0]


_HEADER = struct.Struct("<16sI")
HEADER_BYTES = _HEADER.size
DIGEST_BYTES = 16
_PLACE_AND_COUNT = struct.Struct("<Q8xI")
"""The first 8 bytes of the digest, which place an item on a replica, and the number of token ids."""


def packed(ids: Sequence[int], tail: str) -> bytes:
    """Return the record of an item."""
    content = array("I", ids).tobytes()
    written = tail.encode()
    # The length keeps ids and tail apart.
    digest = hashlib.blake2b(struct.pack("<q", len(ids)) + content + written, digest_size=DIGEST_BYTES).digest()
    return _HEADER.pack(digest, len(ids)) + content + written


def row_of(record: bytes) -> tuple[PlacedIds, bytes]:
    """Return the token ids of a record, and its tail."""
    place, count = _PLACE_AND_COUNT.unpack_from(record)
    end = HEADER_BYTES + ID_BYTES * count
    row = PlacedIds("I", record[HEADER_BYTES:end])
    row.place = place
    row.content = record[:DIGEST_BYTES]
    return row, record[end:]


def digest_of(record: bytes) -> bytes:
    """Return the digest of the content: the item's version."""
    return record[:DIGEST_BYTES]


def tokens_of(record: bytes) -> int:
    """Return the number of token ids."""
    count: int = _HEADER.unpack_from(record)[1]
    return count


def tail_bytes(record: bytes) -> int:
    """Return the length of the tail."""
    return len(record) - HEADER_BYTES - ID_BYTES * tokens_of(record)
