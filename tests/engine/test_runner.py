"""The runner launches without waiting, and the functions of readouts that compute in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.device import Device
from tests.engine.lenvm.plain import make_lenvm_checkpoint
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.modules import TokenHead
from yardstick_llm.engine.runner import sampling
from yardstick_llm.engine.runner.attention import reference
from yardstick_llm.engine.runner.lenvm import draws as guided_draws
from yardstick_llm.engine.runner.readouts.draws import next_token_logprobs
from yardstick_llm.engine.runner.readouts.scores import label_logits, token_likelihoods
from yardstick_llm.engine.runner.runner import Runner
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels.soft_cap import NO_CAP


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every launch of a step under watch; the tokens of the launches seen."""
    launch, launches = Runner.launch, []

    def watched_launch(self, batch):
        launches.append(batch.tokens)
        with monkeypatch.context() as patch, Device(patch) as watch:
            for name in ("keep_thresholds", "seeded_draw"):
                patch.setattr(sampling, name, watch.kernel(getattr(sampling, name)))
            for name in ("candidates", "length_tilt"):
                patch.setattr(guided_draws, name, watch.kernel(getattr(guided_draws, name)))
            for name in ("rms_norm", "qk_norm_rope"):
                patch.setattr(f"yardstick_llm.kernels.{name}.compiles", lambda *_: False)  # they are for CPUs
            patch.setattr(reference, "is_spoilt", watch.kernel(reference.is_spoilt))  # of a backend for CPUs
            prepare = watch.kernel(sampling.prepare)  # on the host's own numbers
            for module in (sampling, guided_draws):
                patch.setattr(module, "prepare", prepare)
            return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", watched_launch)
    return launches


@pytest.mark.slow
def test_no_launch_waits(qwen3: Path, watched: list[int], tmp_path: Path):
    length = make_lenvm_checkpoint(tmp_path, "qwen2")
    settings = {
        "max_total_tokens": 2048,
        "max_batched_tokens": 48,
        "overlap": True,
        "lenvm_model": str(length),
        "attention": "reference",
    }
    loop = build_loop(EngineSettings(model=str(qwen3), name="t", **settings))
    everything = {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 1.0},
        "min_tokens": 2,
    }
    loop.submit(wire.Score("s", list(range(3, 40)), [[7, 8], [9], [10, 11, 12]], wire.Labels([1, 2])))
    loop.submit(wire.Generate("greedy", [5, 6], wire.Sampling(max_tokens=6, temperature=0, ignore_eos=True), logprobs=3))
    loop.submit(wire.Generate("drawn", [5, 7], wire.Sampling(max_tokens=6, ignore_eos=True, n=2)))
    loop.submit(wire.Generate("all", [5, 8, 9], wire.Sampling(max_tokens=6, ignore_eos=True, **everything), logprobs=0))
    loop.submit(wire.Generate("top_p", [5, 8, 9], wire.Sampling(max_tokens=6, ignore_eos=True, top_p=0.8)))
    loop.submit(wire.Generate("echo", list(range(3, 90)), wire.Sampling(max_tokens=2), prompt_logprobs=2))
    loop.submit(wire.Score("values", list(range(3, 40)), [[7, 8], [9]], wire.LengthValue()))
    for place, mode in enumerate(({"mode": "exp", "scale": 2.0}, {"constraint": "eq_soft", "target_length": 3, "top_k": 9})):
        guidance = wire.LengthGuidance(return_values=True, entropy_threshold=0.5, **mode)
        sampling = wire.Sampling(max_tokens=6, n=2, **everything)
        loop.submit(wire.Generate(f"guided{place}", list(range(3, 60)), sampling, logprobs=3, length_guidance=guidance))
    replies = []
    while not loop.idle:
        replies += loop.step()
    assert len(watched) >= 6
    assert not [reply for reply in replies if isinstance(reply, wire.Failed)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=request.param)
    return load_model(directory).requires_grad_(False)


def log_softmax(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden @ decoder.head_weight.T).double().log_softmax(-1)


def test_next_token_logprobs_in_parts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.engine.runner.readouts.draws.CHUNK_ELEMENTS", 3 * VOCAB_SIZE)
    hidden, tokens = torch.randn(10, 64), torch.arange(10)
    expected = log_softmax(decoder, hidden).float()
    chosen, ids, top = next_token_logprobs(decoder.token_head, hidden, tokens, 2)
    torch.testing.assert_close(chosen, expected[tokens, tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(top, expected.gather(1, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(top, expected.topk(2).values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("elements", [1, 3 * 64, 1 << 20])
def test_logits_of_each_rows_own_labels_in_chunks(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr("yardstick_llm.kernels.row_chunks.CPU_CHUNK_ELEMENTS", elements)
    hidden, tokens = torch.randn(7, 64), torch.tensor([0, 5, 7, 300])
    columns = torch.randint(0, 4, (7, 6))
    expected = (hidden.double() @ decoder.head_weight.double().T).gather(1, tokens[columns])
    torch.testing.assert_close(label_logits(hidden, decoder.head_weight, tokens, columns), expected.float(), atol=1e-5, rtol=0)


def test_logits_are_summed_in_float32(decoder: Decoder) -> None:
    hidden, head = torch.randn(5, 64).bfloat16(), decoder.head_weight.bfloat16()
    columns = torch.zeros(5, 1, dtype=torch.int64)
    found = label_logits(hidden, head, torch.tensor([9]), columns)
    torch.testing.assert_close(found, hidden.float() @ head[9:10].float().T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 1000])
def test_likelihoods_of_some_rows_in_chunks(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rows_at_a_time: int) -> None:
    monkeypatch.setattr("yardstick_llm.engine.runner.readouts.scores.CHUNK_ELEMENTS", rows_at_a_time * VOCAB_SIZE)
    hidden, rows = torch.randn(20, 64), torch.tensor([3, 4, 5, 11, 12, 19, 0])
    expected = log_softmax(decoder, hidden)[rows].float()
    targets = expected.argmin(1)
    targets[2] = expected[2].argmax()
    found = token_likelihoods(decoder.token_head, hidden[rows], targets)
    torch.testing.assert_close(found[:, 0], expected.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
    assert found[:, 1].tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_a_tie_counts_as_greedy() -> None:
    head = TokenHead(torch.eye(3), torch.eye(3), 1.0, NO_CAP)  # whose logits are the hidden rows
    targets = torch.arange(3)
    found = token_likelihoods(head, torch.tensor([[2.0, 2.0, 1.0]] * 3), targets)
    assert found[:, 1].tolist() == [1, 1, 0]
