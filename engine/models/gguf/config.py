"""The ``config.json`` and the tensor names that the metadata of a GGUF file stand for, so that one parser reads all models.

Source of keys and names: ``gguf-py/gguf/constants.py`` and ``convert_hf_to_gguf.py`` of https://github.com/ggml-org/llama.cpp. What
a file leaves out has the value of llama.cpp.
"""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from yardstick_llm.engine.models.checkpoint import Read, Stored, StoredCodes
from yardstick_llm.engine.models.files import Keys, ModelError
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.gguf.blocks import DENSE, read_weight
from yardstick_llm.engine.models.gguf.file import GGUFFile, GGUFTensor, read_gguf
from yardstick_llm.engine.models.registry import Family, family_of
from yardstick_llm.engine.models.rope import FACTORS

BODIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "granite": "Granite",
}
"""First part of an architecture's name in ``config.json``, by ``general.architecture``."""
ENCODERS = {"bert": "Bert", "nomic-bert": "NomicBert"}
"""Like :data:`BODIES`, for encoders."""
_ROTATED_IN_PAIRS = ("llama", "granite")
"""Architectures whose rotation llama.cpp applies to neighbours."""
POOLINGS: dict[int, Literal["cls", "last", "mean"] | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
"""Pooling by the value of ``pooling_type``."""
RANK = 4
"""Value of ``pooling_type`` of a cross-encoder."""
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Control tokens that end a generation in llama.cpp, whatever the metadata say."""
CONTROL = 3
"""Type of a control token."""
MAX_CLASSES = 1 << 16
_LARGEST = 1 << 24
"""Largest size and count in a configuration."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_AROUND = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ENCODER_OUTER = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "cls": "pooler.dense",
    "cls.output": "classifier",
}
_ENCODER_NAMES = {
    "bert": {
        "token_embd_norm": "embeddings.LayerNorm",
        "attn_q": "encoder.layer.{}.attention.self.query",
        "attn_k": "encoder.layer.{}.attention.self.key",
        "attn_v": "encoder.layer.{}.attention.self.value",
        "attn_output": "encoder.layer.{}.attention.output.dense",
        "attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
        "ffn_up": "encoder.layer.{}.intermediate.dense",
        "ffn_down": "encoder.layer.{}.output.dense",
        "layer_output_norm": "encoder.layer.{}.output.LayerNorm",
    },
    "nomic-bert": {
        "token_embd_norm": "emb_ln",
        "attn_qkv": "encoder.layers.{}.attn.Wqkv",
        "attn_output": "encoder.layers.{}.attn.out_proj",
        "attn_output_norm": "encoder.layers.{}.norm1",
        "ffn_up": "encoder.layers.{}.mlp.fc11",
        "ffn_gate": "encoder.layers.{}.mlp.fc12",
        "ffn_down": "encoder.layers.{}.mlp.fc2",
        "layer_output_norm": "encoder.layers.{}.norm2",
    },
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[\w.]+)\.(?P<kind>weight|bias)")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


