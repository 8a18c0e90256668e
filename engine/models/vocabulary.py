"""The ``tokenizer.json`` of a model, with what other files say of it, or made of the vocabulary alone, as transformers does.

Early models have ``vocab.txt`` (BERT's WordPiece) or ``vocab.json`` and ``merges.txt`` (RoBERTa's BPE of bytes). Sources:
``BertTokenizer`` and ``RobertaTokenizer`` of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from yardstick_llm.engine.models.files import Keys, ModelError, read_json
from yardstick_llm.engine.models.pooling import TASKS_KEY
from yardstick_llm.engine.wire import TASK_TOKEN

WORDPIECE_FILES, BPE_FILES = ("vocab.txt",), ("vocab.json", "merges.txt")
VOCABULARY_FILES = (*WORDPIECE_FILES, *BPE_FILES)
ADDING_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
"""Classes of transformers 4 that decide which tokens are around a text."""
WORDPIECE_TYPES, BPE_TYPES = ("bert", "distilbert", "electra", "ernie"), ("roberta",)
_ADVICE = "make one with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers."


def tokenizer_json_of(directory: Path, config: dict[str, Any]) -> bytes:
    """``tokenizer.json`` of the model in ``directory``, or what stands for it. ``config``: ``tokenizer_config.json``, or nothing.

    Raises :class:`ModelError` where there is neither the file nor a vocabulary that is known.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        return _with_tasks(_with_ends(path.read_bytes(), config), directory / "config.json")
    kind = read_json(directory / "config.json").get("model_type")
    names = WORDPIECE_FILES if kind in WORDPIECE_TYPES else BPE_FILES if kind in BPE_TYPES else ()
    if not names or not all((directory / name).is_file() for name in names):
        raise ModelError(f"There is no tokenizer.json in the model directory, which gateways need for texts; {_ADVICE}")
    named = _class_of(config).removesuffix("Tokenizer").lower()
    if named not in ("", *WORDPIECE_TYPES, *BPE_TYPES) or (directory / "added_tokens.json").is_file():
        raise ModelError(f"There is no tokenizer.json in the model directory, and its vocabulary is of another kind; {_ADVICE}")
    try:
        made = _wordpiece(directory, config) if names == WORDPIECE_FILES else _byte_pairs(directory, config)
    except (KeyError, ValueError, OSError, IndexError, RecursionError) as error:
        raise ModelError(f"{' and '.join(names)} in the model directory cannot be read; download the model again.") from error
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, **made}).encode()


def _with_tasks(document: bytes, config: Path) -> bytes:
    """``tokenizer.json`` with a control token for each task of the model (:class:`~engine.models.encoder_config.Tasks`)."""
    keys = Keys(read_json(config) if config.is_file() else {}, config.name)
    if not keys.present(TASKS_KEY):
        return document
    try:
        raw = json.loads(document)
        known = {*(token["id"] for token in raw["added_tokens"])} | {*range(len(raw["model"]["vocab"]))}
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ModelError("tokenizer.json has no vocabulary and added_tokens; download the model again.") from error
    if len(known) != (size := keys.count("vocab_size")):
        raise keys.error("vocab_size", f"is {size}, and tokenizer.json has {len(known)} tokens; download the model again")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for place, name in enumerate(keys.strings(TASKS_KEY)):
        raw["added_tokens"].append({"id": size + place, "content": TASK_TOKEN.format(name), **flags, "special": True})
    return json.dumps(raw).encode()


