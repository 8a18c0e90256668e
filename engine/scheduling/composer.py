"""Composes a step: adds the next tokens of a request to a batch, each with its slot.

A step may be composed while the one before is still being computed. Branches whose result is pending then wait or, with
``run_ahead``, continue from a token that is not known yet, if the scheduler does not need to know it.

A guided request has slots of both models. It draws in a step that brings the length model up to its newest token; the slot of the
token to be drawn is allocated before the draw.

In most steps nearly all running requests are sequences that continue by one token. Composed one by one, 256 of them took a third of
the host's time of a step, so :func:`decode` composes them in one loop, with one allocation for all. The result is that of
:class:`StepComposer`, which composes everything else: prompts, several sequences of one request, outputs with a grammar or a
thinking section, and steps that lack slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from yardstick_llm.engine.ints import EMPTY, Ints
from yardstick_llm.engine.requests.batch import Batch, CandidatePass, ExtendSegment
from yardstick_llm.engine.requests.core import Branch, Request
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.scheduling.allocation import Allocator
from yardstick_llm.engine.scheduling.fair_queue import Flow


class StepComposer:
    """Adds segments and candidate passes of running requests to a batch. It does not choose between requests."""

    def __init__(self, allocator: Allocator, *, run_ahead: bool) -> None:
        self.allocator = allocator
        """Allocates slots, also for :mod:`engine.scheduling.composer`."""
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


def compute_guided(composer: StepComposer, batch: Batch, branch: Branch, remaining: int, room: int, *, may_preempt: bool) -> bool:
    """Add up to ``room`` of the ``remaining`` tokens of a guided branch to the step. Its last token is added only together with
    everything that the length model needs for the draw. Returns False if there is no room or no slot.
    """
    aux_branch, request = branch.aux_branch, branch.request
    assert aux_branch is not None
    assert isinstance(request, GenerateRequest)
    behind = aux_branch.remaining
    if remaining > room or (behind > 0 and remaining + behind + request.candidates > room):
        limit = batch.load + room
        composer.compute_branch(batch, branch, branch.computed, min(room, remaining - 1), may_preempt=may_preempt)
        count = min(behind, limit - batch.load)
        return composer.compute_branch(batch, aux_branch, aux_branch.computed, count, may_preempt=may_preempt)
    ahead = composer.allocator.allocate(behind + 1, aux_branch.request, aux_branch, may_preempt=may_preempt)
    slots = composer.allocator.allocate(remaining, request, branch, may_preempt=may_preempt) if ahead.size else EMPTY
    if not slots.size:
        composer.allocator.kv_pool(aux_branch.request).pool.free(ahead)
        return False
    composer.add_segment(batch, branch, branch.computed, slots)
    start = aux_branch.computed
    aux_branch.add_slots(ahead)
    composer.allocator.count_taken(aux_branch.request, ahead.size)
    prefix = aux_branch.context.view[:-1]
    pending = None
    if behind > 0:
        pending = ExtendSegment(aux_branch.request, aux_branch, aux_branch.tokens.from_(start), prefix)
    batch.add_candidate_pass(branch, CandidatePass(aux_branch, prefix, pending, int(ahead[-1])), request.candidates)
    return True


def draws_guided(branch: Branch) -> bool:
    """Whether a guided draw follows the last token of ``branch``."""
    request = branch.request
    assert isinstance(request, GenerateRequest)
    return request.guided_from(branch) is not None and request.draws(branch)


def decoding_branch(request: Request, *, run_ahead: bool) -> Branch | None:
    """Return the branch of ``request``, if the request continues by exactly one token that :func:`decode` can compose. Changes
    nothing.

    A guided branch must have a length model's branch that has computed all tokens before that one.
    """
    if not isinstance(request, GenerateRequest) or len(request.branches) != 1:
        return None
    branch = request.branches[0]
    computed = branch.context.size
    if request.images is not None and not branch.drawn:
        return None
    if not computed or branch.constraint is not None or branch.thinking is not None or branch.section is not None:
        return None
    known = request.prefix.size + branch.tokens.size
    if branch.pending_steps and not branch.pending:
        if not (run_ahead and request.may_run_ahead(branch)):
            return None
        known += 1
    elif branch.aux_branch is not None and not request.draws(branch):
        return None
    if computed + 1 != known or (branch.aux_branch is not None and branch.aux_branch.context.size != known):
        return None
    return branch


def decode(batch: Batch, branches: Sequence[Branch], allocator: Allocator) -> bool:
    """Add the next token of each of ``branches``, which :func:`decoding_branch` returned, to the step, and for guided ones the pass
    of their draw. Returns False, and changes nothing, if there are not enough slots without preemption.
    """
    aux_branches = [branch.aux_branch for branch in branches if branch.aux_branch is not None]
    if not (allocator.has_room(0, len(branches)) and (not aux_branches or allocator.has_room(1, len(aux_branches)))):
        return False
    slots = _slots(branches, allocator)
    aux_slots = iter(_slots(aux_branches, allocator))
    load = batch.load
    for branch, slot in zip(branches, slots, strict=True):
        request, tokens, aux_branch = branch.request, branch.tokens, branch.aux_branch
        assert isinstance(request, GenerateRequest)
        if branch.pending_steps and not branch.pending:
            branch.await_draw()
        branch.context.append(slot)
        request.taken += 1
        request.computed_tokens += 1
        request.step = allocator.step
        batch.segments.append(ExtendSegment(request, branch, tokens.from_(tokens.size - 1), branch.context.view))
        flow = allocator.flows[request.caller.tenant]
        flow.held[0] += 1
        flow.spent += 1 + request.candidates
        load += 1 + request.candidates
        if aux_branch is not None:
            prefix, ahead = aux_branch.context.view, next(aux_slots)
            aux_branch.context.append(ahead)
            aux_branch.request.taken += 1
            flow.held[1] += 1
            batch.candidate_passes[branch] = CandidatePass(aux_branch, prefix, None, ahead)
    batch.tokens += len(branches)
    batch.load = load
    return True


def _slots(branches: Sequence[Branch], allocator: Allocator) -> list[int]:
    """A slot for each of ``branches``, which are of one model."""
    if not branches:
        return []
    return allocator.allocate(len(branches), branches[0].request, None, may_preempt=False).tolist()  # type: ignore[no-any-return]
