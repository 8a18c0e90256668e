"""A fake engine: a real server on a real socket that speaks ``engine/wire.py``, whose "model" is arithmetic on the tokens.

What it answers depends on the tokens alone, as a real engine's answers do, so the gateway's merging, caching and retrying can be
compared with :func:`logprobs_after`. It can be slow, refuse, break off and be not ready, and it remembers what it was asked and
which requests were left by their caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import secrets
import socket
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.pictures import VISION_TEMPLATE, VISION_TOKENS, seen
from tests.prefixes import PrefixCache
from yardstick_llm.engine import wire

EOS = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["Is it relevant? Yes or No. red running shoes, blue table, the quick brown fox jumps over the lazy dog"] * 3


RAW_OFFSET = 25.0
"""The fake model's raw logits are its log-probabilities plus this."""
LIMITS = wire.Limits(max_branches=64, max_slots=2048, max_logprobs=20, max_labels=16, max_sequences=8)


@cache
def library() -> tokenizers.Tokenizer:
    """A byte-level BPE of some 300 tokens; " Yes" and " No" are one token each, an emoji is four."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", EOS]
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def ids(text: str) -> list[int]:
    return library().encode(text, add_special_tokens=False).ids


def logprobs_after(tokens: list[int], vocab_size: int) -> list[float]:
    """[vocab_size]: the fake model's log-probabilities of the next token, in float32; they sum to about 1 as probabilities."""
    logits = 8 * uniform(repr(tokens), vocab_size)
    row: list[float] = (logits - math.log(np.exp(logits).sum())).astype(np.float32).tolist()
    return row


def uniform(seed: str, count: int) -> np.ndarray:
    """[count]: numbers between 0 and 1, which depend on ``seed`` alone. Faster than :mod:`random`, because tests draw millions."""
    return (np.frombuffer(hashlib.shake_128(seed.encode()).digest(4 * count), np.uint32) + 0.5) / 2**32


def value_logit(tokens: list[int]) -> float:
    """The fake length model's z after ``tokens``."""
    return array("f", [6 * random.Random(hashlib.blake2b(repr(tokens).encode(), key=b"length").digest()).random() - 3])[0]


@dataclass
class Faults:
    """How the engine misbehaves; may be changed while it runs."""

    delay: float = 0.0
    """Seconds before a score's answer, and before each message of a generation."""
    fail: wire.Failed | None = None
    """The answer to every request."""
    poison: int | None = None
    """A token; a score with it in a branch fails with ``out_of_memory``."""
    overflow: int | None = None
    """A token; the row of a branch with it is no number."""
    fail_after: int | None = None
    """Messages of a generation after which it fails, with ``internal``."""
    break_after: int | None = None
    """Messages of a generation after which the connection breaks; a score's at once."""
    skip_after: int | None = None
    """Messages of a generation after which one token is lost."""
    hold: bool = False
    """Scores that have come are answered when this is False again."""
    garbage: bool = False
    """The answer is no msgpack."""
    seconds_per_token: float = 0.0
    """Seconds of work for each token that is not in the prefix cache, where the engine has one."""
    seconds_per_item: float = 0.0
    """Seconds of work for each branch of a score. The scores of an engine work one after the other, as on one device."""
    tokenizer_hangs: bool = False
    """The tokeniser is never sent."""
    pause_after: int | None = None
    """Messages of a generation after which it pauses once, for ``pause``."""
    pause: float = 0.0
    """Seconds."""
    adapter_delay: float = 0.0
    """Seconds before the answer to a load or an unload of an adapter."""
    adapter_lists: int = 0
    """The next lists of adapters, that many, are no msgpack."""
    adapter_fail: wire.Failed | None = None
    """The answer to every load and unload."""


