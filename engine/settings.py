"""Settings of an engine pod: the one definition of every option.

:mod:`engine.server.options` derives the command line from it, ``python -m tests.docs.generate`` the table in docs/settings.md, and
the tests check the chart's values against it. ``yardstick serve`` passes options on to this command line. The first sentence of a
docstring is the help of the option.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
KV_DTYPES = ("auto", "fp8")
QUANTIZE = ("fp8", "int8")
DEQUANTIZE = ("auto", "on", "off")
ATTENTION_BACKENDS = {
    "native": "yardstick_llm.engine.runner.attention.native:NativeAttention",
    "reference": "yardstick_llm.engine.runner.attention.reference:ReferenceAttention",
    "triton": "yardstick_llm.engine.runner.attention.triton:TritonAttention",
    "flashinfer": "yardstick_llm.engine.runner.attention.flashinfer:FlashInferAttention",
}
"""Attention backends and their classes, which are imported where one of them is chosen."""
ATTENTION = ("auto", *ATTENTION_BACKENDS)
CUDA_GRAPHS = ("auto", "on", "off")
FORECASTS = ("none", "report", "shortest-first")
LORA_MODULES = ("score", "lm_head", "all")

RESERVED_SHARE = 0.25
"""Default of :attr:`EngineSettings.reserved_share`."""
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 8192
"""Defaults of :attr:`EngineSettings.max_batched_tokens`."""
RUNNING_REQUESTS, MAX_RUNNING_REQUESTS = 256, 1024
"""The default of :attr:`EngineSettings.max_running_requests`, and its largest value on a GPU."""


def choices(*values: str, unset: str | None = None) -> Meta:
    """A setting with one of these values. unset: the default in words, where it depends on the machine."""
    return Meta(extra={"choices": values, "unset": unset})


def unset(text: str) -> Meta:
    """A setting whose default, None, means what ``text`` says."""
    return Meta(extra={"unset": text})


MOST_SECONDS = 1e9
"""Bound of all times, 32 years: it excludes infinity and not-a-number."""

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, lt=MOST_SECONDS)]
Share = Annotated[float, Meta(gt=0, lt=1)]


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the model and its loop."""

    model: str
    """A model directory in Hugging Face's layout, a hub id such as ``Qwen/Qwen3-0.6B``, or a GGUF file: its path, or
    ``ORG/NAME:FILE.gguf`` on the hub. Of a file in parts, name the first one."""
    name: Annotated[str, unset("last part of ``--model`` without ``.gguf``, or the repository of a snapshot in the hub's cache")]
    """The name that clients use for the model."""
    revision: Annotated[str | None, unset("the repository's main branch")] = None
    """Branch, tag or commit of a hub repository. A commit pins the model: a restarted pod serves the same weights."""
    lenvm_model: Annotated[str | None, unset("none")] = None
    """A length-value model for guided generations: a directory or a hub id. Its vocabulary must be that of the model."""
    lenvm_revision: Annotated[str | None, unset("the repository's main branch")] = None
    """Branch, tag or commit of the length model's repository."""
    lenvm_gamma: Annotated[Share | None, unset("``lenvm.json`` beside the weights, or 0.997")] = None
    """The discount gamma of the length model, in (0, 1)."""
    device: Annotated[str | None, choices(*DEVICES, unset="a GPU where there is one")] = None
    """Device of the model."""
    dtype: Annotated[str | None, choices(*DTYPES, unset="bfloat16 on a GPU, float32 on a CPU")] = None
    """Number format of weights, keys and values."""
    kv_dtype: Annotated[str, choices(*KV_DTYPES)] = "auto"
    """Number format of the keys and values that are kept. ``auto``: that of the model. ``fp8``: one byte for each number, so that
    twice as many tokens fit. Those of a length model stay in its own format. See Keys and values in FP8 below.
    """
    quantize: Annotated[str | None, choices(*QUANTIZE, unset="none")] = None
    """Compute the layers' matrix products in 8 bits, weights and activations, with a scale for each row: ``fp8`` on a GPU, ``int8``
    on a CPU, in float32 or bfloat16. See Quantisation below.
    """
    dequantize: Annotated[str, choices(*DEQUANTIZE)] = "auto"
    """Make the weights of a quantised checkpoint dense, in ``--dtype``, as they are loaded. ``off`` multiplies with their codes
    where the device can, which takes their memory. ``auto``: ``off`` on a GPU and with ``--quantize int8``; otherwise on a CPU
    ``on`` where half of the free memory suffices. See [models.md](models.md#quantised-checkpoints).
    """
    attention: Annotated[str, choices(*ATTENTION)] = "auto"
    """The attention backend. ``native`` serves a CPU in float32, ``reference`` any CPU, ``triton`` and ``flashinfer`` a GPU. The
    log names the one that ``auto`` chose.
    """
    cuda_graphs: Annotated[str, choices(*CUDA_GRAPHS)] = "auto"
    """Capture steps at the start and replay them, which saves kernel launches: those of up to 1,024 tokens, and larger ones if a GB
    of memory is left. With a length model, the same for its passes over the candidates of up to 256 guided draws; one with more
    than eight counts as several. ``auto`` captures on a GPU without ``--tensor-parallel``; where a capture fails, the log says why
    and every step is launched. With ``on`` the engine then does not start.
    """
    max_total_tokens: Annotated[Count | None, unset("a quarter of free memory, at most 131,072; on a GPU up to four fifths")] = None
    """KV-cache size in tokens, for each model."""
    reserved_share: Share = RESERVED_SHARE
    """Part of the slots that items of ``item_first`` never take from generations and queries, in use or cached."""
    max_batched_tokens: Annotated[Count | None, unset(f"{CPU_BATCHED_TOKENS:,} on a CPU, {GPU_BATCHED_TOKENS:,} on a GPU")] = None
    """Tokens computed in one step, scoring and decoding together. While several tenants share the engine, a step has a quarter
    of them, because a new request waits for the step in progress.
    """
    max_context: Annotated[Count | None, unset("the model's; its original context with rotations of the type longrope")] = None
    """Longest prompt and output together, in tokens. A model whose rotations have the type longrope is served with its factors for
    long contexts if this is more than its original context, and with those for short ones otherwise; see [models.md](models.md).
    """
    max_running_requests: Annotated[
        Count | None, unset(f"{RUNNING_REQUESTS}; on a GPU up to {MAX_RUNNING_REQUESTS:,}, one for each 1,024 slots")
    ] = None
    """Requests computed at once."""
    prompt_lookup: Annotated[int, Meta(ge=0, le=32)] = 0
    """Most draft tokens of a generation in one step, where its request does not say; 0 for no drafts. They change no token."""
    forecast: Annotated[str, choices(*FORECASTS)] = "none"
    """Let the length model forecast how many tokens each generation will have, which takes one step before its prompt is computed:
    ``report`` adds it to answers and metrics, and ``shortest-first`` also begins the shortest of a tenant's waiting generations
    first. See [length.md](length.md#forecasts).
    """
    max_waiting: Count = 4096
    """Requests queued before new ones are refused, or displace requests of the tenant with most in the queue."""
    max_wait_seconds: Seconds = 30.0
    """Longest expected queue time of a request, at the pace of the last seconds. Requests that would wait longer are refused."""
    stall_seconds: Seconds = 120.0
    """Time that a step may take before the engine is not ready. It holds for a loop that computes; a loop that hangs is
    noticed after two seconds. A first step of 2,048 tokens through 7 billion float32 parameters takes about as long on four
    cores. Later steps may take four times the longest step so far in any case.
    """
    overlap: bool | None = None
    """Process the results of a step while the next one is computed. None: on a GPU. Not an option of the command line."""
    fused_products: bool = False
    """Compute products on a Hopper GPU in one launch with what follows them, see :mod:`engine.models.fused`. What
    it saves has not been measured. Not an option of the command line.
    """
    threads: Annotated[Count | None, unset("one for each core that the container may use, divided among the processes")] = None
    """CPU threads of the model's arithmetic, in each process."""
    machine_engines: Count = 1
    """Engines that share the cores and the memory of this machine or container. The default of ``--threads`` is divided by it, and
    so is on a CPU the memory that the default of ``--max-total-tokens`` takes. ``yardstick serve --engines`` sets it.
    """
    tensor_parallel: Count = 1
    """Processes that share the model, each with a part of every layer and of the keys and values, on all nodes together. Must
    divide the numbers of heads, key-value heads and feed-forward columns.
    """
    expert_parallel: Count = 1
    """Processes among which the experts of a mixture of experts are shared whole: 1, so that each process of ``--tensor-parallel``
    has a part of every expert, or the number of ``--tensor-parallel``, so that each has some of the experts.
    """
    nnodes: Count = 1
    """Machines or pods that share the model; each starts an engine with the same options and has as many of the processes. Node 0
    serves requests, the others only health and metrics. See [operations.md](operations.md#engines-over-several-nodes).
    """
    node_rank: Annotated[int, Meta(ge=0)] = 0
    """Number of this node, from 0 up."""
    dist_init_addr: Annotated[str | None, unset("required with ``--nnodes``")] = None
    """``HOST:PORT`` where node 0 listens for the others, the same on all nodes. They prove with ``--token-file`` that they belong
    to it.
    """
    dist_token_file: str | None = None
    """The ``--token-file`` of a node. Not an option of the command line."""
    lora: list[str] = []
    """A LoRA adapter in PEFT's format to load at the start, as ``NAME=PATH``; may be given several times. PATH is a directory or a
    hub id, which ``@`` and a branch, tag or commit may follow. See [lora.md](models.md#lora-adapters).
    """
    lora_directory: Annotated[str | None, unset("none")] = None
    """A watched directory: each directory in it is a LoRA adapter of that name, loaded, replaced and unloaded as it changes."""
    lora_root: Annotated[str | None, unset("nothing is loaded through HTTP")] = None
    """The directory below which ``POST /adapters/load`` may load LoRA adapters."""
    max_loras: Annotated[int, Meta(ge=1, le=4096)] = 64
    """LoRA adapters in host memory."""
    max_loras_device: Annotated[int, Meta(ge=1, le=1024)] = 16
    """LoRA adapters in the device's memory, and in one step. Each place is as large as an adapter of ``--max-lora-rank`` on all
    projections; the log says how many bytes that is.
    """
    max_lora_rank: Annotated[int, Meta(ge=1, le=128)] = 64
    """Largest rank of a LoRA adapter."""
    lora_modules: Annotated[str, choices(*LORA_MODULES)] = "score"
    """Modules that a LoRA adapter may bring whole (``modules_to_save``): ``score``, or ``lm_head`` too, or ``all``, which includes
    ``embed_tokens``. Each place of ``--max-loras-device`` has room for the last two, vocabulary × hidden size numbers each.
    """

    max_image_tokens: Count = 4096
    """Tokens of the largest image; gateways reduce larger ones. One token of Qwen2.5-VL is 28 by 28 pixels."""
    image_cache_mib: Count = 512
    """Embeddings of images that are kept on the device, in MiB, beside those that the step needs."""

    @property
    def local_processes(self) -> int:
        """Processes of the model on this node."""
        return self.tensor_parallel // self.nnodes

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine takes LoRA adapters."""
        return bool(self.lora or self.lora_directory or self.lora_root)


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the pod's HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; ``*`` means all addresses, of IPv4 and IPv6. Without ``--token-file`` everyone who reaches it can use
    the engine."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8100
    """Port to listen on."""
    health_port: Annotated[Annotated[int, Meta(ge=1, le=65535)] | None, unset("none")] = None
    """A second port with ``/livez``, ``/readyz`` and ``/metrics`` only, for probes and Prometheus."""
    token_file: Annotated[str | None, unset("none")] = None
    """File of bearer tokens, one a line. Gateways must send one of them. The file is read again when it changes."""
    tracing_endpoint: Annotated[str | None, unset("``OTEL_EXPORTER_OTLP_ENDPOINT``, or none")] = None
    """Collector of traces: the URL of its OTLP/HTTP port, such as ``http://collector:4318``. The engine traces the requests that
    its gateways trace."""
    tracing_service: Annotated[str | None, unset("``OTEL_SERVICE_NAME``, or ``yardstick-engine``")] = None
    """Name of the engine in traces."""
    grace_seconds: Annotated[float, Meta(ge=0, lt=MOST_SECONDS)] = 30.0
    """Time that running requests have to end after SIGTERM. New requests are refused at once."""
