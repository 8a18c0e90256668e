"""Computes texts with another library. An environment of its own runs this file (see :mod:`benchmarks.gateway.encoders`), not ours.

Arguments: library, number format (``float32`` or ``int8``), threads, and the models as JSON: by name the folder, a folder for the
files that the library needs, such as an ONNX file, whether texts are pairs, and texts to calibrate with. Files are made once and
found again. Then ``{"ready": VERSION}`` is printed. Each line of standard input names a model, texts, how many of them are computed
in a call, and the seconds after which no further call begins. Each answer has the number of computed texts, the seconds of the
clock and of CPU time, and the numbers of the last call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForSequenceClassification

Compute = Callable[[list[Any]], Any]
"""[texts] -> [texts, numbers]: normalised embeddings, or one score of each pair."""
BATCH = 32
"""Texts in a batch: the default of sentence-transformers."""
INPUTS = ["input_ids", "attention_mask"]
CALIBRATION = 8
"""Batches that the ranges of OpenVINO's activations are found with."""


class Whole(torch.nn.Module):
    """A model with what follows it: the normalised mean of a text's tokens, or the sigmoid of a pair's number."""

    def __init__(self, folder: str, pairs: bool, attention: str) -> None:
        super().__init__()
        kind: Any = AutoModelForSequenceClassification if pairs else AutoModel
        self.model: Any = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        self._pairs = pairs
        self.eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[texts, tokens] twice -> [texts, numbers]."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        if self._pairs:
            scores: torch.Tensor = found.logits.sigmoid()
            return scores
        mask = attention_mask.unsqueeze(-1).float()
        return torch.nn.functional.normalize((found.last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)


def sentence_transformers(model: dict[str, Any], form: str, _: int) -> tuple[Compute, str]:
    """sentence-transformers with torch, in float32."""
    import sentence_transformers as library

    if form != "float32":
        raise SystemExit("sentence-transformers computes in int8 through other libraries only")
    version = f"sentence-transformers {library.__version__}, torch {torch.__version__}"
    options: dict[str, Any] = {"batch_size": BATCH, "show_progress_bar": False}
    if model["pairs"]:
        cross = library.CrossEncoder(model["folder"], device="cpu")
        return lambda pairs: cross.predict([tuple(pair) for pair in pairs], **options)[:, None], version
    encoder = library.SentenceTransformer(model["folder"], device="cpu")
    return lambda texts: encoder.encode(texts, **options), version


def onnxruntime(model: dict[str, Any], form: str, threads: int) -> tuple[Compute, str]:
    """ONNX Runtime: the graph with its own fused attention, and in int8 its dynamic quantisation of weights and activations."""
    import onnxruntime as library

    def write(folder: Path) -> None:
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxruntime.transformers.optimizer import optimize_model

        whole = Whole(model["folder"], model["pairs"], "eager")  # the optimiser knows the attention of this graph
        config = whole.model.config
        axes = {name: {0: "texts", 1: "tokens"} for name in INPUTS}
        plain, fused = str(folder / "plain.onnx"), str(folder / "float32.onnx")
        torch.onnx.export(
            whole, sample(), plain, dynamo=False, input_names=INPUTS, output_names=["numbers"], dynamic_axes=axes, opset_version=17
        )
        heads = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
        optimize_model(plain, model_type="bert", **heads).save_model_to_file(fused)
        Path(plain).unlink()
        if form == "int8":
            types = {"DefaultTensorType": 1}  # float: shapes are not inferred through the fused operators
            quantize_dynamic(fused, str(folder / "int8.onnx"), weight_type=QuantType.QInt8, extra_options=types)
            Path(fused).unlink()

    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    session = library.InferenceSession(kept(model, write) / f"{form}.onnx", options, providers=["CPUExecutionProvider"])
    encode = encoder(model)

    def compute(texts: list[Any]) -> Any:
        return session.run(None, dict(zip(INPUTS, encode(texts), strict=True)))[0]

    return in_batches(compute), f"onnxruntime {library.__version__}"


def openvino(model: dict[str, Any], form: str, threads: int) -> tuple[Compute, str]:
    """OpenVINO; int8 is NNCF's post-training quantisation of weights and activations.

    The rest is computed in float32. On processors with AMX or AVX512_BF16, bfloat16 is OpenVINO's default, also for a model in
    float32.
    """
    import openvino as library

    encode, version = encoder(model), f"openvino {library.get_version()}"

    def write(folder: Path) -> None:
        shape = library.PartialShape([-1, -1])
        with torch.no_grad():
            graph = library.convert_model(
                Whole(model["folder"], model["pairs"], "sdpa"), example_input=sample(), input=[shape, shape]
            )
        if form == "int8":
            import nncf

            texts = model["calibration"]
            step = max(1, len(texts) // CALIBRATION)
            batches = nncf.Dataset([encode(texts[start : start + step]) for start in range(0, len(texts), step)])
            chosen = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": CALIBRATION, "fast_bias_correction": True}
            graph = nncf.quantize(graph, batches, **chosen)
        library.save_model(graph, folder / "model.xml", compress_to_fp16=False)

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = library.Core().compile_model(kept(model, write) / "model.xml", "CPU", settings)
    return in_batches(lambda texts: compiled(encode(texts))[0]), version


LIBRARIES = {"sentence-transformers": sentence_transformers, "onnxruntime": onnxruntime, "openvino": openvino}


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and a mask with padding, to trace a model with."""
    ids = torch.arange(4, 24).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return ids, mask


def kept(model: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Return the folder for what is made of a model, filled by ``write`` if it is new."""
    folder = Path(model["made"])
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as part:
            whole = Path(part) / "whole"
            whole.mkdir()
            write(whole)
            whole.rename(folder)
    return folder


def encoder(model: dict[str, Any]) -> Callable[[list[Any]], tuple[Any, Any]]:
    """Return a function from texts to token ids and mask, both [texts, tokens]."""
    tokenizer = Tokenizer.from_file(str(Path(model["folder"]) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=json.loads((Path(model["folder"]) / "config.json").read_text())["pad_token_id"])

    def encode(texts: list[Any]) -> tuple[Any, Any]:
        found = tokenizer.encode_batch([tuple(text) for text in texts] if model["pairs"] else texts)
        return np.array([each.ids for each in found]), np.array([each.attention_mask for each in found])

    return encode


def in_batches(compute: Compute) -> Compute:
    """Return ``compute`` for any number of texts."""

    def whole(texts: list[Any]) -> Any:
        return np.concatenate([compute(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)])

    return whole


def main(library: str, form: str, threads: str, models: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    torch.set_num_threads(int(threads))
    loaded = {name: LIBRARIES[library](model, form, int(threads)) for name, model in json.loads(models).items()}
    print(json.dumps({"ready": next(version for _, version in loaded.values())}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        compute, texts, size = loaded[asked["model"]][0], asked["texts"], asked["in_flight"]
        count, began, cpu = 0, time.perf_counter(), time.process_time()
        for start in cycle(range(0, len(texts), size)):
            rows = compute(texts[start : start + size])
            count += len(rows)
            if time.perf_counter() - began >= asked["seconds"]:
                break
        spent = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        print(json.dumps({"texts": count, **spent, "rows": rows.tolist()}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
