"""Requests and their branches. :mod:`engine.batch` has the batch of one step.

A request is one prefix and its branches. Tokens of the prefix live in the prefix cache, where all requests may share them; tokens
of a branch live in slots of its own. Scoring gives each item a branch. A generation gives each of its ``n`` sequences a branch,
which starts with the prompt's last token and grows by the drawn tokens. So the remaining work of a request is always the tokens
that have no slot yet, and a preempted branch is a branch without slots.

A guided generation has an :class:`AuxRequest`: the same tokens on the length model, in slots of that model. Each of its branches
has an aux branch there. The length model computes a drawn token before it is drawn, as one of the candidates, so an aux branch
that keeps up has a slot for one token more than is known. An aux branch that was skipped, or lost its slots, has pending tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from engine import wire
from engine.ints import EMPTY, IntBuffer, Ints
from engine.length_guidance import GuidedSection, effective, section_of, top_k
from engine.structured.bits import bits_of, words_of

if TYPE_CHECKING:
    from engine.item_group import ItemGroup
    from engine.kvcache.prefix_cache import Node
    from engine.structured.bits import Bits
    from engine.structured.constraint import Constraint

NOBODY = wire.Caller()

PENDING = -1
"""Stands for a token that a step in flight is drawing: the next step takes it from device memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialRow:
    """Values that a readout has read for the first tokens of a branch, which several steps compute."""

    tokens: int
    values: npt.NDArray[np.float32]
    """Their meaning and shape are those of the readout."""


