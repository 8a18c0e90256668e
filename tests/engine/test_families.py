"""Every family of models against Hugging Face transformers: scores in short steps, and generations longer than the windows."""

from __future__ import annotations

import random
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import msgspec
import pytest

from tests.checkpoints import FAMILIES, TRAINED, every, make_checkpoint
from tests.engine.lenvm.plain import make_lenvm_checkpoint
from tests.engine.parity import Reference, assert_equal_rows, assert_greedy, make_loop, make_model, readouts_of, some_tokens
from tests.engine.test_loop import run, tokens_of
from yardstick_llm.engine import wire
from yardstick_llm.engine.kvcache.prefix_cache import PrefixCache
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.requests.core import Request
from yardstick_llm.engine.runner.distributed.shard import part_of
from yardstick_llm.engine.scheduling.allocation import Allocator

KIND = "causal last"
FAMILIES_OF_ONE_PROCESS = [
    ("olmo2", "normalises all heads together"),
    ("olmo3", "normalises all heads together"),
    ("phi3", "stores queries, keys and values as one"),
    ("glm4", "stores gate and up as one"),
    ("granite4", "stores gate and up as one"),
    ("granitemoe", "stores all experts as one, and --expert-parallel is 1"),
]


@pytest.fixture(scope="module", params=every(family for family in FAMILIES if family not in TRAINED))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), family, KIND)


@pytest.fixture(scope="module")
def reference(family: str, checkpoint: Path) -> Reference:
    return Reference(checkpoint, family, KIND)


@pytest.mark.slow
def test_scores_equal_transformers(checkpoint: Path, reference: Reference) -> None:
    """Prefixes and branches are computed in several steps and are longer than the windows; at last the prefix is cached."""
    rng = random.Random(2)
    loop = make_loop(checkpoint, max_batched_tokens=33)
    for readout in readouts_of(KIND):
        prefix, branches = some_tokens(rng, 45, 70), [some_tokens(rng, low, 30) for low in (1, 1, 25)]
        expected = reference.rows(wire.Score("s", prefix, branches, readout))
        for name in ("cold", "warm"):
            (scored,) = run(loop, wire.Score(name, prefix, branches, readout), checked=True)
            assert_equal_rows(scored.rows, expected)
        assert scored.cached_tokens or isinstance(readout, wire.Embedding)


@pytest.mark.slow
def test_few_slots_change_nothing(checkpoint: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and greedy generations, which are longer than the windows, share steps, wait for slots, are evicted from the prefix
    cache and are preempted."""
    counts = Counter[str]()
    preempt, evict = Allocator.preempt, PrefixCache.evict

    def preempting(self: Allocator, request: Request) -> None:
        counts["preempted"] += 1
        preempt(self, request)

    def evicting(self: PrefixCache, count: int) -> int:
        freed = evict(self, count)
        counts["evicted"] += freed
        return freed

    monkeypatch.setattr(Allocator, "preempt", preempting)
    monkeypatch.setattr(PrefixCache, "evict", evicting)
    rng = random.Random(4)
    prompts = [some_tokens(rng, 25, 35) for _ in range(3)]
    sampling = wire.Sampling(max_tokens=45, temperature=0.0, ignore_eos=True)
    generations = [wire.Generate(f"g{place}", prompt, sampling) for place, prompt in enumerate(prompts)]
    scores = [
        wire.Score(f"s{place}", some_tokens(rng, 20, 40), [some_tokens(rng, 1, 30) for _ in range(3)], wire.Labels([5, 17, 300]))
        for place in range(4)
    ]
    again = [msgspec.structs.replace(score, id=f"again {score.id}") for score in scores]
    loop = make_loop(checkpoint, max_total_tokens=150, max_batched_tokens=33, overlap=True)
    mixed = [message for pair in zip_longest(scores, generations) for message in pair if message is not None]
    replies = run(loop, *mixed, *again, checked=True)
    rows = {reply.id: reply.rows for reply in replies if isinstance(reply, wire.Scored)}
    for score in scores:
        expected = reference.rows(score)
        assert_equal_rows(rows[score.id], expected)
        assert_equal_rows(rows[f"again {score.id}"], expected)
    for message in generations:
        assert_greedy(reference.model, message.prompt, tokens_of(replies, message.id), 45)
    assert min(counts["preempted"], counts["evicted"]) > 0


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_length_models_attend_plainly(family: str, tmp_path: Path) -> None:
    lenvm = make_lenvm_checkpoint(tmp_path / "lenvm", family)
    with pytest.raises(ModelError, match="A length model cannot have sliding windows, soft caps or scales"):
        make_loop(make_checkpoint(tmp_path / "main", "qwen3"), lenvm_model=str(lenvm))


@pytest.mark.parametrize(("family", "problem"), FAMILIES_OF_ONE_PROCESS)
def test_families_that_cannot_be_shared(family: str, problem: str, tmp_path: Path) -> None:
    config = load_config(make_checkpoint(tmp_path, family))
    with pytest.raises(ModelError, match=f"ForCausalLM {problem}, so --tensor-parallel cannot share it"):
        part_of(config, 0, 2)


def test_the_columns_of_experts_are_shared_evenly(tmp_path: Path) -> None:
    config = load_config(make_checkpoint(tmp_path, "qwen3_moe", moe_intermediate_size=21))
    with pytest.raises(ModelError, match="inner columns of the model's experts cannot be shared evenly by 2 processes"):
        part_of(config, 0, 2)


def test_fp8_keys_need_norms_before_projections(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--kv-dtype fp8 needs norms before the projections"):
        make_loop(make_checkpoint(tmp_path, "olmo2"), kv_dtype="fp8")
