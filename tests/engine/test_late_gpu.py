"""The whole loop on a GPU that is as late as it may be, against the same loop on one that is never late. No launch waits for it.

Every buffer of the host that a queued copy still reads, and every result that is read too early, shows as a difference or in
:attr:`LateGpu.overwritten`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_checkpoint
from tests.encoders import make_encoder, make_jina_v3
from tests.engine.adapters import write_adapter
from tests.engine.integrity import check
from tests.engine.late import GPU, LateGpu, computing
from tests.engine.lenvm.plain import GAMMA
from tests.engine.lenvm.writing import make_pair, some_messages
from tests.engine.parity import assert_equal_rows, some_tokens
from tests.engine.test_loop import make_score
from tests.engine.vision.models import make_vision_checkpoint, shown, some_image, some_text
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop import build, build_whole
from yardstick_llm.engine.loop.build import PairedLenVM, assemble, load_grammar_vocabulary
from yardstick_llm.engine.loop.build_whole import assemble_whole
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.lenvm import load_lenvm
from yardstick_llm.engine.models.loader import load_encoder, load_model
from yardstick_llm.engine.runner import capturing
from yardstick_llm.engine.runner.attention import flashinfer
from yardstick_llm.engine.runner.lenvm.graphs import Needs
from yardstick_llm.engine.runner.readouts.scores import LabelReadout
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.gateway.output.constraint import of_json_object, of_regex
from yardstick_llm.kernels import (
    attention_layout,
    branch_attention,
    candidates,
    keep_thresholds,
    length_tilt,
    qk_norm_rope,
    rms_norm,
    seeded_sampling,
    silu_mul,
)
from yardstick_llm.kernels.candidates import Candidates

MOST_IN_FLIGHT = 2
Pace = Callable[[], int]


def never() -> int:
    """The device works only when the host waits."""
    return 0


def always() -> int:
    """The device is done before the host goes on."""
    return 1 << 40


def sometimes(seed: int) -> Pace:
    """The device does all that is queued now and then."""
    rng = random.Random(seed)
    return lambda: always() if rng.random() < 0.01 else rng.randrange(2)


PLAIN = (qk_norm_rope, rms_norm, silu_mul)
"""Kernels that are replaced by plain PyTorch, operation by operation: the interpreter would take most of the time for them."""
WHOLE: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = (
    (candidates, "candidates", lambda logits, t, k, p, m, width: Candidates(*_candidates(len(logits), width))),
    (length_tilt, "length_tilt", lambda p, *others: torch.empty_like(p)),
    (keep_thresholds, "keep_thresholds", lambda logits, t, k, p, floors: torch.empty_like(floors)),
    (seeded_sampling, "seeded_draw", lambda logits, t, keys, thresholds: torch.empty_like(keys)),
)
"""Kernels whose plain versions look at values: each is one piece of queued work, too."""


def _candidates(rows: int, width: int) -> Iterator[torch.Tensor]:
    for shape, dtype in (((rows, width), torch.int64), ((rows, width), torch.float32), ((rows,), torch.int64)):
        yield torch.empty(shape, dtype=dtype, device=GPU)


class Late:
    """An engine on a late GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, pace: Pace) -> None:
        self.gpu = LateGpu(patch, pace)
        self.most_in_flight = 0
        for module in PLAIN:
            patch.setattr(module, "launches", lambda *tensors: False)
        for module, name, results in WHOLE:
            patch.setattr(module, f"{name}_triton", self.gpu.whole(getattr(module, f"{name}_reference"), results))
        for module in (attention_layout, branch_attention):
            patch.setattr(module, "PROGRAMS", 8)
        patch.setattr(flashinfer, "problem", lambda *given: None)
        patch.setattr(flashinfer, "origin", lambda *given: "prebuilt")
        for module in (build, capturing):
            patch.setattr(module, "CudaCapture", lambda device: self.gpu)
        patch.setattr(build, "_compiles", lambda device: False)
        patch.setattr(build_whole, "warm_up", lambda *given: None)
        patch.setattr("yardstick_llm.engine.runner.graphs.BUCKETS", (4, 16))
        patch.setattr("yardstick_llm.engine.runner.attention.whole.FEW_BLOCKS", 4)
        patch.setattr(capturing, "BUCKETS", (4, 16))
        patch.setattr(build, "PARTS", (2, 4))

    def assemble(self, base: Path, lenvm: Path | None = None, **settings: Any) -> Loop:
        decoder = self.gpu.move(load_model(base))
        defaults = {"max_total_tokens": 2048, "max_batched_tokens": 64, "max_wait_seconds": 3600, "cuda_graphs": "off"}
        given = EngineSettings(model="m", name="m", **(defaults | settings))
        paired = None if lenvm is None else PairedLenVM(self.gpu.move(load_lenvm(lenvm)), GAMMA)
        loop = assemble(decoder, given, "digest", paired, load_grammar_vocabulary(base, decoder.config))
        assert loop._overlap
        modules = "prebuilt" if given.attention == "flashinfer" else ""
        assert loop.info.attention == wire.AttentionChoice(given.attention, "asked for", modules=modules)
        self._watch(loop)
        return loop

    @staticmethod
    def settings(**given: Any) -> EngineSettings:
        """Return the settings of an encoder's loop."""
        return EngineSettings(model="m", name="m", max_batched_tokens=24, max_wait_seconds=3600, **given)

    def assemble_whole(self, encoder: Path, **settings: Any) -> Loop:
        loop = assemble_whole(self.gpu.move(load_encoder(encoder)), self.settings(**settings), "digest")
        assert loop._overlap
        self._watch(loop)
        return loop

    def _watch(self, loop: Loop) -> None:
        """Count the steps whose work is not done when a step is launched, that step included."""
        launch, ends = loop._runner.launch, []

        def watched(batch):
            begun = self.gpu.queued
            try:
                return launch(batch)
            finally:
                unfinished = sum(end > self.gpu.done for end in ends)
                if self.gpu.queued > max(begun, self.gpu.done):
                    self.most_in_flight = max(self.most_in_flight, unfinished + 1)
                ends.append(self.gpu.queued)

        loop._runner.launch = watched


