"""The loop's composition root: from settings to a loaded model with its memory and scheduler."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch

from engine import wire
from engine.attention.base import AttentionBackend
from engine.attention.branches import FixedBranches
from engine.attention.flashinfer import FixedFlashInfer, FlashInferAttention
from engine.attention.select import make_attention, problem_of
from engine.attention.triton import FixedTritonAttention
from engine.device.compilations import Compilations
from engine.device.cuda_graphs import CudaCapture
from engine.distributed.leader import LeadingDecoder
from engine.distributed.placement import device_of, dtype_of, set_threads, warn_of_slow_dtype
from engine.distributed.shard import check_expert_parallel
from engine.kvcache.kv import KVCache
from engine.kvcache.slots import SlotPool
from engine.lenvm.graphs import COUNTED_PARTS, PARTS, PassGraphs
from engine.lenvm.guided_draws import LenVMRunner
from engine.lenvm.pairing import check_pairing, gamma_of
from engine.lenvm.parts import WIDTHS
from engine.loop import Loop
from engine.lora.build import AdapterMemory, adapt_decoder, blank_registry, check_settings, make_registry
from engine.lora.registry import AdapterRegistry
from engine.models.config import ModelConfig, load_config
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.kv_scales import check_kv_dtype
from engine.models.lenvm import LenVM, load_lenvm
from engine.models.loader import fingerprint, load_model
from engine.models.quantization import FORMATS, arithmetic_of, format_of
from engine.models.source import located
from engine.runner.adapters import StepAdapters
from engine.runner.graphs import BUCKETS, GRAPH_BYTES, LARGE_BUCKETS, FixedAttention, StepGraphs
from engine.runner.runner import Runner
from engine.runner.step_threads import StepThreads, step_threads
from engine.scheduling.drafting import LookupSettings
from engine.scheduling.scheduler import Budget, Scheduler
from engine.scheduling.structured_requests import StructuredRequests
from engine.settings import CPU_BATCHED_TOKENS, CPU_DRAFT_ROWS, GPU_BATCHED_TOKENS, GPU_DRAFT_ROWS, EngineSettings
from engine.startup.capacity import default_running_requests, default_slots, slot_bytes, step_bytes
from engine.startup.description import describe
from engine.startup.warm_up import warm_up
from engine.structured.vocabulary import Vocabulary, VocabularyError, load_vocabulary
from engine.vision.build import assemble_vision, check_vision_settings
from engine.vision.steps import StepImages
from kernels.quantize import FP8

logger = logging.getLogger(__name__)


def build_loop(settings: EngineSettings) -> Loop:
    """Load the model and build the loop around it. Raises :class:`ModelError`.

    Only for a process that computes nothing else, because operations of the calling thread may get no other threads from here on.
    """
    settings = located(settings)
    check_settings(settings)
    check_expert_parallel(settings)
    check_vision_settings(settings, load_config(Path(settings.model)))
    set_threads(settings)
    device = device_of(settings)
    dtype = dtype_of(settings, device)
    warn_of_slow_dtype(device, dtype)
    if settings.quantize is not None:
        FORMATS[settings.quantize].check_device(device, dtype)
    if settings.kv_dtype != "auto":
        check_kv_dtype(device, dtype)
    directory = Path(settings.model)
    shared = settings.tensor_parallel > 1
    if shared:
        decoder: Decoder = LeadingDecoder(directory, dtype, settings, device)
    else:
        decoder = load_model(directory, dtype, format_of(settings.quantize, device, dtype), settings.max_context).to(device)
    digest = fingerprint(directory, dtype, settings.quantize, settings.tensor_parallel, settings.kv_dtype, decoder.config)
    vocabulary = load_grammar_vocabulary(directory, decoder.config)
    paired = None
    if settings.lenvm_model is not None:
        lenvm_directory = Path(settings.lenvm_model)
        paired = load_pair(lenvm_directory, directory, settings, dtype, device)
        both = f"{digest} {fingerprint(lenvm_directory, dtype, settings.quantize)} {paired.gamma}"
        digest = hashlib.sha256(both.encode()).hexdigest()[: len(digest)]
    threads = None if shared else step_threads(decoder.config, device, None if paired is None else paired.model.config)
    return assemble(decoder, settings, digest, paired, vocabulary, threads)


def load_grammar_vocabulary(directory: Path, config: ModelConfig) -> Vocabulary | None:
    """Load what grammars need of a model; None where it does not write text, or where its tokeniser or end of text is unknown."""
    path = directory / "tokenizer.json"
    if not (config.lm_head and config.eos_token_ids and path.is_file()):
        return None
    try:
        return load_vocabulary(path.read_bytes(), config.vocab_size, config.eos_token_ids)
    except VocabularyError as error:
        logger.warning("outputs cannot follow grammars: %s", error)
        return None


class PairedLenVM(NamedTuple):
    """A length model and its gamma."""

    model: LenVM
    gamma: float


def load_pair(directory: Path, base: Path, settings: EngineSettings, dtype: torch.dtype, device: torch.device) -> PairedLenVM:
    """Load the length model of a directory. Raises :class:`ModelError` if it cannot serve beside the model in ``base``."""
    architecture = load_config(base)
    if not architecture.lm_head:
        raise ModelError(
            f"A length model guides generations, and the model {base.name} has no language-model head; leave --lenvm-model out."
        )
    check_pairing(base, directory)
    model = load_lenvm(directory, dtype, format_of(settings.quantize, device, dtype)).to(device)
    problem = problem_of("triton", device, model.config, dtype) if device.type == "cuda" else None
    if problem is not None:
        raise ModelError(f"The length model cannot serve here: {problem}.")
    return PairedLenVM(model, gamma_of(directory, settings.lenvm_gamma))


def assemble(
    decoder: Decoder,
    settings: EngineSettings,
    digest: str,
    paired: PairedLenVM | None = None,
    vocabulary: Vocabulary | None = None,
    threads: StepThreads | None = None,
) -> Loop:
    """Build the loop around a loaded model and, if there are, the length model and the vocabulary for grammars. ``threads``: see
    :class:`Runner`."""
    config, on_gpu = decoder.config, decoder.embed.weight.device.type == "cuda"
    compilations = Compilations()
    decoders = [decoder] if paired is None else [decoder, paired.model.decoder]
    kept = [FP8 if settings.kv_dtype == "fp8" and each is decoder else each.embed.weight.dtype for each in decoders]
    memory = adapt_decoder(decoder, settings)
    tokens = settings.max_batched_tokens or (GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS)
    processes = settings.tensor_parallel * settings.machine_engines
    slots = settings.max_total_tokens or default_slots(decoders, kept, processes, tokens)
    attention = make_attention(decoder, slots, settings.attention, settings.kv_dtype)
    running = settings.max_running_requests or default_running_requests(decoders, slots, tokens)
    budget = Budget(tokens, running, settings.reserved_share, settings.max_loras_device if memory is not None else 0)
    description = attention.description
    if isinstance(decoder, LeadingDecoder):
        attention = decoder.lead(attention)
    vision = assemble_vision(decoders, settings, slots)
    overlap = on_gpu if settings.overlap is None else settings.overlap
    rows = settings.prompt_lookup_rows or (GPU_DRAFT_ROWS if on_gpu else CPU_DRAFT_ROWS)
    lookup = LookupSettings(rows, wire.DraftOptions(settings.prompt_lookup), config.eos_token_ids)
    lenvm = None
    if paired is not None:
        compact = not on_gpu and not overlap
        lenvm = _lenvm_runner(paired, settings, slots, budget, config.eos_token_ids, vision.steps, compact=compact)
    graphs = make_graphs(decoder, attention, settings.cuda_graphs, budget, memory)
    step_adapters = None if memory is None else StepAdapters(decoder, memory.slots, memory.rows)
    runner = Runner(decoder, attention, config.eos_token_ids, graphs, lenvm, step_adapters, vision.steps, threads)
    length = (None, None) if paired is None else (paired.model, paired.gamma)
    info = describe(config, settings, slots, digest, *length, grammar=vocabulary is not None)
    arithmetic = arithmetic_of(decoder.embed.weight.dtype, settings.quantize, settings.kv_dtype)
    size = slot_bytes(decoder, kept[0]) * settings.tensor_parallel
    info = msgspec.structs.replace(info, arithmetic=arithmetic, attention=description, vision=vision.info, slot_bytes=size)
    registry = make_registry(memory, decoder, settings, info)

    def make_loop(adapters: AdapterRegistry, structured: StructuredRequests | None, max_waiting: int, max_wait: float) -> Loop:
        lenvm_pool = None if paired is None else SlotPool(slots)
        return Loop(
            runner,
            Scheduler(SlotPool(slots), budget, run_ahead=overlap, lenvm_pool=lenvm_pool, lookup=lookup),
            info,
            max_waiting=max_waiting,
            max_wait_seconds=max_wait,
            overlap=overlap,
            mean_pooling=config.pooling == "mean",
            pad_token_id=config.pad_token_id,
            structured=structured,
            compilations=compilations,
            adapters=adapters,
            images=vision.intake,
        )

    if _compiles(attention.kv.keys.device):
        # Its steps are not counted, and it refuses nothing.
        loop = make_loop(blank_registry(memory, decoder, info), None, max_waiting=16, max_wait=math.inf)
        warm_up(loop, budget, compilations, adapted=memory is not None)
        vision.steps.reset()
        if memory is not None:
            memory.slots.reset()
    compilations.ready()
    structured = None if vocabulary is None else StructuredRequests(vocabulary)
    return make_loop(registry, structured, settings.max_waiting, settings.max_wait_seconds)


def _lenvm_runner(
    paired: PairedLenVM,
    settings: EngineSettings,
    slots: int,
    budget: Budget,
    eos_token_ids: Sequence[int],
    images: StepImages,
    *,
    compact: bool,
) -> LenVMRunner:
    attention = make_attention(paired.model.decoder, slots, settings.attention)
    passes = make_pass_graphs(paired.model, attention.kv, settings.cuda_graphs, budget)
    return LenVMRunner(paired.model, attention, paired.gamma, eos_token_ids, passes, images, compact=compact)


def _compiles(device: torch.device) -> bool:
    """Whether kernels are compiled when they are first launched."""
    return device.type == "cuda"


def make_graphs(
    decoder: Decoder, attention: AttentionBackend, wanted: str, budget: Budget, adapters: AdapterMemory | None = None
) -> list[StepGraphs]:
    """Capture small steps if this is ``wanted`` (one of :data:`~engine.settings.CUDA_GRAPHS`) and possible, and large ones where
    the memory that is left allows it.

    Raises :class:`ModelError` if ``wanted`` is "on" and steps cannot be captured.
    """
    small = _captured("CUDA graphs", decoder, wanted, lambda: _capture(decoder, attention.kv, budget, adapters))
    if small is None:
        return []
    sizes = [size for size in LARGE_BUCKETS if size <= budget.max_batched_tokens]
    if not sizes:
        return [small]
    device = attention.kv.keys.device
    # Each size has two layouts, and with adapters twice as many graphs.
    needed = (2 + 2 * (adapters is not None)) * len(sizes) * GRAPH_BYTES + 2 * step_bytes(decoder, sizes[-1])
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
    if free < needed:
        logger.warning("CUDA graphs of large steps: off, they need %d MiB, and %d are free", needed >> 20, free >> 20)
        return [small]
    large = _captured("CUDA graphs of large steps", decoder, wanted, lambda: _capture_large(decoder, attention, sizes, adapters))
    return [small] if large is None else [small, large]


def make_pass_graphs(model: LenVM, kv: KVCache, wanted: str, budget: Budget) -> PassGraphs | None:
    """Capture the length model's passes over candidates; see :func:`make_graphs`."""
    return _captured("CUDA graphs of the length model", model.decoder, wanted, lambda: _capture_passes(model, kv, budget))


