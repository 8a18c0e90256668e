"""The product with queries, keys and values in one kernel with what follows: against the reference in float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from yardstick_llm.kernels.linear_qk_norm_rope import fits, linear_qk_norm_rope_reference, linear_qk_norm_rope_triton
from yardstick_llm.kernels.product_tiles import Tiles, is_hopper
from yardstick_llm.kernels.quantize import FP8, quantize_rows_reference

TILES = {
    "descriptors": Tiles(rows=16, columns=128, step=16, warps=4, group=2),
    "pointers": Tiles(rows=16, columns=128, step=16, warps=4, group=2, tma=False),
    "a program a tile": Tiles(rows=16, columns=128, step=16, warps=4, group=2, resident=0),
}
"""Small ones, so that a few tokens are several tiles, some of them partly outside."""
HEADS = [(4, 2, 32), (14, 2, 32), (3, 1, 64), (2, 2, 128)]
"""(heads, kv_heads, head_dim): of one to four heads a tile."""


class Inputs(NamedTuple):
    """The arguments of the operation, in order."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    scales: Tensor | None = None
    out: Tensor | None = None
    x_scales: Tensor | None = None
    weight_scales: Tensor | None = None

    def wide(self) -> Inputs:
        """All in float32, with caches of its own; codes are multiplied by their scales."""
        x, weight = self.x.float(), self.weight.float()
        if self.x_scales is not None and self.weight_scales is not None:
            x, weight = x * self.x_scales, weight * self.weight_scales
        bias, q_weight, k_weight = (None if one is None else one.float() for one in (self.bias, self.q_weight, self.k_weight))
        keys, values = (cache.clone() if self.scales is not None else cache.float().clone() for cache in (self.keys, self.values))
        return Inputs(x, weight, bias, q_weight, k_weight, *self[5:8], keys, values, self.slots, self.scales)