def _with_ends(document: bytes, config: dict[str, Any]) -> bytes:
    """``tokenizer.json`` with the tokens around a text that ``tokenizer_config.json`` asks for, as
    classes of transformers 4 put them in place of those in the file: models are published for these."""
    kind, code = _class_of(config), Keys(config, "tokenizer_config.json").section("auto_map")
    own = kind == "Qwen2Tokenizer" and code is not None and code.present("AutoTokenizer")  # its own code does the same
    begins, ends = config.get("add_bos_token"), config.get("add_eos_token")
    if (begins is None and ends is None) or not (own or kind in ADDING_CLASSES):
        return document
    asked = ("bos", not own if begins is None else begins), ("eos", ends)
    bos, eos = ([special_token(config, f"{name}_token")] * bool(adds and config.get(f"{name}_token")) for name, adds in asked)
    try:
        raw = json.loads(document)
        ids = {token["content"]: token["id"] for token in raw["added_tokens"]}
        raw["post_processor"] = _template([*bos, "A", *eos], [*bos, "A", *eos, *bos, "B", *eos], ids, second=0)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        message = "add_bos_token and add_eos_token in tokenizer_config.json name tokens that tokenizer.json does not have"
        raise ModelError(f"{message}; correct one of the files.") from error
    return json.dumps(raw, ensure_ascii=False).encode()


def _wordpiece(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    lines = (directory / "vocab.txt").read_text(encoding="utf-8").split("\n")
    vocabulary = {line.removesuffix("\r"): id for id, line in enumerate(lines[: len(lines) - (lines[-1] == "")])}
    special = [special_token(config, f"{name}_token", f"[{name.upper()}]") for name in ("pad", "unk", "cls", "sep", "mask")]
    _, unknown, cls, sep, _ = special
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
        "strip_accents": config.get("strip_accents"),
        "lowercase": config.get("do_lower_case", True),
    }
    longest = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {
        "added_tokens": _added(special, vocabulary),
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template([cls, "A", sep], [cls, "A", sep, "B", sep], vocabulary, second=1),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": unknown, "vocab": vocabulary, **longest},
    }


def _byte_pairs(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    merges = [line for line in (directory / "merges.txt").read_text(encoding="utf-8").split("\n") if line.strip()]
    usual = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    cls, _, sep, _, mask = special = [special_token(config, f"{name}_token", text) for name, text in usual.items()]
    space = {"add_prefix_space": config.get("add_prefix_space", False), "trim_offsets": True, "use_regex": True}
    return {
        "added_tokens": _added(special, vocabulary, mask),
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **space},
        "post_processor": _template([cls, "A", sep], [cls, "A", sep, sep, "B", sep], vocabulary, second=0),
        "decoder": {"type": "ByteLevel", **space},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "vocab": vocabulary,
            "merges": merges[merges[0].startswith("#version") :],
        },
    }


def _class_of(config: dict[str, Any]) -> str:
    """Name of the tokeniser's class, with or without ``Fast`` in the file; empty where it has none."""
    return str(config.get("tokenizer_class") or "").removesuffix("Fast")


def special_token(config: dict[str, Any], key: str, usual: str = "") -> str:
    """Text of a special token, which ``tokenizer_config.json`` has as it is or as ``content`` of an object. Raises
    :class:`ModelError`."""
    given = config.get(key) or usual
    text = given.get("content") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise ModelError(f"{key} in tokenizer_config.json is {given!r:.80}, but must be the text of a token; correct the file.")
    return text


def _added(tokens: list[str], vocabulary: dict[str, int], mask: str | None = None) -> list[dict[str, Any]]:
    """Entries of special tokens, in the order of their ids. ``mask`` takes the space before it, as in RoBERTa."""
    flags = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    known = sorted((vocabulary[token], token) for token in tokens if token in vocabulary)
    return [{"id": id, "content": token, "lstrip": token == mask, **flags} for id, token in known]


def _template(single: list[str], pair: list[str], vocabulary: dict[str, int], second: int) -> dict[str, Any]:
    """The special tokens around a text, and around the texts A and B of a pair, whose second half has the type ``second``."""

    def entries(parts: list[str]) -> list[dict[str, Any]]:
        found, type_id = [], 0
        for part in parts:
            type_id = second if part == "B" else type_id
            kind, key = ("Sequence", part) if part in ("A", "B") else ("SpecialToken", part)
            found.append({kind: {"id": key, "type_id": type_id}})
        return found

    marks = {part: {"id": part, "ids": [vocabulary[part]], "tokens": [part]} for part in pair if part not in ("A", "B")}
    return {"type": "TemplateProcessing", "single": entries(single), "pair": entries(pair), "special_tokens": marks}
