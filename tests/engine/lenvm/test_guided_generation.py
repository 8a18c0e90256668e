"""Guided generations through the whole engine, under every schedule, against each candidate's text on its own."""

from __future__ import annotations

import math
import random
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.checkpoints import END_OF_TURN, make_checkpoint
from tests.engine.integrity import check
from tests.engine.lenvm.plain import GAMMA, Plain, make_lenvm_checkpoint
from tests.engine.lenvm.writing import (
    MODES,
    build_guided,
    guidance,
    guided,
    run,
    some_messages,
    tokens_of,
    verify,
)
from tests.engine.parity import some_tokens
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import PENDING
from yardstick_llm.engine.requests.generation import within
from yardstick_llm.engine.requests.units import Written
from yardstick_llm.engine.runner.lenvm import draws as guided_draws
from yardstick_llm.engine.runner.runner import PendingStep
from yardstick_llm.kernels.candidates import candidates_triton
from yardstick_llm.kernels.length_tilt import length_tilt_triton

Build = Callable[..., Loop]
TIGHT = {"max_total_tokens": 128, "max_batched_tokens": 24}


@pytest.fixture
def build(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Build:
    """Builds the form that computes candidates ahead, unless a test names others. All forms draw the same tokens."""
    return partial(build_guided, checkpoints, getattr(request, "param", "overlapped"))


in_both_layouts = pytest.mark.parametrize("build", ["compact", "overlapped"], indirect=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param("overlapped", TIGHT, id="overlapped-tight"),
        pytest.param("compact", {"max_batched_tokens": 7}, id="compact-chunks"),
    ],
    indirect=["build"],
)
def test_every_draw_is_the_plain_one(build: Build, plain: Plain, settings):
    """Several modes in one batch, beside scores and unguided rows, in chunks, after preemption and after skipped steps."""
    rng = random.Random(1)
    messages = some_messages(rng)
    beside = wire.Generate("beside", some_tokens(rng, 10, 20), wire.Sampling(max_tokens=30, seed=3, ignore_eos=True))
    scores = [
        wire.Score(f"s{i}", some_tokens(rng, 0, 30), [some_tokens(rng, 1, 20) for _ in range(4)], wire.Labels([1, 2]))
        for i in range(3)
    ]
    loop = build(**settings)
    replies = run(loop, *messages[:4], beside, *scores, *messages[4:])
    asked = [verify(plain, message, replies[message.id]) for message in messages]
    assert all(asked)
    assert sum(asked) == loop.stats.guided_draws
    assert loop.stats.decided_draws == sum(len(replies[message.id]) for message in messages) - sum(asked) > 0
    free = tokens_of(run(build(), beside)["beside"])
    assert tokens_of(replies["beside"]) == free


@pytest.mark.slow
@pytest.mark.parametrize(("build", "least"), [("compact", 0.02), ("overlapped", 0.0)], indirect=["build"])
def test_the_end_is_a_candidate_where_it_is_probable_enough(build: Build, plain: Plain, least: float):
    """In place of the last of ``top_k``, beyond the filters, in rows beside those that do not ask for it, and never if it is
    excluded; without the field the draws are those of before."""
    rng = random.Random(8)
    asked = [
        guided("a", some_tokens(rng, 5, 20), guidance(scale=2.0, top_k=2, end_min_p=least)),
        guided("b", some_tokens(rng, 5, 20), guidance(constraint="eq", target_length=5, end_min_p=least), min_p=0.5),
        guided("c", some_tokens(rng, 5, 20), guidance(scale=-3.0, top_k=9, end_min_p=least), temperature=0.7, top_p=0.3),
    ]
    others = some_messages(rng)[::2]
    replies, alone = run(build(), *asked, *others), run(build(), *others)
    assert all(verify(plain, message, replies[message.id]) for message in (*asked, *others))
    offered = [END_OF_TURN in ids for each in "abc" for delta in replies[each] for ids in delta.logprobs.top_tokens]
    assert sum(offered) > len(offered) / 4
    assert all(offered) == (least == 0)
    assert all(tokens_of(replies[message.id]) == tokens_of(alone[message.id]) for message in others)
    kept = guided(
        "k", some_tokens(rng, 5, 20), guidance(constraint="le", target_length=1, end_min_p=0.0), min_tokens=9, ignore_eos=False
    )
    written = tokens_of(run(build(), kept)["k"])
    assert (written.index(END_OF_TURN), len(written)) == (9, 10)


