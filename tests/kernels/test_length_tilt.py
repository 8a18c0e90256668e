"""Guided draws: the reference and the kernel against each rule's definition, one row at a time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from yardstick_llm.kernels.candidates import Candidates
from yardstick_llm.kernels.length_tilt import RULES, Tilts, length_tilt_reference, length_tilt_triton, needs_value

WIDTH = 8
SOLVED = ("mul", "linear", "exp", "length_mul", "eq_soft")


@dataclass(frozen=True)
class Case:
    """One row."""

    rule: str
    p: list[float]
    z: list[float]
    ends: list[bool]
    scale: float = 1.0
    gamma: float = 0.99
    target: float = 10.0
    value_min: float = 0.0
    active: bool = True
    shift: float = 0.0
    spread: float = 1.0


def compute(operation: Callable[..., Tensor], cases: list[Case], device: torch.device) -> list[list[float]]:
    def table(rows: list[list[float]], fill: float) -> list[list[float]]:
        return [row + [fill] * (WIDTH - len(row)) for row in rows]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    result = operation(
        torch.tensor(table([case.p for case in cases], 0.0), device=device),
        torch.tensor(table([case.z for case in cases], math.nan), device=device),
        torch.tensor(table([case.ends for case in cases], True), device=device) == 1,
        torch.tensor([case.active for case in cases], device=device),
        Tilts(
            torch.tensor([RULES.index(case.rule) for case in cases], device=device),
            column([case.scale for case in cases]),
            column([math.log(case.gamma) for case in cases]),
            column([case.target for case in cases]),
            column([case.value_min for case in cases]),
            column([case.shift for case in cases]),
            column([case.spread for case in cases]),
        ),
    )
    for row, case in zip(result.tolist(), cases, strict=True):
        assert row[len(case.p) :] == [0.0] * (WIDTH - len(case.p))
    return [row[: len(case.p)] for row, case in zip(result.tolist(), cases, strict=True)]


def expected(case: Case, suppose: Callable[[bool], object] = bool) -> list[float]:
    """The definition, with a mean found by halving an interval. ``suppose``: told what a property-based test has to assume."""
    p, count = case.p, len(case.p)
    z = [-BOUND if end else min(max(raw, -BOUND), BOUND) for raw, end in zip(case.z, case.ends, strict=True)]
    v = [0.0 if end else 1 / (1 + math.exp(-raw)) for raw, end in zip(z, case.ends, strict=True)]
    mean, least, most = math.fsum(a * b for a, b in zip(p, v, strict=True)), min(v), max(v)
    if not case.active or mean < case.value_min:
        return p
    if case.rule in ("centered_exp", "value_bias"):
        return tilt(p, z if case.rule == "value_bias" else v, case.scale)
    if case.rule in SOLVED:
        return with_mean(case, v, mean, least, most)
    if case.rule == "about":
        return about(case, z, suppose)
    if case.rule == "within":
        kept = [a if value <= 1 - case.gamma**case.target else 0.0 for a, value in zip(p, v, strict=True)]
        if any(kept):
            return [a / math.fsum(kept) for a in kept]
    if case.rule == "eq":
        lengths = [0.0 if end else math.log1p(math.exp(raw)) / -math.log(case.gamma) for raw, end in zip(z, case.ends, strict=True)]
        target = min(case.target, BOUND / -math.log(case.gamma))
        cost = [abs(length - target) for length in lengths]
    else:
        cost = [-value for value in v] if case.rule == "ge" and case.target > 0 else v
    return [float(place == cost.index(min(cost))) for place in range(count)]


BOUND = -math.log(1e-9)


def about(case: Case, z: list[float], suppose: Callable[[bool], object]) -> list[float]:
    low, high, power = case.target - case.scale, case.target + case.scale, 1.5
    if high < 1:
        low, high, power = 0.0, 1.0, 1.5 + max(-high, 0.0) / case.scale
    scores = []
    for p, raw, end in zip(case.p, z, case.ends, strict=True):
        middle = math.log(math.log1p(math.exp(raw)) / -math.log(case.gamma)) + case.shift
        begin, after = ((math.log(max(bound, 1e-12)) - middle) / case.spread for bound in (low - 0.5, high + 0.5))
        begin, after = (begin, after) if begin + after > 0 else (-after, -begin)
        inside = float(low <= 0) if end else (math.erfc(begin / math.sqrt(2)) - math.erfc(after / math.sqrt(2))) / 2
        suppose(end or inside > 1e-300)
        scores.append(math.log(p) + power * (math.log(inside) if inside else -math.inf))
    if max(scores) == -math.inf:
        return case.p
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def with_mean(case: Case, v: list[float], mean: float, least: float, most: float) -> list[float]:
    s, span = case.scale, most - least
    if span < 1e-8 or (case.rule == "mul" and s <= 0):
        return case.p
    wanted = {
        "mul": lambda: s * mean,
        "linear": lambda: mean + (s - 1) * (most - mean) if s >= 1 else mean - (1 - s) * (mean - least),
        "exp": lambda: least + (1 - max(1 - (mean - least) / span, 0.0) ** max(s, 0)) * span,
        "length_mul": lambda: 1 - case.gamma ** (s * math.log(1 - mean) / math.log(case.gamma)),
        "eq_soft": lambda: 1 - case.gamma**case.target,
    }[case.rule]()
    margin = max(1e-12, 1e-6 * span)
    goal = min(max(wanted, least + margin), most - margin)
    if abs(goal - mean) < 1e-8:
        return case.p
    if case.rule == "eq_soft" and not least < wanted < most:
        return [float(place == v.index(least if wanted <= least else most)) for place in range(len(v))]
    low, high = -1e13, 1e13
    for _ in range(300):
        middle = (low + high) / 2
        reached = math.fsum(a * b for a, b in zip(tilt(case.p, [value - least for value in v], middle), v, strict=True))
        low, high = (middle, high) if reached < goal else (low, middle)
    return tilt(case.p, [value - least for value in v], (low + high) / 2)


def tilt(p: list[float], by: list[float], factor: float) -> list[float]:
    scores = [math.log(a) + factor * b if a else -math.inf for a, b in zip(p, by, strict=True)]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


@st.composite
def rows(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, WIDTH))
    weights = sorted(draw(st.lists(st.floats(1e-4, 1.0), min_size=count, max_size=count)), reverse=True)
    # Values as float32 holds them; from a few, so that equals are drawn too.
    values = st.one_of(st.sampled_from([-30.0, -2.0, 0.0, 0.5, 40.0]), st.floats(-12, 12, width=32))
    p, rule = torch.tensor(weights, dtype=torch.float64), draw(st.sampled_from(RULES))
    target = draw(st.one_of(st.sampled_from([0.0, 1.0, 1e6]), st.floats(-200 if rule == "about" else 0, 400)))
    scale = draw(st.one_of(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), st.floats(-20, 20)))
    return Case(
        rule=rule,
        p=(p / p.sum()).float().tolist(),
        z=draw(st.lists(values, min_size=count, max_size=count)),
        ends=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        scale=max(0.1 * abs(target), 0.5) if rule == "about" else scale,
        gamma=draw(st.floats(0.5, 0.9998)),
        target=target,
        value_min=draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])),
        active=draw(st.sampled_from([True, True, True, False])),
        shift=draw(st.floats(-2, 2)),
        spread=draw(st.floats(0.5, 2)),
    )


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(rows())
@example(Case("value_bias", [1.0], [3.0], [False], -2.0))
@example(Case("eq", [0.5, 0.5], [1.0, 1.0], [False, False]))
@example(Case("eq", [0.6, 0.4], [1.0, 1.0], [True, True], target=0.0))
@example(Case("about", [0.6, 0.4], [1.0, 1.0], [True, True], 4.0, target=40.0))
@example(Case("about", [0.9, 0.1], [3.0, 1.0], [False, True], 4.0, target=-30.0))
@example(Case("eq_soft", [0.9, 0.1], [-1.0, 5.0], [True, False], target=1e6))
@example(Case("mul", [0.999999, 1e-6], [5.0, 5.001], [False, False], 0.5))
def test_the_reference_is_the_definition(case: Case) -> None:
    assert distance(case, compute(length_tilt_reference, [case], torch.device("cpu"))[0]) < 2e-6


def distance(case: Case, found: list[float]) -> float:
    """How far a row is from its definition, as a fraction of its distribution, or of the mean value that is asked for.

    Where two values are all but equal the mean settles little of how they share, so that only the mean is compared.
    """
    wanted = expected(case, assume)
    off = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    if case.rule in SOLVED and off > 2e-6:
        v = [0.0 if end else 1 / (1 + math.exp(-min(max(raw, -BOUND), BOUND))) for raw, end in zip(case.z, case.ends, strict=True)]
        off = abs(math.fsum((a - b) * value for a, b, value in zip(found, wanted, v, strict=True)))
    return off


@pytest.mark.slow
@settings(max_examples=max(1, settings().max_examples // 33), deadline=None, phases=[Phase.generate])
@given(cases=st.lists(rows(), min_size=24, max_size=24))
def test_the_kernel_is_the_reference(device: torch.device, cases: list[Case]) -> None:
    kernel, reference = (compute(some, cases, device) for some in (length_tilt_triton, length_tilt_reference))
    for case, row, wanted in zip(cases, kernel, reference, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5), case


def test_the_kernel_tells_a_target_next_to_nothing_from_nothing(device: torch.device) -> None:
    """Where several candidates end the text, a target of 0 takes the first, any other shares among them."""
    cases = [
        Case("eq_soft", [0.5, 0.3, 0.2], [1.0, 1.0, 0.5], [True, True, False], target=target) for target in (0.0, 1e-240, 1e-9)
    ]
    first, *shared = compute(length_tilt_triton, cases, device)
    assert first == [1.0, 0.0, 0.0]
    for row in shared:
        assert row == pytest.approx([0.625, 0.375, 0.0], abs=1e-5)


def test_what_is_decided_without_the_model() -> None:
    found = Candidates(
        ids=torch.zeros(4, 2, dtype=torch.int64),
        probabilities=torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.99, 0.01], [0.99, 0.01]]),
        counts=torch.tensor([1, 2, 2, 2]),
    )
    assert needs_value(found, torch.tensor([0.0, 0.69, 0.06, 0.05])).tolist() == [False, True, False, True]


def test_bad_tensors_are_refused(device: torch.device) -> None:
    p = torch.full((2, 4), 0.25, device=device)
    flags, column = p > 1, torch.zeros(2, dtype=torch.float64, device=device)
    tilts = Tilts(torch.zeros(2, dtype=torch.int64, device=device), column, column - 1, column, column, column, column + 1)
    with pytest.raises(ValueError, match="room for 3 candidates"):
        length_tilt_triton(p[:, :3].contiguous(), p, flags, flags[:, 0], tilts)
    with pytest.raises(ValueError, match=r"target is torch\.float32"):
        length_tilt_triton(p, p, flags, flags[:, 0].contiguous(), tilts._replace(target=column.float()))
