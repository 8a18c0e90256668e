"""Prompt lookup gives the tokens and log-probabilities of plain decoding, on every schedule."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.depth import seeds
from tests.engine.integrity import check
from tests.engine.parity import make_loop
from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import EMPTY, ints
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.requests.prompt_lookup import FIRST_CREDIT, MOST_INDEXED, REGAINED, Lookup, PromptIndex, key_of
from yardstick_llm.engine.runner.readouts.draws import join_logprobs

DRAFTS = wire.DraftOptions(max_tokens=6, ngram=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lookup"), "qwen3", num_hidden_layers=2)


build = partial(make_loop, max_wait_seconds=3600.0)


class Output(msgspec.Struct):
    """One sequence."""

    tokens: list[int] = []
    pieces: list[wire.Logprobs] = []
    finish: str | None = None
    drafted: int = 0
    accepted: int = 0

    @property
    def logprobs(self) -> wire.Logprobs:
        return join_logprobs(self.pieces)


def outputs(loop: Loop, messages: list[wire.Generate], rng: random.Random | None = None) -> dict[tuple[str, int], Output]:
    """All sequences. ``rng``: messages come at random times."""
    found: dict[tuple[str, int], Output] = defaultdict(Output)
    waiting = list(messages)
    for _ in range(5000):
        while waiting and (rng is None or rng.random() < 0.3):
            loop.submit(waiting.pop(0))
        for reply in loop.step():
            assert isinstance(reply, wire.Delta), reply
            output = found[reply.id, reply.index]
            assert reply.offset == len(output.tokens)
            assert output.finish is None
            output.tokens = output.tokens + reply.tokens
            output.pieces = output.pieces + ([] if reply.logprobs is None else [reply.logprobs])
            output.finish = reply.finish
            output.drafted += reply.draft_tokens
            output.accepted += reply.accepted_draft_tokens
        check(loop._scheduler)
        if loop.idle and not waiting:
            return found
    raise AssertionError("the requests never ended")


def assert_equal(actual: dict[tuple[str, int], Output], expected: dict[tuple[str, int], Output]) -> None:
    assert actual.keys() == expected.keys()
    for name, output in expected.items():
        assert (actual[name].tokens, actual[name].finish) == (output.tokens, output.finish), name
        if output.pieces:
            logprobs, plain = actual[name].logprobs, output.logprobs
            assert logprobs.chosen == pytest.approx(plain.chosen, abs=1e-4)
            assert logprobs.top_tokens == plain.top_tokens
            assert [len(row) for row in logprobs.top] == [len(row) for row in plain.top]
            assert np.concatenate(logprobs.top) == pytest.approx(np.concatenate(plain.top), abs=1e-4)


def random_message(rng: random.Random, name: str) -> wire.Generate:
    """Short vocabularies and biased logits make outputs that repeat the prompt's n-grams, with and without what follows them."""
    words = [rng.randrange(3, 320) for _ in range(rng.randint(2, 6))]
    prompt = [rng.choice(words) for _ in range(rng.randint(1, 50))]
    sampling = wire.Sampling(
        max_tokens=rng.randint(0, 40),
        min_tokens=rng.choice((0, 0, 12)),
        temperature=rng.choice((0.0, 0.3, 1.0)),
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.getrandbits(32),
        n=rng.choice((1, 1, 1, 3)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(3, 320), 20)),
        presence_penalty=rng.choice((0.0, 0.0, 0.2)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
        logit_bias=dict.fromkeys(words, 4.0) if rng.random() < 0.6 else {},
        bad_words=((words[0], words[1]),) if rng.random() < 0.2 else (),
        allowed_token_ids=tuple(words) if rng.random() < 0.2 else None,
    )
    return wire.Generate(
        name,
        prompt,
        sampling,
        logprobs=rng.choice((None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, 1)) if sampling.max_tokens else 1,
        tokens_per_delta=rng.choice((1, 1, 4)),
        caller=wire.Caller(tenant=rng.choice("aab")),
    )


SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {"max_batched_tokens": 9},
    {"max_total_tokens": 220, "max_batched_tokens": 40},
    {"max_total_tokens": 220, "max_running_requests": 3},
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(slow=2, deep=24))
def test_drafts_change_no_token_on_any_schedule(checkpoint: Path, seed: int) -> None:
    """Every other seed is of the plain loop."""
    rng, overlap = random.Random(seed), seed % 2 == 0
    messages = [random_message(rng, f"g{place}") for place in range(7)]
    expected = outputs(build(checkpoint, overlap=False), messages)
    drafting = [msgspec.structs.replace(each, prompt_lookup=DRAFTS) for each in messages]
    for schedule in SCHEDULES:
        loop = build(checkpoint, overlap=overlap, **schedule)
        found = outputs(loop, drafting, rng)
        assert_equal(found, expected)
        stats = loop.stats
        assert stats.accepted_draft_tokens <= stats.draft_tokens
        if seed == 0:
            assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
        # a branch that was preempted and ended elsewhere, or that ended within its draft, is reported too
        assert sum(output.drafted for output in found.values()) == stats.draft_tokens
        assert sum(output.accepted for output in found.values()) == stats.accepted_draft_tokens
        loop._scheduler.cache.clear()
        assert loop.stats.slots_free == loop.stats.slots_total


@pytest.mark.slow
def test_drafts_change_no_token_of_models_with_windows(tmp_path: Path) -> None:
    """The windows are shorter than the texts, so drafts cross their edges."""
    directory = make_checkpoint(tmp_path, "gemma2", sliding_window=13)
    rng = random.Random(1)
    messages = [random_message(rng, f"g{place}") for place in range(4)]
    for place, words in enumerate(((7, 7), (7, 30))):
        sampling = wire.Sampling(max_tokens=50, seed=5, ignore_eos=True, allowed_token_ids=words)
        messages.append(wire.Generate(f"w{place}", list(words) * 8, sampling, logprobs=2))
    expected = outputs(build(directory, overlap=False), messages)
    drafting = [msgspec.structs.replace(each, prompt_lookup=DRAFTS) for each in messages]
    for schedule in ({}, {"max_total_tokens": 220, "max_batched_tokens": 40}):
        loop = build(directory, overlap=True, **schedule)
        assert_equal(outputs(loop, drafting, rng), expected)
        assert 0 < loop.stats.accepted_draft_tokens < loop.stats.draft_tokens


@pytest.mark.slow
def test_a_copied_text_takes_few_steps(checkpoint: Path) -> None:
    sampling = wire.Sampling(max_tokens=60, ignore_eos=True, allowed_token_ids=(7,))
    plain, lookup = (build(checkpoint, overlap=True, prompt_lookup=count) for count in (0, 16))
    message = wire.Generate("g", [7] * 20, sampling, logprobs=1)
    assert_equal(outputs(lookup, [message]), outputs(plain, [message]))
    assert lookup.stats.steps < 0.3 * plain.stats.steps
    assert lookup.stats.accepted_draft_tokens == lookup.stats.draft_tokens > 40
    off = msgspec.structs.replace(message, id="off", prompt_lookup=wire.DraftOptions(max_tokens=0))
    before = lookup.stats.draft_tokens
    outputs(lookup, [off])
    assert lookup.stats.draft_tokens == before


@pytest.mark.slow
def test_another_engine_resumes_within_a_draft(checkpoint: Path) -> None:
    sampling = wire.Sampling(max_tokens=40, seed=3, temperature=0.5, ignore_eos=True, logit_bias={5: 9.0, 6: 9.0})
    message = wire.Generate("g", [5, 6, 5, 6, 9, 5, 6], sampling, prompt_lookup=DRAFTS)
    (whole,) = outputs(build(checkpoint), [message]).values()
    assert whole.accepted > 5
    for cut in (1, 2, 17, 39):
        rest = msgspec.structs.replace(message, prompt=message.prompt + whole.tokens[:cut], resume_offset=cut)
        loop = build(checkpoint)
        loop.submit(rest)
        tokens = []
        while not loop.idle:
            for delta in loop.step():
                assert isinstance(delta, wire.Delta)
                assert delta.offset == cut + len(tokens)
                tokens += delta.tokens
        assert whole.tokens[:cut] + tokens == whole.tokens


