"""One token a row, of the vocabulary or of candidates, drawn with noise that is a pure function of the row's key and the token id.

The draw is the Gumbel-max trick: the largest ``scaled logit + gumbel``. A key is the state of a SplitMix64 stream (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators"); token id t takes its t-th output. It is made of 64-bit integer
operations that wrap, and two logarithms: a program can compute it for any part of the vocabulary, and none of it goes through
memory. The kernel's logarithms may differ from PyTorch's in the last bit: only tokens whose sums are that near could change places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.keep_thresholds import scale
from yardstick_llm.kernels.row_argmax import row_argmax
from yardstick_llm.kernels.row_chunks import row_chunks
from yardstick_llm.kernels.runtime import expect, expect_device, jit, launches, power_of_two, tl

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment and its two multipliers
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
SMALLEST_UNIFORM = 2.0**-63
LARGEST_UNIFORM = 1 - 2.0**-24

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST_UNIFORM), tl.constexpr(LARGEST_UNIFORM)

BLOCK = 1024
"""Tokens of a row that a program takes: at V = 151936 a single row is spread over 149 programs, and few of them have one of the
tokens that a filter keeps."""


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of each key's draw for token ids, [rows, ids] float32.

    keys: [rows] int64, the bits of the unsigned keys; ids: [ids] int64 for all rows alike, or [rows, ids].
    """
    z = (ids + 1) * _signed(GOLDEN) + keys.unsqueeze(1)
    for bits, factor in ((30, MIX_1), (27, MIX_2)):
        z ^= _shift_right(z, bits)
        z *= _signed(factor)
    z ^= _shift_right(z, 31)
    uniform = _shift_right(z, 1).float().mul_(2.0**-63)
    # -log1p(-u) is exact for small exponentials, which win the draw. Both bounds keep the result finite.
    exponential = uniform.clamp_(SMALLEST_UNIFORM, LARGEST_UNIFORM).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's is arithmetic."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)


def seeded_draw(logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None) -> Tensor:
    """The token of each row: [rows] int64. Of a row of temperature 0 the largest logit's, the lowest id among equals.

    logits: [rows, vocab] float32; the others [rows]: temperatures float32; keys int64, as :func:`gumbel` takes them; thresholds
    float32, the least scaled logit that may be drawn, as :func:`kernels.keep_thresholds.keep_thresholds` returns them, or None:
    any may. Where no token is possible, some valid id comes back.
    """
    operation = seeded_draw_triton if launches(logits) else seeded_draw_reference
    return operation(logits, temperatures, keys, thresholds)


def seeded_draw_reference(logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None) -> Tensor:
    """:func:`seeded_draw` in plain PyTorch, for a CPU: no noise is made for rows of temperature 0."""
    drawn = temperatures.nonzero().squeeze(1)
    if len(drawn) < len(logits):
        kept = None if thresholds is None else thresholds[drawn]
        some = seeded_draw_reference(logits[drawn], temperatures[drawn], keys[drawn], kept)
        return row_argmax(logits).index_copy_(0, drawn, some)
    vocab = logits.shape[-1]
    ids, places = torch.arange(vocab, device=logits.device), torch.arange(len(logits), device=logits.device)
    out = torch.empty_like(keys)
    for part, rows in zip(row_chunks(logits), row_chunks(places, vocab), strict=True):
        scaled = scale(part, temperatures[rows])
        if thresholds is not None:
            scaled.masked_fill_(scaled < thresholds[rows].unsqueeze(1), float("-inf"))
        out[rows] = row_argmax(scaled.add_(gumbel(keys[rows], ids)))
    return out


