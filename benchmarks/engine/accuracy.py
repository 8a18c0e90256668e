"""``python -m benchmarks accuracy``: measures the error of each number format against float32, through the engine.

Each row is on disk once it is measured, and a later run with ``--continue`` measures the others.

The models are the demo base model (relevance questions and descriptions of products outside its training), random weights, and the
demo length-value model, which is computed without the engine, on the CPU; or with ``--model`` a real one, with the same questions.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.engine.engines import Engine
from benchmarks.engine.records import Records, Store, add_output, describe
from benchmarks.engine.subject import Subject, Workload, subject
from examples.demo_models import prompts
from examples.demo_models.corpus.catalogue import as_phrase, draw_product, draw_words
from examples.demo_models.corpus.relevance import draw_asked, draw_test_question
from examples.demo_models.evaluate import auc, spearman, values_and_truths
from examples.demo_models.lenvm import Text, write_texts
from examples.demo_models.text import load_tokenizer
from tests import weights
from yardstick_llm.engine import wire
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.lenvm import load_lenvm
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.models.source import locate, tokenizer_files
from yardstick_llm.engine.settings import DTYPES, KV_DTYPES, QUANTIZE
from yardstick_llm.kernels.int8 import instructions
from yardstick_llm.kernels.linear import multiplies_bfloat16


class Format(NamedTuple):
    """A number format; see :class:`engine.settings.EngineSettings`."""

    dtype: str
    quantize: str | None = None
    kv_dtype: str = "auto"


Formats = Sequence[Format]

FORMATS: Formats = (
    *(Format(dtype, quantize) for quantize in (None, "fp8", "int8") for dtype in ("float32", "bfloat16")),
    *(Format(dtype, kv_dtype="fp8") for dtype in ("float32", "bfloat16")),
    Format("bfloat16", "fp8", "fp8"),
)
"""The others are compared with the first."""
SMOLLM2 = "smollm2"
SLOTS = 32_768
SECONDS = 10.0
"""Time that a format must have left to begin."""
OPENING = 32
"""Random tokens before a text."""
TOGETHER = 10
"""Items per request, unless each item is scored alone."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of measurements."""

    questions: int = 1000
    alone: int = 50
    """Questions that are scored a second time, one by one."""
    random_requests: int = 10
    texts: int = 100
    random_texts: int = 20
    tokens: int = 48
    """Tokens of the longest text."""
    values: int = 200


QUICK = Sizes(questions=60, alone=10, random_requests=1, texts=8, random_texts=2, tokens=24, values=20)


@dataclass(frozen=True)
class Material:
    """Inputs of a model."""

    requests: list[wire.Score]
    openings: list[list[int]]
    """Prompts of texts."""
    relevant: Tensor | None
    """For each item, whether its first label is right; None if there is no ground truth."""


@dataclass(frozen=True)
class Answers:
    """Outputs of a model."""

    probabilities: Tensor
    """[items]: probability of the first label, scaled to a sum of 1 over the two."""
    alone: Tensor
    """These probabilities for the first items, each scored in its own step."""
    texts: list[list[int]]
    """Greedy texts."""


