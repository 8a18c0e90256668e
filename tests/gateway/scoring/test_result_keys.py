"""Keys of cached results, and single flight."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from yardstick_llm.engine import wire
from yardstick_llm.gateway.scoring.scorer import result_keys
from yardstick_llm.gateway.text.catalogue import packed, row_of

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=6)


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
