"""Which constraints, tools and variables of templates count as quick."""

from __future__ import annotations

import pytest

from gateway.handling.reader import KEPT_FIELDS, QUICK_SECONDS, SLOW_SECONDS, Fields, QuickFields


def fields(number: int, tenant: str = "a") -> Fields:
    return Fields(tenant, "model", number.to_bytes(2))


@pytest.mark.parametrize("last", [SLOW_SECONDS, float("inf")])
def test_fields_are_quick_until_they_are_slow(last: float) -> None:
    quick = QuickFields()
    quick.note(fields(1), QUICK_SECONDS)
    assert fields(1) not in quick
    quick.note(fields(1), QUICK_SECONDS / 2)
    quick.note(fields(1), SLOW_SECONDS / 2)
    assert fields(1) in quick
    assert fields(1, "b") not in quick, "each tenant has its own"
    quick.note(fields(1), last)
    assert fields(1) not in quick


def test_a_tenant_displaces_only_its_own_and_those_used_last_stay() -> None:
    quick = QuickFields()
    quick.note(fields(0, "b"), 0)
    for number in range(KEPT_FIELDS + 10):
        quick.note(fields(number), 0)
        quick.note(fields(0), 0)
    assert fields(0) in quick
    assert fields(0, "b") in quick
    assert sum(fields(number) in quick for number in range(KEPT_FIELDS + 10)) == KEPT_FIELDS
