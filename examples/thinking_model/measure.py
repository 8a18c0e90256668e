"""Compares two ways to bound thinking: ``python -m examples.thinking_model.measure MODELS`` prints a table.

*Steered*: length guidance with the budget as target of the thinking section. *Cut off*: thinking stops after the budget and the
section is closed by force, as servers do that only have a hard limit. Both answer the same held-out questions with the same seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from examples.demo_models.text import load_tokenizer
from examples.thinking_model import task
from examples.thinking_model.train import token_id
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.settings import EngineSettings

BUDGETS = (6, 10, 15, 20, 30, 40, 60)
LIMIT = 300
"""Output tokens at which an answer is abandoned."""
CANDIDATES = 5


@dataclass(frozen=True)
class Row:
    """One way and one budget."""

    way: str
    budget: int | None
    thinking: float
    """Mean tokens of the thinking section."""
    within: float
    """Share of the thinking sections that are at most a fifth longer than the budget."""
    right: float
    """Share of right answers."""


class Asker:
    """Answers questions with the models in one process."""

    def __init__(self, models: Path, min_p: float) -> None:
        """``min_p``: candidates of a draw have at least this fraction of the most probable one's probability."""
        settings = EngineSettings(
            model=str(models / "base"),
            name="thinking",
            lenvm_model=str(models / "lenvm"),
            device="cpu",
            max_total_tokens=60_000,
            max_wait_seconds=3600,
        )
        self._loop: Loop = build_loop(settings)
        self.tokenizer: Tokenizer = load_tokenizer(models / "base")
        self._min_p = min_p
        self._close = token_id(self.tokenizer, task.ANSWER)
        self.section = wire.Thinking(self._close, token_id(self.tokenizer, task.THINK))
        """Tags of the thinking section."""

    def thoughts(self, outputs: list[list[int]]) -> list[int]:
        """Return the length of each thinking section, without its tags."""
        return [output.index(self._close) - 1 if self._close in output else len(output) - 1 for output in outputs]

    def steered(self, prompts: list[list[int]], guidance: wire.LengthGuidance | None) -> list[list[int]]:
        """Generate with length guidance, or without."""
        sampling = [wire.Sampling(max_tokens=LIMIT, min_p=self._min_p, seed=seed) for seed in range(len(prompts))]
        return self._generate(prompts, sampling, guidance)

    def cut_off(self, prompts: list[list[int]], budget: int) -> list[list[int]]:
        """Think for at most ``budget`` tokens, close the section, and answer."""
        think = token_id(self.tokenizer, task.THINK)
        sampling = [
            wire.Sampling(max_tokens=1 + budget, min_p=self._min_p, seed=seed, stop_token_ids=(self._close,))
            for seed in range(len(prompts))
        ]
        begun = self._generate(prompts, sampling, None)
        closing = self.tokenizer.encode(f"\n{task.ANSWER}\n").ids
        heads = [output if output[-1] == self._close else [think, *output[1:], *closing] for output in begun]
        sampling = [wire.Sampling(max_tokens=8, temperature=0.0)] * len(prompts)
        rests = self._generate([prompt + head for prompt, head in zip(prompts, heads, strict=True)], sampling, None)
        return [head + rest for head, rest in zip(heads, rests, strict=True)]

    def _generate(
        self, prompts: list[list[int]], sampling: list[wire.Sampling], guidance: wire.LengthGuidance | None
    ) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        for place, (prompt, parameters) in enumerate(zip(prompts, sampling, strict=True)):
            self._loop.submit(wire.Generate(str(place), prompt, parameters, length_guidance=guidance))
        while not self._loop.idle:
            for reply in self._loop.step():
                assert isinstance(reply, wire.Delta), reply
                outputs[int(reply.id)] += reply.tokens
        return outputs


def measure(models: Path, count: int, min_p: float, budgets: Sequence[int] = BUDGETS) -> list[Row]:
    """Ask ``count`` held-out questions in each way."""
    asker = Asker(models, min_p)
    rng = Random(4)
    questions: list[task.Question] = []
    while len(questions) < count:
        if task.held_out(question := task.draw_question(rng)):
            questions.append(question)
    prompts = [asker.tokenizer.encode(question.prompt).ids for question in questions]

    def row(way: str, budget: int | None, outputs: list[list[int]]) -> Row:
        thinking = asker.thoughts(outputs)
        texts = [asker.tokenizer.decode(output, skip_special_tokens=True) for output in outputs]
        answers = [text.rpartition(task.ANSWER)[2].strip() for text in texts]
        right = [answer == question.answer for answer, question in zip(answers, questions, strict=True)]
        within = [budget is None or length <= 1.2 * budget for length in thinking]
        return Row(way, budget, statistics.mean(thinking), statistics.mean(within), statistics.mean(right))

    rows = [row("free", None, asker.steered(prompts, None))]
    for budget in budgets:
        guidance = wire.LengthGuidance(
            constraint="eq", target_length=budget, top_k=CANDIDATES, applies_to="thinking", thinking=asker.section
        )
        rows.append(row("steered", budget, asker.steered(prompts, guidance)))
        rows.append(row("cut off", budget, asker.cut_off(prompts, budget)))
    return rows


def plot(rows: list[Row], path: Path) -> None:
    """Draw the share of right answers against the tokens of thinking."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for way, style in (("steered", "o-"), ("cut off", "s--"), ("free", "D")):
        points = sorted((row.thinking, 100 * row.right) for row in rows if row.way == way)
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=f"thinking is {way}")
    axes.set(xlabel="mean tokens of thinking", ylabel="right answers, %", xlim=(0, None), ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare steered thinking with thinking that is cut off.")
    parser.add_argument("models", type=Path, help="directory with base/ and lenvm/, from examples.thinking_model.train")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="tokens of thinking")
    parser.add_argument(
        "--min-p", type=float, default=0.1, help="least probability of a candidate, relative to the most probable one"
    )
    parser.add_argument("--plot", type=Path, help="PNG file to draw")
    arguments = parser.parse_args()
    rows = measure(arguments.models, arguments.questions, arguments.min_p, arguments.budgets)
    print("| thinking | budget | mean tokens of thinking | within 1.2 × budget | right answers |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.way} | {row.budget or '-'} | {row.thinking:.1f} | {row.within:.0%} | {row.right:.0%} |")
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
