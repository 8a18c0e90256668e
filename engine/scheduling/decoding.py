"""Composes the next token of many sequences at once.

In most steps nearly all running requests are sequences that continue by one token. Composed one by one, they cost the host more
time than the rest of the step, so they are composed in one loop, with one allocation for all. The result is that of
:class:`~engine.scheduling.composer.StepComposer`, which composes everything else: prompts, several sequences of one request,
outputs with a grammar or a thinking section, and steps that lack slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import Batch, CandidatePass, ExtendSegment
from engine.core import Branch, Request
from engine.generation import GenerateRequest
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
    """Add the next token of each of ``branches``, which :func:`decoding_branch` returned, to the step. Returns False, and adds
    nothing, if that needs slots of other requests.
    """
    guided = sum(branch.aux_branch is not None for branch in branches)
    if not all(allocator.make_available(pool, count) for pool, count in ((0, len(branches)), (1, guided)) if count):
        return False
    slots = allocator.kv_pools[0].pool.allocate(len(branches)).tolist()
    for branch, slot in zip(branches, slots, strict=True):
        request, tokens = branch.request, branch.tokens
        if branch.pending_steps and not branch.pending:
            branch.await_draw()
        branch.context.append(slot)
        request.taken += 1
        request.computed_tokens += 1
        request.step = allocator.step
        flow = allocator.flows[request.caller.tenant]
        flow.held[0] += 1
        flow.spent += 1
        batch.segments.append(ExtendSegment(request, branch, tokens.from_(tokens.size - 1), branch.context.view))
    batch.tokens += len(branches)
    batch.load += len(branches)
    if guided:
        _add_candidate_passes(batch, [branch for branch in branches if branch.aux_branch is not None], allocator)
    return True


def _add_candidate_passes(batch: Batch, branches: Sequence[Branch], allocator: Allocator) -> None:
    """Let guided ``branches`` draw, each with a slot for the token that it draws."""
    slots = allocator.kv_pools[1].pool.allocate(len(branches)).tolist()
    for branch, slot in zip(branches, slots, strict=True):
        request, aux_branch = branch.request, branch.aux_branch
        assert isinstance(request, GenerateRequest)
        assert aux_branch is not None
        prefix = aux_branch.context.view
        aux_branch.context.append(slot)
        aux_branch.request.taken += 1
        flow = allocator.flows[request.caller.tenant]
        flow.held[1] += 1
        flow.spent += request.candidates
        batch.candidate_passes[branch] = CandidatePass(aux_branch, prefix, None, slot)
        batch.load += request.candidates
