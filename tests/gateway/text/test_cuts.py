"""Texts in parts - queries and items, before or after each other, registered or not - have the tokens of the joined texts. Cutting
a text where it is safe changes no token, whatever follows or precedes; a query is tokenised once."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from tests.gateway.text.conftest import CUTTABLE, byte_level, from_library, sentencepiece_with_bos
from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.text import tokenizer as module
from yardstick_llm.gateway.text.catalogue import Frame, Template
from yardstick_llm.gateway.text.cuts import cuts_of
from yardstick_llm.gateway.text.prepared import UNBOUND, Bounds, TooManyTokens
from yardstick_llm.gateway.text.prompts import EmptyPromptError, join_ids, tokenise_items, tokenise_pairs
from yardstick_llm.gateway.text.tokenizer import Tokenizer

TRICKY = [
    *" \n\t\r/'.,3éà日。",
    "  ", "   ", "\n\n", " \n", "\r\n", "word", "wooden", " red", "'s", "'LL", "42", "1234", "100 ", "\u0301", "\u00a0", "\u200b",
    "\u1100\u1161\u11a8", "\u2028", "\x1c", "<|im_end|>", "<think>", "<|tail|>", "<|both|>", "<", "|>", "😀", "ﬁ", "\x85", "Ab",
]  # fmt: skip
TEXT = st.builds("".join, st.lists(st.one_of(st.sampled_from(TRICKY), st.characters(codec="utf-8")), max_size=12))


@cache
def cuttable(kind: str) -> tuple[Library, Tokenizer]:
    return CUTTABLE[kind](), from_library(CUTTABLE[kind]())


KINDS = st.sampled_from(sorted(CUTTABLE))
several = settings(max_examples=2 * settings().max_examples)
"""Examples for all kinds of tokenisers together."""


@pytest.mark.slow
@several
@given(kind=KINDS, before=TEXT, text=TEXT, after=TEXT)
@example(kind="gpt2", before="", text="a word red", after="")
@example(kind="llama3", before="", text="word red b", after="")
@example(kind="digits", before="", text="a <|tail|> b", after="")
def test_both_sides_of_a_cut_are_the_whole(kind: str, before: str, text: str, after: str) -> None:
    library, cutting = cuttable(kind)
    for last in (True, False):
        cut = cutting.cut(text, last=last)
        if cut is None:
            continue
        left, right = before + text[:cut], text[cut:] + after
        whole = library.encode(left + right, add_special_tokens=False).ids
        assert whole == library.encode(left, add_special_tokens=False).ids + library.encode(right, add_special_tokens=False).ids
        assert cutting.encode(left + right, parse_special_tokens=False, add_special_tokens=False) == cutting.encode(
            left, parse_special_tokens=False, add_special_tokens=False
        ) + cutting.encode(right, parse_special_tokens=False, add_special_tokens=False)


@pytest.mark.slow
@several
@given(kind=KINDS, query=TEXT, items=st.lists(TEXT, min_size=2, max_size=4), special=st.booleans())
def test_a_query_in_two_parts_gives_the_tokens_of_whole_prompts(kind: str, query: str, items: list[str], special: bool) -> None:
    library, cutting = cuttable(kind)
    query = f"a b {query} c\nd"
    prefix, branches = tokenise_pairs(cutting, query, items, add_special_tokens=special)
    joined = [query + item for item in items]
    assert [prefix + branch for branch in branches] == [library.encode(text, add_special_tokens=special).ids for text in joined]
    assert all(branches)
    rows, suffix = tokenise_items(cutting, query, items)
    assert [row + suffix for row in rows] == [library.encode(item + query).ids for item in items]


@given(text=st.lists(TEXT, max_size=30).map(" ".join), special=st.booleans())
def test_a_text_in_slices_gives_the_tokens_of_the_whole(library: Library, tokenizer: Tokenizer, text: str, special: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_CHARACTERS", 16)
        assert tokenizer.encode(text, add_special_tokens=special) == library.encode(text, add_special_tokens=special).ids


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters that each call of the tokeniser has read."""
    found: list[int] = []
    whole = Tokenizer._whole
    monkeypatch.setattr(Tokenizer, "_whole", lambda self, text, adds: (found.append(len(text)), whole(self, text, adds))[1])
    return found


def test_the_query_is_tokenised_once(read: list[int]) -> None:
    tokenizer = from_library(byte_level())
    query, items = "red running shoes " * 1000 + "and", [f" item {place}" for place in range(1000)]
    prefix, branches = tokenise_pairs(tokenizer, query, items)
    assert sum(read) < 2 * len(query) + 20 * len(items)
    assert prefix + branches[77] == tokenizer.encode(query + items[77])


@pytest.mark.parametrize("text", ["red " * 10**6, "x" * 10**6, "日本" * 10**6])
def test_a_text_too_long_is_refused_early(read: list[int], text: str) -> None:
    tokenizer = from_library(byte_level())
    with pytest.raises(TooManyTokens):
        tokenizer.encode(text, limit=10_000)
    assert sum(read) <= 2 * module.SLICE_CHARACTERS