def seeded_draw_triton(logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None) -> Tensor:
    """:func:`seeded_draw` on a GPU. All contiguous. Raises ValueError for other shapes, dtypes or devices."""
    expect_device("logits", logits)
    rows, vocab = logits.shape
    expect("logits", logits, logits, (rows, vocab), (torch.float32,))
    expect("temperatures", temperatures, logits, (rows,), (torch.float32,))
    expect("keys", keys, logits, (rows,), (torch.int64,))
    if thresholds is not None:
        expect("thresholds", thresholds, logits, (rows,), (torch.float32,))
    block = min(power_of_two(vocab), BLOCK)
    splits = -(-vocab // block)
    best = logits.new_empty((rows, splits))
    tokens = keys.new_empty((rows, splits))
    # The peak is that of the whole row, so a split rounds its scaled logits like the reference.
    peaks = logits.amax(-1)
    _best_of_split[(rows, splits)](logits, peaks, temperatures, keys, thresholds, best, tokens, vocab, splits, block, num_warps=4)
    return tokens.gather(1, best.argmax(-1, keepdim=True)).squeeze(1)


def seeded_choice(p: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """The place of the candidate that is drawn in each row, [rows, 1] int64, with the noise of :func:`seeded_draw`.

    p: [rows, width] float32 probabilities, width a power of two; ids: [rows, width] int64, the candidates' tokens; keys: [rows]
    int64.
    """
    operation = seeded_choice_triton if launches(p) else seeded_choice_reference
    return operation(p, ids, keys)


def seeded_choice_reference(p: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """:func:`seeded_choice` in plain PyTorch."""
    return (p.log() + gumbel(keys, ids)).argmax(-1, keepdim=True)


def seeded_choice_triton(p: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """:func:`seeded_choice` on a GPU, a program a row. All contiguous. Raises ValueError for other shapes, dtypes or devices."""
    expect_device("p", p)
    rows, width = p.shape
    expect("p", p, p, (rows, power_of_two(width)), (torch.float32,))
    expect("ids", ids, p, (rows, width), (torch.int64,))
    expect("keys", keys, p, (rows,), (torch.int64,))
    chosen = keys.new_empty((rows, 1))
    if rows:
        _choice[(rows,)](p, ids, keys, chosen, width, num_warps=1)
    return chosen


@jit("keys")
def _choice(p: tl.tensor, ids: tl.tensor, keys: tl.tensor, chosen: tl.tensor, WIDTH: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    cell = row * WIDTH + tl.arange(0, WIDTH)
    weight = tl.load(p + cell)
    score = tl.where(weight > 0, tl.log(tl.maximum(weight, 1e-45)), float("-inf")) + _gumbel(
        tl.load(keys + row), tl.load(ids + cell)
    )
    _, place = tl.max(score, axis=0, return_indices=True)
    tl.store(chosen + row, place.to(tl.int64))


@jit("temperatures", "keys", "thresholds")
def _best_of_split(
    logits: tl.tensor,
    peaks: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    thresholds: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The largest sum over BLOCK tokens of a row, and its token; the lowest among equals, and what is not a number is largest."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        scaled = tl.div_rn(score - tl.load(peaks + row), temperature)
        threshold = float("-inf")
        if thresholds is not None:
            threshold = tl.load(thresholds + row)
        score = scaled
        if tl.max((scaled >= threshold).to(tl.int32), axis=0) > 0:  # noise takes most of the time
            score = scaled + _gumbel(tl.load(keys + row), ids)
        score = tl.where(scaled < threshold, float("-inf"), score)
    score = tl.where(score == score, score, float("inf"))
    score = tl.where(ids < VOCAB, score, float("-inf"))
    largest, place = tl.max(score, axis=0, return_indices=True)
    tl.store(best + row * SPLITS + split, largest)
    tl.store(tokens + row * SPLITS + split, (split * BLOCK + place).to(tl.int64))


@jit()
def _gumbel(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """:func:`gumbel` for one key."""
    z = (ids + 1).to(tl.uint64) * _GOLDEN + key.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    uniform = (z >> 1).to(tl.int64).to(tl.float32) * _SMALLEST
    uniform = tl.minimum(tl.maximum(uniform, _SMALLEST), _LARGEST)
    # log1p with the rounding error of w = 1 - u corrected: log(w) · u / (1 - w) (Kahan; Higham 2002, section 1.14.1).
    rest = 1.0 - uniform
    lost = rest == 1.0
    exponential = tl.where(lost, uniform, -tl.log(rest) * tl.div_rn(uniform, tl.where(lost, 1.0, 1.0 - rest)))
    return -tl.log(exponential)
