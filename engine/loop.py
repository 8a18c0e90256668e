"""The loop: receive, schedule, launch, wait, process results. It handles token ids and numbers; sockets and processes are in
:mod:`engine.serving.loop_process`.

With overlap, the loop waits for a step only after it has launched the next one, so the host receives, schedules and processes
results while the device computes. Without overlap, it waits for each step at once, which suits a CPU. Both give the same results.

Every message that :meth:`Loop.submit` accepts ends with exactly one terminal reply.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from engine import wire
from engine.batch import Batch
from engine.checks import MAX_CALLER_CHARACTERS, check
from engine.core import Branch, GenerateRequest, Request, ScoreRequest
from engine.item_group import ItemGroup
from engine.readouts.base import Drawn, LenVMCounts, StepResult
from engine.readouts.logprobs import join_logprobs
from engine.request_log import Ending, RequestLog
from engine.runner.runner import PendingStep, Runner
from engine.scheduling.scheduler import Scheduler
from engine.structured_requests import StructuredRequests

logger = logging.getLogger(__name__)

DEVICE_ERRORS = (RuntimeError, MemoryError)
"""Errors of a step that are no fault of the program, above all out of memory."""
WAIT_SECONDS = 0.001
"""Pause between steps where every request waits for a grammar or a mask."""
Message = wire.Score | wire.ScoreItems | wire.Generate
QUEUE_FULL = "The engine's queue is full."


@dataclass(slots=True)
class Refused:
    """Numbers of requests that the engine refused, or dropped while they waited, by reason."""

    invalid: int = 0
    queue: int = 0
    """The queue was full."""
    wait: int = 0
    """The expected wait was too long."""
    displaced: int = 0
    """A tenant with fewer requests in a full queue took the place."""


class Loop:
    """Serves the requests of one model, from acceptance to the terminal reply."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        info: wire.Info,
        *,
        max_waiting: int,
        max_wait_seconds: float = math.inf,
        overlap: bool = False,
        mean_pooling: bool = False,
        structured: StructuredRequests | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``mean_pooling``: see :meth:`ScoreRequest.of`. ``structured``: None where the engine follows no grammars."""
        self._runner = runner
        self._scheduler = scheduler
        self.info = info
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._overlap = overlap
        self._mean_pooling = mean_pooling
        self._structured = structured
        self._pending_step: PendingStep | None = None
        """The step whose results are not processed yet."""
        self._clock = clock
        self._log = RequestLog(clock)
        self._refused = Refused()
        self._step_seconds = 0.0
        """Time of the last step, without its wait for masks."""
        self._groups: dict[str, ItemGroup] = {}
        """Scores of items that have not ended, by the message's id."""
        self._ended: list[wire.Reply] = []
        """Terminal replies that the next step returns."""
        self._steps = 0
        self._computed = 0
        self._cached = 0
        self._scored_items = self._cached_items = 0
        self._lenvm = LenVMCounts()

    def submit(self, message: wire.Request) -> None:
        """Accept or refuse a message. The next :meth:`step` returns the replies to refusals and aborts."""
        if isinstance(message, wire.Abort):
            self._abort(message.id)
            return
        failure = self._refusal(message)
        if failure is not None:
            self._ended.append(failure)
        elif isinstance(message, wire.Score):
            self._submit_score(message)
        elif isinstance(message, wire.ScoreItems):
            self._submit_items(message)
        elif self._structured is not None and message.grammar:
            self._structured.begin(GenerateRequest.of(message, self._clock()))
        else:
            self._scheduler.add(GenerateRequest.of(message, self._clock()))

    def refuse(self, request_id: str, problem: str) -> None:
        """Refuse a message that could not be decoded; the next :meth:`step` replies."""
        self._refused.invalid += 1
        self._log.write("refused", wire.Caller(), request_id[:MAX_CALLER_CHARACTERS], code="invalid")
        self._ended.append(wire.Failed(request_id, "invalid", problem))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute, to wait for or to reply."""
        compiling = self._structured is not None and self._structured.compiling
        return self._scheduler.idle and self._pending_step is None and not self._ended and not compiling

    def step(self) -> list[wire.Reply]:
        """Launch one step and process the results of one; returns the replies."""
        replies, self._ended = self._ended, []
        replies += self._settle_structured()
        for request in self._leave(self._scheduler.expire()):
            replies.append(wire.Failed(_id_of(request), "deadline", "The deadline passed before it was computed."))
            self._note("expired", request)
        began = time.perf_counter()
        batch = self._scheduler.schedule()
        pending = self._pending_step
        try:
            self._pending_step = None if batch.empty else self._launch(batch)
        except DEVICE_ERRORS as error:
            self._pending_step = None
            replies += self._fail(batch, error)
        if pending is not None:
            replies += self._wait(pending)
        if not self._overlap and self._pending_step is not None:
            pending, self._pending_step = self._pending_step, None
            replies += self._wait(pending)
        self._step_seconds = time.perf_counter() - began
        if batch.empty and pending is None and not replies and not self.idle:
            time.sleep(WAIT_SECONDS)
        return replies

    def _settle_structured(self) -> list[wire.Reply]:
        """Queue the requests whose grammar is compiled, and end those that cannot follow theirs."""
        if self._structured is None:
            return []
        settled = self._structured.settle(self._step_seconds)
        for request in settled.compiled:
            self._scheduler.add(request)
        replies: list[wire.Reply] = []
        for request, problem in settled.failed:
            queued = self._scheduler.get(request.id) is request
            if queued:
                self._scheduler.remove(request)
            if queued or request.first_computed is None:
                self._note("failed", request, code="invalid")
                replies.append(wire.Failed(request.id, "invalid", problem))
        return replies

    def close(self) -> None:
        """End the loop's threads."""
        if self._structured is not None:
            self._structured.close()

    @property
    def stats(self) -> wire.Stats:
        """A snapshot."""
        scheduler = self._scheduler
        return wire.Stats(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            wait_seconds=scheduler.longest_wait,
            slots_total=scheduler.pool.size,
            slots_free=scheduler.pool.available,
            slots_cached=scheduler.cache.evictable,
            slots_items=scheduler.cache.item_tokens,
            scored_items=self._scored_items,
            cached_items=self._cached_items,
            evicted_item_tokens=scheduler.cache.evicted_item_tokens,
            steps=self._steps,
            computed_tokens=self._computed,
            cached_tokens=self._cached,
            replayed_steps=self._runner.replayed,
            lenvm_tokens=self._lenvm.tokens,
            guided_draws=self._lenvm.guided,
            decided_draws=self._lenvm.alone,
            replayed_lenvm_passes=self._runner.replayed_lenvm_passes,
            tenants=scheduler.tenants,
            refused_invalid=self._refused.invalid,
            refused_queue=self._refused.queue,
            refused_wait=self._refused.wait,
            displaced=self._refused.displaced,
            **self._structured.counts if self._structured is not None else {},
        )

    def _submit_score(self, message: wire.Score) -> None:
        if message.branches:
            self._scheduler.add(ScoreRequest.of(message, self._clock(), mean_pooling=self._mean_pooling))
        else:
            self._ended.append(wire.Scored(message.id, [], 0, 0))

    def _submit_items(self, message: wire.ScoreItems) -> None:
        group = ItemGroup.of(message, self._clock(), mean_pooling=self._mean_pooling)
        if not group.left:
            self._ended.append(wire.Scored(message.id, [], 0, 0))
            return
        self._groups[message.id] = group
        for request in group.requests:
            self._scheduler.add(request)

    def _refusal(self, message: Message) -> wire.Failed | None:
        """Why ``message`` cannot be accepted, if so."""
        if self._request(message.id) is not None or message.id in self._groups:
            return self._invalid(message, "A request of this id is still running; ids must be unique.")
        problem = check(message, self.info)
        if problem is not None:
            return self._invalid(message, problem)
        wait = self._scheduler.wait_seconds(message.priority, message.caller.tenant)
        if wait > self._max_wait_seconds:
            self._refused.wait += 1
            return self._overloaded(message, "wait", wait)
        compiling = 0 if self._structured is None else self._structured.compiling
        waiting = self._scheduler.waiting - self._scheduler.waiting_items + len(self._groups)
        if waiting + compiling >= self._max_waiting and not self._displace(message.caller):
            self._refused.queue += 1
            return self._overloaded(message, "queue_full", wait)
        return None

    def _request(self, request_id: str) -> Request | None:
        """The request with this id, or None if it has ended."""
        compiling = None if self._structured is None else self._structured.get(request_id)
        return compiling or self._scheduler.get(request_id)

    def _invalid(self, message: Message, problem: str) -> wire.Failed:
        """The refusal of a faulty message. Its strings may be of any length, so that the log gets their beginnings."""
        self._refused.invalid += 1
        caller = wire.Caller(message.caller.request_id[:MAX_CALLER_CHARACTERS], message.caller.tenant[:MAX_CALLER_CHARACTERS])
        self._log.write("refused", caller, message.id[:MAX_CALLER_CHARACTERS], code="invalid")
        return wire.Failed(message.id, "invalid", problem)

    def _overloaded(self, message: Message, reason: str, wait: float) -> wire.Failed:
        self._log.write("refused", message.caller, message.id, code="overloaded", reason=reason, wait_seconds=round(wait, 3))
        return wire.Failed(message.id, "overloaded", QUEUE_FULL, retryable=True, retry_after=max(1.0, wait))

    def _displace(self, caller: wire.Caller) -> bool:
        """Make a place in the full queue for ``caller``, at the cost of the tenant with most requests in it."""
        displaced = self._scheduler.displace(caller)
        if displaced is None:
            return False
        self._refused.displaced += 1
        wait = self._scheduler.wait_seconds(displaced.priority, displaced.caller.tenant)
        self._leave([displaced])
        self._ended.append(wire.Failed(_id_of(displaced), "overloaded", QUEUE_FULL, retryable=True, retry_after=max(1.0, wait)))
        self._note("displaced", displaced, code="overloaded")
        return True

    def _note(self, ending: Ending, request: Request, **fields: str) -> None:
        """A line in the log about a request that was accepted."""
        if not self._log.writes(ending):
            return
        waited = request.first_computed is None
        queued = self._clock() - request.received if waited else request.queue_seconds
        times = {"queue_seconds": round(queued, 3), "computed_tokens": request.computed_tokens}
        self._log.write(ending, request.caller, request.id, **fields, **times)

    def _leave(self, ended: list[Request]) -> list[Request]:
        """End the groups of items among the ``ended`` requests: their other items are not computed. Return the requests to answer,
        one for each message."""
        answered = []
        for request in ended:
            group = request.group if isinstance(request, ScoreRequest) else None
            if group is not None:
                if self._groups.pop(group.id, None) is None:
                    continue
                for other in group.requests:
                    if self._scheduler.get(other.id) is other:
                        self._scheduler.remove(other)
            answered.append(request)
        return answered

    def _abort(self, request_id: str) -> None:
        group = self._groups.get(request_id)
        if group is not None:
            (request,) = self._leave(list[Request](group.requests))
            self._ended.append(wire.Failed(request_id, "aborted", "The caller ended the request."))
            self._note("aborted", request)
            return
        request = self._request(request_id)
        if request is None:
            return
        if isinstance(request, GenerateRequest):
            for branch in filter(lambda branch: branch.unsent, request.branches):
                self._ended += wire.prompt_parts(join_deltas(branch.unsent))
            open_ones = [(branch, request.offset(branch) - branch.pending) for branch in request.branches]
            self._ended += [wire.Delta(request.id, offset, [], branch.index, finish="abort") for branch, offset in open_ones]
        else:
            self._ended.append(wire.Failed(request.id, "aborted", "The caller ended the request."))
        if self._scheduler.get(request_id) is None:
            assert isinstance(request, GenerateRequest)
            assert self._structured is not None
            self._structured.remove(request)
        else:
            self._scheduler.remove(request)
        self._note("aborted", request)

    def _launch(self, batch: Batch) -> PendingStep:
        self._steps += 1
        self._computed += batch.tokens
        step = self._runner.launch(batch)
        for branch in step.plan.branches:
            branch.pending_steps += 1
        for candidate_pass in step.plan.skipped:
            self._scheduler.release_unused(candidate_pass)
        return step

    def _wait(self, step: PendingStep) -> list[wire.Reply]:
        """Wait for a step and process its results. If it failed, the step that was launched after it fails too, because it builds
        on it.
        """
        try:
            result = step.wait()
        except DEVICE_ERRORS as error:
            replies = self._fail(step.batch, error)
            if self._pending_step is not None:
                replies += self._fail(self._pending_step.batch, error)
                self._pending_step = None
            return replies
        for branch in step.plan.branches:
            branch.pending_steps -= 1
        return list(self._process_results(result))

    def _process_results(self, result: StepResult) -> Iterator[wire.Reply]:
        for part in result.prompts:
            if part.start == len(part.branch.prompt_logprobs):  # else it was preempted since, and this was or will be said again
                part.branch.prompt_logprobs += part.logprobs
        for branch, row in result.rows:
            if self._open(branch):
                yield from self._process_row(branch, row)
        for branch in filter(self._open, result.ended):
            yield from self._tell(branch, self._delta(branch, None, "length"))
        for drawn in result.drawn:
            if self._open(drawn.branch):
                yield from self._tell(drawn.branch, self._delta(drawn.branch, drawn, None))
        if self._structured is not None:
            self._structured.start_masks()
        self._lenvm.tokens += result.lenvm.tokens
        self._lenvm.guided += result.lenvm.guided
        self._lenvm.alone += result.lenvm.alone

    def _process_row(self, branch: Branch, row: list[float]) -> Iterator[wire.Reply]:
        request = branch.request
        assert isinstance(request, ScoreRequest)
        request.rows[branch.index] = row
        self._scheduler.finish(branch)
        if request.group is not None:
            self._count_cached(request)
            answer = request.group.take(request, row)
            if answer is not None:
                del self._groups[request.group.id]
                self._scored_items += len(answer.rows)
                self._cached_items += answer.cached_items
                yield answer
        elif not request.branches:
            if not request.on_lenvm:
                self._count_cached(request)
            self._note("finished", request)
            yield wire.Scored(request.id, request.rows, request.cached_tokens, request.computed_tokens, request.queue_seconds)

    def _open(self, branch: Branch) -> bool:
        """Whether the results of ``branch`` are still wanted. With overlap a step may compute more than was needed."""
        return not branch.done and self._scheduler.get(branch.request.id) is branch.request

    def _delta(self, branch: Branch, drawn: Drawn | None, finish: wire.FinishReason | None) -> wire.Delta:
        request = branch.request
        assert isinstance(request, GenerateRequest)
        offset = request.offset(branch) - branch.pending
        first = branch.index == 0 and offset == request.message.resume_offset
        if first:
            self._count_cached(request)
        if drawn is not None:
            branch.draw(drawn.token)
            finish = self._finish_reason(request, branch, drawn.token)
        if finish is not None:
            self._scheduler.finish(branch)
            if not request.branches:
                self._note("finished", request)
        elif drawn is not None and self._structured is not None:
            self._structured.advance(branch, drawn.token)
        pieces, branch.prompt_logprobs = branch.prompt_logprobs, []
        return wire.Delta(
            id=request.id,
            offset=offset,
            tokens=[] if drawn is None else [drawn.token],
            index=branch.index,
            logprobs=None if drawn is None else drawn.logprobs,
            finish=finish,
            prompt_logprobs=join_logprobs(pieces) if pieces else None,
            cached_tokens=request.cached_tokens if first else 0,
            queue_seconds=request.queue_seconds if first else 0.0,
        )

    def _tell(self, branch: Branch, delta: wire.Delta) -> Iterator[wire.Delta]:
        """Send ``delta`` and the deltas kept back before it, once they have enough tokens."""
        request = branch.request
        assert isinstance(request, GenerateRequest)
        branch.unsent.append(delta)
        if delta.finish is not None or len(branch.unsent) >= request.message.tokens_per_delta:
            yield from wire.prompt_parts(join_deltas(branch.unsent))
            branch.unsent = []

    def _finish_reason(self, request: GenerateRequest, branch: Branch, token: int) -> wire.FinishReason | None:
        sampling = request.message.sampling
        if token in sampling.stop_token_ids or (token in self.info.eos_token_ids and not sampling.ignore_eos):
            return "stop"
        context = len(request.prompt) + len(branch.outputs)
        return "length" if request.offset(branch) >= sampling.max_tokens or context >= self.info.max_context else None

    def _count_cached(self, request: Request) -> None:
        self._cached += request.cached_tokens

    def _fail(self, batch: Batch, error: Exception) -> list[wire.Reply]:
        """End the requests of a failed step. The engine continues."""
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        logger.exception("a step of %d tokens failed", batch.tokens)
        code: wire.ErrorCode = "out_of_memory" if memory else "internal"
        message = "The engine ran out of memory in this step." if memory else "The engine failed in this step."
        failed = self._leave(self._scheduler.fail(batch))
        for request in failed:
            self._note("failed", request, code=code)
        return [wire.Failed(_id_of(request), code, message, retryable=True) for request in failed]


def _id_of(request: Request) -> str:
    """Return the id of the message that asks for ``request``."""
    group = request.group if isinstance(request, ScoreRequest) else None
    return request.id if group is None else group.id


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
    )
