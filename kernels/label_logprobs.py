"""Log-probabilities of a few labels a row, over the whole vocabulary, without ever holding [rows, vocab] of them.

On a GPU a fused kernel takes tiles of logits through the tensor cores and keeps a running log-sum-exp a row, over splits of the
vocabulary; a second, tiny one joins the splits and subtracts them from the labels' own logits. The alternative was cuBLAS in
chunks and a kernel over its results. For R rows, V = 151936 and H = 1024 in bfloat16 the products are 2·R·V·H floating-point
operations and the head is 2·V·H = 311 MB: R operations a byte. At 790 TFLOP/s and 4.3 TB/s (one H200) the head's 72 µs are the
limit up to about 180 rows, and the products' 0.39 µs a row beyond: R = 1000 cannot take less than 0.39 ms. cuBLAS would come
nearer to that limit than Triton does, but its logits go through memory: in float32 1.2 GB written and read again, 0.28 ms; in
bfloat16 half, but a logit near 20 is then off by up to 0.06, and so is the score of a label that dominates its row. So neither
wins by much, both are far below 1 % of the step that computed the rows, and the fused kernel is exact and needs no memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from yardstick_llm.kernels.linear import Weight, linear
from yardstick_llm.kernels.row_chunks import CHUNK_ELEMENTS, row_chunks
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, power_of_two, tl
from yardstick_llm.kernels.soft_cap import NO_CAP, capped, soft_cap

WAVES = 4
"""Programs for each multiprocessor, so that the last ones to end leave little of the GPU idle."""


def label_logprobs(hidden: Tensor, head: Weight, labels: Tensor, cap: float = NO_CAP) -> Tensor:
    """``log_softmax(hidden · headᵀ)`` at each row's own labels.

    hidden: [rows, size]; head: [vocab, size]; labels: [rows, labels] int64, below vocab. -> [rows, labels], float32, as is the
    sum over the vocabulary whatever the dtype of the product. cap: soft cap of the logits (:mod:`kernels.soft_cap`).
    """
    if not isinstance(head, Tensor) or not launches(hidden, head):
        return label_logprobs_reference(hidden, head, labels, cap)
    return label_logprobs_triton(hidden, head, labels, cap)


def label_logprobs_reference(hidden: Tensor, head: Weight, labels: Tensor, cap: float = NO_CAP) -> Tensor:
    """:func:`label_logprobs` in plain PyTorch, a chunk of the rows at a time."""
    rows = max(1, CHUNK_ELEMENTS // len(head))
    out = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = soft_cap(linear(hidden[part], head).float(), cap)
        # A few rows at a time: the exponentials of all would not fit the caches.
        logsumexp = torch.cat([some.logsumexp(1, keepdim=True) for some in row_chunks(logits)])
        out[part] = logits.gather(1, labels[part]) - logsumexp
    return out


def label_logprobs_triton(hidden: Tensor, head: Tensor, labels: Tensor, cap: float = NO_CAP) -> Tensor:
    """:func:`label_logprobs` on a GPU, the logits in float32. All contiguous; hidden and head of one dtype.

    Raises ValueError for other shapes, dtypes, devices or layouts. Labels are not checked: that would wait for the GPU.
    """
    expect_device("hidden", hidden)
    rows, size = len(hidden), hidden.shape[-1]
    expect("hidden", hidden, hidden, (rows, size), FLOATS)
    expect("head", head, hidden, (len(head), size), (hidden.dtype,))
    expect("labels", labels, hidden, (rows, labels.shape[-1]), (torch.int64,))
    tiles = tiles_for(rows, hidden.dtype)
    row_blocks, splits, vocab_tiles = schedule(rows, len(head), tiles, multiprocessors(hidden.device))
    partial = torch.empty((rows, splits), dtype=torch.float32, device=hidden.device)
    _partial_logsumexp[(row_blocks, splits)](
        hidden, head, partial, rows, len(head), size, splits, vocab_tiles, cap, tiles.rows, tiles.vocab, tiles.size, cap != NO_CAP,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    out = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    _gather[(rows, labels.shape[1])](
        hidden, head, labels, partial, out, labels.shape[1], splits, cap, size,
        power_of_two(most_splits(len(head), hidden.device)), min(power_of_two(size), 1024), cap != NO_CAP,
    )  # fmt: skip
    return out


SMALLEST_VOCAB_TILE = 64
"""The least :attr:`Tiles.vocab`."""


class Tiles(NamedTuple):
    """Block sizes of a program's product of [rows, size] by [vocab, size]."""

    rows: int
    vocab: int
    size: int
    warps: int
    stages: int


