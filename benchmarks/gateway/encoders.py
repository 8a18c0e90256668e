"""Encoders over HTTP beside other libraries and a server, in one run: ``python -m benchmarks encoders``.

Engines and a gateway run as processes, as in production. Each library (sentence-transformers, ONNX Runtime, OpenVINO) runs in a
process of its own with as many threads, behind a small HTTP server (``encoder_process.py``) that computes the requests that wait
as one batch, of at most 32 texts. Infinity, a server of embedding models and rerankers, runs as published, with ONNX Runtime. One
client sends all programs the same requests, 1, 8 and 64 at a time, with one text in each, or ``--texts``. The texts of a figure
have equal numbers of tokens, so the libraries compute no padding. Models are all-MiniLM-L6-v2, and a cross-encoder in the shape of
XLM-RoBERTa base with random weights; with ``--family``, an embedding model of another family in their place, in the shape of its
base model with random weights. Every round measures all programs in turn; ratios are medians of the rounds' ratios. The limit is
what two threads could answer if they did nothing but multiply, as fast as they multiply large matrices in the same run. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
import uvloop
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from benchmarks.engine.peers import Lines, PeerError
from benchmarks.engine.records import Records, add_output, describe, opened
from benchmarks.engine.roofline import measure_peaks
from benchmarks.engine.servers import ServerError
from benchmarks.engine.subject import default_device
from benchmarks.gateway.programs import WORDS, drained, tree_seconds
from tests import weights
from tests.clients.environments import OFFLINE, python_environment
from tests.encoders import make_encoder
from tests.processes import Pod, Program
from yardstick_llm.engine.server.loop_client import HUGE_PAGES, MALLOC
from yardstick_llm.kernels.int8 import instructions

PROGRAM = Path(__file__).with_name("encoder_process.py")
LIBRARIES = ("sentence-transformers", "onnxruntime", "openvino")
ENVIRONMENTS = dict.fromkeys(LIBRARIES, "encoder-peers") | {"infinity": "infinity"}
"""The environment of each library (``tests/clients/pins``)."""
FORMATS = ("float32", "int8")
OURS = "Yardstick"
EMBED, CROSS = "all-MiniLM", "cross-encoder"
MINILM_MARKS, PAIR_MARKS = 2, 4
"""Tokens that the tokeniser adds to a text, and to a pair."""
QUERY_TOKENS = 30
"""At most a quarter of a pair."""
TOLERANCE = 1e-4
"""Largest difference of a number in float32."""
CHECKED = 8
"""Texts that all programs compute before they are measured, which also warms them up."""
SLACK = 1.2
"""Share of the expected time of a round's figures that must be left for them to begin."""
XLM_R_BASE = {
    "vocab_size": 250_002,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 514,
}
"""The published shape (https://huggingface.co/FacebookAI/xlm-roberta-base/blob/main/config.json), but for its 12 layers."""
BERT_BASE = XLM_R_BASE | {"vocab_size": 30_000, "num_hidden_layers": 4, "pad_token_id": 1, "max_position_embeddings": 512}
"""With four layers, so that all programs fit into memory beside each other."""
FAMILIES: dict[str, dict[str, Any]] = {
    "modernbert": {"intermediate_size": 1152, "local_attention": 128, "norm_bias": False},
    "nomic": {"max_position_embeddings": 2048},
    "gte": {"max_position_embeddings": 8192},
    "mpnet": {"max_position_embeddings": 514},
    "deberta": {"position_buckets": 256},
}
"""Shapes of the families' base models, as published, where they differ from BERT's."""
GATED = "modernbert", "nomic_bert", "gte"
"""Model types whose feed-forward layers have three products."""
TINY: dict[str, Any] = {"vocab_size": 1000, "num_hidden_layers": 2, "pad_token_id": 1, "max_position_embeddings": 514}
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
ANSWER_HEADER = b"\r\ncontent-length:"

Text = str | tuple[str, str]
"""A text to embed, or a query and a document."""


