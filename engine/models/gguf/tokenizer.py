"""The ``tokenizer.json`` that the metadata of a GGUF file stand for, in the format of the ``tokenizers`` library.

A WordPiece tokeniser (``bert``) has a space, written as U+2581, before what begins a word, in place of ``##`` before what does not.
A byte-level BPE tokeniser (``gpt2``) names the expression that divides texts by the kind of its pre-tokeniser. A SentencePiece
tokeniser (``llama``) has scores in place of merges: two tokens merge if the result is a token, those of the highest score first.

Source of kinds and defaults: ``src/llama-vocab.cpp`` of https://github.com/ggml-org/llama.cpp; of the expressions, the
``tokenizer.json`` of the models that they come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from yardstick_llm.engine.models.files import Keys, ModelError
from yardstick_llm.engine.models.gguf.config import CONTROL
from yardstick_llm.engine.models.gguf.file import GGUFFile, read_gguf

NORMAL, UNKNOWN, USER_DEFINED, BYTE = 1, 2, 4, 6
"""Types of tokens, with :data:`~engine.models.gguf.config.CONTROL`."""
MAX_SPELLING = 1024
"""Longest token, in characters, that pairs are found for; longer ones of a SentencePiece tokeniser are never made by merging."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_AFTER_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA_3 = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_WORDS}"
_QWEN_2 = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_WORDS}"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_2, _DIGITS = "", "digits"
EXPRESSIONS = {
    **dict.fromkeys(
        ("default", "gpt-2", "phi-2", "olmo", "mpt", "exaone4", "gigachat", "a.x-4.0", "mellum", "granite-docling"), _GPT_2
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "stablelm2"), _QWEN_2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT_4O),
    "tekken": _TEKKEN,
}
"""How texts are divided before tokens are merged, by ``tokenizer.ggml.pre``: a regular expression, or GPT-2's division with or
without separate digits."""
_WHOLE_PIECES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Kinds whose pieces are tokens without merging where the vocabulary has them."""
_STARTING = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Kinds that begin texts with the first token where the metadata do not say."""
_NORMALISED = ("qwen2", "deepseek-r1-qwen")
"""Kinds whose models read texts in Unicode's form NFC."""
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "cls": "cls", "mask": "mask"}
"""Names of special tokens, and their names in GGUF, of which one is misspelled there."""


def tokenizer_document(path: Path) -> dict[str, Any]:
    """The ``tokenizer.json`` of the model. Raises :class:`ModelError`."""
    file = read_gguf(path)
    keys = Keys(dict(file.metadata), path.name)
    tokens = keys.strings("tokenizer.ggml.tokens")
    kind = keys.text("tokenizer.ggml.model", "")
    types = _list(file, keys, "tokenizer.ggml.token_type", len(tokens), [NORMAL] * len(tokens))
    if is_gemma := str(file.metadata.get("general.architecture")).startswith("gemma"):
        # Runs of spaces are tokens of users there, spelled with spaces.
        runs = [bool(token) and not token.strip(" ") for token in tokens]
        tokens = ["▁" * len(token) if run else token for token, run in zip(tokens, runs, strict=True)]
        types = [NORMAL if run else type_ for type_, run in zip(types, runs, strict=True)]
    vocab: dict[str, int] = {}
    for id, token in enumerate(tokens):
        vocab.setdefault(token, id)
    if kind == "bert":
        tokens = [_wordpiece_text(token) for token in tokens]
        vocab = {}
        for id, token in enumerate(tokens):
            vocab.setdefault(token, id)
        parts = _wordpiece(file, keys, vocab, tokens)
    elif kind == "gpt2":
        parts = _byte_level(keys, vocab)
    elif kind == "llama":
        # Gemma's merges follow the order of the tokens and not their scores.
        order: list[Any] = [-id for id in range(len(tokens))]
        scores = order if is_gemma else _list(file, keys, "tokenizer.ggml.scores", len(tokens), None)
        parts = _sentencepiece(keys, vocab, _merges(tokens, types, scores, vocab))
    else:
        raise keys.error("tokenizer.ggml.model", f"is {kind!r:.80}, which is not supported; use a model with gpt2, llama or bert")
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": id, "content": token, "special": type_ != USER_DEFINED, **plain}
        for id, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if token and vocab[token] == id and type_ in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _around(file, keys, kind, tokens),
        **parts,
    }


def special_tokens(path: Path) -> dict[str, str]:
    """Text of each special token by its name, such as ``bos_token``."""
    file = read_gguf(path)
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    ids = {f"{name}_token": file.metadata.get(f"tokenizer.ggml.{written}_token_id") for name, written in _NAMED.items()}
    return {name: tokens[id] for name, id in ids.items() if isinstance(id, int) and 0 <= id < len(tokens)}