T = TypeVar("T")


def _captured(what: str, decoder: Decoder, wanted: str, capture: Callable[[], T]) -> T | None:
    if wanted == "off":
        return None
    problem = _graphs_problem(decoder)
    if problem is None:
        try:
            return capture()
        except Exception as error:  # an error of CUDA or of Triton's compiler; the engine works without graphs
            problem = f"capturing them failed: {str(error).partition(chr(10))[0].rstrip('.') or type(error).__name__}"
            logger.warning("%s: off, %s", what, problem, exc_info=wanted == "auto")
    elif decoder.embed.weight.is_cuda:
        logger.info("%s: off, %s", what, problem)
    if wanted == "on":
        raise ModelError(f"{what} cannot be used here: {problem}. Start without --cuda-graphs on.")
    return None


def _graphs_problem(decoder: Decoder) -> str | None:
    """Return the reason why steps cannot be captured, as a clause; None if they can."""
    weight = decoder.embed.weight
    if not weight.is_cuda:
        return "they need an NVIDIA GPU"
    if isinstance(decoder, LeadingDecoder):
        return "a model shared by several processes is launched by each of them"
    return problem_of("triton", weight.device, decoder.config, weight.dtype)


def _capture(decoder: Decoder, kv: KVCache, budget: Budget, adapters: AdapterMemory | None) -> StepGraphs:
    """Capture steps of up to ``max_batched_tokens``."""
    buckets = [size for size in BUCKETS if size <= max(budget.max_batched_tokens, BUCKETS[0])]
    attention = FixedTritonAttention(kv, decoder.config.num_heads, max(buckets), decoder.config.attention_specs)
    rows = None if adapters is None else adapters.captured(buckets)
    return StepGraphs(decoder, attention, CudaCapture(kv.keys.device), buckets, rows)


