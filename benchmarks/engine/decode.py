"""Tokens a second of many generations at once, as in published measurements: ``python -m benchmarks decode``.

The engine's loop runs in this process, without HTTP, on random weights and random prompts of one length; every text has one length.

- By default, the settings are log-probabilities off, of the chosen token, and of the five most probable ones too. The workload is
  LMDeploy's: 1,024 requests of 170 tokens, 2,048 tokens each.
- With ``--guided``, they are sampling without options, length guidance, and guidance with the constraints ``eq`` and ``le``. The
  workload is LenVM's: 50 prompts, 16 samples of each. Guided draws have ``top_k`` 5 and ``min_p`` 0.01, at the temperature that
  leaves two candidates on average.
- With ``--drafts``, they are texts of one allowed token, so that every draft of prompt lookup is right, and of four tokens, so that
  most are wrong after a few tokens, each without and with drafts.
- With ``--structured``, they are plain texts of the demo base model, and texts that follow a JSON Schema.
- With ``--images``, they are prompts of text, and as long ones of which three quarters are an image that no other prompt has, for
  random weights of :data:`TOWER` before a tiny Qwen2.5.

*All* counts from the first prompt to the last token. *Steady* is the part of it between the last text that begins and the first one
that ends: every row gets a token in each step there. Its bound is the longer of the bytes (weights once, keys and values of every
row) and the operations of such a step, at the peaks measured in the same run. ``--output`` shortens a run and changes *all* more
than *steady*; a longer ``--prompt`` with fewer ``--requests`` gives the rows and contexts of the middle of the whole workload.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from rich.table import Table

from benchmarks.engine.engines import Engine
from benchmarks.engine.records import Records, add_output, describe, opened
from benchmarks.engine.roofline import Peaks, flops, measure_peaks, weight_bytes
from benchmarks.engine.subject import SHAPES, default_device, random_decoder
from benchmarks.engine.writing import CANDIDATES, PLAIN, Pair, Writing, load_pair, mixed, survivors
from tests.engine.vision.models import make_vision_checkpoint, shown, some_image
from yardstick_llm.engine import wire
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.loop.build import load_grammar_vocabulary
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.runner.machine import slot_bytes
from yardstick_llm.engine.settings import DTYPES, KV_DTYPES

SECONDS = 20.0
"""Time that the first setting must have left to begin; the others need that of the longest before them, and a fifth more."""


@dataclass(frozen=True)
class Setting:
    """Options of the requests of a measurement."""

    sampling: wire.Sampling = PLAIN
    logprobs: int | None = None
    guidance: wire.LengthGuidance | None = None
    drafts: wire.DraftOptions | None = None
    grammar: str = ""
    images: bool = False


LOGPROBS = {"off": Setting(), "chosen": Setting(logprobs=0), "top 5": Setting(logprobs=5)}
COPY, REPEAT = (msgspec.structs.replace(PLAIN, allowed_token_ids=allowed) for allowed in ((7,), (7, 8, 9, 10)))
DRAFTS = {
    f"{name}{', drafts' if tokens else ''}": Setting(sampling, drafts=wire.DraftOptions(tokens))
    for name, sampling in (("right", COPY), ("wrong", REPEAT))
    for tokens in (0, 8)
}
LIST = 'start: %json {"type": "array", "items": {"type": "string"}, "minItems": 1000}'
"""Does not end before the texts do."""
STRUCTURED = {"plain": Setting(), "structured": Setting(wire.Sampling(), grammar=LIST)}
IMAGES = {"text": Setting(), "images": Setting(images=True)}
TOWER: dict[str, Any] = {
    "depth": 8,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [3, 7],
}
"""A quarter of the layers of Qwen2.5-VL's."""