@dataclass
class FakeEngine:
    """An ASGI application, and what happened to it."""

    model: str = "fake"
    fingerprint: str = "fake-1"
    ready: bool = True
    limits: wire.Limits = LIMITS
    max_context: int = 2048
    padding: int = 12
    """Rows of the head beyond the tokeniser's vocabulary."""
    capabilities: tuple[str, ...] = ("score", "generate", "length_guidance", "grammar")
    lenvm_gamma: float | None = 0.985
    lenvm_calibration: wire.Calibration | None = None
    forecast: float = 0.0
    """Tokens that it expects of every sequence; 0 for no forecast."""
    classes: tuple[str, ...] = ()
    multi_label: bool = False
    regression: bool = False
    embedding_size: int = 0
    pooling: str = ""
    token_vector_size: int = 0
    encoder: bool = False
    """Prefix and branch are a pair, whose numbers are not those of the tokens as one text."""
    tokenizer: str | None = None
    """Its ``tokenizer.json``; None: :func:`library`."""
    model_files: dict[str, bytes] = field(default_factory=dict)
    """The sentence-transformers files."""
    architecture: str = ""
    preset: str | None = None
    """Text of ``yardstick.toml``."""
    tokens_per_delta: int = 1
    says: list[int] | None = None
    """Tokens that every generation consists of, before it ends by itself; None: drawn from the model."""
    faults: Faults = field(default_factory=Faults)
    scores: list[wire.Score] = field(default_factory=list)
    item_scores: list[wire.ScoreItems] = field(default_factory=list)
    """`scores` has them too, as :func:`joined`."""
    generates: list[wire.Generate] = field(default_factory=list)
    values: list[wire.Score] = field(default_factory=list)
    """Requests for length values; `scores` has the others."""
    stats: wire.Stats | None = None
    device: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the score that works, if `seconds_per_item` is set."""
    left: list[str] = field(default_factory=list)
    """Requests whose caller closed the connection before their end."""
    running: set[str] = field(default_factory=set)
    """Ids of the requests that are being worked on."""
    url: str = ""
    silent: bool = False
    """Nothing is answered, and no connection closed."""
    frozen: bool = False
    """Generations that run stand still."""
    template: str = TEMPLATE
    added: tuple[str, ...] = ()
    """Further tokens of the tokeniser, in the padding of the head."""
    token: str | None = None
    """Without it in their headers, requests are answered 401."""
    prefixes: PrefixCache | None = None
    """None: nothing is ever cached."""
    queue_seconds: float = 0.0
    """Time in the queue that every answer reports."""
    adapters: dict[str, wire.Adapter] = field(default_factory=dict)
    """By name."""
    loadable: dict[str, wire.Adapter] = field(default_factory=dict)
    """Adapters that can be loaded, by path; their names are those of the requests."""
    max_adapters: int = 8
    """0: it takes none."""
    loads: list[wire.LoadAdapter] = field(default_factory=list)
    unloads: list[wire.UnloadAdapter] = field(default_factory=list)
    asked_for_adapters: int = 0
    probes: list[float] = field(default_factory=list)
    """When probes came, on the monotonic clock."""
    process_name: str = field(default_factory=lambda: secrets.token_hex(8))
    """A part of the revisions; another one after a restart."""
    vision: wire.VisionInfo | None = None
    """How images are prepared, if the model reads any; see :func:`with_vision`."""

    @property
    def vocab_size(self) -> int:
        known = tokenizers.Tokenizer.from_str(self.tokenizer) if self.tokenizer else library()
        return known.get_vocab_size() + self.padding

    @property
    def eos(self) -> int:
        return library().token_to_id(EOS)

    def info(self) -> wire.Info:
        abilities = list(self.capabilities)
        gamma = self.lenvm_gamma if "length_guidance" in abilities else None
        return wire.Info(
            self.model,
            self.fingerprint,
            self.vocab_size,
            self.max_context,
            [self.eos],
            abilities,
            self.limits,
            gamma,
            classes=list(self.classes),
            multi_label=self.multi_label,
            regression=self.regression,
            embedding_size=self.embedding_size,
            pooling=self.pooling,
            token_vector_size=self.token_vector_size,
            encoder=self.encoder,
            vision=self.vision,
            lenvm_calibration=self.lenvm_calibration,
        )

    @property
    def adapter_list(self) -> bytes:
        return wire.encode(wire.Adapters(list(self.adapters.values()), self.max_adapters, 64))

    @property
    def adapters_headers(self) -> list[tuple[bytes, bytes]]:
        """The revision of the adapters; tests change the adapters in place, so it is a digest."""
        digest = hashlib.blake2b(self.adapter_list, digest_size=8).hexdigest()
        return [(wire.ADAPTERS_HEADER.encode(), f"{self.process_name}-{digest}".encode())]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await _Call(self, scope, receive, send).answer()


class _Call:
    """One request to the engine."""

    def __init__(self, engine: FakeEngine, scope: Any, receive: Any, send: Any) -> None:
        self.engine, self.scope, self.receive, self.send = engine, scope, receive, send

    async def answer(self) -> None:
        path = self.scope["path"]
        while self.engine.silent:  # noqa: ASYNC110  a flag that tests set from another thread
            await asyncio.sleep(0.01)
        headers = {name.decode(): value.decode() for name, value in self.scope["headers"]}
        if self.engine.token and path != "/readyz" and headers.get("authorization") != f"Bearer {self.engine.token}":
            await self._reply(401, b"")
        elif path == "/readyz":
            self.engine.probes.append(time.monotonic())
            name = (wire.MODEL_HEADER.encode(), self.engine.model.encode())
            await self._reply(200 if self.engine.ready else 503, b"", name, *self.engine.adapters_headers)
        elif path == "/info":
            await self._reply(200, wire.encode(self.engine.info()))
        elif path == "/stats" and self.engine.stats is not None:
            await self._reply(200, wire.encode(self.engine.stats))
        elif path == "/tokenizer":
            while self.engine.faults.tokenizer_hangs:  # noqa: ASYNC110  as above
                await asyncio.sleep(0.01)
            engine = self.engine
            tokenizer = tokenizers.Tokenizer.from_str(engine.tokenizer or library().to_str())
            tokenizer.add_tokens(list(engine.added))
            text, special = tokenizer.to_str().encode(), {"eos_token": EOS}
            files = wire.TokenizerFiles(text, engine.template, special, engine.preset, engine.architecture, engine.model_files)
            await self._reply(200, wire.encode(files))
        elif path == "/adapters":
            self.engine.asked_for_adapters += 1
            broken = self.engine.faults.adapter_lists > 0
            self.engine.faults.adapter_lists -= broken
            await self._reply(200, b"?" if broken else self.engine.adapter_list, *self.engine.adapters_headers)
        elif path == "/adapters/load":
            await self._load(msgspec.msgpack.decode(await self._body(), type=wire.LoadAdapter))
        elif path == "/adapters/unload":
            await self._unload(msgspec.msgpack.decode(await self._body(), type=wire.UnloadAdapter))
        elif path == "/score":
            request = msgspec.msgpack.decode(await self._body(), type=wire.Score | wire.ScoreItems)
            items = [request.prefix] if isinstance(request, wire.Score) else items_of(request)
            if isinstance(request, wire.ScoreItems):
                self.engine.item_scores.append(request)
                request = joined(request)
            asked = self.engine.values if isinstance(request.readout, wire.LengthValue) else self.engine.scores
            asked.append(request)
            await self._unless_left(request.id, self._score(seen(self.engine.vision, request), items))
        elif path == "/generate":
            generate = msgspec.msgpack.decode(await self._body(), type=wire.Generate)
            self.engine.generates.append(generate)
            await self._unless_left(generate.id, self._generate(seen(self.engine.vision, generate)))
        else:
            await self._reply(404, b"")

    async def _unless_left(self, id: str, work: Awaitable[None]) -> None:
        """Do ``work`` until it is done or the caller has closed the connection."""

        async def gone() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass

        assert id not in self.engine.running, "ids of requests that run at a time are unique"
        self.engine.running.add(id)
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        self.engine.running.discard(id)
        if not working.done():
            working.cancel()
            self.engine.left.append(id)
        with suppress(asyncio.CancelledError):
            await working

    async def _body(self) -> bytes:
        body, more = b"", True
        while more:
            message = await self.receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        return body

    async def _reply(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        given = [(b"content-length", b"%d" % len(body)), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": given})
        await self.send({"type": "http.response.body", "body": body})

    async def _refuse(self, failed: wire.Failed) -> None:
        await self._reply(wire.STATUS_OF_CODE[failed.code], wire.encode(failed))

    async def _load(self, load: wire.LoadAdapter) -> None:
        engine = self.engine
        engine.loads.append(load)
        await asyncio.sleep(engine.faults.adapter_delay)
        found, has = engine.loadable.get(load.path), engine.adapters.get(load.name)
        if engine.faults.adapter_fail is not None:
            await self._refuse(engine.faults.adapter_fail)
        elif found is None:
            await self._refuse(wire.Failed("", "invalid", "There is no adapter of that path below the root."))
        elif has is not None and has.digest != found.digest and not load.replace:
            await self._refuse(wire.Failed("", "invalid", f"Another adapter is called {load.name!r}; replace it."))
        else:
            engine.adapters[load.name] = msgspec.structs.replace(found, name=load.name)
            await self._reply(200, wire.encode(engine.adapters[load.name]))

    async def _unload(self, unload: wire.UnloadAdapter) -> None:
        engine = self.engine
        engine.unloads.append(unload)
        await asyncio.sleep(engine.faults.adapter_delay)
        if engine.faults.adapter_fail is not None:
            await self._refuse(engine.faults.adapter_fail)
        elif engine.adapters.pop(unload.name, None) is None:
            await self._refuse(wire.Failed("", "unknown_adapter", f"There is no adapter {unload.name!r}."))
        else:
            await self.send({"type": "http.response.start", "status": 204, "headers": []})
            await self.send({"type": "http.response.body", "body": b""})

    async def _score(self, request: wire.Score, prefixes: list[list[int]]) -> None:
        if await self._behaves(request):
            before = seasoned(request.prefix, request.adapter)
            classes = next((len(each.classes) for each in self.engine.adapters.values() if each.digest == request.adapter), 0)
            if seconds := self.engine.faults.seconds_per_item * len(request.branches):
                async with self.engine.device:
                    await asyncio.sleep(seconds)
            rows = [list(array("f", _row(self.engine, before, each, request.readout, classes))) for each in request.branches]
            for row, branch in zip(rows, request.branches, strict=True):
                if self.engine.faults.overflow in branch:
                    row[-1] = math.nan
            cached = [await self._cached(request.caller, prefix) for prefix in prefixes]
            whole = sum(found == len(prefix) for found, prefix in zip(cached, prefixes, strict=True))
            scored = wire.Scored(request.id, rows, sum(cached), _tokens(request), self.engine.queue_seconds, whole)
            await self._reply(200, wire.encode(scored))

    async def _cached(self, caller: wire.Caller, tokens: list[int]) -> int:
        """Tokens found in the prefix cache; the others take their time."""
        if self.engine.prefixes is None:
            return 0
        cached = self.engine.prefixes.match_and_insert(caller, tokens)
        await asyncio.sleep(self.engine.faults.seconds_per_token * (len(tokens) - cached))
        return cached

    async def _behaves(self, request: wire.Score) -> bool:
        """Whether ``request`` should be answered; where not, the fault has been done."""
        engine, faults = self.engine, self.engine.faults
        await asyncio.sleep(faults.delay)
        while faults.hold:  # noqa: ASYNC110  a flag that tests set from another thread
            await asyncio.sleep(0.01)
        longest = len(request.prefix) + max(map(len, request.branches))
        if failed := faults.fail or _unknown(engine, request) or _refusal(engine, request.id, longest, len(request.branches)):
            await self._refuse(failed)
        elif any(faults.poison in branch for branch in request.branches):
            await self._refuse(wire.Failed(request.id, "out_of_memory", "The engine ran out of memory in this step."))
        elif faults.break_after is not None:
            await self.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
            await self.send({"type": "http.response.body", "body": b"\x84", "more_body": True})
            raise ConnectionError("the engine breaks off, as it was told")
        elif faults.garbage:
            await self._reply(200, b"\xc1 this is no msgpack")
        else:
            return True
        return False

    async def _generate(self, request: wire.Generate) -> None:
        engine, faults = self.engine, self.engine.faults
        length = len(request.prompt) + request.sampling.max_tokens
        if failed := faults.fail or _unknown(engine, request) or _refusal(engine, request.id, length, 1):
            await asyncio.sleep(faults.delay)
            await self._refuse(failed)
            return
        await self.send({"type": "http.response.start", "status": 200, "headers": []})
        cached = await self._cached(request.caller, request.prompt[:-1])  # the last token is always computed
        sequences = [list(sequence_deltas(engine, request, index)) for index in range(request.sampling.n)]
        sequences[0][0] = msgspec.structs.replace(sequences[0][0], cached_tokens=cached, queue_seconds=engine.queue_seconds)
        sequences[0][:1] = wire.prompt_parts(sequences[0][0])
        for sent, delta in enumerate(interleaved(sequences)):
            await asyncio.sleep(faults.pause if sent == faults.pause_after else faults.delay)
            while engine.frozen:  # noqa: ASYNC110  as above
                await asyncio.sleep(0.01)
            if faults.overflow in request.prompt:
                failure = wire.Failed(request.id, "not_a_number", "the numbers overflow")
                await self.send({"type": "http.response.body", "body": wire.pack_frame(failure), "more_body": True})
                break
            if sent == faults.fail_after:
                failure = wire.Failed(request.id, "internal", "the engine failed, as it was told")
                await self.send({"type": "http.response.body", "body": wire.pack_frame(failure), "more_body": True})
                break
            if sent == faults.break_after:
                raise ConnectionError("the engine breaks off, as it was told")
            if faults.skip_after is not None and sent >= faults.skip_after:
                delta = msgspec.structs.replace(delta, offset=delta.offset + 1)
            frame = b"\x04\0\0\0\xc1\xc1\xc1\xc1" if faults.garbage else wire.pack_frame(delta)
            await self.send({"type": "http.response.body", "body": frame, "more_body": True})
        await self.send({"type": "http.response.body", "body": b""})


def vision_fields(**fields: Any) -> dict[str, Any]:
    """Fields of an engine whose model reads images."""
    added = fields.pop("added", VISION_TOKENS)
    image_token = library().get_vocab_size() + added.index("<|image_pad|>")
    vision = wire.VisionInfo(14, 2, 56 * 56, 28 * 28 * 64, image_token)
    return {"vision": vision, "template": VISION_TEMPLATE, "added": added, **fields}


def with_vision(**fields: Any) -> FakeEngine:
    return FakeEngine(**vision_fields(**fields))


def items_of(message: wire.ScoreItems) -> list[list[int]]:
    ids, lengths = (memoryview(packed).cast("I").tolist() for packed in (message.items, message.lengths))
    return [ids[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]


def joined(message: wire.ScoreItems) -> wire.Score:
    """A message with the same prompts, whole."""
    branches = [item + message.query for item in items_of(message)]
    readout, adapter, images = message.readout, message.adapter, message.images
    return wire.Score(message.id, [], branches, readout, message.priority, message.deadline, message.caller, adapter, images)


def seasoned(tokens: list[int], adapter: str) -> list[int]:
    """A prompt whose answers differ from those of ``tokens`` without the adapter."""
    return [int(adapter[:6], 16), *tokens] if adapter else tokens


def adapter(digest: str, name: str = "", capabilities: tuple[str, ...] = ("score", "generate"), **fields: Any) -> wire.Adapter:
    """An adapter, of a digest that begins with ``digest``."""
    return wire.Adapter(name, digest.ljust(32, "0"), 8, 1000, list(capabilities), **fields)


def _unknown(engine: FakeEngine, request: wire.Score | wire.Generate) -> wire.Failed | None:
    if request.adapter and all(known.digest != request.adapter for known in engine.adapters.values()):
        return wire.Failed(request.id, "unknown_adapter", "There is no adapter of this digest.", retryable=True)
    return None


def _refusal(engine: FakeEngine, id: str, tokens: int, branches: int) -> wire.Failed | None:
    """Return the refusal of a real engine; the gateway must refuse such a request before."""
    if tokens > min(engine.max_context, engine.limits.max_slots) or branches > engine.limits.max_branches:
        return wire.Failed(id, "invalid", f"{tokens} tokens in {branches} branches are too many")
    return None


def _row(engine: FakeEngine, prefix: list[int], branch: list[int], readout: wire.ScoreReadout, classes: int = 0) -> list[float]:
    """The row of one prompt. ``classes``: of the adapter's head."""
    prompt = prefix + branch
    if engine.encoder:
        prompt = [-len(prefix), *prompt] if prefix else prompt
    if isinstance(readout, wire.TokenVectors):
        salt = [-1 - readout.expansion_tokens]
        vectors = [logprobs_after([*salt, *prompt[:at], id], engine.token_vector_size) for at, id in enumerate(prompt)]
        return [number / (math.hypot(*vector) if readout.normalize else 1.0) for vector in vectors for number in vector]
    if isinstance(readout, wire.Sparse):
        return [number for id in sorted(set(prompt)) for number in (id, prompt.count(id) / 4)]
    if isinstance(readout, wire.Likelihood):
        rows = [logprobs_after(prompt[:end], engine.vocab_size) for end in range(len(prefix), len(prompt))]
        chosen = [row[token] for row, token in zip(rows, branch, strict=True)]
        return [*chosen, float(all(value >= max(row) for row, value in zip(rows, chosen, strict=True)))]
    if isinstance(readout, wire.LengthValue):
        return [value_logit(prompt)]
    logprobs = logprobs_after(prompt, engine.vocab_size)
    if isinstance(readout, wire.Labels):
        return [logprobs[label] + (RAW_OFFSET if readout.raw else 0) for label in readout.tokens]
    if isinstance(readout, wire.Classes):
        return logprobs[: classes or len(engine.classes)]
    numbers = logprobs[: readout.dimensions or engine.embedding_size]
    norm = math.sqrt(sum(number * number for number in numbers)) if readout.normalize else 1.0
    return [number / norm for number in numbers]


