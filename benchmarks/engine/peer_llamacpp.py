"""Scores prompts with llama.cpp, like :mod:`benchmarks.engine.peer_process`. The Python that runs this file has ``xllamacpp``,
``gguf``, ``safetensors`` and numpy, and none of ours.

Arguments: checkpoint, format (``float32`` or ``int8``), threads. The checkpoint (Qwen2 or Qwen3, float32) is written as a GGUF
file: names of tensors and keys are those of ggml's specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and
of ``gguf.constants``. int8 is ``Q8_0``: blocks of 32 weights with a scale.

llama.cpp's server tells log-probabilities only as JSON of the most probable tokens. So the labels' are read once, for the first
request, from a second call that asks for the whole vocabulary and is not measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file

ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SLOT_TOKENS = 512
"""Context of a prompt."""
MOST_PROMPTS = 10


def name_of(tensor: str) -> str:
    """Return the GGUF name of a tensor. Raises :class:`KeyError`."""
    module, _, kind = tensor.rpartition(".")  # kind: weight or bias
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER[part]}.{kind}"


def export(checkpoint: Path, path: Path, form: str) -> None:
    """Write the checkpoint as a GGUF file."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["architectures"][0]])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    _add_vocabulary(writer, config["vocab_size"])
    for file in sorted(checkpoint.glob("*.safetensors")):
        for tensor, values in load_file(file).items():
            if tensor == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            _add_tensor(writer, name_of(tensor), values.astype(np.float32), form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a name for each token. Prompts are token ids, so the names stand for no text."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token}" for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(0)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: Any, form: str) -> None:
    if form == "int8" and values.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def server(path: Path, threads: int) -> xllamacpp.Server:
    """Load a model so that all prompts of a request are computed as one batch."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = MOST_PROMPTS
    params.n_ctx = MOST_PROMPTS * SLOT_TOKENS
    params.n_batch = params.n_ubatch = MOST_PROMPTS * SLOT_TOKENS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # on a CPU it computes in float16
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.warmup = False
    return xllamacpp.Server(params)


def complete(runtime: xllamacpp.Server, prompts: list[list[int]], probabilities: int) -> list[Any]:
    """Draw one token after each prompt; returns the answers in order. Raises :class:`RuntimeError`."""
    asked = {"prompt": prompts, "n_predict": 1, "n_probs": probabilities, "temperature": 0.0, "cache_prompt": False}
    answer = runtime.handle_completions(asked)
    if "error" in answer or len(answer["choices"]) != len(prompts):
        raise RuntimeError(f"llama.cpp answered {str(answer)[:500]}")
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def label_logprobs(choice: Any, labels: list[int]) -> list[float]:
    """Return the log-probabilities of the labels after one prompt."""
    tops = choice["logprobs"]["content"][0]["top_logprobs"]
    found = {top["id"]: top["logprob"] for top in tops}
    return [found[label] for label in labels]


def main(checkpoint: str, form: str, threads: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    vocabulary = json.loads((Path(checkpoint) / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="yardstick-bench-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        export(Path(checkpoint), path, form)
        runtime = server(path, int(threads))
    print(json.dumps({"ready": f"xllamacpp {xllamacpp.__version__}"}), file=answers, flush=True)
    rows: list[list[float]] = []
    for line in sys.stdin:
        prompts, labels = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        complete(runtime, prompts, 0)
        spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        rows = rows or [label_logprobs(complete(runtime, [prompt], vocabulary)[0], labels) for prompt in prompts]
        print(json.dumps({"rows": rows, **spent}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