@dataclass(eq=False, slots=True)
class Branch:
    """New tokens on top of a request's prefix."""

    request: Request
    index: int
    tokens: IntBuffer
    slots: IntBuffer = field(default_factory=IntBuffer)
    """Slots of the tokens computed so far. This branch owns them."""
    given: int = 0
    """Number of tokens that came with the request; the tokens behind them are output."""
    prompt_logprobs: list[wire.Logprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens so far, while the prompt is computed in chunks."""
    partial: PartialRow | None = None
    """Set by readouts that read more tokens than the last."""
    unsent: list[wire.Delta] = field(default_factory=list)
    """Deltas that wait until they have as many tokens as the caller wants in one message."""
    pending_steps: int = 0
    """Pending steps that compute the branch's last token."""
    done: bool = False
    constraint: Constraint | None = None
    """The state of the grammar that the output follows; None without a grammar."""
    section: GuidedSection | None = None
    """Section of the output whose draws are guided; None for all of it."""
    thinking: GuidedSection | None = None
    """The thinking section, if its length has a limit."""
    aux_branch: Branch | None = None
    """Branch of this sequence on the length model; None if the sequence is not guided. Both branches share one token buffer."""
    main_branch: Branch | None = None
    """On a branch of an :class:`AuxRequest`: the branch on the main model."""

    def __post_init__(self) -> None:
        self.given = len(self.tokens)

    @property
    def pending(self) -> bool:
        """Whether a pending step draws the newest token."""
        return len(self.tokens) > 0 and int(self.tokens.view[-1]) == PENDING

    def draw(self, token: int) -> None:
        """Take the token that a settled step has drawn."""
        if self.pending:
            self.tokens.view[-1] = token
        else:
            self.tokens.extend([token])

    @property
    def may_draw(self) -> bool:
        """Whether it is known which tokens can be drawn next."""
        return self.constraint is None or self.constraint.ready

    @property
    def remaining(self) -> int:
        """Tokens without a slot."""
        return len(self.tokens) - len(self.slots)

    @property
    def outputs(self) -> Ints:
        """Tokens drawn so far, in this attempt."""
        return self.tokens.view[self.given :]

    def partial_before(self, start: int) -> npt.NDArray[np.float32] | None:
        """Return the values for the tokens before ``start``; None if ``start`` is 0. A preempted branch begins again at 0, and the
        new values replace the earlier ones.
        """
        if start == 0:
            return None
        assert self.partial is not None
        assert self.partial.tokens == start
        return self.partial.values


_arrivals = itertools.count()


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One prefix and its branches, and their progress."""

    id: str
    prefix: Ints
    branches: list[Branch] = field(default_factory=list)
    """Not finished yet, in order."""
    caller: wire.Caller = NOBODY
    size: int = 0
    """Tokens that came with it, each shared one once."""
    priority: int = 0
    received: float = 0.0
    """Time of receipt on the monotonic clock, seconds."""
    first_computed: float | None = None
    """Time of the first step that computes a part of it, on the same clock."""
    expires: float | None = None
    """Deadline on the monotonic clock."""
    arrival: int = field(default_factory=lambda: next(_arrivals))
    node: Node | None = None
    """Node of the prefix cache up to which this request holds its prefix; None while the request waits."""
    prefix_slots: IntBuffer = field(default_factory=IntBuffer)
    cached_tokens: int = 0
    computed_tokens: int = 0
    begun: bool = False
    step: int = 0
    """Number of the last step that computes a part of it; 0 before the first."""
    taken: int = 0
    """Slots that the request took from the pool and holds: those of its branches, and of prefix tokens that it computed
    itself.
    """

    @property
    def kind(self) -> type[msgspec.Struct] | None:
        """Type of the message that asks for the request's output: a :data:`engine.wire.Readout`, or :class:`engine.wire.Generate`.
        None for a request without outputs of its own."""
        return None

    @property
    def is_item(self) -> bool:
        """Whether its prefix is an item, which later requests probably score too. Such a request ends after few steps and takes no
        running place."""
        return False

    @property
    def on_lenvm(self) -> bool:
        """Whether the length model computes this request, in the length model's slots."""
        return False

    @property
    def with_aux(self) -> tuple[Request, ...]:
        """This request and, where it is guided, its :class:`AuxRequest`."""
        return (self,)

    @property
    def main_request(self) -> Request:
        """The request that came from the caller: this one, or the owner of an :class:`AuxRequest`."""
        return self

    @property
    def prefix_remaining(self) -> int:
        """Prefix tokens without a slot."""
        return len(self.prefix) - len(self.prefix_slots)

    @property
    def salt(self) -> str | None:
        """Tree of the prefix cache that the request uses; None: a private tree of which nothing is kept."""
        return self.caller.cache_salt if self.caller.keep_prefix else None

    @property
    def queue_seconds(self) -> float:
        """Time from receipt to the first step that computes a part of it; 0 before that step."""
        return 0.0 if self.first_computed is None else self.first_computed - self.received

    def may_run_ahead(self, branch: Branch) -> bool:  # noqa: ARG002
        """Whether the step after the one that draws the next token of ``branch`` may begin before that token is known."""
        return False

    @property
    def reserve(self) -> int:
        """Tokens of the next step that must be kept free for this request's decoding branches."""
        return 0

    @property
    def droppable(self) -> bool:
        """Whether ending it once its deadline has passed saves work and takes nothing from its caller."""
        return not self.begun


@dataclass(eq=False, slots=True, kw_only=True)
class ScoreRequest(Request):
    """A request with one result at the end of each branch and no draws."""

    readout: wire.Readout
    rows: list[list[float]]
    """[branch]; empty until that branch is done."""
    targets: list[Ints] = field(default_factory=list)
    """[branch] tokens of the message's branch, where the readout is :class:`engine.wire.Likelihood`: row i of the request's branch
    predicts target i. Empty for other readouts."""
    group: ItemGroup | None = None
    """Set on the request of one item of :class:`engine.wire.ScoreItems`."""
    index: int = 0
    """Place of this item in its group."""

    @classmethod
    def of(cls, message: wire.Score, now: float, *, mean_pooling: bool = False) -> ScoreRequest:
        """``now``: the monotonic clock, seconds; ``mean_pooling``: whether an embedding is the mean over the whole prompt.

        For likelihoods, each branch starts with the last token of the message's prefix, whose row predicts the first target. It
        lacks the last token of the message's branch, whose row predicts no target. For means over the prompt, each branch has the
        whole prompt, because the prefix cache keeps no hidden states.
        """
        prefix, given, targets = message.prefix, message.branches, []
        if isinstance(message.readout, wire.Likelihood):
            targets = [np.array(tokens, np.int32) for tokens in given]
            prefix, given = prefix[:-1], [[prefix[-1], *tokens[:-1]] for tokens in given]
        elif isinstance(message.readout, wire.Embedding) and mean_pooling and prefix:
            prefix, given = [], [message.prefix + tokens for tokens in given]
        request = cls(
            id=message.id,
            prefix=np.array(prefix, np.int32),
            caller=message.caller,
            size=len(prefix) + sum(map(len, given)),
            received=now,
            priority=message.priority,
            expires=None if message.deadline is None else now + message.deadline,
            readout=message.readout,
            rows=[[] for _ in given],
            targets=targets,
        )
        request.branches = [Branch(request, i, IntBuffer(tokens)) for i, tokens in enumerate(given)]
        return request

    @property
    def kind(self) -> type[msgspec.Struct]:
        return type(self.readout)

    @property
    def is_item(self) -> bool:
        return self.group is not None

    @property
    def on_lenvm(self) -> bool:
        return isinstance(self.readout, wire.LengthValue)

    @property
    def droppable(self) -> bool:
        return any(branch.remaining for branch in self.branches)


@dataclass(eq=False, slots=True, kw_only=True)
class AuxRequest(Request):
    """The length model's side of a guided generation."""

    owner: GenerateRequest

    @property
    def on_lenvm(self) -> bool:
        return True

    @property
    def main_request(self) -> Request:
        return self.owner


@dataclass(eq=False, slots=True, kw_only=True)
class GenerateRequest(Request):
    """``n`` continuations of one prompt."""

    message: wire.Generate
    prompt: Ints
    length_guidance: wire.LengthGuidance | None = None
    """None also where the message's guidance has no effect."""
    candidates: int = 0
    """Largest number of tokens that the length model evaluates for a draw."""
    aux_request: AuxRequest | None = None
    allowed: Bits | None = None
    """``Sampling.allowed_token_ids``."""

    @classmethod
    def of(cls, message: wire.Generate, now: float) -> GenerateRequest:
        """A prompt whose own log-probabilities are asked for is computed by its first branch, the others share a prefix."""
        prompt = np.array(message.prompt, np.int32)
        whole = message.prompt_logprobs is not None
        prefix, start = (EMPTY, prompt) if whole else (prompt[:-1], prompt[-1:])
        request = cls(
            id=message.id,
            prefix=prefix,
            caller=message.caller,
            size=len(prefix) + message.sampling.n * len(start),
            received=now,
            priority=message.priority,
            expires=None if message.deadline is None else now + message.deadline,
            message=message,
            prompt=prompt,
            length_guidance=effective(message),
            allowed=_allowed(message.sampling),
        )
        request.branches = [Branch(request, i, IntBuffer(start)) for i in range(message.sampling.n)]
        if message.thinking_limit is not None:
            for branch in request.branches:
                branch.thinking = GuidedSection(message.thinking_limit.thinking, "thinking")
        if request.length_guidance is not None:
            request.candidates = top_k(message)
            request.aux_request = AuxRequest(id=message.id, prefix=request.prefix, caller=message.caller, owner=request)
            for branch in request.branches:
                branch.section = section_of(request.length_guidance)
                branch.aux_branch = Branch(request.aux_request, branch.index, branch.tokens, main_branch=branch)
                request.aux_request.branches.append(branch.aux_branch)
        return request

    @property
    def kind(self) -> type[msgspec.Struct]:
        return wire.Generate

    @property
    def with_aux(self) -> tuple[Request, ...]:
        return (self,) if self.aux_request is None else (self, self.aux_request)

    @property
    def reserve(self) -> int:
        if self.prefix_remaining or (self.aux_request is not None and self.aux_request.prefix_remaining):
            return 0
        return len(self.branches) * (1 + self.candidates)

    def draws(self, branch: Branch) -> bool:
        """Whether a token is drawn behind the newest of ``branch``."""
        return self.offset(branch) < self.message.sampling.max_tokens

    @property
    def depends_on_output(self) -> bool:
        """Whether penalties or ``bad_words`` make a draw depend on the tokens drawn before it other than through the model."""
        sampling = self.message.sampling
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
        return penalties != (0.0, 0.0, 1.0) or any(len(word) > 1 for word in sampling.bad_words)

    def may_run_ahead(self, branch: Branch) -> bool:
        if self.depends_on_output or self.message.grammar:
            return False
        if branch.section is not None:
            self.guided_from(branch)  # reads the known tokens
            if not branch.section.settled:
                return False
        if self._may_be_forced(branch, self.offset(branch) + 1):
            self.forced_token(branch)  # reads the known tokens
            if branch.thinking is not None and not branch.thinking.settled:
                return False
        return self.offset(branch) + 1 < self.message.sampling.max_tokens

    def guided_from(self, branch: Branch) -> int | None:
        """Return the number of output tokens before the section that is guided; None if the next draw of ``branch`` is not guided.
        The newest token must be known, unless the section is settled."""
        if self.length_guidance is None or self.forced_token(branch) is not None:
            return None
        if branch.section is None:
            return 0
        if not branch.section.settled:
            branch.section.read(self.output(branch))
        return branch.section.begin

    def forced_token(self, branch: Branch) -> int | None:
        """Return the token that ends the thinking section, if the next draw of ``branch`` must be it. A branch that runs ahead
        is below the limit."""
        if branch.thinking is None or branch.pending or not self._may_be_forced(branch, self.offset(branch)):
            return None
        branch.thinking.read(self.output(branch))
        limit = self.message.thinking_limit
        assert limit is not None
        return None if branch.thinking.begin is None else limit.thinking.close

    def _may_be_forced(self, branch: Branch, position: int) -> bool:
        """Whether the limit of thinking is reached at an output position, if the section is still open there."""
        limit = self.message.thinking_limit
        if limit is None or branch.thinking is None or branch.thinking.settled:
            return False
        return position - (limit.thinking.open is not None) >= limit.tokens

    def offset(self, branch: Branch) -> int:
        """Output tokens of ``branch`` so far, those of an earlier attempt included."""
        return self.message.resume_offset + len(branch.outputs)

    def output(self, branch: Branch) -> Ints:
        """Output tokens of ``branch`` so far, those of an earlier attempt included."""
        earlier = self.prompt[len(self.prompt) - self.message.resume_offset :]
        return np.concatenate([earlier, branch.outputs])


def _allowed(sampling: wire.Sampling) -> Bits | None:
    if sampling.allowed_token_ids is None:
        return None
    return bits_of(sampling.allowed_token_ids, words_of(max(sampling.allowed_token_ids) + 1))
