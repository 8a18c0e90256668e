"""Tokens of stored items and queries are those of the joined texts, for every kind of tokeniser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yardstick_llm.gateway.text.catalogue import Frame, Template
from yardstick_llm.gateway.text.prepared import UNBOUND
from yardstick_llm.gateway.text.tokenizer import Tokenizer

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
