"""Measures the quality of the demo models: ``python -m examples.demo_models.evaluate [DIRECTORY]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.demo_models import prompts
from examples.demo_models.corpus.catalogue import as_phrase, draw_product, draw_words
from examples.demo_models.corpus.relevance import draw_asked, draw_test_question
from examples.demo_models.forward import causal_hidden
from examples.demo_models.generate import generate
from examples.demo_models.lenvm import LIMIT, Text, collate, write_texts
from examples.demo_models.text import load_tokenizer
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.lenvm import LenVM, load_lenvm
from yardstick_llm.engine.models.loader import load_model

ROWS = 256


@dataclass(frozen=True)
class Lengths:
    """Lengths of descriptions, without the end token."""

    mean: float
    """Mean in tokens."""
    deviation: float
    """Standard deviation relative to the mean."""
    ended: float
    """Share that ended within :data:`~examples.demo_models.lenvm.LIMIT` tokens."""


@dataclass(frozen=True)
class Figures:
    """All figures, measured on held-out products."""

    auc_mixed: float
    """AUC if 70 % of the irrelevant items have exactly one wrong attribute."""
    auc_hard: float
    """AUC if all irrelevant items have exactly one wrong attribute."""
    auc_short: float
    """``auc_mixed`` with the short form of items."""
    auc_synonyms: float
    """``auc_hard`` with pairs of words that no training question contains."""
    plain: Lengths
    chat: Lengths
    value_correlation: float
    """Spearman correlation between the value and the true remaining length, over every state of new texts."""


def relevance_auc(
    base: Decoder, tokenizer: Tokenizer, *, hard: float, questions: int, short: bool = False, synonyms: bool = False, seed: int = 1
) -> float:
    """Return the probability that a relevant item scores higher than an irrelevant one, for held-out products."""
    rng = Random(seed)
    asked = [draw_test_question(rng, hard=hard, synonyms=synonyms) for _ in range(questions)]
    texts = [prompts.score_query(question.query) + prompts.score_item(question.item, short=short) for question in asked]
    scores = label_scores(base, tokenizer, texts)
    relevant = torch.tensor([question.relevant for question in asked])
    return auc(scores[relevant], scores[~relevant])


@torch.inference_mode()
def label_scores(base: Decoder, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return log P(Yes) − log P(No) after each text, [texts]."""
    yes, no = (tokenizer.encode(label).ids[0] for label in prompts.LABELS)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    scores = []
    for start in range(0, len(encoded), ROWS):
        rows = encoded[start : start + ROWS]
        time = max(map(len, rows))
        hidden = causal_hidden(base, torch.tensor([row + [0] * (time - len(row)) for row in rows]))
        last = hidden[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
        logits = base.logits(last)
        scores.append(logits[:, yes] - logits[:, no])
    return torch.cat(scores)


def description_lengths(base: Decoder, tokenizer: Tokenizer, *, count: int, chat: bool, seed: int = 2) -> Lengths:
    """Measure lengths of descriptions of held-out products, sampled at temperature 1."""
    rng = Random(seed)
    products = (draw_product(rng, held_out=True).only(draw_asked(rng)) for _ in range(count))
    requests = [prompts.describe(as_phrase(draw_words(product, rng))) for product in products]
    texts = [prompts.chat(request) if chat else request for request in requests]
    outputs = generate(base, [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)], seed=seed, limit=LIMIT)
    ended = [output[-1] in base.config.eos_token_ids for output in outputs]
    lengths = torch.tensor([len(output) - end for output, end in zip(outputs, ended, strict=True)], dtype=torch.float64)
    return Lengths(lengths.mean().item(), (lengths.std() / lengths.mean()).item(), sum(ended) / count)


def value_correlation(base: Decoder, value_model: LenVM, tokenizer: Tokenizer, *, count: int, seed: int = 3) -> float:
    """Return Spearman's correlation of values and true remaining lengths, over all states of new texts about held-out products."""
    return spearman(*values_and_truths(value_model, write_texts(base, tokenizer, count=count, seed=seed, held_out=True)))


@torch.inference_mode()
def values_and_truths(value_model: LenVM, texts: list[Text]) -> tuple[Tensor, Tensor]:
    """Return the value and its true counterpart in every state of every text, [states] each."""
    values, truths = [], []
    for start in range(0, len(texts), ROWS):
        batch = collate(texts[start : start + ROWS])
        _, v = value_model.value(causal_hidden(value_model, batch.tokens)[batch.counted])
        values.append(v)
        truths.append(batch.values[batch.counted])
    return torch.cat(values), torch.cat(truths)


def auc(positives: Tensor, negatives: Tensor) -> float:
    """Return the share of pairs in which the positive is larger; a tie counts half."""
    difference = positives.unsqueeze(1) - negatives.unsqueeze(0)
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()


def spearman(x: Tensor, y: Tensor) -> float:
    """Return the rank correlation of two [n]; ties share their mean rank."""
    return torch.corrcoef(torch.stack([_ranks(x), _ranks(y)]))[0, 1].item()


def _ranks(x: Tensor) -> Tensor:
    _, group, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = (last - (counts - 1) / 2)[group]
    return ranks


def measure(directory: Path, *, questions: int = 4000, texts: int = 2000) -> Figures:
    """Measure the models in ``directory``."""
    tokenizer, base = load_tokenizer(directory / "base"), load_model(directory / "base")
    value_model = load_lenvm(directory / "lenvm")
    return Figures(
        auc_mixed=relevance_auc(base, tokenizer, hard=0.7, questions=questions),
        auc_hard=relevance_auc(base, tokenizer, hard=1.0, questions=questions),
        auc_short=relevance_auc(base, tokenizer, hard=0.7, questions=questions, short=True),
        auc_synonyms=relevance_auc(base, tokenizer, hard=1.0, questions=questions, synonyms=True),
        plain=description_lengths(base, tokenizer, count=texts, chat=False),
        chat=description_lengths(base, tokenizer, count=texts, chat=True),
        value_correlation=value_correlation(base, value_model, tokenizer, count=texts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo models and print the figures as JSON.")
    parser.add_argument(
        "directory", type=Path, nargs="?", default=MODELS, help="holds base/ and length/ (default: the shipped models)"
    )
    print(json.dumps(dataclasses.asdict(measure(parser.parse_args().directory)), indent=2))


if __name__ == "__main__":
    main()