def run(loop: Loop, messages: Sequence[wire.Request], aborts: dict[int, str] | None = None) -> list[wire.Reply]:
    """All replies; ``aborts``: requests that end before a step. Masks are waited for, so that every run has the same steps."""
    for message in messages:
        loop.submit(message)
    replies: list[wire.Reply] = []
    for step in range(20_000):
        if loop.idle:
            break
        if aborts and step in aborts:
            loop.submit(wire.Abort(aborts[step]))
        replies += [plain(reply) for reply in loop.step()]
        check(loop._scheduler)
    assert loop.idle
    loop.close()
    return sorted(replies, key=lambda reply: reply.id)


def plain(reply: wire.Reply) -> wire.Reply:
    return msgspec.structs.replace(reply, queue_seconds=0.0) if hasattr(reply, "queue_seconds") else reply


_prompt: dict[str, list[wire.Reply]] = {}
"""Replies of a device that is never late, by the name of the work."""


def compare(pace: Pace, name: str, use: Callable[[Late], list[wire.Reply]]) -> list[wire.Reply]:
    """The replies of ``use`` on a device of this pace, which must be those of one that is never late. Numbers may differ in their
    last digits, because libraries choose kernels by the alignment of memory; what a hazard overwrites differs more.

    ``name``: of the work, for tests that do the same at several paces.
    """
    if name not in _prompt:
        _prompt[name] = replies_at(always, use)
    assert alike(*map(msgspec.to_builtins, (_prompt[name], replies_at(pace, use))))
    return _prompt[name]


def replies_at(pace: Pace, use: Callable[[Late], list[wire.Reply]]) -> list[wire.Reply]:
    with pytest.MonkeyPatch.context() as patch:
        late = Late(patch, pace)
        with computing(late.gpu):
            replies = use(late)
        assert late.gpu.overwritten == []
        assert late.most_in_flight <= (0 if pace is always else MOST_IN_FLIGHT)
    return replies


