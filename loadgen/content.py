"""Content of requests: lengths, random ids and words, and rows of a file.

Random content consists of 65,536 prepared pieces (token ids as decimal digits, or words of four letters), chosen by the bytes
of a hash. Every body differs, a repeated item has the same bytes again, and a body of 2,000 tokens takes a tenth of a millisecond.
Work and memory of reading a file are bounded.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import stat
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.errors import LoadError, reason_of

T = TypeVar("T")
Whole = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Uniform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """All whole numbers from ``min`` to ``max`` with equal probability."""

    min: Whole
    max: Whole

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError("`min` is above `max`; exchange them")

    def draw(self, rng: Random) -> int:
        return rng.randint(self.min, self.max)


class LogNormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Rounded values whose logarithm is normally distributed: many small ones and a long tail, limited by ``max``."""

    median: Positive
    sigma: Positive
    """Standard deviation of the logarithm; 0.5 puts two thirds between 0.6 and 1.65 times the median."""
    max: Whole

    def draw(self, rng: Random) -> int:
        return min(self.max, max(1, round(math.exp(rng.gauss(math.log(self.median), self.sigma)))))


class Empirical(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """One of ``values``, such as those of a production log, with the probabilities given by ``weights``."""

    values: Annotated[tuple[Whole, ...], msgspec.Meta(min_length=1)]
    weights: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.weights)} `weights` for {len(self.values)} `values`; give one for each")

    def draw(self, rng: Random) -> int:
        return rng.choices(self.values, self.weights)[0]


Distribution = Whole | Uniform | LogNormal | Empirical


def draw(distribution: Distribution, rng: Random) -> int:
    """Draw one value of ``distribution``."""
    return distribution if isinstance(distribution, int) else distribution.draw(rng)


def most(distribution: Distribution) -> int:
    """Return the largest value that ``distribution`` can give."""
    if isinstance(distribution, int):
        return distribution
    return max(distribution.values) if isinstance(distribution, Empirical) else distribution.max


_CONSONANTS = "bcdfghjklmnprstv"
_VOWELS = ("a", "e", "i", "o", "u", "y", "ai", "ea", "ee", "ie", "oa", "oo", "ou", "ay", "ei", "oi")
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_WORDS = [(first + second).encode() for first in _SYLLABLES for second in _SYLLABLES]
Writer = Callable[[str, int], bytes]


class Content:
    """Random content of one worker and one workload."""

    def __init__(self, seed: int, share: Share, workload: int) -> None:
        """``workload``: index of the workload in the scenario."""
        self.rng = share.seed(seed, f"workload {workload}")
        self._seed, self._share = seed, share
        self._salt = f"{seed} {share.index} {workload}"

    def rows(self, source: Data, convert: Callable[[Row], T]) -> Iterator[T]:
        """Yield this worker's rows of a file, again and again. Raises :class:`LoadError`."""
        return islice(cycle(read(source, self._seed, convert)), self._share.index, None, self._share.of)

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


FILE_BYTES = 2 << 30
ROW_BYTES = 8 << 20
KEPT_BYTES = 256 << 20
"""Bounds on a file, on one of its rows, and on the rows that are kept."""


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a file as content of requests, each in turn and from the beginning again. Workers take every N-th row."""

    file: str
    """Path of the file, relative to the scenario's folder."""
    format: Literal["jsonl", "sharegpt"] = "jsonl"
    rows: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Most rows that are used."""
    sample: bool = False
    """Use a random choice of rows from the whole file, instead of the first ones. It depends on the scenario's seed."""


class Row(msgspec.Struct):
    """One row. Fields that are not listed here are ignored."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    query: str | list[int] | None = None
    items: list[str | list[int]] | None = None
    """Items of a score, documents of a reranker, or texts to embed."""


class _Turn(msgspec.Struct):
    role: str = msgspec.field(name="from")
    content: str = msgspec.field(name="value")


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]


_row = msgspec.json.Decoder(Row)
_conversation = msgspec.json.Decoder(_Conversation)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read(source: Data, seed: int, convert: Callable[[Row], T]) -> list[T]:
    """Return the converted rows of a file: the first ones, or a random choice of equal probability for every row (reservoir
    sampling), in random order.

    ``convert`` raises :class:`ValueError` with the reason if a row is wrong. Raises :class:`LoadError`, which names the line of a
    wrong row (of ShareGPT's: its number in the list).
    """
    decode = _row.decode if source.format == "jsonl" else _from_sharegpt
    rng = Random(f"{seed} data")
    kept: list[tuple[T, int]] = []
    seen = size = 0
    try:
        for where, raw in _raw_rows(source):
            try:
                row = decode(raw)
                if row is None:
                    continue
                value = convert(row)
            except ValueError as error:  # includes msgspec's errors
                raise LoadError(f"{source.file}, {where}: {error}") from None
            place = rng.randrange(seen + 1) if seen >= source.rows else seen
            seen += 1
            if place < len(kept):
                size += len(raw) - kept[place][1]
                kept[place] = (value, len(raw))
            elif place < source.rows:
                size += len(raw)
                kept.append((value, len(raw)))
            if size > KEPT_BYTES:
                raise LoadError(f"{len(kept)} rows of {source.file} have more than {KEPT_BYTES >> 20} MiB; lower `data.rows`")
            if len(kept) == source.rows and not source.sample:
                break
    except OSError as error:
        raise LoadError(f"cannot read {source.file}: {reason_of(error)}; name a file of requests in `data.file`") from None
    if not kept:
        raise LoadError(f"{source.file} has no row that this workload can use; see docs/load.md for the fields of each kind")
    if source.sample:
        rng.shuffle(kept)
    return [value for value, _ in kept]


def _raw_rows(source: Data) -> Iterator[tuple[str, bytes | memoryview]]:
    """Yield the place of each row and its JSON. Lines are read one by one; a ShareGPT file is mapped into memory."""
    file = Path(source.file)
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{file} is not a regular file; name a file of requests in `data.file`")
    if status.st_size > FILE_BYTES:
        raise LoadError(f"{file} has more than {FILE_BYTES >> 30} GiB; use a part of it")
    with file.open("rb") as stream:
        rows: Iterator[tuple[str, bytes | memoryview]]
        if source.format == "jsonl":
            lines = iter(lambda: stream.readline(ROW_BYTES + 1), b"")
            rows = ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
        else:
            entries = _conversations(stream.fileno(), file) if status.st_size else []
            rows = ((f"conversation {number}", memoryview(entry)) for number, entry in enumerate(entries, 1))
        for where, raw in rows:
            if len(raw) > ROW_BYTES:
                raise LoadError(f"{file}, {where} has more than {ROW_BYTES >> 20} MiB; leave it out")
            yield where, raw


def _conversations(descriptor: int, file: Path) -> list[msgspec.Raw]:
    try:
        return msgspec.json.decode(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        remedy = "for JSON lines, set `data.format` to jsonl"
        raise LoadError(f"{file} is not a JSON list of conversations ({error}); {remedy}") from None


def _from_sharegpt(raw: bytes | memoryview) -> Row | None:
    """Return the messages from the first one of a user on, with system messages before it; None if there is no user."""
    turns = _conversation.decode(raw).conversations
    messages = [{"role": _ROLES.get(turn.role, turn.role), "content": turn.content} for turn in turns]
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return None
    system = [message for message in messages[:first] if message["role"] == "system"]
    return Row(prompt=messages[first]["content"], messages=[*system, *messages[first:]])
