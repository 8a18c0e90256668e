"""Scores prompts with another runtime. The runtime's own Python runs this file (see :mod:`benchmarks.engine.peers`), not ours.

Arguments: runtime, checkpoint, format, threads. The checkpoint is prepared with the runtime's own tools in the format (``float32``
or ``int8``; OpenVINO also ``bfloat16`` or ``bfloat16-int8``); then ``{"ready": VERSION}`` is printed. Each line of standard input
has prompts of equal length, and two labels; each answer is a line with the labels' log-probabilities after each prompt and the
seconds that this took, of the clock and of CPU time. llama.cpp also takes a GGUF file, whose answers have no log-probabilities, and
a third value: the number of greedy tokens to write after each prompt.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Score = Callable[..., Any]
"""Computes prompts, and writes tokens if it gets their number; the result is passed to :data:`Read`."""
Read = Callable[[Any, list[list[int]], list[int]], list[list[float]]]
"""Returns the labels' log-probabilities after each prompt."""
CALIBRATION = 8
"""Batches of random prompts that the ranges of OpenVINO's activations are found with."""
PROMPTS, TOKENS = 10, 300
SLOT_TOKENS = 512
"""Context of a prompt in llama.cpp."""
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


def openvino(checkpoint: str, form: str, threads: int) -> tuple[Score, Read, str]:
    """OpenVINO; int8 is NNCF's post-training quantisation of weights and activations.

    The rest is computed in float32, or in bfloat16 where the format says so. On processors with AMX or AVX512_BF16, bfloat16 is
    OpenVINO's default, also for a model in float32.
    """
    import openvino as ov
    import torch
    from transformers import AutoModelForCausalLM

    class LastLogits(torch.nn.Module):
        """[prompts, tokens] -> [prompts, vocabulary], without a cache."""

        def __init__(self) -> None:
            super().__init__()
            self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
            self.eval()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            mask = torch.ones_like(input_ids)  # without one, transformers looks for packed sequences, which exporters cannot follow
            logits: torch.Tensor = self.model(input_ids, attention_mask=mask, logits_to_keep=1, use_cache=False).logits[:, -1]
            return logits

    def prompts(seed: int) -> Any:
        return np.random.default_rng(seed).integers(0, vocabulary, (PROMPTS, TOKENS))

    def read(found: Any, prompts: list[list[int]], labels: list[int]) -> list[list[float]]:
        logits = torch.from_numpy(np.asarray(found)).float().reshape(len(prompts), -1)  # NNCF puts an axis before
        return logits.log_softmax(-1)[:, labels].tolist()

    torch.set_num_threads(threads)
    model = LastLogits()
    vocabulary = model.model.config.vocab_size
    with torch.no_grad():
        graph = ov.convert_model(model, example_input=torch.from_numpy(prompts(0)), input=[ov.PartialShape([-1, -1])])
    version = f"openvino {ov.get_version()}"
    if form.endswith("int8"):
        import nncf

        batches = nncf.Dataset([prompts(seed) for seed in range(1, 1 + CALIBRATION)])
        chosen = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": CALIBRATION, "fast_bias_correction": True}
        graph = nncf.quantize(graph, batches, **chosen)
        version += f", nncf {nncf.__version__}"
    hint = "bf16" if form.startswith("bfloat16") else "f32"
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint}
    compiled = ov.Core().compile_model(graph, "CPU", settings)
    return lambda tokens: compiled(np.array(tokens))[0], read, version


def llamacpp(checkpoint: str, form: str, threads: int) -> tuple[Score, Read, str]:
    """llama.cpp from the wheel ``xllamacpp``. The checkpoint (Qwen2 or Qwen3, float32) is written as a GGUF file, with the names of
    ggml's specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). int8 is ``Q8_0``: blocks of 32 weights with a
    scale.

    Its server tells log-probabilities only as JSON of the most probable tokens. So the labels' are read once, for the first
    request, from a second call that asks for the whole vocabulary and is not measured.
    """
    import xllamacpp

    given = Path(checkpoint) if checkpoint.endswith(".gguf") else None
    vocabulary = 0 if given else json.loads((Path(checkpoint) / "config.json").read_text())["vocab_size"]
    rows: list[list[float]] = []

    def complete(prompts: list[list[int]], tokens: int = 1, probabilities: int = 0) -> list[Any]:
        asked = {"prompt": prompts, "n_predict": tokens, "n_probs": probabilities, "temperature": 0.0, "cache_prompt": False}
        asked["ignore_eos"] = True
        answer = runtime.handle_completions(asked)
        if "error" in answer or len(answer["choices"]) != len(prompts):
            raise RuntimeError(f"llama.cpp answered {str(answer)[:500]}")
        return sorted(answer["choices"], key=lambda choice: choice["index"])

    def read(_: Any, prompts: list[list[int]], labels: list[int]) -> list[list[float]]:
        for prompt in () if rows or given else prompts:
            (choice,) = complete([prompt], probabilities=vocabulary)
            found = {top["id"]: top["logprob"] for top in choice["logprobs"]["content"][0]["top_logprobs"]}
            rows.append([found[label] for label in labels])
        return rows

    with tempfile.TemporaryDirectory(prefix="yardstick-bench-gguf-") as folder:
        path = given or Path(folder) / "model.gguf"
        if given is None:
            write_gguf(Path(checkpoint), path, form)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel = PROMPTS  # all prompts of a request are one batch
        params.n_ctx = params.n_batch = params.n_ubatch = PROMPTS * SLOT_TOKENS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # on a CPU it computes in float16
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.warmup = False
        runtime = xllamacpp.Server(params)
    return complete, read, f"xllamacpp {xllamacpp.__version__}"


def write_gguf(checkpoint: Path, path: Path, form: str) -> None:
    """Write the checkpoint as a GGUF file. Prompts are token ids, so the names of tokens stand for no text."""
    import gguf
    from safetensors.numpy import load_file

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
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token}" for token in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t 0"])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(0)
    for file in sorted(checkpoint.glob("*.safetensors")):
        for tensor, values in load_file(file).items():
            if tensor == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            name, numbers = gguf_name(tensor), values.astype(np.float32)
            if form == "int8" and values.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(tensor: str) -> str:
    """Return the GGUF name of a tensor. Raises :class:`KeyError`."""
    module, _, kind = tensor.rpartition(".")  # kind: weight or bias
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER[part]}.{kind}"


RUNTIMES = {"openvino": openvino, "llamacpp": llamacpp}


def main(runtime: str, checkpoint: str, form: str, threads: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    score, read, version = RUNTIMES[runtime](checkpoint, form, int(threads))
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        prompts, labels, *tokens = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        found = score(prompts, *tokens)
        spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        print(json.dumps({"rows": read(found, prompts, labels), **spent}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
