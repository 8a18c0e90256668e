"""Distil the scores of a served reranker into a small embedding model, and compare the orders on searches that it has not seen.

    python -m examples.recipes.distil PAIRS --train FOLDER [--student MODEL] [--url URL] [--model MODEL]
    python -m examples.recipes.distil PAIRS [--url URL] [--model MODEL] --compare URL MODEL [--compare URL MODEL]

PAIRS has lines with ``query`` and ``document``; labels are not needed. The pairs of every fifth query are held out: ``--train``
learns from the others, ``--compare`` looks at these. MODEL at URL is the reranker. FOLDER gets the student, which ``yardstick serve
--model FOLDER`` serves. ``--train`` needs ``pip install sentence-transformers`` (version 6).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation

import httpx

Pair = tuple[str, str]
HELD_OUT = 5
ROWS_A_REQUEST, ROWS_A_STEP = 64, 16
LEARNING_RATE, LINE_RATE = 1e-4, 0.05


def split(path: Path) -> tuple[list[Pair], list[Pair]]:
    """The pairs to train on, and those of every fifth query."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    held_out = set(list(dict.fromkeys(row["query"] for row in rows))[::HELD_OUT])
    parts: tuple[list[Pair], list[Pair]] = ([], [])
    for row in rows:
        parts[row["query"] in held_out].append((row["query"], row["document"]))
    return parts


def scores(url: str, model: str, pairs: Sequence[Pair]) -> list[float]:
    """The relevance of each document to its query, by a served model."""
    found: list[float] = []
    for begin in range(0, len(pairs), ROWS_A_REQUEST):
        queries, documents = zip(*pairs[begin : begin + ROWS_A_REQUEST], strict=True)
        body = {"model": model, "queries": queries, "documents": documents}
        results = httpx.post(f"{url}/v1/score", json=body, timeout=600).raise_for_status().json()["data"]
        found += [result["score"] for result in sorted(results, key=lambda result: int(result["index"]))]
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's correlation of two lists of scores: 1 for the same order, 0 for unrelated ones."""

    def ranks(numbers: Sequence[float]) -> list[int]:
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        return sorted(range(len(numbers)), key=order.__getitem__)

    return correlation(ranks(one), ranks(other))


def train(student: str, folder: Path, pairs: Sequence[Pair], targets: Sequence[float], epochs: int) -> None:
    """Teach ``student`` that a line over the cosine of a pair is the log-odds of its target, and write it into ``folder``."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    model = SentenceTransformer(student, device="cpu")
    line = torch.nn.Parameter(torch.tensor([8.0, -5.0]))  # slope and offset
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [line], "lr": LINE_RATE}], lr=LEARNING_RATE)
    model.train()
    for epoch in range(epochs):
        losses = []
        for rows in torch.randperm(len(pairs)).split(ROWS_A_STEP):  # type: ignore[no-untyped-call]
            sides = zip(*[pairs[row] for row in rows], strict=True)  # queries and documents
            queries, documents = [model(model.preprocess(list(texts)))["sentence_embedding"] for texts in sides]
            logits = line[0] * torch.cosine_similarity(queries, documents) + line[1]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor([targets[row] for row in rows]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)
    model.save(str(folder))


def main() -> None:
    """Train a student, or print the rank correlation of models with the reranker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="yardstick-demo")
    parser.add_argument("--train", type=Path, metavar="FOLDER")
    parser.add_argument("--student", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--compare", nargs=2, action="append", default=[], metavar=("URL", "MODEL"))
    given = parser.parse_args()
    learned, held_out = split(given.pairs)
    if given.train:
        print(f"{len(learned)} pairs to learn, {len(held_out)} held out")
        train(given.student, given.train, learned, scores(given.url, given.model, learned), given.epochs)
    if given.compare:
        teacher = scores(given.url, given.model, held_out)
        print(f"rank correlation with {given.model} on {len(held_out)} pairs that no model was trained on")
    for url, model in given.compare:
        print(f"{model:24} {rank_correlation(scores(url, model, held_out), teacher):6.3f}")


if __name__ == "__main__":
    main()
