"""Each process that runs tests begins with long ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.order import LONG, long_first


@dataclass(frozen=True)
class Named:
    path: Path
    name: int


def of(path: Path, count: int) -> list[Named]:
    return [Named(path / "test_some.py" if path.suffix == "" else path, number) for number in range(count)]


@pytest.mark.parametrize("processes", [1, 2, 4, 5])
def test_each_process_begins_with_long_tests(processes: int) -> None:
    short = of(Path(__file__), 900)
    tests = [*short, *[test for path in LONG for test in of(path, 7)]]
    ordered = long_first(tests, processes)
    assert Counter(ordered) == Counter(tests)
    assert [test for test in ordered if test in set(short)] == short, "others stay in order"
    begin = 0
    for process in range(processes):
        part = ordered[begin : begin + (len(ordered) - begin) // (processes - process)]
        begin += len(part)
        long = len(LONG[process::processes])
        assert [test.name for test in part[: 7 * long]] == [*range(7)] * long, "those of a file stay together"
        assert {test.path for test in part[7 * long :]} == {Path(__file__)}


def test_a_selection_of_long_tests_only() -> None:
    tests = of(LONG[0], 5)
    assert long_first(tests, 4) == tests
    assert long_first([], 4) == []


def test_the_list_names_what_exists() -> None:
    assert [path for path in LONG if not path.exists()] == []