def alike(one: Any, other: Any) -> bool:
    """Whether two structures are equal but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or (isinstance(one, float) and one == pytest.approx(other, rel=1e-5, abs=1e-5))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1, max_position_embeddings=40_000)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen3+llama")


def traffic(rng: random.Random) -> list[wire.Request]:
    """Scores, prompts in many steps, drawn sequences with every kind of parameter, and log-probabilities."""
    scores = [make_score(rng, f"s{i}", items=2, query=100) for i in range(3)]
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"n": 2, "top_p": 0.9, "seed": 4},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 2, "top_k": 5, "seed": 5},
        {"logit_bias": {7: 2.0}, "min_p": 0.1, "seed": 6},
        {"allowed_token_ids": (5, 6, 7, 8), "seed": 7},
    ]
    writers = [
        wire.Generate(
            f"g{i}",
            some_tokens(rng, 1, 100),
            wire.Sampling(max_tokens=5 + i, ignore_eos=True, **sampling),
            logprobs=i % 3 or None,
            prompt_logprobs=2 if i == 4 else None,
        )
        for i, sampling in enumerate(samplings)
    ]
    return [*scores[:1], *writers, *scores[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "attention"),
    [(never, "flashinfer"), (never, "triton"), (sometimes(1), "flashinfer")],
    ids=["never-flashinfer", "never-triton", "sometimes"],
)
def test_mixed_traffic_with_aborts(base: Path, pace: Pace, attention: str) -> None:
    """In steps that are replayed and in launched ones, which are larger than all graphs."""

    def use(late: Late) -> list[wire.Reply]:
        loop = late.assemble(base, attention=attention, cuda_graphs="on")
        replies = run(loop, traffic(random.Random(2)), {4: "s1", 8: "g2"})
        assert 5 < loop.stats.replayed_steps < loop.stats.steps - 3
        return replies

    ended = {reply.id for reply in compare(pace, f"mixed {attention}", use)}
    assert ended == {"s0", "s1", "s2", "g0", "g1", "g2", "g3", "g4"}


@pytest.mark.slow
def test_steps_of_a_long_prompt_without_results(base: Path) -> None:
    """Nothing but the event tells the host that such a step is done."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 320) for _ in range(700)]
    message = wire.Generate("g", prompt, wire.Sampling(max_tokens=2, temperature=0))

    def use(late: Late) -> list[wire.Reply]:
        loop = late.assemble(base, attention="flashinfer", max_batched_tokens=32)
        replies = run(loop, [message])
        assert loop.stats.steps > 18
        return replies

    assert len(compare(never, "long", use)) == 2