class Model(NamedTuple):
    """An encoder to measure."""

    folder: Path
    pairs: bool
    words: list[str]
    """Words of one token each."""

    @property
    def flops(self) -> int:
        """Operations of the layers' matrix products for one token."""
        config = json.loads((self.folder / "config.json").read_text())
        size, inner = config["hidden_size"], config["intermediate_size"]
        products = 3 if config["model_type"] in GATED else 2
        return 2 * int(config["num_hidden_layers"]) * int(4 * size * size + products * size * inner)

    def texts(self, count: int, tokens: int, seed: str) -> list[Text]:
        """Return different texts of as many tokens, with those that the tokeniser adds."""
        draws = random.Random(seed)

        def text(length: int) -> str:
            return " ".join(draws.choices(self.words, k=length))

        if not self.pairs:
            return [text(tokens - MINILM_MARKS) for _ in range(count)]
        query = min(QUERY_TOKENS, tokens // 4)
        return [(text(query), text(tokens - PAIR_MARKS - query)) for _ in range(count)]


class Case(NamedTuple):
    """The model and the load of one figure."""

    model: str
    tokens: int
    in_flight: int
    """Requests that the client has sent and that are not answered yet."""
    texts: int
    """Texts in each request."""

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens, {self.in_flight} in flight" + (f" of {self.texts} texts" * (self.texts > 1))


class Spent(NamedTuple):
    """Texts computed, and the seconds that they took, of the clock and of CPU time."""

    texts: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        """Texts per second."""
        return self.texts / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of CPU time per text."""
        return self.cpu / self.texts * 1e3


class Served:
    """A program that computes texts over HTTP in one number format: a gateway with engines, or the server of a library."""

    def __init__(self, port: int, pids: Mapping[str, Sequence[int]], form: str, version: str = "") -> None:
        """``pids``: the processes that compute the texts of each model, and whose CPU time counts."""
        self._port, self._pids, self._form = port, pids, form
        self.version = version

    def answers(self, model: str, texts: list[Text]) -> np.ndarray[Any, Any]:
        """[texts] -> [texts, numbers]."""
        found: list[Any] = []
        with httpx.Client(base_url=f"http://127.0.0.1:{self._port}", headers={"cache-control": "no-store"}, timeout=60) as client:
            for text in texts:
                path, body = self._asked(model, [text])
                answer = client.post(path, json=body).raise_for_status().json()
                if model == CROSS:
                    found.append([answer["results"][0]["relevance_score"]])
                else:
                    found.append(np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), np.float32))
        return np.array(found)

    def spend(self, case: Case, texts: list[Text], seconds: float) -> Spent:
        """Send texts, again and again, in ``in_flight`` requests at a time; after ``seconds`` no further ones begin."""
        requests = []
        for first in range(0, len(texts), case.texts):
            path, body = self._asked(case.model, texts[first : first + case.texts])
            content = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncache-control: no-store\r\n"
            requests.append(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        pids = self._pids[case.model]
        began, cpu = time.perf_counter(), sum(map(tree_seconds, pids))
        count = uvloop.run(_send(self._port, requests, case.in_flight, seconds))
        return Spent(count * case.texts, time.perf_counter() - began, sum(map(tree_seconds, pids)) - cpu)

    def _asked(self, model: str, texts: Sequence[Text]) -> tuple[str, dict[str, Any]]:
        name = f"{model}-{self._form}"
        if isinstance(texts[0], str):
            return "/v1/embeddings", {"model": name, "input": texts, "encoding_format": "base64"}
        return "/v1/rerank", {"model": name, "query": texts[0][0], "documents": [text[1] for text in texts]}


async def _send(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> int:
    """Send requests, one after the other through each connection, and return their number. The client shares the cores with what
    it measures, so it reads only status and length of an answer. Raises :class:`ServerError` if a status is not 200."""
    left, end, count = cycle(requests), time.perf_counter() + seconds, 0

    async def connection() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            writer.write(next(left))
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().partition(ANSWER_HEADER)[2].partition(b"\r\n")[0]))
            if head.split(b" ", 2)[1] != b"200":
                raise ServerError(f"the server answered {body[:500]!r}")
            count += 1
            if time.perf_counter() >= end:
                writer.close()
                return

    await asyncio.gather(*[connection() for _ in range(connections)])
    return count


def main(arguments: Sequence[str]) -> int:
    """Measure and print tables and one line of JSON; returns the exit code: 1 where numbers in float32 differ."""
    parser = argparse.ArgumentParser("python -m benchmarks encoders", description="Encoders over HTTP beside other libraries.")
    parser.add_argument("--layers", type=int, default=12, help="of the cross-encoder (%(default)s)")
    parser.add_argument("--family", choices=FAMILIES, help="measure a model of this family, of four layers, only")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="of these and infinity, which takes 10 GB (%(default)s)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of these and bfloat16 (%(default)s)")
    parser.add_argument("--python", type=Path, help="an interpreter with the libraries (of environments made on first use)")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 64], help="requests at a time (1 8 64)")
    parser.add_argument("--texts", type=int, default=1, help="texts in each request, or documents for its query (%(default)s)")
    parser.add_argument("--engines", type=int, default=1, help="of each model, which share the threads (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="0 only prepares and compares (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each figure, at least (%(default)s)")
    parser.add_argument("--models", type=Path, help="folder that keeps the cross-encoder and the libraries' files for the next run")
    parser.add_argument("--quick", action="store_true", help="tiny models, one short round, to check that it works")
    add_output(parser)
    options = parser.parse_args(arguments)
    lengths = [(EMBED, 32), (EMBED, 256), (CROSS, 512)]
    if options.quick:
        options.rounds, options.seconds, options.in_flight = 1, 0.05, [1, 4]
        lengths = [(EMBED, 16), (EMBED, 64), (CROSS, 128)]
    if options.family:
        lengths = [(options.family, tokens) for model, tokens in lengths if model == EMBED]
    cases = [Case(*length, in_flight, options.texts) for length in lengths for in_flight in options.in_flight]
    records = opened(options)
    flops = {form: peak_flops(form) for form in options.formats.split(",")}
    with ExitStack() as stack:
        folder: Path = options.models or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yardstick-encoders-")))
        if options.family:
            measured = {options.family: family(folder, options.family, options.quick)}
        else:
            measured = {EMBED: minilm(folder, options.quick), CROSS: cross_encoder(folder, options.layers, options.quick)}
        limits = {
            str(case): {form: peak / (case.tokens * measured[case.model].flops) for form, peak in flops.items() if peak}
            for case in cases
        }
        left_out: dict[str, str] = {}
        subjects = start(measured, folder, options, left_out, stack)
        differences = compare(subjects, measured, dict(lengths))
        found = measure(subjects, measured, cases, options, records)
    summary: dict[str, Any] = {"bench": "encoders", "machine": describe(), "left_out": left_out}
    summary |= {"layers": options.layers, "engines": options.engines}
    summary["versions"] = {name: each.version for name, each in subjects.items() if each.version}
    summary |= summarise(found) | {"largest_difference": differences, "not_measured": records.store.left_out}
    summary["limits"] = limits
    show(summary, records)
    records.finish(summary)
    wrong = [name for name, difference in differences.items() if "float32" in name and difference > TOLERANCE]
    if wrong:
        print(f"numbers differ from those of {OURS}, float32: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


def peak_flops(form: str) -> float | None:
    """Operations a second of a large product; None where the processor has no instructions for it."""
    if form == "int8":
        return None if instructions() is None else measure_peaks(torch.device("cpu"), torch.float32, form).quantized_flops
    return measure_peaks(default_device(), getattr(torch, form)).flops


def minilm(folder: Path, quick: bool) -> Model:
    """Return all-MiniLM-L6-v2, or a tiny model in its place."""
    if quick:
        directory = folder / "tiny"
        if not directory.exists():
            directory.mkdir(parents=True)
            make_encoder(directory, "bert", **TINY)
            write_tokenizer(directory)
    else:
        directory = weights.minilm()
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    return Model(directory, False, plain_words(vocabulary))


def family(folder: Path, name: str, quick: bool) -> Model:
    """Return an embedding model of another family with random weights, tiny or in the shape of its base model."""
    directory = folder / (f"tiny-{name}" if quick else name)
    if not (directory / "tokenizer_config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        shape: dict[str, Any] = TINY if quick else BERT_BASE | FAMILIES[name]
        make_encoder(directory, name, **shape)
        write_tokenizer(directory)
    return Model(directory, False, plain_words(WORDS))


def cross_encoder(folder: Path, layers: int, quick: bool) -> Model:
    """Return a cross-encoder with random weights and one score, tiny or in the shape of XLM-RoBERTa base. Its tokeniser is a
    WordPiece with words of one token; that of XLM-RoBERTa is a Unigram."""
    directory = folder / ("tiny-cross" if quick else f"cross-{layers}")
    if not (directory / "tokenizer_config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        shape: dict[str, Any] = TINY if quick else XLM_R_BASE | {"num_hidden_layers": layers}
        make_encoder(directory, "xlm_roberta", "classes", num_labels=1, **shape)
        write_tokenizer(directory)
    return Model(directory, True, plain_words(WORDS))


def write_tokenizer(directory: Path) -> None:
    """Write a tokeniser whose ids of control tokens, and whose pairs, are those of XLM-RoBERTa."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *plain_words(WORDS)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))  # noqa: S106 - the name of a token
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([*SPECIAL])
    marks = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B:0 </s>:0", marks)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "unk_token": "<unk>"}
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | names | inputs))


