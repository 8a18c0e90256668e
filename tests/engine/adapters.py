"""Adapters for tests, in PEFT's format, and models into which they are merged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model: PreTrainedModel,
    targets: Sequence[str] = ALL,
    *,
    rank: int = 4,
    seed: int = 0,
    classes: int = 0,
    dtype: torch.dtype = torch.float32,
    whole: Sequence[str] = (),
    tower: bool = False,
    **config: Any,
) -> Path:
    """Write an adapter of ``model`` with random weights; ``classes``: rows of its classification head; ``whole``: modules that it
    replaces, such as ``lm_head``; ``tower``: whether projections of a vision tower count. ``config``: other keys."""
    generator = torch.Generator().manual_seed(seed)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    settings |= config
    tensors = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in targets and isinstance(module, torch.nn.Linear) and "expert" not in name and (tower or "visual" not in name):
            own = settings.get("rank_pattern", {}).get(last, rank)
            a = torch.randn(own, module.in_features, generator=generator) * module.in_features**-0.5
            b = torch.randn(module.out_features, own, generator=generator) * 0.3 * own**-0.5
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    if classes:
        tensors["base_model.model.score.weight"] = torch.randn(classes, model.config.hidden_size, generator=generator) * 0.2
    for name in whole:
        ((place, module),) = (each for each in model.named_modules() if each[0].rpartition(".")[2] == name)
        own = module.weight.detach() * (1 + 0.5 * torch.randn(module.weight.shape, generator=generator))
        tensors[f"base_model.model.{place}.weight"] = own
    if whole:
        settings["modules_to_save"] = list(whole)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


@torch.no_grad()
def merge(model: PreTrainedModel, directory: Path, *, head: bool = True) -> PreTrainedModel:
    """Add an adapter that :func:`write_adapter` wrote to the weights of ``model``, in place: W + scale · B · A. ``head``: whether
    the model has a classification head, which is replaced."""
    settings = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    for name in tensors:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = tensors[name].float(), tensors[name.replace("lora_A", "lora_B")].float()
            alpha = settings.get("alpha_pattern", {}).get(module.rpartition(".")[2], settings["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if settings.get("use_rslora") else len(a))
            model.get_submodule(module).weight += scale * (b.double() @ a.double()).float()
    for name, tensor in tensors.items():
        if name.endswith(("lm_head.weight", "embed_tokens.weight")):
            model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".weight")).weight.copy_(tensor)
    if head and "base_model.model.score.weight" in tensors:
        model.score.weight.copy_(tensors["base_model.model.score.weight"])
    return model
