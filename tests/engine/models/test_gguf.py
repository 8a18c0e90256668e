"""GGUF files against transformers: weights of every type and architecture, configurations, tokenisers, and damaged files."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from tests import weights
from tests.checkpoints import make_checkpoint
from tests.engine.models.test_decoder import LLAMA3, YARN, own_logits, some_tokens
from tests.gguf_files import SHAPE, write_gguf
from yardstick_llm.engine.models import checkpoint
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats import stored
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.formats.int8 import Int8Linear
from yardstick_llm.engine.models.formats.published import read_stored
from yardstick_llm.engine.models.gguf.blocks import DENSE, read_weight
from yardstick_llm.engine.models.gguf.file import TYPES, GGUFTensor
from yardstick_llm.engine.models.gguf.tokenizer import EXPRESSIONS, tokenizer_document
from yardstick_llm.engine.models.loader import fingerprint, load_model
from yardstick_llm.engine.models.modules import ConvertedLinear
from yardstick_llm.engine.models.source import tokenizer_files
from yardstick_llm.gateway.text.tokenizer import Tokenizer
from yardstick_llm.kernels.int8 import instructions

GEMMA = {"query_pre_attn_scalar": 64}
"""Files do not have it; it is the width of a head."""
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "Q8_0", {"rope_parameters": LLAMA3}),
    ("gemma3", "Q5_K", GEMMA | {"rope_parameters": LINEAR}),
    ("phi4_mini", "BF16", {"num_attention_heads": 8, "head_dim": 32}),
    ("llama", "IQ4_NL", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen2", "Q5_0", {"rope_parameters": YARN}),
    ("qwen2", "Q4_0", {"tie_word_embeddings": True}),
    ("qwen3", "Q6_K", {}),
    ("qwen3", "F16", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}),
    ("gemma", "F32", {}),
    ("gemma2", "Q4_K", GEMMA),
    ("phi3", "Q4_1", {}),
    ("granite", "Q5_1", {}),
]
"""Families, types and keys, so that each of them occurs."""
QUICK = 3
TEXTS = [
    "The capital of France is",
    " Leading and  two   three    spaces\n\n\n\ttabs ",
    "12345 1,234.5 3rd don't WE'LL I'm",
    "naïve café — 東京 🙂 Ünïcödé ﬁ 𝓗 ▁▁ \u0301e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<start_of_turn>",
    "x = [1,2,3]\r\n  return {'a': b}; // 100%",
    "",
]


@pytest.mark.parametrize(
    ("family", "kind", "keys"), [*MODELS[:QUICK], *(pytest.param(*model, marks=pytest.mark.slow) for model in MODELS[QUICK:])]
)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, kind: str, keys: dict[str, Any]):
    path = tmp_path / "model.gguf"
    reference = write_gguf(make_checkpoint(tmp_path / "checkpoint", family, **(SHAPE | keys)), path, kind)
    tokens = some_tokens()
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert torch.allclose(own_logits(load_model(path), tokens), expected, atol=1e-4, rtol=1e-4)


CODED = [("Q4_K", {"v_proj": "Q6_K", "down_proj": "Q6_K"}), ("Q4_0", {"v_proj": "Q5_1", "k_proj": "Q8_0"})]
CODED += [(kind, {}) for kind in TYPES if kind not in DENSE]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "others"), CODED)
def test_codes_multiply_as_they_are(tmp_path: Path, kind: str, others: dict[str, str]):
    """Also where the projections into heads have different types; the layers take as little memory as the file promises."""
    directory = make_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=1, **SHAPE)
    reference = write_gguf(directory, tmp_path / "model.gguf", kind, others=others)
    decoder, tokens = load_model(tmp_path / "model.gguf", quantize=stored.NAME), some_tokens(40)
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert torch.allclose(own_logits(decoder, tokens), expected, atol=1e-4, rtol=1e-4)
    parts = [part for part in decoder.modules() if isinstance(part, ConvertedLinear)]
    assert len(parts) == 4
    numbers = sum(math.prod(weight.shape) for name, weight in reference.named_parameters() if "_proj" in name)
    codes = sum(buffer.nbytes for part in parts for name, buffer in part.named_buffers() if name == "codes")
    promised = numbers * (0.5 if kind[:2] == "Q4" and not others else 0.85 if others else 1)
    assert codes <= promised
    if instructions() is not None:
        decoder = load_model(tmp_path / "model.gguf", quantize=stored.IN_INT8)
        found = own_logits(decoder, tokens)
        assert (found - expected).norm() < 3e-2 * expected.norm()
        weights = [part.weight for part in decoder.modules() if isinstance(part, Int8Linear)]
        assert sum(weight.codes.nbytes for weight in weights) <= promised


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_those_of_ggml(tmp_path: Path, kind: str):
    """Of random bytes, some of which are no numbers, and of more rows than are read at a time."""
    tensor = GGUFTensor(tmp_path / "bytes", "weight", kind, (9000, 512), 64)
    raw = np.random.default_rng(0).integers(0, 256, (9000, tensor.row_bytes), dtype=np.uint8)
    tensor.path.write_bytes(bytes(64) + raw.tobytes())
    found = read_weight(tensor)
    dense = found.dequantize() if isinstance(found, CodedWeight) else found.float()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dense.numpy(), expected, equal_nan=True)


def test_a_file_that_was_merged_counts_no_parts(tmp_path: Path) -> None:
    """As ``llama-gguf-split --merge`` writes it."""
    directory = make_checkpoint(tmp_path / "checkpoint", "llama", **SHAPE)
    path = tmp_path / "merged.gguf"
    write_gguf(directory, path, "Q8_0", lambda writer: writer.add_uint16("split.count", 0))
    assert load_config(path).num_layers == 3
    parts = [tmp_path / f"merged-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.symlink_to(path)
    with pytest.raises(ModelError, match="is the first of 1 parts, and its name says 2"):
        load_config(parts[0])


def test_parts_of_a_file_and_parts_of_its_tensors(tmp_path: Path):
    directory = make_checkpoint(tmp_path / "checkpoint", "llama", **SHAPE)
    write_gguf(directory, tmp_path / "whole.gguf", "Q8_0")
    write_gguf(directory, tmp_path / "model.gguf", "Q8_0", split=8)
    parts = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(parts) > 2
    whole = load_model(tmp_path / "whole.gguf").checkpoint_views()
    found = load_model(parts[1]).checkpoint_views()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    headers = read_stored(parts[0])
    for name, lengths in {"q_proj": (128, 256), "o_proj": (256, 128)}.items():  # of two processes
        name = f"model.layers.1.self_attn.{name}.weight"
        half = torch.empty(lengths)
        checkpoint.copy(headers, {name: half}, 1)
        assert torch.equal(half, whole[name][256 - lengths[0] :, 256 - lengths[1] :])
    digests = {fingerprint(path, torch.float32) for path in (tmp_path / "whole.gguf", parts[0])}
    assert len(digests) == 2
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-.*missing beside"):
        load_config(parts[0])


def test_a_model_that_embeds(tmp_path: Path):
    directory = make_checkpoint(tmp_path / "checkpoint", "qwen3", tie_word_embeddings=True, **SHAPE)
    write_gguf(directory, tmp_path / "model.gguf", change=lambda writer: writer.add_pooling_type(gguf.PoolingType.LAST))
    config = load_config(tmp_path / "model.gguf")
    assert (config.architecture, config.pooling.mode, config.lm_head) == ("Qwen3Model", "last", False)
    load_model(tmp_path / "model.gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of Llama."""
    directory = tmp_path_factory.mktemp("gguf")
    made = make_checkpoint(directory / "checkpoint", "llama", **SHAPE, num_hidden_layers=2)
    write_gguf(made, directory / "tiny.gguf", "Q8_0")
    return directory / "tiny.gguf"


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_files(tokenizer_files(path))


