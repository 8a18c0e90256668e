"""Presets of Mistral's embedding models give the tokens of the models' published code, on a small vocabulary."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.gateway.text.conftest import sentencepiece_with_bos
from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.presets.preset import builtin_presets
from yardstick_llm.gateway.text.preset_template import PresetTemplate
from yardstick_llm.gateway.text.tokenizer import Tokenizer

TEXTS = ["How much protein should a female eat?", "", " two  spaces ", "\n\nnewlines\n", "東京 🙂", "</s> and <s>", "{document}"]


@pytest.mark.parametrize("instruction", ["", "Given a web search query, retrieve relevant passages that answer the query"])
def test_e5_mistral(instruction: str) -> None:
    """The card's tokenizer puts ``<s>`` and ``</s>`` around a text, although its tokenizer.json has ``<s>`` alone."""
    library = sentencepiece_with_bos()
    template = PresetTemplate(
        builtin_presets()["e5-mistral"], Tokenizer.from_files(TokenizerFiles(library.to_str().encode(), None, {}))
    )
    document = json.loads(library.to_str())
    document["added_tokens"] = []  # texts that spell control tokens stay text
    plain = tokenizers.Tokenizer.from_str(json.dumps(document))
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(token, library.token_to_id(token)) for token in ("<s>", "</s>")]
    )
    published = PreTrainedTokenizerFast(tokenizer_object=plain)
    texts = [f"Instruct: {instruction}\nQuery: {text}" if instruction else text for text in TEXTS]
    expected = published(texts)["input_ids"]
    prefix, rows = template.prompts(TEXTS, instruction=instruction, instructed=bool(instruction), param="input")
    assert [[*prefix, *row] for row in rows] == expected
