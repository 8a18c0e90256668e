"""CPU time of a text worker for a request of ten items: ``python -m benchmarks tokenise``.

Each figure is the CPU time of all that a worker does with one request: it decodes the body, tokenises query and items, and packs
the ids. ``library`` is the plain alternative: each whole prompt through ``tokenizers``, without decoding and packing. ``new
worker`` knows no pieces of texts yet (gateway/text/pieces.py); ``warm worker`` has read as many other requests as are measured. The
texts are the help texts of Python. The vocabulary is synthetic unless ``--tokenizer`` names a file: 151,643 tokens, a part of them
words of the texts, with Qwen's pre-tokeniser. The ids of all variants are compared. Each round measures every variant
once; figures are medians of the rounds and ratios are medians of the rounds' ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import tokenizers

from engine.wire import TokenizerFiles
from gateway.presets.select import builtin_presets
from gateway.reading.endpoint import TextSide
from gateway.reading.worker import Worker
from gateway.text.bounds import Bounds
from gateway.text.chat_template import ChatTemplate
from gateway.text.facts import Facts
from gateway.text.pieces import Pieces
from gateway.text.prepared import Packed, unpack
from gateway.text.preset_template import PresetTemplate
from gateway.text.spelling import BYTE_OF
from gateway.text.tokenizer import Tokenizer
from gateway.workers.messages import Read, Whole

QUERY, ITEM, ITEMS = 120, 300, 10
VOCABULARY = 151_643
PRESET = "qwen3-reranker"
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
SPELLED = {byte: char for char, byte in BYTE_OF.items()}
TEXT = re.sub(" {2,}", " ", " ".join(topics.values()))
WORDS = TEXT.split(" ")

Request = tuple[str, list[str]]
"""A query and its items."""


def synthetic_vocabulary() -> bytes:
    """Return a ``tokenizer.json`` of the size of Qwen's. Half of the distinct words of the texts are one token each."""
    rng = random.Random(1)
    words = ["yes", "no", *sorted({f" {word}" for word in re.findall("[A-Za-z]+", TEXT)})[::2]]
    vocab = {char: id for id, char in enumerate(SPELLED.values())}
    merges: list[str] = []
    while len(vocab) < VOCABULARY:
        word = words.pop() if words else " " + "".join(rng.choices("etaoinshrdlu", k=rng.randrange(3, 12)))
        spelled = "".join(SPELLED[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab and len(vocab) < VOCABULARY:
                vocab[spelled[:end]] = len(vocab)
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": VOCABULARY + place, "content": text, "special": text[1] == "|", **flags} for place, text in enumerate(CONTROLS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    document = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab | {token["content"]: token["id"] for token in added}, "merges": merges},
    }
    return msgspec.json.encode(document)


class Subject:
    """A worker and the library's tokeniser, with the same vocabulary."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.library = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        self.tokenizer = Tokenizer.from_files(files)
        preset = PresetTemplate(builtin_presets()[PRESET], self.tokenizer)
        self._preset = preset
        self._worker = Worker({"m": TextSide(self.tokenizer, ChatTemplate(None, {}), preset)})
        self._read = Read("m", Facts("m", 1 << 15, self.tokenizer.vocab_size, 64), Bounds())

    def score(self, request: Request) -> Packed:
        """Read a body of ``/v1/score``."""
        return self._answer("score", {"query": request[0], "items": request[1], "label_token_ids": [5, 6]})

    def rerank(self, request: Request) -> Packed:
        """Read a body of ``/v1/rerank``."""
        return self._answer("rerank", {"query": request[0], "documents": request[1]})

    def score_by_library(self, request: Request) -> list[list[int]]:
        """Encode each query and item."""
        return [self.library.encode(request[0] + item, add_special_tokens=False).ids for item in request[1]]

    def rerank_by_library(self, request: Request) -> list[list[int]]:
        """Encode each prompt of the preset."""
        preset = self._preset.preset
        template = "".join(preset.template).replace("{instruction}", preset.instruction).replace("{query}", request[0])
        prompts = [template.replace("{document}", item) for item in request[1]]
        return [self.library.encode(prompt, add_special_tokens=False).ids for prompt in prompts]

    def forget(self) -> None:
        """Return to the state of a new worker."""
        pieces = self.tokenizer._pieces
        assert isinstance(pieces, Pieces)
        pieces._ids.clear()

    def _answer(self, endpoint: str, fields: dict[str, Any]) -> Packed:
        packed = self._worker.answer(Whole(endpoint, self._read), bytearray(msgspec.json.encode(fields)))
        assert isinstance(packed, Packed), packed
        return packed


def ids_of(packed: Packed) -> list[list[int]]:
    """Return the prompts of a worker's answer."""
    prepared = unpack(packed)
    return [[*prepared.prefix, *row] for row in prepared.rows]


def requests_of(library: tokenizers.Tokenizer, count: int) -> list[Request]:
    """Return different requests of the standard workload."""
    rng = random.Random(2)

    def text(tokens: int) -> str:
        start = rng.randrange(len(WORDS) - 2 * tokens)
        whole = " ".join(WORDS[start : start + 2 * tokens])
        return whole[: library.encode(whole, add_special_tokens=False).offsets[tokens - 1][1]]

    return [(text(QUERY), [f" {text(ITEM)}" for _ in range(ITEMS)]) for _ in range(count)]


def milliseconds(function: Callable[[Request], object], requests: Sequence[Request]) -> float:
    """CPU milliseconds for each request."""
    before = time.process_time()
    for request in requests:
        function(request)
    return (time.process_time() - before) / len(requests) * 1e3


def measure(subject: Subject, others: Sequence[Request], requests: Sequence[Request]) -> dict[str, float]:
    """Return the figures of one round."""
    found: dict[str, float] = {}
    for name in ("score", "rerank"):
        read: Callable[[Request], Any] = getattr(subject, name)
        by_library: Callable[[Request], Any] = getattr(subject, f"{name}_by_library")
        found[f"{name}, library"] = milliseconds(by_library, requests)

        def by_a_new_worker(request: Request, read: Callable[[Request], Any] = read) -> None:
            subject.forget()
            read(request)

        found[f"{name}, new worker"] = milliseconds(by_a_new_worker, requests)
        subject.forget()
        milliseconds(read, others)
        found[f"{name}, warm worker"] = milliseconds(read, requests)
        if ids_of(read(requests[0])) != by_library(requests[0]):
            raise SystemExit(f"{name}: the worker has other ids than the library")
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and one line of JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tokenise", description="CPU time of tokenising a request.")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json of a Qwen model; synthetic by default")
    parser.add_argument("--requests", type=int, default=40, help="requests a figure and round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    content = options.tokenizer.read_bytes() if options.tokenizer else synthetic_vocabulary()
    subject = Subject(TokenizerFiles(content, None, {}))
    requests = requests_of(subject.library, 2 * options.requests)
    rounds = [measure(subject, requests[: options.requests], requests[options.requests :]) for _ in range(options.rounds)]
    ratios = {
        name: round(statistics.median(each[name] / each[f"{name.split(',')[0]}, library"] for each in rounds), 3)
        for name in rounds[0]
    }
    print(f"CPU milliseconds a request of {ITEMS} items ({QUERY} + {ITEM} tokens): median (least - most), times the library")
    summary = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        summary[name] = round(statistics.median(values), 3)
        print(f"  {name:<22} {summary[name]:6.2f} ({min(values):.2f} - {max(values):.2f})  {ratios[name]:.2f}")
    machine = {"unit": "ms CPU a request", "python": sys.version.split()[0], "cores": os.cpu_count()}
    print(json.dumps({**machine, **summary, "ratios": ratios}))
    return 0