@pytest.mark.slow
@in_both_layouts
def test_nothing_is_computed_twice(build: Build):
    """The length model computes the prompt, each drawn token at most once, and the candidates of undecided draws."""
    loop = build()
    prompt = some_tokens(random.Random(4), 30, 30)
    message = guided("g", prompt, guidance(scale=3.0, entropy_threshold=1.45), max_tokens=40)
    replies = run(loop, message)["g"]
    asked = [delta.logprobs.values[0][0] is not None for delta in replies]
    assert 0 < sum(asked) < 40
    candidates = [len(delta.logprobs.top_tokens[0]) for delta in replies]
    if loop._runner._lenvm._compact:
        # A draw that was passed over leaves its token pending; the last of them are never needed.
        last = max(place for place, was in enumerate(asked) if was)
        pending = sum(not was for was in asked[:last])
        assert loop.stats.lenvm_tokens == len(prompt) + sum(c for c, was in zip(candidates, asked, strict=True) if was) + pending
    else:
        assert loop.stats.lenvm_tokens == len(prompt) + sum(candidates)
    before = loop.stats.lenvm_tokens
    longer = [*prompt, *tokens_of(replies)]
    run(loop, guided("h", [*longer, 7, 8], guidance(scale=3.0), max_tokens=1))
    known = 40 if not loop._runner._lenvm._compact else last + asked[-1]
    assert loop.stats.lenvm_tokens - before <= len(longer) - len(prompt) - known + 2 + 5 + (1 if known < 40 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["compact"], indirect=True)  # where undecided tokens stay pending
def test_a_long_decided_stretch_is_caught_up_in_chunks(build: Build, plain: Plain):
    """More tokens are drawn without the length model than one step may compute."""
    rng = random.Random(5)
    decided = guided("g", some_tokens(rng, 5, 5), guidance(scale=3.0, entropy_threshold=1.56), max_tokens=40)
    crowd = [guided(f"c{i}", some_tokens(rng, 5, 9), guidance(scale=-2.0), max_tokens=20) for i in range(2)]
    replies = run(build(max_batched_tokens=8), decided, *crowd)
    for message in (decided, *crowd):
        assert verify(plain, message, replies[message.id])


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_in_every_form_and_company(checkpoints):
    rng = random.Random(6)
    messages = some_messages(rng)
    outputs = []
    for form in ("compact", "overlapped"):
        alone = [tokens_of(run(build_guided(checkpoints, form), message)[message.id]) for message in messages[:2]]
        crowd = run(build_guided(checkpoints, form, **TIGHT), *messages)
        outputs.append([tokens_of(crowd[message.id]) for message in messages])
        assert outputs[-1][:2] == alone
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_neutral_settings_are_the_unguided_request(checkpoints):
    sampling, loop = wire.Sampling(max_tokens=20, seed=5, ignore_eos=True, min_p=0.05), build_guided(checkpoints, "compact")
    neutral = [{"mode": mode, "scale": 1.0} for mode in ("linear", "exp", "length_mul")]
    neutral += [{"scale": 0.0}, {"mode": "value_bias"}, {"mode": "mul", "scale": -2.0}]
    free, *others = (
        run(loop, wire.Generate("g", [5, 6, 7], sampling, logprobs=2, length_guidance=some))["g"]
        for some in (None, *(wire.LengthGuidance(**settings) for settings in neutral))
    )
    for same in others:
        for found, expected in zip(same, free, strict=True):
            assert (found.tokens, found.logprobs.top_tokens) == (expected.tokens, expected.logprobs.top_tokens)
            assert found.logprobs.top[0] == pytest.approx(expected.logprobs.top[0], abs=1e-5)
    assert loop.stats.lenvm_tokens == 0