Cost = dict[str, float | None]
"""Errors of a format relative to float32, by the keys of :data:`HEADINGS`."""
HEADINGS = {
    "mean": "mean Δ",  # absolute difference of a probability or a value
    "largest": "max Δ",
    "batch": "max Δ, batch",  # between an item's probability alone and in a batch, in this format
    "auc": "AUC",
    "same_next": "same next token",  # share of the tokens of float32's texts that the format also predicts after the same tokens
    "same_texts": "same text",
    "correlation": "rank correlation",
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    about = "Accuracy of bfloat16, FP8 and int8, on the demo models and on random weights."
    parser = argparse.ArgumentParser("python -m benchmarks accuracy", description=about)
    parser.add_argument("--quantize", choices=QUANTIZE, help="only float32, and --dtype with this quantisation (all formats)")
    parser.add_argument("--dtype", choices=DTYPES[:2], help="the dtype of that format (float32)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES[1:], help="the same for keys and values")
    about = f"a model directory, GGUF file or hub id in place of the others; {SMOLLM2}: SmolLM2-135M-Instruct, from PyPI"
    parser.add_argument("--model", help=about)
    parser.add_argument("--quick", action="store_true", help="a few questions and texts, to see that it works")
    add_output(parser)
    asked = parser.parse_args(arguments)
    chosen = Format(asked.dtype or "float32", asked.quantize, asked.kv_dtype or "auto")
    formats = [Format("float32"), chosen] if asked.dtype or asked.quantize or asked.kv_dtype else None
    run(QUICK if asked.quick else Sizes(), Store(asked.out, resume=asked.resume, limit=asked.limit), formats, asked.model)
    return 0


def run(sizes: Sizes, store: Store | None = None, formats: Formats | None = None, real: str | None = None) -> dict[str, Any]:
    """Print the tables and the JSON line, and write them to the folder of ``store``, if it has one. Returns the content of the JSON
    line.

    ``formats``: all of :data:`FORMATS` unless given; the first is what the others are compared with. ``real``: see ``--model``.
    """
    records = Records(store)
    store = records.store
    summary: dict[str, Any] = {"bench": "accuracy", "machine": describe()}
    with ExitStack() as stack:
        if real is not None:
            path = weights.smollm2() if real == SMOLLM2 else locate(real)
            tokenizer = Tokenizer.from_buffer(tokenizer_files(path).tokenizer_json)
            measured = {path.name: (Subject(path, load_config(path), "float32"), demo_material(sizes, tokenizer))}
        else:
            random = stack.enter_context(subject("small", None, "float32"))
            measured = {
                "demo": (Subject(MODELS / "base", load_config(MODELS / "base"), "float32"), demo_material(sizes)),
                "random": (random, random_material(sizes, random.config.vocab_size)),
            }
        for name, (model, material) in measured.items():
            summary[name] = costs(model, material, sizes, formats, store, name)
            show(f"{name} model", summary[name], records)
    if real is None:
        summary["demo length"] = value_costs(sizes, formats, store)
        show("demo length-value model", summary["demo length"], records)
    summary["left_out"] = store.left_out
    records.finish(summary)
    return summary


def costs(
    model: Subject, material: Material, sizes: Sizes, formats: Formats | None = None, store: Store | None = None, name: str = ""
) -> dict[str, Cost]:
    """Return the errors of ``model``, called ``name``, in the formats that this machine supports and ``store`` has time for."""
    store = store or Store()
    chosen = [dataclasses.replace(model, **form._asdict()) for form in formats or FORMATS if supported(form)]
    exact: Answers | None = None

    def measured(each: Subject) -> Cost:
        nonlocal exact
        engine = _engine(each)
        given = answers(engine, material, sizes)
        if exact is None:  # the first format, unless an earlier run has measured it
            exact = given if each is chosen[0] else answers(_engine(chosen[0]), material, sizes)
        return _cost(engine, material, given, exact)

    found = {each.format: store.measure(f"{name} model: {each.format}", SECONDS, partial(measured, each)) for each in chosen}
    return {form: cost for form, cost in found.items() if cost is not None}


def _engine(model: Subject) -> Engine:
    return Engine(model.load(), model.dtype, max_total_tokens=SLOTS, kv_dtype=model.kv_dtype)


def supported(form: Format) -> bool:
    """Whether this machine computes in a format."""
    if form.quantize == "int8":
        on_cpu = not torch.cuda.is_available() and instructions() is not None
        return on_cpu and (form.dtype == "float32" or multiplies_bfloat16())
    return form.quantize is None or not torch.cuda.is_available() or form.dtype == "bfloat16"


def answers(engine: Engine, material: Material, sizes: Sizes) -> Answers:
    """Return scores of all items, some of them twice, and a text after every opening."""
    rows = [row for scores in engine.score_all(material.requests) for row in scores]
    singles = [(request, branch) for request in material.requests for branch in request.branches]
    alone = [
        engine.score(wire.Score("alone", request.prefix, [branch], request.readout))[0]
        for request, branch in singles[: sizes.alone]
    ]
    sampling = wire.Sampling(max_tokens=sizes.tokens, temperature=0)
    texts: dict[str, list[int]] = {}
    openings = enumerate(material.openings)
    for reply in engine.run([wire.Generate(f"text {place}", opening, sampling) for place, opening in openings]):
        assert isinstance(reply, wire.Delta), reply
        texts.setdefault(reply.id, []).extend(reply.tokens)
    return Answers(_scaled(rows), _scaled(alone), [texts[f"text {place}"] for place in range(len(material.openings))])


def following(engine: Engine, opening: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return the most probable token at each position of ``text``, given all tokens before it."""
    message = wire.Generate("following", [*opening, *text], wire.Sampling(max_tokens=0), prompt_logprobs=1)
    ranked: list[list[int]] = []
    for reply in engine.run([message]):
        assert isinstance(reply, wire.Delta), reply
        if reply.prompt_logprobs is not None:
            ranked += reply.prompt_logprobs.top_tokens
    assert len(ranked) == len(message.prompt), "the engine did not say what follows"
    return [best for best, *_ in ranked[len(opening) :]]


def _cost(engine: Engine, material: Material, given: Answers, exact: Answers) -> Cost:
    difference = (given.probabilities - exact.probabilities).abs()
    pairs = zip(material.openings, exact.texts, strict=True)
    next_ones = [token for opening, text in pairs for token in following(engine, opening, text)]
    expected = [token for text in exact.texts for token in text]
    right = material.relevant
    return {
        "mean": difference.mean().item(),
        "largest": difference.max().item(),
        "batch": (given.probabilities[: len(given.alone)] - given.alone).abs().max().item(),
        "auc": None if right is None else auc(given.probabilities[right], given.probabilities[~right]),
        "same_next": float(np.mean([one == other for one, other in zip(next_ones, expected, strict=True)])),
        "same_texts": float(np.mean([one == other for one, other in zip(given.texts, exact.texts, strict=True)])),
    }


def demo_material(sizes: Sizes, tokenizer: Tokenizer | None = None) -> Material:
    """Return hard questions, whose wrong items have one wrong attribute, and requests for descriptions."""
    tokenizer, rng = tokenizer or load_tokenizer(MODELS / "base"), Random(11)
    asked = [draw_test_question(rng, hard=1.0) for _ in range(sizes.questions)]
    texts = [prompts.score_query(question.query) + prompts.score_item(question.item) for question in asked]
    tokens = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    labels = [tokenizer.encode(label, add_special_tokens=False).ids[-1] for label in prompts.LABELS]
    groups = [tokens[start : start + TOGETHER] for start in range(0, len(tokens), TOGETHER)]
    products = (draw_product(rng, held_out=True).only(draw_asked(rng)) for _ in range(sizes.texts))
    openings = [tokenizer.encode(prompts.describe(as_phrase(draw_words(product, rng)))).ids for product in products]
    requests = [wire.Score(f"group {place}", [], group, wire.Labels(labels)) for place, group in enumerate(groups)]
    return Material(requests, openings, torch.tensor([question.relevant for question in asked]))


def random_material(sizes: Sizes, vocab_size: int) -> Material:
    """Return the standard workload, and texts after a few random tokens."""
    rng = np.random.default_rng(11)
    requests = [Workload().request(f"request {place}", rng, vocab_size) for place in range(sizes.random_requests)]
    openings = rng.integers(0, vocab_size, (sizes.random_texts, OPENING)).tolist()
    return Material(requests, openings, None)


def value_costs(sizes: Sizes, formats: Formats | None = None, store: Store | None = None) -> dict[str, Cost]:
    """Return differences of the value in every state of new texts, and its rank correlation with the truth; formats as in
    :func:`costs`. The length model's keys and values stay in its own format."""
    store = store or Store()
    chosen = [form for form in formats or FORMATS if form.kv_dtype == "auto" and (form.quantize != "int8" or supported(form))]

    @cache
    def texts() -> list[Text]:
        base, tokenizer = load_model(MODELS / "base"), load_tokenizer(MODELS / "base")
        return write_texts(base, tokenizer, count=sizes.values, seed=12, held_out=True)

    @cache
    def values(form: Format) -> tuple[Tensor, Tensor]:
        return values_and_truths(load_lenvm(MODELS / "lenvm", getattr(torch, form.dtype), form.quantize), texts())

    def measured(form: Format) -> Cost:
        (exact, _), (found, truths) = values(chosen[0]), values(form)
        difference = (found - exact).abs()
        return {"mean": difference.mean().item(), "largest": difference.max().item(), "correlation": spearman(found, truths)}

    config = load_config(MODELS / "lenvm")
    names = {Subject(MODELS / "lenvm", config, form.dtype, form.quantize).format: form for form in chosen}
    found = {name: store.measure(f"length values: {name}", SECONDS, partial(measured, form)) for name, form in names.items()}
    return {name: cost for name, cost in found.items() if cost is not None}


def _scaled(rows: list[list[float]]) -> Tensor:
    """Convert log-probabilities of two labels to the relative probability of the first one."""
    return torch.tensor(rows, dtype=torch.float64).softmax(-1)[:, 0]


def show(title: str, formats: Mapping[str, Cost], records: Records) -> None:
    """Print one row per format."""
    first = next(iter(formats.values()), {})
    table = Table(title, *(heading for key, heading in HEADINGS.items() if first.get(key) is not None))
    for form, cost in formats.items():
        table.add_row(form, *(_written(key, cost[key]) for key in HEADINGS if cost.get(key) is not None))
    records.console.print(table)


def _written(key: str, value: float | None) -> str:
    assert value is not None
    return f"{value:.1%}" if key.startswith("same") else f"{value:.4f}" if key in ("auc", "correlation") else f"{value:.1e}"
