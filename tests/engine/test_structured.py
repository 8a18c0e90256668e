"""Generations whose output follows a grammar, through the whole engine."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import tokenizers

from tests.checkpoints import END_OF_TURN
from tests.engine.depth import seeds
from tests.engine.integrity import check
from tests.json_schemas import random_schema
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.structured import constraint
from yardstick_llm.gateway.output.constraint import of_choice, of_json_object, of_json_schema, of_regex

QUOTE, BRACE = 4, 95
"""Ids of ``"`` and ``}``: with a bias on them, a model with random weights ends strings and objects."""
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def tokenizer(qwen3: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(qwen3 / "tokenizer.json"))


Build = Callable[..., Loop]


def asked(name: str, grammar: str, **fields: object) -> wire.Generate:
    own = {field: fields.pop(field) for field in ("logprobs", "resume_offset", "index", "prompt") if field in fields}
    bias = {QUOTE: 3.0, BRACE: 3.0}
    sampling = wire.Sampling(**({"max_tokens": 300, "logit_bias": bias, "seed": len(name)} | fields))
    return wire.Generate(name, **({"prompt": PROMPT} | own), sampling=sampling, grammar=grammar)


def run(loop: Loop, *messages: wire.Request, seconds: float = 60) -> list[wire.Reply]:
    for message in messages:
        loop.submit(message)
    replies: list[wire.Reply] = []
    end = time.monotonic() + seconds
    while not loop.idle:
        assert time.monotonic() < end, "the requests never ended"
        replies += msgspec.msgpack.decode(msgspec.msgpack.encode(loop.step()), type=list[wire.Reply])
        check(loop._scheduler)
    return replies


def sequence(replies: list[wire.Reply], name: str, index: int = 0) -> tuple[list[int], str | None]:
    deltas = [reply for reply in replies if isinstance(reply, wire.Delta) and (reply.id, reply.index) == (name, index)]
    assert deltas, [reply for reply in replies if reply.id == name]
    return [token for delta in deltas for token in delta.tokens], deltas[-1].finish


def text_of(tokenizer: tokenizers.Tokenizer, tokens: list[int]) -> str:
    """The text before the token that ends it; control tokens would show."""
    assert tokens[-1] == END_OF_TURN
    return tokenizer.decode(tokens[:-1], skip_special_tokens=False)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", seeds(slow=1, deep=20))
def test_every_finished_output_is_valid(build: Build, tokenizer: tokenizers.Tokenizer, seed: int) -> None:
    rng = random.Random(100 + seed)
    schemas = {f"r{place}": random_schema(rng) for place in range(50)}
    replies = run(build(), *(asked(name, of_json_schema(schema), seed=seed) for name, schema in schemas.items()), seconds=1000)
    finished = 0
    for name, schema in schemas.items():
        failed = [reply for reply in replies if reply.id == name and isinstance(reply, wire.Failed)]
        assert not failed, (failed, schema)
        tokens, finish = sequence(replies, name)
        if finish == "stop":
            finished += 1
            text = text_of(tokenizer, tokens)
            validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
            validator.validate(json.loads(text))
    assert finished > 35


def test_text_never_becomes_a_control_token(build: Build, tokenizer: tokenizers.Tokenizer) -> None:
    """A constant that spells the end of a turn is written letter by letter."""
    replies = run(build(), asked("c", of_json_schema({"const": "<|im_end|><|im_start|>"})))
    tokens, finish = sequence(replies, "c")
    assert finish == "stop"
    assert set(tokens[:-1]).isdisjoint({0, 1, 2})
    assert text_of(tokenizer, tokens) == '"<|im_end|><|im_start|>"'


