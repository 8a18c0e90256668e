"""Content of requests: random ids and words, which of them repeat, and rows of a file.

Random content consists of 65,536 prepared pieces (token ids as decimal digits, or words of four letters), chosen by the bytes
of a hash. Every body differs, a repeated item has the same bytes again, and a body of 2,000 tokens takes a tenth of a millisecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from random import Random
from typing import Protocol, TypeVar

from loadgen import data
from loadgen.arrivals import Share
from loadgen.distributions import Distribution, draw

T = TypeVar("T")
REMEMBERED = 10_000
"""Number of latest queries, and of latest items of one query, from which repeats are chosen."""
Writer = Callable[[str, int], bytes]


class Content:
    """Random content of one worker and one workload."""

    def __init__(self, seed: int, share: Share, workload: int) -> None:
        """``workload``: index of the workload in the scenario."""
        self.rng = share.seed(seed, f"workload {workload}")
        self._seed = seed
        self._share = share
        self._salt = f"{seed} {share.index} {workload}"

    def rows(self, source: data.Data, convert: Callable[[data.Row], T | None]) -> Iterator[T]:
        """Yield this worker's rows of a file, again and again. Raises :class:`LoadError`."""
        return islice(cycle(data.read(source, self._seed, convert)), self._share.index, None, self._share.of)

    def ids(self, vocab_size: int) -> Writer:
        """Return a function of a name and a length that writes that many token ids below ``vocab_size``, as a JSON list."""
        size = 1 << 16
        order = Random(vocab_size)
        table = [b"%d" % (index % vocab_size if vocab_size <= size else order.randrange(vocab_size)) for index in range(size)]

        def write(name: str, length: int) -> bytes:
            return b"[%b]" % b",".join(map(table.__getitem__, self._choices(name, length)))

        return write

    def words(self, name: str, length: int) -> bytes:
        """Return ``length`` words as a JSON string. It begins with a space, so that words stay whole if texts are joined."""
        return b'" %b"' % b" ".join(map(_WORDS.__getitem__, self._choices(name, length)))

    def _choices(self, name: str, length: int) -> memoryview:
        """Return [length] numbers below 65,536, as a function of the name."""
        digest = hashlib.shake_128(f"{self._salt} {name}".encode()).digest(2 * length)
        return memoryview(digest).cast("H")


Part = tuple[int, int]
"""A query or an item: its number, which determines its content, and its length."""


class Lengths(Protocol):
    """Lengths, counts and repeats of a workload that has a query and items."""

    @property
    def query_length(self) -> Distribution: ...
    @property
    def item_length(self) -> Distribution: ...
    @property
    def items(self) -> Distribution: ...
    @property
    def repeated_queries(self) -> float: ...
    @property
    def repeated_items(self) -> float: ...


class Repeats:
    """Chooses the query and the items of each request: new ones, or earlier ones."""

    def __init__(self, lengths: Lengths, rng: Random) -> None:
        self._lengths = lengths
        self._rng = rng
        self._count = 0
        self._queries: list[Part] = []
        self._asked: dict[Part | None, list[Part]] = {}
        """Items by the query they were used with; by None if queries never repeat."""

    def __iter__(self) -> Iterator[tuple[Part, list[Part]]]:
        lengths, rng = self._lengths, self._rng
        while True:
            known = bool(self._queries) and rng.random() < lengths.repeated_queries
            query = rng.choice(self._queries) if known else self._fresh(lengths.query_length)
            if lengths.repeated_queries and not known:
                self._queries.append(query)
                self._forget()
            asked = self._asked.setdefault(query if lengths.repeated_queries else None, []) if lengths.repeated_items else []
            yield query, self._items(asked)

    def _items(self, asked: list[Part]) -> list[Part]:
        """Return distinct items of one request; new ones are added to ``asked``."""
        rng, count = self._rng, draw(self._lengths.items, self._rng)
        wanted = sum(rng.random() < self._lengths.repeated_items for _ in range(count)) if asked else 0
        old = rng.sample(asked, min(len(asked), wanted))
        fresh = [self._fresh(self._lengths.item_length) for _ in range(count - len(old))]
        items = old + fresh
        if old:
            rng.shuffle(items)
        if self._lengths.repeated_items:
            asked += fresh
            if len(asked) > 2 * REMEMBERED:
                del asked[:REMEMBERED]
        return items

    def _fresh(self, length: Distribution) -> Part:
        self._count += 1
        return self._count, draw(length, self._rng)

    def _forget(self) -> None:
        """Keep only the latest queries and their items."""
        if len(self._queries) > 2 * REMEMBERED:
            for query in self._queries[:REMEMBERED]:
                self._asked.pop(query, None)
            del self._queries[:REMEMBERED]


_CONSONANTS = "bcdfghjklmnprstv"
_VOWELS = ("a", "e", "i", "o", "u", "y", "ai", "ea", "ee", "ie", "oa", "oo", "ou", "ay", "ei", "oi")
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_WORDS = [(first + second).encode() for first in _SYLLABLES for second in _SYLLABLES]
