"""Scorers in this process: the engine's loop, and Hugging Face transformers as the peer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec
import torch

from benchmarks.engine.subject import Subject
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import PairedLenVM, assemble
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.runner.machine import StepThreads
from yardstick_llm.engine.settings import EngineSettings

Scores = list[list[float]]
"""Log-probabilities, [item][label]."""


class Scorer(Protocol):
    """Runs one request to its end."""

    def score(self, message: wire.Score) -> Scores:
        """The log-probabilities of the request's labels."""


class Engine:
    """The loop, driven in this process."""

    def __init__(
        self, decoder: Decoder, dtype: str, length: PairedLenVM | None = None, threads: StepThreads | None = None, **options: Any
    ) -> None:
        """``length``: for guided texts. ``options``: of the settings, and the ``vocabulary`` for grammars. No request is refused,
        however slow the machine."""
        vocabulary = options.pop("vocabulary", None)
        given = {"max_total_tokens": 131_072, "max_waiting": 1 << 16, "max_wait_seconds": 3600} | options
        self.loop: Loop = assemble(
            decoder, EngineSettings(model="bench", name="bench", dtype=dtype, **given), "bench", length, vocabulary, threads
        )

    @property
    def description(self) -> dict[str, Any]:
        """Attention backend, the modules that it uses, and steps so far, for the record of a benchmark."""
        stats = self.loop.stats
        steps = {name: getattr(stats, name) for name in ("steps", "replayed_steps", "replayed_lenvm_passes")}
        return {"attention": msgspec.to_builtins(self.loop.info.attention), **steps}

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
