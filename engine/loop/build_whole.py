"""The loop of a model whose tokens all attend to each other: an encoder, or a decoder that is read in both directions."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import msgspec
import torch

from yardstick_llm.engine.loop.describe import describe
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.loop.warm_up import warm_up
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.encoder import Encoder, Model
from yardstick_llm.engine.models.encoder_config import EncoderConfig
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats.quantization import arithmetic_of, format_of
from yardstick_llm.engine.models.loader import fingerprint, load_encoder, load_model
from yardstick_llm.engine.runner.attention.whole import WholeAttention
from yardstick_llm.engine.runner.capturing import make_graphs
from yardstick_llm.engine.runner.graphs import Compilations
from yardstick_llm.engine.runner.machine import StepThreads, step_threads, usable_cores
from yardstick_llm.engine.runner.runner import Runner
from yardstick_llm.engine.scheduling.scheduler import Budget
from yardstick_llm.engine.scheduling.whole import WholeScheduler
from yardstick_llm.engine.settings import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS, RUNNING_REQUESTS, EngineSettings
from yardstick_llm.kernels.runtime import prepare_loops

logger = logging.getLogger(__name__)


def check_whole_settings(settings: EngineSettings, config: ModelConfig | EncoderConfig) -> None:
    """Raise :class:`ModelError` for settings that such a model cannot have."""
    refused = {
        "--tensor-parallel": settings.tensor_parallel > 1,
        "--expert-parallel": settings.expert_parallel > 1,
        "LoRA adapters": settings.takes_adapters,
        "--lenvm-model": settings.lenvm_model is not None,
        "--forecast": settings.forecast != "none",
        "--kv-dtype fp8": settings.kv_dtype != "auto",
        "--quantize fp8": settings.quantize == "fp8" and isinstance(config, EncoderConfig),
        "--attention flashinfer": settings.attention == "flashinfer",
    }
    found = next((name for name, is_set in refused.items() if is_set), None)
    if found is not None:
        raise ModelError(
            f"{found} cannot be used with this {config.architecture}, whose tokens all attend to each other and keep no keys and "
            "values; leave it out."
        )


def build_whole_loop(
    settings: EngineSettings, config: ModelConfig | EncoderConfig, device: torch.device, dtype: torch.dtype
) -> Loop:
    """Load the model and build the loop around it. Raises :class:`ModelError`. ``settings``: checked, with a directory."""
    directory = Path(settings.model)
    load = load_encoder if isinstance(config, EncoderConfig) else load_model
    model: Model = load(directory, dtype, format_of(settings.quantize, device, dtype), settings.max_context).to(device)
    digest = fingerprint(directory, dtype, settings.quantize)
    if isinstance(model, Encoder) and model.native_layers is not None:
        of_layers = min(torch.get_num_threads(), usable_cores())  # they wait for each other without sleeping
        if model.masked_head is None:
            torch.set_num_threads(1)  # what is beside the layers is small
        return assemble_whole(model, settings, digest, of_layers=of_layers)
    return assemble_whole(model, settings, digest, step_threads(model.config, device, quantize=settings.quantize))


def assemble_whole(
    model: Model,
    settings: EngineSettings,
    digest: str,
    threads: StepThreads | None = None,
    of_layers: int | None = None,
) -> Loop:
    """Build the loop around a loaded model. ``threads``: see :class:`Runner`; ``of_layers``: ``threads`` of
    :class:`WholeAttention`."""
    weight, config = model.embed.weight, model.config
    tokens = settings.max_batched_tokens or (GPU_BATCHED_TOKENS if weight.is_cuda else CPU_BATCHED_TOKENS)
    budget = Budget(tokens, settings.max_running_requests or RUNNING_REQUESTS)
    overlap = weight.is_cuda if settings.overlap is None else settings.overlap
    typed = isinstance(config, EncoderConfig) and config.typed
    by_layer = isinstance(model, Encoder) and model.native_layers is None
    biased = model if isinstance(model, Encoder) and by_layer and model.is_biased else None
    slopes = model.slopes if isinstance(model, Encoder) and by_layer else None
    # Threads that share a sequence wait for each other by the number of a layer. ALBERT's layers all have the same one.
    cuts = prepare_loops(weight) and not (by_layer and len({*model.layers}) < config.num_layers)
    narrow = settings.quantize == "int8"
    if isinstance(config, EncoderConfig) and config.tasks is not None:
        of_layers = 1  # parts of a model read the tasks of a whole step
    attention = WholeAttention(
        config.attention_specs,
        weight.device,
        typed=typed,
        biased=biased,
        slopes=slopes,
        cuts=cuts,
        narrow=narrow,
        threads=of_layers,
    )
    runner = Runner(model, attention, (), make_graphs(model, attention, settings.cuda_graphs, tokens), threads=threads)
    info = describe(config, settings, config.max_context, digest)
    arithmetic = arithmetic_of(weight.dtype, settings.quantize)
    info = msgspec.structs.replace(info, encoder=True, arithmetic=arithmetic, attention=attention.description)
    compilations = Compilations()

    def make_loop(max_waiting: int, max_wait: float) -> Loop:
        return Loop(
            runner,
            WholeScheduler(budget),
            info,
            max_waiting=max_waiting,
            max_wait_seconds=max_wait,
            overlap=overlap,
            compilations=compilations,
        )

    if weight.is_cuda:
        # Its steps are not counted, and it refuses nothing.
        warm_up(make_loop(16, math.inf), budget, compilations)
    compilations.ready()
    return make_loop(settings.max_waiting, settings.max_wait_seconds)
