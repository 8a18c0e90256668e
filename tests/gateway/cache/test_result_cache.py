"""The in-memory cache, its keys, and single flight."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from gateway.cache.memory import MemoryCache, _size
from gateway.catalogues.record import packed, row_of
from gateway.scoring.scorer import result_keys

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=6)


def key(place: int) -> bytes:
    return place.to_bytes(16, "big")


async def test_the_least_recently_used_goes_first() -> None:
    cache = MemoryCache(3, 1 << 20)
    await cache.put_many({key(place): (float(place),) for place in range(3)})
    await cache.get_many([key(0)])
    await cache.put_many({key(3): (3.0,)})
    assert await cache.get_many([key(place) for place in range(4)]) == [(0.0,), None, (2.0,), (3.0,)]
    assert len(cache) == 3


async def test_bytes_are_bounded_too() -> None:
    cache = MemoryCache(10**6, 10 * _size((0.0,) * 5))
    for place in range(100):
        await cache.put_many({key(place): (0.5,) * 5, key(place + 1): (0.5,) * 5})
    assert len(cache) == 10
    assert cache.bytes == 10 * _size((0.0,) * 5)


@pytest.mark.parametrize("limits", [(0, 1 << 20), (100, 0)])
async def test_a_cache_without_room_holds_nothing(limits: tuple[int, int]) -> None:
    cache = MemoryCache(*limits)
    await cache.put_many({key(1): (1.0,)})
    assert await cache.get_many([key(1)]) == [None]


async def test_the_bound_on_bytes_is_honest() -> None:
    """The interpreter allocates at most a fifth more for many entries than was counted."""
    cache = MemoryCache(10**6, 1 << 30)
    tracemalloc.start()
    try:
        for place in range(20_000):
            await cache.put_many({bytes(key(place)): tuple(float(place + label) for label in range(4))})
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.6 * cache.bytes < used < 1.2 * cache.bytes


@given(prefix=tokens, branch=tokens, cut=st.integers(0, 12))
def test_a_key_does_not_depend_on_the_split(prefix: list[int], branch: list[int], cut: int) -> None:
    prompt = prefix + branch
    cut = min(cut, len(prompt))
    assert result_keys("f", wire.Labels([1, 2]), prefix, [branch], salt="") == result_keys(
        "f", wire.Labels([1, 2]), prompt[:cut], [prompt[cut:]], salt=""
    )


def test_a_key_depends_on_everything_else() -> None:
    keys = [
        *result_keys("f", wire.Labels([1, 2]), [3], [[4], [5], [4, 5], []], salt=""),
        *result_keys("g", wire.Labels([1, 2]), [3], [[4]], salt=""),
        *result_keys("f", wire.Labels([2, 1]), [3], [[4]], salt=""),
        *result_keys("f", wire.Labels([1, 2], raw=True), [3], [[4]], salt=""),
        *result_keys("f", wire.Labels([12]), [3], [[4]], salt=""),
    ]
    assert len(set(keys)) == len(keys)


def test_a_registered_item_is_known_by_its_digest() -> None:
    def keys(*rows: tuple[list[int], str], seam: bytes = b"", suffix: Sequence[int] = (8,)) -> list[bytes]:
        placed = [row_of(packed(*row))[0] for row in rows]
        for row in placed:
            row.frombytes(seam)
            row.content += seam
        return result_keys("f", wire.Labels([1]), [], placed, suffix, salt="")

    seven = array("I", [7]).tobytes()
    assert keys(([4, 5], "")) == keys(([4, 5], ""))
    different = [
        *keys(([4, 5], ""), ([4, 6], ""), ([4, 5], "a"), ([], "")),
        *keys(([4, 5], ""), seam=seven),
        *keys(([4, 5], ""), suffix=(9,)),
        *result_keys("f", wire.Labels([1]), [], [[4, 5]], [8], salt=""),
    ]
    assert len(set(different)) == len(different)
