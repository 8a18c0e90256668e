"""The loop's composition root: from settings to a loaded model with its memory and scheduler."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from yardstick_llm.engine import wire
from yardstick_llm.engine.kvcache.prefix_cache import SlotPool
from yardstick_llm.engine.loop.build_whole import build_whole_loop, check_whole_settings
from yardstick_llm.engine.loop.describe import describe
from yardstick_llm.engine.loop.images import ImageIntake
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.loop.warm_up import warm_up
from yardstick_llm.engine.models.config import ModelConfig, load_config
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.encoder_config import EncoderConfig, is_encoder, load_encoder_config
from yardstick_llm.engine.models.files import ModelError, is_gguf
from yardstick_llm.engine.models.formats.published import method_of
from yardstick_llm.engine.models.formats.quantization import FORMATS, arithmetic_of, check_kv_dtype, format_of
from yardstick_llm.engine.models.fused import fuse_products
from yardstick_llm.engine.models.gguf.tokenizer import tokenizer_json
from yardstick_llm.engine.models.lenvm import (
    LenVM,
    calibration_of,
    check_pairing,
    facts_of,
    gamma_of,
    is_adapter,
    load_lenvm,
    unit_tokens_of,
)
from yardstick_llm.engine.models.loader import dense_bytes, fingerprint, layers_format, load_model
from yardstick_llm.engine.models.lora.config import AdapterError
from yardstick_llm.engine.models.lora.linear import CapturedRows, StepRows, adapt
from yardstick_llm.engine.models.lora.reader import AdapterReader, blank_adapter, capacity_of
from yardstick_llm.engine.models.lora.registry import AdapterRegistry
from yardstick_llm.engine.models.lora.slots import WHOLE, DeviceSlots, Layout
from yardstick_llm.engine.models.source import ADAPTER_FILES, locate, located, split_revision
from yardstick_llm.engine.models.vision.tower import VisionDecoder
from yardstick_llm.engine.requests.images import EmbeddingCache
from yardstick_llm.engine.runner.attention.base import FixedBranches, KVCache
from yardstick_llm.engine.runner.attention.select import make_attention, problem_of
from yardstick_llm.engine.runner.capturing import captured, make_graphs
from yardstick_llm.engine.runner.distributed.shard import LeadingDecoder
from yardstick_llm.engine.runner.graphs import Compilations, CudaCapture
from yardstick_llm.engine.runner.images import StepImages
from yardstick_llm.engine.runner.lenvm.draws import LenVMRunner
from yardstick_llm.engine.runner.lenvm.graphs import COUNTED_PARTS, PARTS, PassGraphs
from yardstick_llm.engine.runner.lenvm.passes import WIDTHS
from yardstick_llm.engine.runner.machine import (
    StepThreads,
    available_memory,
    default_running_requests,
    default_slots,
    device_of,
    dtype_of,
    set_threads,
    slot_bytes,
    step_threads,
    warn_of_slow_dtype,
)
from yardstick_llm.engine.runner.runner import Runner, StepAdapters
from yardstick_llm.engine.scheduling.drafting import LookupSettings
from yardstick_llm.engine.scheduling.scheduler import Budget, Scheduler
from yardstick_llm.engine.scheduling.structured_requests import StructuredRequests
from yardstick_llm.engine.settings import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS, EngineSettings
from yardstick_llm.engine.structured.checker import Vocabulary, VocabularyError, load_vocabulary
from yardstick_llm.kernels.quantize import FP8

logger = logging.getLogger(__name__)


CPU_BATCHED_PATCHES, GPU_BATCHED_PATCHES = 4096, 16_384
"""Patches of images that a vision tower computes in one step, because other requests wait for the step. A larger image is computed
alone."""
DENSE_SHARE = 0.5
"""Part of the free memory that dequantised weights may take on a CPU, unless ``--dequantize on`` asks for them."""
CPU_DRAFT_ROWS, GPU_DRAFT_ROWS = 32, 128
"""Decoding rows of a step, drafts included, up to which it has drafts. With more, each row costs as much as its token. Measured for
CPUs (docs/generation.md), not for GPUs."""


class Vision(NamedTuple):
    """The parts of a loop that images need."""

    steps: StepImages
    intake: ImageIntake | None
    """None where the model reads no images."""
    info: wire.VisionInfo | None


def assemble_vision(decoders: Sequence[Decoder], settings: EngineSettings, slots: int) -> Vision:
    """decoders: the main model's and, if there is one, the length model's; slots: of each."""
    towers = {bool(place): decoder for place, decoder in enumerate(decoders) if isinstance(decoder, VisionDecoder)}
    if False not in towers:
        return Vision(StepImages(), None, None)
    config, weight = towers[False].config, towers[False].embed.weight
    assert config.vision is not None
    patches = GPU_BATCHED_PATCHES if weight.is_cuda else CPU_BATCHED_PATCHES
    token_bytes = {key: each.config.hidden_size * each.embed.weight.element_size() for key, each in towers.items()}
    cache = EmbeddingCache(token_bytes, settings.image_cache_mib << 20, patches)
    vision, side = config.vision, config.vision.patch_size * config.vision.merge_size
    info = wire.VisionInfo(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        min_pixels=vision.preprocessing.min_pixels,
        max_pixels=max(side**2, min(vision.preprocessing.max_pixels, settings.max_image_tokens * side**2)),
        image_token=vision.image_token,
        max_tokens=min(config.max_context, slots),
    )
    return Vision(StepImages(towers, cache), ImageIntake(vision, cache), info)


MODULES: dict[str, tuple[str, ...]] = {"score": (), "lm_head": ("lm_head",), "all": WHOLE}
"""Whole modules by :attr:`~engine.settings.EngineSettings.lora_modules`."""


class AdapterMemory(NamedTuple):
    """The device's side of adapters."""

    layout: Layout
    slots: DeviceSlots
    rows: StepRows
    max_rank: int

    def captured(self, buckets: Sequence[int]) -> CapturedRows:
        """The rows of steps that are captured for ``buckets`` of tokens."""
        return CapturedRows(self.rows, self.slots, self.max_rank, buckets)


