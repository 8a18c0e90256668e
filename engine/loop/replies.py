"""Replies of the loop: deltas, refusals, the log of requests without a result, and counters."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch

from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.checks import MAX_CALLER_CHARACTERS
from yardstick_llm.engine.models.lora.registry import AdapterRegistry
from yardstick_llm.engine.requests.core import Branch, Request
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.requests.prompt_lookup import Lookup
from yardstick_llm.engine.runner.graphs import Compilations
from yardstick_llm.engine.runner.readouts.base import Drawn, LenVMCounts, StepResult
from yardstick_llm.engine.runner.readouts.draws import join_logprobs
from yardstick_llm.engine.runner.runner import Runner
from yardstick_llm.engine.scheduling.scheduler import Scheduler
from yardstick_llm.engine.scheduling.structured_requests import StructuredRequests

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Counts of the loop since its start."""

    replayed_before: tuple[int, int] = (0, 0)
    """Replays of the runner, of steps and of the length model's passes, before the loop began."""
    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    scored_items: int = 0
    cached_items: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    lenvm: LenVMCounts = field(default_factory=LenVMCounts)
    refused_invalid: int = 0
    refused_queue: int = 0
    refused_wait: int = 0
    refused_adapter: int = 0
    displaced: int = 0

    def add(self, counts: LenVMCounts) -> None:
        """Add the counts of one step."""
        self.lenvm.tokens += counts.tokens
        self.lenvm.guided += counts.guided
        self.lenvm.alone += counts.alone

    def snapshot(
        self,
        info: wire.Info,
        scheduler: Scheduler,
        runner: Runner,
        structured: StructuredRequests | None,
        compilations: Compilations | None,
        adapters: AdapterRegistry,
    ) -> wire.Stats:
        """Return the counters and gauges of now."""
        slots = scheduler.slot_counts
        return wire.Stats(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            wait_seconds=scheduler.wait_estimator.longest(),
            item_bytes=slots["slots_items"] * info.slot_bytes,
            scored_items=self.scored_items,
            cached_items=self.cached_items,
            steps=self.steps,
            computed_tokens=self.computed_tokens,
            cached_tokens=self.cached_tokens,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
            replayed_steps=runner.replayed - self.replayed_before[0],
            attention_fallback=int(info.attention is not None and info.attention.fallback),
            lenvm_tokens=self.lenvm.tokens,
            guided_draws=self.lenvm.guided,
            decided_draws=self.lenvm.alone,
            replayed_lenvm_passes=runner.replayed_lenvm_passes - self.replayed_before[1],
            late_compilations=0 if compilations is None else compilations.late,
            tenants=len(scheduler.queue.flows),
            refused_invalid=self.refused_invalid,
            refused_queue=self.refused_queue,
            refused_wait=self.refused_wait,
            refused_adapter=self.refused_adapter,
            displaced=self.displaced,
            **slots,
            **adapters.counts,
            **runner.images.counts,
            **structured.counts if structured is not None else {},
        )


LINES_PER_SECOND = 10.0
BURST = 200

Ending = Literal["failed", "refused", "displaced", "expired", "aborted", "finished"]

_LEVELS: dict[Ending, int] = {
    "failed": logging.WARNING,
    "refused": logging.WARNING,
    "displaced": logging.WARNING,
    "expired": logging.INFO,
    "aborted": logging.INFO,
    "finished": logging.DEBUG,
}