def test_a_grammar_names_control_tokens(build: Build) -> None:
    tokens, finish = sequence(run(build(), asked("s", 'start: "a" <|im_start|> <[0]>')), "s")
    assert (tokens, finish) == ([67, 1, 0, END_OF_TURN], "stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (of_regex(r"\d{3}-[a-f]{2}"), r"[0-9]{3}-[a-f]{2}"),
        (of_choice(["yes", "no", "né"]), "yes|no|né"),
        ('start: "[" (item ("," item)*)? "]"\nitem: /[0-9]/', r"\[([0-9](,[0-9])*)?\]"),
    ],
)
def test_patterns_choices_and_grammars(build: Build, tokenizer: tokenizers.Tokenizer, grammar: str, pattern: str) -> None:
    loop = build()
    for seed in range(8):
        tokens, finish = sequence(run(loop, asked("p", grammar, seed=seed, logit_bias={})), "p")
        assert finish == "stop"
        assert re.fullmatch(pattern, text_of(tokenizer, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("build", [True, False], ids=["overlapped", "plain"], indirect=True)
def test_company_preemption_and_resumption_change_nothing(build: Build) -> None:
    """A request draws equal tokens alone, beside others in few slots, and resumed after some of its tokens."""
    strings = {"type": "string", "maxLength": 9}
    grammar = of_json_schema({"type": "array", "items": strings, "minItems": 2, "maxItems": 5})
    message = asked("one", grammar, max_tokens=120, n=3)
    alone = run(build(), message)
    expected = [sequence(alone, "one", index) for index in range(3)]
    assert len({tuple(tokens) for tokens, _ in expected}) == 3
    loop = build(max_total_tokens=130, max_batched_tokens=40)
    others = [asked(f"o{i}", of_json_object() if i % 2 else "", seed=i, max_tokens=24, n=2) for i in range(6)]
    beside = run(loop, *others, message)
    assert [sequence(beside, "one", index) for index in range(3)] == expected
    assert sequence(beside, "o0")[1] is not None
    told = sum(len(sequence(beside, f"o{i}", j)[0]) for i in range(6) for j in (0, 1)) + sum(len(tokens) for tokens, _ in expected)
    assert loop.stats.computed_tokens > told + 7 * len(PROMPT)  # somebody was preempted
    for taken in (1, 7, len(expected[1][0]) - 1):
        tokens, finish = expected[1]
        rest = asked("one", grammar, max_tokens=120, prompt=PROMPT + tokens[:taken], resume_offset=taken, index=1)
        assert sequence(run(loop, rest), "one") == (tokens[taken:], finish)


def test_logprobs_are_the_models_own(build: Build) -> None:
    """Over the whole vocabulary, before the grammar: a forced token may be improbable."""
    replies = run(build(), asked("l", 'start: "zzzz"', logprobs=3, temperature=0.0, logit_bias={}))
    told = [reply.logprobs for reply in replies if isinstance(reply, wire.Delta) and reply.logprobs is not None]
    assert len(told) == 5
    assert all(each.chosen[0] is not None and each.chosen[0] < each.top[0][0] for each in told[:4])


def test_min_tokens_yields_to_a_complete_output(build: Build) -> None:
    loop = build()
    tokens, finish = sequence(run(loop, asked("m", 'start: "ab"', min_tokens=10)), "m")
    assert (tokens, finish) == ([67, 68, END_OF_TURN], "stop")
    tokens, _ = sequence(run(loop, asked("m", "start: /[ab]+/", min_tokens=10, logit_bias={END_OF_TURN: 50.0})), "m")
    assert len(tokens) == 11


@pytest.mark.slow
def test_allowed_tokens(build: Build) -> None:
    loop = build()
    tokens, finish = sequence(run(loop, asked("a", "", allowed_token_ids=(67, 68), max_tokens=20)), "a")
    assert set(tokens) == {67, 68}
    assert finish == "length"
    both = asked("b", of_regex("[a-z]{4}"), allowed_token_ids=(67, 68, END_OF_TURN))
    tokens, finish = sequence(run(loop, both), "b")
    assert set(tokens[:4]) <= {67, 68}
    assert (len(tokens), finish) == (5, "stop")
    nothing = asked("n", of_regex("[x-z]{4}"), allowed_token_ids=(67, 68))
    assert sequence(run(loop, nothing), "n") == ([END_OF_TURN], "stop")


@pytest.mark.slow
@pytest.mark.parametrize("grammar", ["", of_regex("[ab]{12}")])
def test_bad_words(build: Build, grammar: str) -> None:
    loop = build()
    plain, _ = sequence(run(loop, asked("w", grammar, max_tokens=12, allowed_token_ids=(67, 68))), "w")
    assert {(67, 68), (68, 67)} <= set(itertools.pairwise(plain)) | {(68, 67)}
    banned = asked("w", grammar, max_tokens=12, allowed_token_ids=(67, 68), bad_words=((67, 68), (68, 68, 68)))
    tokens, _ = sequence(run(loop, banned), "w")
    assert (67, 68) not in set(itertools.pairwise(tokens))
    assert (68, 68, 68) not in set(zip(tokens, tokens[1:], tokens[2:], strict=False))
    free = asked("f", "", max_tokens=40, bad_words=((67,), *((token,) for token in range(100, 300))))
    tokens, _ = sequence(run(loop, free), "f")
    assert 67 not in tokens
    assert all(token < 100 or token >= 300 for token in tokens)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"grammar": "start: foo"}, "not valid: at 1"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        ({"grammar": of_json_schema({"uniqueItems": True})}, "Unimplemented keys"),
        ({"grammar": "x" * (wire.MAX_GRAMMAR_BYTES + 1)}, "more than 262144 bytes"),
        ({"grammar": 'start: "a"', "ignore_eos": True}, "ignore_eos contradicts"),
        ({"grammar": "", "allowed_token_ids": (320,)}, "allowed_token_ids"),
        ({"grammar": "", "bad_words": ((1,) * (wire.MAX_BAD_TOKENS + 1),)}, "bad_words have 4097 tokens"),
    ],
)
def test_what_is_refused(build: Build, fields: dict[str, Any], problem: str) -> None:
    (reply,) = run(build(), asked("r", **fields))
    assert isinstance(reply, wire.Failed)
    assert reply.code == "invalid"
    assert problem in reply.message
    assert "/" not in reply.message


