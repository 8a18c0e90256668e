"""``yardstick score --input``: the probabilities of labels after a query and an item, or the likelihood of each item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.commands.offline.rows import Row
from gateway.commands.offline.tasks.base import (
    Call,
    Columns,
    Item,
    RowError,
    TableTask,
    choose_column,
    need_column,
    text_of,
    texts_of,
    without_none,
)


@dataclass(frozen=True)
class ScoreOptions:
    """Options of the command line."""

    labels: tuple[str, ...]
    query: str | None
    """The query of every row; None if a column has it."""
    query_column: str
    items_column: str
    item_column: str
    model: str | None
    apply_softmax: bool
    item_first: bool
    suffix: str
    likelihood: bool
    keep: tuple[str, ...]
    batch: int

    def task(self, columns: Sequence[str]) -> TableTask:
        """Return the task for an input with ``columns``. Raises :class:`WrongUsage`."""
        if self.query is None:
            need_column(columns, self.query_column, "--query-column, or give all rows one query with --query")
        given = {
            "model": self.model,
            "labels": list(self.labels),
            "apply_softmax": self.apply_softmax,
            "item_first": self.item_first,
        }
        if self.likelihood:
            given = {"model": self.model, "readout": "likelihood"}
        constant, items = without_none(given), choose_column(columns, self.items_column, self.item_column)
        settings = {"query": self.query, "suffix": self.suffix}
        read = (items, self.query_column) if self.query is None else (items,)
        lists = items == self.items_column
        kinds: tuple[type[TableTask], Columns]
        if self.likelihood and lists:
            kinds = LikelihoodLists, Columns(read, self.keep, "likelihoods", "likelihoods")
        elif self.likelihood:
            kinds = LikelihoodItems, Columns(read, self.keep, "likelihood", "likelihood")
        else:
            kinds = (ScoreLists if lists else ScoreItems), Columns(read, self.keep, "scores", "lists" if lists else "numbers")
        kind, written = kinds
        task = kind(constant, written, 1 if lists else self.batch, settings)
        task.columns.check(columns)
        return task


class _Scores(msgspec.Struct):
    scores: list[list[float]]


class ScoreItems(TableTask):
    """A query and one item in each row; the result is the probability of each label."""

    command = "score"

    def item(self, row: Row) -> Item:
        return Item(row, text_of(row, self.columns.read[0]) + self.settings["suffix"], self.query_of(row))

    def query_of(self, row: Row) -> str:
        """Return the query of a row. Raises :class:`RowError`."""
        query: str | None = self.settings["query"]
        return text_of(row, self.columns.read[1]) if query is None else query

    def call(self, items: Sequence[Item]) -> Call:
        return Call("/v1/score", self.encode({"query": items[0].group, "items": [item.content for item in items]}))

    def results(self, items: Sequence[Item], content: bytes) -> Sequence[Any]:  # noqa: ARG002 - the caller compares their number
        return msgspec.json.decode(content, type=_Scores).scores


class ScoreLists(ScoreItems):
    """A query and a list of items in each row; the result has a list for each item."""

    def item(self, row: Row) -> Item:
        texts = [text + self.settings["suffix"] for text in texts_of(row, self.columns.read[0])]
        return Item(row, texts, self.query_of(row))

    def call(self, items: Sequence[Item]) -> Call:
        (item,) = items
        return Call("/v1/score", self.encode({"query": item.group, "items": item.content}))

    def results(self, items: Sequence[Item], content: bytes) -> Sequence[Any]:
        scores = msgspec.json.decode(content, type=_Scores).scores
        if len(scores) != len(items[0].content):
            raise RowError("the answer does not score every item")
        return [scores]


class _Likelihood(msgspec.Struct):
    logprob: float
    mean_logprob: float
    tokens: int
    is_greedy: bool


class _Likelihoods(msgspec.Struct):
    data: list[_Likelihood]


class LikelihoodItems(ScoreItems):
    """A query and one item in each row; the result is the item's likelihood."""

    def results(self, items: Sequence[Item], content: bytes) -> Sequence[Any]:  # noqa: ARG002 - the caller compares their number
        return msgspec.json.decode(content, type=_Likelihoods).data


class LikelihoodLists(ScoreLists):
    """A query and a list of items in each row; the result is the likelihood of each item."""

    def results(self, items: Sequence[Item], content: bytes) -> Sequence[Any]:
        likelihoods = msgspec.json.decode(content, type=_Likelihoods).data
        if len(likelihoods) != len(items[0].content):
            raise RowError("the answer does not have every item")
        return [likelihoods]