def guided(mix: wire.Sampling, output: int) -> dict[str, Setting]:
    """Return the settings of ``--guided``. Plain texts have no filters; their temperature is that of the others."""
    constraint = wire.LengthGuidance(top_k=CANDIDATES, target_length=output)
    return {
        "plain": Setting(msgspec.structs.replace(PLAIN, temperature=mix.temperature)),
        "guided": Setting(mix, guidance=wire.LengthGuidance(scale=1.0, top_k=CANDIDATES)),
        "guided, eq": Setting(mix, guidance=msgspec.structs.replace(constraint, constraint="eq")),
        "guided, le": Setting(mix, guidance=msgspec.structs.replace(constraint, constraint="le")),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure all settings, print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks decode", description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="shape of the random model (qwen3-8b)")
    parser.add_argument("--dtype", choices=DTYPES, help="(bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values")
    parser.add_argument("--guided", choices=("demo", "7b"), help="with length guidance: the demo models, or random 7B and 1.5B")
    parser.add_argument("--drafts", action="store_true", help="without and with drafts of prompt lookup")
    parser.add_argument("--structured", action="store_true", help="plain texts and structured ones of the demo model")
    parser.add_argument("--images", choices=("tiny", "tower"), help="prompts of text and with images: a tiny tower, or TOWER")
    parser.add_argument("--requests", type=int, help="prompts (1,024; 50 with --guided)")
    parser.add_argument("--samples", type=int, help="texts of each prompt (1; 16 with --guided)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (170; 100 with --guided)")
    parser.add_argument("--output", type=int, help="tokens of a text (2,048; 286 with --guided)")
    parser.add_argument("--slots", type=int, help="tokens whose keys and values are kept (as many as memory allows)")
    parser.add_argument("--max-batched-tokens", type=int, help="of the engine (its default)")
    add_output(parser)
    asked = parser.parse_args(arguments)
    own = asked.guided or ("demo" if asked.structured else asked.images)
    if own and (asked.shape or asked.dtype):
        parser.error("--guided, --structured and --images have models and a dtype of their own; leave --shape and --dtype out")
    asked.shape = asked.shape or "qwen3-8b"
    usual = (50, 16, 100, 286) if asked.guided else (1024, 1, 170, 2048)
    requests, samples, prompt, output = (
        getattr(asked, name) or default for name, default in zip(("requests", "samples", "prompt", "output"), usual, strict=True)
    )
    records = opened(asked)
    pair, peaks = load(asked)
    more = {"kv_dtype": asked.kv_dtype, "max_batched_tokens": asked.max_batched_tokens}
    if asked.structured:
        more["vocabulary"] = load_grammar_vocabulary(MODELS / "base", pair.decoder.config)
    engine = pair.engine(asked.slots, requests * samples, **more)
    writing = Writing(requests, prompt, output)
    summary: dict[str, Any] = {"bench": "decode", "machine": describe(), "model": own or asked.shape}
    summary |= {"dtype": pair.dtype, "requests": requests, "samples": samples, "prompt": prompt, "output": output}
    settings = DRAFTS if asked.drafts else STRUCTURED if asked.structured else IMAGES if asked.images else LOGPROBS
    if asked.guided:
        mix = mixed(engine, writing)
        settings = guided(mix, output)
        few = replace(writing, sampling=mix, rows=min(8, requests), output=min(16, output))
        summary |= {"temperature": mix.temperature, "candidates": survivors(engine, few, np.random.default_rng(1))}
    found: dict[str, Any] = {}
    needed = SECONDS
    for place, (name, setting) in enumerate(settings.items()):
        result = records.store.measure(name, needed, partial(measure, engine, writing, samples, setting, seed=place))
        if result:
            needed = max(needed, 1.2 * result["seconds"])
            # Tokens of drafts share what a row reads, and a length model reads more.
            bounded = not (asked.guided or asked.drafts)
            found[name] = result | bound(pair.decoder, engine.loop, result, peaks, bounded=bounded)
    summary |= {"settings": found, "left_out": records.store.left_out}
    summary["engine"] = engine.description | {"slots": engine.loop.stats.slots_total}
    engine.loop.close()
    show(summary, found, records)
    records.finish(summary)
    return 0


def load(asked: argparse.Namespace) -> tuple[Pair, Peaks]:
    """Return the model, with a length model where texts are guided, and the peaks of its device."""
    device = default_device()
    if asked.guided or asked.structured:
        pair = load_pair(asked.guided or "demo")
        pair = pair if asked.guided else replace(pair, length=None)
    elif asked.images:
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        with TemporaryDirectory() as root:
            folder = make_vision_checkpoint(Path(root), **(TOWER if asked.images == "tower" else {}))
            pair = Pair(load_model(folder, getattr(torch, dtype)).to(device), None, dtype)
    else:
        dtype = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        pair = Pair(random_decoder(SHAPES[asked.shape], dtype=getattr(torch, dtype), device=device), None, dtype)
    return pair, measure_peaks(device, getattr(torch, pair.dtype))


def measure(engine: Engine, writing: Writing, samples: int, setting: Setting, seed: int = 0) -> dict[str, float]:
    """Run all requests with ``setting``, after a few that warm up, and return their rates. ``seed``: another one for each setting,
    because later ones would find the same prompts in the prefix cache and compute less."""
    rng = np.random.default_rng(seed)
    few = replace(writing, rows=min(8, writing.rows), output=min(4, writing.output))
    run(engine.loop, requests(few, rng, engine.loop.info.vocab_size, samples, setting))
    return run(engine.loop, requests(writing, rng, engine.loop.info.vocab_size, samples, setting))


def requests(writing: Writing, rng: np.random.Generator, vocab_size: int, samples: int, setting: Setting) -> list[wire.Generate]:
    """Return the requests of a setting."""
    load = replace(writing, sampling=msgspec.structs.replace(setting.sampling, n=samples))
    plain = load.requests(rng, vocab_size, [False] * writing.rows, logprobs=setting.logprobs)
    asked = {"length_guidance": setting.guidance, "prompt_lookup": setting.drafts, "grammar": setting.grammar}
    found = [msgspec.structs.replace(request, **asked) for request in plain]
    if not setting.images:
        return found
    side = 2 * isqrt(3 * writing.prompt // 4)  # four patches are a token
    images = [some_image(int(rng.integers(1 << 32)), side, side) for _ in found]
    prompts = [[*shown(0, image), *request.prompt][: writing.prompt] for request, image in zip(found, images, strict=True)]
    pairs = zip(found, prompts, images, strict=True)
    return [msgspec.structs.replace(request, prompt=prompt, images=[image]) for request, prompt, image in pairs]


class Mark(NamedTuple):
    """State between two steps."""

    seconds: float
    tokens: int
    steps: int
    rows: int
    """Texts that have begun."""


def run(loop: Loop, requests: Sequence[wire.Generate]) -> dict[str, float]:
    """Run all requests to their end and return what :mod:`this module <benchmarks.engine.decode>` calls all and steady."""
    begun, tokens, steps = set[tuple[str, int]](), 0, 0
    for request in requests:
        loop.submit(request)
    start = time.perf_counter()
    first, last = Mark(start, 0, 0, 0), None
    while not loop.idle:
        before, ended = len(begun), False
        for reply in loop.step():
            assert isinstance(reply, wire.Delta), reply
            begun.add((reply.id, reply.index))
            tokens += len(reply.tokens)
            ended = ended or reply.finish is not None
        steps += 1
        now = Mark(time.perf_counter(), tokens, steps, len(begun))
        if last is None and len(begun) > before:
            first = now
        if last is None and ended:
            last = now
    seconds = time.perf_counter() - start
    found = {"tokens": float(tokens), "seconds": seconds, "tokens_per_s": tokens / seconds}
    if last is None or last.steps <= first.steps:  # one step wrote everything
        return found
    spent, drawn = last.seconds - first.seconds, last.tokens - first.tokens
    context = len(requests[0].prompt) + (first.tokens + last.tokens) / 2 / last.rows
    return found | {
        "steady_tokens_per_s": drawn / spent,
        "steady_rows": drawn / (last.steps - first.steps),
        "steady_step_ms": 1000 * spent / (last.steps - first.steps),
        "steady_context": context,
    }


def bound(decoder: Decoder, loop: Loop, found: Mapping[str, float], peaks: Peaks, *, bounded: bool) -> dict[str, float]:
    """Return the most tokens a second that memory and arithmetic allow in steps like the steady ones."""
    if not bounded or "steady_rows" not in found:
        return {}
    config, weight, rows = decoder.config, decoder.embed.weight, found["steady_rows"]
    kept = loop.info.slot_bytes or slot_bytes(decoder, weight.dtype)
    read = weight_bytes(config, weight.dtype.itemsize, rows) + rows * found["steady_context"] * kept
    needed = flops(config, round(rows), pairs=round(rows * (found["steady_context"] + 1)), rows=round(rows))
    seconds = max(read / peaks.bandwidth, needed / peaks.flops)
    return {
        "bound_tokens_per_s": rows / seconds,
        "of_bound": found["steady_tokens_per_s"] * seconds / rows,
        "peak_gb_per_s": peaks.bandwidth / 1e9,
        "peak_gflops": peaks.flops / 1e9,
    }


def show(summary: Mapping[str, Any], found: Mapping[str, Mapping[str, float]], records: Records) -> None:
    """Print a row for each setting; ratios are to the first one."""
    texts = f"{summary['requests']:,} prompts of {summary['prompt']:,} tokens, {summary['samples']} texts of each"
    headings = ("setting", "tokens/s", "÷ first", "steady, tokens/s", "÷ first", "rows", "ms a step", "context", "of the bound")
    table = Table(*headings, title=f"{summary['model']}, {summary['dtype']}: {texts} of {summary['output']:,} tokens")
    first = next(iter(found.values()), {})
    for name, one in found.items():
        cells = [f"{one['tokens_per_s']:.0f}", f"{one['tokens_per_s'] / first['tokens_per_s']:.3f}"]
        if "steady_rows" in one:
            steady = one["steady_tokens_per_s"]
            cells += [f"{steady:.0f}", f"{steady / first['steady_tokens_per_s']:.3f}" if "steady_rows" in first else ""]
            cells += [f"{one['steady_rows']:.0f}", f"{one['steady_step_ms']:.2f}", f"{one['steady_context']:.0f}"]
            cells.append(f"{one['of_bound']:.0%} of {one['bound_tokens_per_s']:.0f}" if "of_bound" in one else "")
        table.add_row(name, *cells)
    records.console.print(table)
    if "candidates" in summary:
        records.console.print(f"{summary['candidates']:.1f} candidates a draw at temperature {summary['temperature']:g}")