def check_settings(settings: EngineSettings, config: ModelConfig) -> None:
    """Raise :class:`ModelError` for settings that do not go together."""
    shared = settings.tensor_parallel > 1
    if settings.takes_adapters and shared:
        raise ModelError("LoRA adapters cannot be used with --tensor-parallel; leave one of the two out.")
    if settings.takes_adapters and settings.kv_dtype != "auto":
        raise ModelError("LoRA adapters cannot be used with --kv-dtype fp8, whose scales hold for the base model; leave one out.")
    if settings.dequantize == "off" and settings.quantize == "fp8":
        raise ModelError(
            "--dequantize off cannot be used with --quantize fp8, which converts dense weights; leave one of the two out."
        )
    if settings.expert_parallel not in (1, settings.tensor_parallel):
        raise ModelError(
            f"--expert-parallel is {settings.expert_parallel}, but must be 1 or --tensor-parallel, which is "
            f"{settings.tensor_parallel}."
        )
    if config.vision is not None and shared:
        raise ModelError(f"A {config.architecture} has a vision tower, so --tensor-parallel cannot share it; leave the option out.")


def adapt_decoder(decoder: Decoder, settings: EngineSettings) -> AdapterMemory | None:
    """Reserve the device's memory and give the decoder projections with adapters; None where the engine takes none."""
    if not settings.takes_adapters:
        return None
    layout, weight = Layout(decoder.config), decoder.embed.weight
    capacity = capacity_of(layout, settings.max_lora_rank)
    modules = MODULES[settings.lora_modules]
    slots = DeviceSlots(layout, settings.max_loras_device, capacity, weight.device, weight.dtype, modules)
    size = (capacity + len(modules) * layout.vocab_size * layout.hidden_size) * weight.dtype.itemsize / 2**20
    logger.info("LoRA: %d places of %.0f MiB on the device, rank %d at most", slots.count, size, settings.max_lora_rank)
    rows = StepRows()
    adapt(decoder, layout, rows, slots.products, fused=_fuses(weight.device), embeddings="embed_tokens" in modules)
    return AdapterMemory(layout, slots, rows, settings.max_lora_rank)


