"""The state of a grammar in one sequence, the tokens that it allows next, and the threads that compute them while the loop goes on.

A sequence whose mask is not ready waits for a later step, so a grammar with slow masks delays no other tenant: its masks are
computed by threads that only slow ones share, in a fair order between tenants, and the loop waits a bounded time for the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import Bits, words_of
from yardstick_llm.engine.structured.checker import reason_of

REMEMBERED = 1024
"""Tenants without jobs whose virtual time is remembered, so that leaving between two jobs gains nothing."""


@dataclass(slots=True)
class _Flow:
    """The jobs of one tenant."""

    virtual: float
    weight: float = 1.0
    jobs: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)
    running: int = 0


class FairThreads:
    """Runs jobs in threads, which start with the first job.

    Start-time fair queueing as in :mod:`engine.scheduling.fair_queue`, with jobs as packets: the virtual time of a tenant is the
    time that its jobs took, divided by its weight, and the next job is one of the tenant with the smallest virtual time. A job
    cannot be interrupted, so the threads that one tenant may hold are bounded.
    """

    def __init__(self, count: int, name: str, most: int = 1) -> None:
        """``count``: number of threads. ``most``: threads that the jobs of one tenant may hold."""
        self._count, self._name, self._most = count, name, most
        self._changed = threading.Condition()
        self._flows: dict[str, _Flow] = {}
        self._virtual = 0.0
        """Virtual time of the system: that of the last job's tenant when it began."""
        self._debts: OrderedDict[str, float] = OrderedDict()
        self._threads = 0
        self._closed = False

    def submit(self, caller: wire.Caller, job: Callable[[], Any]) -> Future[Any]:
        """Run ``job`` for a tenant, later. Cancel the future to leave it out."""
        future: Future[Any] = Future()
        with self._changed:
            flow = self._flows.get(caller.tenant)
            if flow is None:
                flow = self._flows[caller.tenant] = _Flow(max(self._virtual, self._debts.pop(caller.tenant, 0.0)))
            flow.weight = caller.weight
            flow.jobs.append((future, job))
            if self._threads < self._count:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the threads after the jobs in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (begun := self._begin()) is not None:
            tenant, future, job = begun
            began = time.perf_counter()
            try:
                result = job()
            except BaseException as error:  # for whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del begun, future, job
            self._end(tenant, time.perf_counter() - began)

    def _begin(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        """Wait for a job and take it from its flow; None when the threads are to end."""
        with self._changed:
            while not self._closed:
                ready = [entry for entry in self._flows.items() if entry[1].jobs and entry[1].running < self._most]
                if not ready:
                    self._changed.wait()
                    continue
                tenant, flow = min(ready, key=lambda entry: entry[1].virtual)
                future, job = flow.jobs.popleft()
                if future.set_running_or_notify_cancel():
                    self._virtual = max(self._virtual, flow.virtual)
                    flow.running += 1
                    return tenant, future, job
                self._leave(tenant, flow)
        return None

    def _end(self, tenant: str, seconds: float) -> None:
        with self._changed:
            flow = self._flows[tenant]
            flow.running -= 1
            flow.virtual = max(flow.virtual, self._virtual) + seconds / flow.weight
            self._leave(tenant, flow)
            self._changed.notify()

    def _leave(self, tenant: str, flow: _Flow) -> None:
        """Drop a flow without jobs."""
        if flow.jobs or flow.running:
            return
        del self._flows[tenant]
        if not self._flows:
            self._virtual = 0.0
            self._debts.clear()
        elif flow.virtual > self._virtual:
            self._debts[tenant] = flow.virtual
            if len(self._debts) > REMEMBERED:
                self._debts.popitem(last=False)


MAX_MASK_SECONDS = 1.0
"""Most CPU time of one mask. llguidance bounds its work (:data:`engine.wire.GRAMMAR_LIMITS`), but not tightly."""
_REPLAYED_AT_ONCE = 32
"""Tokens that are replayed without a chance for other threads to run."""


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed. The message is a sentence for the client."""


class Constraint:
    """One sequence's matcher. :meth:`advance` and :meth:`compute_mask` alternate; the second may run in another thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._words = words_of(vocab_size)
        self._use: object = None
        self.ready = False
        """Whether :attr:`mask` is that of the next token."""
        self.problem: str | None = None
        """Why the sequence cannot go on, as a sentence; set with ``ready``."""
        self.seconds = 0.0
        """CPU time of the slowest mask so far; not affected by other programs that keep the thread waiting."""
        self.last_seconds = 0.0
        """CPU time of the last mask."""

    def fork(self, use: object = None) -> Constraint:
        """Return a copy for another sequence, which refers to ``use``. Its mask is ready if this one's is."""
        copy = Constraint(self._matcher.deep_copy(), 32 * self._mask.shape[1])
        copy._use = use
        copy._words = self._words
        copy._mask[:] = self._mask
        copy.ready, copy.problem = self.ready, self.problem
        return copy

    @property
    def mask(self) -> Bits:
        """A copy of the tokens that may come next, :func:`words_of` words: end-of-sequence tokens where the output is complete."""
        bits = np.zeros(self._words, np.uint32)
        bits[: self._mask.shape[1]] = self._mask[0].view(np.uint32)
        return bits

    @property
    def complete(self) -> bool:
        """Whether the output is complete and nothing but its end may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Take the token that was drawn. The mask is not ready afterwards."""
        self.ready = False
        self._matcher.consume_token(token)

    def replay(self, tokens: Sequence[int]) -> None:
        """Take the output of an earlier attempt. Raises :class:`GrammarError`."""
        for begin in range(0, len(tokens), _REPLAYED_AT_ONCE):
            if not self._matcher.consume_tokens(list(tokens[begin : begin + _REPLAYED_AT_ONCE])):
                raise GrammarError("The output of the earlier attempt does not follow the grammar.")

    def compute_mask(self) -> None:
        """Compute :attr:`mask`, without the interpreter's lock. Raises nothing."""
        began = time.thread_time()
        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._mask)
        seconds = time.thread_time() - began
        self.seconds = max(self.seconds, seconds)
        self.last_seconds = seconds
        if self._matcher.is_error():
            self.problem = f"The grammar is too complex to follow: {reason_of(self._matcher)}."
        elif seconds > MAX_MASK_SECONDS:
            self.problem = f"The grammar is too complex to follow: one token took more than {MAX_MASK_SECONDS:g} s."
        self.ready = True