@pytest.mark.slow
def test_ids_of_published_tokenisers():
    path = weights.smollm2()
    own, reference = tokenizer_of(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == reference(text)["input_ids"], text
        assert own.decode(ids, skip_special_tokens=False) == text
    files = tokenizer_files(path)
    assert files.chat_template == reference.chat_template
    assert files.special_tokens["eos_token"] == reference.eos_token == "<|im_end|>"


@pytest.mark.slow
def test_ids_of_gemma():
    """Golden ids of transformers 5.23, which takes minutes to read this file."""
    own = tokenizer_of(weights.gemma3())
    for text, ids in {
        "The capital of France is": [2, 818, 5279, 529, 7001, 563],
        "naïve café — 東京 🙂 <start_of_turn>user\nhi<end_of_turn>": [
            *(2, 1789, 238527, 560, 33443, 2192, 86459, 57235, 236743, 105, 2364, 107, 2202, 106),
        ],
        "x = [1,2,3]\r\n": [2, 236781, 578, 870, 236770, 236764, 236778, 236764, 236800, 236842, 251, 107],
        "<h1>a</h1>   b    c": [2, 184, 236746, 191, 139, 236763, 140, 236755],
        "\n\n\n\nabc\x00": [2, 110, 28180, 238],
    }.items():
        assert own.encode(text) == ids, text
        assert own.decode(ids) == text.replace("<start_of_turn>", "").replace("<end_of_turn>", "")


def test_a_sentencepiece_tokeniser(tmp_path: Path):
    """Phi-3's, whose texts begin with a space, on a small vocabulary with bytes and words of several scores."""
    words = ["▁", "e", "t", "h", "▁t", "▁th", "▁the", "he", "re", "r", "a", "▁a", "at", "▁▁", "te", "er", "ee", "th", "tt"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<|end|>", "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), 3, 4]
    scores = [0.0] * 259 + [-float((7 * place) % 19) for place in range(len(words))] + [0.0, 0.0]

    def write(writer: gguf.GGUFWriter) -> None:
        for key in list(writer.kv_data[0]):
            if key.startswith("tokenizer.ggml"):
                del writer.kv_data[0][key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    write_gguf(make_checkpoint(tmp_path / "checkpoint", "phi3", **SHAPE), tmp_path / "model.gguf", change=write)
    described = {"tokenizer_type": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    reference, _ = convert_gguf_tokenizer("phi3", described)
    own = tokenizer_of(tmp_path / "model.gguf")
    for text in ["the tree there", "  teether a the", "that<|end|>there the", "Ü 🙂 theat", "", "ttt eee a", "<tool> the<tool>"]:
        assert own.encode(text) == [1, *reference.encode(text, add_special_tokens=False).ids], text
    assert own.decode(own.encode("the tree Ü")) == "the tree Ü"
    assert load_config(tmp_path / "model.gguf").eos_token_ids == (2, 277 + 1)


@pytest.mark.parametrize("kind", sorted(EXPRESSIONS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_expressions_divide_as_those_of_transformers(tiny: Path, tmp_path: Path, kind: str):
    changed = tmp_path / "model.gguf"
    reference = tokenizers.pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[kind]), "isolated")
    changed.write_bytes(renamed_pre_tokenizer(tiny.read_bytes(), kind))
    own = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_document(changed) | {"decoder": None})).pre_tokenizer
    for text in [*TEXTS, "HELLO'S World's aB1c２ 1234567", "a\u0301b  \n\n c/d//\n"]:
        expected = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        divided = [tokenizers.PreTokenizedString(text) for _ in range(2)]
        own.pre_tokenize(divided[0])
        reference.pre_tokenize(divided[1])
        expected.pre_tokenize(divided[1])
        assert divided[0].get_splits() == divided[1].get_splits(), text