def _fuses(device: torch.device) -> bool:
    """Whether operations behind projections make additions. On a CPU, this would save nothing."""
    return device.type == "cuda"


def make_registry(memory: AdapterMemory | None, decoder: Decoder, settings: EngineSettings, info: wire.Info) -> AdapterRegistry:
    """The registry, with the adapters of ``--lora``. Raises :class:`ModelError` if one of them cannot be loaded."""
    if memory is None:
        return AdapterRegistry()
    weight = decoder.embed.weight
    modules = MODULES[settings.lora_modules]
    reader = AdapterReader(memory.layout, info, weight.dtype, settings.max_lora_rank, pinned=weight.is_cuda, modules=modules)
    registry = AdapterRegistry(reader, memory.slots, settings.max_loras)
    for given in settings.lora:
        name, equals, path = given.partition("=")
        if not equals or not path:
            raise ModelError(f"--lora is {given!r:.80}, and must be NAME=PATH.")
        try:
            registry.load(name, locate(*split_revision(path), files=ADAPTER_FILES))
        except (AdapterError, ModelError) as error:
            raise ModelError(f"The LoRA adapter {name} cannot be loaded. {error}") from None
    return registry


def blank_registry(memory: AdapterMemory | None, decoder: Decoder, info: wire.Info) -> AdapterRegistry:
    """The registry of the engine's start; in an engine with adapters it has the blank one alone."""
    if memory is None:
        return AdapterRegistry()
    weight = decoder.embed.weight
    return AdapterRegistry.of(blank_adapter(memory.layout, info, weight.dtype, pinned=weight.is_cuda))


def build_loop(settings: EngineSettings) -> Loop:
    """Load the model and build the loop around it. Raises :class:`ModelError`.

    Only for a process that computes nothing else, because operations of the calling thread may get no other threads from here on.
    """
    settings = located(settings)
    directory = Path(settings.model)
    model = load_encoder_config(directory) if is_encoder(directory) else load_config(directory)
    if is_whole := isinstance(model, EncoderConfig) or model.bidirectional:
        check_whole_settings(settings, model)
    else:
        check_settings(settings, model)
    set_threads(settings)
    device = device_of(settings)
    dtype = dtype_of(settings, device)
    warn_of_slow_dtype(device, dtype)
    if settings.quantize is not None:
        FORMATS[settings.quantize].check_device(device, dtype)
    if settings.kv_dtype != "auto":
        check_kv_dtype(device, dtype)
    if is_whole:
        return build_whole_loop(settings, model, device, dtype)
    shared = settings.tensor_parallel > 1
    keeps = keeps_codes(directory, settings, dtype, device)
    form = layers_format(settings, device, dtype, keeps_codes=keeps)
    quantize = form if keeps else settings.quantize
    if shared:
        settings = msgspec.structs.replace(settings, dequantize="off" if keeps else "on")
        decoder: Decoder = LeadingDecoder(directory, dtype, settings, device)
    else:
        decoder = load_model(directory, dtype, form, settings.max_context, device).to(device)
    digest = fingerprint(directory, dtype, quantize, settings.tensor_parallel, settings.kv_dtype, decoder.config)
    vocabulary = load_grammar_vocabulary(directory, decoder.config)
    paired = None
    if settings.lenvm_model is not None:
        lenvm_directory = Path(settings.lenvm_model)
        paired = load_pair(lenvm_directory, directory, settings, dtype, device)
        both = f"{digest} {fingerprint(lenvm_directory, dtype, settings.quantize)} {paired.gamma}"
        digest = hashlib.sha256(both.encode()).hexdigest()[: len(digest)]
    lenvm = None if paired is None else paired.model.config
    threads = None if shared else step_threads(decoder.config, device, lenvm, settings.quantize)
    return assemble(decoder, settings, digest, paired, vocabulary, threads)


