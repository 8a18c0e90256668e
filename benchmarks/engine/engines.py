"""Scorers in this process: the engine's loop, and Hugging Face transformers as the peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Protocol

import msgspec
import torch

from benchmarks.engine.subject import Subject
from engine import wire
from engine.build import assemble
from engine.loop import Loop
from engine.models.decoder import Decoder
from engine.settings import RESERVED_SHARE, EngineSettings

Scores = list[list[float]]
"""Log-probabilities, [item][label]."""


class Scorer(Protocol):
    """Runs one request to its end."""

    def score(self, message: wire.Score) -> Scores:
        """The log-probabilities of the request's labels."""


class Stopwatch:
    """Sums up the time of calls: on a CPU until they return, on a GPU the time of their computation."""

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._host = 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return ``function`` with its time measured."""
        return partial(self._on_gpu if self._gpu else self._on_host, function)

    def take(self) -> float:
        """Return the seconds since the last call of this method."""
        if self._marks:
            torch.cuda.synchronize()
        total = self._host + sum(float(start.elapsed_time(end)) for start, end in self._marks) / 1000
        self._host, self._marks = 0.0, []
        return total

    def _on_host(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        start = time.perf_counter()
        result = function(*arguments)
        self._host += time.perf_counter() - start
        return result

    def _on_gpu(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        result = function(*arguments)
        end.record()
        self._marks.append((start, end))
        return result


def describe_loop(loop: Loop) -> dict[str, Any]:
    """Attention backend, the modules that it uses, and steps so far, for the record of a benchmark."""
    stats = loop.stats
    return {
        "attention": msgspec.to_builtins(loop.info.attention),
        "steps": stats.steps,
        "replayed_steps": stats.replayed_steps,
        "replayed_lenvm_passes": stats.replayed_lenvm_passes,
    }


class Engine:
    """The loop, driven in this process."""

    def __init__(
        self,
        decoder: Decoder,
        dtype: str,
        *,
        slots: int = 131_072,
        kv_dtype: str = "auto",
        max_batched_tokens: int | None = None,
        reserved_share: float = RESERVED_SHARE,
    ) -> None:
        settings = EngineSettings(
            model="bench",
            name="bench",
            dtype=dtype,
            max_total_tokens=slots,
            kv_dtype=kv_dtype,
            max_batched_tokens=max_batched_tokens,
            reserved_share=reserved_share,
            max_waiting=1 << 16,
            max_wait_seconds=3600,  # no request is refused, however slow the machine
        )
        self.loop: Loop = assemble(decoder, settings, "bench")

    @property
    def description(self) -> dict[str, Any]:
        """See :func:`describe_loop`."""
        return describe_loop(self.loop)

    @contextmanager
    def timed(self, decoder: Decoder, watch: Stopwatch) -> Iterator[None]:
        """Measure the decoder's time with ``watch``, for launched and replayed steps."""
        places: list[Any] = [decoder, *self.loop._runner._graphs]
        for place in places:
            place.forward = watch.around(place.forward)
        try:
            yield
        finally:
            for place in places:
                del place.forward

    def score(self, message: wire.Score) -> Scores:
        """Run one request to its end."""
        return self.score_all([message])[0]

    def score_all(self, messages: Sequence[wire.Score]) -> list[Scores]:
        """Queue all requests at once and run them to their end."""
        scores: dict[str, Scores] = {}
        for reply in self.run(messages):
            assert isinstance(reply, wire.Scored), reply
            scores[reply.id] = reply.rows
        return [scores[message.id] for message in messages]

    def run(self, messages: Sequence[wire.Score | wire.ScoreItems | wire.Generate]) -> list[wire.Reply]:
        """Queue all requests at once and run them to their end; return the replies in the order of arrival."""
        for message in messages:
            self.loop.submit(message)
        replies: list[wire.Reply] = []
        while not self.loop.idle:
            replies += self.loop.step()
        return replies


class Transformers:
    """The peer. It computes a request's full prompts as one batch and only the logits of the last position, which is its fastest
    way without sharing the query."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, subject.dtype)
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(subject.directory, dtype=dtype, attn_implementation="sdpa")
        self._model = model.to(device)
        self._device = device

    def score(self, message: wire.Score) -> Scores:
        """Score all prompts of a request as one batch."""
        return self.score_all([message], len(message.branches))[0]

    @torch.inference_mode()
    def score_all(self, messages: Sequence[wire.Score], batch: int) -> list[Scores]:
        """Score the prompts of all requests, ``batch`` of them at a time; they have equal lengths, so there is no padding."""
        asked = [(message.prefix + branch, message.readout) for message in messages for branch in message.branches]
        rows: list[list[float]] = []
        for start in range(0, len(asked), batch):
            part = asked[start : start + batch]
            prompts = torch.tensor([prompt for prompt, _ in part], device=self._device)
            logprobs = self._model(prompts, logits_to_keep=1, use_cache=False).logits[:, -1].float().log_softmax(-1)
            labels = torch.tensor([readout.tokens for _, readout in part if isinstance(readout, wire.Labels)], device=self._device)
            rows += logprobs.gather(1, labels).tolist()
        left = iter(rows)
        return [list(islice(left, len(message.branches))) for message in messages]


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call, which ends with its results on the host."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
