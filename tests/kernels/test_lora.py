"""Additions of adapters: the kernels and the reference against row by row."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.lora import Case, captured, product, rows_of
from yardstick_llm.kernels.lora import (
    add_lora,
    expand_lora_reference,
    expand_lora_triton,
    shrink_lora_reference,
    shrink_lora_triton,
)
from yardstick_llm.kernels.lora_layout import (
    FEW_ROWS,
    NO_ADAPTER,
    ROW_BLOCKS,
    LoraProduct,
    LoraRows,
    LoraRun,
    block_runs,
    most_blocks,
)
from yardstick_llm.kernels.quantize import quantize_rows_reference


def add_lora_reference(y: Tensor, x: Tensor, given: LoraProduct, rows: LoraRows) -> Tensor:
    delta = shrink_lora_reference(x, given, rows)
    return y if delta is None else expand_lora_reference(y, delta)


def add_lora_triton(y: Tensor, x: Tensor, given: LoraProduct, rows: LoraRows) -> Tensor:
    delta = shrink_lora_triton(x, given, rows)
    return y if delta is None else expand_lora_triton(y, delta)


OPERATIONS = add_lora, add_lora_reference, add_lora_triton
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


@pytest.mark.parametrize(("case", "shuffled"), [(case, place % 2 == 0) for place, case in enumerate(CASES.values())], ids=CASES)
def test_additions(case: Case, shuffled: bool, device: torch.device) -> None:
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=shuffled), tensors(case, device)
    expected = row_by_row(y, x, given, rows).float()
    for operation in OPERATIONS:
        found = y.clone()
        assert operation(found, x, given, rows) is found
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_padded_tables_of_captured_launches(case: Case, device: torch.device) -> None:
    """As many blocks as there is room for, and room for ranks that no adapter has; the runs are unknown."""
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=False), tensors(case, device)
    found = add_lora_triton(y.clone(), x, given, captured(case, rows))
    torch.testing.assert_close(found, row_by_row(y, x, given, rows).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["one row", "ranks of all sizes", "adapters that leave the product alone", "no rows"])
def test_input_in_fp8(name: str, device: torch.device) -> None:
    """Codes are multiplied as they are, and sums by the rows' scales."""
    case = CASES[name]
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=True), tensors(case, device)
    codes, scales = quantize_rows_reference(x * 10)
    expected = row_by_row(y, codes.float() * scales, given, rows).float()
    for shrink, expand in ((shrink_lora_reference, expand_lora_reference), (shrink_lora_triton, expand_lora_triton)):
        delta = shrink(codes, given, rows, scales)
        found = y.clone() if delta is None else expand(y.clone(), delta)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """The kernel rounds where the reference does."""
    case = CASES["ranks of all sizes"]
    given, rows, (y, x) = product(case, device, dtype), rows_of(case, device, shuffled=True), tensors(case, device, dtype)
    expected = row_by_row(y, x, given, rows)
    errors = [(operation(y.clone(), x, given, rows).double() - expected).abs() for operation in OPERATIONS]
    assert 0 < errors[-1].max() < (0.08 if dtype == torch.bfloat16 else 0.006)
    assert errors[-1].mean() < 1.1 * errors[1].mean()


@pytest.mark.parametrize("behind", [0, 1, 100])
@pytest.mark.parametrize("lengths", [(), (1,), (16, 17), (FEW_ROWS,), (FEW_ROWS + 1,), (64, 65, 1), (1, 1, 200)], ids=str)
def test_blocks_have_each_row_once_and_one_slot(lengths: tuple[int, ...], behind: int) -> None:
    """``behind``: rows without an adapter behind all others, such as padding."""
    ends = torch.tensor((3, *lengths)).cumsum(0).tolist()
    runs = [LoraRun(slot + 2, *bounds) for slot, bounds in enumerate(itertools.pairwise(ends))]
    count = ends[-1] + behind
    blocks, size = block_runs(runs, count)
    assert size == ROW_BLOCKS[count > FEW_ROWS * (len(lengths) + 1 + (behind > 0 and len(lengths) > 0))]
    assert len(blocks) <= most_blocks(count, len(runs), size)
    assert all(0 < end - first <= size for _, first, end in blocks.tolist())
    found = [(slot, row) for slot, first, end in blocks.tolist() for row in range(first, end)]
    slots = {row: run.slot for run in runs for row in range(run.begin, run.end)}
    assert found == [(slots.get(row, NO_ADAPTER), row) for row in range(count)]


def test_arguments_are_checked(device: torch.device) -> None:
    case = CASES["all rows of one"]
    given, rows, (y, x) = product(case, device), rows_of(case, device, shuffled=True), tensors(case, device)
    with pytest.raises(ValueError, match=r"x has shape \[70, 47\], where \[70, 48\] is expected"):
        add_lora_triton(y, x[:, 1:], given, rows)
    with pytest.raises(ValueError, match=r"largest rank is 15, where a multiple of 8 is expected"):
        add_lora_triton(y, x, given, rows._replace(most_rank=15))
    with pytest.raises(ValueError, match=r"a multiple of 16"):
        add_lora_triton(y, x, given._replace(weights=given.weights[:, 1:].contiguous()), rows)
    with pytest.raises(ValueError, match=r"parts has 4 entries"):
        add_lora_triton(y, x, given._replace(parts=(10, 20, 30, 70)), rows)