def _tokens(request: wire.Score) -> int:
    return len(request.prefix) + sum(map(len, request.branches))


def interleaved(sequences: list[list[wire.Delta]]) -> Iterator[wire.Delta]:
    """The first delta of each sequence, then the second of each."""
    for place in range(max(map(len, sequences))):
        yield from (deltas[place] for deltas in sequences if place < len(deltas))


def sequence_deltas(engine: FakeEngine, request: wire.Generate, index: int) -> Iterator[wire.Delta]:
    """Everything that one sequence of ``request`` sends."""
    tokens, finish = _drawn(engine, request, index)
    size, start = max(engine.tokens_per_delta, request.tokens_per_delta), request.resume_offset
    prompt = request.prompt[: len(request.prompt) - start]
    for offset in range(start, max(start + 1, len(tokens)), size):
        part = tokens[offset : offset + size]
        last = offset + size >= len(tokens)
        yield wire.Delta(
            request.id,
            offset,
            part,
            index,
            _logprobs(engine, prompt + tokens[:offset], part, request),
            finish if last else None,
            _prompt_logprobs(engine, request) if index == 0 and offset == start else None,
            expected_tokens=engine.forecast if (index, offset) == (0, 0) else 0.0,
        )


def _drawn(engine: FakeEngine, request: wire.Generate, index: int) -> tuple[list[int], wire.FinishReason]:
    """The tokens of a sequence and why it ends."""
    sampling = request.sampling
    start = len(request.prompt) - request.resume_offset
    request, tokens = msgspec.structs.replace(request, prompt=request.prompt[:start]), request.prompt[start:]
    stops = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [engine.eos])}
    while len(tokens) < sampling.max_tokens:
        tokens.append(_next(engine, request, index, tokens))
        if tokens[-1] in stops and len(tokens) > sampling.min_tokens:
            return tokens, "stop"
    return tokens, "length"