def keeps_codes(directory: Path, settings: EngineSettings, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether layers multiply with the codes of a quantised checkpoint; see :attr:`EngineSettings.dequantize`."""
    method = method_of(directory)
    if method is None or settings.quantize == "fp8" or settings.dequantize == "on":
        return False
    needed, asked = dense_bytes(directory, dtype), settings.dequantize == "off" or settings.quantize == "int8"
    keeps = asked or device.type == "cuda" or needed > available_memory() * DENSE_SHARE
    what = "layers multiply with its codes" if keeps else "they are dequantised"
    logger.info("weights of the format %s: %s; dense weights take %d MiB (--dequantize)", method, what, needed >> 20)
    return keeps


def load_grammar_vocabulary(directory: Path, config: ModelConfig) -> Vocabulary | None:
    """Load what grammars need of a model; None where it does not write text, or where its tokeniser or end of text is unknown."""
    path = directory / "tokenizer.json"
    if not (config.lm_head and config.eos_token_ids and (is_gguf(directory) or path.is_file())):
        return None
    try:
        written = tokenizer_json(directory) if is_gguf(directory) else path.read_bytes()
        return load_vocabulary(written, config.vocab_size, config.eos_token_ids)
    except VocabularyError as error:
        logger.warning("outputs cannot follow grammars: %s", error)
        return None


def spellings_of(vocabulary: Vocabulary | None) -> list[bytes]:
    """Return what each token adds to a text; empty without a vocabulary."""
    if vocabulary is None:
        return []
    controls = set(vocabulary.controls)
    return [b"" if id in controls else spelling for id, spelling in enumerate(vocabulary.tokens)]


class PairedLenVM(NamedTuple):
    """A length model and what is known of it."""

    model: LenVM
    gamma: float
    calibration: wire.Calibration | None = None
    unit_tokens: Mapping[wire.LengthUnit, float] = {}


def load_pair(directory: Path, base: Path, settings: EngineSettings, dtype: torch.dtype, device: torch.device) -> PairedLenVM:
    """Load the length model of a directory. Raises :class:`ModelError` if it cannot serve beside the model in ``base``."""
    architecture = load_config(base)
    if not architecture.lm_head:
        raise ModelError(
            f"A length model guides generations, and the model {base.name} has no language-model head; leave --lenvm-model out."
        )
    check_pairing(base, directory)
    trained = facts_of(directory).get("training", {}).get("init_fingerprint")
    if is_adapter(directory) and trained != fingerprint(base, torch.float32):
        logger.warning("the length model %s adds to other weights than those of %s; evaluate it first", directory.name, base.name)
    model = load_lenvm(directory, dtype, format_of(settings.quantize, device, dtype), base=base).to(device)
    problem = problem_of("triton", device, model.config, dtype) if device.type == "cuda" else None
    if problem is not None:
        raise ModelError(f"The length model cannot serve here: {problem}.")
    gamma, own = gamma_of(directory, settings.lenvm_gamma), gamma_of(directory, None)
    return PairedLenVM(model, gamma, calibration_of(directory) if gamma == own else None, unit_tokens_of(directory))


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
    if settings.fused_products:
        fuse_products(decoder)
    tokens = settings.max_batched_tokens or (GPU_BATCHED_TOKENS if on_gpu else CPU_BATCHED_TOKENS)
    processes = settings.local_processes * settings.machine_engines
    slots = settings.max_total_tokens or default_slots(decoders, kept, processes, tokens)
    attention = backend = make_attention(decoder, slots, settings.attention, settings.kv_dtype)
    running = settings.max_running_requests or default_running_requests(decoders, slots, tokens)
    budget = Budget(tokens, running, settings.reserved_share, settings.max_loras_device if memory is not None else 0)
    description, wanted = attention.description, settings.cuda_graphs
    if isinstance(decoder, LeadingDecoder):
        if wanted == "auto":  # captured collectives have not run on GPUs yet
            wanted = "off"
        attention = decoder.lead(backend, tokens if wanted == "on" else 0)
    vision = assemble_vision(decoders, settings, slots)
    overlap = on_gpu if settings.overlap is None else settings.overlap
    rows = GPU_DRAFT_ROWS if on_gpu else CPU_DRAFT_ROWS
    lookup = LookupSettings(rows, wire.DraftOptions(settings.prompt_lookup), config.eos_token_ids)
    lenvm = None
    if paired is not None:
        compact = not on_gpu and not overlap
        own = make_attention(paired.model.decoder, slots, settings.attention)
        passes = make_pass_graphs(paired.model, own.kv, settings.cuda_graphs, budget)
        ends, calibration = config.eos_token_ids, paired.calibration
        lenvm = LenVMRunner(paired.model, own, paired.gamma, ends, passes, vision.steps, calibration, compact=compact)
    graphs = make_graphs(decoder, backend, wanted, tokens, None if memory is None else memory.captured)
    step_adapters = None if memory is None else StepAdapters(decoder, memory.slots, memory.rows)
    spelled = spellings_of(vocabulary), None if paired is None else paired.unit_tokens
    runner = Runner(decoder, attention, config.eos_token_ids, graphs, lenvm, step_adapters, vision.steps, threads, *spelled)
    length = (None, None) if paired is None else (paired.model, paired.gamma)
    calibration = None if paired is None else paired.calibration
    info = describe(config, settings, slots, digest, *length, calibration=calibration, grammar=vocabulary is not None)
    arithmetic = arithmetic_of(decoder.embed.weight.dtype, settings.quantize, settings.kv_dtype, decoder.weight_format)
    size = slot_bytes(decoder, kept[0]) * settings.tensor_parallel
    info = msgspec.structs.replace(info, arithmetic=arithmetic, attention=description, vision=vision.info, slot_bytes=size)
    registry = make_registry(memory, decoder, settings, info)

    forecasts = settings.forecast != "none"
    if forecasts and paired is None:
        raise ModelError("Forecasts come from a length model; give one with --lenvm-model, or leave --forecast out.")

    def make_loop(
        adapters: AdapterRegistry,
        structured: StructuredRequests | None,
        max_waiting: int,
        max_wait: float,
        *,
        forecasts: bool = False,
    ) -> Loop:
        lenvm_pool = None if paired is None else SlotPool(slots)
        return Loop(
            runner,
            Scheduler(SlotPool(slots), budget, run_ahead=overlap, lenvm_pool=lenvm_pool, lookup=lookup, forecasts=forecasts),
            info,
            max_waiting=max_waiting,
            max_wait_seconds=max_wait,
            overlap=overlap,
            mean_pooling=config.pooling is not None and config.pooling.mode == "mean",
            pad_token_id=config.pad_token_id,
            structured=structured,
            compilations=compilations,
            adapters=adapters,
            images=vision.intake,
            shortest_first=settings.forecast == "shortest-first",
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
    return make_loop(registry, structured, settings.max_waiting, settings.max_wait_seconds, forecasts=forecasts)


def _compiles(device: torch.device) -> bool:
    """Whether kernels are compiled when they are first launched."""
    return device.type == "cuda"


def make_pass_graphs(model: LenVM, kv: KVCache, wanted: str, budget: Budget) -> PassGraphs | None:
    """Capture the length model's passes over candidates; see :func:`~engine.runner.capturing.make_graphs`."""
    return captured("CUDA graphs of the length model", model.decoder, wanted, lambda: _capture_passes(model, kv, budget))


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
