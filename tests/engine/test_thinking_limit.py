"""The hard limit of a thinking section: where the closing tag is drawn, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.test_structured import run, sequence
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop

OPEN, CLOSE = 11, 17
OPENED, OPENS = wire.Thinking(CLOSE), wire.Thinking(CLOSE, OPEN)
NEVER = {CLOSE: -80.0}
Build = Callable[..., Loop]


def asked(name: str, limit: int | None, thinking: wire.Thinking = OPENED, **fields: object) -> wire.Generate:
    own = {field: fields.pop(field) for field in ("logprobs", "grammar", "resume_offset", "index", "prompt") if field in fields}
    sampling = wire.Sampling(**({"max_tokens": 24, "logit_bias": NEVER, "seed": 3, "ignore_eos": True} | fields))
    told = None if limit is None else wire.ThinkingLimit(thinking, limit)
    return wire.Generate(name, **({"prompt": [5, 6, 7, 8]} | own), sampling=sampling, thinking_limit=told)


def output(loop: Loop, message: wire.Generate, index: int = 0) -> list[int]:
    return sequence(run(loop, message), message.id, index)[0]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1, 2, 9])
def test_the_tag_is_drawn_at_the_limit(build: Build, limit: int) -> None:
    loop = build()
    free = output(loop, asked("free", None))
    assert CLOSE not in free
    cut = output(loop, asked("cut", limit))
    assert (cut[:limit], cut[limit], len(cut)) == (free[:limit], CLOSE, len(free))
    assert CLOSE not in cut[limit + 1 :]
    opens = output(loop, asked("opens", limit, OPENS, logit_bias=NEVER | {OPEN: 80.0 if limit < 9 else 0.0}))
    if opens[0] == OPEN:
        assert opens[: limit + 2] == [OPEN] * (limit + 1) + [CLOSE]
    else:
        assert CLOSE not in opens


@pytest.mark.slow
def test_a_section_that_ends_before_is_left_alone(build: Build) -> None:
    loop = build()
    bias = {CLOSE: 4.0}
    free = output(loop, asked("free", None, logit_bias=bias, max_tokens=60))
    end = free.index(CLOSE)
    assert 0 < end < 59
    for limit in (end, end + 1, end + 5, 1000):
        assert output(loop, asked(f"cut{limit}", limit, logit_bias=bias, max_tokens=60)) == free


@pytest.mark.slow
def test_company_preemption_and_resumption_change_nothing(build: Build) -> None:
    loop = build()
    messages = [asked(f"r{place}", place % 7, n=2, seed=place, presence_penalty=0.5 * (place % 2)) for place in range(7)]
    replies = [run(loop, message) for message in messages]
    alone = [[sequence(told, message.id, index)[0] for index in (0, 1)] for message, told in zip(messages, replies, strict=True)]
    assert all(told[index][place % 7] == CLOSE for place, told in enumerate(alone) for index in (0, 1))
    tight = build(max_total_tokens=160, max_batched_tokens=16)
    together = run(tight, *messages)
    for message, told in zip(messages, alone, strict=True):
        assert [sequence(together, message.id, index)[0] for index in (0, 1)] == told
    for cut in (1, 5, 6, 7, 12):
        (whole, _), message = alone[6], messages[6]
        own = {"prompt": [*message.prompt, *whole[:cut]], "resume_offset": cut}
        rest = output(loop, asked(f"again{cut}", 6, seed=6, **own))
        assert whole[:cut] + rest == whole


def test_exclusions_yield_and_logprobs_are_the_models_own(build: Build) -> None:
    loop = build()
    fields = {"bad_words": ((CLOSE,),), "allowed_token_ids": (5, 6, 7), "logprobs": 2}
    replies = run(loop, asked("cut", 3, **fields))
    tokens = sequence(replies, "cut")[0]
    assert tokens[3] == CLOSE
    assert set(tokens[:3] + tokens[4:]) <= {5, 6, 7}
    chosen = [value for reply in replies if isinstance(reply, wire.Delta) and reply.logprobs for value in reply.logprobs.chosen]
    scored = run(loop, wire.Score("s", [5, 6, 7, 8], [tokens[:4]], wire.Likelihood()))
    (row,) = next(reply.rows for reply in scored if isinstance(reply, wire.Scored))
    assert chosen[:4] == pytest.approx(row[:4], abs=1e-4)


def test_a_grammar_may_follow_the_section(build: Build) -> None:
    loop = build()
    grammar = f"start: TEXT <[{CLOSE}]> /[0-9]/\nTEXT: /(.|\\n)*/"
    tokens = output(loop, asked("cut", 5, grammar=grammar, ignore_eos=False))
    end = tokens.index(CLOSE)
    assert 5 <= end <= 8  # within a character of several tokens, the tag waits for its end
    assert len(tokens) >= end + 2


def test_a_limit_outside_of_the_model_is_refused(build: Build) -> None:
    (reply,) = run(build(), wire.Generate("a", [5], thinking_limit=wire.ThinkingLimit(wire.Thinking(1 << 20), 3)))
    assert isinstance(reply, wire.Failed)
    assert reply.code == "invalid"