def is_encoder_file(path: Path) -> bool:
    """Whether the model of the file is an encoder. Raises :class:`ModelError`."""
    return read_gguf(path).metadata.get("general.architecture") in ENCODERS


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of the weights by its name in a Hugging Face checkpoint. Raises :class:`ModelError`."""
    file = read_gguf(path)
    if is_encoder_file(path):
        return _stored_of_encoder(file)
    architecture, family = _architecture(file)
    keys = Keys(dict(file.metadata), path.name)
    parts = (
        _PARTS
        | (_AROUND if family.norms == "around" else {})
        | ({"ffn_up": "mlp.gate_up_proj"} if family.fused_projections else {})
    )
    heads = {"attn_q": _count(keys, f"{architecture}.attention.head_count")}
    heads["attn_k"] = _kv_heads(file, keys, architecture, heads["attn_q"])
    stored: dict[str, Stored] = {}
    for name, tensor in file.tensors.items():
        if name in (ROPE_FREQS, LONG, SHORT):
            continue
        layer = _LAYER.fullmatch(name)
        number, part, kind = layer.groups() if layer else ("", "", "")
        known = f"model.layers.{number}.{parts[part]}.{kind}" if part in parts else _OUTER.get(name, name)
        permuted = heads.get(part, 0) if architecture in _ROTATED_IN_PAIRS else 0
        if permuted and tensor.shape[0] % (2 * permuted):
            raise ModelError(f"{name} in {path.name} has {tensor.shape[0]} rows for {permuted} heads; download the model again.")
        plus_one = family.norms_add_one and name.endswith("norm.weight")
        load = partial(_load, tensor, permuted, plus_one)
        stored[known] = StoredCodes(tensor.path, tensor.shape, tensor.kind, tensor.name, load)
    return stored


def _stored_of_encoder(file: GGUFFile) -> dict[str, Stored]:
    names = _ENCODER_OUTER | _ENCODER_NAMES[file.metadata["general.architecture"]]
    stored: dict[str, Stored] = {}
    for name, tensor in file.tensors.items():
        found = _NAME.fullmatch(name)
        known = f"{names[found['part']]}.{found['kind']}".format(found["layer"]) if found and found["part"] in names else name
        shape = tensor.shape if name != "token_types.weight" or len(tensor.shape) == 2 else (1, *tensor.shape)
        tensor = dataclasses.replace(tensor, shape=shape)
        stored[known] = StoredCodes(tensor.path, shape, tensor.kind, name, partial(_load, tensor, 0, False))
    return stored


def _load(tensor: GGUFTensor, heads: int, plus_one: bool, _: Read) -> CodedWeight | Tensor:
    return read_weight(tensor, heads, plus_one)


def has_codes(path: Path) -> bool:
    """Whether some tensors are quantised. Raises :class:`ModelError`."""
    return any(tensor.kind not in DENSE for tensor in read_gguf(path).tensors.values())


def configuration(path: Path) -> dict[str, Any]:
    """The ``config.json`` of the model.

    Raises :class:`ModelError` also where its sizes are not those of the tensors, before memory of such sizes is allocated.
    """
    file = read_gguf(path)
    if is_encoder_file(path):
        return _encoder_configuration(file)
    architecture, family = _architecture(file)
    keys = Keys(dict(file.metadata), path.name)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if keys.present(key("expert_count")) and file.metadata[key("expert_count")] != 0:
        raise keys.error(key("expert_count"), "asks for experts, which are not supported in GGUF files; use safetensors")
    hidden, heads = _count(keys, key("embedding_length")), _count(keys, key("attention.head_count"))
    head_dim = _count(keys, key("attention.key_length"), hidden // heads or None)
    embedding = file.tensors.get("token_embd.weight")
    raw: dict[str, Any] = {
        "architectures": [BODIES[architecture] + ("ForCausalLM" if pooling_of(path) is None else "Model")],
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _count(keys, key("feed_forward_length")),
        "num_hidden_layers": _count(keys, key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, keys, architecture, heads),
        "head_dim": head_dim,
        "max_position_embeddings": _count(keys, key("context_length"), most=1 << 31),
        "rms_norm_eps": keys.number(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": keys.number(key("rope.freq_base"), 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "is_causal": keys.flag(key("attention.causal"), True),
        "eos_token_id": end_tokens(file),
        "pad_token_id": keys.pad_token_id if keys.present("pad_token_id") else file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    raw |= _rotation(file, keys, architecture, raw)
    window = key("attention.sliding_window")
    if family.windows != "late":
        raw["sliding_window"] = file.metadata.get(window) or None
    if family.model_type in ("gemma2", "gemma3_text"):
        # The largest model of each generation scales by the hidden size divided by the heads, the others by the width of a head.
        largest = {"gemma2": 46, "gemma3_text": 62}[family.model_type] == raw["num_hidden_layers"]
        raw["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if keys.present(key(name)):
                raw[name] = keys.number(key(name))
    if family.multipliers:
        raw |= {
            "embedding_multiplier": keys.number(key("embedding_scale")),
            "residual_multiplier": keys.number(key("residual_scale")),
            "attention_multiplier": keys.number(key("attention.scale")),
            "logits_scaling": keys.number(key("logit_scale")),
        }
    _check_sizes(file, raw)
    return raw


def _encoder_configuration(file: GGUFFile) -> dict[str, Any]:
    architecture = file.metadata["general.architecture"]
    keys = Keys(dict(file.metadata), file.path.name)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if keys.flag(key("attention.causal"), False):
        raise keys.error(key("attention.causal"), "is true, which is not supported for encoders; use another model")
    if keys.present(key("rope.scaling.type")) and keys.text(key("rope.scaling.type"), "none") != "none":
        raise keys.error(key("rope.scaling.type"), "is not supported for encoders; use another model")
    ranks = file.metadata.get(key("pooling_type")) == RANK
    hidden, heads = _count(keys, key("embedding_length")), _count(keys, key("attention.head_count"))
    embedding, types, classes = (file.tensors.get(f"{name}.weight") for name in ("token_embd", "token_types", "cls.output"))
    raw: dict[str, Any] = {
        "architectures": [ENCODERS[architecture] + ("ForSequenceClassification" if ranks else "Model")],
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _count(keys, key("feed_forward_length")),
        "num_hidden_layers": _count(keys, key("block_count")),
        "num_attention_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": _count(keys, key("context_length")),
        "layer_norm_eps": keys.number(key("attention.layer_norm_epsilon")),
        "type_vocab_size": 0 if types is None else math.prod(types.shape) // hidden,
        "rope_theta": keys.number(key("rope.freq_base"), 10000.0),
        "mlp_fc1_bias": "blk.0.ffn_up.bias" in file.tensors,
        "mlp_fc2_bias": "blk.0.ffn_down.bias" in file.tensors,
        "qkv_proj_bias": "blk.0.attn_qkv.bias" in file.tensors,
    }
    if ranks:
        if classes is not None and classes.shape[0] > MAX_CLASSES:
            raise ModelError(
                f"cls.output.weight in {file.path.name} has {classes.shape[0]} classes; at most {MAX_CLASSES} are supported."
            )
        names = [f"LABEL_{place}" for place in range(0 if classes is None else classes.shape[0])]
        if keys.present(key("classifier.output_labels")):
            names = keys.strings(key("classifier.output_labels"))
        raw["id2label"] = {str(place): name for place, name in enumerate(names)}
    _check_sizes(file, raw)
    return raw


def pooling_of(path: Path) -> Literal["cls", "last", "mean"] | None:
    """Pooling of an embedding model; None for others. Raises :class:`ModelError`."""
    file = read_gguf(path)
    architecture = file.metadata["general.architecture"] if is_encoder_file(path) else _architecture(file)[0]
    kind = file.metadata.get(f"{architecture}.pooling_type", 0)
    if kind == RANK and architecture in ENCODERS:
        return None
    if kind not in POOLINGS or (POOLINGS[kind] == "cls" and architecture in BODIES):
        raise ModelError(f"{architecture}.pooling_type in {path.name} is {kind!r:.80}, which is not supported; use another model.")
    return POOLINGS[kind]


def end_tokens(file: GGUFFile) -> list[int]:
    """Ids of the tokens that end a generation."""
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = file.metadata.get("tokenizer.ggml.tokens", []), file.metadata.get("tokenizer.ggml.token_type", [])
    if isinstance(tokens, list) and isinstance(types, list):
        ids += [id for id, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL and token in END_TOKENS]
    return list(dict.fromkeys(id for id in ids if isinstance(id, int) and id >= 0))


def _architecture(file: GGUFFile) -> tuple[str, Family]:
    """``general.architecture``, and the flags of the family."""
    name = file.metadata.get("general.architecture")
    body = BODIES.get(name) if isinstance(name, str) else None
    if body is None:
        supported = ", ".join((*BODIES, *ENCODERS))
        raise ModelError(f"{file.path.name} has a model of the architecture {name!r:.80}; GGUF files of {supported} are supported.")
    assert isinstance(name, str)
    return name, family_of(f"{body}ForCausalLM")


def _count(keys: Keys, key: str, default: int | None = None, most: int = _LARGEST) -> int:
    count = keys.count(key, default)
    if count > most:
        raise keys.error(key, f"is {count}, and no model has as many; download the model again")
    return count


def _kv_heads(file: GGUFFile, keys: Keys, architecture: str, heads: int) -> int:
    key = f"{architecture}.attention.head_count_kv"
    of_layers = file.metadata.get(key)
    if isinstance(of_layers, list):
        raise keys.error(key, "has a number for each layer, which is not supported; use another model")
    return _count(keys, key, heads)


def _rotation(file: GGUFFile, keys: Keys, architecture: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of the rotation but ``rope_theta``."""

    def key(name: str) -> str:
        return f"{architecture}.rope.{name}"

    written: dict[str, Any] = {}
    rotated = keys.count(key("dimension_count"), raw["head_dim"])
    if rotated != raw["head_dim"]:
        written["partial_rotary_factor"] = rotated / raw["head_dim"]
    kind = keys.text(key("scaling.type"), "none")
    original = key("scaling.original_context_length")
    if LONG in file.tensors and SHORT in file.tensors:
        written["original_max_position_embeddings"] = keys.count(original)
        written["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": _factors(file.tensors[LONG], rotated),
            "short_factor": _factors(file.tensors[SHORT], rotated),
        }
        if keys.present(key("scaling.attn_factor")):
            written["rope_scaling"]["attention_factor"] = keys.number(key("scaling.attn_factor"))
    elif ROPE_FREQS in file.tensors:
        written["rope_scaling"] = {"rope_type": FACTORS, "factors": _factors(file.tensors[ROPE_FREQS], rotated)}
    elif kind != "none":
        written["rope_scaling"] = {"rope_type": kind, "factor": keys.number(key("scaling.factor"))}
        if keys.present(original):
            written["rope_scaling"]["original_max_position_embeddings"] = keys.count(original)
    if architecture == "gemma3":
        written["rope_local_base_freq"] = keys.number(key("freq_base_swa"), 10000.0)
        written["sliding_window_pattern"] = keys.count("gemma3.attention.sliding_window_pattern", 6)
    return written


