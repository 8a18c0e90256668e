"""Composes a step: adds the next tokens of a request to a batch, each with its slot.

A step may be composed while the one before is still being computed. Branches whose result is pending then wait or, with
``run_ahead``, continue from a token that is not known yet, if the scheduler does not need to know it.

A guided request has slots of both models. It draws in a step that brings the length model up to its newest token; the slot of the
token to be drawn is allocated before the draw.
"""

from __future__ import annotations

from engine.batch import Batch, CandidatePass, ExtendSegment
from engine.core import Branch, Request
from engine.generation import GenerateRequest
from engine.ints import EMPTY, Ints
from engine.scheduling.allocation import Allocator
from engine.scheduling.flow import Flow


class StepComposer:
    """Adds segments and candidate passes of running requests to a batch. It does not choose between requests."""

    def __init__(self, allocator: Allocator, *, run_ahead: bool) -> None:
        self._allocator = allocator
        self._run_ahead = run_ahead

    def compute(self, batch: Batch, flow: Flow, request: Request, room: int, reserve: int, *, may_preempt: bool) -> int:
        """Add up to ``room`` tokens of a running request to the step, and at least one of each sequence that is being generated.
        Returns the number of tokens, with which ``flow``, that of the request, is charged.

        reserve: :attr:`Request.reserve`, which is not 0 only behind the prefix.
        """
        if request.adapter is not None and not self._allocator.turns.takes(request):
            return 0
        before = batch.load
        self._compute(batch, request, room, reserve, may_preempt=may_preempt)
        spent = batch.load - before
        if spent:
            request.step = self._allocator.step
            flow.spent += spent
        return spent

    def _compute(self, batch: Batch, request: Request, room: int, reserve: int, *, may_preempt: bool) -> None:
        limit, least = batch.load + room, 1 if reserve else 0
        if not reserve and not self._compute_prefixes(batch, request, limit, may_preempt=may_preempt):
            return
        for branch in request.branches:
            if not self._can_go_on(request, branch):
                continue
            start = branch.computed
            remaining, room = branch.tokens.size - start, limit - batch.load
            if remaining <= 0:
                continue
            if room < least:
                room = least
            if branch.aux_branch is not None and _draws_guided(branch):
                added = self._compute_guided(batch, branch, remaining, room, may_preempt=may_preempt)
            else:
                count = remaining if remaining < room else room
                added = self._compute_branch(batch, branch, start, count, may_preempt=may_preempt)
            if not added:
                return

    def _can_go_on(self, request: Request, branch: Branch) -> bool:
        """Whether it is known how ``branch`` continues. A token that a pending step draws is added as
        :data:`~engine.core.PENDING`."""
        if branch.constraint is not None and not branch.constraint.ready:
            return False
        if branch.pending_steps and not branch.pending:
            if not (self._run_ahead and request.may_run_ahead(branch)):
                return False
            branch.await_draw()
        return True

    def _compute_branch(self, batch: Batch, branch: Branch, start: int, count: int, *, may_preempt: bool) -> bool:
        """Add ``count`` tokens of ``branch`` from ``start`` to the step. Returns False if that is none, or if there is no slot."""
        slots = self._allocator.allocate(count, branch.request, branch, may_preempt=may_preempt) if count > 0 else EMPTY
        if not slots.size:
            return False
        self._enter(batch, branch, start, slots)
        return True

    def _compute_guided(self, batch: Batch, branch: Branch, remaining: int, room: int, *, may_preempt: bool) -> bool:
        """Add up to ``room`` of the ``remaining`` tokens of a guided branch to the step. Its last token is added only together with
        everything that the length model needs for the draw. Returns False if there is no room or no slot.
        """
        aux_branch, request = branch.aux_branch, branch.request
        assert aux_branch is not None
        assert isinstance(request, GenerateRequest)
        behind = aux_branch.remaining
        if remaining > room or (behind > 0 and remaining + behind + request.candidates > room):
            limit = batch.load + room
            self._compute_branch(batch, branch, branch.computed, min(room, remaining - 1), may_preempt=may_preempt)
            count = min(behind, limit - batch.load)
            return self._compute_branch(batch, aux_branch, aux_branch.computed, count, may_preempt=may_preempt)
        ahead = self._allocator.allocate(behind + 1, aux_branch.request, aux_branch, may_preempt=may_preempt)
        slots = self._allocator.allocate(remaining, request, branch, may_preempt=may_preempt) if ahead.size else EMPTY
        if not slots.size:
            self._allocator.kv_pool(aux_branch.request).pool.free(ahead)
            return False
        self._enter(batch, branch, branch.computed, slots)
        start = aux_branch.computed
        aux_branch.enter(ahead)
        self._allocator.count_taken(aux_branch.request, ahead.size)
        prefix = aux_branch.context.view[:-1]
        pending = None
        if behind > 0:
            pending = ExtendSegment(aux_branch.request, aux_branch, aux_branch.tokens.from_(start), prefix)
        batch.add_candidate_pass(branch, CandidatePass(aux_branch, prefix, pending, int(ahead[-1])), request.candidates)
        return True

    def _enter(self, batch: Batch, branch: Branch, start: int, slots: Ints) -> None:
        """Add the tokens of ``branch`` from ``start`` to the step, with their ``slots``."""
        request, count = branch.request, slots.size
        branch.enter(slots)
        self._allocator.count_taken(request, count, branch)
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
        cache = self._allocator.kv_pool(request).cache
        request.node, found = cache.match_prefix(request.node, request.prefix[len(request.prefix_slots) :])
        request.prefix_slots.extend(found)
        if not request.begun:
            request.cached_tokens += len(found)
        count = min(request.prefix_remaining, room)
        slots = self._allocator.allocate(count, request, None, may_preempt=may_preempt) if count > 0 else EMPTY
        if not len(slots):
            return
        start = len(request.prefix_slots)
        tokens = request.prefix[start : start + count]
        request.node = cache.insert(request.node, tokens, slots, item=request.group is not None)
        request.prefix_slots.extend(slots)
        self._allocator.count_taken(request, count)
        batch.add(ExtendSegment(request, None, tokens, request.prefix_slots.view))
        request.computed_tokens += count


def _draws_guided(branch: Branch) -> bool:
    """Whether a guided draw follows the last token of ``branch``."""
    request = branch.request
    assert isinstance(request, GenerateRequest)
    return request.guided_from(branch) is not None and request.draws(branch)