def _next(engine: FakeEngine, request: wire.Generate, index: int, tokens: list[int]) -> int:
    """The next token: as told, or by the Gumbel trick with noise from (seed, index, position)."""
    if engine.says is not None:
        return engine.says[len(tokens)] if len(tokens) < len(engine.says) else engine.eos
    sampling = request.sampling
    vocab_size = library().get_vocab_size()
    noise = -np.log(-np.log(uniform(f"{sampling.seed} {request.index + index} {len(tokens)}", vocab_size)))
    if request.length_guidance is not None:
        judged = guided(engine, request.length_guidance, request.prompt + tokens)
        drawn = {id: logprob + bool(sampling.temperature) * noise[id] for id, (logprob, _) in judged.items()}
        return max(drawn, key=drawn.__getitem__)
    row = np.array(logprobs_after(seasoned(request.prompt, request.adapter) + tokens, vocab_size))
    for id, bias in sampling.logit_bias.items():
        row[id] += bias
    return int((row + sampling.temperature * noise).argmax())


def guided(engine: FakeEngine, guidance: wire.LengthGuidance, before: list[int]) -> dict[int, tuple[float, float]]:
    """The candidates after ``before``: the log-probability that each is drawn with, and its value.

    The fake obeys ``centered_exp`` and, with ``target_value``, ``eq``: the others are ruled out. Other settings it leaves alone.
    """
    row = logprobs_after(before, library().get_vocab_size())
    best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[: guidance.top_k]
    values = [0.0 if id == engine.eos else 1 / (1 + math.exp(-value_logit([*before, id]))) for id in best]
    scale = guidance.scale if guidance.mode == "centered_exp" else 0.0
    weights = [math.exp(row[id] + scale * value) for id, value in zip(best, values, strict=True)]
    if guidance.constraint == "eq" and guidance.target_value is not None:
        nearest = min(values, key=lambda value: abs(value - guidance.target_value))
        weights = [float(value == nearest) for value in values]
    logprobs = [math.log(weight / sum(weights)) if weight else -math.inf for weight in weights]
    return {id: (logprob, value) for id, logprob, value in zip(best, logprobs, values, strict=True)}


