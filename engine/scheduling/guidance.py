"""Composes the tokens of guided draws.

A guided request has slots of both models. It draws in a step that brings the length model up to its newest token; the slot of the
token to be drawn is allocated before the draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.batch import Batch, CandidatePass, ExtendSegment
from engine.ints import EMPTY
from engine.requests.core import Branch
from engine.requests.generation import GenerateRequest

if TYPE_CHECKING:
    from engine.scheduling.composer import StepComposer


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