def test_values_of_several_tokens_at_a_time(build: Build):
    message = guided("g", [5, 6, 7], guidance(scale=3.0))
    singly, together = (run(build(), each)["g"] for each in (message, msgspec.structs.replace(message, tokens_per_delta=99)))
    assert together[0].logprobs.values == [values for delta in singly for values in delta.logprobs.values]
    assert together[0].tokens == tokens_of(singly)


@pytest.mark.slow
def test_constraints_choose_without_a_draw_at_temperature_0(build: Build, plain: Plain):
    """Beside drawn and unguided rows; draws that are left alone take the most probable candidate."""
    rng = random.Random(14)
    aims = (
        {"constraint": "eq", "target_length": 9},
        {"constraint": "ge", "target_length": 6, "top_k": 3},
        {"constraint": "le", "target_length": 6},
        {"constraint": "eq", "target_length": 12, "entropy_threshold": 1.5},
        {"constraint": "le", "target_length": 6, "value_min": 0.5},
        {"constraint": "about", "target_length": 8},
    )
    greedy = [guided(f"g{i}", some_tokens(rng, 3, 9), guidance(**aim), temperature=0.0) for i, aim in enumerate(aims)]
    free = wire.Generate("free", [5, 6, 7], wire.Sampling(max_tokens=9, temperature=0))
    drawn = guided("drawn", [5, 6, 7], guidance(scale=3.0))
    replies = run(build(), greedy[0], drawn, free, *greedy[1:])
    for message in greedy:
        text, unguided = list(message.prompt), []
        for position, token in enumerate(tokens_of(replies[message.id])):
            expected = plain.draw(text, position, message)
            assert token == expected.ids[int(expected.tilted.argmax())]
            unguided.append(token == expected.ids[0])
            text.append(token)
        assert not all(unguided)
        assert verify(plain, message, replies[message.id])
    again = [msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, seed=99)) for each in greedy]
    others = run(build(), *again)
    assert all(tokens_of(others[each.id]) == tokens_of(replies[each.id]) for each in greedy)
    assert tokens_of(replies["drawn"]) == tokens_of(run(build(), drawn)["drawn"])
    assert tokens_of(replies["free"]) == tokens_of(run(build(), free)["free"])


@pytest.mark.slow
def test_a_constraint_takes_the_same_candidates_at_every_temperature(build: Build, plain: Plain):
    """Draws that are left alone have the request's temperature: near 0 they are those of temperature 0."""
    prompt, whole, partly = [5, 6, 7], {"constraint": "eq", "target_length": 9}, {"constraint": "eq", "target_length": 9}
    partly["entropy_threshold"] = 1.45
    texts: dict[str, list[list[int]]] = {"whole": [], "partly": [], "limit": []}
    for name, aim in (("whole", whole), ("partly", partly), ("limit", {"constraint": "within", "target_length": 9})):
        for temperature in (0.0, 1e-3, 1.7):
            message = guided(name, prompt, guidance(**aim), temperature=temperature, min_p=0.2)
            replies = run(build(), message)[name]
            assert verify(plain, message, replies)
            texts[name].append(tokens_of(replies))
    assert all(text == texts["whole"][0] for text in texts["whole"])
    for name in ("partly", "limit"):
        assert texts[name][1] == texts[name][0] != texts[name][-1]