@pytest.mark.slow
def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(build: Build) -> None:
    costly = "start: " + " ".join(f'("x{i}"|"y")?' for i in range(1500))
    replies = run(build(), asked("costly", costly), asked("other", of_regex("[ab]{8}")), wire.Generate("free", PROMPT))
    (failed,) = [reply for reply in replies if isinstance(reply, wire.Failed)]
    assert (failed.id, failed.code) == ("costly", "invalid")
    assert "too complex" in failed.message
    assert sequence(replies, "other")[1] == "stop"
    assert sequence(replies, "free")[1] in {"stop", "length"}


def test_a_thread_that_waits_for_a_processor_does_not_fail_its_request(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = constraint.fill_next_token_bitmask

    def late(*arguments: Any) -> None:
        time.sleep(0.03)
        fill(*arguments)

    monkeypatch.setattr(constraint, "fill_next_token_bitmask", late)
    monkeypatch.setattr(constraint, "MAX_MASK_SECONDS", 0.02)
    tokens, finish = sequence(run(build(), asked("a", of_regex("[ab]{3}"))), "a")
    assert (len(tokens), finish) == (4, "stop")


def test_aborted_and_repeated_while_it_compiles(build: Build) -> None:
    loop = build()
    message = asked("a", of_json_object(), n=2)
    loop.submit(message)
    loop.submit(message)
    loop.submit(wire.Abort("a"))
    replies = run(loop)
    assert [reply.code for reply in replies if isinstance(reply, wire.Failed)] == ["invalid"]
    assert [reply.finish for reply in replies if isinstance(reply, wire.Delta)] == ["abort", "abort"]
    assert sequence(run(loop, message), "a")[1] == "stop"
    stats = loop.stats
    assert stats.structured_requests == 2
    assert stats.compiled_grammars == 1
    assert stats.masks > 2
    assert stats.mask_seconds > 0


def test_engines_without_the_capability_refuse(build: Build, qwen3: Path, tmp_path: Path) -> None:
    for file in qwen3.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    loop = build(model=str(tmp_path))
    assert "grammar" not in loop.info.capabilities
    (reply,) = run(loop, asked("r", 'start: "a"'))
    assert "cannot follow a grammar" in reply.message
