"""The corpus is a function of its seed, keeps its promises about what is held out, and reveals the plan of its descriptions."""

from __future__ import annotations

from random import Random

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.demo_models.corpus.catalogue import ATTRIBUTES, HELD_OUT_SYNONYMS, WORDS, draw_product, is_held_out
from examples.demo_models.corpus.documents import description_document
from examples.demo_models.corpus.relevance import Question, draw_question, draw_test_question
from examples.demo_models.prompts import CHAT_TEMPLATE, END, chat

CONCEPT = {word: (attribute, i) for attribute, concepts in WORDS.items() for i, words in enumerate(concepts) for word in words}


def concepts_in(text: str) -> dict[str, int]:
    return dict(CONCEPT[word] for word in text.replace(",", "").split() if word in CONCEPT)


def words_of(text: str) -> set[str]:
    return {word for word in text.replace(",", "").split() if word in CONCEPT}


@pytest.mark.parametrize("hard", [0.0, 1.0])
def test_an_item_is_relevant_exactly_when_it_has_every_concept_of_the_query(hard: float) -> None:
    rng = Random(1)
    questions = [draw_question(rng, hard=hard) for _ in range(500)] + [draw_test_question(rng, hard=hard) for _ in range(500)]
    for question in questions:
        query, item = concepts_in(question.query), concepts_in(question.item)
        assert question.wrong == tuple(a for a in ATTRIBUTES if a in query and query[a] != item[a])
        if hard == 1.0:
            assert len(question.wrong) < 2
        else:
            assert len(question.wrong) != 1
    assert 0.4 < sum(question.relevant for question in questions) / len(questions) < 0.6


def test_training_questions_never_show_a_held_out_product_and_test_questions_always_do() -> None:
    def shows_held_out(text: str) -> bool:
        found = concepts_in(text)
        return {"colour", "use", "kind"} <= found.keys() and (7 * found["colour"] + 3 * found["use"] + found["kind"]) % 10 == 0

    rng = Random(2)
    for _ in range(1000):
        question = draw_question(rng, hard=0.7)
        assert not shows_held_out(question.query)
        assert not shows_held_out(question.item)
        assert shows_held_out(draw_test_question(rng, hard=1.0).query)
    assert not any(shows_held_out("".join(piece.text for piece in description_document(rng)).split(END)[0]) for _ in range(500))
    assert all(is_held_out(draw_product(rng, held_out=True)) for _ in range(50))


def test_held_out_synonyms_meet_only_in_the_test_that_asks_for_them() -> None:
    def meet(question: Question) -> bool:
        query, item = words_of(question.query), words_of(question.item)
        both = [CONCEPT[word] for word in query - item if CONCEPT[word] in {CONCEPT[other] for other in item}]
        return any(concept in HELD_OUT_SYNONYMS for concept in both)

    rng = Random(3)
    assert not any(meet(draw_question(rng, hard=0.7)) for _ in range(2000))
    assert all(meet(draw_test_question(rng, hard=1.0, synonyms=True)) for _ in range(200))


@pytest.mark.parametrize("system", [None, "Answer in plain English."])
def test_the_chat_template_renders_what_the_models_learned(system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "Describe: red shoes"})
    rendered = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert rendered == chat("Describe: red shoes", system=system)
