"""Cutting a text where it is safe changes no token, whatever follows or precedes; a query is tokenised once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from tests.gateway.text.conftest import CUTTABLE, byte_level, from_library, sentencepiece_with_bos
from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.text import tokenizer as module
from yardstick_llm.gateway.text.cuts import cuts_of
from yardstick_llm.gateway.text.prepared import Bounds, TooManyTokens
from yardstick_llm.gateway.text.prompts import tokenise_items, tokenise_pairs
from yardstick_llm.gateway.text.tokenizer import Tokenizer

TRICKY = [
    *" \n\t\r/'.,3éà日。",
    "  ", "   ", "\n\n", " \n", "\r\n", "word", "wooden", " red", "'s", "'LL", "42", "1234", "100 ", "\u0301", "\u00a0", "\u200b",
    "\u1100\u1161\u11a8", "\u2028", "\x1c", "<|im_end|>", "<think>", "<|tail|>", "<|both|>", "<", "|>", "😀", "ﬁ", "\x85", "Ab",
]  # fmt: skip
TEXT = st.builds("".join, st.lists(st.one_of(st.sampled_from(TRICKY), st.characters(codec="utf-8")), max_size=12))


@pytest.fixture(scope="module", params=CUTTABLE)
def cuttable(request: pytest.FixtureRequest) -> Library:
    return CUTTABLE[request.param]()


@pytest.fixture(scope="module")
def cutting(cuttable: Library) -> Tokenizer:
    return from_library(cuttable)


@pytest.mark.slow
@given(before=TEXT, text=TEXT, after=TEXT)
@example(before="", text="a word red", after="")
@example(before="", text="word red b", after="")
@example(before="", text="a <|tail|> b", after="")
def test_both_sides_of_a_cut_are_the_whole(cuttable: Library, cutting: Tokenizer, before: str, text: str, after: str) -> None:
    for last in (True, False):
        cut = cutting.cut(text, last=last)
        if cut is None:
            continue
        left, right = before + text[:cut], text[cut:] + after
        whole = cuttable.encode(left + right, add_special_tokens=False).ids
        assert whole == cuttable.encode(left, add_special_tokens=False).ids + cuttable.encode(right, add_special_tokens=False).ids
        assert cutting.encode(left + right, parse_special_tokens=False, add_special_tokens=False) == cutting.encode(
            left, parse_special_tokens=False, add_special_tokens=False
        ) + cutting.encode(right, parse_special_tokens=False, add_special_tokens=False)


@pytest.mark.slow
@given(query=TEXT, items=st.lists(TEXT, min_size=2, max_size=4), special=st.booleans())
def test_a_query_in_two_parts_gives_the_tokens_of_whole_prompts(
    cuttable: Library, cutting: Tokenizer, query: str, items: list[str], special: bool
) -> None:
    query = f"a b {query} c\nd"
    prefix, branches = tokenise_pairs(cutting, query, items, add_special_tokens=special)
    joined = [query + item for item in items]
    assert [prefix + branch for branch in branches] == [cuttable.encode(text, add_special_tokens=special).ids for text in joined]
    assert all(branches)
    rows, suffix = tokenise_items(cutting, query, items)
    assert [row + suffix for row in rows] == [cuttable.encode(item + query).ids for item in items]


@given(text=st.lists(TEXT, max_size=30).map(" ".join), special=st.booleans())
def test_a_text_in_slices_gives_the_tokens_of_the_whole(library: Library, tokenizer: Tokenizer, text: str, special: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_CHARACTERS", 16)
        assert tokenizer.encode(text, add_special_tokens=special) == library.encode(text, add_special_tokens=special).ids


def test_the_query_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = from_library(byte_level())
    read: list[int] = []
    whole = Tokenizer._whole
    monkeypatch.setattr(Tokenizer, "_whole", lambda self, text, adds: (read.append(len(text)), whole(self, text, adds))[1])
    query, items = "red running shoes " * 1000 + "and", [f" item {place}" for place in range(1000)]
    prefix, branches = tokenise_pairs(tokenizer, query, items)
    assert sum(read) < 2 * len(query) + 20 * len(items)
    assert prefix + branches[77] == tokenizer.encode(query + items[77])


@pytest.mark.parametrize("text", ["red " * 10**6, "x" * 10**6, "日本" * 10**6])
def test_a_text_too_long_is_refused_early(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tokenizer = from_library(byte_level())
    read: list[int] = []
    whole = Tokenizer._whole
    monkeypatch.setattr(Tokenizer, "_whole", lambda self, text, adds: (read.append(len(text)), whole(self, text, adds))[1])
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