class RequestLog:
    """Writes the lines of one loop.

    One line for each request that ends without a result, so that an operator finds a client's request by its id. It names the
    request and the reason; it has no token ids, text or error message. A flood of refusals cannot fill a disk: beyond a burst,
    :data:`LINES_PER_SECOND` lines are written, and the next one says how many were left out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, monotonic."""
        self._clock = clock
        self._allowance = float(BURST)
        self._counted_at = clock()
        self._left_out = 0

    def writes(self, ending: Ending) -> bool:
        """Whether lines of this kind are written at all."""
        return logger.isEnabledFor(_LEVELS[ending])

    def note(self, ending: Ending, request: Request, now: float, **fields: str) -> None:
        """Write a line about a request that was accepted. ``now``: on the clock of :attr:`Request.received`."""
        if not self.writes(ending):
            return
        waited = request.first_computed is None
        queued = now - request.received if waited else request.queue_seconds
        times = {"queue_seconds": round(queued, 3), "computed_tokens": request.computed_tokens}
        self.write(ending, request.caller, request.id, **fields, **times)

    def write(self, ending: Ending, caller: wire.Caller, request_id: str, **fields: str | float) -> None:
        """Write one line: ``request refused request_id="…" id="…" tenant="…" code="overloaded" …``.

        Values are JSON, so ids with quotes or line breaks stay within their field.
        """
        if not self.writes(ending) or not self._allowed():
            return
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        named = {"request_id": caller.request_id, "id": request_id, "tenant": caller.tenant, **fields}
        logger.log(
            _LEVELS[ending], "request %s %s", ending, " ".join(f"{name}={json.dumps(value)}" for name, value in named.items())
        )

    def _allowed(self) -> bool:
        now = self._clock()
        self._allowance = min(BURST, self._allowance + (now - self._counted_at) * LINES_PER_SECOND)
        self._counted_at = now
        if self._allowance < 1:
            self._left_out += 1
            return False
        self._allowance -= 1
        return True


Message = wire.Score | wire.ScoreItems | wire.Generate
QUEUE_FULL = "The engine's queue is full."


class Refusals:
    """Refuses messages of one loop."""

    def __init__(self, counts: Counters, log: RequestLog) -> None:
        self._counts = counts
        self._log = log

    def invalid(self, request_id: str, problem: str, caller: wire.Caller | None = None) -> wire.Failed:
        """Refuse a faulty message. Its strings may be of any length, so the log gets their beginnings."""
        self._counts.refused_invalid += 1
        shortened = wire.Caller()
        if caller is not None:
            shortened = wire.Caller(caller.request_id[:MAX_CALLER_CHARACTERS], caller.tenant[:MAX_CALLER_CHARACTERS])
        self._log.write("refused", shortened, request_id[:MAX_CALLER_CHARACTERS], code="invalid")
        return wire.Failed(request_id, "invalid", problem)

    def unknown_adapter(self, message: Message) -> wire.Failed:
        """Refuse a message whose adapter the engine does not have, or has no more."""
        self._counts.refused_adapter += 1
        self._log.write("refused", message.caller, message.id, code="unknown_adapter")
        problem = "This engine has no adapter of this digest; load it, or name one that GET /adapters lists."
        return wire.Failed(message.id, "unknown_adapter", problem, retryable=True)

    def overloaded(self, message: Message, reason: Literal["wait", "queue_full"], wait: float) -> wire.Failed:
        """Refuse a message that would have to wait for ``wait`` seconds, too long, or for which the queue has no place."""
        if reason == "wait":
            self._counts.refused_wait += 1
        else:
            self._counts.refused_queue += 1
        self._log.write("refused", message.caller, message.id, code="overloaded", reason=reason, wait_seconds=round(wait, 3))
        return overloaded(message.id, wait)


def overloaded(request_id: str, wait: float) -> wire.Failed:
    """The reply to a request that would have to wait for ``wait`` seconds."""
    return wire.Failed(request_id, "overloaded", QUEUE_FULL, retryable=True, retry_after=max(1.0, wait))


