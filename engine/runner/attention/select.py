"""Selects the attention backend for a model on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.quantization import kv_scales
from yardstick_llm.engine.runner.attention import flashinfer
from yardstick_llm.engine.runner.attention.base import AttentionBackend, KVCache
from yardstick_llm.engine.settings import ATTENTION, ATTENTION_BACKENDS
from yardstick_llm.kernels.quantize import FP8
from yardstick_llm.kernels.runtime import prepare_loops

logger = logging.getLogger(__name__)

AUTOMATIC, FASTEST = "auto", "flashinfer"
"""The name that leaves the choice to :func:`choose`, and the backend that is the fastest on a GPU."""


class Choice(NamedTuple):
    """A backend, and why it is the one."""

    backend: type[AttentionBackend]
    """Made from the keys and values, the number of query heads and the specs of the layers."""
    reason: str
    fallback: bool = False
    """Whether it is not the fastest backend of the device, which cannot be used."""


def choose(name: str, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype | None = None) -> Choice:
    """Return the backend called ``name``, one of :data:`~engine.settings.ATTENTION`; "auto" is the fastest that can start at once.
    Logs which and why.

    ``kept``: dtype of keys and values, where it is another than the model's. Raises ModelError where that backend cannot run here.
    """
    if name not in ATTENTION:
        raise ModelError(f"There is no attention backend {name!r}; there are {', '.join(ATTENTION)}.")
    kept = kept or dtype
    chosen, reason = _automatic(device, config, dtype, kept) if name == AUTOMATIC else (name, "asked for")
    if problem := problem_of(chosen, device, config, dtype, kept):
        remedy = "Serve it on the CPU." if name == AUTOMATIC else "Ask for 'auto' to take one that can."
        raise ModelError(f"The attention backend {chosen} cannot serve this model here: {problem}. {remedy}")
    fallback = name == AUTOMATIC and device.type == "cuda" and chosen != FASTEST
    level = logging.WARNING if fallback else logging.INFO
    logger.log(level, "attention: the %s backend (%s)", chosen, reason)
    return Choice(backend_of(chosen), reason, fallback)


def backend_of(name: str) -> type[AttentionBackend]:
    """Return the class of a backend in :data:`~engine.settings.ATTENTION_BACKENDS`."""
    module, _, attribute = ATTENTION_BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend


def problem_of(
    name: str, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype | None = None
) -> str | None:
    """Return why the backend cannot serve the model here, as a clause; None if it can."""
    return backend_of(name).problem(device, config, dtype, kept or dtype)


def _automatic(device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> tuple[str, str]:
    if device.type == "cpu":
        problem = problem_of("native", device, config, dtype, kept)
        return ("reference" if problem else "native"), "the model runs on the CPU"
    if problem := problem_of(FASTEST, device, config, dtype, kept):
        return "triton", f"not flashinfer: {problem}"
    if not flashinfer.compiled(config.head_dim, dtype, kept, config.attention_specs):
        return "triton", "not flashinfer: its kernel would have to be compiled first, for some minutes"
    return "flashinfer", "installed, with a kernel for this model"


def make_attention(decoder: Decoder, slots: int, backend: str, kv_dtype: str = "auto") -> AttentionBackend:
    """Room for the keys and values of ``slots`` tokens, and what attends to them. Raises :class:`ModelError`.

    ``kv_dtype``: see :attr:`~engine.settings.EngineSettings.kv_dtype`.
    """
    config, weight = decoder.config, decoder.embed.weight
    scales = None if kv_dtype == "auto" else kv_scales(decoder)
    kept = weight.dtype if scales is None else FP8
    choice = choose(backend, weight.device, config, weight.dtype, kept)
    prepare_loops(weight)
    kv = KVCache(
        layers=config.num_layers,
        slots=slots,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
        scales=scales,
    )
    make: Callable[..., AttentionBackend] = choice.backend
    attention = make(kv, config.num_heads, config.attention_specs)
    name = next(name for name in ATTENTION_BACKENDS if backend_of(name) is choice.backend)
    modules = flashinfer.origin(config.head_dim, weight.dtype, kept, config.attention_specs) if name == FASTEST else ""
    attention.description = wire.AttentionChoice(name, choice.reason, choice.fallback, modules)
    return attention
