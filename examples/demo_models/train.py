"""Trains the demo models from random weights: ``python -m examples.demo_models.train --out DIRECTORY``. See README.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.demo_models.base import Progress, train_base
from examples.demo_models.corpus.documents import sample_texts
from examples.demo_models.evaluate import measure
from examples.demo_models.lenvm import GAMMA, train_lenvm, write_texts
from examples.demo_models.prompts import END
from examples.demo_models.shapes import CONTEXT, base_config, count_parameters, length_config
from examples.demo_models.text import save_tokenizer, train_tokenizer
from yardstick_llm.engine.models.checkpoint import VALUE_HEAD
from yardstick_llm.engine.models.lenvm import LenVM
from yardstick_llm.engine.models.loader import load_model, write_checkpoint

STORED = torch.float16

Stage = Callable[[str], Progress]
"""Begins a stage with the given name and returns the function that reports its steps."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Amounts of training and evaluation."""

    steps: int = 2000
    """Training steps of the base model."""
    length_steps: int = 1200
    """Training steps of the length-value model."""
    generations: int = 5000
    """Number of the base model's texts that the length-value model learns from."""
    stray_generations: int = 4000
    """Number of further texts in which a tenth of the tokens is drawn uniformly from the most probable ones, as under guidance."""
    questions: int = 4000
    """Relevance questions of the evaluation."""
    texts: int = 2000
    """Descriptions of the evaluation."""


def make_models(out: Path, budget: Budget, seed: int, begin: Stage) -> None:
    """Write ``out/base``, ``out/lenvm`` and ``out/figures.json``, which is measured on the stored models.

    The value model is trained and measured on texts of the stored base model, which is the one that is served.
    """
    tokenizer = train_tokenizer(sample_texts(seed, 4000))
    vocab_size, eos = tokenizer.get_vocab_size(), tokenizer.encode(END).ids[0]
    with bfloat16_products():
        base = train_base(base_config(vocab_size, eos), tokenizer, steps=budget.steps, seed=seed, progress=begin("base model"))
    write_checkpoint(base.checkpoint_views(), base.config, out / "base", STORED)
    stored = load_model(out / "base")
    texts = [
        *write_texts(stored, tokenizer, count=budget.generations, seed=seed + 1),
        *write_texts(stored, tokenizer, count=budget.stray_generations, seed=seed + 2, stray=0.1),
    ]
    with bfloat16_products():
        progress = begin("length-value model")
        value_model = train_lenvm(length_config(vocab_size, eos), texts, steps=budget.length_steps, seed=seed, progress=progress)
    save_lenvm_model(value_model, out / "lenvm")
    for name in ("base", "lenvm"):
        save_tokenizer(tokenizer, out / name, context=CONTEXT)
    figures = dataclasses.asdict(measure(out, questions=budget.questions, texts=budget.texts))
    figures |= {"base_parameters": count_parameters(base), "length_parameters": count_parameters(value_model)}
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Multiply float32 matrices in bfloat16 if the processor supports it: twice as fast, and accurate enough for training."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def save_lenvm_model(model: LenVM, directory: Path) -> None:
    """Write the published format: a decoder, its head in a separate file, and γ, which checkpoints have no field for."""
    write_checkpoint(model.decoder.checkpoint_views(), model.config, directory, STORED)
    head = {name: tensor.to(STORED) for name, tensor in model.checkpoint_views().items()}
    save_file(head, directory / VALUE_HEAD, metadata={"format": "pt"})
    (directory / "lenvm.json").write_text(json.dumps({"gamma": GAMMA}, indent=2) + "\n", encoding="utf-8")


def terminal() -> Stage:
    """Print every fiftieth step with its stage, its loss and the time since the start."""
    start = time.monotonic()

    def begin(what: str) -> Progress:
        def report(done: int, steps: int, loss: float) -> None:
            if done % 50 == 0 or done == steps:
                minutes, seconds = divmod(round(time.monotonic() - start), 60)
                print(f"{what}: step {done:5d} of {steps}   loss {loss:7.4f}   {minutes:2d} min {seconds:02d} s", flush=True)

        return report

    return begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo models from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write base/, length/ and figures.json to")
    parser.add_argument("--steps", type=int, help="training steps of the base model; a few make a quick trial of everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="threads of the training")
    arguments = parser.parse_args()
    budget = Budget()
    if arguments.steps is not None:
        share = arguments.steps / budget.steps
        budget = Budget(*(max(1, round(share * value)) for value in dataclasses.astuple(budget)))
    torch.set_num_threads(arguments.threads)
    make_models(arguments.out, budget, arguments.seed, terminal())
    print((arguments.out / "figures.json").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
