"""The loop: receive, schedule, launch, wait, process results. It handles token ids and numbers; sockets and processes are in
:mod:`engine.server.loop_process`.

With overlap, the loop waits for a step only after it has launched the next one, so the host receives, schedules and processes
results while the device computes. Without overlap, it waits for each step at once, which suits a CPU. Both give the same results.

Every message that :meth:`Loop.submit` accepts ends with exactly one terminal reply.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.checks import check
from yardstick_llm.engine.loop.images import ImageIntake
from yardstick_llm.engine.loop.replies import (
    Counters,
    Deltas,
    Ending,
    Message,
    Refusals,
    RequestLog,
    aborted,
    overloaded,
    step_failed,
)
from yardstick_llm.engine.models.lora.registry import AdapterRegistry
from yardstick_llm.engine.models.lora.slots import LoadedAdapter
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.requests.core import Branch, ItemGroup, Request, ScoringRequest, without_padding
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.runner.graphs import Compilations
from yardstick_llm.engine.runner.readouts.base import StepResult
from yardstick_llm.engine.runner.runner import PendingStep, Runner
from yardstick_llm.engine.scheduling.scheduler import Scheduler
from yardstick_llm.engine.scheduling.structured_requests import StructuredRequests

logger = logging.getLogger(__name__)

DEVICE_ERRORS = (RuntimeError, MemoryError)
"""Errors of a step that are no fault of the program, above all out of memory."""
WAIT_SECONDS = 0.001
"""Pause between steps where every request waits for a grammar or a mask."""


def take_items(
    group: ItemGroup, done: Sequence[tuple[ScoringRequest, list[float]]], scheduler: Scheduler, counters: Counters
) -> list[wire.Reply]:
    """Take the rows of items of ``group`` that a step has computed, all of each block; return the answer with the last one."""
    group.take(done)
    for part in dict.fromkeys(request.block or request for request, _ in done):
        scheduler.finish_items(part)
    if group.left:
        return []
    scheduler.remove(group)
    counters.scored_items += len(group.rows)
    counters.cached_items += group.cached_items
    if not group.on_lenvm:
        counters.cached_tokens += group.cached_tokens
    return [group.answer]


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
        pad_token_id: int | None = None,
        structured: StructuredRequests | None = None,
        compilations: Compilations | None = None,
        adapters: AdapterRegistry | None = None,
        images: ImageIntake | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``mean_pooling``, ``pad_token_id``: see :meth:`ScoringRequest.of`. ``structured``: None where the engine follows no
        grammars. ``images``: None where the model reads none. Steps that ``runner`` computed before are not counted."""
        self._runner = runner
        self._scheduler = scheduler
        self.info = info
        self.adapters = adapters or AdapterRegistry()
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._overlap = overlap
        self._mean_pooling = mean_pooling
        self._pad = pad_token_id
        self.structured = structured
        self._compilations = compilations
        self._images = images
        self._pending_step: PendingStep | None = None
        """The step whose results are not processed yet."""
        self._clock = clock
        self._log = RequestLog(clock)
        self._counters = Counters((runner.replayed, runner.replayed_lenvm_passes))
        self._refusals = Refusals(self._counters, self._log)
        self._deltas = Deltas(info, scheduler, structured, self._counters)
        self._step_seconds = 0.0
        """Time of the last step, without its wait for masks."""
        self._ended: list[wire.Reply] = []
        """Terminal replies that the next step returns."""

    def submit(self, message: wire.Request, received: float | None = None) -> None:
        """Accept or refuse a message. The next :meth:`step` returns the replies to refusals and aborts.

        ``received``: when the engine received it, on the loop's clock; None: now. Queue time and deadline count from then.
        """
        if isinstance(message, wire.Abort):
            self._abort(message.id)
            return
        adapter = self.adapters.get(message.adapter)
        failure = self._refusal(message, adapter)
        received = self._clock() if received is None else received
        if failure is not None:
            self._ended.append(failure)
        elif isinstance(message, wire.Score | wire.ScoreItems):
            self._submit_score(message, received, adapter)
        else:
            self._add(GenerateRequest.of(message, received, adapter), message)

    def refuse(self, request_id: str, problem: str) -> None:
        """Refuse a message that could not be decoded; the next :meth:`step` replies."""
        self._ended.append(self._refusals.invalid(request_id, problem))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute, to wait for or to reply."""
        compiling = self.structured is not None and self.structured.compiling
        return self._scheduler.idle and self._pending_step is None and not self._ended and not compiling

    def step(self) -> list[wire.Reply]:
        """Launch one step and process the results of one; returns the replies."""
        replies, self._ended = self._ended, []
        replies += self._settle_structured()
        for request in self._scheduler.expire():
            replies.append(wire.Failed(request.id, "deadline", "The deadline passed before it was computed."))
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
        replies: list[wire.Reply] = []
        settled = () if self.structured is None else self.structured.queue_settled(self._scheduler, self._step_seconds)
        for request, reply in settled:
            self._note("expired" if reply.code == "deadline" else "failed", request, code=reply.code)
            replies.append(reply)
        return replies

    def close(self) -> None:
        """End the loop's threads."""
        if self.structured is not None:
            self.structured.close()

    @property
    def stats(self) -> wire.Stats:
        """A snapshot."""
        parts = self._scheduler, self._runner, self.structured, self._compilations, self.adapters
        return self._counters.snapshot(self.info, *parts)

    def _submit_score(self, message: wire.Score | wire.ScoreItems, received: float, adapter: LoadedAdapter | None) -> None:
        if not (message.branches if isinstance(message, wire.Score) else message.lengths):
            self._ended.append(wire.Scored(message.id, [], 0, 0))
        elif isinstance(message, wire.ScoreItems):
            if self._pad is not None and self._reads_padding(message):
                message = msgspec.structs.replace(message, query=without_padding(message.query, self._pad))
            self._add(ItemGroup.of(message, received, adapter, mean_pooling=self._mean_pooling), message)
        else:
            whole = self.info.encoder
            request = ScoringRequest.of(message, received, adapter, mean_pooling=self._mean_pooling, pad=self._pad, whole=whole)
            self._add(request, message)

    def _reads_padding(self, message: wire.ScoreItems) -> bool:
        """Whether a head would read the padding at the end of the query."""
        return isinstance(message.readout, wire.Classes) and message.query[-1] == self._pad

    def _add(self, request: Request, message: Message) -> None:
        if self._images is not None and message.images:
            self._images.attach(request, message)
        if isinstance(request, GenerateRequest) and self.structured is not None and request.message.grammar:
            self.structured.begin(request)
        else:
            self._scheduler.add(request)

    def _refusal(self, message: Message, adapter: LoadedAdapter | None) -> wire.Failed | None:
        """Why ``message`` cannot be accepted, if so."""
        if self._request(message.id) is not None:
            return self._refusals.invalid(message.id, "A request of this id is still running; ids must be unique.", message.caller)
        if message.adapter and adapter is None:
            return self._refusals.unknown_adapter(message)
        problem = check(message, self.info if adapter is None else adapter.info)
        if problem is not None:
            return self._refusals.invalid(message.id, problem, message.caller)
        if isinstance(message, wire.ScoreItems) and self._reads_padding(message) and set(message.query) == {self._pad}:
            return self._refusals.invalid(message.id, "The query is padding alone, which the head does not read.", message.caller)
        wait = self._scheduler.wait_estimator.seconds(message.priority, message.caller.tenant)
        if wait > self._max_wait_seconds:
            return self._refusals.overloaded(message, "wait", wait)
        compiling = 0 if self.structured is None else self.structured.compiling
        full = self._images is not None and self._images.full(message)
        if full or (self._scheduler.waiting + compiling >= self._max_waiting and not self._displace(message.caller)):
            return self._refusals.overloaded(message, "queue_full", wait)
        return None

    def _request(self, request_id: str) -> Request | None:
        """The request with this id, or None if it has ended."""
        compiling = None if self.structured is None else self.structured.get(request_id)
        return compiling or self._scheduler.get(request_id)

    def _displace(self, caller: wire.Caller) -> bool:
        """Make a place in the full queue for ``caller``, at the cost of the tenant with most requests in it."""
        displaced = self.structured.displace(caller, self._scheduler) if self.structured else self._scheduler.displace(caller)
        if displaced is None:
            return False
        self._counters.displaced += 1
        wait = self._scheduler.wait_estimator.seconds(displaced.priority, displaced.caller.tenant)
        self._ended.append(overloaded(displaced.id, wait))
        self._note("displaced", displaced, code="overloaded")
        return True

    def _note(self, ending: Ending, request: Request, **fields: str) -> None:
        """A line in the log about a request that was accepted."""
        self._log.note(ending, request, self._clock(), **fields)

    def _abort(self, request_id: str) -> None:
        request = self._request(request_id)
        if request is None:
            return
        if isinstance(request, GenerateRequest):
            self._ended += aborted(request)
        else:
            self._ended.append(wire.Failed(request_id, "aborted", "The caller ended the request."))
        if self._scheduler.get(request_id) is None:
            assert isinstance(request, GenerateRequest)
            assert self.structured is not None
            self.structured.remove(request)
        else:
            self._scheduler.remove(request)
        self._note("aborted", request)

    def _launch(self, batch: Batch) -> PendingStep:
        self._counters.steps += 1
        self._counters.computed_tokens += batch.tokens
        step = self._runner.launch(batch)
        for branch in step.plan.branches:
            branch.pending_steps += 1
        for candidate_pass in step.plan.skipped:
            self._scheduler.allocator.release_unused(candidate_pass)
        return step

    def _wait(self, step: PendingStep) -> list[wire.Reply]:
        """Wait for a step and process its results. If it failed, the step launched after it, which builds on it, fails too."""
        try:
            result = step.wait()
        except DEVICE_ERRORS as error:
            self._runner.wait_for_device()  # also for the later step, because its buffers are used again
            replies = self._fail(step.batch, error)
            if self._pending_step is not None:
                replies += self._fail(self._pending_step.batch, error)
                self._pending_step = None
            return replies
        for branch in step.plan.branches:
            branch.pending_steps -= 1
        return self._process_results(result)

    def _process_results(self, result: StepResult) -> list[wire.Reply]:
        replies: list[wire.Reply] = []
        for part in result.prompts:
            if part.start == len(part.branch.prompt_logprobs):  # otherwise it was preempted, and this part is or was computed again
                part.branch.prompt_logprobs += part.logprobs
        items: dict[ItemGroup, list[tuple[ScoringRequest, list[float]]]] = {}
        for branch, row in result.rows:
            request = branch.request
            assert isinstance(request, ScoringRequest)
            if not branch.done and request.group is not None:
                items.setdefault(request.group, []).append((request, row))
            elif not branch.done:
                self._process_row(branch, request, row, replies)
        for group, done in items.items():
            replies += take_items(group, done, self._scheduler, self._counters)
        self._deltas.settle_drafts(result)
        for drawn in result.drawn:
            if drawn.spoilt and not drawn.branch.done:
                replies.append(self._end_spoilt(drawn.branch.request))
            elif not drawn.branch.done:
                replies += self._deltas.take(drawn)
                if not drawn.branch.request.branches:
                    self._note("finished", drawn.branch.request)
        if self.structured is not None:
            self.structured.start_masks()
        self._counters.add(result.lenvm)
        return replies

    def _process_row(self, branch: Branch, request: ScoringRequest, row: list[float], replies: list[wire.Reply]) -> None:
        request.rows[branch.index] = row
        self._scheduler.finish(branch)
        if not request.branches:
            if not request.on_lenvm:
                self._counters.cached_tokens += request.cached_tokens
            self._note("finished", request)
            scored = wire.Scored(request.id, request.rows, request.cached_tokens, request.computed_tokens, request.queue_seconds)
            replies.append(scored)

    def _end_spoilt(self, request: Request) -> wire.Failed:
        """End a generation whose logits are not numbers."""
        self._scheduler.remove(request)
        self._note("failed", request, code="not_a_number")
        message = "The model's numbers overflow for this prompt; change it, or serve another --dtype."
        return wire.Failed(request.id, "not_a_number", message)

    def _fail(self, batch: Batch, error: Exception) -> list[wire.Reply]:
        """End the requests of a failed step. The engine continues."""
        logger.exception("a step of %d tokens failed", batch.tokens)
        failed = self._scheduler.fail(batch)
        for request in failed:
            self._note("failed", request, code=step_failed(request.id, error).code)
        return [step_failed(request.id, error) for request in failed]
