"""The prompts of requests that name items of a catalogue."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
from litestar import Request

from gateway.catalogues.catalogues import Catalogues, check_text, owner_of
from gateway.catalogues.record import row_of, tail_bytes, tokens_of
from gateway.catalogues.store import Found, Spec, State
from gateway.errors import InvalidRequest
from gateway.handling.access import requested_model
from gateway.handling.reader import Reading
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.process.time_slices import TimeSlice
from gateway.reading.catalogue import Opened
from gateway.text.bounds import Bounds
from gateway.text.prepared import PlacedIds, Prepared

PART_ITEMS, PART_TOKENS = 250, 1 << 16
"""Most items of a part of a whole catalogue, and most tokens, unless one item has more. Several parts are computed at one time."""
ROWS_AT_ONCE = 256
"""Rows that are built between two looks at the clock, in about 0.2 ms."""
Records = Sequence[bytes | None]


class Query:
    """The query of a request, for many items of one catalogue. Where items end alike, it is tokenised once."""

    def __init__(
        self,
        body: Reading[Any],
        model: ServedModel,
        spec: Spec,
        *,
        size: int = 0,
        reads_labels: bool = True,
        may_be_empty: bool = False,
    ) -> None:
        """``size``: bytes of the request's body, which are not less than the query's characters. ``reads_labels``: whether the
        request needs labels. ``may_be_empty``: whether a prompt may have no token, because the caller adds a suffix of its own."""
        self.model = model
        self.spec = spec
        self.size = size
        self.reads_labels = reads_labels
        self.may_be_empty = may_be_empty
        self._body = body
        self._last: tuple[bytes, Prepared] | None = None
        self._sample: Prepared | None = None

    async def sample(self, record: bytes) -> Prepared:
        """Return the tokens behind one item: ``record`` or an earlier one. Raises :class:`GatewayError`."""
        if self._sample is None:
            self._sample = await self.behind([row_of(record)[1]])
        return self._sample

    async def behind(self, tails: list[bytes]) -> Prepared:
        """Return the tokens behind each of ``tails``, which are distinct, as rows, and those that all prompts end with as suffix.
        Raises :class:`GatewayError`."""
        if len(tails) != 1:
            return await self._read(tails)
        if self._last is None or self._last[0] != tails[0]:
            self._last = tails[0], await self._read(tails)
        return self._last[1]

    async def _read(self, tails: list[bytes]) -> Prepared:
        return await self._body.read(self.model, msgspec.msgpack.encode(Opened(self.spec.template, tails)))


@dataclass(frozen=True)
class CataloguePrompts:
    """Builds prompts of stored token ids and a query; only the query is tokenised."""

    catalogues: Catalogues
    pool: Pool
    bounds: Bounds
    most_items: int
    """Most items of a request for a whole catalogue."""

    async def find(self, request: Request[Any, Any, Any], name: str, ids: Sequence[str], asked: str | None) -> Items:
        """Return items, and the model that scores them. ``asked``: the request's ``model``. Raises :class:`GatewayError`."""
        found = await self.catalogues.find(owner_of(request), name, ids)
        return Items(found, ids, self._model(request, name, found.spec, asked))

    async def open(self, request: Request[Any, Any, Any], name: str, asked: str | None, *, all_items: bool = True) -> Whole:
        """Return a whole catalogue. Raises as :meth:`find`, and :class:`InvalidRequest` for one with too many items, if the request
        is for ``all_items``."""
        owner = owner_of(request)
        with self.catalogues.errors(name):
            state = await self.catalogues.store.state(owner, name)
        model = self._model(request, name, state.spec, asked)
        if all_items and state.items > self.most_items:
            message = f"The catalogue has {state.items} items; a request may score {self.most_items}. Name some of them in `ids`."
            raise InvalidRequest(message, param="ids")
        return Whole(owner, state, model)

    async def pages(self, whole: Whole, query: Query) -> AsyncGenerator[list[tuple[str, bytes]], None]:
        """Yield the items of a catalogue in parts that, with ``query``, are within the bounds of a request. Raises
        :class:`GatewayError`.

        Items that change meanwhile move to the end and may come again, but not for ever: besides as many items as there were at
        the beginning, there come as many as a request may have.
        """
        name, left = whole.state.name, whole.state.items + self.most_items
        with self.catalogues.errors(name):
            async for page in self.catalogues.store.pages(whole.owner, name, whole.state.epoch):
                for part in await self._divided(page[:left], query):
                    yield part
                left -= len(page)
                if left <= 0:
                    return

    async def _divided(self, page: list[tuple[str, bytes]], query: Query) -> list[list[tuple[str, bytes]]]:
        """Divide a page. Half of each bound is left for what is not known before the query is tokenised behind each tail."""
        behind = await query.sample(page[0][1])
        shared = len(behind.suffix) + sum(map(len, behind.rows))
        most_tokens = min(PART_TOKENS, self.bounds.max_request_tokens // 2)
        most_characters = self.bounds.max_request_characters // 2
        most_items = min(PART_ITEMS, max(1, self.bounds.max_scores // max(1, len(behind.labels or query.spec.label_ids))))
        parts: list[list[tuple[str, bytes]]] = []
        items = tokens = characters = 0
        for id, record in page:
            tail = tail_bytes(record)
            size = tokens_of(record) + tail + shared  # a token of the tail has at least a byte
            text = tail + query.size if tail else 0
            full = items == most_items or tokens + size > most_tokens or characters + text > most_characters
            if not parts or full:
                parts.append([])
                items = tokens = characters = 0
            parts[-1].append((id, record))
            items, tokens, characters = items + 1, tokens + size, characters + text
        return parts

    def _model(self, request: Request[Any, Any, Any], name: str, spec: Spec, asked: str | None) -> ServedModel:
        """Return the model of a catalogue, or the adapter of that model that the client asks for. Raises :class:`GatewayError`,
        also if the client asks for another model."""
        model = requested_model(request, self.pool, spec.model if asked is None else asked)
        if asked is not None and self.pool.model(spec.model).base.name != model.base.name:  # they may be of two versions
            raise InvalidRequest(f"The catalogue {name!r} is for the model {spec.model!r}.", param="model")
        check_text(name, spec, model)
        return model

    async def read(self, body: Reading[Any], items: Items, *, reads_labels: bool = True) -> Prepared:
        """Return the prompts of ``items`` with the query in ``body``. Raises :class:`GatewayError`."""
        query = Query(body, items.model, items.found.spec, reads_labels=reads_labels)
        prepared = await self.rows(query, items.found.records, "ids[]")
        prepared.ids = items.ids
        return prepared

    async def rows(self, query: Query, records: Records, param: str) -> Prepared:
        """Return the prompts of the items in ``records``: at least one, and none of them None. Raises :class:`GatewayError`."""
        model = query.model
        rows, behind, time_slice = list[PlacedIds](), list[bytes](), TimeSlice()
        for begin in range(0, len(records), ROWS_AT_ONCE):
            for record in records[begin : begin + ROWS_AT_ONCE]:
                assert record is not None
                row, tail = row_of(record)
                rows.append(row)
                behind.append(tail)
            if time_slice.over:
                await time_slice.yield_to_loop()
        self.bounds.check("max_request_tokens", sum(map(len, rows)), "tokens", "ids")
        tails = dict(zip(dict.fromkeys(behind), count(), strict=False))
        self.bounds.check("max_request_characters", sum(map(len, tails)), "characters that must be tokenised", "ids")
        prepared = await query.behind(list(tails))
        seams = [array("I", seam) for seam in prepared.rows]
        if any(seams):
            for row, tail in zip(rows, behind, strict=True):
                seam = seams[tails[tail]]
                row.extend(seam)
                row.content += seam.tobytes()
        lengths, shared = [*map(len, rows)], len(prepared.suffix)
        tokens = sum(lengths) + shared * len(rows)
        if max(lengths) + shared > model.context:
            place = lengths.index(max(lengths))
            model.facts.check_prompt(lengths[place] + shared, param.replace("[]", f"[{place}]"))
        if min(lengths) + shared == 0 and not query.may_be_empty:
            raise _empty(param.replace("[]", f"[{lengths.index(0)}]"))
        labels = prepared.labels or query.spec.label_ids
        if query.reads_labels and not labels:
            raise InvalidRequest("Give `labels` or `label_token_ids`; the catalogue has no labels of its own.", param="labels")
        self.bounds.check("max_scores", len(rows) * len(labels), "scores (items and labels)", "ids")
        self.bounds.check("max_request_tokens", tokens, "tokens", "ids")
        return Prepared(rows, (), prepared.suffix, labels, param=param, query_truncated=prepared.query_truncated)


@dataclass(frozen=True)
class Items:
    """Items that a request names, at one moment."""

    found: Found
    ids: Sequence[str]
    model: ServedModel


@dataclass(frozen=True)
class Whole:
    """A catalogue whose items are all to be scored."""

    owner: str
    state: State
    model: ServedModel


def _empty(param: str) -> InvalidRequest:
    return InvalidRequest(f"`{param}`: the item and the query are both empty, so there is no position to score at.", param=param)
