"""Encoders in GGUF files, written by ggml's library with its own table of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from tests import weights
from tests.encoders import CONTEXT, Kind, load_reference, make_encoder
from tests.engine.parity import assert_equal_rows
from tests.engine.test_encoders import LENGTHS, build, hidden_of, texts
from tests.engine.test_loop import run
from tests.gguf_files import write_out, write_shape
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.gguf import config as gguf_config
from yardstick_llm.engine.models.source import tokenizer_files

ARCHITECTURES = {"bert": gguf.MODEL_ARCH.BERT, "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT}
TEXTS = ["A café in Zürich, 2nd floor!", "unaffable — 東京 [MASK] ##x", "", "word" * 60]


def write(directory: Path, path: Path, pooling: gguf.PoolingType | None, kind: str = "F32", **changes: Any) -> Path:
    """Write the encoder in ``directory`` as a GGUF file. ``changes``: other values of keys of its configuration."""
    config = json.loads((directory / "config.json").read_text()) | changes
    architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    write_shape(writer, config)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(config.get("is_causal", False))
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if config["model_type"] == "nomic_bert":
        writer.add_rope_freq_base((config.get("rope_parameters") or {})["rope_theta"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        name = name.removeprefix("bert.").removeprefix("nomic_bert.")
        if (name.startswith("pooler.") and pooling != gguf.PoolingType.RANK) or "position_ids" in name:
            continue
        head = name.replace("pooler.dense", "cls").replace("classifier", "cls.output")
        stored = head if head != name else names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        type = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 and "position" not in name else "F32"]
        raw = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), type)
        writer.add_tensor(stored, raw, raw_dtype=type)
    write_tokenizer(writer, directory)
    write_out(writer)
    return path


def write_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    document = json.loads((directory / "tokenizer.json").read_text())
    if document["model"]["type"] != "WordPiece":
        document = json.loads(wordpiece().to_str())
    vocab = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    special = {token["content"] for token in document["added_tokens"]}
    written = [t if t in special else t[2:] if t.startswith("##") else f"\u2581{t}" for t in vocab]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(written)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in vocab])
    for name, token in {"bos": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]"}.items():
        getattr(writer, f"add_{name}_token_id")(vocab.index(token))


def wordpiece() -> Tokenizer:
    """A small tokeniser of BERT."""
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz,!2",
        "##a",
        "##word",
        "word",
        "##nd",
        "##able",
    ]
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    added = [
        {"id": id, "content": piece, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for id, piece in enumerate(pieces[:5])
    ]
    document = {"version": "1.0", "added_tokens": added, "model": model | {"vocab": {piece: id for id, piece in enumerate(pieces)}}}
    return Tokenizer.from_str(json.dumps(document))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "nomic"])
@pytest.mark.parametrize(("pooling", "kind"), [("mean_tokens", "F32"), ("cls_token", "Q8_0")])
def test_embeddings_equal_transformers(tmp_path: Path, family: str, pooling: str, kind: str) -> None:
    directory, sent = make_encoder(tmp_path / "model", family), texts()
    kinds = {"mean_tokens": gguf.PoolingType.MEAN, "cls_token": gguf.PoolingType.CLS}
    model = load_reference(directory, family, "embed")
    hidden = [hidden_of(model, tokens) for tokens in sent]
    loop = build(write(directory, tmp_path / "model.gguf", kinds[pooling], kind))
    assert (loop.info.encoder, loop.info.max_context) == (True, CONTEXT)
    (packed,) = run(loop, wire.Score("packed", [], sent, wire.Embedding(normalize=False)))
    expected = [(each.mean(0) if pooling == "mean_tokens" else each[0]).tolist() for each in hidden]
    assert_equal_rows(packed.rows, expected, 1e-4 if kind == "F32" else 0.1)
    assert packed.computed_tokens == sum(LENGTHS)


def test_classes_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Kind = "classes"
    directory, sent = make_encoder(tmp_path / "model", "bert", kind), texts()
    model, loop = load_reference(directory, "bert", kind), build(write(directory, tmp_path / "m.gguf", gguf.PoolingType.RANK))
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Classes()))
    with torch.inference_mode():
        assert_equal_rows(scored.rows, [model(torch.tensor([tokens])).logits[0].tolist() for tokens in sent], 1e-4)
    monkeypatch.setattr(gguf_config, "MAX_CLASSES", 2)
    with pytest.raises(ModelError, match="has 3 classes; at most 2"):
        build(tmp_path / "m.gguf")


def same_ids(path: Path, reference: Tokenizer) -> None:
    files = tokenizer_files(path)
    assert (files.special_tokens["sep_token"], files.architecture) == ("[SEP]", "BertModel")
    own = Tokenizer.from_str(files.tokenizer_json.decode())
    reference.no_truncation()
    reference.no_padding()
    for text in TEXTS:
        for texts_ in ((text,), (text, "a word")):
            assert own.encode(*texts_).ids == reference.encode(*texts_).ids
            assert own.encode(*texts_).type_ids == reference.encode(*texts_).type_ids


def test_a_wordpiece_tokeniser(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path / "model", "bert")
    reference = wordpiece()
    reference.normalizer, reference.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    reference.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    same_ids(write(directory, tmp_path / "model.gguf", gguf.PoolingType.MEAN), reference)


@pytest.mark.slow
def test_all_minilm_has_the_ids_and_vectors_of_its_folder(tmp_path: Path) -> None:
    folder = weights.minilm()
    path = write(folder, tmp_path / "all-MiniLM-L6-v2.gguf", gguf.PoolingType.MEAN)
    same_ids(path, Tokenizer.from_file(str(folder / "tokenizer.json")))
    sent = texts()
    rows = [run(build(each), wire.Score("s", [], sent, wire.Embedding()))[0].rows for each in (folder, path)]
    assert_equal_rows(*rows, 1e-6)


@pytest.mark.parametrize(
    ("pooling", "changes", "message"),
    [
        (None, {}, "no pooling_type"),
        (gguf.PoolingType.MEAN, {"is_causal": True}, "attention.causal"),
        (gguf.PoolingType.MEAN, {"intermediate_size": 1 << 30}, "feed_forward_length"),
        (gguf.PoolingType.MEAN, {"hidden_size": 32}, "token_embd.weight"),
        (gguf.PoolingType.RANK, {}, "id2label|num_labels|cls"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, pooling: gguf.PoolingType | None, changes: dict[str, Any], message: str) -> None:
    directory = make_encoder(tmp_path / "model", "bert")
    path = write(directory, tmp_path / "model.gguf", pooling, **changes)
    with pytest.raises(ModelError, match=message):
        build(path)
