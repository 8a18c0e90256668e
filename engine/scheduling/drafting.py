"""Adds drafts to sequences that continue by one token (:mod:`engine.requests.prompt_lookup`).

A draft is computed behind the newest token, in the same segment and in slots of the branch. It takes no room from other work: a
step has drafts only up to :attr:`LookupSettings.rows` decoding rows, up to which a row costs little beside the weights, and a draft
takes slots only if no request must be preempted for them. Tokens of a draft are charged to the tenant like all tokens.

Where steps run ahead, a draft needs the newest token on the host. A sequence whose last known tokens occurred before therefore
waits for the draw that is pending; all others run ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from yardstick_llm.engine.ints import EMPTY
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment
from yardstick_llm.engine.requests.core import Branch, Request
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.requests.prompt_lookup import Lookup, PromptIndex
from yardstick_llm.engine.scheduling.allocation import Allocator
from yardstick_llm.engine.scheduling.fair_queue import Flow
from yardstick_llm.engine.wire import DraftOptions


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """Settings of prompt lookup."""

    rows: int
    """Decoding rows of a step up to which it has drafts, drafts included."""
    default: DraftOptions | None = None
    """Used for requests without ``prompt_lookup``; None: these have no drafts."""
    eos_token_ids: tuple[int, ...] = ()


class Drafting:
    """Chooses the drafts of a step, and frees the slots of rejected tokens."""

    def __init__(self, allocator: Allocator, settings: LookupSettings) -> None:
        self._allocator = allocator
        self._settings = settings
        self._room = 0

    def prepare(self, request: Request) -> None:
        """Give a new request what its drafts need, if it may have any.

        Grammars, length guidance and limits of thinking prepare each draw with the tokens before it, so they have none.
        """
        if not isinstance(request, GenerateRequest):
            return
        message, sampling = request.message, request.message.sampling
        wanted = message.prompt_lookup or self._settings.default
        if (
            wanted is None
            or not wanted.max_tokens
            or message.grammar
            or request.aux_request is not None
            or message.thinking_limit is not None
        ):
            return
        index = PromptIndex(request.prompt, wanted.ngram)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._settings.eos_token_ids)}
        for branch in request.branches:
            branch.lookup = Lookup(index, wanted.max_tokens, sampling.max_tokens - message.resume_offset, ends)

    def begin(self, decoding: int) -> None:
        """Begin a step with ``decoding`` rows of sequences."""
        self._room = max(0, self._settings.rows - decoding)

    def wants(self, branch: Branch) -> bool:
        """Whether ``branch``, which continues by one token, has a draft for this step."""
        return branch.lookup is not None and self._room > 0 and not branch.pending_steps and self._limit(branch, branch.lookup) > 0

    def holds(self, request: Request) -> bool:
        """Whether a request that could run ahead waits for the pending draw of its sequence."""
        if self._room <= 0 or not isinstance(request, GenerateRequest) or len(request.branches) != 1:
            return False
        branch = request.branches[0]
        lookup = branch.lookup
        if lookup is None or not branch.pending_steps or branch.pending or branch.draft.size:
            return False
        return request.offset(branch) + 2 < request.message.sampling.max_tokens and (
            lookup.matches(branch.outputs) and lookup.charge_wait()
        )

    def extend(self, batch: Batch, flow: Flow, first: int) -> None:
        """Add drafts to the segments of the step from place ``first``, all of one request of ``flow``."""
        for place in range(first, len(batch.segments)):
            segment = batch.segments[place]
            branch = segment.branch
            if branch is not None and branch.lookup is not None and segment.completes and not branch.pending_steps:
                self._add(batch, flow, place, branch, branch.lookup)

    def settle(self, branch: Branch, accepted: int) -> None:
        """Keep the first ``accepted`` tokens of the draft that a step has computed, which are not in ``branch.tokens`` yet, and
        free the slots of the others. A branch that was preempted since has no slots."""
        drafted, branch.draft = branch.draft.size, EMPTY
        if branch.context.size:
            rejected = branch.context.drop(drafted - accepted)
            self._allocator.kv_pool(branch.request).pool.free(rejected)
            self._allocator.count_taken(branch.request, -rejected.size, branch)
        assert branch.lookup is not None
        branch.lookup.check(drafted, accepted)

    def _limit(self, branch: Branch, lookup: Lookup) -> int:
        """Length of the draft of ``branch``."""
        return lookup.draft(branch.outputs, self._most(branch)).size

    def _most(self, branch: Branch) -> int:
        """Draft tokens that ``branch`` may have: one token is drawn behind them, within ``max_tokens``."""
        request = branch.request
        assert isinstance(request, GenerateRequest)
        return min(self._room, request.message.sampling.max_tokens - request.offset(branch) - 1)

    def _add(self, batch: Batch, flow: Flow, place: int, branch: Branch, lookup: Lookup) -> None:
        draft, request, segment = lookup.draft(branch.outputs, self._most(branch)), branch.request, batch.segments[place]
        count = draft.size
        if not count or not self._allocator.has_room(request.on_lenvm, count):
            return
        branch.add_slots(self._allocator.allocate(count, request, branch, may_preempt=False))
        branch.draft = draft
        self._allocator.count_taken(request, count, branch)
        request.computed_tokens += count
        batch.segments[place] = ExtendSegment(request, branch, np.concatenate([segment.tokens, draft]), branch.context.view)
        batch.tokens += count
        batch.load += count
        flow.spent += count
        self._room -= count