QUICK_SECONDS = 0.005
"""Longest time that a step waits for masks, unless steps are long."""
QUICK_SHARE = 0.1
"""Longest time that a step waits for masks, as a share of the last step: a sequence that misses a long step loses more."""
SLOW_MASK_SECONDS = 0.001
"""A sequence with a mask that took longer than this is slow from then on."""
_MOST_THREADS = 8
_SLOW_THREADS = 2


class MaskThreads:
    """The threads that compute masks. Used by one thread only."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads``: None for one on each processor, at least 2 and at most 8."""
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        count = threads or min(_MOST_THREADS, max(2, processors))
        self._parts = max(1, count - 1)  # one thread stays free of a tenant whose masks become slow
        self._quick = FairThreads(count, "grammar-masks", self._parts)
        self._slow = FairThreads(_SLOW_THREADS, "grammar-slow-masks")
        self._waited: list[Future[None]] = []
        """Quick masks that the next step waits for."""

    def start(self, constraints: Sequence[tuple[wire.Caller, Constraint]]) -> None:
        """Compute the masks of ``constraints``, which have just advanced."""
        quick: dict[str, tuple[wire.Caller, list[Constraint]]] = {}
        slow: list[tuple[wire.Caller, Constraint]] = []
        for caller, constraint in constraints:  # divided before any thread begins, which may make one slow
            if constraint.seconds > SLOW_MASK_SECONDS:
                slow.append((caller, constraint))
            else:
                quick.setdefault(caller.tenant, (caller, []))[1].append(constraint)
        for caller, each in quick.values():
            parts = [part for place in range(self._parts) if (part := each[place :: self._parts])]
            self._waited += [self._quick.submit(caller, partial(_compute, part)) for part in parts]
        for caller, constraint in slow:
            self._slow.submit(caller, constraint.compute_mask)

    def wait(self, step_seconds: float) -> None:
        """Wait for the quick masks that were started since the last call, as long as :data:`QUICK_SECONDS` and
        :data:`QUICK_SHARE` allow for steps of ``step_seconds``."""
        if self._waited:
            wait(self._waited, max(QUICK_SECONDS, QUICK_SHARE * step_seconds))
            self._waited = []

    def close(self) -> None:
        """End the threads."""
        for threads in (self._quick, self._slow):
            threads.close()


def _compute(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.compute_mask()
