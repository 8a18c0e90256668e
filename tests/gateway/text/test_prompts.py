"""Prefix and branches are, joined, exactly the tokens of the whole prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from yardstick_llm.gateway.text.prompts import EmptyPromptError, join_ids, tokenise_items, tokenise_pairs
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


@pytest.mark.parametrize("items", [[" shoes and table"], [" shoes and table"] * 3])
def test_the_same_item_alone_stays_out_of_the_prefix(byte_tokenizer: Tokenizer, items: list[str]) -> None:
    prefix, branches = tokenise_pairs(byte_tokenizer, "red running", items)
    assert prefix == byte_tokenizer.encode("red running")
    assert branches == [byte_tokenizer.encode(" shoes and table")] * len(items)


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
