"""Generates texts of one prompt at five scales, for docs/generation.md: ``python -m examples.demo_models.steered``."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from examples.demo_models.prompts import chat, describe
from examples.demo_models.text import load_tokenizer
from yardstick_llm.engine import wire
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.settings import EngineSettings

PRODUCT = "red running shoes"
SCALES = (-10.0, -2.0, 0.0, 2.0, 10.0)
TEXTS = 64
"""Texts of each scale, with the seeds 0 to 63."""
LIMIT = 400
CANDIDATES = 5


@dataclass(frozen=True)
class Row:
    """Result of one scale."""

    scale: float
    mean: float
    """Tokens of each text, without the end token."""
    shortest: int
    longest: int
    tokens: int
    """Tokens of ``text``."""
    text: str
    """A text of median length."""


def measure() -> list[Row]:
    """Generate the texts with the shipped models on a CPU."""
    base, length = str(MODELS / "base"), str(MODELS / "lenvm")
    settings = EngineSettings(
        model=base, name="demo", lenvm_model=length, device="cpu", max_total_tokens=40_000, max_wait_seconds=3600
    )
    loop = build_loop(settings)
    tokenizer = load_tokenizer(MODELS / "base")
    prompt = tokenizer.encode(chat(describe(PRODUCT))).ids
    rows = []
    for scale in SCALES:
        for seed in range(TEXTS):
            sampling = wire.Sampling(max_tokens=LIMIT, top_k=CANDIDATES, seed=seed)
            loop.submit(wire.Generate(f"{seed}", prompt, sampling, length_guidance=wire.LengthGuidance(scale=scale)))
        texts: dict[str, list[int]] = {}
        while not loop.idle:
            for reply in loop.step():
                assert isinstance(reply, wire.Delta), reply
                texts.setdefault(reply.id, []).extend(token for token in reply.tokens if token not in loop.info.eos_token_ids)
        ordered = sorted(texts.values(), key=len)
        middle = ordered[len(ordered) // 2]
        mean = statistics.mean(map(len, ordered))
        rows.append(Row(scale, mean, len(ordered[0]), len(ordered[-1]), len(middle), tokenizer.decode(middle).strip()))
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows in the format of the README."""
    head = ["| `scale` | mean tokens | shortest, longest | a text of median length |", "| --- | --- | --- | --- |"]
    lines = [f"| {row.scale:g} | {row.mean:.1f} | {row.shortest}, {row.longest} | ({row.tokens}) {row.text} |" for row in rows]
    return "\n".join([*head, *lines])


def main() -> None:
    print(table(measure()))


if __name__ == "__main__":
    main()