@pytest.mark.parametrize("settings", [{"scale": 9.0}, {"mode": "mul", "scale": 2.0}, {"constraint": "eq_soft", "target_length": 9}])
def test_other_guidance_at_temperature_0_is_invalid(build: Build, settings):
    message = wire.Generate("g", [5, 6, 7], wire.Sampling(temperature=0), length_guidance=wire.LengthGuidance(**settings))
    (refused,) = run(build(), message)["g"]
    assert (refused.code, refused.message.startswith("At temperature 0 nothing is drawn")) == ("invalid", True)


@settings(deadline=None)
@given(
    st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    st.just(0.0) | st.floats(0.001, 300),
    st.sampled_from([(0.5, 0), (0.8, 1), (0.95, 1)]),
)
def test_the_longest_prediction_that_keeps_a_limit(ratios: list[float], most: float, asked: tuple[float, int]):
    """By the definition: real lengths are predicted ones times the quantile of the value's bin, at the next stored level."""
    confidence, level = asked
    calibration = wire.Calibration([0.4, 0.9], {"0.5": [0.0, 0.0, 0.0], "0.95": ratios}, 99)
    chosen = calibration.log_ratio[("0.5", "0.95")[level]]

    def bound(length: float) -> float:
        return length * math.exp(chosen[bisect_right(calibration.edges, 1 - GAMMA**length)])

    found = within(calibration, confidence, GAMMA, most)
    assert found == 0 or bound(found * (1 - 1e-9)) <= most * (1 + 1e-6)
    assert all(bound(length) > most * (1 - 1e-6) for length in (found * 1.001 + 0.1 * step for step in range(1, 3000)))


@pytest.mark.slow
def test_a_target_in_characters_is_corrected_while_writing(build: Build):
    """Each draw is that of a target in tokens, by the characters so far and the tokens of a character."""
    loop = build()
    spellings = loop._runner._context.spellings
    prompt = some_tokens(random.Random(16), 30, 30)
    message = guided("g", prompt, guidance(constraint="eq", target_length=60, unit="characters"), max_tokens=20)
    (others, *_) = some_messages(random.Random(17))
    output = tokens_of(run(loop, message, others)["g"])
    aims = set()
    for place, token in enumerate(output):
        written = Written("characters", prompt, spellings)
        written.add(output[:place], spellings)
        aims.add(aim := round(written.left(60)))
        alone = guided("a", [*prompt, *output[:place]], guidance(constraint="eq", target_length=aim), max_tokens=1)
        assert tokens_of(run(loop, alone)["a"]) == [token]
    assert len(aims) > 5


@pytest.mark.slow
def test_a_resumed_generation_goes_on_as_the_first_would(build: Build, plain: Plain):
    message = guided("g", [9, 8, 7], guidance(constraint="eq", target_length=9), max_tokens=14)
    whole = tokens_of(run(build(), message)["g"])
    rest = wire.Generate(
        "g", [9, 8, 7, *whole[:5]], message.sampling, logprobs=20, length_guidance=message.length_guidance, resume_offset=5
    )
    replies = run(build(), rest)["g"]
    assert tokens_of(replies) == whole[5:]
    assert replies[0].offset == 5
    assert verify(plain, rest, replies)


def test_penalties_and_held_back_ends(build: Build):
    """Edits of the logits come before the candidates; an end that is excluded is none of them."""
    bias = {END_OF_TURN: 100.0}
    held = wire.LengthGuidance(constraint="le", target_length=0)
    replies = run(build(), guided("g", [5, 6], held, logit_bias=bias, min_tokens=4, ignore_eos=False, frequency_penalty=2.0))["g"]
    output = tokens_of(replies)
    assert (len(output), output[-1], replies[-1].finish) == (5, END_OF_TURN, "stop")
    assert END_OF_TURN not in output[:-1]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_target_is_output_tokens_without_the_end(build: Build, count: int):
    """An end that is always a candidate, of length 0, is taken by ``ge`` where the target is spent, and by no token before."""
    some = wire.LengthGuidance(constraint="ge", target_length=count, top_k=5)
    replies = run(build(), guided("g", [5, 6], some, logit_bias={END_OF_TURN: 6.0}, ignore_eos=False))["g"]
    assert len(tokens_of(replies)) == count + 1
    assert replies[-1].finish == "stop"


