"""The whole engine in one process against Hugging Face transformers: scores, generations, and every way they may share a step."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import make_checkpoint
from tests.engine.integrity import check
from tests.engine.parity import assert_greedy, some_tokens
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.transfer import Download
from yardstick_llm.engine.runner.readouts.draws import join_logprobs
from yardstick_llm.engine.runner.readouts.scores import LabelReadout
from yardstick_llm.engine.runner.runner import DeviceLost, PendingStep
from yardstick_llm.engine.settings import EngineSettings

SHAPES = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 4, "max_shard_size": "100KB"},
}
LABELS = [5, 17, 300]


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of :data:`SHAPES`; qwen3 unless a test asks for others with :data:`of_each_shape`."""
    name = getattr(request, "param", "qwen3")
    return make_checkpoint(tmp_path_factory.mktemp(name), name, **SHAPES[name])


of_each_shape = pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow) for name in SHAPES],
    ids=SHAPES,
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


LOOPS = {"plain": False, "overlapped": True}


@pytest.fixture
def build(request: pytest.FixtureRequest, checkpoint: Path) -> Callable[..., Loop]:
    """Builds the overlapped loop, in which steps are launched before the last one is read; a test may ask for the plain one too."""

    def build(**settings) -> Loop:
        defaults = {"model": str(checkpoint), "max_total_tokens": 4096, "overlap": getattr(request, "param", True)}
        return build_loop(EngineSettings(name="test", **(defaults | settings)))

    return build


in_both_loops = pytest.mark.parametrize("build", LOOPS.values(), ids=LOOPS, indirect=True)
often_overlapped = pytest.mark.parametrize(
    "build", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="overlapped")], indirect=True
)
"""The plain loop is slow."""


def run(loop: Loop, *messages: wire.Request, checked: bool = False) -> list[wire.Reply]:
    for message in messages:
        loop.submit(message)
    replies: list[wire.Reply] = []
    for _ in range(20_000):
        if loop.idle:
            return replies
        told = msgspec.msgpack.encode(loop.step())  # as it travels
        replies += msgspec.msgpack.decode(told, type=list[wire.Reply])
        if checked:
            check(loop._scheduler)
    raise AssertionError("the requests never ended")


def tokens_of(replies: list[wire.Reply], name: str, index: int = 0) -> list[int]:
    """The output of a sequence; offsets must run on without gap or repeat, and the last delta alone ends it."""
    deltas = [reply for reply in replies if isinstance(reply, wire.Delta) and (reply.id, reply.index) == (name, index)]
    tokens = []
    for delta in deltas:
        assert delta.offset == deltas[0].offset + len(tokens)
        tokens += delta.tokens
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return tokens


@torch.inference_mode()
def expected_scores(reference: PreTrainedModel, message: wire.Score) -> list[list[float]]:
    """Each prompt alone."""
    rows = []
    for branch in message.branches:
        logits = reference(torch.tensor([message.prefix + branch])).logits[0, -1]
        rows.append(logits.log_softmax(-1)[LABELS].tolist())
    return rows


def assert_close(actual: list[list[float]], expected: list[list[float]], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(actual).exp(), torch.tensor(expected).exp(), atol=tolerance, rtol=0)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), atol=1e-4, rtol=0)


def make_score(rng: random.Random, name: str, items: int = 8, query: int = 60) -> wire.Score:
    return wire.Score(name, some_tokens(rng, 0, query), [some_tokens(rng, 1, 40) for _ in range(items)], wire.Labels(LABELS))


@in_both_loops
def test_scores_equal_each_prompt_alone(build, reference):
    rng = random.Random(1)
    messages = [make_score(rng, f"s{i}") for i in range(4)]
    messages.append(wire.Score("bare", [], [[7], [8, 9]], wire.Labels(LABELS)))
    replies = {reply.id: reply for reply in run(build(), *messages, checked=True)}
    for message in messages:
        assert_close(replies[message.id].rows, expected_scores(reference, message))
        assert replies[message.id].computed_tokens <= len(message.prefix) + sum(map(len, message.branches))