def chat_template(path: Path) -> str | None:
    template = read_gguf(path).metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def tokenizer_json(path: Path) -> bytes:
    """:func:`tokenizer_document`, encoded."""
    return json.dumps(tokenizer_document(path), ensure_ascii=False).encode()


def _list(file: GGUFFile, keys: Keys, key: str, length: int, default: list[Any] | None) -> list[Any]:
    values = file.metadata.get(key, default)
    if not isinstance(values, list) or len(values) != length or not all(isinstance(value, int | float) for value in values):
        raise keys.error(key, f"must be {length} numbers, one for each token; download the model again")
    return values


def _wordpiece_text(token: str) -> str:
    if token.startswith("▁"):
        return token[1:]
    return token if token.startswith("[") and token.endswith("]") else f"##{token}"


def _wordpiece(file: GGUFFile, keys: Keys, vocab: dict[str, int], tokens: list[str]) -> dict[str, Any]:
    """The steps of BERT's tokeniser. llama.cpp reads texts in lower case, whatever the model does."""
    ends = [_special(file, tokens, *names) for names in (("cls", "bos"), ("seperator", "eos"))]
    before, after = ([{"SpecialToken": {"id": token, "type_id": 0}}] for token in ends)
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": ends[1], "type_id": 1}}]
    used = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in ends}
    unknown = _special(file, tokens, "unknown", default="[UNK]")
    if unknown not in vocab:
        raise keys.error("tokenizer.ggml.tokens", f"has no token {unknown:.80}; download the model again")
    return {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": used},
    }


def _special(file: GGUFFile, tokens: list[str], *names: str, default: str = "") -> str:
    """The text of the first of these special tokens that the metadata name."""
    ids = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    found = next((tokens[id] for id in ids if isinstance(id, int) and 0 <= id < len(tokens)), default)
    if not found:
        raise ModelError(f"{file.path.name} names no token for {names[0]}; download the model again.")
    return found


def _byte_level(keys: Keys, vocab: dict[str, int]) -> dict[str, Any]:
    kind = keys.text("tokenizer.ggml.pre", "default")
    expression = EXPRESSIONS.get(kind)
    if expression is None:
        known = ", ".join(EXPRESSIONS)
        raise keys.error("tokenizer.ggml.pre", f"is {kind!r:.80}, which is not supported; use a model with one of: {known}")
    merges = [merge.partition(" ")[::2] for merge in keys.strings("tokenizer.ggml.merges")]
    if unknown := next((pair for pair in merges if not {*pair, "".join(pair)} <= vocab.keys()), None):
        raise keys.error(
            "tokenizer.ggml.merges", f"joins {' and '.join(unknown)!r:.80}, which are no tokens; download the model again"
        )
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if expression == _GPT_2:
        steps: list[dict[str, Any]] = [bytes_of_text | {"use_regex": True}]
    elif expression == _DIGITS:
        steps = [{"type": "Digits", "individual_digits": True}, bytes_of_text | {"use_regex": True}]
    else:
        split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        steps = [split, bytes_of_text | {"use_regex": False}]
    return {
        "normalizer": {"type": "NFC"} if kind in _NORMALISED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": bytes_of_text | {"use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=kind in _WHOLE_PIECES),
    }


def _sentencepiece(keys: Keys, vocab: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    begins = keys.flag("tokenizer.ggml.add_space_prefix", True)
    ids = keys.ids("tokenizer.ggml.unknown_token_id")
    unknown = next((token for token, id in vocab.items() if id in ids), None)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders = [spaces | {"pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if begins:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if begins else []), spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }


def _merges(tokens: list[str], types: list[Any], scores: list[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens whose text is a token, best first."""
    pairs = []
    for token, type_, score in zip(tokens, types, scores, strict=True):
        if type_ not in (CONTROL, BYTE, UNKNOWN) and len(token) <= MAX_SPELLING:
            for end in range(1, len(token)):
                left, right = token[:end], token[end:]
                if left in vocab and right in vocab:
                    pairs.append((-score, len(left), len(right), vocab[left], left, right))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def _bpe(vocab: dict[str, int], merges: list[Any], **flags: Any) -> dict[str, Any]:
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    none = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return {"type": "BPE", **none, **off, **flags, "vocab": vocab, "merges": merges}


def _around(file: GGUFFile, keys: Keys, kind: str, tokens: list[str]) -> dict[str, Any] | None:
    """The step that puts the first and the last token around each text; None without one."""
    starts = kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in _STARTING
    sides = []
    for name, default in (("bos", starts), ("eos", False)):
        id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        wanted = keys.flag(f"tokenizer.ggml.add_{name}_token", default)
        sides.append([tokens[id]] if wanted and isinstance(id, int) and 0 <= id < len(tokens) else [])
    if not any(sides):
        return None
    before, after = ([{"SpecialToken": {"id": token, "type_id": 0}} for token in side] for side in sides)
    used = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for side in sides for token in side}
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *before, *second, *after], "special_tokens": used}