def test_stop_tokens_end_like_an_end_of_sequence(build: Build):
    stop = 40
    some = guidance(constraint="le", target_length=0)
    sampling = {"logit_bias": {stop: 6.0}, "stop_token_ids": (stop,)}
    replies = run(build(), guided("g", [5, 6], some, **sampling))["g"]
    assert tokens_of(replies) == [stop]
    (ids,), (values,) = replies[0].logprobs.top_tokens, replies[0].logprobs.values
    assert (ids[0], values[0]) == (stop, 0.0)
    assert min(values[1:]) > 0


@pytest.mark.slow
def test_sampled_frequencies_are_the_tilted_ones(build: Build, plain: Plain):
    """Chi-square over 2000 seeds, at the 0.1 % level for 4 degrees of freedom."""
    message = guided("g", [5, 6, 7], wire.LengthGuidance(scale=2.0), max_tokens=1)
    expected = plain.draw(message.prompt, 0, message)
    draws = [
        wire.Generate(
            f"d{seed}",
            message.prompt,
            wire.Sampling(max_tokens=1, seed=seed, ignore_eos=True),
            length_guidance=message.length_guidance,
        )
        for seed in range(2000)
    ]
    replies = run_quickly(build(), draws)
    counts = Counter(tokens_of(replies[draw.id])[0] for draw in draws)
    assert set(counts) <= set(expected.ids)
    wanted = (2000 * expected.tilted).tolist()
    assert sum((counts[token] - want) ** 2 / want for token, want in zip(expected.ids, wanted, strict=True)) < 18.47
    untilted = (2000 * expected.prior).tolist()
    assert sum((counts[token] - want) ** 2 / want for token, want in zip(expected.ids, untilted, strict=True)) > 18.47


def run_quickly(loop: Loop, messages: list[wire.Generate]) -> dict[str, list[wire.Reply]]:
    """As :func:`run`, without checks."""
    replies: dict[str, list[wire.Reply]] = {}
    for message in messages:
        loop.submit(message)
    while not loop.idle:
        for reply in loop.step():
            replies.setdefault(reply.id, []).append(reply)
    return replies


@torch.inference_mode()
def test_values_of_texts_equal_each_alone(build: Build, plain: Plain):
    rng = random.Random(10)
    loop = build(max_batched_tokens=32)
    query = some_tokens(rng, 30, 30)
    messages = [
        wire.Score(f"v{i}", query[: 10 * i], [some_tokens(rng, 1, 20) for _ in range(5)], wire.LengthValue()) for i in range(4)
    ]
    replies = run(loop, *messages, *some_messages(rng)[:3])
    for message in messages:
        (reply,) = replies[message.id]
        expected = [float(plain.raw_values([message.prefix + branch])[0]) for branch in message.branches]
        assert [z for (z,) in reply.rows] == pytest.approx(expected, abs=1e-4)
        assert reply.computed_tokens <= len(message.prefix) + sum(map(len, message.branches))
    (again,) = run(loop, wire.Score("again", query, [[5]], wire.LengthValue()))["again"]
    assert (again.cached_tokens, again.computed_tokens) == (30, 1)
    assert run(loop, wire.Score("none", [1], [], wire.LengthValue()))["none"] == [wire.Scored("none", [], 0, 0)]


@in_both_layouts
def test_a_guided_prompt_is_found_in_both_caches(build: Build):
    loop = build()
    prompt = some_tokens(random.Random(11), 50, 50)
    run(loop, guided("a", prompt, guidance(scale=3.0), max_tokens=1))
    before = loop.stats
    replies = run(loop, guided("b", prompt, guidance(scale=3.0), max_tokens=1))["b"]
    assert replies[0].cached_tokens == 49
    assert loop.stats.computed_tokens - before.computed_tokens == 1
    assert loop.stats.lenvm_tokens - before.lenvm_tokens == 1 + 5


