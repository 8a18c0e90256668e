"""Additions of adapters in the kernel of the gate, and in that of QK-norm and rotation, against one operation after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.lora import Case, captured, product, rows_of
from tests.kernels.test_qk_norm_rope import Inputs, inputs
from yardstick_llm.kernels.gelu_mul import gelu_mul_reference
from yardstick_llm.kernels.lora import add_lora, shrink_lora_triton
from yardstick_llm.kernels.lora_gate import lora_gate, lora_gate_reference, lora_gate_triton
from yardstick_llm.kernels.lora_layout import LoraDelta, LoraRows
from yardstick_llm.kernels.lora_rope import lora_rope_write, lora_rope_write_reference, lora_rope_write_triton
from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write_reference
from yardstick_llm.kernels.silu_mul import silu_mul_reference

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
MIXED = "ranks of all sizes behind rows without adapter"
ADAPTERS = {
    "one row": ((8,), (0, 1)),
    MIXED: ((8, 16, 64, 128), (70, 33, 40, 1, 37)),
    "odd ranks": ((1, 3, 17), (0, 4, 5, 6)),
    "adapters that leave the product alone": ((0, 8, 0), (1, 4, 5, 6)),
}
"""Ranks of the slots, and rows without adapter and of each slot."""
HEADS = {
    "a part of heads of 80": (2, 1, 80, 32),
    "heads of 2": (3, 1, 2, 2),
    "heads of 256": (2, 1, 256, 256),
}
"""Query heads, key heads, elements of a head, and those of them that are rotated."""


def case_of(name: str, parts: tuple[int, ...]) -> Case:
    ranks, counts = ADAPTERS[name]
    return Case(ranks, counts, inputs=48, parts=parts)


def shrunk(case: Case, rows: LoraRows, device: torch.device, padding: int = 0) -> tuple[Tensor, LoraDelta]:
    """The input of the product, and its rows shrunk to the ranks; ``padding``: rows behind those of the case."""
    x = torch.randn(sum(case.counts) + padding, case.inputs, generator=torch.Generator().manual_seed(2)).to(device)
    delta = shrink_lora_triton(x, product(case, device), rows)
    assert delta is not None
    return x, delta


def parts_of(heads: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return heads * head_dim, kv_heads * head_dim, kv_heads * head_dim


def projected(tokens: int, shape: tuple[int, int, int, int], device: torch.device, *, normed: bool = True) -> Inputs:
    heads, kv_heads, head_dim, rotated = shape
    given = inputs(tokens, heads, kv_heads, head_dim, torch.float32, device, normed)
    cos, sin = (angles[:, : rotated // 2].contiguous() for angles in (given.cos, given.sin))
    return given._replace(cos=cos, sin=sin)


def copied(given: Inputs) -> Inputs:
    return given._replace(qkv=given.qkv.clone(), keys=given.keys.clone(), values=given.values.clone())


def added(given: Inputs, x: Tensor, delta: LoraDelta, rows: LoraRows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, computed by one operation after the other."""
    own = copied(given)
    qkv = add_lora(own.qkv.flatten(1), x, delta.product, rows).view_as(own.qkv)
    return qk_norm_rope_write_reference(qkv, *own[1:]), own.keys, own.values


PARTS = ((40, 40), (80,), (2, 2))


