"""The cases of :mod:`benchmarks.engine.host`: loops of null models, and the requests that they serve."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from benchmarks.engine.large_vocabulary import tokenizer_json
from benchmarks.engine.null_engine import VOCABULARY, null_loop
from benchmarks.engine.structured import LONG
from engine import wire
from engine.loop import Loop
from gateway.structure.grammar import of_json_schema

ITEMS, ITEM_TOKENS, QUERY_TOKENS, OPEN_REQUESTS = 10, 180, 120, 16
PROMPT_TOKENS = 300
BYTES = 256
COLUMNS = 8
"""Columns of the logits. They are few, so that operations on the device take little more than their dispatch."""
CATALOGUE, CATALOGUE_ITEMS, CATALOGUE_QUERY = 1000, 100, 20
"""Items that are cached, items of a request, and tokens of its query."""


class Feed(ABC):
    """The requests of one case."""

    @abstractmethod
    def first(self) -> list[wire.Request]:
        """Requests before the first step."""

    @abstractmethod
    def next(self, replies: Sequence[wire.Reply]) -> list[wire.Request]:
        """Requests after a step with these ``replies``."""

    @property
    @abstractmethod
    def warm(self) -> bool:
        """Whether steps are as they are to be measured."""


class Scores(Feed):
    """Score requests, of which :data:`OPEN_REQUESTS` are always open."""

    warm = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._count = 0

    def first(self) -> list[wire.Request]:
        return [self._request() for _ in range(OPEN_REQUESTS)]

    def next(self, replies: Sequence[wire.Reply]) -> list[wire.Request]:
        return [self._request() for _ in replies]

    def _request(self) -> wire.Score:
        self._count += 1
        items = [_tokens(self._random, ITEM_TOKENS) for _ in range(ITEMS)]
        return wire.Score(f"score-{self._count}", _tokens(self._random, QUERY_TOKENS), items, wire.Labels([1, 2]))


class Catalogue(Feed):
    """Requests for cached items, of which :data:`OPEN_REQUESTS` are always open."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._items = [wire.pack_ids(_tokens(self._random, ITEM_TOKENS)) for _ in range(CATALOGUE)]
        self._count = self._cached = 0

    @property
    def warm(self) -> bool:
        return self._cached >= OPEN_REQUESTS

    def first(self) -> list[wire.Request]:
        parts = [self._items[start : start + CATALOGUE_ITEMS] for start in range(0, CATALOGUE, CATALOGUE_ITEMS)]
        parts += [self._draw() for _ in range(OPEN_REQUESTS - len(parts))]
        return [self._request(part) for part in parts]

    def next(self, replies: Sequence[wire.Reply]) -> list[wire.Request]:
        assert all(isinstance(reply, wire.Scored) for reply in replies), replies
        self._cached += sum(reply.cached_items == CATALOGUE_ITEMS for reply in replies if isinstance(reply, wire.Scored))
        return [self._request(self._draw()) for _ in replies]

    def _draw(self) -> list[bytes]:
        return self._random.sample(self._items, CATALOGUE_ITEMS)

    def _request(self, items: Sequence[bytes]) -> wire.ScoreItems:
        self._count += 1
        lengths = wire.pack_ids([ITEM_TOKENS] * len(items))
        query = _tokens(self._random, CATALOGUE_QUERY)
        return wire.ScoreItems(f"items-{self._count}", b"".join(items), lengths, query, wire.Labels([1, 2]))


class Rows(Feed):
    """Generations that all begin at once and do not end."""

    def __init__(self, rows: int, guidance: wire.LengthGuidance | None = None, grammar: str = "") -> None:
        self._rows, self._guidance, self._grammar = rows, guidance, grammar
        self._begun: set[str] = set()

    @property
    def warm(self) -> bool:
        return len(self._begun) == self._rows

    def first(self) -> list[wire.Request]:
        draws = random.Random(0)
        return [
            wire.Generate(
                f"row-{row}",
                _tokens(draws, PROMPT_TOKENS),
                wire.Sampling(max_tokens=4000, seed=row),
                length_guidance=self._guidance,
                grammar=self._grammar,
            )
            for row in range(self._rows)
        ]

    def next(self, replies: Sequence[wire.Reply]) -> list[wire.Request]:
        if not self.warm:
            self._begun.update(reply.id for reply in replies)
        assert all(isinstance(reply, wire.Delta) and reply.finish is None for reply in replies), replies
        return []


def _tokens(draws: random.Random, count: int) -> list[int]:
    return [draws.randrange(VOCABULARY - 1000) for _ in range(count)]


def _score() -> tuple[Loop, Feed]:
    return null_loop(COLUMNS), Scores()


def _catalogue() -> tuple[Loop, Feed]:
    return null_loop(COLUMNS), Catalogue()


def _decode() -> tuple[Loop, Feed]:
    return null_loop(COLUMNS), Rows(256)


def _guided() -> tuple[Loop, Feed]:
    return null_loop(COLUMNS, guided=True), Rows(256, wire.LengthGuidance(scale=-0.5))


def _structured() -> tuple[Loop, Feed]:
    loop = null_loop(BYTES, tokenizer_json=tokenizer_json(BYTES))  # any byte may be the next token; the bits are for all tokens
    return loop, Rows(64, grammar=of_json_schema(LONG))


CASES: dict[str, Callable[[], tuple[Loop, Feed]]] = {
    "score": _score,
    "catalogue": _catalogue,
    "decode": _decode,
    "guided": _guided,
    "structured": _structured,
}
