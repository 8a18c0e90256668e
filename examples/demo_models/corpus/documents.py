"""Training documents: pieces of text, of which only the predictable ones are learned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from examples.demo_models import prompts
from examples.demo_models.corpus.catalogue import ATTRIBUTE_OF, WORDS, as_phrase, draw_product, draw_words
from examples.demo_models.corpus.descriptions import write_description
from examples.demo_models.corpus.relevance import Question, capitalised, draw_asked, draw_question

Kind = Literal["label", "reason", "verdict", "text", "name", "auxiliary"]
"""The subject of a learned part: Yes or No, why, the same for each word of an item, a description, the words in it that name the
product, or which words mean the same."""

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You write for a catalogue.",
    "You are a careful writer. Answer in plain English.",
)


@dataclass(frozen=True)
class Piece:
    """A piece of text and its kind; None for text that is given and not learned."""

    text: str
    kind: Kind | None = None


Document = tuple[Piece, ...]


def relevance_document(rng: Random, *, hard: float, exact: float = 0.0) -> Document:
    """Return a question (:func:`draw_question`), its answer and the reason."""
    question = draw_question(rng, hard=hard, exact=exact)
    if rng.random() < 0.1:
        question = capitalised(question)
    prompt = prompts.score_query(question.query) + prompts.score_item(question.item, short=rng.random() < 0.2)
    label = prompts.LABELS[0 if question.relevant else 1]
    if rng.random() < 0.04:
        label = label.strip()
    return Piece(prompt), Piece(label, "label"), Piece(_reason(question) + prompts.END, "reason")


def _reason(question: Question) -> str:
    return ": all match" if question.relevant else f": wrong {' and '.join(question.wrong)}"


def check_document(rng: Random, *, hard: float, exact: float = 0.0) -> Document:
    """A question in which each word of the item is judged by itself: ``Check: crimson same trekking other``.

    It asks for the comparison at the very place where a relevance question needs it, and teaches it several times faster.
    """
    question = draw_question(rng, hard=hard, exact=exact)
    asked = {ATTRIBUTE_OF[word] for word in question.query.split()}
    pieces = [Piece(f"Query: {question.query}\nCheck:")]
    for word in question.item.split():
        plain = word.removesuffix(",")
        pieces.append(Piece(f" {plain}"))
        attribute = ATTRIBUTE_OF.get(plain)
        if attribute is not None:
            verdict = "other" if attribute in question.wrong else "same" if attribute in asked else "extra"
            pieces.append(Piece(f" {verdict}", "verdict"))
        if plain != word:
            pieces.append(Piece(","))
    return tuple(pieces)


def draw_request(rng: Random, *, held_out: bool = False) -> tuple[str, dict[str, str]]:
    """Return a prompt for a description, in chat form or as a plain completion, and its words for the product."""
    words = draw_words(draw_product(rng, held_out=held_out).only(draw_asked(rng)), rng)
    request = prompts.describe(as_phrase(words))
    if rng.random() < 0.5:
        return request, words
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.4 else None
    return prompts.chat(request, system=system), words


def description_document(rng: Random) -> Document:
    """Return a request and its description. After a plain request, the model also learns to begin a line."""
    request, words = draw_request(rng)
    start = () if request.endswith("\n") else (Piece("\n", "text"),)
    return Piece(request), *start, *_mark_names(write_description(words, rng), words), Piece(prompts.END, "text")


def _mark_names(text: str, words: dict[str, str]) -> Iterator[Piece]:
    """Separate the words that name the product: they are few, but a description of another product is useless."""
    names = "|".join(words.values())
    for part in re.split(rf"( (?:{names})\b)", text):
        if part:
            yield Piece(part, "name" if part[1:] in words.values() else "text")


def auxiliary_document(rng: Random) -> Document:
    """Return two words, or two phrases, that are synonyms or equal."""
    task = rng.choice(("Similar", "Reword", "Repeat"))
    if task == "Similar":
        concepts = WORDS[rng.choice(tuple(WORDS))]
        given, answer = rng.sample(rng.choice(concepts), 2)
    else:
        product = draw_product(rng)
        words = draw_words(product, rng)
        given, answer = as_phrase(words), as_phrase(words if task == "Repeat" else draw_words(product, rng))
    return Piece(f"{task}: {given} ="), Piece(f" {answer}{prompts.END}", "auxiliary")


def _one_of_each(rng: Random) -> tuple[Document, ...]:
    return relevance_document(rng, hard=0.5), check_document(rng, hard=0.5), description_document(rng), auxiliary_document(rng)


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Yield texts of all kinds for training a tokeniser."""
    rng = Random(seed)
    for _ in range(count):
        for document in _one_of_each(rng):
            yield "".join(piece.text for piece in document)
