"""Wall time and kernels of full scoring steps, or of decoding steps: ``python -m benchmarks step``.

The engine's loop runs in this process on random weights, with enough requests of 120/180/10 queued that every measured step is
full: the step in which the queue ends is not among them. With ``--decode``, texts of prompts of 96 tokens get a token in each
measured step. The wall time is that of steps without the profiler; torch's profiler
then gives each kernel of as many further steps. *Busy* is the time in which at least one kernel runs, and the gap is the rest of
the wall time. On a CPU, operators take the place of kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.table import Table
from safetensors.torch import save_file
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.engines import Engine
from benchmarks.engine.records import Records, add_output, describe, opened
from benchmarks.engine.roofline import layer_flops, measure_peaks
from benchmarks.engine.subject import SHAPES, Subject, Workload, default_device, random_decoder
from benchmarks.engine.writing import Writing
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.lora.slots import Layout
from yardstick_llm.engine.settings import CPU_BATCHED_TOKENS, DTYPES, GPU_BATCHED_TOKENS, QUANTIZE

WARM_STEPS, PROMPT = 4, 96
SECONDS = 15.0
"""Time that a measurement must have left to begin."""
NONE, RANK = "none", 16
SHOWN = 24
"""Kernels of the table."""
KINDS = (
    ("products with what follows", re.compile("linear_(silu_mul|qk_norm_rope)")),
    ("qk_norm_rope_write", re.compile("qk_norm_rope|rope_write")),
    ("silu_mul", re.compile("silu|lora_gate")),
    ("quantize_rows", re.compile("quantize_rows")),
    ("norms", re.compile("rms_?norm", re.IGNORECASE)),
    ("attention", re.compile("flashinfer|attention|merge_state", re.IGNORECASE)),
    ("label_logprobs", re.compile("logsumexp|label_logprobs")),
    (
        "products",
        re.compile(r"nvjet|gemm|cutlass|cublas|splitk|_linear|aten::(addmm|mm|linear|matmul)|mkldnn|onednn", re.IGNORECASE),
    ),
)
"""Kinds of kernels by their names; the first that matches counts."""
OTHER = "other"


def main(arguments: Sequence[str]) -> int:
    """Measure each number of tokens, print tables and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks step", description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small", help="shape of the random model (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(%(default)s)")
    about = "what the layers' matrix products compute in, one measurement for each; none: --dtype (%(default)s)"
    parser.add_argument("--quantize", choices=(NONE, *QUANTIZE), nargs="+", default=[NONE], help=about)
    parser.add_argument("--max-batched-tokens", type=int, nargs="+", help="tokens of a step, one measurement for each")
    about = "decode this number of texts, one measurement for each, in place of scoring"
    parser.add_argument("--decode", type=int, nargs="+", default=(), metavar="ROWS", help=about)
    parser.add_argument("--steps", type=int, default=8, help="measured without the profiler, and as many with it (%(default)s)")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters of rank 16 that requests use in turn (%(default)s)")
    about = "compute products in one launch with what follows, where kernels take them: on a Hopper GPU"
    parser.add_argument("--fused", action="store_true", help=about)
    add_output(parser)
    asked = parser.parse_args(arguments)
    records = opened(asked)
    device, config, dtype = default_device(), SHAPES[asked.shape], getattr(torch, asked.dtype)
    usual = GPU_BATCHED_TOKENS if device.type == "cuda" else CPU_BATCHED_TOKENS
    summary: dict[str, Any] = {"bench": "step", "machine": describe(), "model": asked.shape, "peaks": {}, "steps": {}}
    summary |= {"adapters": asked.adapters, "fused": asked.fused}
    options = {"fused_products": asked.fused}
    for named in asked.quantize:
        quantize = None if named == NONE else named
        form = Subject(Path(), config, asked.dtype, quantize).format
        peaks = records.store.measure(f"{form}: peaks", 5.0, partial(peaks_of, device, dtype, quantize))
        decoder = cache(partial(random_decoder, config, dtype=dtype, device=device, quantize=quantize))
        found: dict[str, Any] = {}
        sizes = asked.max_batched_tokens or [usual]
        for tokens, rows in [(sizes[0], rows) for rows in asked.decode] or [(size, 0) for size in sizes]:
            name = f"{rows} decoding rows" if rows else f"{tokens} tokens"
            work = partial(measure, decoder, asked.dtype, tokens, asked.steps, asked.adapters, rows, **options)
            if result := records.store.measure(f"{form}: {name}", SECONDS, work):
                found[str(rows or tokens)] = result | speeds(config, result, peaks or {}, rows)
                show(f"{asked.shape}, {form}, {name}{'' if rows else ' a step, at most'}", found[str(rows or tokens)], records)
        summary["peaks"][form], summary["steps"][form] = peaks, found
    summary |= {"left_out": records.store.left_out}
    records.finish(summary)
    return 0


