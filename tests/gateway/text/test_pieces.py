"""Texts that are encoded piece by piece have exactly the library's ids, in bounded memory."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from tests.gateway.text.conftest import BY_WORDS, CUTTABLE, QWEN_SPLIT, byte_level, from_library
from tests.gateway.text.test_cuts import TEXT, several
from yardstick_llm.gateway.text import tokenizer as module
from yardstick_llm.gateway.text.tokenizer import Tokenizer

PROSE = Path(__file__).parents[3].joinpath("README.md").read_text()
IN_CONTEXTS = "a{0}b 1{0}2 .{0}.{0}{0} '{0} {0}\n{0}"
SAID = ["<|im_start|>", "<|im_end|>", "<think>", "user\n", " red shoes", "\n\n", "  ", "'s", "<"]
QWEN = from_library(byte_level()), byte_level()
BY_PIECES = {name: make for name, make in CUTTABLE.items() if name != "digits"} | BY_WORDS
"""Tokenisers whose texts one expression divides, or whitespace."""


@pytest.fixture(scope="module", params=BY_PIECES)
def library(request: pytest.FixtureRequest) -> Library:
    return BY_PIECES[request.param]()


@cache
def both(kind: str) -> tuple[Library, Tokenizer]:
    library = BY_PIECES[kind]()
    return library, from_library(library)


@pytest.fixture(scope="module")
def tokenizer(library: Library) -> Tokenizer:
    return from_library(library)


def by_pieces(tokenizer: Tokenizer, text: str) -> list[int] | None:
    assert tokenizer._pieces is not None
    return tokenizer._pieces.encode(text)


@pytest.mark.slow
@several
@given(kind=st.sampled_from(sorted(BY_PIECES)), text=TEXT)
@example(kind="llama3", text="three   spaces  \n and 'S 'LL it's\x1c\x1d \x85 \u00a0\u3000x\u2028y")
@example(kind="bert", text="[CLS] a[sep]b \u0301c\x0bd\x1ce\u00a0f\u3000g 東京 x\u0301-y \x7f")
@example(kind="xlm-roberta", text="<mask> \uff1cmask\uff1e \u0301c\x0bd\x1ce\u00a0f\u3000g  h\r\ni \ufb01 ▁j")
@example(kind="gpt2", text="\u017f 'ſ \u212a \u0130 \ufb05 ½ ² Ⅷ")
def test_ids_are_those_of_the_library(kind: str, text: str) -> None:
    library, tokenizer = both(kind)
    expected = library.encode(text, add_special_tokens=False).ids
    assert by_pieces(tokenizer, text) in (None, expected)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text) == library.encode(text).ids


@pytest.mark.slow
def test_characters_have_the_ids_of_the_library(library: Library, tokenizer: Tokenizer) -> None:
    texts = [IN_CONTEXTS.format(char) for char in module._safe_characters()[::19]]
    texts = ["".join(texts[place : place + 50]) for place in range(0, len(texts), 50)]
    expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
    found = [by_pieces(tokenizer, text) for text in texts]
    assert [ids or by_the_library for ids, by_the_library in zip(found, expected, strict=True)] == expected
    assert sum(ids is not None for ids in found) > len(texts) - 4, "only those that form an added token are left to the library"


def test_prose_is_read_by_pieces(library: Library, tokenizer: Tokenizer) -> None:
    lines = [line for line in PROSE.splitlines() if "  " not in line]
    read = [line for line in lines if by_pieces(tokenizer, line) is not None]
    assert len(read) > 0.9 * len(lines)
    assert [by_pieces(tokenizer, line) for line in read] == [
        encoding.ids for encoding in library.encode_batch(read, add_special_tokens=False)
    ]


@given(parts=st.lists(st.sampled_from(SAID), max_size=9))
def test_conversations_are_divided_at_control_tokens(parts: list[str]) -> None:
    tokenizer, library = QWEN
    text = "".join(parts)
    assert tokenizer._pieces is not None
    assert tokenizer._pieces.encode(text, parses=True) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized", "single_word"])
def test_tokens_that_change_their_surroundings_divide_nothing(flag: str) -> None:
    library = byte_level()
    library.add_tokens([AddedToken("<|odd|>", **{"normalized": False, flag: True})])
    tokenizer = from_library(library)
    for text in ("red <|odd|> shoes", "red<|odd|>shoes", "red <|im_end|> shoes"):
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False).ids
        assert tokenizer._pieces is None or tokenizer._pieces.encode(text, parses=True) is None


@pytest.mark.slow
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PIECES", 100)
    tokenizer, library = from_library(byte_level()), byte_level()
    drawn = random.Random(1)
    for _ in range(60):
        words = ["".join(drawn.choices("abcde", k=drawn.choice([1, 2, 3, 40]))) for _ in range(drawn.choice([5, 60, 300]))]
        text = " ".join(words)
        assert by_pieces(tokenizer, text) == library.encode(text, add_special_tokens=False).ids
        assert tokenizer._pieces is not None
        assert len(tokenizer._pieces._ids) <= 100
        assert max(map(len, tokenizer._pieces._ids), default=0) <= module.MAX_PIECE_CHARACTERS


@pytest.mark.parametrize("size", [1 << 12, 1 << 16])
@pytest.mark.parametrize("kind", [" ", "\n ", "a", "'", " \t", ".", "1", "a\n", "'l"])
def test_the_expression_takes_linear_time(kind: str, size: int) -> None:
    """Python's ``re`` backtracks; a hostile text must not make it quadratic. The count of steps shows in the time: 64 Ki characters
    take milliseconds, and would take minutes."""
    for expression in (QWEN_SPLIT, module.GPT2):
        text = kind * (size // len(kind)) + "x"
        assert "".join(re.findall(module._translated(expression), text)) == text
