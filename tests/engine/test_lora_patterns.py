"""Patterns of module names match what PEFT matches, and none takes long."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from engine.models.lora import config
from engine.models.lora.config import MAX_CHARACTERS_OF_ONE, AdapterError, PatternError, Patterns

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
MODULES = [f"model.layers.{layer}.{projection}" for layer in (0, 1, 9, 10, 21, 100) for projection in PROJECTIONS]
HOSTILE = {
    "alternatives": "(|.|..)" * 60 + "Z",
    "words": "(|m|mo|o|od|d|de|.|.l)" * 20 + "Z",
    "stars": ".*" * 200 + "Z",
    "sets": r"[\w.]*" * 80 + "Z",
    "optional": ".?" * 200 + "." * 60 + "Z",
    "repeated": r"(([\w.]+)+)+Z",
    "repeated alternatives": "(|.|..)*" * 50 + "Z",
    "counted": r"(([\w.]{1,6}){1,6}){1,6}Z",
}

atoms = st.sampled_from(
    ["a", "q", ".", r"\.", "1", "0", "_", "^", "$", r"\d", r"\w", r"\W", r"\b", "[01]", "[^.]", "[a-q_]", r"[\d.-]", "-"]
)
signs = st.sampled_from(["", "", "", "?", "*", "+", "*?", "+?", "??", "{2}", "{1,2}", "{2,}"])
patterns = st.recursive(
    st.builds(lambda atom, sign: atom if atom in ("^", "$", r"\b") else atom + sign, atoms, signs),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds(lambda part, sign: f"(?:{part}){sign}", inner, signs),
    ),
    max_leaves=12,
)


def matched(pattern: str, module: str) -> bool:
    return Patterns({pattern: 1}).number_of(module, 0) == 1


def parsed(**keys: Any) -> config.AdapterConfig:
    return config.parse(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | keys).encode())


@given(patterns, st.text("aq.10_-", max_size=12))
def test_a_pattern_matches_what_re_matches(pattern: str, module: str) -> None:
    assert matched(pattern, module) == bool(re.match(rf"(.*\.)?({pattern})$", module))


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "layers.1.self_attn.q_proj",
        r"layers\.10\.self_attn\.k_proj",
        "^model.layers.0.self_attn.q_proj",
        r".*\.gate_proj",
        r".*layers\.(1[0-9]|2[01])\..*",
        r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
        r"layers\.(?:0|1|9)\.self_attn\.[qk]_proj$",
        "proj",
        "layers.[^0].+",
        r"(\w+\.)+\d{2}\.self_attn\.(?P<kind>q|k)_proj",
        r".*\b1\.mlp.*",
    ],
)
def test_patterns_as_people_write_them(pattern: str) -> None:
    peft = [get_pattern_key([pattern], module) == pattern for module in MODULES]
    assert [matched(pattern, module) for module in MODULES] == peft
    assert any(peft) or pattern == "proj"


@pytest.mark.timeout(30)
def test_a_pattern_for_each_module_of_a_large_model_is_quick() -> None:
    """PEFT's EVA writes the whole name of each module."""
    names = [f"model.layers.{layer}.{projection}" for layer in range(126) for projection in (*PROJECTIONS, "mlp.up_proj")]
    ranks = {name: 1 + number % 60 for number, name in enumerate(names)}
    read = parsed(**LoraConfig(r=8, rank_pattern=ranks, task_type="CAUSAL_LM").to_dict() | {"target_modules": None})
    assert [read.rank_of(name) for name in names] == [*ranks.values()]


@pytest.mark.timeout(15)
@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_no_pattern_takes_long(pattern: str, key: str) -> None:
    read = parsed(**{key: {pattern: 4}})
    assert [(read.rank_of(module), read.scale_of(module)) for module in MODULES] == [(8, 2.0)] * len(MODULES)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)", r"RE2 cannot read \(invalid perl operator: \(\?=\); it has no look-around"),
        ("(?<!a)b", "look-around"),
        ("(?>a)", "RE2"),
        (r"(a)\1", r"contains \\1, and"),
        ("(a)" * 10 + r"\10", r"\\1, and"),
        ("a{,2}", "{,, and"),
        ("[[:alpha:]]", r"\[:, and"),
        ("(?i)" + r"[\pL\PL]" * 60, r"\\p, and"),
        ("a**", r"RE2 cannot read \(bad repetition operator"),
        ("(a", "missing"),
        ("a)", "unexpected"),
        ("a)|(b", "unexpected"),
        ("[a", "missing"),
        ("[z-a]", "range"),
        ("a\\", "trailing"),
        ("*a", "no argument"),
        ("(a{100}){100}", "repetition size"),
        (".{1000}" * 70, "too large"),
        ("é", "ASCII"),
        ("\ud800", "ASCII"),
        ("", "0 characters"),
        ("a" * (MAX_CHARACTERS_OF_ONE + 1), "513 characters"),
    ],
)
def test_other_patterns_are_refused(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        Patterns({pattern: 1})
    with pytest.raises(AdapterError, match=f"^rank_pattern in adapter_config.json has .*{words}"):
        parsed(rank_pattern={pattern: 4})


def test_the_first_pattern_that_matches_counts() -> None:
    read = parsed(rank_pattern={"k_proj": 1, "q_proj": 2, ".*": 3, r"layers\.0\..*": 4})
    assert [read.rank_of(f"model.layers.0.self_attn.{name}_proj") for name in "kqv"] == [1, 2, 3]


def test_all_patterns_together_are_bounded() -> None:
    with pytest.raises(AdapterError, match="65,536 characters together"):
        parsed(rank_pattern={f"{'a' * 500}{number}": 4 for number in range(132)})