def peaks_of(device: torch.device, dtype: torch.dtype, quantize: str | None) -> dict[str, float | None]:
    """Return :func:`benchmarks.engine.roofline.measure_peaks` by name."""
    return vars(measure_peaks(device, dtype, quantize))


def adapted(decoder: Decoder, dtype: str, tokens: int, adapters: int, rows: int, **options: Any) -> tuple[Engine, list[str]]:
    """Return an engine with adapters of all projections with random weights, and their digests; [""] without adapters."""
    options |= {"max_batched_tokens": tokens} | ({"max_running_requests": rows} if rows else {})
    if not adapters:
        return Engine(decoder, dtype, **options), [""]
    with tempfile.TemporaryDirectory(prefix="yardstick-bench-") as root:
        for seed in range(adapters):
            generator, tensors = torch.Generator().manual_seed(seed), {}
            for product in Layout(decoder.config).products:
                for part in product.parts:
                    name = f"base_model.model.model.layers.{product.layer}.{part.name}"
                    scale = product.inputs**-0.5
                    tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, product.inputs, generator=generator) * scale
                    tensors[f"{name}.lora_B.weight"] = torch.randn(part.outputs, RANK, generator=generator) * 0.01
            (folder := Path(root) / f"a{seed}").mkdir()
            save_file(tensors, folder / "adapter_model.safetensors")
            settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
            (folder / "adapter_config.json").write_text(json.dumps(settings))
        lora = [f"a{seed}={root}/a{seed}" for seed in range(adapters)]
        engine = Engine(decoder, dtype, lora=lora, max_loras_device=adapters, max_lora_rank=RANK, **options)
    return engine, [adapter.digest for adapter in engine.loop.adapters.description.adapters]


