"""Serves texts over HTTP with another library, in an environment of its own (see :mod:`benchmarks.gateway.encoders`), not ours.

Arguments: library, number format (``float32``, ``int8`` or ``bfloat16``), threads, and the models as JSON: by name the folder, a
folder for the files that the library needs, such as an ONNX file, whether texts are pairs, and texts to calibrate with. Files are
made once and found again. Then the library's version, the port and the process's id are printed as JSON. ``/v1/embeddings`` (with
base64) and ``/v1/rerank`` take the texts of a request, checked no further than their JSON. Requests that come while a batch is
computed are the next batch, of at most :data:`BATCH` texts. The process ends with its standard input. Infinity serves with its own
application and batches.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from shutil import copy
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import torch
import uvicorn
import uvloop
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForSequenceClassification

Compute = Callable[[list[Any]], Any]
"""[texts] -> [texts, numbers]: normalised embeddings, or one score of each pair."""
BATCH = 256 if torch.cuda.is_available() else 32
"""Texts in a batch, at most: on a CPU the default of sentence-transformers; on a GPU, which 32 short texts do not fill, more than
the clients send at once."""
DELAY = 1e-3
"""Seconds to wait for the next request while a batch has fewer than the one before: their clients may just have got answers."""
INPUTS = ["input_ids", "attention_mask"]
CALIBRATION = 8
"""Batches that the ranges of OpenVINO's activations are found with."""


class Asked(msgspec.Struct):
    """A request: texts to embed, or a query and documents."""

    model: str
    input: tuple[str, ...] = ()
    query: str = ""
    documents: tuple[str, ...] = ()

    @property
    def texts(self) -> list[Any]:
        """Texts, or pairs of query and document."""
        return [*self.input] or [(self.query, document) for document in self.documents]


class Server:
    """An ASGI application that computes the requests that wait as one batch."""

    def __init__(self, models: Mapping[str, Compute]) -> None:
        self._models = models
        self._waiting: SimpleQueue[tuple[Asked, asyncio.Future[Any]]] = SimpleQueue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        done = asyncio.get_running_loop().create_future()
        self._waiting.put((DECODER.decode(body), done))
        rows = enumerate(await done)
        if scope["path"] == "/v1/embeddings":  # msgspec writes bytes in base64
            content = msgspec.json.encode({"data": [{"index": index, "embedding": row.tobytes()} for index, row in rows]})
        else:
            content = msgspec.json.encode({"results": [{"index": index, "relevance_score": float(row[0])} for index, row in rows]})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def compute(self) -> None:
        """Compute one batch after the other, without end."""
        batch: list[tuple[Asked, asyncio.Future[Any]]] = []
        while True:
            expected, batch = len(batch), [self._waiting.get()]
            left = BATCH - len(batch[0][0].texts)
            with suppress(Empty):
                while left > 0:
                    batch.append(self._waiting.get(len(batch) < expected, DELAY))
                    left -= len(batch[-1][0].texts)
            for model in {asked.model for asked, _ in batch}:
                part = [each for each in batch if each[0].model == model]
                rows = self._models[model]([text for asked, _ in part for text in asked.texts])
                part[0][1].get_loop().call_soon_threadsafe(self._finish, part, rows)

    def _finish(self, part: list[tuple[Asked, asyncio.Future[Any]]], rows: Any) -> None:
        left = iter(rows)
        for asked, done in part:
            done.set_result([*islice(left, len(asked.texts))])


DECODER = msgspec.json.Decoder(Asked)


class Whole(torch.nn.Module):
    """A model with what follows it: the normalised mean of a text's tokens, or the sigmoid of a pair's number."""

    def __init__(self, folder: str, pairs: bool, attention: str) -> None:
        super().__init__()
        kind: Any = AutoModelForSequenceClassification if pairs else AutoModel
        try:
            self.model: Any = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        except ValueError:  # the architecture has one form of attention
            self.model = kind.from_pretrained(folder, dtype=torch.float32)
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
    """sentence-transformers with torch, in float32 or bfloat16, on a GPU if there is one."""
    import sentence_transformers as library

    if form == "int8":
        raise SystemExit("sentence-transformers computes in int8 through other libraries only")
    version = f"sentence-transformers {library.__version__}, torch {torch.__version__}"
    options: dict[str, Any] = {"batch_size": BATCH, "show_progress_bar": False}
    given: dict[str, Any] = {"device": "cuda" if torch.cuda.is_available() else "cpu", "model_kwargs": {"dtype": form}}
    if model["pairs"]:
        cross = library.CrossEncoder(model["folder"], **given)
        return lambda pairs: cross.predict(pairs, **options)[:, None], version
    encoder = library.SentenceTransformer(model["folder"], **given)
    return lambda texts: encoder.encode(texts, **options), version


