"""The pages of the API and docs/clients.md say what the code does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.docs.generate import PAGE, PAGES, PARTS, page, parts_of
from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways

TEXT = PAGE.read_text(encoding="utf-8")
CLIENTS = PAGE.with_name("clients.md")


def test_the_parts_that_are_made_from_the_code_are_up_to_date() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    assert sorted(part for text in texts for part in parts_of(text)) == sorted(PARTS)
    assert [page(text) for text in texts] == texts, "run: python -m tests.docs.generate"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine())


@pytest.mark.slow
def test_every_status_has_a_row(client: httpx.Client) -> None:
    paths = client.get("/schema/openapi.json").json()["paths"]
    statuses = {status for operations in paths.values() for operation in operations.values() for status in operation["responses"]}
    (table,) = re.findall(r"\| status \| when \|\n(.*?)\n\n", TEXT, flags=re.DOTALL)
    assert {status for status in statuses if status >= "400"} <= set(re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE))


SHOWN = [
    ("scoring.md", "/v1/score", '"object": "scoring"', {"query": "a", "items": ["b"], "labels": [" Yes"]}),
    ("generation.md", "/v1/length", '"object": "length"', {"input": "a"}),
    ("api.md", "/tokenize", '"token_strs": ["re"', {"prompt": "red running shoes", "return_token_strs": True}),
]


@pytest.mark.parametrize(("name", "path", "marker", "body"), SHOWN)
def test_the_answers_shown_have_the_fields_of_real_ones(
    client: httpx.Client, name: str, path: str, marker: str, body: object
) -> None:
    text = PAGE.with_name(name).read_text(encoding="utf-8")
    (shown,) = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL) if marker in block]
    assert fields(shown) == fields(client.post(path, json=body).json())


def fields(value: object, path: str = "") -> set[str]:
    """Paths of all fields."""
    if isinstance(value, dict):
        return {path}.union(*(fields(inner, f"{path}.{name}") for name, inner in value.items()))
    return {path}.union(*(fields(inner, f"{path}[]") for inner in value)) if isinstance(value, list) else {path}


@pytest.mark.slow
def test_paths_that_are_not_served_are_not_and_the_others_are(client: httpx.Client) -> None:
    (part,) = re.findall(r"<!-- not served -->\n(.*?)<!-- end -->", CLIENTS.read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.strip().splitlines()[2:]]
    absent, present = (re.findall(r"`(/[^`]+)`", " ".join(row[column] for row in rows)) for column in (1, 2))
    assert len(absent) > 8
    served = set(client.get("/schema/openapi.json").raise_for_status().json()["paths"])
    assert (served.intersection(absent), set(present) - served) == (set(), set())
    assert {path: client.post(path, json={}).status_code in (404, 405) for path in absent} == dict.fromkeys(absent, True)
