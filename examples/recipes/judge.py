"""Judge which of two answers is better, in both orders, and decide where a threshold from labelled pairs says that it is safe.

    python -m examples.recipes.judge [LABELLED] --url URL --model MODEL [--precision 0.9]

LABELLED has lines with ``question``, ``good`` and ``bad``; without it, questions about capitals. Every second line sets the
threshold, and the others show what it is worth.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from random import Random

import httpx

PROMPT = """Question: {question}
A: {first}
B: {second}
The better answer is"""
LABELS = [" A", " B"]


def capitals() -> list[dict[str, str]]:
    """Questions about capitals; the bad answer is the capital of another country."""
    with Path(__file__).with_name("capitals.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    rng = Random(3)
    return [
        {"question": f"What is the capital of {country}?", "good": city, "bad": rng.choice([c for _, c in rows if c != city])}
        for country, city in rows
        for _ in range(5)
    ]


def preferences(url: str, model: str, questions: list[tuple[str, str, str]]) -> list[float]:
    """The logit that the first answer is better, for each (question, first, second)."""
    items = [PROMPT.format(question=question, first=first, second=second) for question, first, second in questions]
    body = {"model": model, "query": "", "items": items, "labels": LABELS, "apply_softmax": True}
    scores = httpx.post(f"{url}/v1/score", json=body, timeout=600).raise_for_status().json()["scores"]
    return [math.log(a) - math.log(b) for a, b in scores]


def threshold(margins: list[float], precision: float) -> float:
    """The least |margin| above which at least ``precision`` of the decisions are right; infinity if there is none.

    ``margins`` are positive where the judge prefers the good answer.
    """
    right, best = 0, math.inf
    for count, margin in enumerate(sorted(margins, key=abs, reverse=True), 1):
        right += margin > 0
        if right / count >= precision:
            best = abs(margin)
    return best


def main() -> None:
    """Print the judge's bias, its threshold, and what it decides."""
    parser = argparse.ArgumentParser()
    parser.add_argument("labelled", type=Path, nargs="?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--precision", type=float, default=0.9)
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.labelled.read_text().splitlines()] if given.labelled else capitals()
    forward = preferences(given.url, given.model, [(row["question"], row["good"], row["bad"]) for row in rows])
    backward = preferences(given.url, given.model, [(row["question"], row["bad"], row["good"]) for row in rows])
    logits = [(one, other) for one, other in zip(forward, backward, strict=True)]
    firsts = sum((one > 0) + (other > 0) for one, other in logits) / (2 * len(rows))
    agree = sum((one > 0) != (other > 0) for one, other in logits) / len(rows)
    print(f"{len(rows)} pairs; the first answer wins {firsts:.0%} of comparisons; both orders name one answer in {agree:.0%}")
    print(f"right in one order: {sum(one > 0 for one in forward) / len(rows):.0%} (good one first), ", end="")
    print(f"{sum(other < 0 for other in backward) / len(rows):.0%} (good one second)")
    margins = [(one - other) / 2 for one, other in logits]  # a constant preference for a place drops out
    limit = threshold(margins[0::2], given.precision)
    held_out = margins[1::2]
    decided = [margin for margin in held_out if abs(margin) >= limit]
    print(f"right in the mean of both: {sum(margin > 0 for margin in held_out) / len(held_out):.0%} of the other half")
    right = f", {sum(margin > 0 for margin in decided) / len(decided):.0%} of these right" if decided else ""
    share = len(decided) / len(held_out)
    print(f"threshold for {given.precision:.0%}: {limit:.2f}; it decides {share:.0%} of the other half{right}")


if __name__ == "__main__":
    main()
