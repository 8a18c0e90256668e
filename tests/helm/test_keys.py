"""API keys in the chart's values: the chart refuses what the gateway's parser refuses, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

from tests.gateway.keys import entry
from tests.helm.chart import helm, manifests, one, render
from yardstick_llm.gateway.keys import parse_keys

Entries = list[dict[str, Any]]
LARGEST = 10**12
FIRST = entry("first")


def a(**fields: Any) -> Entries:
    return [entry("a") | fields]


ACCEPTED: dict[str, Entries] = {
    "none": [],
    "two": [entry("a"), entry("b")],
    "limits": a(models=["m"], requests_per_minute=1, tokens_per_minute=LARGEST, items_per_minute=2, concurrency=3, weight=0.1),
    "rights": a(group="g", weight=100, priority_min=-5, priority_max=-5, catalogues="read", admin=True),
    "fields without a value": a(models=None, requests_per_minute=None, concurrency=None, expires=None, group=None),
    "capitals in the digest": a(sha256="AB" * 32),
    "a long name": a(name="ä" * 256),
    "one name in two cases": [entry("a"), entry("A")],
    "largest priorities": a(priority_min=-(2**31), priority_max=2**31 - 1),
    "a day in a leap year": a(expires="2028-02-29T00:00:00Z"),
    "a time with a fraction and a zone": a(expires="2027-01-31t23:59:59.123456789+05:30"),
    "a time with a space": a(expires="2027-01-31 00:00:00z"),
}
REFUSED: dict[str, Entries] = {
    "one name": [entry("a"), entry("b"), entry("a") | {"sha256": "ab" * 32}],
    "the name of the generated key": [entry("first") | {"sha256": "ab" * 32}],
    "one digest": [entry("a"), entry("b") | {"sha256": entry("a")["sha256"]}],
    "one digest in two cases": [entry("a"), entry("b") | {"sha256": entry("a")["sha256"].upper()}],
    "the digest of nothing": a(sha256=hashlib.sha256(b"").hexdigest()),
    "no name": [{"sha256": "ab" * 32}],
    "an empty name": a(name=""),
    "a name that is too long": a(name="x" * 257),
    "no digest": [{"name": "a"}],
    "a short digest": a(sha256="ab"),
    "a line after the digest": a(sha256="ab" * 32 + "\n"),
    "an unknown field": a(grup="g"),
    "no models": a(models=[]),
    "no request": a(requests_per_minute=0),
    "half a request": a(requests_per_minute=1.5),
    "a limit that is too large": a(items_per_minute=LARGEST + 1),
    "no weight": a(weight=0),
    "a weight without a value": a(weight=None),
    "priorities out of order": a(priority_min=5, priority_max=4),
    "a lowest priority above the default highest": a(priority_min=101),
    "a highest priority below the default lowest": a(priority_max=-101),
    "a priority beyond 32 bits": a(priority_max=2**31),
    "unknown rights": a(catalogues="none"),
    "a right as text": a(admin="true"),
    "a day without a time": a(expires="2027-01-31"),
    "a time without a zone": a(expires="2027-01-31T00:00:00"),
    "a time without seconds": a(expires="2027-01-31T00:00Z"),
    "a day that no month has": a(expires="2027-02-29T00:00:00Z"),
    "a month that no year has": a(expires="2027-13-01T00:00:00Z"),
    "an hour that no day has": a(expires="2027-01-31T24:00:00Z"),
    "a leap second": a(expires="2016-12-31T23:59:60Z"),
    "a year before the first": a(expires="0000-01-01T00:00:00Z"),
    "a zone of a day": a(expires="2027-01-31T00:00:00+24:00"),
    "a line after the time": a(expires="2027-01-31T00:00:00Z\n"),
}


@pytest.mark.parametrize("entries", ACCEPTED.values(), ids=ACCEPTED)
def test_the_gateway_takes_every_key_that_the_chart_takes(entries: Entries) -> None:
    file = base64.b64decode(one(manifests({"auth": {"keys": entries}}), "Secret", "yardstick-api-keys")["data"]["keys.json"])
    keys, problems = parse_keys(file)
    assert ([key.name for key in keys], problems) == (["first", *(entry["name"] for entry in entries)], [])


@pytest.mark.slow
@pytest.mark.parametrize("entries", REFUSED.values(), ids=REFUSED)
def test_the_chart_refuses_every_key_that_the_gateway_refuses(entries: Entries) -> None:
    assert len(parse_keys(json.dumps({"keys": [FIRST, *entries]}).encode()).problems) == 1
    with pytest.raises((helm().HelmValuesError, helm().HelmError), match="keys"):
        render({"auth": {"keys": entries}})


def test_the_generated_key_may_give_its_name_away() -> None:
    found = manifests({"auth": {"generateFirstKey": False, "keys": [FIRST]}})
    assert (
        base64.b64decode(one(found, "Secret", "yardstick-api-keys")["data"]["keys.json"])
        == json.dumps({"keys": [FIRST]}, separators=(",", ":")).encode()
    )