@pytest.mark.slow
def test_guided_and_structured_rows(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps that are replayed and in launched ones. Every other replayed pass of the length model computes needed candidates
    only."""
    turns = itertools.count()
    monkeypatch.setattr(build, "COUNTED_PARTS", (4,))
    monkeypatch.setattr("yardstick_llm.engine.runner.lenvm.graphs.LEAST_BRANCHES", 0)
    monkeypatch.setattr(Needs, "few", property(lambda self: next(turns) % 2 == 0))
    rng = random.Random(4)
    guided = some_messages(rng, high=20)[:3]
    guided = [msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, max_tokens=6)) for each in guided]
    sampling = wire.Sampling(max_tokens=6, seed=1)
    structured = [
        wire.Generate("re", [5, 6, 7], sampling, grammar=of_regex("[a-d]{4,6}")),
        wire.Generate("js", some_tokens(rng, 80, 90), sampling, grammar=of_json_object()),
    ]
    values = wire.Score("v", some_tokens(rng, 10, 20), [[7, 8], [9]], wire.LengthValue())
    messages = [*guided[:2], *structured, make_score(rng, "s", items=2, query=20), values, *guided[2:]]

    def use(late: Late) -> list[wire.Reply]:
        nonlocal turns
        turns = itertools.count()
        loop = late.assemble(*pair, attention="flashinfer", cuda_graphs="on")
        replies = run(loop, messages)
        counted = loop._runner._lenvm.replayed_counted
        assert not any(isinstance(reply, wire.Failed) for reply in replies)
        assert min(counted, loop.stats.replayed_lenvm_passes - counted) > 1
        assert loop.stats.replayed_lenvm_passes < loop.stats.steps - 3
        return replies

    assert {reply.id for reply in compare(never, "guided", use)} == {message.id for message in messages}


@pytest.mark.slow
def test_adapters_that_change_their_slots(base: Path, tmp_path: Path) -> None:
    """Three adapters in two slots of the device, so that copies from the host overwrite slots that queued steps still read.
    test_lora_graphs.py replays such steps."""
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapters = [f"a{seed}={write_adapter(tmp_path / str(seed), whole, ('v_proj', 'down_proj'), seed=seed)}" for seed in range(3)]
    rng = random.Random(5)
    prompts, few = [some_tokens(rng, 3, 12) for _ in range(5)], [some_tokens(rng, 2, 4) for _ in range(2)]

    def use(late: Late) -> list[wire.Reply]:
        loop = late.assemble(base, attention="flashinfer", lora=adapters, max_loras_device=2, max_lora_rank=8)
        digests = [each.digest for each in loop.adapters.description.adapters]
        sampling = wire.Sampling(max_tokens=4, temperature=0, ignore_eos=True)
        messages: list[wire.Request] = [
            wire.Generate(f"g{place}", prompt, sampling, logprobs=1, adapter=["", *digests][place % 4])
            for place, prompt in enumerate(prompts)
        ]
        messages += [wire.Score(digest, prompts[0], few, wire.Labels([5, 17]), adapter=digest) for digest in digests]
        adapted = run(loop, messages)
        assert loop.stats.adapter_swaps > 3
        return adapted

    replies = compare(sometimes(1), "adapters", use)
    assert not any(isinstance(reply, wire.Failed) for reply in replies)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "mpnet", "deberta", "jina_v3"])
def test_encoders(family: str, tmp_path: Path) -> None:
    """Pairs and texts alone by turns, so that the types of tokens and the blocks of steps in flight differ, or texts of several
    tasks. Biases by distance and tasks are computed by PyTorch, operation by operation, in steps that are launched."""
    rng, captured = random.Random(7), family == "bert"
    if family == "jina_v3":
        directory, readout, firsts = make_jina_v3(tmp_path)[0], wire.Embedding(), [0, 320, 321, 322]
    else:
        directory, readout, firsts = make_encoder(tmp_path, family, "classes", num_hidden_layers=2), wire.Classes(), [5]
    messages = [
        wire.Score(
            f"s{place}",
            some_tokens(rng, 4, 4) if place % 2 and family != "jina_v3" else [],
            [[firsts[place % len(firsts)], *some_tokens(rng, 1, 17)]],
            readout,
        )
        for place in range(12)
    ]

    def use(late: Late) -> list[wire.Reply]:
        loop = late.assemble_whole(directory, cuda_graphs="on" if captured else "off")
        replies = run(loop, messages)
        assert (1 if captured else -1) < loop.stats.replayed_steps < loop.stats.steps - 1
        return replies

    replies = compare(never, f"encoders {family}", use)
    plain = run(assemble_whole(load_encoder(directory), Late.settings(), "digest"), messages)
    assert_equal_rows([reply.rows[0] for reply in replies], [reply.rows[0] for reply in plain], 1e-4)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = {"num_hidden_layers": 1}
    return make_vision_checkpoint(tmp_path_factory.mktemp("seeing"), text=text, depth=2, fullatt_block_indexes=[1])


@pytest.mark.slow
def test_images(seeing: Path) -> None:
    """Towers are queued before the step that reads their results, and timed by events that the host never waits for."""
    rng, images = random.Random(6), [some_image(1, 6, 14), some_image(2, 4, 4), some_image(3, 4, 4)]
    sampling = wire.Sampling(max_tokens=3, temperature=0, ignore_eos=True)
    prompts = [some_text(rng, 2, 4) + shown(place, image) + some_text(rng, 1, 2) for place, image in enumerate(images)]
    messages: list[wire.Request] = [
        wire.Generate(f"g{place}", prompt, sampling, logprobs=1, images=images) for place, prompt in enumerate(prompts)
    ]
    messages += [
        wire.Score("s", prompts[0], [some_text(rng, 2, 3), shown(1, images[1])], wire.Labels([9, 17]), images=images),
        wire.Generate("text", some_text(rng, 5, 9), sampling),
    ]

    def use(late: Late) -> list[wire.Reply]:
        loop = late.assemble(seeing, cuda_graphs="on", attention="flashinfer", max_batched_tokens=24)
        assert loop.stats.tower_seconds == 0.0
        replies = run(loop, messages)
        late.gpu.run(late.gpu.queued)
        assert loop.stats.computed_images == 3
        assert loop.stats.tower_seconds > 0
        assert 0 < loop.stats.replayed_steps < loop.stats.steps
        return replies

    replies = compare(never, "images", use)
    assert not any(isinstance(reply, wire.Failed) for reply in replies)
    assert {reply.id for reply in replies} == {message.id for message in messages}


class Scarce:
    """Lets some launches and some results fail, as where memory is short."""

    def __init__(self, patch: pytest.MonkeyPatch, launches: set[int], reads: set[int]) -> None:
        self._steps = {"queue": 0, "read": 0}
        for name, failing in (("queue", launches), ("read", reads)):
            patch.setattr(LabelReadout, name, self._failing(name, getattr(LabelReadout, name), failing))

    def _failing(self, name: str, method: Callable[..., Any], failing: set[int]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._steps[name] += 1
            if self._steps[name] in failing:
                raise torch.OutOfMemoryError(f"no memory to {name}")
            return method(*arguments)

        return call


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "reads"), [({2, 3}, set()), (set(), {2}), ({3}, {2})], ids=["launches", "read", "both"])
def test_what_a_failed_step_has_queued_is_waited_for(base: Path, launches: set[int], reads: set[int]) -> None:
    """Half of a step may be queued when its launch fails, and all of one when the step before it fails."""

    def use(late: Late) -> list[wire.Reply]:
        with pytest.MonkeyPatch.context() as patch:
            Scarce(patch, launches, reads)
            loop = late.assemble(base, attention="flashinfer", max_batched_tokens=40)
            return run(loop, [make_score(random.Random(i), f"s{i}", items=2, query=20) for i in range(6)])

    replies = compare(never, f"failed {launches} {reads}", use)
    assert 0 < sum(isinstance(reply, wire.Failed) for reply in replies) < len(replies)