@pytest.mark.slow
def test_the_prefix_cache_keeps_no_rejected_token(checkpoint: Path) -> None:
    """A later prompt that goes on from an output finds its slots, which a fresh engine must agree with."""
    rng = random.Random(5)
    loop = build(checkpoint)
    for attempt in range(6):
        message = msgspec.structs.replace(
            random_message(rng, f"a{attempt}"), prompt_lookup=DRAFTS, prompt_logprobs=None, logprobs=None
        )
        sampling = msgspec.structs.replace(message.sampling, n=1, max_tokens=30)
        message = msgspec.structs.replace(message, sampling=sampling, tokens_per_delta=1)
        (first,) = outputs(loop, [message]).values()
        longer = wire.Generate(f"b{attempt}", message.prompt + first.tokens, wire.Sampling(max_tokens=5, temperature=0), logprobs=3)
        assert_equal(outputs(loop, [longer]), outputs(build(checkpoint), [longer]))


@pytest.mark.parametrize("overlap", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="overlapped")])
def test_aborting_frees_the_slots_of_drafts(checkpoint: Path, overlap: bool) -> None:
    loop = build(checkpoint, overlap=overlap, prompt_lookup=8)
    sampling = wire.Sampling(max_tokens=500, ignore_eos=True, allowed_token_ids=(7,), n=2)
    for steps in range(1, 12):
        name = f"g{steps}"
        loop.submit(wire.Generate(name, [7] * 9, sampling))
        for _ in range(steps):
            loop.step()
            check(loop._scheduler)
        loop.submit(wire.Abort(name))
        while not loop.idle:
            loop.step()
            check(loop._scheduler)
    loop._scheduler.cache.clear()
    assert loop.stats.slots_free == loop.stats.slots_total


def lookup_of(prompt: list[int], ngram: int = 2, ends: tuple[int, ...] = ()) -> Lookup:
    return Lookup(PromptIndex(ints(prompt), ngram), 8, 100, ends)


def test_a_draft_follows_the_latest_place_with_the_same_tokens() -> None:
    lookup = lookup_of([1, 2, 8, 9, 1, 2, 3, 4, 5, 1, 2])
    assert lookup.draft(EMPTY, 3).tolist() == [3, 4, 5]
    assert lookup.draft(EMPTY, 9).tolist() == [3, 4, 5, 1]  # credit for four
    assert lookup.draft(ints([7]), 9).size == 0
    assert lookup.draft(ints([7, 1, 2]), 3).tolist() == [7, 1, 2]  # the output is nearer than the prompt
    assert lookup.draft(ints([7, 1, 2, 4, 5]), 2).tolist() == [1, 2]  # the output goes on as the prompt does
    assert lookup_of([1, 2]).draft(ints([]), 4).size == 0
    assert lookup_of([1, 1, 1]).draft(EMPTY, 4).tolist() == [1, 1, 1, 1]  # it repeats itself
    assert lookup_of([1, 2, 3, 1, 2], ends=(3,)).draft(EMPTY, 4).size == 0
    assert lookup_of([1, 2, 4, 3, 1, 2], ends=(3,)).draft(EMPTY, 4).tolist() == [4]
    assert lookup_of([5]).draft(ints([5, 5, 5]), 2).tolist() == [5, 5]
    assert lookup_of([5], ngram=3).draft(EMPTY, 2).size == 0


def test_rejected_drafts_end_drafting() -> None:
    lookup, output, drafted = lookup_of([1, 2, 3, 1, 2]), [], 0
    for _ in range(3200):
        count = lookup.draft(ints(output), 8).size
        drafted += count
        if count:
            lookup.check(count, 0)
        output += [9, 1, 2]
    assert drafted <= FIRST_CREDIT + len(output) * REGAINED
    for _ in range(20):
        lookup.check(4, 4)
    assert lookup.draft(ints(output), 32).size == 8


def test_long_prompts_take_bounded_memory() -> None:
    prompt = np.random.default_rng(0).integers(0, 50_000, 3 * MOST_INDEXED).astype(np.int32)
    prompt[-3:] = prompt[-1003:-1000]
    index = PromptIndex(prompt, 3)
    lookup = Lookup(index, 8, 1 << 30, ())
    assert lookup.draft(EMPTY, 4).tolist() == prompt[-1000:-996].tolist()
    for table in (index._table, lookup._table):
        assert table is not None
        assert table._places.nbytes <= 1 << 20
    assert key_of([1, 2]) != key_of([2, 1])
