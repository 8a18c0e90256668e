"""GGUF files for tests, written by ggml's library from small checkpoints of ``tests/checkpoints.py``.

Names, keys and changes of tensors follow https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import CHAT_TEMPLATE

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
"""Keys for ``make_checkpoint``: the blocks of some types have 256 numbers."""
ARCHITECTURES = {"gemma3_text": "gemma3", "phi4_mini": "phi3"}
"""Names in GGUF that are not those of ``model_type``."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SCALES = {Type.Q4_K: {0: 2e-4, 2: 1.5e-3}, Type.Q5_K: {0: 1e-4, 2: 1.5e-3}, Type.Q6_K: {208: 5e-5}, Type.IQ4_NL: {0: 1e-3}}
"""Types that the library does not write: where their blocks have float16 scales, and how large these are in a usual matrix."""


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: str = "F32",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    split: int = 0,
    others: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """Write ``checkpoint`` as a GGUF file with matrices of type ``kind``. ``change``: adds keys. ``split``: tensors of each part.
    ``others``: types of the matrices whose names have these words.

    Returns the model in transformers with the numbers that the file stands for.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    _write_configuration(writer, architecture, config)
    write_byte_level(writer, checkpoint, config["vocab_size"])
    if change is not None:
        change(writer)
    generator = np.random.default_rng(0)
    tied, read = config.get("tie_word_embeddings", False), {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        permuted = heads.get(name.split(".")[-2]) if architecture in ("llama", "granite") else None
        plus_one = architecture.startswith("gemma") and name.endswith("norm.weight")
        values = _paired(tensor, permuted).numpy() + plus_one
        chosen = next((type for word, type in (others or {}).items() if word in name), kind)
        type = Type[chosen] if values.ndim == 2 else Type.F32
        raw = _quantized(values, type, generator)
        writer.add_tensor(gguf_name(name, architecture), raw, raw_dtype=type)
        found = torch.from_numpy(gguf.quants.dequantize(raw, type).copy()).reshape(tensor.shape) - float(plus_one)
        read[name] = _unpaired(found, permuted)
    model.load_state_dict(read, strict=False)
    write_out(writer)
    return model


def write_out(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])


def gguf_name(name: str, architecture: str) -> str:
    """Name in the file of a tensor of a checkpoint."""
    for stored, written in (_NAMES | _norms(architecture)).items():
        name = name.replace(stored, written, 1)
    return name


def _norms(architecture: str) -> dict[str, str]:
    if architecture not in ("gemma2", "gemma3"):
        return {"post_attention_layernorm": "ffn_norm"}
    return {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }


def _paired(tensor: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Rows in llama.cpp's order: the two numbers that a head rotates together are neighbours."""
    return tensor if heads is None else tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _unpaired(tensor: torch.Tensor, heads: int | None) -> torch.Tensor:
    return tensor if heads is None else tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _quantized(values: np.ndarray, type: Type, generator: np.random.Generator) -> np.ndarray:
    if type not in _SCALES:
        return gguf.quants.quantize(np.ascontiguousarray(values), type)
    block, size = gguf.GGML_QUANT_SIZES[type]
    rows, columns = values.shape
    raw = generator.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for place, scale in _SCALES[type].items():
        raw[:, place : place + 2] = (generator.uniform(0.5, 1.5, (len(raw), 1)) * scale).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def _write_configuration(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_name(f"small {architecture}")
    write_shape(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)))
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["layer_types"].index("full_attention") + 1)
    if architecture == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config["head_dim"], rope))
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _llama3_factors(head_dim: int, rope: dict[str, Any]) -> np.ndarray:
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def write_byte_level(writer: gguf.GGUFWriter, checkpoint: Path, size: int) -> None:
    """The tokeniser that ``write_tokenizer`` puts beside a checkpoint, with a name for each of ``size`` rows of the head."""
    document = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    special = {token["content"] for token in document["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = [f"[PAD{id}]" for id in range(len(vocab), size)]
    writer.add_token_list([*vocab, *unused])
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in vocab]
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * len(unused)])
    writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