def in_turn(names: Iterable[str], others: Iterable[Any]) -> list[tuple[str, Any, bool]]:
    """Every pair of a name and one of ``others``, with True and False in turn."""
    others = list(others)
    return [(name, other, (row + column) % 2 == 0) for row, name in enumerate(names) for column, other in enumerate(others)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts", "shuffled"), in_turn(ADAPTERS, PARTS))
def test_gate(name: str, parts: tuple[int, ...], shuffled: bool, device: torch.device) -> None:
    """``shuffled``: rows are in an order of their own."""
    case = case_of(name, parts)
    rows = rows_of(case, device, shuffled=shuffled)
    x, delta = shrunk(case, rows, device)
    gate_up = torch.randn(len(x), sum(parts), device=device)
    whole = add_lora(gate_up.clone(), x, delta.product, rows)
    for gelu, gate in ((False, silu_mul_reference), (True, gelu_mul_reference)):
        expected = gate(whole.clone())
        assert not torch.allclose(expected, gate(gate_up.clone()))
        for operation in (lora_gate, lora_gate_reference, lora_gate_triton):
            torch.testing.assert_close(operation(gate_up.clone(), delta, gelu=gelu), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads", "normed"), in_turn(ADAPTERS, HEADS))
def test_rope(name: str, heads: str, normed: bool, device: torch.device) -> None:
    shape = HEADS[heads]
    case = case_of(name, parts_of(*shape[:3]))
    rows = rows_of(case, device)
    x, delta = shrunk(case, rows, device)
    given = projected(len(x), shape, device, normed=normed)
    expected = added(given, x, delta, rows)
    for operation in (lora_rope_write, lora_rope_write_reference, lora_rope_write_triton):
        own = copied(given)
        found = operation(own.qkv, delta, *own[1:])
        torch.testing.assert_close((found, own.keys, own.values), expected, **CLOSE)


def test_rope_of_a_product_in_one_part(device: torch.device) -> None:
    """As in checkpoints whose queries, keys and values are one projection."""
    case = case_of(MIXED, (10 * 16,))
    rows = rows_of(case, device)
    x, delta = shrunk(case, rows, device)
    given = projected(len(x), (6, 2, 16, 16), device)
    expected, own = added(given, x, delta, rows), copied(given)
    found = lora_rope_write_triton(own.qkv, delta, *own[1:])
    torch.testing.assert_close((found, own.keys, own.values), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ADAPTERS, "no row with an adapter"])
def test_captured_launches(name: str, device: torch.device) -> None:
    """Room for blocks and ranks that the step does not have, unknown runs, and rows of padding, which have no adapter."""
    padding, (ranks, counts) = 5, ADAPTERS.get(name, ((8,), (7, 0)))
    case = Case(ranks, counts, 48, (64, 32, 32))
    rows = rows_of(case, device)
    x, delta = shrunk(case, captured(case, rows, padding), device, padding)
    given = projected(len(x), (4, 2, 16, 16), device)
    expected, own = added(given, x, delta, rows), copied(given)
    found = lora_rope_write_triton(own.qkv, delta, *own[1:])
    torch.testing.assert_close((found, own.keys, own.values), expected, **CLOSE)
    case = Case(ranks, counts, 48, (64, 64))
    x, delta = shrunk(case, captured(case, rows, padding), device, padding)
    gate_up = torch.randn(len(x), 128, device=device)
    whole = silu_mul_reference(add_lora(gate_up.clone(), x, delta.product, rows))
    torch.testing.assert_close(lora_gate_triton(gate_up, delta, gelu=False), whole, **CLOSE)


def test_arguments_are_checked(device: torch.device) -> None:
    case = case_of(MIXED, (40, 40))
    x, delta = shrunk(case, rows_of(case, device), device)
    gate_up = torch.randn(len(x), 80, device=device)
    with pytest.raises(ValueError, match=r"inner is torch.float32, where torch.float16"):
        lora_gate_triton(gate_up.half(), delta, gelu=False)
    with pytest.raises(ValueError, match=r"parts is \(40, 40\), where gate and up of 44 columns"):
        lora_gate_triton(torch.randn(len(x), 88, device=device), delta, gelu=False)
    given = projected(len(x), (3, 1, 16, 16), device)
    with pytest.raises(ValueError, match=r"delta has parts \(40, 40\) of 181 rows, where \(48, 16, 16\) of 181"):
        lora_rope_write_triton(given.qkv, delta, *given[1:])
    with pytest.raises(ValueError, match="given both or not at all"):
        lora_rope_write_triton(given.qkv, delta, *given._replace(k_weight=None)[1:])
    case = case_of(MIXED, (48, 16, 16))
    _, ordered = shrunk(case, rows_of(case, device, shuffled=True), device)
    with pytest.raises(ValueError, match="rows in an order of their own"):
        lora_rope_write_triton(given.qkv, ordered, *given[1:])
