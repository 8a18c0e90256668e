"""The task: add three to five digits. The model thinks in running sums, then answers.

A step of thinking is a running sum in one of three styles of different length. A check may repeat the steps. So equal questions
have thoughts of very different lengths, and each of them ends with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from examples.demo_models.prompts import END, chat

THINK, ANSWER = "<think>", "</think>"


@dataclass(frozen=True)
class Question:
    """Numbers to add."""

    numbers: tuple[int, ...]

    @property
    def message(self) -> str:
        """The user's message."""
        return "Add: " + " ".join(map(str, self.numbers))

    @property
    def prompt(self) -> str:
        """The message in the chat template, up to the answer's first token."""
        return chat(self.message)

    @property
    def answer(self) -> str:
        """The sum."""
        return str(sum(self.numbers))


def draw_question(rng: Random) -> Question:
    """Draw three to five numbers from 1 to 9."""
    return Question(tuple(rng.randint(1, 9) for _ in range(rng.randint(3, 5))))


def held_out(question: Question) -> bool:
    """Return whether the question is kept out of training: one in ten, by its numbers."""
    return sum(place * number for place, number in enumerate(question.numbers, 1)) % 10 == 3


def draw_text(question: Question, rng: Random) -> str:
    """Draw an answer with its thoughts, from ``<think>`` to the end token."""
    tendency = [rng.random() ** 2 for _ in STYLES]
    thoughts = _steps(question, tendency, rng)
    while rng.random() < 0.25:
        thoughts += " Check:" + _steps(question, tendency, rng)
    return f"{THINK}\n{thoughts.strip()}\n{ANSWER}\n{question.answer}{END}"


STYLES = (" {total}", " {before}+{number}={total}", " now {before} plus {number} is {total}, the sum so far is {total}.")


def _steps(question: Question, tendency: list[float], rng: Random) -> str:
    """Draw the running sums, each in a style of its own."""
    steps, before = [], question.numbers[0]
    for number in question.numbers[1:]:
        (style,) = rng.choices(STYLES, [0.05 + weight for weight in tendency])
        steps.append(style.format(before=before, number=number, total=before + number))
        before += number
    return "".join(steps)