def renamed_pre_tokenizer(data: bytes, kind: str) -> bytes:
    """``data`` with another kind of pre-tokeniser; padding keeps the tensors where they are aligned."""
    key = b"tokenizer.ggml.pre"
    at = data.index(key) + len(key) + 4
    old = struct.unpack_from("<Q", data, at)[0]
    padded = data[:at] + struct.pack("<Q", len(kind)) + kind.encode()
    rest = data[at + 8 + old :]
    fill = (len(data) - len(padded) - len(rest)) % 32
    return padded + rest + bytes(fill)


def patched(key: str, form: str, value: Any, skip: int = 4):
    """Bytes of a file with another value of ``key``, ``skip`` bytes behind its name (its type)."""

    def change(data: bytes) -> bytes:
        at = data.index(key.encode()) + len(key) + skip
        return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]

    return change


def at(offset: int, form: str, value: Any):
    return lambda data: data[:offset] + struct.pack(form, value) + data[offset + struct.calcsize(form) :]


TENSOR = "blk.0.attn_q.weight"
"""Behind its name: number of axes (4 bytes), two lengths (8 each), type (4), offset (8)."""
DAMAGES = {
    "no bytes": lambda data: b"",
    "magic": lambda data: b"GGML" + data[4:],
    "version": at(4, "<I", 1),
    "byte order": at(4, ">I", 3),
    "tensors": at(8, "<Q", 1 << 60),
    "keys": at(16, "<Q", 1 << 60),
    "more keys": at(16, "<Q", 5000),
    "length of a key": at(24, "<Q", 1 << 62),
    "type of a value": patched("llama.block_count", "<I", 99, skip=0),
    "strings": patched("tokenizer.ggml.tokens", "<Q", 1 << 61, skip=8),
    "numbers": patched("tokenizer.ggml.token_type", "<Q", 1 << 61, skip=8),
    "nested arrays": patched("tokenizer.ggml.token_type", "<I", 9, skip=4),
    "too few types": patched("tokenizer.ggml.token_type", "<I", 2, skip=4),
    "axes": patched(TENSOR, "<I", 0xFFFFFFFF, skip=0),
    "no rows": patched(TENSOR, "<Q", 0, skip=12),
    "negative rows": patched(TENSOR, "<q", -256, skip=12),
    "many rows": patched(TENSOR, "<Q", 1 << 39, skip=12),
    "rows that are no blocks": patched(TENSOR, "<Q", 255, skip=4),
    "unknown type": patched(TENSOR, "<I", 4, skip=20),
    "type without a quantisation": patched(TENSOR, "<I", 10, skip=20),
    "offset": patched(TENSOR, "<Q", 1 << 63, skip=24),
    "layers": patched("llama.block_count", "<I", 0xFFFFFFFF),
    "many layers": patched("llama.block_count", "<I", 3),
    "no layers": patched("llama.block_count", "<I", 0),
    "hidden size": patched("llama.embedding_length", "<I", 1 << 23),
    "heads": patched("llama.attention.head_count", "<I", 1 << 23),
    "no heads": patched("llama.attention.head_count", "<I", 0),
    "key heads": patched("llama.attention.head_count_kv", "<I", 3),
    "feed forward": patched("llama.feed_forward_length", "<I", 1 << 23),
    "context": patched("llama.context_length", "<I", 0),
    "head": patched("llama.attention.key_length", "<I", 1 << 22),
    "not a number": patched("llama.rope.freq_base", "<f", float("nan")),
    "architecture": lambda data: data.replace(b"llama", b"lambda"[:5]),
    "text": lambda data: data.replace(b"gpt-2", b"\xff\xfe\xfd\xfc\xfb", 1),
    "merges": lambda data: data.replace(struct.pack("<Q", 3) + b"Y e", struct.pack("<Q", 3) + b"YYe", 1),
    **{f"{percent} percent": (lambda data, percent=percent: data[: len(data) * percent // 100]) for percent in (1, 30, 99)},
}


def read_all(path: Path) -> None:
    """What an engine reads at its start."""
    load_model(path)
    tokenizer_files(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_hostile_files_are_refused(tmp_path: Path, tiny: Path, damage: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(DAMAGES[damage](tiny.read_bytes()))
    started = time.monotonic()
    tracemalloc.start()
    held = torch.empty  # what a decoder of the claimed size would be made of
    try:
        torch.empty = bounded(held)
        with pytest.raises(ModelError) as caught:
            read_all(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        torch.empty = held
        tracemalloc.stop()
    assert len(str(caught.value)) < 600
    assert time.monotonic() - started < 20


def bounded(allocate):
    def empty(*sizes, **kinds):
        count = np.prod([int(size) for size in (sizes[0] if sizes and not isinstance(sizes[0], int) else sizes)], dtype=float)
        assert count < 1 << 26, f"{sizes} is allocated"
        return allocate(*sizes, **kinds)

    return empty


def test_changed_bytes_never_do_more_than_refuse(tmp_path: Path, tiny: Path):
    data = tiny.read_bytes()
    header = data.index(b"blk.1.ffn_up.weight")
    generator = np.random.default_rng(0)
    path, refused = tmp_path / "model.gguf", 0
    for _ in range(150):
        changed = bytearray(data)
        for place in generator.integers(0, header, generator.integers(1, 4)):
            changed[place] = generator.integers(0, 256)
        path.write_bytes(changed)
        try:
            load_config(path)
            read_stored(path)
            tokenizer_files(path)
        except ModelError:
            refused += 1
    assert refused > 30


@pytest.mark.slow
def test_loading_holds_the_model_and_little_more():
    """Peak memory of a process that loads SmolLM2 in bfloat16, beyond that of the library and of the weights."""
    path = weights.smollm2()
    program = (
        "import resource, torch; from yardstick_llm.engine.models import loader; torch.zeros(1)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"model = loader.load_model({str(path)!r}, torch.bfloat16)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sum(w.nbytes for w in model.parameters()) >> 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True)
    peak, model = map(int, done.stdout.split())
    assert peak - model < path.stat().st_size >> 10, (peak, model)
