"""Prefix and branches are, joined, exactly the tokens of the whole prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from gateway.text.prompts import EmptyPromptError, join_ids, tokenise_pairs
from gateway.text.tokenizer import Tokenizer

WORDS = st.lists(
    st.sampled_from(["wood", "en", "ness", " red", "red", " ", "\n", "😀", "4", "<|im_end|>", "é", "\u0301"]), max_size=6
)
TEXT = st.builds("".join, WORDS)
IDS = st.lists(st.integers(0, 5), max_size=4)


@given(query=TEXT, items=st.lists(TEXT, min_size=1, max_size=5), item_first=st.booleans())
def test_joined_they_are_the_tokens_of_the_concatenated_text(
    library: Library, tokenizer: Tokenizer, query: str, items: list[str], item_first: bool
) -> None:
    prompts = [library.encode(item + query if item_first else query + item).ids for item in items]
    if not all(prompts):
        with pytest.raises(EmptyPromptError) as caught:
            tokenise_pairs(tokenizer, query, items, item_first=item_first)
        assert caught.value.index == prompts.index([])
        return
    prefix, branches = tokenise_pairs(tokenizer, query, items, item_first=item_first)
    assert [prefix + branch for branch in branches] == prompts
    assert all(branches)
    if len(set(items)) > 1:
        firsts = {branch[0] for branch in branches}
        assert len(firsts) > 1 or min(map(len, branches)) == 1, "the prefix could be longer"


def test_a_merge_across_the_seam_is_made(byte_tokenizer: Tokenizer) -> None:
    tokenizer = byte_tokenizer
    assert tokenizer.encode(" wood") + tokenizer.encode("en") != tokenizer.encode(" wooden")
    prefix, branches = tokenise_pairs(tokenizer, "the wood", ["en table", " table"], item_first=False)
    assert prefix + branches[0] == tokenizer.encode("the wooden table")
    assert prefix + branches[1] == tokenizer.encode("the wood table")


def test_special_tokens_of_the_post_processor_are_in_the_prefix(space_library: Library, space_tokenizer: Tokenizer) -> None:
    begin = space_library.token_to_id("<s>")
    prefix, _ = tokenise_pairs(space_tokenizer, "red", [" shoes", " table"], item_first=False)
    assert prefix[0] == begin
    prefix, branches = tokenise_pairs(space_tokenizer, "red", ["red "], item_first=True)
    assert prefix == [begin], "an item is no prefix, even where it looks like the query"
    assert prefix + branches[0] == space_library.encode("red red").ids


@pytest.mark.parametrize("items", [[" shoes and table"], [" shoes and table"] * 3])
def test_the_same_item_alone_stays_out_of_the_prefix(byte_tokenizer: Tokenizer, items: list[str]) -> None:
    prefix, branches = tokenise_pairs(byte_tokenizer, "red running", items, item_first=False)
    assert prefix == byte_tokenizer.encode("red running")
    assert branches == [byte_tokenizer.encode(" shoes and table")] * len(items)


def test_no_items_are_no_branches(byte_tokenizer: Tokenizer) -> None:
    assert tokenise_pairs(byte_tokenizer, "red", [], item_first=False) == ([], [])
    assert join_ids([1], [], item_first=False) == ([], [])


@given(query=IDS, items=st.lists(IDS, min_size=1, max_size=5), item_first=st.booleans())
def test_ids_are_joined_as_they_are(query: list[int], items: list[list[int]], item_first: bool) -> None:
    prompts = [item + query if item_first else query + item for item in items]
    if not all(prompts):
        with pytest.raises(EmptyPromptError, match=rf"items\[{prompts.index([])}\]"):
            join_ids(query, items, item_first=item_first)
        return
    prefix, branches = join_ids(query, items, item_first=item_first)
    assert [prefix + branch for branch in branches] == prompts
    assert all(branches)


def test_a_query_of_ids_is_the_prefix() -> None:
    assert join_ids([1, 2], [[3, 4], [3, 5]], item_first=False) == ([1, 2], [[3, 4], [3, 5]])
    assert join_ids([1, 2], [[3], []], item_first=False) == ([1], [[2, 3], [2]])
    assert join_ids([1, 2], [[3, 4], [3, 5]], item_first=True) == ([3], [[4, 1, 2], [5, 1, 2]])
    assert join_ids([1, 2], [[3, 4]], item_first=True) == ([], [[3, 4, 1, 2]])
