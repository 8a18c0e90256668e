"""Additions of adapters: the kernels and the reference against row by row."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.lora import (
    ALIGNMENT,
    FEW_ROWS,
    ROW_BLOCKS,
    LoraMatrices,
    LoraProduct,
    LoraRows,
    LoraRun,
    add_lora,
    add_lora_reference,
    add_lora_triton,
    block_runs,
    most_blocks,
)
from tests.kernels.hopper import SHARED_MEMORY, compiled

OPERATIONS = add_lora, add_lora_reference, add_lora_triton
INDEX, PRODUCTS, MAX_RANK = 1, 3, 128


class Case(NamedTuple):
    """Rows and the adapters that they have."""

    ranks: tuple[int, ...]
    """Rank of each slot; 0: the adapter does not change the product."""
    counts: tuple[int, ...]
    """Rows without adapter, and rows of each slot."""
    inputs: int = 48
    parts: tuple[int, ...] = (40, 24, 24)


CASES = {
    "one row": Case((8,), (0, 1)),
    "all rows of one": Case((16,), (0, 70), parts=(130,)),
    "rows without adapter before all others": Case((8, 16), (5, 3, 20)),
    "ranks of all sizes": Case((8, 16, 64, 128), (2, 33, 40, 50, 37), parts=(24, 40)),
    "odd ranks": Case((1, 3, 17), (0, 4, 5, 6), inputs=70, parts=(33, 5, 7)),
    "slots without rows": Case((8, 16, 64), (1, 0, 9, 0)),
    "adapters that leave the product alone": Case((0, 8, 0), (1, 4, 5, 6)),
    "only adapters that leave the product alone": Case((0,), (1, 4)),
    "no row with an adapter": Case((8,), (7, 0)),
    "no rows": Case((8,), (0, 0)),
}


def product(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> LoraProduct:
    """One of several products, which begins elsewhere in each slot. All other numbers are NaN."""
    generator = torch.Generator().manual_seed(len(case.counts))
    outputs, parts = sum(case.parts), len(case.parts)
    numbers = max(case.ranks) * (parts * case.inputs + outputs)
    capacity = -(-numbers // ALIGNMENT) * ALIGNMENT + ALIGNMENT * (len(case.ranks) + 1)
    weights = torch.full((len(case.ranks), capacity), torch.nan, dtype=dtype, device=device)
    table = torch.full((len(case.ranks), 2, PRODUCTS), 10**6, device=device)
    matrices: list[LoraMatrices | None] = []
    for slot, rank in enumerate(case.ranks):
        begin = ALIGNMENT * (slot + 1)
        table[slot, :, INDEX] = torch.tensor([begin, rank])
        behind, end = begin + parts * rank * case.inputs, begin + rank * (parts * case.inputs + outputs)
        a, b = weights[slot, begin:behind].view(-1, case.inputs), weights[slot, behind:end].view(outputs, -1 if rank else 0)
        a.copy_(torch.randn(a.shape, generator=generator) * case.inputs**-0.5)
        b.copy_(torch.randn(b.shape, generator=generator) * max(rank, 1) ** -0.5)
        ends = torch.tensor(case.parts).cumsum(0).tolist()
        split = tuple((end - size, end, b[end - size : end]) for size, end in zip(case.parts, ends, strict=True))
        matrices.append(LoraMatrices(a, split, rank) if rank else None)
    return LoraProduct(matrices, weights, table, INDEX, case.inputs, case.parts)


def rows_of(case: Case, device: torch.device, *, shuffled: bool) -> LoraRows:
    """Runs of rows in order of their slots; ``shuffled``: through an order."""
    begin, runs = case.counts[0], []
    for slot, count in enumerate(case.counts[1:]):
        if count:
            runs.append(LoraRun(slot, begin, begin + count))
        begin += count
    blocks, size = block_runs(runs)
    order = torch.randperm(begin, generator=torch.Generator().manual_seed(1)).to(device) if shuffled else None
    return LoraRows(tuple(runs), torch.from_numpy(blocks).reshape(-1).to(device), size, order)


def tensors(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y, x = (torch.randn(sum(case.counts), size, generator=generator) for size in (sum(case.parts), case.inputs))
    return y.to(device, dtype), x.to(device, dtype)


def row_by_row(y: Tensor, x: Tensor, given: LoraProduct, rows: LoraRows) -> Tensor:
    """In float64."""
    found = y.double()
    for run in rows.runs:
        matrices = given.matrices[run.slot]
        for place in range(run.begin, run.end) if matrices is not None else ():
            row = place if rows.order is None else int(rows.order[place])
            for part, (begin, end, b) in enumerate(matrices.b):
                a = matrices.a[part * matrices.rank : (part + 1) * matrices.rank]
                found[row, begin:end] += b.double() @ (a.double() @ x[row].double())
    return found


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_additions(case: Case, shuffled: bool, device: torch.device) -> None:
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=shuffled), tensors(case, device)
    expected = row_by_row(y, x, given, rows).float()
    for operation in OPERATIONS:
        found = y.clone()
        assert operation(found, x, given, rows) is found
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_padded_tables_of_captured_launches(case: Case, device: torch.device) -> None:
    """As many blocks as there is room for, and room for ranks that no adapter has; the runs are unknown."""
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=False), tensors(case, device)
    room = 3 * most_blocks(len(x), len(case.ranks), rows.size)
    assert room >= len(rows.blocks)
    blocks = torch.zeros(room, dtype=torch.int64, device=device)
    blocks[: len(rows.blocks)] = rows.blocks
    found = add_lora_triton(y.clone(), x, given, rows._replace(runs=(), blocks=blocks, most_rank=MAX_RANK))
    torch.testing.assert_close(found, row_by_row(y, x, given, rows).float(), atol=1e-5, rtol=1e-5)


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bfloat16, whose bits ``tl.dot`` takes for integers there."""
    dot = InterpreterBuilder.create_dot

    def wide(tensor: TensorHandle) -> TensorHandle:
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        return TensorHandle((tensor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
        return dot(self, wide(a), wide(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """The kernel rounds where the reference does. The interpreter cuts bfloat16 off, so its error is larger."""
    case = CASES["ranks of all sizes"]
    given, rows, (y, x) = product(case, device, dtype), rows_of(case, device, shuffled=True), tensors(case, device, dtype)
    expected = row_by_row(y, x, given, rows)
    errors = [(operation(y.clone(), x, given, rows).double() - expected).abs() for operation in OPERATIONS]
    assert 0 < errors[-1].max() < (0.08 if dtype == torch.bfloat16 else 0.006)
    assert errors[-1].mean() < (3.0 if dtype == torch.bfloat16 and not y.is_cuda else 1.1) * errors[1].mean()


@pytest.mark.parametrize("lengths", [(), (1,), (16, 17), (FEW_ROWS,), (FEW_ROWS + 1,), (64, 65, 1), (1, 1, 200)], ids=str)
def test_blocks_have_each_row_once_and_one_slot(lengths: tuple[int, ...]) -> None:
    ends = torch.tensor((3, *lengths)).cumsum(0).tolist()
    runs = [LoraRun(slot + 2, *bounds) for slot, bounds in enumerate(itertools.pairwise(ends))]
    blocks, size = block_runs(runs)
    assert size == ROW_BLOCKS[sum(lengths) > FEW_ROWS * len(lengths)]
    assert all(0 < end - first <= size for _, first, end in blocks.tolist())
    found = [(slot, row) for slot, first, end in blocks.tolist() for row in range(first, end)]
    assert found == [(run.slot, row) for run in runs for row in range(run.begin, run.end)]


def test_arguments_are_checked(device: torch.device) -> None:
    case = CASES["all rows of one"]
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=True), tensors(case, device)
    with pytest.raises(ValueError, match=r"x has shape \[70, 47\], where \[70, 48\] is expected"):
        add_lora_triton(y, x[:, 1:], given, rows)
    with pytest.raises(ValueError, match=r"y is torch.float16"):
        add_lora_triton(y.half(), x, given, rows)
    with pytest.raises(ValueError, match=r"weights is torch.float16"):
        add_lora_triton(y, x, given._replace(weights=given.weights.half()), rows)
    with pytest.raises(ValueError, match=r"a multiple of 16"):
        add_lora_triton(y, x, given._replace(weights=given.weights[:, 1:].contiguous()), rows)
    with pytest.raises(ValueError, match=r"parts has 4 entries"):
        add_lora_triton(y, x, given._replace(parts=(10, 20, 30, 70)), rows)
    with pytest.raises(ValueError, match=r"blocks is torch.int32"):
        add_lora_triton(y, x, given, rows._replace(blocks=rows.blocks.int()))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(device: torch.device) -> None:
    case = CASES["ranks of all sizes"]
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=True), tensors(case, device)
    add_lora_triton(y, x, given, rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_lora_triton(y, x, given, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


IMPORTS = """
import torch
from kernels.lora import LoraMatrices, LoraProduct, LoraRows, LoraRun, add_lora_triton, block_runs
def rows(count):
    runs = (LoraRun(0, 0, count),)
    blocks, size = block_runs(runs)
    return LoraRows(runs, torch.from_numpy(blocks).reshape(-1), size)
def launch(count, inputs, parts, dtype, rank=16):
    weights, table = torch.empty((1, 1 << 20), dtype=dtype), torch.zeros((1, 2, 112), dtype=torch.int64)
    product = LoraProduct([LoraMatrices(None, (), rank)], weights, table, 5, inputs, parts)
    add_lora_triton(torch.empty((count, sum(parts)), dtype=dtype), torch.empty((count, inputs), dtype=dtype), product, rows(count))
"""


@pytest.mark.slow
def test_compiles_for_hopper() -> None:
    """With Qwen3-8B's shapes: without spills; in bfloat16 on tensor cores, and with loads of 16 bytes of all but inner and B."""
    shapes = [(4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (12288, (4096,))]
    launches = [
        f"launch({rows}, {inputs}, {parts}, torch.{dtype})"
        for inputs, parts in shapes
        for rows in (4, 1000)
        for dtype in ("bfloat16", "float32")
    ]
    for launch, kernels in zip(launches, compiled(IMPORTS, *launches), strict=True):
        assert [kernel["name"] for kernel in kernels] == ["_shrink", "_expand"]
        for kernel in kernels:
            assert kernel["local"] == 0, (launch, kernel["name"])
            assert kernel["shared"] <= SHARED_MEMORY
            assert "float32" in launch or "mma" in kernel["ptx"], (launch, kernel["name"])
        shrink, expand = (kernel["ptx"] for kernel in kernels)
        assert set(re.findall(r"cp\.async\.c.*?(0x\w+)", shrink)) == {"0x10"}, launch
        assert re.search(r"ld\.global[.\w]*\.v4\.b32", expand), launch
