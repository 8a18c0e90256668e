"""Compare rerankers on labelled searches: nDCG@10 and cost of an own template, a Cohere-shaped server and sentence-transformers.

    python -m examples.recipes.compare_rerankers SEARCHES [--model MODEL] [--query TEXT --item TEXT]
        [--cohere URL MODEL] [--sentence FOLDER]

SEARCHES has lines with ``query``, ``documents`` and their ``grades``. The own template is two texts: what comes before the item,
and the item.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

Ranker = Callable[[str, list[str]], Sequence[float]]
NOT_CACHED = {"cache-control": "no-store, no-cache"}


def own_template(url: str, model: str, query: str, item: str, labels: list[str]) -> Ranker:
    """Scores are the probability of the first of ``labels`` after the item, among the labels. Nothing is taken from the cache."""

    def rank(text: str, documents: list[str]) -> Sequence[float]:
        body = {
            "model": model,
            "query": query.replace("{query}", text),
            "items": [item.replace("{document}", document) for document in documents],
            "labels": labels,
            "apply_softmax": True,
        }
        scores: list[list[float]] = (
            httpx.post(f"{url}/v1/score", json=body, headers=NOT_CACHED, timeout=600).raise_for_status().json()["scores"]
        )
        return [probabilities[0] for probabilities in scores]

    return rank


def cohere(url: str, model: str) -> Ranker:
    """Scores of ``/v2/rerank``, as Cohere and many servers have it."""

    def rank(text: str, documents: list[str]) -> Sequence[float]:
        body = {"model": model, "query": text, "documents": documents}
        results = httpx.post(f"{url}/v2/rerank", json=body, headers=NOT_CACHED, timeout=600).raise_for_status().json()["results"]
        scores = {result["index"]: result["relevance_score"] for result in results}
        return [scores[index] for index in range(len(documents))]

    return rank


def sentence_transformers(folder: str) -> Ranker:
    """Cosines of embeddings, computed in this process."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")

    def rank(text: str, documents: list[str]) -> Sequence[float]:
        numbers: list[float] = model.similarity(model.encode([text]), model.encode(documents))[0].tolist()
        return numbers

    return rank


def ndcg(scores: Sequence[float], grades: Sequence[int], places: int = 10) -> float:
    """Discounted cumulative gain of the first ``places``, with gains of 2^grade - 1, as a share of that of the best order."""

    def gain(order: Sequence[int]) -> float:
        return sum((2.0 ** grades[index] - 1) / math.log2(place + 2) for place, index in enumerate(order[:places]))

    indices = range(len(grades))
    best = gain(sorted(indices, key=lambda index: -grades[index]))
    return gain(sorted(indices, key=lambda index: -scores[index])) / best if best else 1.0


def main() -> None:
    """Print a line for each ranker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("searches", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="yardstick-demo")
    parser.add_argument("--query", default="Query: {query}\nItem: ")
    parser.add_argument("--item", default="{document}\nRelevant:")
    parser.add_argument("--labels", nargs="+", default=[" Yes", " No"])
    parser.add_argument("--cohere", nargs=2, metavar=("URL", "MODEL"))
    parser.add_argument("--sentence", metavar="FOLDER")
    parser.add_argument("--hour", type=float, default=0.10, help="price of the machine for an hour")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.searches.read_text(encoding="utf-8").splitlines()]
    rankers = {f"{given.model}, own template": own_template(given.url, given.model, given.query, given.item, given.labels)}
    if given.cohere:
        rankers[f"{given.cohere[1]}, /v2/rerank"] = cohere(*given.cohere)
    if given.sentence:
        rankers["sentence-transformers"] = sentence_transformers(given.sentence)
    documents = sum(len(row["documents"]) for row in rows)
    print(f"{documents} documents in {len(rows)} searches; cost at {given.hour:.2f} an hour")
    print(f"{'ranker':34} nDCG@10  documents/s  cost of a million documents")
    for name, rank in rankers.items():
        rank(rows[0]["query"], rows[0]["documents"])  # to start up
        began = time.monotonic()
        scores = [rank(row["query"], row["documents"]) for row in rows]
        pace = documents / (time.monotonic() - began)
        quality = sum(ndcg(found, row["grades"]) for found, row in zip(scores, rows, strict=True)) / len(rows)
        print(f"{name:34} {quality:7.3f}  {pace:11.0f}  {given.hour * 1e6 / pace / 3600:27.2f}")


if __name__ == "__main__":
    main()
