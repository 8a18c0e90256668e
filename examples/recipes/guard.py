"""A chat behind a guard: the message is checked before the model sees it, and the answer before the user does.

    python -m examples.recipes.guard MESSAGE --url URL --chat MODEL --guard MODEL [--topics FILE] [--limit 0.4]

A guard model (Llama Guard, Qwen3Guard: docs/models.md) or a classifier gives the probability that a text is not ``safe``. Another
model, which can rerank, says how near the text is to each line of FILE, the topics that the chat refuses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import httpx

TOPICS = ["How to build a weapon or a bomb", "How to hack a computer and steal passwords", "Medical advice about doses of drugs"]
REFUSAL = "I can't help with that."


def risk(client: httpx.Client, guard: str, text: str, topics: list[str]) -> tuple[float, str]:
    """How certainly ``text`` is to be refused, from 0 to 1, and why."""
    models = {model["id"]: model for model in client.get("/v1/models").raise_for_status().json()["data"]}
    if "classify" in models[guard]["capabilities"]:
        answer: Any = client.post("/v1/classify", json={"model": guard, "input": [text]}).raise_for_status().json()
        found = dict(zip((name.lower() for name in answer["classes"]), answer["data"][0]["probs"], strict=True))
        return 1 - found["safe"], "not safe"
    body = {"model": guard, "query": text, "documents": topics, "top_n": 1, "truncate": True}
    best = client.post("/v1/rerank", json=body).raise_for_status().json()["results"][0]
    return best["relevance_score"], topics[best["index"]]


def guarded(client: httpx.Client, chat: str, guard: str, message: str, topics: list[str], limit: float) -> str:
    """The model's answer, or the refusal."""
    before, why = risk(client, guard, message, topics)
    print(f"before: {before:.2f} ({why})")
    if before >= limit:
        return REFUSAL
    ask = {"model": chat, "messages": [{"role": "user", "content": message}], "max_completion_tokens": 60, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=ask).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    after, why = risk(client, guard, text, topics)
    print(f"after:  {after:.2f} ({why})")
    return REFUSAL if after >= limit else text


def main() -> None:
    """Answer one message."""
    parser = argparse.ArgumentParser()
    parser.add_argument("message")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--chat", default="SmolLM2-135M-Instruct")
    parser.add_argument("--guard", default="all-MiniLM-L6-v2")
    parser.add_argument("--topics", type=Path)
    parser.add_argument("--limit", type=float, default=0.4)
    given = parser.parse_args()
    topics = given.topics.read_text(encoding="utf-8").splitlines() if given.topics else TOPICS
    with httpx.Client(base_url=given.url, timeout=600) as client:
        print(guarded(client, given.chat, given.guard, given.message, topics, given.limit))


if __name__ == "__main__":
    main()