def test_other_structures_have_no_cuts_and_are_bounded() -> None:
    tokenizer = from_library(sentencepiece_with_bos())
    assert tokenizer.cut("red running shoes", last=True) is None
    bounds = Bounds(max_request_characters=1000)
    with pytest.raises(InvalidRequest, match="max_request_characters"):
        tokenise_pairs(tokenizer, "red " * 100, ["a", "b", "c"], bounds=bounds)
    tokenise_pairs(tokenizer, "red " * 300, ["a"], bounds=bounds)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\s+|\S+ \S+"}, "behavior": "Isolated", "invert": False}},
    ],
)
def test_unknown_structures_have_no_cuts(change: dict[str, Any]) -> None:
    document = json.loads(byte_level().to_str())
    assert cuts_of(document, document["added_tokens"])
    assert cuts_of(document | change, document["added_tokens"]) is None


def test_tokens_of_all_prompts_together_are_bounded() -> None:
    tokenizer = from_library(byte_level())
    bounds = Bounds(max_request_tokens=500)
    query, items = "red running shoes " * 10, ["blue"] * 30 + ["red"]
    with pytest.raises(InvalidRequest, match="max_request_tokens"):
        tokenise_items(tokenizer, query, items, bounds=bounds)
    tokenise_pairs(tokenizer, query, items, bounds=bounds)
    with pytest.raises(InvalidRequest, match="max_request_tokens"):
        tokenise_pairs(tokenizer, query, ["blue shoes " * 10] * 31, bounds=bounds)


def test_holes_in_the_ids_of_a_vocabulary_do_no_harm() -> None:
    """The library gives a new token the number of tokens as id, which another token may have."""
    document = json.loads(byte_level().to_str())
    ids = {token: id if id < 200 else id + 1000 for token, id in document["model"]["vocab"].items()}
    document["model"]["vocab"] = ids
    for token in document["added_tokens"]:
        token["id"] = ids.get(token["content"], token["id"] + 1000)
    tokenizer = Tokenizer.from_files(TokenizerFiles(json.dumps(document).encode(), None, {}))
    assert min(tokenizer._sentinel_ids) >= tokenizer.vocab_size


WORDS = st.lists(
    st.sampled_from(["wood", "en", "ness", " red", "red", " ", "\n", "😀", "4", "<|im_end|>", "é", "\u0301"]), max_size=6
)
SEAMS = st.builds("".join, WORDS)
IDS = st.lists(st.integers(0, 5), max_size=4)


@given(query=SEAMS, items=st.lists(SEAMS, min_size=1, max_size=5))
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


@given(query=SEAMS, items=st.lists(SEAMS, min_size=1, max_size=5))
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


TEMPLATES = [
    Template(),
    Template(("{item} {query}",)),
    Template(("Item: {item}\nQuestion:{query}\nAnswer:",)),
    Template(("a{item}b{query}c",), add_special_tokens=False),
]
texts = st.lists(
    st.sampled_from(["wood", "en", " ", "\n", "the", "The", "é", "👟", "5", "1", ".", "a", "'s", " table", "\u0301"]), max_size=6
).map("".join)


@pytest.mark.slow
@given(st.sampled_from(TEMPLATES), st.lists(texts, min_size=1, max_size=5), texts)
def test_tokens_are_those_of_the_joined_text(tokenizer: Tokenizer, template: Template, items: list[str], query: str) -> None:
    frame = Frame(template, tokenizer)
    stored = frame.store(items, 1000)
    tails = list(dict.fromkeys(each.tail for each in stored))
    rows, suffix, _ = frame.seams(tails, query, 1000, UNBOUND)
    for item, each in zip(items, stored, strict=True):
        text = template.pieces[0].replace("{item}", item).replace("{query}", query)
        expected = tokenizer.encode(text, add_special_tokens=template.add_special_tokens, parse_special_tokens=False)
        assert [*each.ids, *rows[tails.index(each.tail)], *suffix] == expected


def test_a_template_with_a_safe_cut_has_one_tail(byte_tokenizer: Tokenizer) -> None:
    frame = Frame(Template(("{item}\nQuestion:{query}",)), byte_tokenizer)
    stored = frame.store(["red shoes", "oak", "an old table"], 100)
    assert {each.tail for each in stored} == {"Question:"}
    rows, suffix, _ = frame.seams(["Question:"], " is it red", 100, UNBOUND)
    assert byte_tokenizer.encode(" is it red", add_special_tokens=False) == suffix[-len(suffix) :]
    assert rows == [byte_tokenizer.encode("Question:", add_special_tokens=False)]
    pieces = Frame(Template(("{item}", "?{query}")), byte_tokenizer)
    assert {each.tail for each in pieces.store(["red shoes", "oak"], 100)} == {""}
