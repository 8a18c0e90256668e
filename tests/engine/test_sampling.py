"""The effect of each sampling parameter; a draw depends only on (seed, index, position)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import yardstick_llm.engine.runner.sampling
from tests.engine.device import no_waiting
from yardstick_llm.engine.ints import bits_of
from yardstick_llm.engine.runner.sampling import SamplingRow, SamplingRows, draw, gumbel, noise_key, noise_keys, prepare, sample
from yardstick_llm.engine.wire import Sampling
from yardstick_llm.kernels.keep_thresholds import FIRST_LOOK
from yardstick_llm.kernels.largest import token_logprobs

EOS = 0


def row(
    *, index: int = 0, position: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any
) -> SamplingRow:
    return SamplingRow(Sampling(**params), index, position, prompt, output, (EOS,))


def draws(logits: list[float], count: int = 2000, **params: Any) -> torch.Tensor:
    """Tokens drawn from one distribution at ``count`` positions."""
    rows = [row(position=position, **params) for position in range(count)]
    return sample(torch.tensor(logits).expand(count, -1), rows)


def support(logits: list[float], **params: Any) -> set[int]:
    """Every token that is ever drawn."""
    return set(draws(logits, **params).tolist())


def greedy(logits: list[float], **changes: Any) -> int:
    return int(sample(torch.tensor([logits]), [row(temperature=0.0, **changes)]))


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def keys(*draws_of: tuple[int, int, int]) -> torch.Tensor:
    """Return the noise keys of (seed, index, position)."""
    seeds, indices, positions = zip(*draws_of, strict=True)
    return torch.from_numpy(noise_keys(seeds, indices, positions).view(np.int64))


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean."""
    expected = probabilities * len(tokens)
    observed = torch.bincount(tokens, minlength=len(probabilities))
    degrees = len(probabilities) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float((statistic - degrees) / math.sqrt(2 * degrees))


@pytest.mark.slow
def test_frequencies_follow_the_filtered_distribution() -> None:
    logits = logs(0.3, 0.25, 0.2, 0.15, 0.06, 0.04)
    tokens = draws(logits, 30_000, top_k=5, top_p=0.9)
    assert chi_square(tokens[tokens < 4], torch.tensor([0.3, 0.25, 0.2, 0.15]) / 0.9) < 4
    assert int(tokens.max()) == 3


def test_noise_is_uniform_and_independent() -> None:
    ids = torch.arange(1_000_000)
    streams = keys((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 0, 0), (2**63, 0, 0))
    uniform = torch.exp(-torch.exp(-gumbel(streams, ids).double()))  # the Gumbel distribution function of the noise itself
    for stream in uniform:
        assert abs(chi_square((stream * 1000).long().clamp(max=999), torch.full((1000,), 1e-3))) < 5
    correlations = torch.corrcoef(uniform) - torch.eye(len(streams))
    assert correlations.abs().max() < 0.005
    assert abs(float(torch.corrcoef(torch.stack([uniform[0, :-1], uniform[0, 1:]]))[0, 1])) < 0.005


