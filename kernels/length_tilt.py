"""Tilts the probabilities of the candidates of guided draws by the length model's values.

Definitions as in "Length Value Model", arXiv 2604.27039, and its public code. With p a row's probabilities, z the length model's
output for each candidate and v = sigmoid(z), which is 0 for an end of sequence; m, M and E the least, largest and mean v:

================  ==========================================================================================
``centered_exp``  p' ∝ p · exp(s · v)
``value_bias``    p' ∝ p · exp(s · z)
``mul``           p' has the mean s · E; left alone where s ≤ 0
``linear``        p' has the mean E + (s − 1)(M − E), below s = 1 E − (1 − s)(E − m)
``exp``           p' has the mean m + n · (M − m), n = 1 − (1 − (E − m) / (M − m))^s, s at least 0
``length_mul``    p' has the mean 1 − (1 − E)^s: s times the length that belongs to E
``eq``            the candidate whose length is nearest to the target; of equals the more probable
``ge``            the largest v; once the target is 0, the least
``le``            the least v
``within``        p without candidates of v above 1 − γ^target; the least v if all are
``about``         p' ∝ p · P(target − s ≤ n ≤ target + s)^w, n the tokens that come after a candidate: the base model's text,
                  given that it ends near the target. n is 0 for an end of sequence; otherwise ln n is normal, with the mean
                  ln(length of v) + shift and the standard deviation ``spread``. w is :data:`WEIGHT`; where the target is passed
                  by more than s, it grows by (−target − s) / s, and n is at most 1
``eq_soft``       p' has the mean 1 − γ^target; where that is beyond m or M, that candidate
================  ==========================================================================================

The length that belongs to v is ln(1 − v) / ln γ = −softplus(z) / ln γ. A mean is reached by p' ∝ p · exp(λ · (v − m)); it is kept
away from m and M by a millionth of their distance. Rows whose values lie within 1e-8, or whose mean is that near to what is
wanted, are left alone. λ is found by Newton's method on the logit of the mean, which is nearly linear in λ (exactly, for two
candidates), within a bracket. Where candidates lie close together at one end of the values, the logit has steps of very different
widths, and Newton's method leaves the bracket; then the bracket is divided at its geometric mean. Everything is computed in
float64: a row has few candidates, and 1 − v needs the digits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from yardstick_llm.kernels.candidates import Candidates
from yardstick_llm.kernels.largest import MOST
from yardstick_llm.kernels.runtime import expect, expect_device, jit, launches, power_of_two, tl

RULES = ("centered_exp", "value_bias", "mul", "linear", "exp", "length_mul", "eq", "ge", "le", "within", "about", "eq_soft")

SMALLEST_VALUE = 1e-9
LARGEST_LOGIT = -math.log(SMALLEST_VALUE)
"""Values are kept between 1e-9 and 1 − 1e-9 where a length or z itself is computed of them; also of an end of sequence, for z."""
FLAT = 1e-8
"""Values, or means, this near to each other are the same."""
MARGIN, LEAST_MARGIN = 1e-6, 1e-12
STEPS = 40
"""Most steps towards λ; nearly all rows take less than ten."""
ENOUGH = 1e-12
"""Error of the logit of the mean with which a step is the last."""

WEIGHT = 1.5
"""Power of the window's probability in ``about``. With 1 and exact estimates, ``about`` would draw texts as the base model writes
them when they have this length. Real estimates are less sharp. A larger power brings texts nearer to the target and costs some
likelihood; 1.5 was chosen by the validation prompts of docs/length.md."""
SHORTEST = 1e-12
"""In place of a length, and of a probability, of 0 where its logarithm is taken."""
ERFC = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223)
"""Coefficients of the polynomial in :func:`_log_tail`, the highest power first."""

_CENTERED_EXP, _VALUE_BIAS, _MUL, _LINEAR, _EXP, _LENGTH_MUL = (tl.constexpr(i) for i in range(6))
_EQ, _GE, _LE, _WITHIN, _ABOUT, _EQ_SOFT = (tl.constexpr(i) for i in range(6, len(RULES)))
_LARGEST_LOGIT, _FLAT = tl.constexpr(LARGEST_LOGIT), tl.constexpr(FLAT)
_MARGIN, _LEAST_MARGIN = tl.constexpr(MARGIN), tl.constexpr(LEAST_MARGIN)
_SHORTEST, _WEIGHT = tl.constexpr(SHORTEST), tl.constexpr(WEIGHT)
_E9, _E8, _E7, _E6, _E5, _E4, _E3, _E2, _E1, _E0 = (tl.constexpr(factor) for factor in ERFC)
_STEPS, _ENOUGH = tl.constexpr(STEPS), tl.constexpr(ENOUGH)


class Tilts(NamedTuple):
    """Guidance parameters of each row, [rows] each."""

    rule: Tensor
    """int64, its place in :data:`RULES`."""
    scale: Tensor
    """float64, s: for ``about`` half the width of the window in tokens, above 0."""
    log_gamma: Tensor
    """float64, ln γ, below 0"""
    target: Tensor
    """float64: for a constraint, the tokens that are to come after this draw, the end of sequence counted; at least 0, but for
    ``about``."""
    value_min: Tensor
    """float64: rows with a mean value below it are left alone."""
    shift: Tensor
    """float64: of the logarithm of real lengths from that of the length of v."""
    spread: Tensor
    """float64, above 0: standard deviation of the logarithm of real lengths."""


def needs_value(found: Candidates, entropy_thresholds: Tensor) -> Tensor:
    """Rows that are not decided without the length model: more than one candidate, and their entropy, in nats, not below the
    row's threshold (float32). -> [rows] bool"""
    # torch.special.entr would compile its kernel when it is first called on a GPU.
    entropy = -torch.xlogy(found.probabilities, found.probabilities).sum(-1)
    undecided: Tensor = (found.counts > 1) & (entropy >= entropy_thresholds)
    return undecided


