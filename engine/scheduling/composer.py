"""Composes a step: adds the next tokens of a request to a batch, each with its slot.

A step may be composed while the one before is still being computed. Branches whose result is pending then wait or, with
``run_ahead``, continue from a token that is not known yet, if the scheduler does not need to know it.

A guided request has slots of both models. It draws in a step that brings the length model up to its newest token; the slot of the
token to be drawn is allocated before the draw.
"""

from __future__ import annotations

import numpy as np

from engine.batch import Batch, CandidatePass, ExtendSegment
from engine.core import PENDING, Branch, GenerateRequest, Request
from engine.ints import EMPTY, Ints
from engine.scheduling.allocation import Allocator


class StepComposer:
    """Adds segments and candidate passes of running requests to a batch. It does not choose between requests."""

    def __init__(self, allocator: Allocator, *, run_ahead: bool) -> None:
        self._allocator = allocator
        self._run_ahead = run_ahead

    def compute(self, batch: Batch, request: Request, room: int, *, may_preempt: bool) -> None:
        """Add up to ``room`` tokens of a running request to the step, and at least one of each sequence that is being generated."""
        limit = batch.load + room
        least = 1 if request.reserve else 0
        lacking = 0
        for part in request.with_aux:
            if part.prefix_remaining:
                self._compute_prefix(batch, part, limit - batch.load, may_preempt=may_preempt)
                lacking += part.prefix_remaining
        if lacking:
            return
        for branch in request.branches:
            if not self._can_go_on(request, branch):
                continue
            compute = self._compute_guided if _draws_guided(branch) else self._compute_branch
            if not compute(batch, branch, max(limit - batch.load, least), may_preempt=may_preempt):
                return

    def _compute_branch(self, batch: Batch, branch: Branch, room: int, *, may_preempt: bool) -> bool:
        """Add up to ``room`` tokens of ``branch`` to the step. Returns False if there is no room or no slot."""
        count = min(branch.remaining, room)
        slots = self._allocator.allocate(count, branch.request, branch, may_preempt=may_preempt) if count > 0 else EMPTY
        if len(slots):
            self._enter(batch, branch, slots)
        return len(slots) > 0

    def _compute_guided(self, batch: Batch, branch: Branch, room: int, *, may_preempt: bool) -> bool:
        """Add up to ``room`` tokens of a guided branch to the step. Its last token is added only together with everything that the
        length model needs for the draw. Returns False if there is no room or no slot.
        """
        aux_branch, request = branch.aux_branch, branch.request
        assert aux_branch is not None
        assert isinstance(request, GenerateRequest)
        behind = aux_branch.remaining > 0 and branch.remaining + aux_branch.remaining + request.candidates > room
        if behind or branch.remaining > room:
            limit = batch.load + room
            self._compute_branch(batch, branch, min(room, branch.remaining - 1), may_preempt=may_preempt)
            return self._compute_branch(batch, aux_branch, limit - batch.load, may_preempt=may_preempt)
        ahead = self._allocator.allocate(aux_branch.remaining + 1, aux_branch.request, aux_branch, may_preempt=may_preempt)
        slots = self._allocator.allocate(branch.remaining, request, branch, may_preempt=may_preempt) if len(ahead) else EMPTY
        if not len(slots):
            self._allocator.kv_pool(aux_branch.request).pool.free(ahead)
            return False
        self._enter(batch, branch, slots)
        start = len(aux_branch.slots)
        aux_branch.slots.extend(ahead)
        self._allocator.count_taken(aux_branch.request, len(ahead))
        prefix = np.concatenate([aux_branch.request.prefix_slots.view, aux_branch.slots.view[:-1]])
        pending = ExtendSegment(aux_branch.request, aux_branch, aux_branch.tokens.view[start:], prefix) if len(ahead) > 1 else None
        batch.add_candidate_pass(branch, CandidatePass(aux_branch, prefix, pending, int(ahead[-1])), request.candidates)
        return True

    def _enter(self, batch: Batch, branch: Branch, slots: Ints) -> None:
        """Add the next tokens of ``branch`` to the step, with their ``slots``."""
        start = len(branch.slots)
        branch.slots.extend(slots)
        self._allocator.count_taken(branch.request, len(slots))
        context = np.concatenate([branch.request.prefix_slots.view, branch.slots.view])
        batch.add(ExtendSegment(branch.request, branch, branch.tokens.view[start : start + len(slots)], context))
        branch.request.computed_tokens += len(slots)

    def _can_go_on(self, request: Request, branch: Branch) -> bool:
        """Whether ``branch`` has tokens to compute now. A token that a pending step draws is added as :data:`PENDING`."""
        if not branch.may_draw:
            return False
        if branch.pending_steps and not branch.pending:
            if not (self._run_ahead and request.may_run_ahead(branch)):
                return False
            branch.tokens.extend([PENDING])
        return branch.remaining > 0

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
        request.node = cache.insert(request.node, tokens, slots, item=request.is_item)
        request.prefix_slots.extend(slots)
        self._allocator.count_taken(request, count)
        batch.add(ExtendSegment(request, None, tokens, request.prefix_slots.view))
        request.computed_tokens += count


def _draws_guided(branch: Branch) -> bool:
    """Whether a guided draw follows the last token of ``branch``."""
    request = branch.request
    return isinstance(request, GenerateRequest) and request.guided_from(branch) is not None and request.draws(branch)
