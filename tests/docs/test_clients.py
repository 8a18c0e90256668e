"""The paths of other servers in docs/clients.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine())


def test_paths_that_are_not_served_are_not_and_the_others_are(client: httpx.Client) -> None:
    (part,) = re.findall(r"<!-- not served -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.strip().splitlines()[2:]]
    absent, present = (re.findall(r"`(/[^`]+)`", " ".join(row[column] for row in rows)) for column in (1, 2))
    assert len(absent) > 10
    served = set(client.get("/schema/openapi.json").raise_for_status().json()["paths"])
    assert (served.intersection(absent), set(present) - served) == (set(), set())
    assert {path: client.post(path, json={}).status_code in (404, 405) for path in absent} == dict.fromkeys(absent, True)
