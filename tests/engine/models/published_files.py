"""Writers of quantised checkpoints, from the public descriptions of their formats, and of the dense weights that they stand for.

They know nothing of the engine's readers. Words are packed code by code, the first in the lowest bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
FP8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NF4 = torch.linspace(-1, 1, 16) ** 3
"""Any table will do: it is in the file."""

Encoded = tuple[dict[str, Tensor], Tensor]
"""Tensors by what follows the name of the projection, and the weight that they stand for, float32."""


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, columns] -> int32 [rows, columns · bits / 32]; ``order``: column of each place of a word."""
    count = 32 // bits
    words = torch.zeros(len(codes), -(-codes.shape[1] // count), dtype=torch.int64)
    for place in range(count):
        column = place if order is None else order[place]
        part = codes[:, column::count].long()
        words[:, : part.shape[1]] |= part << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def grouped(weight: Tensor, bits: int, group: int, *, symmetric: bool, order: Tensor | None = None) -> tuple[Tensor, ...]:
    """Unsigned codes [out, in], scales and zeros [out, groups], and the weight that they stand for. ``order``: group of each
    column."""
    out, columns = weight.shape
    owners = torch.arange(columns) // group if order is None else order
    groups, most = int(owners.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.empty(out, groups), torch.empty(out, groups)
    for index in range(groups):
        part = weight[:, owners == index]
        if symmetric:
            scales[:, index] = part.abs().amax(1) / (most // 2)
            zeros[:, index] = 1 << (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, index] = (high - low) / most
            zeros[:, index] = (-low / scales[:, index].half().float()).round().clamp(1, most)
    scales = scales.half().float()
    codes = (weight / scales[:, owners] + zeros[:, owners]).round().clamp(0, most)
    return codes.to(torch.uint8), scales, zeros, (codes - zeros[:, owners]) * scales[:, owners]


def shuffled(columns: int, group: int) -> Tensor:
    """Group of each column, as GPTQ with ``desc_act`` leaves it."""
    return (torch.arange(columns) // group)[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]


def gptq(bits: int, *, symmetric: bool = True, ordered: bool = False, version: int = 1, group: int = GROUP) -> Any:
    def encode(weight: Tensor) -> Encoded:
        order = shuffled(weight.shape[1], group) if ordered else None
        width = weight.shape[1] if group == -1 else group
        codes, scales, zeros, dense = grouped(weight, bits, width, symmetric=symmetric, order=order)
        tensors = {
            "qweight": pack_words(codes, bits).t().contiguous(),
            "qzeros": pack_words(zeros.t().to(torch.uint8) - int(version == 1), bits),
            "scales": scales.t().half().contiguous(),
            "g_idx": (torch.arange(weight.shape[1]) // width if order is None else order).int(),
        }
        return tensors, dense

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": symmetric}
    return config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}), encode


def awq() -> Any:
    def encode(weight: Tensor) -> Encoded:
        codes, scales, zeros, dense = grouped(weight, 4, GROUP, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": pack_words(codes.t(), 4, order),
            "qzeros": pack_words(zeros.t().to(torch.uint8), 4, order),
            "scales": scales.t().half().contiguous(),
        }
        return tensors, dense

    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, encode


def compressed(form: str, encode: Callable[[Tensor], Encoded], inputs: dict[str, Any] | None = None, **weights: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }, encode


def packed(bits: int, group: int | None, *, symmetric: bool = True, ordered: bool = False) -> Any:
    def encode(weight: Tensor) -> Encoded:
        out, columns = weight.shape
        width = group or columns
        order = shuffled(columns, width) if ordered else None
        codes, scales, zeros, dense = grouped(weight, bits, width, symmetric=symmetric, order=order)
        tensors = {
            "weight_packed": pack_words(codes, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor([out, columns]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(zeros.t().to(torch.uint8), bits).t().contiguous()
        if order is not None:
            tensors["weight_g_idx"] = order.int()
        return tensors, dense

    strategy = {"strategy": "channel" if group is None else "group", "group_size": group}
    return compressed("pack-quantized", encode, num_bits=bits, type="int", symmetric=symmetric, **strategy)


def int8(strategy: str) -> Any:
    def encode(weight: Tensor) -> Encoded:
        peaks = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max().view(1)
        scales = (peaks / 127).bfloat16().float()
        codes = (weight / scales).round().clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales.bfloat16()}, codes.float() * scales

    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    return compressed("int-quantized", encode, inputs, num_bits=8, type="int", symmetric=True, strategy=strategy)


def fp8_codes(weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of blocks, and the weight that they stand for."""
    rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    scales, codes, dense = torch.empty(rows, columns), torch.empty_like(weight, dtype=FP8), torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scales[row, column] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[row, column]).to(FP8)
            dense[at] = codes[at].float() * scales[row, column]
    return codes, scales, dense


def fp8_tensors(strategy: str, *, static: bool = False, form: str = "float-quantized") -> Any:
    def encode(weight: Tensor) -> Encoded:
        sides = {"channel": (1, weight.shape[1]), "tensor": tuple(weight.shape), "block": (GROUP, GROUP)}[strategy]
        codes, scales, dense = fp8_codes(weight, *sides)
        tensors = {"weight": codes, "weight_scale": scales.view(1) if strategy == "tensor" else scales}
        return tensors | ({"input_scale": torch.tensor([0.5])} if static else {}), dense

    inputs = {"num_bits": 8, "type": "float", "dynamic": not static}
    block = {"block_structure": [GROUP, GROUP]} if strategy == "block" else {}
    return compressed(form, encode, inputs, num_bits=8, type="float", symmetric=True, strategy=strategy, **block)


def fp8(block: int | None) -> Any:
    def encode(weight: Tensor) -> Encoded:
        codes, scales, dense = fp8_codes(weight, *((block, block) if block else weight.shape))
        if block is None:
            return {"weight": codes, "weight_scale": scales.view(()), "input_scale": torch.tensor(0.5)}, dense
        return {"weight": codes, "weight_scale_inv": scales}, dense

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    return config | ({"weight_block_size": [block, block]} if block else {}), encode


def fp4(kind: str) -> Any:
    width = 16 if kind == "nvfp4" else 32

    def encode(weight: Tensor) -> Encoded:
        blocks = weight.view(len(weight), -1, width)
        peaks = blocks.abs().amax(2) / 6
        if kind == "nvfp4":
            whole = 448 * 6 / weight.abs().max()
            stored = (peaks * whole).to(FP8)
            scales, extra = stored.float() / whole, {"weight_global_scale": whole.view(1)}
        else:
            exponents = peaks.log2().ceil()
            stored, scales, extra = (exponents + 127).to(torch.uint8), torch.exp2(exponents), {}
        nearest = (blocks.abs() / scales[:, :, None]).unsqueeze(3).sub(E2M1).abs().argmin(3)
        codes = (nearest + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
        dense = (E2M1[nearest] * torch.where(blocks < 0, -1, 1) * scales[:, :, None]).flatten(1)
        return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": stored} | extra, dense

    return compressed(f"{kind}-pack-quantized", encode, num_bits=4, type="float", strategy="group", group_size=width)


def bitsandbytes(bits: int, *, nested: bool = False) -> Any:
    def encode(weight: Tensor) -> Encoded:
        if bits == 8:
            peaks = weight.abs().amax(1)
            codes = (weight * (127 / peaks[:, None])).round().to(torch.int8)
            return {"weight": codes, "SCB": peaks, "weight_format": torch.tensor(0, dtype=torch.uint8)}, codes * peaks[
                :, None
            ] / 127
        flat = weight.flatten().view(-1, GROUP)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": list(weight.shape)}
        scales = flat.abs().amax(1)
        tensors = {"weight.quant_map": NF4.clone(), "weight.absmax": scales}
        if nested:
            table, offset = torch.linspace(-1, 1, 256), float(scales.mean())
            parts = (scales - offset).split(16)
            peaks = torch.stack([part.abs().max() for part in parts])
            codes = torch.cat([((part / peak + 1) * 127.5).round() for part, peak in zip(parts, peaks, strict=True)]).to(
                torch.uint8
            )
            scales = table[codes.long()] * peaks.repeat_interleave(16)[: len(codes)] + offset
            tensors |= {"weight.absmax": codes, "weight.nested_absmax": peaks, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
        nearest = (flat / scales[:, None]).unsqueeze(2).sub(NF4).abs().argmin(2)
        codes = nearest.flatten().to(torch.uint8)
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors["weight"] = (codes[::2] << 4 | codes[1::2]).view(-1, 1)
        return tensors, (NF4[nearest] * scales[:, None]).view(weight.shape)

    config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    return config, encode


FORMATS: dict[str, Any] = {
    "w4a16": packed(4, GROUP),
    "w4a16 asymmetric": packed(4, GROUP, symmetric=False),
    "w4a16 channel": packed(4, None),
    "w4a16 ordered": packed(4, GROUP, ordered=True),
    "w8a16": packed(8, GROUP, symmetric=False),
    "w8a16 channel": packed(8, None),
    "w8a8": int8("channel"),
    "w8a8 tensor": int8("tensor"),
    "fp8 channel": fp8_tensors("channel"),
    "fp8 tensor static": fp8_tensors("tensor", static=True),
    "fp8 block of compressed-tensors": fp8_tensors("block"),
    "fp8 naive": fp8_tensors("channel", form="naive-quantized"),
    "nvfp4": fp4("nvfp4"),
    "mxfp4": fp4("mxfp4"),
    "fp8 block": fp8(GROUP),
    "fp8 block cut off": fp8(40),
    "fp8 tensor": fp8(None),
    "gptq": gptq(4),
    "gptq channel": gptq(4, group=-1),
    "gptq asymmetric ordered": gptq(4, symmetric=False, ordered=True),
    "gptq v2": gptq(4, symmetric=False, version=2),
    "gptq 8 bits": gptq(8, symmetric=False),
    "gptq 2 bits": gptq(2),
    "awq": awq(),
    "nf4": bitsandbytes(4),
    "nf4 nested": bitsandbytes(4, nested=True),
    "bitsandbytes int8": bitsandbytes(8),
}
"""(``quantization_config``, writer of a projection) by a name of the format."""

QUANTISED = re.compile(r".*layers\..*(_proj|\.w[123])\.weight")
KEPT = "layers.1.mlp.down_proj", "layers.1.self_attn.k_proj"
"""Projections that stay dense, as ``ignore`` says."""


def write_quantised(
    source: Path, directory: Path, name: str, pattern: str = QUANTISED.pattern, kept: tuple[str, ...] = KEPT, *, both: bool = True
) -> tuple[Path, Path]:
    """Write the checkpoint ``source`` in a format and, for ``both``, dense with the weights that its codes stand for. -> both
    directories"""
    config, encode = FORMATS[name]
    raw = json.loads((source / "config.json").read_text())
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        dense[key] = tensor
        if re.fullmatch(pattern, key) is None or key.removesuffix(".weight").endswith(kept):
            coded[key] = tensor
            continue
        parts, dense[key] = encode(tensor.float())
        coded |= {key.removesuffix("weight") + part: found.contiguous() for part, found in parts.items()}
    written: list[tuple[str, dict[str, Tensor], dict[str, Any]]] = [("quantised", coded, {"quantization_config": config})]
    for place, tensors, extra in written + ([("dense", dense, {})] if both else []):
        folder = directory / place
        folder.mkdir(parents=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw | extra))
    return directory / "quantised", directory / "dense"
