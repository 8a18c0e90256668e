"""Fills each step with whole sequences, for models whose tokens all attend to each other. There are no slots.

A branch is one sequence, and one step computes all of it. Tenants share the tokens of a step by weight, as those of other models do
(:mod:`engine.scheduling.fair_queue`). Within a tenant, requests take turns of a part of its share: by turns the one that was
served longest ago and the next one that waits, so that a request of few texts waits for none of many, and that one goes on as
well. While there is a request with a priority other than 0, each gets all that it can use, in the order of
:func:`~engine.scheduling.fair_queue.rank`.

A sequence that does not fit what is left of the step waits for the next, where its tenant comes first, because it is furthest
behind; the first sequence of a step may be longer than the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain

from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import Branch, Request, ScoringRequest
from yardstick_llm.engine.scheduling.fair_queue import QUANTA, Flow, rank
from yardstick_llm.engine.scheduling.scheduler import CONTENDED_SHARE, Budget, Scheduler

NO_SLOTS = dict.fromkeys(("slots_total", "slots_free", "slots_cached", "slots_items", "slots_reserved", "evicted_item_tokens"), 0)


class WholeScheduler(Scheduler):
    """Turns requests into batches of whole sequences, in order of length."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(None, budget, clock)
        self._max_tokens = 0
        """Of the step that is being scheduled."""

    @property
    def slot_counts(self) -> dict[str, int]:
        return NO_SLOTS

    def schedule(self) -> Batch:
        batch, now = Batch(), self._clock()
        share = CONTENDED_SHARE if self.queue.contended() else 1.0
        self._max_tokens = max(1, int(share * self._budget.max_batched_tokens))
        for flow in self.queue.grant(self._max_tokens):
            self._take_turns(batch, flow, now)
        for flow in chain(self.queue.dealt, self.queue.others()):
            flow.room = self._max_tokens - batch.tokens
            if flow.room <= 0:
                break
            self._take_turns(batch, flow, now)
        self.queue.settle(max(self._max_tokens, batch.tokens))
        self.wait_estimator.turn()
        batch.segments.sort(key=_length)
        return batch

    def finish(self, branch: Branch) -> None:
        branch.request.branches.remove(branch)
        branch.done = True
        if not branch.request.branches:
            self.remove(branch.request)

    def _stop(self, request: Request) -> None:
        for branch in request.branches:
            branch.done = True
        if self._running.pop(request.arrival, None) is not None:
            self.queue.stop(request)

    def _take_turns(self, batch: Batch, flow: Flow, now: float) -> None:
        """Let the requests of a tenant take sequences while there is room in its share of the step."""
        ranked = self.queue.prioritised > 0
        turn = flow.room if ranked else max(1, flow.room // QUANTA)
        while flow.room > 0:
            request = _next_ranked(flow) if ranked else _next_turn(flow)
            if request is None or not self._take(batch, flow, request, turn):
                return
            flow.waiting_first = not flow.waiting_first
            if request.arrival not in self._running:
                self._start(flow, request, now)
            flow.running[request.arrival] = flow.running.pop(request.arrival)  # behind those that were served longer ago

    def _take(self, batch: Batch, flow: Flow, request: Request, turn: int) -> int:
        """Add sequences of a request, about ``turn`` tokens. Return the number of tokens; 0 if its next sequence does not fit."""
        taken = 0
        for branch in request.branches:
            length = branch.tokens.size
            if not branch.remaining:  # in this step, or in one that is computed now
                continue
            if taken >= turn or (batch.tokens and length > min(flow.room, self._max_tokens - batch.tokens)):
                break
            branch.context = branch.tokens  # where other models have slots: what is computed
            batch.add(ExtendSegment(request, branch, branch.tokens.view, branch.context.view))
            flow.room -= length
            taken += length
        flow.spent += taken
        request.computed_tokens += taken
        return taken

    def _start(self, flow: Flow, request: Request, now: float) -> None:
        started = self.queue.start(flow)
        assert started is request
        self._running[request.arrival] = request
        request.begun, request.first_computed = True, now
        self.wait_estimator.begin(request, request.size)


def _length(segment: ExtendSegment) -> tuple[int, int]:
    """Length, and tokens to which no token attends, so that sequences that are computed alike come together."""
    request = segment.request
    return segment.tokens.size, request.unseen_tokens if isinstance(request, ScoringRequest) else 0


def _next_turn(flow: Flow) -> Request | None:
    """The running request that was served longest ago, or the first waiting one, by turns; None if all is computed."""
    running = next(_open(flow), None)
    if flow.waiting and (running is None or flow.waiting_first):
        return flow.waiting[0][2]
    return running


def _next_ranked(flow: Flow) -> Request | None:
    found = [*_open(flow), *(request for _, _, request in flow.waiting[:1])]
    return min(found, key=rank, default=None)


def _open(flow: Flow) -> Iterator[Request]:
    """Running requests with a sequence that no step computes yet."""
    return (request for request in flow.running.values() if request.branches[-1].remaining)
