"""The shipped models keep what is promised of them. Every figure is measured on the weights in the repository."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer

from examples.demo_models.evaluate import description_lengths, label_scores, relevance_auc, value_correlation
from examples.demo_models.forward import causal_hidden
from examples.demo_models.prompts import CHAT_TEMPLATE, END, LABELS, PAD, START, score_item, score_query
from examples.demo_models.shapes import count_parameters
from examples.demo_models.text import load_tokenizer
from yardstick_llm.engine.demo import MODELS
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.lenvm import LenVM, load_lenvm
from yardstick_llm.engine.models.loader import load_model

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODELS / "base")


@pytest.fixture(scope="module")
def base() -> Decoder:
    return load_model(MODELS / "base")


@pytest.fixture(scope="module")
def value_model() -> LenVM:
    return load_lenvm(MODELS / "lenvm")


def test_sizes(base: Decoder, value_model: LenVM) -> None:
    assert 2_000_000 <= count_parameters(base) <= 4_000_000
    assert count_parameters(value_model) <= count_parameters(base) / 2
    assert sum(path.stat().st_size for path in MODELS.rglob("*.safetensors")) <= 12 * MEGABYTE


def test_labels_and_special_tokens_are_one_token_each(tokenizer: Tokenizer, base: Decoder) -> None:
    for text in (*LABELS, "Yes", "No", START, END, PAD):
        assert len(tokenizer.encode(text).ids) == 1, text
    assert base.config.eos_token_ids == (tokenizer.token_to_id(END),)
    assert tokenizer.get_vocab_size() == base.config.vocab_size


def test_both_models_have_one_tokeniser_and_the_chat_template() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "base" / name).read_bytes() == (MODELS / "lenvm" / name).read_bytes()
    config = json.loads((MODELS / "base" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE
    assert config["eos_token"] == END


@pytest.mark.slow
def test_relevance_of_held_out_products(base: Decoder, tokenizer: Tokenizer) -> None:
    assert relevance_auc(base, tokenizer, hard=0.7, questions=300) >= 0.95
    assert relevance_auc(base, tokenizer, hard=1.0, questions=300) >= 0.93


@pytest.mark.slow
def test_relevance_of_plain_lines_and_of_new_pairs_of_synonyms(base: Decoder, tokenizer: Tokenizer) -> None:
    assert relevance_auc(base, tokenizer, hard=0.7, questions=300, short=True) >= 0.93
    assert relevance_auc(base, tokenizer, hard=0.7, questions=300, synonyms=True) >= 0.85


def test_the_readmes_example_ranks_sensibly(base: Decoder, tokenizer: Tokenizer) -> None:
    items = ["crimson jogging sneakers", "blue running shoes", "red running jacket", "ivory silk evening gown"]
    scores = label_scores(base, tokenizer, [score_query("red running shoes") + score_item(item) for item in items])
    assert scores[0] > 0
    assert all(score < 0 for score in scores[1:])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "chat"])
def test_descriptions_vary_in_length_and_end(base: Decoder, tokenizer: Tokenizer, form: str) -> None:
    lengths = description_lengths(base, tokenizer, count=64, chat=form == "chat")
    assert 40 <= lengths.mean <= 80
    assert lengths.deviation >= 0.5
    assert lengths.ended >= 0.98


@pytest.mark.slow
def test_the_value_ranks_remaining_lengths(base: Decoder, value_model: LenVM, tokenizer: Tokenizer) -> None:
    assert value_correlation(base, value_model, tokenizer, count=64) >= 0.6


def test_the_value_falls_towards_the_end(value_model: LenVM, tokenizer: Tokenizer) -> None:
    """The announced number of points counts, and so does how many of them are written."""
    texts = [
        "Describe: red shoes\nA review in eleven parts. Part one:",
        "Describe: red shoes\nA guide in four steps. Step one:",
        "Describe: red shoes\nA note in one line. First,",
    ]
    values = [_value_after(value_model, tokenizer, text) for text in texts]
    assert values == sorted(values, reverse=True)


@torch.inference_mode()
def _value_after(value_model: LenVM, tokenizer: Tokenizer, text: str) -> float:
    hidden = causal_hidden(value_model, torch.tensor([tokenizer.encode(text).ids]))
    return value_model.value(hidden[0, -1:])[1].item()