def measure(
    load: Callable[[], Decoder], dtype: str, tokens: int, steps: int, adapters: int = 0, rows: int = 0, **options: Any
) -> dict[str, Any]:
    """Return the times of ``steps`` full steps, or of ``rows`` decoding rows, in milliseconds, and of the kernels of as many
    others. ``options``: of the engine."""
    decoder, workload, rng = load(), Workload(), np.random.default_rng(0)
    engine, digests = adapted(decoder, dtype, tokens, adapters, rows, **options)
    loop, on_gpu, vocab_size = engine.loop, decoder.embed.weight.is_cuda, decoder.config.vocab_size
    needed, requests = WARM_STEPS + 2 * steps + 3, list[wire.Score | wire.Generate]()
    if rows:
        requests += Writing(rows, PROMPT, needed + rows * PROMPT // tokens + 2).requests(rng, vocab_size, repeat(False))
    else:
        requests += [workload.request(f"s{at}", rng, vocab_size) for at in range(needed * tokens // workload.tokens + 2)]
    for place, request in enumerate(requests):
        loop.submit(msgspec.structs.replace(request, adapter=digests[place % len(digests)]))
    waiting = {request.id for request in requests[:rows]}
    while waiting:  # for the first token of a text
        waiting -= {reply.id for reply in loop.step()}
    for _ in range(WARM_STEPS):
        loop.step()
    walls = []
    for _ in range(steps):
        began = time.perf_counter()
        loop.step()
        walls.append(1000 * (time.perf_counter() - began))
    before = loop.stats
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            loop.step()
        if on_gpu:
            torch.cuda.synchronize()
    after = loop.stats
    assert not loop.idle, "a measured step was not full"
    kernels = kernels_of(profiler, DeviceType.CUDA if on_gpu else DeviceType.CPU)
    while not loop.idle:
        loop.step()
    count, total = Counter[str](), Counter[str]()
    for name, _, _, own in kernels:
        count[name] += 1
        total[name] += own
    by_kind = Counter[str]()
    for name, microseconds in total.items():
        by_kind[kind_of(name)] += microseconds
    busy = union((begin, end) for _, begin, end, _ in kernels)
    wall = statistics.mean(walls)  # not the median: with overlap, a wait moves from one step to the next
    return {
        "tokens": (after.computed_tokens - before.computed_tokens) / steps,
        "replayed": (after.replayed_steps - before.replayed_steps) / steps,
        "wall_ms": wall,
        "walls_ms": walls,
        "busy_ms": busy / steps / 1000,
        "gap_ms": wall - busy / steps / 1000,
        "launches": len(kernels) / steps,
        "kinds_ms": {kind: microseconds / steps / 1000 for kind, microseconds in by_kind.most_common()},
        "kernels": [
            {"name": name, "ms": microseconds / steps / 1000, "launches": count[name] / steps, "us": microseconds / count[name]}
            for name, microseconds in total.most_common()
        ],
        "engine": engine.description,
    }


def kernels_of(profiler: profile, device: DeviceType) -> list[tuple[str, float, float, float]]:
    """Return the name, the begin, the end and the own time of each kernel or, on a CPU, of each operator, in microseconds."""
    found = []
    for event in profiler.events() or []:  # type: ignore[no-untyped-call]
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type == device and end > begin:
            found.append((event.name, begin, end, event.self_cpu_time_total if device == DeviceType.CPU else end - begin))
    assert found, "torch's profiler saw no kernel"
    return found


def kind_of(name: str) -> str:
    """Return the kind of a kernel, see :data:`KINDS`."""
    return next((kind for kind, names in KINDS if names.search(name)), OTHER)


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``intervals``."""
    ordered = sorted(intervals)
    covered, reached = 0.0, ordered[0][0]
    for begin, end in ordered:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def speeds(config: ModelConfig, found: Mapping[str, Any], peaks: Mapping[str, float | None], rows: int = 0) -> dict[str, float]:
    """Return items a second of full steps, or tokens a second of decoding ``rows``, and the speed of the layers' products if all
    rows pass all layers: a step that leaves rows out of its last layer has up to one part in ``num_layers`` less."""
    workload, seconds = Workload(), found["kinds_ms"].get("products", 0.0) / 1000
    told = {"tokens_per_s": found["tokens"] / found["wall_ms"] * 1000}
    if not rows:
        told = {"items_per_s": told["tokens_per_s"] / workload.tokens * workload.items}
    if seconds and config.experts is None:
        rate = layer_flops(config, round(found["tokens"])) / seconds
        told["products_gflops"] = rate / 1e9
        if peak := peaks.get("quantized_flops") or peaks.get("flops"):
            told["products_of_peak"] = rate / peak
    return told


def show(title: str, found: Mapping[str, Any], records: Records) -> None:
    """Print the kernels and the sums."""
    table = Table("ms a step", "of busy", "launches", "µs each", "kernel", title=title)
    for kernel in found["kernels"][:SHOWN]:
        cells = f"{kernel['ms']:.3f}", f"{kernel['ms'] / found['busy_ms']:.1%}", f"{kernel['launches']:g}", f"{kernel['us']:.1f}"
        table.add_row(*cells, kernel["name"][:60])
    records.console.print(table)
    records.console.print(", ".join(f"{kind} {milliseconds:.2f} ms" for kind, milliseconds in found["kinds_ms"].items()))
    products = f", products at {found['products_gflops'] / 1000:.3g} TFLOP/s" if "products_gflops" in found else ""
    products += f", {found['products_of_peak']:.0%} of the measured peak" if "products_of_peak" in found else ""
    rate = f"{found['items_per_s']:.0f} items/s" if "items_per_s" in found else f"{found['tokens_per_s']:.0f} tokens/s"
    records.console.print(
        f"{found['tokens']:.0f} tokens a step: wall {found['wall_ms']:.2f} ms ({rate}), "
        f"busy {found['busy_ms']:.2f} ms, gap {found['gap_ms']:.2f} ms, {found['launches']:.0f} launches{products}"
    )
