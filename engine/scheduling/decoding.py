"""Composes the next token of many sequences at once.

In most steps nearly all running requests are sequences that continue by one token. Composed one by one, 256 of them took a third of
the host's time of a step, so they are composed in one loop, with one allocation for all. The result is that of
:class:`~engine.scheduling.composer.StepComposer`, which composes everything else: prompts, several sequences of one request,
outputs with a grammar or a thinking section, and steps that lack slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import Batch, CandidatePass, ExtendSegment
from engine.requests.core import Branch, Request
from engine.requests.generation import GenerateRequest
from engine.scheduling.allocation import Allocator


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