def _factors(tensor: GGUFTensor, rotated: int) -> list[float]:
    """Factors by which wavelengths are stretched, [rotated / 2]."""
    if tensor.shape != (rotated // 2,) or tensor.kind != "F32":
        raise ModelError(
            f"{tensor.name} in {tensor.path.name} is {tensor.kind} of shape {list(tensor.shape)}, not F32 of [{rotated // 2}]."
        )
    values = read_weight(tensor)
    assert isinstance(values, Tensor)
    return values.tolist()


def _check_sizes(file: GGUFFile, raw: dict[str, Any]) -> None:
    """Raise :class:`ModelError` unless the tensors that determine the size of the model are there, in the sizes of ``raw``."""
    hidden, inner = raw["hidden_size"], raw["num_attention_heads"] * raw["head_dim"]
    wanted = {"token_embd.weight": (raw["vocab_size"], hidden)}
    for layer in range(min(raw["num_hidden_layers"], len(file.tensors))):
        wanted[f"blk.{layer}.attn_output.weight"] = (hidden, inner)
        wanted[f"blk.{layer}.ffn_down.weight"] = (hidden, raw["intermediate_size"])
    if raw["num_hidden_layers"] > len(file.tensors):
        raise ModelError(
            f"{file.path.name} has {len(file.tensors)} tensors for {raw['num_hidden_layers']} layers; download it again."
        )
    for name, shape in wanted.items():
        tensor = file.tensors.get(name)
        found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        if tensor is None or tensor.shape != shape:
            raise ModelError(f"{name} in {file.path.name} is {found}, and the metadata ask for {list(shape)}; download it again.")
