"""Tokenisers of folders that have the vocabulary alone, compared with those that transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from transformers import BertTokenizer, RobertaTokenizer

from tests import weights
from tests.fakes import CORPUS
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.source import tokenizer_files

TEXTS = ["Überprüfung of THE  Fox's 東京 tyres,\tno.7 \n", "", "a<mask> b [MASK] c </s>", "unaffable 🙂 naïve café!", "x" * 120]


def write(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def check(folder: Path, reference: Any) -> None:
    made = tokenizers.Tokenizer.from_str(tokenizer_files(folder).tokenizer_json.decode())
    for text in TEXTS:
        assert made.encode(text).ids == reference(text)["input_ids"], text
        for other in TEXTS[2:]:
            found, wanted = made.encode(text, other), reference(text, other, return_token_type_ids=True)
            assert (found.ids, found.type_ids) == (wanted["input_ids"], wanted["token_type_ids"]), (text, other)


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        ("bert", {}),
        ("distilbert", {"do_lower_case": False, "tokenizer_class": "DistilBertTokenizer"}),
        ("ernie", {"tokenizer_class": "BertTokenizer"}),
    ],
)
def test_wordpiece(tmp_path: Path, kind: str, tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizers.Tokenizer.from_file(str(weights.minilm() / "tokenizer.json")).get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n", encoding="utf-8")
    write(tmp_path, {"model_type": kind, "architectures": ["BertModel"]}, tokenizer)
    check(tmp_path, BertTokenizer.from_pretrained(tmp_path, do_lower_case=tokenizer.get("do_lower_case", True)))


def test_byte_pairs(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    library.model.save(str(tmp_path))
    write(tmp_path, {"model_type": "roberta", "architectures": ["RobertaModel"]}, {})
    check(tmp_path, RobertaTokenizer.from_pretrained(tmp_path))


LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (LLAMA, ("", "")),
        (LLAMA | {"add_eos_token": True}, ("<s>", "</s>")),
        (LLAMA | {"add_eos_token": True, "add_bos_token": False}, ("", "</s>")),
        (LLAMA | {"tokenizer_class": "GemmaTokenizerFast", "add_bos_token": True}, ("<s>", "")),
        (LLAMA | {"tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True}, ("", "")),
        (LLAMA | {"tokenizer_class": "Qwen2Tokenizer", "add_eos_token": True}, ("", "")),
        (
            {**LLAMA, "tokenizer_class": "Qwen2Tokenizer", "add_eos_token": True, "auto_map": {"AutoTokenizer": ["own.py", None]}},
            ("", "</s>"),
        ),
    ],
)
def test_tokens_around_a_text_that_classes_of_release_4_add(tmp_path: Path, config: dict[str, Any], ends: tuple[str, str]) -> None:
    """As SFR-Embedding-Mistral and gte-Qwen2 are published: their tokenizer.json alone does not add the last token."""
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"model_type": "mistral", "architectures": ["MistralModel"]}, config)
    made = tokenizers.Tokenizer.from_str(tokenizer_files(tmp_path).tokenizer_json.decode())
    before, after = ([each] if each else [] for each in ends)
    assert made.encode("a b").tokens == [*before, "a", "b", *after]
    assert made.encode("a", "b").tokens == [*before, "a", *after, *before, "b", *after]


def test_tokens_around_a_text_that_do_not_exist(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"model_type": "mistral", "architectures": ["MistralModel"]}, LLAMA | {"add_eos_token": True})
    with pytest.raises(ModelError, match="add_bos_token and add_eos_token"):
        tokenizer_files(tmp_path)


def test_templates(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {})
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}')

    def found() -> tuple[str | None, str | None]:
        files = tokenizer_files(tmp_path)
        return files.chat_template, files.tool_template

    assert found() == ("of a processor", None)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert found() == ("plain", "tools")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("of a file")
    (tmp_path / "chat_template.jinja").write_text("own")
    assert found() == ("own", "of a file")


@pytest.mark.parametrize(
    ("files", "kind", "tokenizer", "message"),
    [
        ({}, "bert", {}, "There is no tokenizer.json"),
        ({"vocab.txt": "[UNK]\n"}, "xlm-roberta", {}, "There is no tokenizer.json"),
        ({"vocab.txt": "[UNK]\n"}, "bert", {"tokenizer_class": "BertJapaneseTokenizer"}, "of another kind"),
        ({"vocab.txt": "[UNK]\n", "added_tokens.json": "{}"}, "bert", {}, "of another kind"),
        ({"vocab.txt": "[UNK]\n"}, "bert", {}, "cannot be read"),
        ({"vocab.json": "{", "merges.txt": ""}, "roberta", {}, "cannot be read"),
    ],
)
def test_vocabularies_that_are_refused(
    tmp_path: Path, files: dict[str, str], kind: str, tokenizer: dict[str, Any], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    write(tmp_path, {"model_type": kind, "architectures": ["BertModel"]}, tokenizer)
    with pytest.raises(ModelError, match=message):
        tokenizer_files(tmp_path)
