"""Reranking over HTTP beside sentence-transformers' ``CrossEncoder`` on one checkpoint, in one run:
``python -m benchmarks rerank --sentence-transformers PYTHON``.

Both use the same Qwen3 classifier with random weights, the same documents and the same tokens: a CrossEncoder tokenises query and
document separately, and so does the preset. The CrossEncoder computes every pair whole; the engine computes the query once. PYTHON
is the interpreter of an environment with sentence-transformers. On a GPU, both compute in bfloat16 there. Rounds take the two in
turn, each with documents of its own, so that no cache helps; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from benchmarks.engine.servers import serving
from benchmarks.gateway.programs import in_turn, report
from yardstick_llm.engine.demo import MODELS

DOCUMENTS = 100
QUERY_WORDS = 30
DOCUMENT_WORDS = (20, 80)
TOLERANCE = {"cpu": 1e-4, "cuda": 0.1}
"""Largest difference of a score, in float32 on a CPU and in bfloat16 on a GPU."""
BATCH = {"cpu": 32, "cuda": 128}
"""Pairs of a batch of the CrossEncoder."""
WORDS = "red blue green running hiking wool cotton shoes jacket tent scarf light warm for men women with and in a"
PRESET = """
name = "pairs"
task = "rerank"
template = ["{query}", "{document}"]
activation = "sigmoid"
"""
PEER = """
import json, sys
import torch
from sentence_transformers import CrossEncoder
torch.set_num_threads(int(sys.argv[2]))
device = sys.argv[3]
dtype = torch.float32 if device == "cpu" else torch.bfloat16
model = CrossEncoder(sys.argv[1], device=device, model_kwargs={"torch_dtype": dtype})
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    pairs = [(asked["query"], document) for document in asked["documents"]]
    scores = model.predict(pairs, batch_size=int(sys.argv[4]), show_progress_bar=False)
    print(json.dumps([float(score) for score in scores]), flush=True)
"""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Rank = Callable[[str, list[str]], list[float]]
"""Returns the score of each document."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code: 1 where scores differ."""
    parser = argparse.ArgumentParser("python -m benchmarks rerank", description=__doc__)
    parser.add_argument("--sentence-transformers", metavar="PYTHON", required=True, help="interpreter with sentence-transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--words", type=int, nargs=2, default=DOCUMENT_WORDS, help="least and most words of a document")
    options = parser.parse_args(arguments)
    scores: dict[int, list[float]] = {}
    differences = [0.0]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_classifier(directory, hidden=options.hidden, layers=options.layers, head_dim=options.head_dim)
        gateway, _ = stack.enter_context(serving(directory))
        client = stack.enter_context(httpx.Client(timeout=600))
        subjects: dict[str, Rank] = {
            "gateway": partial(over_http, client, gateway),
            "CrossEncoder": stack.enter_context(cross_encoder(options.sentence_transformers, directory)),
        }

        def measure(_: str, name: str, number: int) -> float:
            query, documents = texts(random.Random(number), options.words)
            began = time.perf_counter()
            ranked = subjects[name](query, documents)
            taken = time.perf_counter() - began
            first = scores.setdefault(number, ranked)
            differences.append(max(abs(one - other) for one, other in zip(first, ranked, strict=True)))
            return taken

        case = f"{DOCUMENTS} documents of {options.words[0]} to {options.words[1]} words"
        found = in_turn(options.rounds, [case], [*subjects], measure)
    report("seconds", found, [("CrossEncoder", "gateway")], {"difference": max(differences)})
    return 0 if max(differences) < TOLERANCE[DEVICE] else 1


def make_classifier(directory: Path, *, hidden: int, layers: int, head_dim: int) -> None:
    """Write a classifier with one label and random weights, the demo model's tokeniser, and a preset."""
    base = MODELS / "base"
    shutil.copy(base / "tokenizer.json", directory / "tokenizer.json")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["chat_template"]  # a CrossEncoder would write the pairs as messages
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    labels: dict[str, Any] = {"num_labels": 1}
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=head_dim,
        max_position_embeddings=4096,
        **labels,
        pad_token_id=Tokenizer.from_file(str(base / "tokenizer.json")).token_to_id("<|pad|>"),
    )
    model: Any = Qwen3ForSequenceClassification(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    (directory / "yardstick.toml").write_text(PRESET)


def texts(rng: random.Random, lengths: Sequence[int]) -> tuple[str, list[str]]:
    """Return a query and documents of random words that the tokeniser knows."""
    words = WORDS.split()

    def text(count: int) -> str:
        return " ".join(rng.choice(words) for _ in range(count))

    return text(QUERY_WORDS), [" " + text(rng.randint(*lengths)) for _ in range(DOCUMENTS)]


def over_http(client: httpx.Client, url: str, query: str, documents: list[str]) -> list[float]:
    """Rerank through the gateway, without its result cache and without leaving anything in caches."""
    body = {"query": query, "documents": documents}
    answer = client.post(f"{url}/v1/rerank", json=body, headers={"cache-control": "no-store"}).raise_for_status().json()
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    return [scores[index] for index in range(len(documents))]


@contextmanager
def cross_encoder(python: str, directory: Path) -> Iterator[Rank]:
    """Run the peer as a process, with as many threads as the engine has."""
    command = [python, "-c", PEER, str(directory), str(torch.get_num_threads()), DEVICE, str(BATCH[DEVICE])]
    process: subprocess.Popen[str] = subprocess.Popen(  # noqa: S603 - the interpreter that the user names
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given, answers = process.stdin, process.stdout

    def rank(query: str, documents: list[str]) -> list[float]:
        given.write(json.dumps({"query": query, "documents": documents}) + "\n")
        given.flush()
        scores: list[Any] = json.loads(answers.readline())
        return scores

    try:
        if answers.readline().strip() != "ready":
            raise SystemExit("the CrossEncoder did not start")
        yield rank
    finally:
        process.kill()
        process.communicate()