def test_noise_is_splitmix64() -> None:
    """The published first outputs for state 1234567 (java.util.SplittableRandom's algorithm), through the same two logarithms."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    expected = [-math.log(-math.log1p(-((number >> 1) / 2**63))) for number in published]
    torch.testing.assert_close(gumbel(torch.tensor([1234567]), torch.arange(5))[0], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_keys_do_not_collide() -> None:
    found = {noise_key(seed, index, position) for seed in range(10) for index in range(10) for position in range(50)}
    assert len(found) == 5_000
    assert all(0 <= key < 2**64 for key in found)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 5, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {3: 2.0, 7: -100.0}]),
        "min_tokens": st.sampled_from([0, 9]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=settings().max_examples * 3 // 5, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=8), data=st.data())
def test_a_row_does_not_depend_on_the_others(params: list[dict[str, Any]], data: st.DataObject) -> None:
    rows = [row(index=at % 3, position=at % 5, prompt=(1, 2, 3), output=(3, 4, 4), **some) for at, some in enumerate(params)]
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(len(rows)))
    before = logits.clone()
    together = sample(logits, rows)
    order = data.draw(st.permutations(range(len(rows))))
    assert torch.equal(sample(logits[order], [rows[at] for at in order]), together[order])
    alone = torch.cat([sample(logits[at : at + 1], [rows[at]]) for at in range(len(rows))])
    assert torch.equal(alone, together)
    assert torch.equal(logits, before), "the caller's logits are left alone"


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert greedy([1.0, 3.0, 3.0, 2.0]) == 1


def test_greedy_rows_take_the_same_token_beside_drawn_ones() -> None:
    """Rows that are all greedy need no parameters, and a large vocabulary is searched in blocks."""
    logits = torch.randint(100, (4, 5000)).float()
    logits[1, [1023, 1024, 4999]] = 200.0
    greedy, drawn = [row(temperature=0)] * 4, [row(temperature=0)] * 3 + [row(temperature=1)]
    kept = logits.clone()
    assert sample(logits, greedy).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, drawn)[:3].tolist() == logits.argmax(-1)[:3].tolist()
    biased = sample(logits, [*greedy[:3], row(temperature=0, logit_bias={7: 1000.0})])
    assert biased.tolist() == [*logits.argmax(-1)[:3].tolist(), 7]
    assert torch.equal(logits, kept)


def test_top_k() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.3)
    assert support(logits, top_k=1) == {1}
    assert support(logits, top_k=2) == {1, 3}
    assert support(logits, top_k=4) == support(logits, top_k=99) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.3)
    assert support(logits, top_p=1e-9) == {1}
    assert support(logits, top_p=0.39) == {1}
    assert support(logits, top_p=0.41) == {1, 3}
    assert support(logits, top_p=0.71) == {1, 2, 3}
    assert support(logits, top_p=0.91) == {0, 1, 2, 3}


def test_top_p_counts_probability_within_top_k() -> None:
    """0.4 of 0.7 is 0.57 of what top-k keeps: enough for 0.55, and of the whole distribution it would not be."""
    logits = logs(0.1, 0.4, 0.2, 0.3)
    assert support(logits, top_k=2, top_p=0.55) == {1}
    assert support(logits, top_p=0.55) == {1, 3}


@pytest.mark.slow
@pytest.mark.parametrize("flatness", [0.01, 4.0])
def test_top_p_over_a_large_vocabulary(flatness: float) -> None:
    """Whether the first look at the largest logits suffices or not, the set is that of a plain sort."""
    logits = torch.randn(3 * FIRST_LOOK, generator=torch.Generator().manual_seed(5)) * flatness
    probabilities, order = logits.softmax(0).sort(descending=True)
    kept = order[: int((probabilities.cumsum(0) < 0.6).sum()) + 1]
    assert (len(kept) > FIRST_LOOK) == (flatness < 1)
    masked = torch.full_like(logits, -math.inf)
    masked[kept] = logits[kept]
    rows = [row(seed=seed) for seed in range(300)]
    filtered = [row(seed=seed, top_p=0.6) for seed in range(300)]
    assert torch.equal(sample(logits.expand(300, -1), filtered), sample(masked.expand(300, -1), rows))


def test_min_p_is_relative_to_the_most_probable() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.3)
    assert support(logits, min_p=0.26) == {1, 2, 3}
    assert support(logits, min_p=0.6) == {1, 3}
    assert support([1.0, 1.0, 0.999], min_p=1.0) == {0, 1}


def test_min_p_comes_after_temperature() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.3)
    assert support(logits, min_p=0.6, temperature=2.0) == {1, 2, 3}


def test_presence_penalty_counts_a_token_once() -> None:
    logits = [0.0, 3.0, 2.5, 2.1]
    assert greedy(logits, output=(1, 1, 1), presence_penalty=0.8) == 2
    assert greedy(logits, output=(1, 1, 1), presence_penalty=0.4) == 1
    assert greedy(logits, prompt=(1,), presence_penalty=2.0) == 1, "the prompt does not count"
    assert greedy(logits, output=(3,), presence_penalty=-1.0) == 3


def test_frequency_penalty_counts_every_time() -> None:
    logits = [0.0, 3.0, 2.5]
    assert greedy(logits, output=(1,), frequency_penalty=0.3) == 1
    assert greedy(logits, output=(1, 1), frequency_penalty=0.3) == 2


def test_repetition_penalty_covers_prompt_and_output() -> None:
    assert greedy([0.0, 3.0, 2.0], prompt=(1,), repetition_penalty=2.0) == 2
    assert greedy([0.0, 3.0, 2.0], output=(1, 1), repetition_penalty=1.4) == 1
    assert greedy([-2.0, -1.0], output=(1,), repetition_penalty=3.0) == 0, "negative logits are multiplied"
    assert greedy([2.0, 3.0], prompt=(0,), repetition_penalty=0.5) == 0


def test_logit_bias() -> None:
    assert greedy([0.0, 3.0, 2.0], logit_bias={0: 3.5}) == 0
    assert greedy([0.0, 3.0, 2.0], logit_bias={1: -100.0}) == 2
    assert support([0.0, 0.0, 0.0], logit_bias={0: -math.inf, 2: -math.inf}) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_excluded_still_gives_a_valid_token(temperature: float) -> None:
    bias = dict.fromkeys(range(3), -math.inf)
    for filters in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        (token,) = sample(torch.zeros(1, 3), [row(temperature=temperature, logit_bias=bias, **filters)]).tolist()
        assert token in range(3)


def test_min_tokens_excludes_every_end() -> None:
    logits = [9.0, 8.0, 1.0]
    ends = {"stop_token_ids": (1,), "min_tokens": 3}
    assert greedy(logits, position=2, **ends) == 2
    assert greedy(logits, position=3, **ends) == EOS
    assert greedy(logits, position=2, ignore_eos=True, min_tokens=3) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_draw_never_waits_for_a_gpu() -> None:
    params = [{"temperature": 0.0}, {}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.1, "repetition_penalty": 1.2}]
    rows = [row(seed=seed, prompt=(1, 2), output=(3, 4, 4), **some) for seed, some in enumerate(params)]
    logits = torch.randn(len(rows), 151_936) * 3
    on_gpu = logits.cuda()
    draw(on_gpu, prepare(SamplingRows(rows), on_gpu.device))  # compiles
    with no_waiting():
        drawn = draw(on_gpu, prepare(SamplingRows(rows), on_gpu.device))
    assert torch.equal(drawn.cpu(), sample(logits, rows))


@pytest.mark.parametrize("top_n", [0, 3])
def test_token_logprobs_are_the_models_own(top_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.kernels.row_chunks.CPU_CHUNK_ELEMENTS", 250)
    logits = torch.randn(17, 100) * 5
    chosen = torch.arange(17)
    values, ids, top = token_logprobs(logits, chosen, top_n)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(values, expected[chosen, chosen])
    expected_top, expected_ids = expected.topk(top_n)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(top, expected_top)
    assert top.shape == (17, top_n)


def test_rows_that_allow_few_tokens_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU draws them among their tokens alone; the token is the one that a draw over the vocabulary finds."""
    vocab, rng = 1000, np.random.default_rng(0)
    sets = [None, [], [7], [3, 999, 1020], rng.integers(0, vocab, 100), rng.integers(0, vocab, 900)]
    rows = [
        SamplingRow(
            Sampling(seed=seed, temperature=temperature, logit_bias={7: 1.5}),
            0,
            3,
            (),
            (),
            (),
            None if tokens is None else bits_of(tokens, 32),
        )
        for seed, (tokens, temperature) in enumerate(itertools.product(sets, (0.0, 0.7, 1.0)))
    ]
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(1))
    assert len(prepare(SamplingRows(rows), logits.device).few) == 12
    drawn = sample(logits, rows)
    monkeypatch.setattr(yardstick_llm.engine.runner.sampling, "FEW", 1 << 40)
    assert list(prepare(SamplingRows(rows), logits.device).few) == [3, 4, 5], "those that allow none"
    assert torch.equal(drawn, sample(logits, rows))
