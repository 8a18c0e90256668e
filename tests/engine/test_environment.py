"""Variables of the loop process."""

from __future__ import annotations

import pytest

from engine.serving.environment import IDLE_THREADS, MALLOC, PRODUCTS, with_defaults


def test_idle_threads_sleep() -> None:
    assert with_defaults({"HOME": "/"}) == {"HOME": "/"} | MALLOC | PRODUCTS | IDLE_THREADS


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_says_is_kept(name: str) -> None:
    assert with_defaults({name: "5"}) == MALLOC | PRODUCTS | {name: "5"}
    assert with_defaults({name: "5", "MALLOC_TRIM_THRESHOLD_": "1"})["MALLOC_TRIM_THRESHOLD_"] == "1"
    assert with_defaults({"LRU_CACHE_CAPACITY": "9"})["LRU_CACHE_CAPACITY"] == "9"