def plain_words(given: Sequence[str] | Mapping[str, int]) -> list[str]:
    """Return words of at least three small letters, at most 900."""
    return sorted({word for word in given if len(word) > 2 and word.isascii() and word.isalpha() and word.islower()})[:900]


def start(
    measured: Mapping[str, Model], folder: Path, options: argparse.Namespace, left_out: dict[str, str], stack: ExitStack
) -> dict[str, Served]:
    """Start all programs; in ``left_out``, why others are not measured."""
    subjects: dict[str, Served] = {}
    pods: dict[str, dict[str, list[Program]]] = {}
    threads = str(torch.get_num_threads())
    of_engine = str(max(1, torch.get_num_threads() // options.engines))
    for form in options.formats.split(","):
        if form == "int8" and instructions() is None:
            left_out[form] = "the processor has no instructions for it"
            continue
        flags = ["--threads", of_engine, *(["--quantize", form] if form == "int8" else ["--dtype", form])]
        pods[form] = {}
        for name, model in measured.items():  # one after the other, so that each starts in time
            started = (Pod(model.folder, "--name", f"{name}-{form}", *flags) for _ in range(options.engines))
            pods[form][name] = [stack.enter_context(drained(pod)) for pod in started]
    urls = [pod.url for each in pods.values() for engines in each.values() for pod in engines]
    gateway = Program("gateway", *(word for url in urls for word in ("--engine", url)))
    stack.enter_context(drained(gateway))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "YARDSTICK"))}
    environment = MALLOC | HUGE_PAGES | kept | OFFLINE | {"RAYON_NUM_THREADS": threads, "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    for form, of_form in pods.items():
        pids = {name: (gateway.process.pid, *(pod.process.pid for pod in engines)) for name, engines in of_form.items()}
        subjects[f"{OURS}, {form}"] = Served(gateway.port, pids, form)
        for library in options.libraries.split(","):
            name = f"{library}, {form}"
            if name == "sentence-transformers, int8":
                left_out[name] = "it computes in int8 through the others"
                continue
            given = {
                f"{key}-{form}": {
                    "folder": str(model.folder),
                    "made": str(folder / "made" / f"{model.folder.name}-{library}-{form}"),
                    "pairs": model.pairs,
                    "calibration": model.texts(32, 64, "calibration"),
                }
                for key, model in measured.items()
            }
            python = options.python or python_environment(ENVIRONMENTS[library]) / "bin" / "python"
            process = Lines([str(python), "-W", "ignore", str(PROGRAM), library, form, threads, json.dumps(given)], environment)
            stack.callback(process.close)
            try:
                ready = process.read()  # before the next one starts: making the files of a model takes several times its memory
            except PeerError as error:
                left_out[name] = str(error)
                print(f"left out: {name}: {error}", file=sys.stderr)
                continue
            subjects[name] = Served(ready["port"], {key: [ready["pid"]] for key in measured}, form, ready["version"])
    return subjects


def compare(subjects: Mapping[str, Served], measured: Mapping[str, Model], lengths: Mapping[str, int]) -> dict[str, float]:
    """Return the largest difference of each program's numbers from those of the engine in float32, by program and model."""
    found: dict[str, float] = {}
    for model, tokens in lengths.items():
        texts = measured[model].texts(CHECKED, tokens, "checked")
        answers = {name: subject.answers(model, texts) for name, subject in subjects.items()}
        base = next(iter(answers.values()))
        assert len(np.unique(base.round(6), axis=0)) == CHECKED, "the texts have different numbers"
        found |= {f"{name}, {model}": float(np.abs(rows - base).max()) for name, rows in answers.items()}
    return found


def measure(
    subjects: Mapping[str, Served],
    measured: Mapping[str, Model],
    cases: Sequence[Case],
    options: argparse.Namespace,
    records: Records,
) -> dict[Case, list[dict[str, Spent]]]:
    """Measure all programs in turn in each round, in every other round in reverse order. A round leaves out the cases for which too
    little time is left. Each case is printed and stored as it is measured."""
    found: dict[Case, list[dict[str, Spent]]] = {case: [] for case in cases}
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for number in range(1, options.rounds + 1):
        for case in cases:
            texts = measured[case.model].texts(2 * case.in_flight * case.texts, case.tokens, f"{number} {case}")

            def work(case: Case = case, texts: list[Text] = texts, number: int = number) -> dict[str, Spent]:
                order = [*subjects] if number % 2 else [*subjects][::-1]
                return {name: subjects[name].spend(case, texts, options.seconds) for name in order}

            known = rates.get(case[:2], {})
            expected = SLACK * sum(max(options.seconds, case.in_flight * case.texts / rate) for rate in known.values())
            key = f"round {number}, {case}"
            result = records.store.measure(key, expected, work)
            if result is None:
                continue
            spent = {name: Spent(*result[name]) for name in subjects if name in result}
            rates[case[:2]] = {name: each.rate for name, each in spent.items()}
            found[case].append(spent)
            records.rows += [{"key": key, "name": name, **each._asdict()} for name, each in spent.items()]
            figures = ", ".join(f"{name} {each.rate:.1f} ({each.cpu_ms:.2f})" for name, each in spent.items())
            print(f"{key}: texts/s (ms of CPU): {figures}", flush=True)
    return found


def summarise(found: Mapping[Case, Sequence[Mapping[str, Spent]]]) -> dict[str, Any]:
    """Medians of the rounds by case and program, and our ratios to the others of the same format: texts/s, and inverse CPU time."""
    summary: dict[str, Any] = {"texts_per_s": {}, "cpu_ms_per_text": {}, "ratios": {}, "cpu_ratios": {}, "rounds": {}}
    for case, rounds in found.items():
        if not rounds:
            continue
        summary["rounds"][str(case)] = len(rounds)
        for name in rounds[0]:
            ours = f"{OURS}, {name.rpartition(', ')[2]}"
            each = [(spent[name], spent[ours]) for spent in rounds]
            values = {
                "texts_per_s": [own.rate for own, _ in each],
                "cpu_ms_per_text": [own.cpu_ms for own, _ in each],
                "ratios": [our.rate / own.rate for own, our in each],
                "cpu_ratios": [own.cpu_ms / our.cpu_ms for own, our in each],
            }
            for kind, numbers in values.items():
                spread = {"median": statistics.median(numbers), "least": min(numbers), "most": max(numbers)}
                summary[kind].setdefault(str(case), {})[name] = spread
    return summary


def show(summary: Mapping[str, Any], records: Records) -> None:
    """Print a table for each case."""
    for case, programs in summary["texts_per_s"].items():
        columns = "texts/s", f"{OURS} ÷ it", "ms of CPU a text", f"it ÷ {OURS}"
        table = Table("", *columns, title=f"{case}: median (least–most) of {summary['rounds'][case]} rounds")
        for name in programs:
            row = []
            for kind, digits in (("texts_per_s", 1), ("ratios", 2), ("cpu_ms_per_text", 2), ("cpu_ratios", 2)):
                middle, least, most = summary[kind][case][name].values()
                row.append(f"{middle:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})")
            table.add_row(name, *row)
        for form, limit in summary["limits"][case].items():
            table.add_row(f"the limit, {form}", f"{limit:.1f}")
        records.console.print(table)
    for name, reason in summary["left_out"].items():
        records.console.print(f"left out: {name}: {reason}")
