"""Grammars rewritten for texts within JSON strings: they allow the spellings of exactly the texts that the first ones allow."""

from __future__ import annotations

import contextlib
import json
from itertools import product

import pytest
from llguidance import LLMatcher

from tests.gateway.output.test_grammar import vocabulary
from yardstick_llm.gateway.output.constraint import GrammarTextError, of_regex
from yardstick_llm.gateway.output.lark import quoted

LETTERS = 'a"\\\n/é5'
GRAMMARS = [
    *map(
        of_regex,
        (
            r".*",
            r'[^"]+',
            r'(a|"|\\)+',
            r"\w+\s\d?",
            r"\S+",
            r"[\s\S]*",
            'a/"',
            r"[^\d]*",
            r'["\\a-f]{2}',
            r"(?i:A)\n",
            r"\x22|\u{e9}",
            r'[\]a"]+',
            r"\p{L}+\PN",
            r"[^]a]*",
        ),
    ),
    'start: "a\\"" | "\\n" X\nX: "A"i "é\\n"i // a comment\n',
    '%import common.WS\nstart: "a" WS "5"\n',
    'start: "a".."b" | "!".."/"\n',
    'start: expr\nexpr: term ("/" term)*\nterm: "5" | "\\"" expr "\\""\n%ignore /[ \\n]+/',
]


def accepts(matcher: LLMatcher, text: str) -> bool:
    matcher.reset()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.slow
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_the_same_texts_are_allowed(grammar: str) -> None:
    embedded = [{"lark_grammar": 'start: "\\"" @s "\\"."'}, {"name": "s", "lark_grammar": quoted(grammar)}]
    plain, within = LLMatcher(vocabulary(), grammar), LLMatcher(vocabulary(), json.dumps({"grammars": embedded}))
    assert not within.is_error(), within.get_error()
    allowed = 0
    for length in range(4):
        for letters in product(LETTERS, repeat=length):
            text = "".join(letters)
            assert accepts(within, f"{json.dumps(text, ensure_ascii=False)}.") == accepts(plain, text), text
            allowed += accepts(plain, text)
    assert allowed


@pytest.mark.parametrize(
    "grammar",
    [
        "start: %json {}",
        "start: @other",
        "start: <|im_end|>",
        "start: /(?x) a/",
        "start: /a b/x",
        r"start: /\ba/",
        "start: /[[:punct:]]/",
        r"start: /\p{P}/",
        "start: /[a-z&&[^b]]/",
        "%import common.C_COMMENT\nstart: C_COMMENT",
        r'start: "\x01"',
        'start: "ab".."c"',
        "start: /[a/",
    ],
)
def test_what_cannot_be_rewritten_is_refused(grammar: str) -> None:
    with pytest.raises(GrammarTextError):
        quoted(grammar)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["[", "\\", '"', "(?", "/[", "a-", "%import common.WS "])
def test_hostile_repetition_is_quick(unit: str) -> None:
    with contextlib.suppress(GrammarTextError):
        quoted(f"start: /{unit * 20_000}/")