def step_failed(request_id: str, error: Exception) -> wire.Failed:
    """Return the end of a request whose step failed with ``error``."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return wire.Failed(request_id, "out_of_memory", "The engine ran out of memory in this step.", retryable=True)
    return wire.Failed(request_id, "internal", "The engine failed in this step.", retryable=True)


class Deltas:
    """Gives each drawn token to its branch, ends finished sequences, and makes the messages."""

    def __init__(self, info: wire.Info, scheduler: Scheduler, structured: StructuredRequests | None, counters: Counters) -> None:
        self._scheduler = scheduler
        self._structured = structured
        self._counters = counters
        self._eos_token_ids = info.eos_token_ids
        self._max_context = info.max_context

    def settle_drafts(self, result: StepResult) -> None:
        """Free the slots of rejected drafts. Comes before the draws of the step are taken."""
        for branch, drafted, accepted in result.drafts:
            self._counters.draft_tokens += drafted
            self._counters.accepted_draft_tokens += accepted
            if not branch.done:
                self._scheduler.drafting.settle(branch, accepted)

    def take(self, drawn: Drawn) -> Sequence[wire.Delta]:
        """Take a draw; returns the messages to send, once the caller's number of tokens is there."""
        branch, token = drawn.branch, drawn.token
        request = branch.request
        assert isinstance(request, GenerateRequest)
        message = request.message
        offset = request.offset(branch) - branch.pending
        finish: wire.FinishReason | None = "length"
        if token is not None:
            branch.draw(token)
            finish = self._finish_reason(message, branch, token, offset + 1)
        if finish is not None:
            self._scheduler.finish(branch)
        elif branch.constraint is not None and token is not None:
            assert self._structured is not None
            self._structured.advance(branch, token)
        delta = wire.Delta(request.id, offset, [] if token is None else [token], branch.index, drawn.logprobs, finish)
        if branch.lookup is not None:
            delta = _with_drafts(delta, branch.lookup)
        if offset == message.resume_offset or branch.prompt_logprobs:
            delta = self._with_prompt(delta, branch)
        if message.tokens_per_delta <= 1 and delta.prompt_logprobs is None and not (drawn.more or branch.unsent):
            return (delta,)
        branch.unsent.append(delta)
        if finish is None and (drawn.more or len(branch.unsent) < message.tokens_per_delta):
            return ()
        return unsent(branch)

    def _with_prompt(self, delta: wire.Delta, branch: Branch) -> wire.Delta:
        """Add what is known of the prompt to the first delta of a sequence."""
        request = branch.request
        assert isinstance(request, GenerateRequest)
        pieces, branch.prompt_logprobs = branch.prompt_logprobs, []
        first = branch.index == 0 and delta.offset == request.message.resume_offset
        if first:
            self._counters.cached_tokens += request.cached_tokens
        return msgspec.structs.replace(
            delta,
            prompt_logprobs=join_logprobs(pieces) if pieces else None,
            cached_tokens=request.cached_tokens if first else 0,
            queue_seconds=request.queue_seconds if first else 0.0,
            expected_tokens=request.expected_tokens if first else 0.0,
        )

    def _finish_reason(self, message: wire.Generate, branch: Branch, token: int, drawn: int) -> wire.FinishReason | None:
        """``drawn``: output tokens so far, with ``token`` and those of an earlier attempt."""
        sampling = message.sampling
        if token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos):
            return "stop"
        context = len(message.prompt) + branch.drawn
        return "length" if drawn >= sampling.max_tokens or context >= self._max_context else None


def _with_drafts(delta: wire.Delta, lookup: Lookup) -> wire.Delta:
    drafted, accepted = lookup.take_counts()
    return msgspec.structs.replace(delta, draft_tokens=drafted, accepted_draft_tokens=accepted) if drafted else delta


def unsent(branch: Branch) -> list[wire.Delta]:
    """Return the messages that ``branch`` kept back, and forget them."""
    if not branch.unsent:
        return []
    kept, branch.unsent = branch.unsent, []
    return wire.prompt_parts(join_deltas(kept))


def aborted(request: GenerateRequest) -> list[wire.Delta]:
    """Return the last messages of a request's open sequences that its caller ends."""
    kept = [delta for branch in request.branches for delta in unsent(branch)]
    open_ones = [(branch, request.offset(branch) - branch.pending) for branch in request.branches]
    return kept + [wire.Delta(request.id, offset, [], branch.index, finish="abort") for branch, offset in open_ones]


def join_deltas(pieces: Sequence[wire.Delta]) -> wire.Delta:
    """Join consecutive deltas of one sequence. Only the first may carry prompt fields, and only the last ``finish``."""
    first, last = pieces[0], pieces[-1]
    if first is last:
        return first
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return msgspec.structs.replace(
        first,
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=join_logprobs(logprobs) if logprobs else None,
        finish=last.finish,
        draft_tokens=sum(piece.draft_tokens for piece in pieces),
        accepted_draft_tokens=sum(piece.accepted_draft_tokens for piece in pieces),
    )
