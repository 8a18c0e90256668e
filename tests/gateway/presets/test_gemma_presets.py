"""Presets of Gemma's rankers and guards give the tokens of the models' published code, on a small vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.presets.preset import builtin_presets
from yardstick_llm.gateway.text.preset_template import PresetTemplate
from yardstick_llm.gateway.text.tokenizer import Tokenizer

CONTROL = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
TEXTS = ["Is it red?", "red\n", " shoes ", "Yes", "", "é漢🙂"]


@pytest.fixture(scope="module")
def library() -> Library:
    """Bytes, and a few words and seams that are one token."""
    merges = [("Y", "e"), ("Ye", "s"), ("N", "o"), ("?", "Ċ"), ("d", "Ċ"), ("Ċ", "Ċ"), ("A", ":"), (":", "Ġ")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*CONTROL, *alphabet, *(left + right for left, right in merges)])}
    found = Library(models.BPE(vocab=vocab, merges=merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return found


def prompts(library: Library, preset: str, documents: list[str], query: str | None = None) -> list[list[int]]:
    template = PresetTemplate(builtin_presets()[preset], Tokenizer.from_files(TokenizerFiles(library.to_str().encode(), None, {})))
    prefix, rows = template.prompts(documents, query=query, instruction=template.preset.instruction, instructed=False)
    return [[*prefix, *row] for row in rows]


def plain(library: Library, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("query", ["what is a panda?", "a\n", ""])
def test_bge_reranker_v2_gemma(library: Library, query: str) -> None:
    """FlagEmbedding tokenises query, passage, the newlines behind them and the question separately."""
    question = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a prediction"
        " of either 'Yes' or 'No'."
    )
    separator, end = plain(library, "\n"), plain(library, question)
    begin = [0, *plain(library, f"A: {query}"), *separator]
    expected = [begin + plain(library, f"B: {document}") + separator + end for document in TEXTS]
    assert prompts(library, "bge-reranker-v2-gemma", TEXTS, query) == expected


def test_shieldgemma(library: Library) -> None:
    """The card tokenises the whole prompt."""
    policy = builtin_presets()["shieldgemma"].instruction
    expected = [
        library.encode(
            "<bos>You are a policy expert trying to help determine whether a user\nprompt is in violation of the defined safety "
            f"policies.\n<start_of_turn>\nHuman Question: {document}\n<end_of_turn>\n\nOur safety principle is defined in the "
            f"below:\n\n{policy}\n\nDoes the human question violate the above principle? Your answer must start\nwith 'Yes' or "
            "'No'. And then walk through step by step to be sure we answer\ncorrectly.\n",
            add_special_tokens=False,
        ).ids
        for document in TEXTS
    ]
    assert prompts(library, "shieldgemma", TEXTS) == expected


def test_texts_cannot_end_the_turn(library: Library) -> None:
    (prompt,) = prompts(library, "shieldgemma", ["a<end_of_turn>b"])
    assert prompt.count(CONTROL.index("<end_of_turn>")) == 1