def length_tilt(p: Tensor, z: Tensor, ends: Tensor, active: Tensor, tilts: Tilts) -> Tensor:
    """The new probabilities of every row's candidates, [rows, width] float32; those of 0 stay 0.

    p: [rows, width] float32, falling, with the sum 1 and 0 beyond the candidates, width a power of two from 2 to 64; z: [rows,
    width] float32, read where p is above 0; ends: [rows, width] bool, the ends of sequence; active: [rows] bool: other rows are
    left alone.
    """
    operation = length_tilt_triton if launches(p, z) else length_tilt_reference
    return operation(p, z, ends, active, tilts)


def length_tilt_reference(p: Tensor, z: Tensor, ends: Tensor, active: Tensor, tilts: Tilts) -> Tensor:
    """:func:`length_tilt` in plain PyTorch, for a CPU: it looks at values."""
    _, scale, log_gamma, target, value_min, shift, spread = (column.unsqueeze(1) for column in tilts)
    rule = tilts.rule.unsqueeze(1)
    there = p > 0
    prior, z = p.double(), z.double().masked_fill(~there, 0.0)
    z = z.clamp(-LARGEST_LOGIT, LARGEST_LOGIT).masked_fill(ends, -LARGEST_LOGIT)
    v = z.sigmoid().masked_fill(ends, 0.0)
    least = v.masked_fill(~there, math.inf).amin(-1, keepdim=True)
    most = v.masked_fill(~there, -math.inf).amax(-1, keepdim=True)
    span, mean = most - least, (prior * v).sum(-1, keepdim=True)
    lengths = (-softplus(z) / log_gamma).masked_fill(ends, 0.0)
    wanted = _wanted_mean(rule, scale, log_gamma, target, least, most, mean)

    solved = (rule >= RULES.index("mul")) & (rule <= RULES.index("length_mul")) | (rule == RULES.index("eq_soft"))
    slope = scale * torch.where(rule == RULES.index("value_bias"), z, v)
    room = span.clamp(min=FLAT)
    margin = torch.maximum(LEAST_MARGIN / room, torch.full_like(room, MARGIN))
    goal = ((wanted - least) / room).clamp(margin, 1 - margin)
    at = solved.squeeze(1).nonzero().squeeze(1)
    if len(at):
        slope[at] = _solve(prior[at], ((v - least) / room)[at], goal[at])
    within, aim = rule == RULES.index("within"), -torch.expm1(target * log_gamma)
    slope = torch.where(within, torch.where(v > aim, -math.inf, 0.0), slope)
    about = rule == RULES.index("about")
    if about.any():
        slope = torch.where(about, _near(lengths, ends, target, scale, shift, spread), slope)
        nowhere = (slope.masked_fill(~there, -math.inf) == -math.inf).all(-1, keepdim=True)
        slope = slope.masked_fill(about & nowhere, 0.0)
    shortest = within & (least > aim)
    tilted = (prior.log() + slope.masked_fill(shortest, 0.0)).softmax(-1)

    distance = (lengths - target.clamp(max=LARGEST_LOGIT / -log_gamma)).abs()
    shortest |= (rule == RULES.index("le")) | (rule == RULES.index("ge")) & (target <= 0)
    longest = (rule == RULES.index("ge")) & (target > 0)
    soft = rule == RULES.index("eq_soft")
    shortest, longest = shortest | soft & (wanted <= least), longest | soft & (wanted >= most)
    cost = torch.where(shortest, v, torch.where(longest, -v, distance)).masked_fill(~there, math.inf)
    chosen = torch.zeros_like(prior).scatter_(1, cost.argmin(-1, keepdim=True), 1.0)  # the first of equal minima
    result = torch.where((rule == RULES.index("eq")) | shortest | longest, chosen, tilted)

    flat = solved & ((span < FLAT) | ((least + goal * span - mean).abs() < FLAT)) | (rule == RULES.index("mul")) & (scale <= 0)
    alone = ~active.unsqueeze(1) | (mean < value_min) | flat
    return torch.where(alone, p, result.float())


