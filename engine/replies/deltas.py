"""Turns the draws of a step into the deltas of generations."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine import wire
from engine.readouts.base import Drawn, StepResult
from engine.readouts.logprobs import join_logprobs
from engine.replies.counters import Counters
from engine.requests.core import Branch
from engine.requests.generation import GenerateRequest
from engine.requests.prompt_lookup import Lookup
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.structured_requests import StructuredRequests


class Deltas:
    """Gives each drawn token to its branch, ends finished sequences, and makes the messages."""

    def __init__(self, info: wire.Info, scheduler: Scheduler, structured: StructuredRequests | None, counters: Counters) -> None:
        self._scheduler = scheduler
        self._structured = structured
        self._counters = counters
        self._eos_token_ids = info.eos_token_ids
        self._max_context = info.max_context

    def settle_drafts(self, result: StepResult) -> None:
        """Free the slots of rejected drafts. Comes before the draws of the step are taken."""
        for branch, drafted, accepted in result.drafts:
            self._counters.draft_tokens += drafted
            self._counters.accepted_draft_tokens += accepted
            if not branch.done:
                self._scheduler.settle_draft(branch, accepted)

    def take(self, drawn: Drawn) -> Sequence[wire.Delta]:
        """Take a draw; returns the messages to send, once the caller's number of tokens is there."""
        branch, token = drawn.branch, drawn.token
        request = branch.request
        assert isinstance(request, GenerateRequest)
        message = request.message
        offset = request.offset(branch) - branch.pending
        finish: wire.FinishReason | None = "length"
        if token is not None:
            branch.draw(token)
            finish = self._finish_reason(message, branch, token, offset + 1)
        if finish is not None:
            self._scheduler.finish(branch)
        elif branch.constraint is not None and token is not None:
            assert self._structured is not None
            self._structured.advance(branch, token)
        delta = wire.Delta(request.id, offset, [] if token is None else [token], branch.index, drawn.logprobs, finish)
        if branch.lookup is not None:
            delta = _with_drafts(delta, branch.lookup)
        if offset == message.resume_offset or branch.prompt_logprobs:
            delta = self._with_prompt(delta, branch)
        if message.tokens_per_delta <= 1 and delta.prompt_logprobs is None and not (drawn.more or branch.unsent):
            return (delta,)
        branch.unsent.append(delta)
        if finish is None and (drawn.more or len(branch.unsent) < message.tokens_per_delta):
            return ()
        return unsent(branch)

    def _with_prompt(self, delta: wire.Delta, branch: Branch) -> wire.Delta:
        """Add what is known of the prompt to the first delta of a sequence."""
        request = branch.request
        assert isinstance(request, GenerateRequest)
        pieces, branch.prompt_logprobs = branch.prompt_logprobs, []
        first = branch.index == 0 and delta.offset == request.message.resume_offset
        if first:
            self._counters.cached_tokens += request.cached_tokens
        return msgspec.structs.replace(
            delta,
            prompt_logprobs=join_logprobs(pieces) if pieces else None,
            cached_tokens=request.cached_tokens if first else 0,
            queue_seconds=request.queue_seconds if first else 0.0,
        )

    def _finish_reason(self, message: wire.Generate, branch: Branch, token: int, drawn: int) -> wire.FinishReason | None:
        """``drawn``: output tokens so far, with ``token`` and those of an earlier attempt."""
        sampling = message.sampling
        if token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos):
            return "stop"
        context = len(message.prompt) + branch.drawn
        return "length" if drawn >= sampling.max_tokens or context >= self._max_context else None


def _with_drafts(delta: wire.Delta, lookup: Lookup) -> wire.Delta:
    drafted, accepted = lookup.take_counts()
    return msgspec.structs.replace(delta, draft_tokens=drafted, accepted_draft_tokens=accepted) if drafted else delta


def unsent(branch: Branch) -> list[wire.Delta]:
    """Return the messages that ``branch`` kept back, and forget them."""
    if not branch.unsent:
        return []
    kept, branch.unsent = branch.unsent, []
    return wire.prompt_parts(join_deltas(kept))


def aborted(request: GenerateRequest) -> list[wire.Delta]:
    """Return the last messages of a request's open sequences that its caller ends."""
    kept = [delta for branch in request.branches for delta in unsent(branch)]
    open_ones = [(branch, request.offset(branch) - branch.pending) for branch in request.branches]
    return kept + [wire.Delta(request.id, offset, [], branch.index, finish="abort") for branch, offset in open_ones]


def join_deltas(pieces: Sequence[wire.Delta]) -> wire.Delta:
    """Join consecutive deltas of one sequence. Only the first may carry prompt fields, and only the last ``finish``."""
    first, last = pieces[0], pieces[-1]
    if first is last:
        return first
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return msgspec.structs.replace(
        first,
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=join_logprobs(logprobs) if logprobs else None,
        finish=last.finish,
        draft_tokens=sum(piece.draft_tokens for piece in pieces),
        accepted_draft_tokens=sum(piece.accepted_draft_tokens for piece in pieces),
    )