def _logprobs(engine: FakeEngine, before: list[int], tokens: list[int], request: wire.Generate) -> wire.Logprobs | None:
    """Return log-probabilities of the output; with guidance and without ``says``, those of the candidates."""
    if request.logprobs is None:
        return None
    if request.length_guidance is None or engine.says is not None:
        return _model_logprobs(engine, before, tokens, request.logprobs)
    told = wire.Logprobs([], [], [], [])
    for place, token in enumerate(tokens):
        judged = guided(engine, request.length_guidance, before + tokens[:place])
        valued = request.length_guidance.return_values
        best = [id for id, (logprob, _) in judged.items() if valued or logprob > -math.inf][: request.logprobs]
        told.chosen.append(judged[token][0])
        told.top_tokens.append(best)
        told.top.append([judged[id][0] for id in best])
        if valued:
            told.values.append([judged[id][1] for id in best])
    return told


def _model_logprobs(engine: FakeEngine, before: list[int], tokens: list[int], top: int | None) -> wire.Logprobs | None:
    if top is None:
        return None
    told = wire.Logprobs([], [], [])
    for place, token in enumerate(tokens):
        row = logprobs_after(before + tokens[:place], engine.vocab_size)
        best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:top]
        told.chosen.append(row[token])
        told.top_tokens.append(best)
        told.top.append([row[id] for id in best])
    return told