def _wanted_mean(
    rule: Tensor, scale: Tensor, log_gamma: Tensor, target: Tensor, least: Tensor, most: Tensor, mean: Tensor
) -> Tensor:
    """Target of the mean value, for the rules that have one, [rows, 1]."""
    share = (mean - least) / (most - least).clamp(min=FLAT)
    wanted = scale * mean
    linear = mean + (scale - 1) * torch.where(scale >= 1, most - mean, mean - least)
    wanted = torch.where(rule == RULES.index("linear"), linear, wanted)
    exp = least + (1 - (1 - share).clamp(min=0) ** scale.clamp(min=0)) * (most - least)
    wanted = torch.where(rule == RULES.index("exp"), exp, wanted)
    wanted = torch.where(rule == RULES.index("length_mul"), 1 - (1 - mean) ** scale, wanted)
    return torch.where(rule == RULES.index("eq_soft"), -torch.expm1(target * log_gamma), wanted)


def _near(lengths: Tensor, ends: Tensor, target: Tensor, half: Tensor, shift: Tensor, spread: Tensor) -> Tensor:
    """Return what ``about`` adds to the logarithm of each candidate's probability. The window reaches from 0.5 tokens below its
    first number of tokens to 0.5 above its last one."""
    passed = target + half < 1
    low, high = torch.where(passed, 0.0, target - half), torch.where(passed, 1.0, target + half)
    middle = lengths.clamp(min=SHORTEST).log() + shift
    begin, end = (((bound.clamp(min=SHORTEST)).log() - middle) / spread for bound in (low - 0.5, high + 0.5))
    above = begin + end >= 0  # the side on which both tails are small
    larger = _log_tail(torch.where(above, begin, -end))
    smaller = _log_tail(torch.where(above, end, -begin))
    inside = larger + (-torch.expm1(smaller - larger)).clamp(min=SHORTEST).log()
    inside = torch.where(ends, torch.where(low <= 0, 0.0, -math.inf), inside)
    return inside * (WEIGHT + (-target - half).clamp(min=0) / half)


