"""Length guidance together with a grammar: the candidates of a draw are those that the grammar allows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tokenizers

from tests.checkpoints import END_OF_TURN
from tests.engine.lenvm.writing import build_guided, guidance, run, tokens_of
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop


@pytest.fixture
def build(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Callable[..., Loop]:
    return partial(build_guided, checkpoints, request.param, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "settings"),
    [("compact", {}), ("overlapped", {"max_total_tokens": 128, "max_batched_tokens": 24})],
    indirect=["build"],
)
def test_candidates_are_those_that_the_grammar_allows(
    build: Callable[..., Loop], checkpoints: tuple[Path, Path], settings: dict[str, int]
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoints[0] / "tokenizer.json"))
    loop = build(**settings)
    assert {"grammar", "length_guidance"} <= set(loop.info.capabilities)
    message = wire.Generate(
        "g",
        [5, 6, 7],
        wire.Sampling(max_tokens=20, n=2, seed=4),
        logprobs=8,
        length_guidance=guidance(scale=3.0, top_k=8),
        grammar="start: /[a-z]{6,12}/",
    )
    plain = wire.Generate("p", [5, 6, 7], wire.Sampling(max_tokens=30, ignore_eos=True))
    replies = run(loop, message, plain)
    values = 0
    for index in (0, 1):
        deltas = [reply for reply in replies["g"] if isinstance(reply, wire.Delta) and reply.index == index]
        assert deltas[-1].finish == "stop"
        *tokens, end = tokens_of(replies["g"], index)
        assert end == END_OF_TURN
        assert re.fullmatch("[a-z]{6,12}", tokenizer.decode(tokens))
        for place, delta in enumerate(deltas):
            assert delta.logprobs is not None
            (candidates,), (logprobs,) = delta.logprobs.top_tokens, delta.logprobs.top
            kept = {token for token, logprob in zip(candidates, logprobs, strict=True) if logprob > -math.inf}
            before = tokenizer.decode(tokens[:place])
            assert all(re.fullmatch("[a-z]{0,12}", before + tokenizer.decode([token])) for token in kept - {END_OF_TURN})
            assert len(before) >= 6 or END_OF_TURN not in kept
            values += sum(value is not None for value in delta.logprobs.values[0])
    assert values
    assert len(tokens_of(replies["p"])) == 30
