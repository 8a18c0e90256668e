"""Prefix and branches are, joined, exactly the tokens of the whole prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from yardstick_llm.gateway.text.prompts import EmptyPromptError, common_suffix, join_ids, tokenise_items, tokenise_pairs
from yardstick_llm.gateway.text.tokenizer import Tokenizer

WORDS = st.lists(
    st.sampled_from(["wood", "en", "ness", " red", "red", " ", "\n", "😀", "4", "<|im_end|>", "é", "\u0301"]), max_size=6
)
TEXT = st.builds("".join, WORDS)
IDS = st.lists(st.integers(0, 5), max_size=4)


@given(query=TEXT, items=st.lists(TEXT, min_size=1, max_size=5))
def test_joined_they_are_the_tokens_of_the_concatenated_text(
    library: Library, tokenizer: Tokenizer, query: str, items: list[str]
) -> None:
    prompts = [library.encode(query + item).ids for item in items]
    if not all(prompts):
        with pytest.raises(EmptyPromptError) as caught:
            tokenise_pairs(tokenizer, query, items)
        assert caught.value.index == prompts.index([])
        return
    prefix, branches = tokenise_pairs(tokenizer, query, items)
    assert [prefix + branch for branch in branches] == prompts
    assert all(branches)
    if len(set(items)) > 1:
        firsts = {branch[0] for branch in branches}
        assert len(firsts) > 1 or min(map(len, branches)) == 1, "the prefix could be longer"


@given(query=TEXT, items=st.lists(TEXT, min_size=1, max_size=5))
def test_items_that_come_first_and_the_suffix_are_the_tokens_of_the_concatenated_text(
    library: Library, tokenizer: Tokenizer, query: str, items: list[str]
) -> None:
    prompts = [library.encode(item + query).ids for item in items]
    if not all(prompts):
        with pytest.raises(EmptyPromptError) as caught:
            tokenise_items(tokenizer, query, items)
        assert caught.value.index == prompts.index([])
        return
    rows, suffix = tokenise_items(tokenizer, query, items)
    assert [row + suffix for row in rows] == prompts
    assert len(suffix) <= len(library.encode(query).ids), "an item's tokens are no part of the suffix"


def test_the_query_is_the_suffix_whatever_the_items_end_with(byte_tokenizer: Tokenizer) -> None:
    items = ["red shoes end here", "blue shoes end here"]
    rows, suffix = tokenise_items(byte_tokenizer, " for running", items)
    assert suffix == byte_tokenizer.encode(" for running")
    assert rows == [byte_tokenizer.encode(item) for item in items]
    assert tokenise_items(byte_tokenizer, " for running", items[:1]) == (rows[:1], suffix)
    assert tokenise_items(byte_tokenizer, "", items) == (rows, [])
    rows, suffix = tokenise_items(byte_tokenizer, "en table", ["the wood", "the"])
    assert rows[0] + suffix == byte_tokenizer.encode("the wooden table")
    assert suffix == byte_tokenizer.encode(" table"), "the seam's token depends on the item"


@given(prompts=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=4), most=st.integers(0, 6))
def test_the_common_suffix(prompts: list[list[int]], most: int) -> None:
    length = common_suffix(prompts, most)
    ends = [{tuple(prompt[len(prompt) - size :]) for prompt in prompts} for size in range(length + 2)]
    assert len(ends[length]) == 1
    assert length == min(most, *map(len, prompts)) or len(ends[length + 1]) > 1


def test_a_merge_across_the_seam_is_made(byte_tokenizer: Tokenizer) -> None:
    tokenizer = byte_tokenizer
    assert tokenizer.encode(" wood") + tokenizer.encode("en") != tokenizer.encode(" wooden")
    prefix, branches = tokenise_pairs(tokenizer, "the wood", ["en table", " table"])
    assert prefix + branches[0] == tokenizer.encode("the wooden table")
    assert prefix + branches[1] == tokenizer.encode("the wood table")


def test_special_tokens_of_the_post_processor_are_in_the_prefix(space_library: Library, space_tokenizer: Tokenizer) -> None:
    begin = space_library.token_to_id("<s>")
    prefix, _ = tokenise_pairs(space_tokenizer, "red", [" shoes", " table"])
    assert prefix[0] == begin
    (row,), suffix = tokenise_items(space_tokenizer, "red", ["red "])
    assert row[0] == begin
    assert row + suffix == space_library.encode("red red").ids


@pytest.mark.parametrize("items", [[" shoes and table"], [" shoes and table"] * 3])
def test_the_same_item_alone_stays_out_of_the_prefix(byte_tokenizer: Tokenizer, items: list[str]) -> None:
    prefix, branches = tokenise_pairs(byte_tokenizer, "red running", items)
    assert prefix == byte_tokenizer.encode("red running")
    assert branches == [byte_tokenizer.encode(" shoes and table")] * len(items)


def test_no_items_are_no_branches(byte_tokenizer: Tokenizer) -> None:
    assert tokenise_pairs(byte_tokenizer, "red", []) == ([], [])
    assert join_ids([1], []) == ([], [])


@given(query=IDS, items=st.lists(IDS, min_size=1, max_size=5))
def test_ids_are_joined_as_they_are(query: list[int], items: list[list[int]]) -> None:
    prompts = [query + item for item in items]
    if not all(prompts):
        with pytest.raises(EmptyPromptError, match=rf"items\[{prompts.index([])}\]"):
            join_ids(query, items)
        return
    prefix, branches = join_ids(query, items)
    assert [prefix + branch for branch in branches] == prompts
    assert all(branches)


def test_a_query_of_ids_is_the_prefix() -> None:
    assert join_ids([1, 2], [[3, 4], [3, 5]]) == ([1, 2], [[3, 4], [3, 5]])
    assert join_ids([1, 2], [[3], []]) == ([1], [[2, 3], [2]])