def _capture_large(
    decoder: Decoder, attention: AttentionBackend, sizes: Sequence[int], adapters: AdapterMemory | None
) -> StepGraphs:
    """Capture steps of ``sizes`` with the engine's attention, up to that of the last layer."""
    fixed: FixedAttention
    if isinstance(attention, FlashInferAttention):
        fixed = FixedFlashInfer(attention, max(sizes))
    else:
        fixed = FixedTritonAttention(attention.kv, decoder.config.num_heads, max(sizes), decoder.config.attention_specs)
    rows = None if adapters is None else adapters.captured(sizes)
    return StepGraphs(decoder, fixed, CudaCapture(attention.kv.keys.device), sizes, rows, above=BUCKETS[-1], whole=False)


def _counted_parts(budget: Budget, most: int) -> list[int]:
    """Numbers of parts of the passes over needed candidates: up to ``most``, which other passes have, and for as many rows as the
    requests that run at once."""
    covering = next((parts for parts in COUNTED_PARTS if parts >= budget.max_running_requests), COUNTED_PARTS[-1])
    return [parts for parts in COUNTED_PARTS if parts <= min(max(most, covering), budget.max_batched_tokens)]


def _capture_passes(model: LenVM, kv: KVCache, budget: Budget) -> PassGraphs:
    """Capture passes for as many rows as a step may draw for."""
    capture = CudaCapture(kv.keys.device)
    buckets = [parts for parts in PARTS if parts <= max(budget.max_batched_tokens, PARTS[0])]
    counted = _counted_parts(budget, buckets[-1])
    attention = [FixedBranches(kv, max([*buckets, *counted]), width) for width in WIDTHS]
    graphs = PassGraphs(model, attention, capture, buckets)
    try:
        graphs.add_counted(counted)
    except Exception:  # an error of CUDA or of Triton's compiler; the passes over all candidates are captured
        logger.warning("CUDA graphs of the length model: none for needed candidates, capturing them failed", exc_info=True)
    return graphs
