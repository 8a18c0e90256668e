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
from gateway.catalogues.record import row_of
from gateway.catalogues.store import Found, Spec, State
from gateway.errors import InvalidRequest
from gateway.handling.access import requested_model
from gateway.handling.reader import Reading
from gateway.pool.pool import Pool
from gateway.pool.replica import ServedModel
from gateway.process.breathing import Breath
from gateway.reading.catalogue import Opened
from gateway.text.bounds import Bounds
from gateway.text.image_ids import ID_BYTES
from gateway.text.prepared import PlacedIds, Prepared

ROWS_AT_ONCE = 256
"""Rows that are built between two looks at the clock, in about 0.2 ms."""
Records = Sequence[bytes | None]


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

    async def open(self, request: Request[Any, Any, Any], name: str, asked: str | None) -> Whole:
        """Return a whole catalogue. Raises as :meth:`find`, and :class:`InvalidRequest` for one with too many items."""
        owner = owner_of(request)
        with self.catalogues.errors(name):
            state = await self.catalogues.store.state(owner, name)
        model = self._model(request, name, state.spec, asked)
        if state.items > self.most_items:
            message = f"The catalogue has {state.items} items; a request may score {self.most_items}. Name some of them in `ids`."
            raise InvalidRequest(message, param="ids")
        return Whole(owner, state, model)

    async def pages(self, whole: Whole) -> AsyncGenerator[list[tuple[str, bytes]], None]:
        """Yield the items of a catalogue, in parts that one message to a text worker may have. Raises :class:`GatewayError`."""
        name, most, left = whole.state.name, self.bounds.max_request_tokens // 2, self.most_items
        with self.catalogues.errors(name):
            async for page in self.catalogues.store.pages(whole.owner, name, whole.state.epoch):
                part: list[tuple[str, bytes]] = []
                tokens = 0
                for id, record in page[:left]:
                    size = len(record) // ID_BYTES  # not less than its tokens, and a measure of a long tail too
                    if part and tokens + size > most:
                        yield part
                        part, tokens = [], 0
                    part.append((id, record))
                    tokens += size
                if part:
                    yield part
                left -= len(page)  # items that change meanwhile may come again, but not for ever
                if left <= 0:
                    return

    def _model(self, request: Request[Any, Any, Any], name: str, spec: Spec, asked: str | None) -> ServedModel:
        """Return the model of a catalogue, or the adapter of that model that the client asks for. Raises :class:`GatewayError`,
        also if the client asks for another model."""
        model = requested_model(request, self.pool, spec.model if asked is None else asked)
        if asked is not None and self.pool.model(spec.model).base is not model.base:
            raise InvalidRequest(f"The catalogue {name!r} is for the model {spec.model!r}.", param="model")
        check_text(name, spec, model)
        return model

    async def read(self, body: Reading[Any], items: Items, *, reads_labels: bool = True) -> Prepared:
        """Return the prompts of ``items`` with the query in ``body``. Raises :class:`GatewayError`."""
        spec, records = items.found.spec, items.found.records
        prepared = await self.rows(body, items.model, spec, records, "ids[]", reads_labels=reads_labels)
        prepared.ids = items.ids
        return prepared

    async def rows(
        self, body: Reading[Any], model: ServedModel, spec: Spec, records: Records, param: str, *, reads_labels: bool = True
    ) -> Prepared:
        """Return the prompts of the items in ``records``: at least one, and none of them None.

        ``reads_labels``: whether the request needs labels.
        """
        rows, behind, breath = list[PlacedIds](), list[bytes](), Breath()
        for begin in range(0, len(records), ROWS_AT_ONCE):
            for record in records[begin : begin + ROWS_AT_ONCE]:
                assert record is not None
                row, tail = row_of(record)
                rows.append(row)
                behind.append(tail)
            if breath.due:
                await breath.take()
        self.bounds.check("max_request_tokens", sum(map(len, rows)), "tokens", "ids")
        tails = dict(zip(dict.fromkeys(behind), count(), strict=False))
        self.bounds.check("max_request_characters", sum(map(len, tails)), "characters that must be tokenised", "ids")
        prepared = await body.read(model, msgspec.msgpack.encode(Opened(spec.template, list(tails))))
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
        if min(lengths) + shared == 0:
            raise _empty(param.replace("[]", f"[{lengths.index(0)}]"))
        labels = prepared.labels or spec.label_ids
        if reads_labels and not labels:
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