@in_both_layouts
def test_a_failed_pass_ends_its_requests_and_the_engine_goes_on(build: Build, monkeypatch):
    loop = build()
    model = loop._runner._lenvm._model
    message = guided("g", [5, 6, 7], guidance(scale=2.0))

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        (reply,) = run(loop, message)["g"]
    assert (reply.code, reply.retryable) == ("out_of_memory", True)
    assert all(kv_pool.pool.available == kv_pool.pool.size for kv_pool in loop._scheduler.kv_pools)
    assert len(tokens_of(run(loop, message)["g"])) == 12


def test_a_sequence_that_loses_the_length_models_slots_in_flight(checkpoints, plain: Plain):
    """It is computed there again, up to a token that a step in flight is drawing."""
    loop = build_guided(checkpoints, "overlapped", max_batched_tokens=64)
    message = guided("g", some_tokens(random.Random(13), 30, 30), guidance(scale=3.0))
    loop.submit(message)
    replies = [reply for _ in range(4) for reply in loop.step()]
    (branch,) = loop._scheduler.get("g").branches
    loop._scheduler.allocator.free(branch.aux_branch)
    launch, unknown = loop._runner.launch, []

    def watch(batch: Batch) -> PendingStep:
        unknown.extend(segment.tokens[-1] == PENDING for segment in pending_segments(batch))
        return launch(batch)

    loop._runner.launch = watch
    while not loop.idle:
        replies += loop.step()
        check(loop._scheduler)
    assert unknown == [True]
    assert verify(plain, message, replies) == 12


def pending_segments(batch: Batch) -> list[ExtendSegment]:
    return [candidate_pass.pending for candidate_pass in batch.candidate_passes.values() if candidate_pass.pending is not None]


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Models whose heads the Triton kernels take."""
    directory, shape = (
        tmp_path_factory.mktemp("wide"),
        {"head_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    )
    return (
        make_checkpoint(directory / "base", "qwen3", **shape),
        make_lenvm_checkpoint(directory / "lenvm", "qwen3", **shape),
    )


@pytest.mark.slow
def test_the_kernels_draw_the_same(wide_heads: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, device: torch.device):
    """All that a GPU computes of guided draws, in Triton's interpreter where there is none."""
    plain = Plain(*wide_heads)
    messages = [guided(f"g{place}", [5, 6, 7 + place], guidance(**MODES[place]), max_tokens=3) for place in (1, 3, 4)]
    if device.type == "cpu":
        monkeypatch.setattr(guided_draws, "candidates", candidates_triton)
        monkeypatch.setattr(guided_draws, "length_tilt", length_tilt_triton)
    loop = build_guided(wide_heads, "overlapped", attention="triton", device=device.type, dtype="float32")
    replies = run(loop, *messages)
    assert sum(verify(plain, message, replies[message.id]) for message in messages) > 6


@pytest.mark.parametrize("form", ["compact", "overlapped"])
def test_what_is_not_a_number_spoils_its_request_alone(checkpoints: tuple[Path, Path], tmp_path: Path, form: str):
    model = AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.get_input_embeddings().weight.data[310] = math.nan
    base = Path(shutil.copytree(checkpoints[0], tmp_path / "base"))
    model.save_pretrained(base)
    good, bad = (guided(str(last), [5, last], guidance(scale=2.0, top_k=4)) for last in (7, 310))
    alone = run(build_guided(checkpoints, form), good)["7"]
    replies = run(build_guided((base, checkpoints[1]), form), bad, good)
    assert [reply.code for reply in replies["310"] if isinstance(reply, wire.Failed)] == ["not_a_number"]
    assert tokens_of(replies["7"]) == tokens_of(alone)
