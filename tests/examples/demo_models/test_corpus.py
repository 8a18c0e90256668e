"""The corpus is a function of its seed, keeps its promises about what is held out, and reveals the plan of its descriptions."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.demo_models.corpus.catalogue import ATTRIBUTES, HELD_OUT_SYNONYMS, WORDS, draw_product, is_held_out
from examples.demo_models.corpus.descriptions import NUMBERS, write_description
from examples.demo_models.corpus.documents import (
    SYSTEM_MESSAGES,
    Piece,
    check_document,
    description_document,
    relevance_document,
    sample_texts,
)
from examples.demo_models.corpus.relevance import Question, draw_question, draw_test_question
from examples.demo_models.evaluate import spearman
from examples.demo_models.prompts import CHAT_TEMPLATE, END, chat, describe, score_item, score_query

CONCEPT = {word: (attribute, i) for attribute, concepts in WORDS.items() for i, words in enumerate(concepts) for word in words}


def concepts_in(text: str) -> dict[str, int]:
    return dict(CONCEPT[word] for word in text.replace(",", "").split() if word in CONCEPT)


def words_of(text: str) -> set[str]:
    return {word for word in text.replace(",", "").split() if word in CONCEPT}


def test_a_seed_gives_the_same_text_again_and_another_seed_does_not() -> None:
    assert list(sample_texts(5, 40)) == list(sample_texts(5, 40))
    assert list(sample_texts(5, 40)) != list(sample_texts(6, 40))


def test_no_word_has_two_meanings() -> None:
    assert len(CONCEPT) == sum(len(words) for concepts in WORDS.values() for words in concepts)


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


def test_what_is_learned_is_the_answer_not_the_question() -> None:
    rng = Random(4)
    for _ in range(200):
        prompt, label, reason = relevance_document(rng, hard=0.5)
        assert prompt.kind is None
        assert label.text.strip() in {"Yes", "No"}
        assert reason.text.endswith(END)
        assert ("wrong" in reason.text) == (label.text.strip() == "No")


def test_the_words_that_name_the_product_are_told_from_the_rest_of_a_description() -> None:
    rng = Random(8)
    names = 0
    for _ in range(200):
        request, *pieces = description_document(rng)
        named = words_of(request.text.replace(END, " "))
        for piece in pieces:
            assert (piece.kind == "name") == (piece.text.strip() in named)
            names += piece.kind == "name"
        assert pieces[-1] == Piece(END, "text")
    assert names > 100


def test_checks_judge_every_word_of_the_item() -> None:
    rng = Random(6)
    seen = set()
    for _ in range(300):
        head, *pieces = check_document(rng, hard=0.5)
        query = concepts_in(head.text)
        for word, verdict in pairwise(pieces):
            if verdict.kind != "verdict":
                continue
            attribute, concept = CONCEPT[word.text.strip()]
            expected = "extra" if attribute not in query else "same" if query[attribute] == concept else "other"
            assert verdict.text == f" {expected}"
            seen.add(expected)
    assert seen == {"extra", "same", "other"}


def test_exact_questions_repeat_the_words_of_the_query() -> None:
    rng = Random(7)
    questions = [question for _ in range(200) if (question := draw_question(rng, hard=1.0, exact=1.0)).relevant]
    assert all(words_of(question.query) <= words_of(question.item) for question in questions)


def test_prompt_formats() -> None:
    assert score_query("red shoes") + score_item("scarlet sneakers") == "Query: red shoes\nItem: scarlet sneakers\nRelevant:"
    assert score_item("scarlet sneakers", short=True) == "scarlet sneakers"
    assert chat(describe("red shoes")) == "<|start|>user\nDescribe: red shoes<|end|>\n<|start|>assistant\n"
    assert chat("Hi", system=SYSTEM_MESSAGES[0]).startswith("<|start|>system\nYou are a helpful assistant.<|end|>\n<|start|>user\n")


@pytest.mark.parametrize("system", [None, "Answer in plain English."])
def test_the_chat_template_renders_what_the_models_learned(system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "Describe: red shoes"})
    rendered = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert rendered == chat("Describe: red shoes", system=system)


def test_the_remaining_length_can_be_told_from_the_announced_plan() -> None:
    """A reader who only multiplies the announced points that are still to come by a usual length already ranks states well."""
    rng = Random(5)
    guesses, truths = [], []
    for _ in range(300):
        words = write_description({"kind": "shoes", "colour": "red"}, rng).split()
        count = NUMBERS.index(next(word for word in words if word in NUMBERS)) + 1
        ends = [i for i, word in enumerate(words) if word.endswith(".")]
        for i in range(4, len(words)):
            points_done = sum(end < i for end in ends) - 1
            guesses.append(max(0.0, 7.0 * (count - points_done)))
            truths.append(float(len(words) - i))
    assert spearman(torch.tensor(guesses), torch.tensor(truths)) > 0.9
