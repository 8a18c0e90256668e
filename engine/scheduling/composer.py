"""Composes a step: adds the next tokens of a request to a batch, each with its slot.

A step may be composed while the one before is still being computed. Branches whose result is pending then wait or, with
``run_ahead``, continue from a token that is not known yet, if the scheduler does not need to know it.

Guided draws are in :mod:`engine.scheduling.guidance`.
"""

from __future__ import annotations

from engine.batch import Batch, ExtendSegment
from engine.ints import EMPTY, Ints
from engine.requests.core import Branch, Request
from engine.scheduling.allocation import Allocator
from engine.scheduling.flow import Flow
from engine.scheduling.guidance import compute_guided, draws_guided


class StepComposer:
    """Adds segments and candidate passes of running requests to a batch. It does not choose between requests."""

    def __init__(self, allocator: Allocator, *, run_ahead: bool) -> None:
        self.allocator = allocator
        """Allocates slots, also for :mod:`engine.scheduling.guidance`."""
        self._run_ahead = run_ahead

    def compute(self, batch: Batch, flow: Flow, request: Request, room: int, reserve: int, *, may_preempt: bool) -> int:
        """Add up to ``room`` tokens of a running request to the step, and at least one of each sequence that is being generated.
        Returns the number of tokens, with which ``flow``, that of the request, is charged.

        reserve: :attr:`Request.reserve`, which is not 0 only behind the prefix.
        """
        if request.adapter is not None and not self.allocator.turns.takes(request):
            return 0
        before = batch.load
        self._compute(batch, request, room, reserve, may_preempt=may_preempt)
        spent = batch.load - before
        if spent:
            request.step = self.allocator.step
            flow.spent += spent
        return spent

    def _compute(self, batch: Batch, request: Request, room: int, reserve: int, *, may_preempt: bool) -> None:
        limit, least = batch.load + room, 1 if reserve else 0
        if not reserve and not self._compute_prefixes(batch, request, limit, may_preempt=may_preempt):
            return
        for branch in request.branches:
            if not self._can_continue(batch, request, branch):
                continue
            start = branch.computed
            remaining, room = branch.tokens.size - start, limit - batch.load
            if remaining <= 0:
                continue
            if room < least:
                room = least
            if branch.aux_branch is not None and draws_guided(branch):
                added = compute_guided(self, batch, branch, remaining, room, may_preempt=may_preempt)
            else:
                count = remaining if remaining < room else room
                added = self.compute_branch(batch, branch, start, count, may_preempt=may_preempt)
            if not added:
                return

    def _can_continue(self, batch: Batch, request: Request, branch: Branch) -> bool:
        """Whether it is known how ``branch`` continues. A token that a pending step draws is added as
        :data:`~engine.requests.core.PENDING`."""
        if branch.constraint is not None and not branch.constraint.ready:
            return False
        if request.images is not None and not request.images.branch_ready(batch, branch, self.allocator.step):
            return False
        if branch.pending_steps and not branch.pending:
            if not (self._run_ahead and request.may_run_ahead(branch)):
                return False
            branch.await_draw()
        return True

    def compute_branch(self, batch: Batch, branch: Branch, start: int, count: int, *, may_preempt: bool) -> bool:
        """Add ``count`` tokens of ``branch`` from ``start`` to the step. Returns False if that is none, or if there is no slot."""
        slots = self.allocator.allocate(count, branch.request, branch, may_preempt=may_preempt) if count > 0 else EMPTY
        if not slots.size:
            return False
        self.add_segment(batch, branch, start, slots)
        return True

    def add_segment(self, batch: Batch, branch: Branch, start: int, slots: Ints) -> None:
        """Add the tokens of ``branch`` from ``start`` to the step, with their ``slots``."""
        request, count = branch.request, slots.size
        branch.add_slots(slots)
        self.allocator.count_taken(request, count, branch)
        request.computed_tokens += count
        batch.add(ExtendSegment(request, branch, branch.tokens.part(start, start + count), branch.context.view))

    def _compute_prefixes(self, batch: Batch, request: Request, limit: int, *, may_preempt: bool) -> bool:
        """Compute prefixes until the step has a load of ``limit``; returns whether none lacks a token."""
        complete = True
        for part in request.with_aux:
            if part.prefix_remaining:
                self._compute_prefix(batch, part, limit - batch.load, may_preempt=may_preempt)
                complete = complete and not part.prefix_remaining
        return complete

    def _compute_prefix(self, batch: Batch, request: Request, room: int, *, may_preempt: bool) -> None:
        """Match the rest of the prefix in the cache again, and compute up to ``room`` tokens that the cache lacks."""
        assert request.node is not None
        cache = self.allocator.kv_pool(request).cache
        request.node, found = cache.match_prefix(request.node, request.prefix[len(request.prefix_slots) :])
        request.prefix_slots.extend(found)
        if not request.begun:
            request.cached_tokens += len(found)
        if request.images is not None and not request.images.prefix_ready(batch, request, self.allocator.step):
            return
        count = min(request.prefix_remaining, room)
        slots = self.allocator.allocate(count, request, None, may_preempt=may_preempt) if count > 0 else EMPTY
        if not len(slots):
            return
        start = len(request.prefix_slots)
        tokens = request.prefix[start : start + count]
        request.node = cache.insert(request.node, tokens, slots, item=request.group is not None)
        request.prefix_slots.extend(slots)
        self.allocator.count_taken(request, count)
        batch.add(ExtendSegment(request, None, tokens, request.prefix_slots.view))
        request.computed_tokens += count