ROW_TILES = 16, 64
"""Numbers of rows up to which :func:`tiles_for` takes smaller blocks."""


def tiles_for(rows: int, dtype: torch.dtype) -> Tiles:
    """The accumulator and the stages of both operands fit a Hopper multiprocessor's registers and shared memory."""
    if dtype == torch.float32:
        return Tiles(16 if rows <= ROW_TILES[0] else 64, 64, 32, 4, 3)
    if rows <= ROW_TILES[0]:
        return Tiles(16, 128, 128, 4, 4)
    return Tiles(64, 256, 64, 4, 4) if rows <= ROW_TILES[1] else Tiles(128, 256, 64, 8, 3)


def schedule(rows: int, vocab: int, tiles: Tiles, processors: int) -> tuple[int, int, int]:
    """(blocks of rows, splits of the vocabulary, tiles of each split); every split has at least one tile with something in it."""
    row_blocks, vocab_tiles = -(-rows // tiles.rows), -(-vocab // tiles.vocab)
    splits = min(vocab_tiles, max(1, WAVES * processors // max(1, row_blocks)))
    each = -(-vocab_tiles // splits)
    return row_blocks, -(-vocab_tiles // each), each


def most_splits(vocab: int, device: torch.device) -> int:
    """The most splits that :func:`schedule` makes for any number of rows: a block of one size for all, so one compiled kernel."""
    return min(-(-vocab // SMALLEST_VOCAB_TILE), WAVES * multiprocessors(device))


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of the GPU. In the interpreter 1, which gives the vocabulary few splits, but more than one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@jit("rows", "splits", "vocab_tiles")
def _partial_logsumexp(
    hidden: tl.tensor,
    head: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    VOCAB: tl.constexpr,
    SIZE: tl.constexpr,
    splits: tl.tensor,
    vocab_tiles: tl.tensor,
    cap: tl.tensor,
    ROW_TILE: tl.constexpr,
    VOCAB_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    """A block of rows over one split of the vocabulary. Blocks of rows that share a split run together: the head is read once."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    split = tl.program_id(1)
    step = tl.arange(0, SIZE_TILE)
    left = hidden + row.to(tl.int64)[:, None] * SIZE + step[None, :]
    peak = tl.full([ROW_TILE], float("-inf"), tl.float32)
    total = tl.zeros([ROW_TILE], tl.float32)
    for tile in range(split * vocab_tiles, (split + 1) * vocab_tiles):
        token = tile * VOCAB_TILE + tl.arange(0, VOCAB_TILE)
        right = head + token.to(tl.int64)[None, :] * SIZE + step[:, None]
        logits = tl.zeros([ROW_TILE, VOCAB_TILE], tl.float32)
        for start in range(0, SIZE, SIZE_TILE):
            inside = step < SIZE - start
            a = tl.load(left + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + start, mask=(token < VOCAB)[None, :] & inside[:, None], other=0.0)
            logits = tl.dot(a, b, logits, input_precision="ieee")
        if CAPPED:
            logits = capped(logits, cap)
        logits = tl.where((token < VOCAB)[None, :], logits, float("-inf"))
        # The first tile of a split contains a token of the vocabulary, so the peak is finite after it.
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(logits - higher[:, None]), axis=1)
        peak = higher
    tl.store(partial + row.to(tl.int64) * splits + split, peak + tl.log(total), mask=row < rows)


@jit("labels", "count", "splits")
def _gather(
    hidden: tl.tensor,
    head: tl.tensor,
    labels: tl.tensor,
    partial: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    splits: tl.tensor,
    cap: tl.tensor,
    SIZE: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    """Each program computes one of ``count`` labels of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = row * count + tl.program_id(1)
    token = tl.load(labels + place)
    products = tl.zeros([SIZE_BLOCK], tl.float32)
    for start in range(0, SIZE, SIZE_BLOCK):
        step = start + tl.arange(0, SIZE_BLOCK)
        a = tl.load(hidden + row * SIZE + step, mask=step < SIZE, other=0.0).to(tl.float32)
        products += a * tl.load(head + token * SIZE + step, mask=step < SIZE, other=0.0).to(tl.float32)
    split = tl.arange(0, SPLIT_BLOCK)
    parts = tl.load(partial + row * splits + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(parts, axis=0)
    logsumexp = peak + tl.log(tl.sum(tl.exp(parts - peak), axis=0))
    # The two sums add in different orders: a label with probability 1 could get a log-probability above 0.
    logit = tl.sum(products, axis=0)
    if CAPPED:
        logit = capped(logit, cap)
    tl.store(out + place, tl.minimum(logit - logsumexp, 0.0))
