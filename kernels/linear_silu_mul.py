"""The first half of a gated feed-forward layer in one launch: the product with gate ‖ up, and the gate on the sums.

Apart, the product writes gate and up to memory, and :mod:`kernels.silu_mul` reads them again. Here a program multiplies a block of
rows with the gate's and the up projection's weights of the same columns, and rounds the result once. Also of FP8 codes
(:mod:`kernels.quantize`): the result is not quantised, because the scale of a row is known only when all of its columns are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yardstick_llm.kernels.gelu_mul import gelu_mul_reference
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.product_tiles import Tiles, block, is_aligned, is_hopper, place
from yardstick_llm.kernels.quantize import FP8, expect_scales, scaled_linear_reference
from yardstick_llm.kernels.runtime import FLOATS, expect, expect_device, jit, launches, tl
from yardstick_llm.kernels.silu_mul import gated, silu_mul_reference

MIN_ROWS = 1024
"""With fewer rows, too few tiles occupy a GPU."""

TILES = Tiles(rows=128, columns=256, step=64, stages=3, warps=8)
FP8_TILES = Tiles(rows=128, columns=256, step=128, stages=3, warps=8)
SMALL = Tiles(rows=16, columns=32, step=16, tma=False, warps=4)
"""For float32, which only tests use."""


def fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel takes these tensors, and there are enough rows to occupy a GPU."""
    return (
        launches(x, weight, bias)
        and x.dtype == weight.dtype
        and is_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16, FP8)
        and len(x) >= MIN_ROWS
        and x.shape[1] % _chosen(x.dtype).step == 0
        and is_aligned(x, weight)
    )


def linear_silu_mul_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    *,
    gelu: bool = False,
) -> Tensor:
    """:func:`linear_silu_mul_triton` in plain PyTorch, which rounds the product too."""
    if x_scales is None or weight_scales is None:
        gate_up = linear(x, weight, bias)
    else:
        gate_up = scaled_linear_reference(x, x_scales, weight, weight_scales, bias)
    return gelu_mul_reference(gate_up) if gelu else silu_mul_reference(gate_up)


def linear_silu_mul_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    *,
    gelu: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """``silu(x · gateᵀ) · (x · upᵀ)``, on a GPU, rounded once. x: [rows, in]; weight: [2 · size, in], gate ‖ up; bias: [2 · size].

    x_scales: [rows, 1], and weight_scales: [2 · size, 1], float32, where x and weight are e4m3 codes; the result is then bfloat16.

    -> [rows, size]. All contiguous and of one dtype; in is a multiple of the tiles' step. ``gelu``: use GELU, approximated by tanh,
    in place of SiLU. ``tiles``: in place of the chosen ones. Raises ValueError for other shapes, dtypes, devices or layouts.
    """
    expect_device("x", x)
    (rows, size), columns = x.shape, len(weight) // 2
    dtype = torch.bfloat16 if x.dtype == FP8 else x.dtype
    expect("x", x, x, (rows, size), (*FLOATS, FP8))
    expect("weight", weight, x, (2 * columns, size), (x.dtype,))
    expect_scales(x, x_scales, weight_scales, 2 * columns)
    if bias is not None:
        expect("bias", bias, x, (2 * columns,), (dtype,))
    tiles = tiles or _chosen(x.dtype)
    if size % tiles.step:
        raise ValueError(f"x has {size} columns, where a multiple of {tiles.step} is expected")
    out = x.new_empty((rows, columns), dtype=dtype)
    half = tiles.columns // 2
    count = -(-rows // tiles.rows) * -(-columns // half)
    if count:
        programs = tiles.programs(count, x.device)
        parts = tiles.operand(weight.view(2, columns, size), 1 if tiles.specialized else 2, half)
        _linear_silu_mul[(programs,)](
            tiles.operand(x, tiles.rows), parts, bias, x_scales, weight_scales, out, rows, programs, columns, size, tiles.rows,
            half, tiles.step, tiles.group, tiles.tma, tiles.flatten, tiles.specialized, gelu,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out


def _chosen(dtype: torch.dtype) -> Tiles:
    return FP8_TILES if dtype == FP8 else SMALL if dtype == torch.float32 else TILES


@jit("rows", "programs")
def _linear_silu_mul(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    programs: tl.tensor,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZED: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    """Each program computes every ``programs``-th tile of ROWS rows and HALF columns."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles: tl.constexpr = (COLUMNS + HALF - 1) // HALF
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=FLATTEN, warp_specialize=SPECIALIZED):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP)
        row, column = row_tile * ROWS, column_tile * HALF
        if SPECIALIZED:  # which splits tiles between groups of warps, and no reshaped ones
            gate = tl.zeros([ROWS, HALF], tl.float32)
            up = tl.zeros([ROWS, HALF], tl.float32)
            for start in range(0, SIZE, STEP):
                left = block(x, row, start, rows, SIZE, ROWS, STEP, TMA)
                gate_weight = weight.load([0, column, start]).reshape(HALF, STEP)
                up_weight = weight.load([1, column, start]).reshape(HALF, STEP)
                gate = tl.dot(left, gate_weight.T, gate)
                up = tl.dot(left, up_weight.T, up)
        else:
            # One product of twice the columns reads x from shared memory once. Gate and up of a cell are then in one thread.
            acc = tl.zeros([ROWS, 2 * HALF], tl.float32)
            for start in range(0, SIZE, STEP):
                left = block(x, row, start, rows, SIZE, ROWS, STEP, TMA)
                if TMA:
                    right = tl.reshape(weight.load([0, column, start]), [2 * HALF, STEP])
                else:
                    place_in = tl.arange(0, 2 * HALF)
                    inside = tl.minimum(column + place_in % HALF, COLUMNS - 1) + place_in // HALF * COLUMNS
                    right = tl.load(weight + inside.to(tl.int64)[:, None] * SIZE + (start + tl.arange(0, STEP))[None, :])
                acc = tl.dot(left, right.T, acc, input_precision="ieee")
            gate, up = tl.split(tl.permute(tl.reshape(acc, [ROWS, 2, HALF]), [0, 2, 1]))
        columns = column + tl.arange(0, HALF)
        there = row + tl.arange(0, ROWS)
        if x_scales is not None:
            x_scale = tl.load(x_scales + there, mask=there < rows, other=0.0)[:, None]
            gate *= x_scale * tl.load(weight_scales + columns, mask=columns < COLUMNS, other=0.0)[None, :]
            up *= x_scale * tl.load(weight_scales + COLUMNS + columns, mask=columns < COLUMNS, other=0.0)[None, :]
        if bias is not None:
            gate += tl.load(bias + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + COLUMNS + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
        cells = out + there.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        kept = (there < rows)[:, None] & (columns < COLUMNS)[None, :]
        tl.store(cells, gated(gate, up, GELU).to(out.dtype.element_ty), mask=kept)
