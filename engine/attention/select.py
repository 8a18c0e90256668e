"""Selects the attention backend for a model on a device."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from engine import wire
from engine.attention import flashinfer
from engine.attention.base import AttentionBackend
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from engine.kvcache.kv import KVCache
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.kv_scales import kv_scales
from kernels.attention_layout import NARROW
from kernels.paged_attention import HEAD_DIMS
from kernels.quantize import FP8
from kernels.runtime import INTERPRETED

logger = logging.getLogger(__name__)

Backend = type[ReferenceAttention] | type[TritonAttention] | type[FlashInferAttention]

BACKENDS: dict[str, Backend] = {
    "reference": ReferenceAttention,
    "triton": TritonAttention,
    "flashinfer": FlashInferAttention,
}
NAMES = ("auto", *BACKENDS)
FASTEST = "flashinfer"
"""On a GPU."""


class Choice(NamedTuple):
    """A backend, and why it is the one."""

    backend: Backend
    """Made from the keys and values, the number of query heads and the specs of the layers."""
    reason: str
    fallback: bool = False
    """Whether it is not the fastest backend of the device, which cannot be used."""


def choose(name: str, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype | None = None) -> Choice:
    """The backend called ``name``, one of :data:`NAMES`; "auto" is the fastest that can start at once. Logs which and why.

    ``kept``: dtype of keys and values, where it is another than the model's. Raises ModelError where that backend cannot run here.
    """
    if name not in NAMES:
        raise ModelError(f"There is no attention backend {name!r}; there are {', '.join(NAMES)}.")
    kept = kept or dtype
    chosen, reason = _automatic(device, config, dtype, kept) if name == "auto" else (name, "asked for")
    if problem := problem_of(chosen, device, config, dtype, kept):
        remedy = "Serve it on the CPU." if name == "auto" else "Ask for 'auto' to take one that can."
        raise ModelError(f"The attention backend {chosen} cannot serve this model here: {problem}. {remedy}")
    fallback = name == "auto" and device.type == "cuda" and chosen != FASTEST
    level = logging.WARNING if fallback else logging.INFO
    logger.log(level, "attention: the %s backend (%s)", chosen, reason)
    return Choice(BACKENDS[chosen], reason, fallback)


def problem_of(
    name: str, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype | None = None
) -> str | None:
    """Why the backend cannot serve the model here, as a clause; None where it can."""
    if name == "flashinfer":
        return _flashinfer_problem(device, config, dtype, kept or dtype)
    if name == "triton":
        return _triton_problem(device, config)
    return None if device.type == "cpu" else "it computes on the CPU only"


def _automatic(device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> tuple[str, str]:
    if device.type == "cpu":
        return "reference", "the model runs on the CPU"
    if problem := _flashinfer_problem(device, config, dtype, kept):
        return "triton", f"not flashinfer: {problem}"
    if not flashinfer.compiled(config.head_dim, dtype, kept):
        return "triton", "not flashinfer: its kernel would have to be compiled first, for some minutes"
    return "flashinfer", "installed, with a kernel for this model"


def _flashinfer_problem(device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> str | None:
    if not config.attends_plainly:
        return "its prebuilt kernels have no sliding windows, soft caps or scales of attention"
    return flashinfer.problem(device, config.head_dim, dtype, kept)


def _triton_problem(device: torch.device, config: ModelConfig) -> str | None:
    if device.type != "cuda" and not INTERPRETED:
        return "it needs an NVIDIA GPU"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if config.head_dim not in HEAD_DIMS:
        return f"the model's heads have {config.head_dim} elements, and its kernel takes {', '.join(map(str, HEAD_DIMS))}"
    if config.num_heads > NARROW * config.num_kv_heads:
        return f"the model has more than {NARROW} query heads a key head"
    return None


def make_attention(decoder: Decoder, slots: int, backend: str, kv_dtype: str = "auto") -> AttentionBackend:
    """Room for the keys and values of ``slots`` tokens, and what attends to them. Raises :class:`ModelError`.

    ``kv_dtype``: see :attr:`~engine.settings.EngineSettings.kv_dtype`.
    """
    config, weight = decoder.config, decoder.embed.weight
    scales = None if kv_dtype == "auto" else kv_scales(decoder)
    kept = weight.dtype if scales is None else FP8
    choice = choose(backend, weight.device, config, weight.dtype, kept)
    kv = KVCache(
        layers=config.num_layers,
        slots=slots,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
        scales=scales,
    )
    attention = choice.backend(kv, config.num_heads, config.attention_specs)
    name = next(name for name, backend in BACKENDS.items() if backend is choice.backend)
    modules = flashinfer.origin(config.head_dim, weight.dtype, kept) if choice.backend is FlashInferAttention else ""
    attention.description = wire.Attention(name, choice.reason, choice.fallback, modules)
    return attention
