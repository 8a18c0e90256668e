"""Reads content of requests from files: JSON lines, or conversations in ShareGPT's form. Work and memory are bounded."""

from __future__ import annotations

import mmap
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from loadgen.errors import LoadError, reason_of

T = TypeVar("T")
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


def read(source: Data, seed: int, convert: Callable[[Row], T | None]) -> list[T]:
    """Return the converted rows of a file.

    ``convert`` returns None for a row to leave out, and raises :class:`ValueError` with the reason if a row is wrong.
    Raises :class:`LoadError`, which names the line of a wrong row (of ShareGPT's: its number in the list).
    """
    try:
        kept = _choose(source, seed, convert)
    except OSError as error:
        reason = reason_of(error)
        raise LoadError(f"cannot read {source.file}: {reason}; name a file of requests in `data.file`") from None
    if not kept:
        raise LoadError(f"{source.file} has no row that this workload can use; see docs/load.md for the fields of each kind")
    return kept


def _choose(source: Data, seed: int, convert: Callable[[Row], T | None]) -> list[T]:
    """Return the first rows, or a random choice of equal probability for every row (reservoir sampling), in random order."""
    rng = Random(f"{seed} data")
    kept: list[tuple[T, int]] = []
    seen = size = 0
    for where, raw in _raw_rows(source):
        value = _convert(raw, f"{source.file}, {where}", source.format, convert)
        if value is None:
            continue
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
    if source.sample:
        rng.shuffle(kept)
    return [value for value, _ in kept]


def _raw_rows(source: Data) -> Iterator[tuple[str, bytes | memoryview]]:
    """Yield the place of each row and its JSON. Lines are read one by one; a ShareGPT file is mapped into memory."""
    file = Path(source.file)
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{source.file} is not a regular file; name a file of requests in `data.file`")
    if status.st_size > FILE_BYTES:
        raise LoadError(f"{source.file} has more than {FILE_BYTES >> 30} GiB; use a part of it")
    with file.open("rb") as stream:
        rows = _lines(stream.readline) if source.format == "jsonl" else _entries(stream.fileno(), status.st_size, source.file)
        for where, raw in rows:
            if len(raw) > ROW_BYTES:
                raise LoadError(f"{source.file}, {where} has more than {ROW_BYTES >> 20} MiB; leave it out")
            yield where, raw


def _lines(readline: Callable[[int], bytes]) -> Iterator[tuple[str, bytes]]:
    number = 0
    while line := readline(ROW_BYTES + 1):
        number += 1
        if line.strip():
            yield f"line {number}", line


def _entries(descriptor: int, size: int, name: str) -> Iterator[tuple[str, memoryview]]:
    if not size:
        return
    try:
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        entries = msgspec.json.decode(mapped, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        remedy = "for JSON lines, set `data.format` to jsonl"
        raise LoadError(f"{name} is not a JSON list of conversations ({error}); {remedy}") from None
    for number, entry in enumerate(entries, 1):
        yield f"conversation {number}", memoryview(entry)


def _convert(raw: bytes | memoryview, where: str, form: str, convert: Callable[[Row], T | None]) -> T | None:
    try:
        row = _row.decode(raw) if form == "jsonl" else _from_sharegpt(_conversation.decode(raw))
        return None if row is None else convert(row)
    except ValueError as error:  # includes msgspec's errors
        raise LoadError(f"{where}: {error}") from None


def _from_sharegpt(conversation: _Conversation) -> Row | None:
    """Return the messages from the first one of a user on, with system messages before it; None if there is no user."""
    messages = [{"role": _ROLES.get(turn.role, turn.role), "content": turn.content} for turn in conversation.conversations]
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return None
    system = [message for message in messages[:first] if message["role"] == "system"]
    prompt = str(messages[first]["content"])
    return Row(prompt=prompt, messages=[*system, *messages[first:]])
