"""LongRoPE and partial rotation in the engine, within the original context and beyond it, against Hugging Face transformers.

transformers chooses the factors by the length of each sequence, the engine by the longest context that it serves.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.lenvm.plain import make_lenvm_checkpoint
from tests.engine.parity import Reference, assert_equal_rows, make_loop, make_model, readouts_of, some_tokens
from tests.engine.test_loop import run, tokens_of
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.loader import fingerprint

KIND = "causal last"
ORIGINAL = 250
"""Tokens of the original context."""
LONG = 600


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "phi4_mini", KIND)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint, "phi4_mini", KIND)


@pytest.mark.slow
@pytest.mark.parametrize(("max_context", "prefix"), [(None, 150), (LONG, ORIGINAL), (LONG, 400)])
def test_scores_equal_transformers(max_context: int | None, prefix: int, checkpoint: Path, reference: Reference) -> None:
    rng = random.Random(2)
    loop = make_loop(checkpoint, max_batched_tokens=130, max_context=max_context)
    branches = [some_tokens(rng, low, 30) for low in (1, 25)]
    for readout in readouts_of(KIND)[2:]:
        message = wire.Score("s", some_tokens(rng, prefix, prefix), branches, readout)
        expected = reference.rows(message)
        for _ in ("cold", "warm"):
            (scored,) = run(loop, message, checked=True)
            assert_equal_rows(scored.rows, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("max_context", "length", "count"), [(None, 50, 200), (LONG, ORIGINAL + 1, 40)])
def test_greedy_tokens_equal_transformers(
    max_context: int | None, length: int, count: int, checkpoint: Path, reference: Reference
) -> None:
    prompt = some_tokens(random.Random(3), length, length)
    with torch.inference_mode():
        given = torch.tensor([prompt])
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        expected = reference.model.generate(given, attention_mask=torch.ones_like(given), **options)[0, length:].tolist()
    assert len(set(expected)) > 5
    sampling = wire.Sampling(max_tokens=count, min_tokens=count, temperature=0.0)
    assert tokens_of(run(make_loop(checkpoint, max_context=max_context), wire.Generate("g", prompt, sampling)), "g") == expected


def test_the_original_context_is_a_limit_unless_a_longer_one_is_wanted(checkpoint: Path) -> None:
    message = wire.Score("s", some_tokens(random.Random(4), ORIGINAL, ORIGINAL), [[5]], wire.Labels([5, 6]))
    (refused,) = run(make_loop(checkpoint), message)
    assert isinstance(refused, wire.Failed)
    (scored,) = run(make_loop(checkpoint, max_context=ORIGINAL + 1), message)
    assert isinstance(scored, wire.Scored)


def test_the_factors_count_in_the_fingerprint(checkpoint: Path) -> None:
    digests = [make_loop(checkpoint, max_context=limit).info.fingerprint for limit in (None, ORIGINAL, ORIGINAL + 1, LONG)]
    assert digests[0] == digests[1] == fingerprint(checkpoint, torch.float32)
    assert digests[2] == digests[3] != digests[0]


def test_length_models_do_not_rotate_so(tmp_path: Path) -> None:
    lenvm = make_lenvm_checkpoint(tmp_path / "lenvm", "phi4_mini")
    with pytest.raises(ModelError, match="A length model cannot have rotations of the type longrope"):
        make_loop(make_checkpoint(tmp_path / "main", "qwen3"), lenvm_model=str(lenvm))