def onnxruntime(model: dict[str, Any], form: str, threads: int) -> tuple[Compute, str]:
    """ONNX Runtime: the graph with its own fused attention, and in int8 its dynamic quantisation of weights and activations."""
    import onnxruntime as library

    def write(folder: Path) -> None:
        from onnxruntime.transformers.optimizer import optimize_model

        whole = Whole(model["folder"], model["pairs"], "eager")  # the optimiser knows the attention of this graph
        config = whole.model.config
        plain, fused = folder / "plain.onnx", folder / "float32.onnx"
        export(whole, plain, "numbers")
        heads = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
        optimize_model(str(plain), model_type="bert", **heads).save_model_to_file(str(fused))
        plain.unlink()
        if form == "int8":
            quantize(fused, folder / "int8.onnx")

    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    session = library.InferenceSession(kept(model, write) / f"{form}.onnx", options, providers=["CPUExecutionProvider"])
    encode = encoder(model)

    def compute(texts: list[Any]) -> Any:
        return session.run(None, dict(zip(INPUTS, encode(texts), strict=True)))[0]

    return compute, f"onnxruntime {library.__version__}"


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
    return lambda texts: compiled(encode(texts))[0], version


LIBRARIES = {"sentence-transformers": sentence_transformers, "onnxruntime": onnxruntime, "openvino": openvino}


def infinity(models: Mapping[str, dict[str, Any]], form: str) -> tuple[Any, str]:
    """The application of Infinity, a server of embedding models and rerankers, with its engine for processors: ONNX Runtime, with
    graphs that it optimises, and in int8 dynamic quantisation. The names of ``models`` are those of requests."""
    if form == "bfloat16":
        raise SystemExit("Infinity computes in bfloat16 on GPUs only")
    import infinity_emb
    import onnxruntime as library
    from infinity_emb.infinity_server import create_server

    served = []
    for name, model in models.items():

        def write(folder: Path, model: dict[str, Any] = model) -> None:
            kind: Any = AutoModelForSequenceClassification if model["pairs"] else AutoModel
            whole = kind.from_pretrained(model["folder"], attn_implementation="eager", return_dict=False)
            export(whole, folder / "model.onnx", "logits" if model["pairs"] else "last_hidden_state")
            if form == "int8":
                quantize(folder / "model.onnx", folder / "model_quantized.onnx")
            for path in Path(model["folder"]).glob("*.json"):
                copy(path, folder)
            config = json.loads((folder / "config.json").read_text())
            config["max_position_embeddings"] = 512  # where it cuts: the 514 of XLM-RoBERTa are two more than a text may have
            (folder / "config.json").write_text(json.dumps(config))

        given = {"engine": "optimum", "device": "cpu", "pooling_method": "mean", "batch_size": BATCH}
        path = str(kept(model, write))
        served.append(infinity_emb.EngineArgs(model_name_or_path=path, served_model_name=name, **given))
    version = f"infinity {infinity_emb.__version__}, onnxruntime {library.__version__}"
    return create_server(engine_args_list=served, url_prefix="/v1"), version


def export(model: torch.nn.Module, path: Path, output: str) -> None:
    """Write a model as ONNX."""
    axes = {name: {0: "texts", 1: "tokens"} for name in (*INPUTS, output)}
    names: dict[str, Any] = {"input_names": INPUTS, "output_names": [output], "dynamic_axes": axes}
    torch.onnx.export(model.eval(), sample(), str(path), dynamo=False, opset_version=17, **names)


def quantize(path: Path, quantized: Path) -> None:
    """Write an ONNX model in int8, quantised dynamically, and remove that in float32."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    types = {"DefaultTensorType": 1}  # float: shapes are not inferred through the fused operators
    quantize_dynamic(path, quantized, weight_type=QuantType.QInt8, extra_options=types)
    path.unlink()


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
        found = tokenizer.encode_batch_fast(texts)
        return np.array([each.ids for each in found]), np.array([each.attention_mask for each in found])

    return encode


class HTTP(uvicorn.Server):
    """Serves an application, and calls ``ready`` when it has started."""

    def __init__(self, application: Any, ready: Callable[[], None]) -> None:
        off: dict[str, Any] = {"access_log": False, "date_header": False, "server_header": False, "proxy_headers": False}
        super().__init__(uvicorn.Config(application, http="httptools", ws="none", log_level="error", **off))
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application."""
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(0, os._exit, 0)  # where standard input ends
        self._ready()


def main(library: str, form: str, threads: str, given: str) -> None:
    """Load the models, and serve them."""
    printed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    torch.set_num_threads(int(threads))
    models, listener = json.loads(given), socket.create_server(("127.0.0.1", 0))
    computing = None
    if library == "infinity":
        application, version = infinity(models, form)
    else:
        loaded = {name: LIBRARIES[library](model, form, int(threads)) for name, model in models.items()}
        application = computing = Server({name: compute for name, (compute, _) in loaded.items()})
        version = next(iter(loaded.values()))[1]
    ready = {"version": version, "port": listener.getsockname()[1], "pid": os.getpid()}
    http = HTTP(application, lambda: print(json.dumps(ready), file=printed, flush=True))
    if computing is None:
        uvloop.run(http.serve([listener]))
    else:
        Thread(target=lambda: uvloop.run(http.serve([listener])), daemon=True).start()
        computing.compute()  # in this thread, so that an error ends the process


if __name__ == "__main__":
    main(*sys.argv[1:])