def _prompt_logprobs(engine: FakeEngine, request: wire.Generate) -> wire.Logprobs | None:
    told = _model_logprobs(engine, [], request.prompt, request.prompt_logprobs)
    return told and wire.Logprobs([None, *told.chosen[1:]], [[], *told.top_tokens[1:]], [[], *told.top[1:]])


class _Server(uvicorn.Server):
    """Ends at once when it is asked to; uvicorn looks only ten times a second."""

    async def main_loop(self) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 0.1)

    def tell_to_end(self) -> None:
        self.should_exit = True
        with suppress(AttributeError, RuntimeError):  # it has not begun, or it has ended
            self._loop.call_soon_threadsafe(self._told.set)


class Running:
    """``app`` served on a port of this machine, in a thread, until :func:`stop`. Its errors do not reach the test."""

    def __init__(self, app: Callable[..., Any], port: int = 0, *, http: Any = "auto") -> None:
        self._server = _Server(uvicorn.Config(app, http=http, log_level="critical", timeout_graceful_shutdown=1))
        listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._server.tell_to_end()

    def join(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the server did not stop"


def stop(servers: list[Running]) -> None:
    """End all at once, which takes no longer than one."""
    for server in servers:
        server.ask_to_stop()
    for server in servers:
        server.join()


@contextmanager
def served(app: Callable[..., Any], port: int = 0) -> Iterator[str]:
    server = Running(app, port)
    try:
        yield server.url
    finally:
        stop([server])
