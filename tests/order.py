"""The order of tests that run in several processes: each process begins with some of the long ones."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

LONG = [
    Path(__file__).parent / path
    for path in (
        "gateway/console",
        "clients",
        "examples",
        "kernels/test_compiling.py",
        "attacks/test_soak.py",
        "test_wheelhouse.py",
        "engine/test_heap.py",
        "benchmarks/engine",
        "test_lora_soak.py",
        "kernels/test_branch_attention.py",
        "gateway/commands",
        "engine/test_structured.py",
        "engine/vision",
    )
]
"""Folders and files with tests of half a minute or more: if they came last, other processes would have nothing left to do."""


class OfFile(Protocol):
    """A test, of which only the file matters here."""

    path: Path


T = TypeVar("T", bound=OfFile)


def long_first(tests: Iterable[T], processes: int) -> list[T]:
    """Return ``tests`` in an order of which pytest-xdist gives each process an equal part (``--dist worksteal``). Each part begins
    with the tests of some elements of :data:`LONG`, which stay together."""
    groups: list[list[T]] = [[] for _ in LONG]
    others = list[T]()
    for test in tests:
        place = _place(test.path)
        (others if place is None else groups[place]).append(test)
    left = sum(map(len, groups)) + len(others)
    ordered = list[T]()
    for process in range(processes):
        part = [test for group in groups[process::processes] for test in group]
        room = max(0, left // (processes - process) - len(part))
        part, others = part + others[:room], others[room:]
        ordered += part
        left -= len(part)
    return ordered + others


@cache  # because comparing paths takes longer than anything else in a collection
def _place(file: Path) -> int | None:
    """The element of :data:`LONG` that has the tests of ``file``."""
    return next((place for place, path in enumerate(LONG) if path in (file, *file.parents)), None)