def inputs(
    tokens: int, size: int, heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype = torch.float16
) -> Inputs:
    """Random ones with all that is optional but scales; the slots are those of a cache with 5 more than tokens, in no order."""
    rows = (heads + 2 * kv_heads) * head_dim
    x, weight = torch.randn(tokens, size, device=device).to(dtype), (torch.randn(rows, size, device=device) / size**0.5).to(dtype)
    bias, norms = torch.randn(rows, device=device).to(dtype), torch.randn(2, head_dim, device=device).to(dtype)
    angles = torch.randn(tokens, head_dim // 2, device=device) * 100
    keys, values = torch.full((2, tokens + 5, kv_heads, head_dim), 7.0, device=device).to(dtype)
    slots = torch.randperm(tokens + 5, device=device)[:tokens]
    return Inputs(x, weight, bias, norms[0], norms[1], 1e-3, angles.cos(), angles.sin(), keys, values, slots)


def check(given: Inputs, tiles: Tiles | None, tolerance: float = 4e-3) -> None:
    """The kernel writes what the reference writes, and nothing else."""
    other = given.wide()
    expected = linear_qk_norm_rope_reference(*other)
    found = linear_qk_norm_rope_triton(*given, tiles=tiles)
    for one, wide in ((found, expected), (given.keys, other.keys), (given.values, other.values)):
        torch.testing.assert_close(one.float(), wide.float(), atol=tolerance, rtol=tolerance)
    untouched = torch.ones(len(given.keys), dtype=torch.bool, device=given.keys.device).index_fill(0, given.slots, False)
    assert (given.keys[untouched] == 7).all()
    assert (given.values[untouched] == 7).all()


@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize(("normed", "biased"), [(True, False), (False, True)], ids=["norm", "biased"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel(heads: tuple[int, int, int], biased: bool, normed: bool, tiles: Tiles, device: torch.device) -> None:
    given = inputs(37, 32, *heads, device)
    if not biased:
        given = given._replace(bias=None)
    if not normed:
        given = given._replace(q_weight=None, k_weight=None)
    check(given, tiles)


@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
def test_numbers_of_tokens(tokens: int, device: torch.device) -> None:
    check(inputs(tokens, 32, 2, 1, 64, device), TILES["descriptors"])


def test_chosen_tiles_in_float32(device: torch.device) -> None:
    check(inputs(20, 32, 2, 1, 64, device, torch.float32), None, 1e-5)


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
def test_what_is_rounded_to_codes(normed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in float32, because the interpreter does not carry when it rounds to FP8. Too large numbers are cut off."""
    monkeypatch.setattr("yardstick_llm.kernels.qk_norm_rope.FP8", torch.float32)
    given = inputs(37, 32, 4, 2, 64, device, torch.float32)
    given.x[0] *= 1000
    if not normed:
        given = given._replace(q_weight=None, k_weight=None)
    plain = given._replace(keys=given.keys.clone(), values=given.values.clone())
    scales = torch.tensor([[0.25, 2.0], [0.5, 0.0625]], device=device)
    found = linear_qk_norm_rope_triton(*given._replace(scales=scales), tiles=TILES["descriptors"])
    expected = linear_qk_norm_rope_reference(*plain) * scales[0].repeat_interleave(2)[:, None]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    for one, kept, each in ((given.keys, plain.keys, scales[0]), (given.values, plain.values, scales[1])):
        wide = (kept / each[:, None]).clamp(-448, 448)[given.slots]
        torch.testing.assert_close(one[given.slots], wide, atol=1e-3, rtol=1e-5)
    assert given.values.abs().max() == 448


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_codes_are_written(dtype: torch.dtype, device: torch.device) -> None:
    """Values of which none is between two codes: their own, with a scale of one."""
    given = inputs(20, 16, 4, 2, 64, device, dtype)
    weight = torch.zeros_like(given.weight)
    weight[-128:] = torch.eye(16, device=device, dtype=dtype).repeat(8, 1)
    x = given.x.to(FP8).to(dtype)
    keys, values = torch.zeros(2, 25, 2, 64, device=device).to(FP8)
    scales = torch.ones(2, 2, device=device)
    given = given._replace(x=x, weight=weight, bias=None, keys=keys, values=values, scales=scales)
    linear_qk_norm_rope_triton(*given, tiles=TILES["descriptors"])
    assert torch.equal(values.float()[given.slots], x.float().repeat(1, 8).view(20, 2, 64))
    assert (keys.float() == 0).all()


@pytest.mark.parametrize("tiles", TILES.values(), ids=list(TILES))
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_products_of_codes(biased: bool, tiles: Tiles, device: torch.device) -> None:
    given = inputs(37, 64, 4, 2, 32, device, torch.bfloat16)
    x, x_scales = quantize_rows_reference(given.x)
    weight, weight_scales = quantize_rows_reference(given.weight)
    given = given._replace(x=x, weight=weight, x_scales=x_scales, weight_scales=weight_scales, bias=given.bias if biased else None)
    step = 32 if device.type == "cuda" else 16
    tiles = Tiles(64, 128, step, warps=4, group=2, tma=tiles.tma, resident=tiles.resident)
    check(given, tiles, 3e-2)


@pytest.mark.parametrize("coded", [False, True], ids=["bfloat16", "codes"])
@pytest.mark.parametrize("heads", [(16, 8, 128), (14, 2, 64), (28, 4, 128)], ids=str)
def test_chosen_tiles_on_a_gpu(heads: tuple[int, int, int], coded: bool, device: torch.device) -> None:
    """As captured in a CUDA graph and replayed."""
    if device.type != "cuda" or not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    given = inputs(2000, 1024, *heads, device, torch.bfloat16)
    if coded:
        (x, x_scales), (weight, weight_scales) = quantize_rows_reference(given.x), quantize_rows_reference(given.weight)
        given = given._replace(x=x, weight=weight, x_scales=x_scales, weight_scales=weight_scales)
    assert fits(given.x, given.weight, given.bias, given.cos, *given.keys.shape[1:])
    check(given, None, 3e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear_qk_norm_rope_triton(*given)
    given.cos.mul_(-1)
    graph.replay()
    torch.testing.assert_close(found.float(), linear_qk_norm_rope_reference(*given.wide()), atol=3e-2, rtol=3e-2)


def test_what_fits(device: torch.device) -> None:
    """Few tokens, float32, a partial rotation and heads of 80 do not; elsewhere than on a Hopper GPU nothing does."""

    def takes(given: Inputs, **change: Any) -> bool:
        given = given._replace(**change)
        return fits(given.x, given.weight, given.bias, given.cos, *given.keys.shape[1:])

    given = inputs(1024, 64, 4, 2, 64, device)
    assert takes(given) == (device.type == "cuda" and is_hopper(device))
    assert not takes(given, x=given.x[:1023])
    assert not takes(given, x=given.x.float(), weight=given.weight.float())
    assert not takes(given, cos=given.cos[:, :16])
    assert not takes(inputs(1024, 64, 4, 2, 80, device))


def test_arguments_are_checked(device: torch.device) -> None:
    given = inputs(4, 32, 6, 2, 32, device, torch.float32)
    wrong: dict[str, dict[str, Any]] = {
        "slots is torch.int32": {"slots": given.slots.int()},
        "given both or not at all": {"k_weight": None},
        "heads have 32 elements and 30 are rotated": {"cos": given.cos[:, :15].contiguous(), "sin": given.sin[:, :15].contiguous()},
        "x_scales and weight_scales are given with e4m3 codes": {"x_scales": given.x[:, :1]},
        r"k_weight begins at .* a multiple of 16 bytes": {"k_weight": given.x.flatten()[1:33]},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            linear_qk_norm_rope_triton(*given._replace(**change))