@pytest.mark.slow
@of_each_shape
def test_greedy_generation_of_200_tokens(build, reference):
    rng = random.Random(3)
    prompts = [some_tokens(rng, 1, 90) for _ in range(3)]
    sampling = wire.Sampling(max_tokens=200, temperature=0, ignore_eos=True)
    messages = [wire.Generate(f"g{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    replies = run(build(), *messages, make_score(rng, "beside"))
    for message in messages:
        assert_greedy(reference, message.prompt, tokens_of(replies, message.id), 200)


@in_both_loops
@torch.inference_mode()
def test_logprobs_of_output_and_prompt(build, reference):
    rng = random.Random(5)
    prompt = some_tokens(rng, 40, 40)
    message = wire.Generate("g", prompt, wire.Sampling(max_tokens=12, seed=9, temperature=0.8), logprobs=5, prompt_logprobs=3)
    replies = run(build(max_batched_tokens=16), message, make_score(rng, "beside"))
    deltas = [reply for reply in replies if reply.id == "g"]
    tokens = tokens_of(replies, "g")
    logprobs = reference(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    for at, delta in enumerate(deltas):
        row = logprobs[len(prompt) - 1 + at]
        assert delta.logprobs.chosen[0] == pytest.approx(float(row[tokens[at]]), abs=1e-4)
        assert delta.logprobs.top_tokens[0] == row.topk(5).indices.tolist()
        assert delta.logprobs.top[0] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
    given = deltas[0].prompt_logprobs
    assert len(given.chosen) == len(given.top) == len(given.top_tokens) == len(prompt)
    assert given.chosen[0] is None
    expected = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()
    assert given.chosen[1:] == pytest.approx(expected, abs=1e-4)
    assert given.top_tokens[1:] == logprobs[: len(prompt) - 1].topk(3).indices.tolist()


@torch.inference_mode()
def test_logprobs_of_a_long_prompt_come_in_parts(build, monkeypatch):
    message = wire.Generate("g", list(range(3, 43)), wire.Sampling(max_tokens=2, temperature=0), prompt_logprobs=2)
    whole = run(build(), message)
    monkeypatch.setattr(wire, "PROMPT_PART", 16)
    parts = run(build(), message)
    assert [(part.prompt_offset, part.tokens) for part in parts] == [(0, []), (16, []), (32, whole[0].tokens), (0, whole[1].tokens)]
    joined = join_logprobs([part.prompt_logprobs for part in parts[:3]])
    assert joined == whole[0].prompt_logprobs
    assert max(len(part.prompt_logprobs.chosen) for part in parts[:3]) == 16


def test_prompt_logprobs_alone(build):
    reply = run(build(), wire.Generate("g", [5, 6, 7], wire.Sampling(max_tokens=0), prompt_logprobs=0))
    assert len(reply) == 1
    assert (reply[0].tokens, reply[0].finish, len(reply[0].prompt_logprobs.chosen)) == ([], "length", 3)


@pytest.mark.slow
def test_each_sequence_is_resumed_by_itself(build):
    sampling = wire.Sampling(max_tokens=30, seed=5, ignore_eos=True, frequency_penalty=1.0, n=3)
    whole = run(build(), wire.Generate("g", [9, 8, 7], sampling))
    alone = msgspec.structs.replace(sampling, n=1)
    for index in range(3):
        output = tokens_of(whole, "g", index)
        rest = run(build(), wire.Generate("g", [9, 8, 7, *output[:11]], alone, resume_offset=11, index=index))
        assert rest[0].offset == 11
        assert tokens_of(rest, "g") == output[11:]


def test_sequences_end_at_stop_tokens_and_limits(build):
    free = tokens_of(run(build(), wire.Generate("g", [9, 8], wire.Sampling(max_tokens=20, seed=1, ignore_eos=True))), "g")
    stop = free[6]
    sampling = wire.Sampling(max_tokens=20, seed=1, ignore_eos=True, stop_token_ids=(stop,))
    replies = run(build(), wire.Generate("g", [9, 8], sampling))
    assert tokens_of(replies, "g") == free[: free.index(stop) + 1]
    assert replies[-1].finish == "stop"
    replies = run(build(), wire.Generate("g", [9, 8], wire.Sampling(max_tokens=5, ignore_eos=True)))
    assert (len(tokens_of(replies, "g")), replies[-1].finish) == (5, "length")


def test_end_of_sequence_is_held_back_and_ignored_on_request(build):
    bias = {2: 100.0}  # the checkpoint's end of turn
    ended = run(build(), wire.Generate("g", [9, 8], wire.Sampling(max_tokens=20, logit_bias=bias)))
    assert (tokens_of(ended, "g"), ended[-1].finish) == ([2], "stop")
    ended = run(build(), wire.Generate("g", [9, 8], wire.Sampling(max_tokens=20, min_tokens=4, logit_bias=bias)))
    assert len(tokens_of(ended, "g")) == 5
    assert 2 not in tokens_of(ended, "g")[:4]
    ended = run(build(), wire.Generate("g", [9, 8], wire.Sampling(max_tokens=6, ignore_eos=True, logit_bias=bias)))
    assert tokens_of(ended, "g") == [2] * 6


def test_a_finished_answer_is_cached_for_the_next_turn(build):
    loop = build()
    prompt = list(range(10, 40))
    output = tokens_of(run(loop, wire.Generate("a", prompt, wire.Sampling(max_tokens=10, ignore_eos=True))), "a")
    replies = run(loop, wire.Generate("b", [*prompt, *output, 50, 51], wire.Sampling(max_tokens=2, ignore_eos=True)))
    assert replies[0].cached_tokens == len(prompt) + len(output) - 1


@pytest.mark.slow
@often_overlapped
def test_abort_at_any_moment_ends_once_and_frees_all(build):
    rng = random.Random(8)
    loop = build(max_batched_tokens=24, max_total_tokens=300)
    names = itertools.count()
    alive: set[str] = set()
    ended: dict[str, int] = {}
    sequences: dict[str, int] = {}

    def note(replies: list[wire.Reply]) -> None:
        for reply in replies:
            if not isinstance(reply, wire.Delta) or reply.finish:
                ended[reply.id] = ended.get(reply.id, 0) + 1
                if ended[reply.id] == sequences[reply.id]:
                    alive.discard(reply.id)

    for _ in range(150):
        if rng.random() < 0.6:
            name = f"r{next(names)}"
            n = rng.choice([1, 2])
            if rng.random() < 0.5:
                loop.submit(make_score(rng, name, items=5))
                sequences[name] = 1
            else:
                loop.submit(wire.Generate(name, some_tokens(rng, 1, 40), wire.Sampling(max_tokens=20, n=n, seed=1)))
                sequences[name] = n
            alive.add(name)
        if alive and rng.random() < 0.3:
            loop.submit(wire.Abort(rng.choice(sorted(alive))))
        note(loop.step())
        check(loop._scheduler)
    note(run(loop, checked=True))
    assert ended == sequences
    loop._scheduler.cache.clear()
    assert loop.stats.slots_free == 300


@in_both_loops
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(build, monkeypatch):
    loop = build()
    whole = loop._runner._decoder.forward

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(loop._runner._decoder, "forward", fail)
    replies = run(loop, wire.Score("s", [5, 6], [[7]], wire.Labels(LABELS)), wire.Generate("g", [5, 6], wire.Sampling()))
    assert {(reply.id, reply.code, reply.retryable) for reply in replies} == {
        ("s", "out_of_memory", True),
        ("g", "out_of_memory", True),
    }
    monkeypatch.setattr(loop._runner._decoder, "forward", whole)
    assert len(run(loop, wire.Score("s", [5, 6], [[7]], wire.Labels(LABELS)))[0].rows) == 1
    check(loop._scheduler)


@in_both_loops
def test_a_step_that_fails_in_flight_takes_down_what_was_launched_on_it(build, monkeypatch):
    loop = build()
    land = PendingStep.wait
    loop.submit(wire.Generate("gone", [5, 6], wire.Sampling(max_tokens=9, ignore_eos=True)))
    loop.submit(wire.Generate("g", [7, 8], wire.Sampling(max_tokens=9, ignore_eos=True)))
    loop.step()
    loop.submit(wire.Abort("gone"))

    def fail(step):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(PendingStep, "wait", fail)
    replies = loop.step()
    assert sorted((reply.id, type(reply).__name__) for reply in replies) == [("g", "Failed"), ("gone", "Delta")]
    check(loop._scheduler)
    assert loop.stats.slots_free == loop.stats.slots_total
    monkeypatch.setattr(PendingStep, "wait", land)
    assert len(run(loop, wire.Score("s", [5, 6], [[7]], wire.Labels(LABELS)))[0].rows) == 1


@in_both_loops
@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_device_that_computes_nothing_more_ends_the_engine(build, monkeypatch, where):
    """As a GPU after an illegal access to memory. An engine that went on would be ready, and fail every request."""
    loop = build()

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Download, "wait", lost)
    if where == "launch":
        monkeypatch.setattr(LabelReadout, "queue", lost)
    with pytest.raises(DeviceLost, match="cpu computes nothing more"):
        run(loop, wire.Score("s", [5, 6], [[7]], wire.Labels(LABELS)))


INVALID = {
    "label too large": wire.Score("x", [1], [[2]], wire.Labels([320])),
    "negative label": wire.Score("x", [1], [[2]], wire.Labels([-1])),
    "unknown prefix token": wire.Score("x", [1000], [[2]], wire.Labels([1])),
    "unknown item token": wire.Score("x", [1], [[2], [320]], wire.Labels([1])),
    "empty branch": wire.Score("x", [1], [[2], []], wire.Labels([1])),
    "too long": wire.Score("x", [1] * 100, [[2] * 2000], wire.Labels([1])),
    "prompt and output too long": wire.Generate("x", [1], wire.Sampling(max_tokens=2048)),
    "bias of an unknown token": wire.Generate("x", [1], wire.Sampling(logit_bias={320: 1.0})),
    "too many logprobs": wire.Generate("x", [1], logprobs=21),
    "index too high": wire.Generate("x", [1], index=10_000),
    "resume beyond the prompt": wire.Generate("x", [1], resume_offset=1),
}
INVALID_FOR_ALL = {
    "readout.tokens": wire.Score("x", [1], [[2]], wire.Labels([])),
    "prompt": wire.Generate("x", []),
    "tokens_per_delta": wire.Generate("x", [1], tokens_per_delta=0),
    "prompt_lookup.max_tokens": wire.Generate("x", [5], prompt_lookup=wire.DraftOptions(33)),
    "thinking_limit.tokens": wire.Generate("x", [5], thinking_limit=wire.ThinkingLimit(wire.Thinking(3), -1)),
    "query": wire.ScoreItems("x", b"", b"", [], wire.Labels([1])),
    **{
        f"sampling.{name}": wire.Generate("x", [1], wire.Sampling(**{name: value}))
        for name, value in (
            ("temperature", float("nan")),
            ("top_p", 0),
            ("presence_penalty", 3),
            ("n", 0),
            ("logit_bias", {3: float("inf")}),
            ("bad_words", ((),)),
            ("allowed_token_ids", ()),
        )
    },
    **{
        f"length_guidance.{name}": wire.Generate("x", [1], length_guidance=wire.LengthGuidance(**{name: value}))
        for name, value in {
            "top_k": 0,
            "gamma": 1.0,
            "scale": float("nan"),
            "target_length": -1,
            "mode": "other",
        }.items()
    },
}
"""By the field that is wrong whatever the model is."""


def test_invalid_messages_are_refused(build):
    loop = build()
    for name, message in INVALID.items():
        replies = run(loop, message)
        assert [(reply.id, reply.code) for reply in replies] == [("x", "invalid")], name
        assert replies[0].message.endswith(".")


@pytest.mark.parametrize("name", INVALID_FOR_ALL)
def test_messages_that_no_model_takes_are_refused_when_they_are_decoded(name):
    with pytest.raises(msgspec.ValidationError, match=re.escape(f"$.{name}")):
        msgspec.msgpack.decode(wire.encode(INVALID_FOR_ALL[name]), type=wire.Request)


@pytest.mark.parametrize("size", [4, 100])
def test_several_tokens_at_a_time_are_the_same_tokens(build, size):
    sampling = wire.Sampling(max_tokens=10, n=2, seed=3, ignore_eos=True)
    message = wire.Generate("g", [5, 6, 7], sampling, logprobs=2, prompt_logprobs=1)
    singly = run(build(), message)
    together = run(build(), msgspec.structs.replace(message, tokens_per_delta=size), checked=True)
    for index in range(2):
        assert tokens_of(together, "g", index) == tokens_of(singly, "g", index)
        one, many = ([delta for delta in deltas if delta.index == index] for deltas in (together, singly))
        assert [len(delta.tokens) for delta in one] == ([4, 4, 2] if size == 4 else [10])
        for field in ("chosen", "top_tokens", "top"):
            joined, apart = ([value for delta in deltas for value in getattr(delta.logprobs, field)] for deltas in (one, many))
            assert joined == apart
        assert (one[0].prompt_logprobs, one[0].cached_tokens) == (many[0].prompt_logprobs, many[0].cached_tokens)


def test_what_was_kept_back_is_told_before_an_abort(build):
    loop = build()
    loop.submit(wire.Generate("g", [5, 6, 7], wire.Sampling(max_tokens=50, ignore_eos=True), tokens_per_delta=50))
    assert not [reply for _ in range(8) for reply in loop.step()]
    loop.submit(wire.Abort("g"))
    kept, last = run(loop)
    assert (len(kept.tokens) >= 6, kept.finish) == (True, None)
    assert (last.offset, last.tokens, last.finish) == (len(kept.tokens), [], "abort")


def test_the_queue_is_bounded_and_ids_are_unique(build):
    loop = build(max_running_requests=1, max_waiting=2)
    for i in range(4):
        loop.submit(wire.Score(f"s{i}", [5], [[6]], wire.Labels([1])))
    loop.submit(wire.Score("s0", [5], [[6]], wire.Labels([1])))
    failed = {reply.id: reply for reply in loop.step() if isinstance(reply, wire.Failed)}
    assert (failed["s2"].code, failed["s2"].retryable, failed["s3"].code) == ("overloaded", True, "overloaded")
    assert failed["s0"].code == "invalid"


def test_the_wait_is_bounded(build):
    loop = build(max_running_requests=1, max_wait_seconds=1e-9)
    for i in range(6):
        loop.submit(wire.Score(f"s{i}", [i], [[6]], wire.Labels([1])))
    replies = [*loop.step(), *loop.step(), *loop.step()]
    assert loop.stats.wait_seconds > 0
    loop.submit(wire.Score("late", [5], [[6]], wire.Labels([1])))
    replies += run(loop)
    refused = [reply for reply in replies if isinstance(reply, wire.Failed)]
    assert [(reply.id, reply.code, reply.retryable) for reply in refused] == [("late", "overloaded", True)]
    assert refused[0].retry_after >= 1
    assert loop.stats.wait_seconds == 0
    assert [type(reply) for reply in run(loop, wire.Score("late", [5], [[6]], wire.Labels([1])))] == [wire.Scored]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_half_precision(build, reference, dtype, tolerance):
    message = make_score(random.Random(10), "s")
    (reply,) = run(build(dtype=dtype), message)
    difference = torch.tensor(reply.rows).exp() - torch.tensor(expected_scores(reference, message)).exp()
    assert difference.abs().max() < tolerance
    assert run(build(dtype=dtype), wire.Generate("g", [5, 6], wire.Sampling(max_tokens=3, temperature=0)))[-1].finish


def test_no_branches_no_work(build):
    assert run(build(), wire.Score("s", [5], [], wire.Labels([1]))) == [wire.Scored("s", [], 0, 0)]


@in_both_loops
def test_what_is_not_a_number_spoils_its_request_alone(build: Callable[..., Loop], tmp_path: Path) -> None:
    bad = 310
    make_checkpoint(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.get_input_embeddings().weight.data[bad] = math.nan
    model.save_pretrained(tmp_path)
    loop = build(model=str(tmp_path))
    sampling = wire.Sampling(max_tokens=4, temperature=1, top_p=0.9, seed=1, n=2)
    good = wire.Generate("good", [5, 6, 7], sampling, logprobs=2)
    alone = tokens_of(run(loop, good), "good")
    overflowing = [
        wire.Generate("greedy", [5, bad, 7], wire.Sampling(max_tokens=4, temperature=0), logprobs=2),
        wire.Generate("drawn", [5, 6, bad], sampling),
    ]
    items = wire.Score("items", [8, 9], [[10, bad, 11], [12], [13, bad]], wire.Labels(LABELS))
    (whole,) = run(build(model=str(tmp_path)), msgspec.structs.replace(items, branches=[[12], [8]]))
    replies = run(loop, overflowing[0], msgspec.structs.replace(good, id="with"), overflowing[1], items, checked=True)
    (scored,) = (reply for reply in replies if isinstance(reply, wire.Scored))
    assert [math.isnan(row[0]) for row in scored.rows] == [True, False, True]
    assert scored.rows[1] == pytest.approx(whole.rows[0], abs=1e-5)
    (later,) = run(loop, msgspec.structs.replace(items, branches=[[12], [8]]))
    assert later.rows[1] == pytest.approx(whole.rows[1], abs=1e-5), "the prefix that was kept has numbers"
    failed = {reply.id: reply.code for reply in replies if isinstance(reply, wire.Failed)}
    assert failed == {"greedy": "not_a_number", "drawn": "not_a_number"}
    assert {reply.id for reply in replies if isinstance(reply, wire.Delta)} == {"with"}
    assert tokens_of(replies, "with") == alone
