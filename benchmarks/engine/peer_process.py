"""Scores prompts with another runtime. The runtime's own Python runs this file (see :mod:`benchmarks.engine.peers`), not ours.

Arguments: runtime, checkpoint, format (``float32`` or ``int8``; OpenVINO also ``bfloat16`` or ``bfloat16-int8``), threads. The
checkpoint is exported with the runtime's own tools and prepared in the format; then ``{"ready": VERSION}`` is printed. Each line of
standard input has prompts of equal length, and two labels; each answer is a line with the labels' log-probabilities after each
prompt and the seconds that this took, of the clock and of CPU time.
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
import torch
from transformers import AutoModelForCausalLM

Run = Callable[[Any], Any]
"""Token ids, [prompts, tokens] int64 -> logits after the last token, [prompts, vocabulary]."""
CALIBRATION = 8
"""Batches of random prompts that the ranges of OpenVINO's activations are found with."""
PROMPTS, TOKENS = 10, 300


class LastLogits(torch.nn.Module):
    """Logits after the last token, without a cache."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        self.eval()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[prompts, tokens] -> [prompts, vocabulary]"""
        mask = torch.ones_like(
            input_ids
        )  # without one, transformers looks for packed sequences, which not every exporter can follow
        return self.model(input_ids, attention_mask=mask, logits_to_keep=1, use_cache=False).logits[:, -1]  # type: ignore[no-any-return]


def random_prompts(vocabulary: int, seed: int = 0) -> Any:
    """[prompts, tokens] int64"""
    return np.random.default_rng(seed).integers(0, vocabulary, (PROMPTS, TOKENS))


def openvino(checkpoint: str, form: str, threads: int) -> tuple[Run, str]:
    """OpenVINO; int8 is NNCF's post-training quantisation of weights and activations.

    The rest is computed in float32, or in bfloat16 where the format says so. On processors with AMX or AVX512_BF16, bfloat16 is
    OpenVINO's default, also for a model in float32.
    """
    import openvino as ov

    model = LastLogits(checkpoint)
    vocabulary = model.model.config.vocab_size
    with torch.no_grad():
        example = torch.from_numpy(random_prompts(vocabulary))
        graph = ov.convert_model(model, example_input=example, input=[ov.PartialShape([-1, -1])])
    version = f"openvino {ov.get_version()}"
    if form.endswith("int8"):
        import nncf

        batches = [random_prompts(vocabulary, seed) for seed in range(1, 1 + CALIBRATION)]
        graph = nncf.quantize(
            graph, nncf.Dataset(batches), model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION, fast_bias_correction=True
        )
        version += f", nncf {nncf.__version__}"
    hint = "bf16" if form.startswith("bfloat16") else "f32"
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint}
    compiled = ov.Core().compile_model(graph, "CPU", settings)
    return lambda tokens: compiled(tokens)[0], version


def onnxruntime(checkpoint: str, form: str, threads: int) -> tuple[Run, str]:
    """ONNX Runtime; int8 is its dynamic quantisation."""
    import onnxruntime as ort
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = LastLogits(checkpoint)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    example = torch.from_numpy(random_prompts(model.model.config.vocab_size))
    axes = {"input_ids": {0: torch.export.Dim("prompts"), 1: torch.export.Dim("tokens")}}
    with tempfile.TemporaryDirectory(prefix="yardstick-bench-onnx-") as folder:
        path = Path(folder) / "model.onnx"
        with torch.no_grad():
            torch.onnx.export(model, (example,), str(path), input_names=["input_ids"], dynamo=True, dynamic_shapes=axes)
        if form == "int8":
            whole, path = path, Path(folder) / "int8.onnx"
            quantize_dynamic(whole, path, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda tokens: session.run(None, {"input_ids": tokens})[0], f"onnxruntime {ort.__version__}"


RUNTIMES = {"openvino": openvino, "onnxruntime": onnxruntime}


def main(runtime: str, checkpoint: str, form: str, threads: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    torch.set_num_threads(int(threads))
    run, version = RUNTIMES[runtime](checkpoint, form, int(threads))
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        prompts, labels = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        found = torch.from_numpy(np.asarray(run(np.array(prompts)))).float()
        logits = found.reshape(len(prompts), -1)  # NNCF puts an axis before
        rows = logits.log_softmax(-1)[:, labels].tolist()
        spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        print(json.dumps({"rows": rows, **spent}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
