"""QK-norm, rotation and the write to slots: the kernel against its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.qk_norm_rope import qk_norm_rope_write, qk_norm_rope_write_reference, qk_norm_rope_write_triton
from yardstick_llm.kernels.rms_norm import rms_norm
from yardstick_llm.kernels.rope import rope

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Inputs(NamedTuple):
    """The arguments of the operation, in order."""

    qkv: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor


def inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, normed: bool = True
) -> Inputs:
    """Random ones; the slots are those of a cache with 5 more than tokens, in no order."""
    q_weight, k_weight = torch.randn(2, head_dim, device=device).to(dtype) if normed else (None, None)
    angles = torch.randn(tokens, head_dim // 2, device=device) * 100
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    keys, values = torch.full((2, tokens + 5, kv_heads, head_dim), 7.0, device=device).to(dtype)
    slots = torch.randperm(tokens + 5, device=device)[:tokens]
    return Inputs(qkv, q_weight, k_weight, 1e-3, angles.cos(), angles.sin(), keys, values, slots)


def check(given: Inputs, tolerance: float) -> Tensor:
    """Queries of the kernel, which are those of the reference, as are the slots that it writes."""
    other = given._replace(keys=given.keys.clone(), values=given.values.clone())
    found, expected = qk_norm_rope_write_triton(*given), qk_norm_rope_write_reference(*other)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(given.keys, other.keys, atol=tolerance, rtol=tolerance)
    assert torch.equal(given.values, other.values)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(3, 14, 2, 64), (2, 16, 8, 128), (2, 4, 4, 80), (0, 2, 1, 64), (1, 3, 1, 2)],
)
def test_kernel(
    tokens: int, heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check(inputs(tokens, heads, kv_heads, head_dim, dtype, device, normed), TOLERANCE[dtype])


@pytest.mark.parametrize(("head_dim", "rotated"), [(128, 96), (80, 64), (16, 2)])
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
def test_a_part_of_each_head_is_rotated(head_dim: int, rotated: int, normed: bool, device: torch.device) -> None:
    given = inputs(2, 6, 2, head_dim, torch.float32, device, normed)
    given = given._replace(cos=given.cos[:, : rotated // 2].contiguous(), sin=given.sin[:, : rotated // 2].contiguous())
    found = check(given, 1e-5)
    if not normed:
        assert torch.equal(found[..., rotated:], given.qkv[:, :6, rotated:])
        assert not torch.equal(found[..., :rotated], given.qkv[:, :6, :rotated])


def test_reference_is_its_parts() -> None:
    given = inputs(4, 6, 2, 16, torch.float32, torch.device("cpu"))
    assert given.q_weight is not None
    assert given.k_weight is not None
    q, k, v = given.qkv[:, :6], given.qkv[:, 6:8], given.qkv[:, 8:]
    found = qk_norm_rope_write(*given)
    torch.testing.assert_close(found, rope(rms_norm(q, given.q_weight, given.eps), given.cos, given.sin))
    torch.testing.assert_close(given.keys[given.slots], rope(rms_norm(k, given.k_weight, given.eps), given.cos, given.sin))
    assert torch.equal(given.values[given.slots], v)
    untouched = sorted(set(range(9)) - set(given.slots.tolist()))
    assert (given.keys[untouched] == 7).all()
    assert (given.values[untouched] == 7).all()


def test_arguments_are_checked(device: torch.device) -> None:
    given = inputs(4, 6, 2, 16, torch.float32, device)
    wrong: dict[str, dict[str, Any]] = {
        "slots is torch.int32": {"slots": given.slots.int()},
        "given both or not at all": {"k_weight": None},
        r"cos has shape \[4, 9\], where at most 8 angles": {"cos": given.cos.repeat(1, 2)[:, :9]},
        r"qkv and keys have shapes \[4, 4, 16\] and \[9, 2, 16\]": {"qkv": given.qkv[:, :4]},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            qk_norm_rope_write_triton(*given._replace(**change))