def _log_tail(x: Tensor) -> Tensor:
    """Logarithm of the probability that a standard normal variable is above x.

    Source: the approximation of erfc in Press et al., "Numerical Recipes", section 6.2, with a relative error below 1.2e-7.
    """
    size = x.abs() / math.sqrt(2)
    t = 1 / (1 + size / 2)
    series = torch.zeros_like(t)
    for factor in ERFC:
        series = series * t + factor
    tail = t.log() - size * size + series - math.log(2)
    return torch.where(x >= 0, tail, torch.log1p(-tail.exp()))


def _solve(p: Tensor, u: Tensor, goal: Tensor) -> Tensor:
    """λ · u plus a constant, such that the mean of u under p · exp(λ · u) is ``goal``, in (0, 1). u: in [0, 1] where p is above 0.
    -> like p

    It is -size · distance, with the distance from the end that becomes more probable, so that nothing cancels.
    """
    u = u.masked_fill(p == 0, 0.0)
    sign = torch.where((p * u).sum(-1, keepdim=True) < goal, 1.0, -1.0)
    distance = torch.where(sign > 0, 1 - u, u)
    goal = goal.logit()
    size, near, far = torch.zeros_like(goal), torch.zeros_like(goal), torch.full_like(goal, math.inf)
    for _ in range(STEPS):
        weights = (p.log() - size * distance).softmax(-1)
        mean, rest = (weights * u).sum(-1, keepdim=True), (weights * (1 - u)).sum(-1, keepdim=True)
        variance = (weights * (u - mean) ** 2).sum(-1, keepdim=True)
        error = sign * (mean.log() - rest.log() - goal)  # below 0 where the size is too small
        near, far = torch.where(error < 0, size, near), torch.where(error > 0, size, far)
        guess = size - error * mean * rest / variance
        apart = near.clamp(min=1)
        middle = torch.where(far > 4 * apart, apart.sqrt() * far.sqrt(), (near + far) / 2)
        middle = torch.where(far.isinf(), 2 * size + 1, middle)
        better = torch.where((guess > near) & (guess < far), guess, middle)
        size = torch.where(error.abs() < ENOUGH, size, better)
    return -size * distance


def length_tilt_triton(p: Tensor, z: Tensor, ends: Tensor, active: Tensor, tilts: Tilts) -> Tensor:
    """:func:`length_tilt` on a GPU, a program a row. All contiguous. Raises ValueError for other shapes, dtypes or devices."""
    expect_device("p", p)
    rows, width = p.shape
    if not 2 <= width <= MOST or width != power_of_two(width):
        raise ValueError(f"there is room for {width} candidates, where a power of two from 2 to {MOST} is expected")
    expect("p", p, p, (rows, width), (torch.float32,))
    expect("z", z, p, (rows, width), (torch.float32,))
    expect("ends", ends, p, (rows, width), (torch.bool,))
    expect("active", active, p, (rows,), (torch.bool,))
    for name, column in tilts._asdict().items():
        expect(name, column, p, (rows,), (torch.int64 if name == "rule" else torch.float64,))
    out = torch.empty_like(p)
    _length_tilt[(rows,)](p, z, ends, active, *tilts, out, width, num_warps=1)
    return out


@jit("rules", "scales", "log_gammas", "targets", "value_mins", "shifts", "spreads")
def _length_tilt(
    p: tl.tensor,
    z: tl.tensor,
    ends: tl.tensor,
    active: tl.tensor,
    rules: tl.tensor,
    scales: tl.tensor,
    log_gammas: tl.tensor,
    targets: tl.tensor,
    value_mins: tl.tensor,
    shifts: tl.tensor,
    spreads: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = row * WIDTH + tl.arange(0, WIDTH)
    given = tl.load(p + place)
    if tl.load(active + row):
        prior, there, end = given.to(tl.float64), given > 0, tl.load(ends + place)
        rule, scale = tl.load(rules + row), tl.load(scales + row)
        log_gamma, target = tl.load(log_gammas + row), tl.load(targets + row)
        raw = tl.where(there, tl.load(z + place).to(tl.float64), 0.0)
        raw = tl.where(end, -_LARGEST_LOGIT, tl.minimum(tl.maximum(raw, -_LARGEST_LOGIT), _LARGEST_LOGIT))
        v = tl.where(end, 0.0, 1.0 / (1.0 + tl.exp(-raw)))
        least = tl.min(tl.where(there, v, 2.0), axis=0)
        most = tl.max(tl.where(there, v, -1.0), axis=0)
        span, mean = most - least, tl.sum(prior * v, axis=0)
        room = tl.maximum(span, _FLAT)

        wanted = scale * mean
        gap = tl.where(scale >= 1, most - mean, mean - least)
        wanted = tl.where(rule == _LINEAR, mean + (scale - 1) * gap, wanted)
        wanted = tl.where(rule == _EXP, least + (1 - _power(1 - (mean - least) / room, tl.maximum(scale, 0.0))) * span, wanted)
        wanted = tl.where(rule == _LENGTH_MUL, 1 - _power(1 - mean, scale), wanted)
        aim = _one_less_exp(target * log_gamma)
        wanted = tl.where(rule == _EQ_SOFT, aim, wanted)

        # softplus without overflow: z is at most 21
        lengths = tl.where(end, 0.0, -tl.log(1.0 + tl.exp(raw)) / log_gamma)
        solved = ((rule >= _MUL) & (rule <= _LENGTH_MUL)) | (rule == _EQ_SOFT)
        slope = scale * tl.where(rule == _VALUE_BIAS, raw, v)
        margin = tl.maximum(1.0 / room * _LEAST_MARGIN, _MARGIN)
        goal = tl.minimum(tl.maximum((wanted - least) / room, margin), 1 - margin)
        if rule == _WITHIN:
            slope = tl.where(v > aim, float("-inf"), tl.zeros([WIDTH], tl.float64))
        if solved:
            slope = _solved(prior, tl.where(there, (v - least) / room, 0.0), goal)
        if rule == _ABOUT:
            slope = _near_of(lengths, end, target, scale, tl.load(shifts + row), tl.load(spreads + row))
            some = tl.max(tl.where(there, slope, float("-inf")), axis=0) > float("-inf")
            slope = tl.where(some, slope, 0.0)
        none = (rule == _WITHIN) & (least > aim)
        result = _softmax(prior, tl.where(none, 0.0, slope))

        shortest = none | (rule == _LE) | ((rule == _GE) & (target <= 0)) | ((rule == _EQ_SOFT) & (wanted <= least))
        longest = ((rule == _GE) & (target > 0)) | ((rule == _EQ_SOFT) & (wanted >= most))
        distance = tl.abs(lengths - tl.minimum(target, -1.0 / log_gamma * _LARGEST_LOGIT))
        cost = tl.where(there, tl.where(shortest, v, tl.where(longest, -v, distance)), float("inf"))
        if (rule == _EQ) | shortest | longest:
            _, best = tl.min(cost, axis=0, return_indices=True)
            result = tl.where(tl.arange(0, WIDTH) == best, 1.0, tl.zeros([WIDTH], tl.float64))

        flat = (solved & ((span < _FLAT) | (tl.abs(least + goal * span - mean) < _FLAT))) | ((rule == _MUL) & (scale <= 0))
        alone = flat | (mean < tl.load(value_mins + row))
        given = tl.where(alone, given, result.to(tl.float32))
    tl.store(out + place, given)


@jit()
def _power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """base ** exponent for a base of at least 0."""
    power = tl.exp(exponent * tl.log(tl.maximum(base, 1e-300)))
    return tl.where(base > 0, power, tl.where(exponent == 0, 1.0, 0.0))


@jit()
def _one_less_exp(x: tl.tensor) -> tl.tensor:
    """1 - exp(x), above 0 for every x below it."""
    return tl.where(tl.abs(x) < 1e-5, -x - x * x / 2, 1 - tl.exp(x))


@jit()
def _near_of(
    lengths: tl.tensor, end: tl.tensor, target: tl.tensor, half: tl.tensor, shift: tl.tensor, spread: tl.tensor
) -> tl.tensor:
    """:func:`_near` for one row."""
    passed = target + half < 1
    low, high = tl.where(passed, 0.0, target - half), tl.where(passed, 1.0, target + half)
    middle = tl.log(tl.maximum(lengths, _SHORTEST)) + shift
    begin = (tl.log(tl.maximum(low - 0.5, _SHORTEST)) - middle) / spread
    after = (tl.log(tl.maximum(high + 0.5, _SHORTEST)) - middle) / spread
    above = begin + after >= 0
    larger = _log_tail_of(tl.where(above, begin, -after))
    smaller = _log_tail_of(tl.where(above, after, -begin))
    inside = larger + tl.log(tl.maximum(_one_less_exp(smaller - larger), _SHORTEST))
    inside = tl.where(end, tl.where(low <= 0, 0.0, float("-inf")), inside)
    return inside * (_WEIGHT + tl.maximum(-target - half, 0.0) / half)


@jit()
def _log_tail_of(x: tl.tensor) -> tl.tensor:
    """:func:`_log_tail`"""
    size = tl.abs(x) * 0.7071067811865476
    t = 1 / (1 + size / 2)
    series = ((((_E9 * t + _E8) * t + _E7) * t + _E6) * t + _E5) * t + _E4
    series = (((series * t + _E3) * t + _E2) * t + _E1) * t + _E0
    tail = tl.log(t) - size * size + series - 0.6931471805599453
    return tl.where(x >= 0, tail, tl.log(_one_less_exp(tail)))


@jit()
def _softmax(p: tl.tensor, slope: tl.tensor) -> tl.tensor:
    """p · exp(slope), normalised; 0 stays 0."""
    score = tl.where(p > 0, tl.log(tl.maximum(p, 1e-300)) + slope, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    return weight / tl.sum(weight, axis=0)


@jit()
def _solved(p: tl.tensor, u: tl.tensor, goal: tl.tensor) -> tl.tensor:
    """:func:`_solve` for one row."""
    sign = tl.where(tl.sum(p * u, axis=0) < goal, 1.0, -1.0).to(tl.float64)
    distance = tl.where(sign > 0, 1 - u, u)
    goal = tl.log(goal) - tl.log(1 - goal)
    size = goal * 0.0
    near, far, error = size, size + 1e300, size + 1.0
    step = 0
    while (step < _STEPS) & (tl.abs(error) >= _ENOUGH):
        weight = _softmax(p, -size * distance)
        mean, rest = tl.sum(weight * u, axis=0), tl.sum(weight * (1 - u), axis=0)
        variance = tl.sum(weight * (u - mean) * (u - mean), axis=0)
        error = sign * (tl.log(tl.maximum(mean, 1e-300)) - tl.log(tl.maximum(rest, 1e-300)) - goal)
        near, far = tl.where(error < 0, size, near), tl.where(error > 0, size, far)
        # Without variance the guess is the size itself, which is an end of the bracket.
        guess = size - error * mean * rest / tl.maximum(variance, 1e-300)
        apart = tl.maximum(near, 1.0)
        middle = tl.where(far > 4 * apart, tl.sqrt(apart) * tl.sqrt(far), (near + far) / 2)
        middle = tl.where(far == 1e300, 2 * size + 1, middle)
        better = tl.where((guess > near) & (guess < far), guess, middle)
        size = tl.where(tl.abs(error) < _ENOUGH, size, better)
        step += 1
    return -size * distance
