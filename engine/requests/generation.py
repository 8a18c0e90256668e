"""Requests for generations: the request of a caller, and with length guidance the same request on the length model.

A generation gives each of its ``n`` sequences a branch, which starts with the prompt's last token and grows by the drawn tokens.

With forecasts, a generation first waits for a score of the length model at the end of its prompt (:func:`forecast_of`).

A guided generation has an :class:`AuxRequest`: the same tokens on the length model, in slots of that model. Each of its branches
has an aux branch there. The length model computes a drawn token before it is drawn, as one of the candidates, so an aux branch
that keeps up has a slot for one token more than is known. An aux branch that was skipped, or lost its slots, has pending tokens.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import EMPTY, Bits, IntBuffer, Ints, bits_of, ints, words_of
from yardstick_llm.engine.models.lora.slots import LoadedAdapter
from yardstick_llm.engine.requests.core import Branch, GuidedSection, Request, ScoringRequest
from yardstick_llm.engine.requests.units import PROMPT_TOKENS, Written


def effective(message: wire.Generate) -> wire.LengthGuidance | None:
    """The guidance of ``message``; None where it has no effect: with neutral settings."""
    guidance = message.length_guidance
    return None if guidance is None or guidance.neutral else guidance


def section_of(guidance: wire.LengthGuidance | None) -> GuidedSection | None:
    """The section of an output that ``guidance`` is for; None for all of it."""
    if guidance is None or guidance.applies_to == "both":
        return None
    assert guidance.thinking is not None
    return GuidedSection(guidance.thinking, guidance.applies_to)


def closing(guidance: wire.LengthGuidance) -> tuple[int, ...]:
    """The token that ends the guided section, where that is the thinking section."""
    return (guidance.thinking.close,) if guidance.applies_to == "thinking" and guidance.thinking else ()


def top_k(message: wire.Generate) -> int:
    """Largest number of candidates of a draw: the guidance's ``top_k``, or the sampling's where that is smaller."""
    guidance, own = message.length_guidance, message.sampling.top_k
    assert guidance is not None
    return min(guidance.top_k, own) if own > 0 else guidance.top_k


def target(guidance: wire.LengthGuidance, drawn: int, gamma: float, calibration: wire.Calibration | None = None) -> float:
    """Target of a constraint: tokens after the next draw, the end of sequence included. drawn: output tokens so far, of the guided
    section.

    A text of N tokens without its end still has N − drawn − 1 tokens and its end to come after the next draw. With a confidence,
    the result is the length to predict there. For ``about`` it is below 0 in a longer text.
    """
    if guidance.target_value is not None:
        value = min(guidance.target_value, 1 - wire.SMALLEST_VALUE)
        return math.log1p(-value) / math.log(gamma) if value > 0 else 0.0
    if guidance.target_length is None:
        return 0.0
    spent = drawn if guidance.target_length_mode == "total" else 0
    left = float(guidance.target_length - spent)
    left = left if guidance.constraint == "about" else max(left, 0.0)
    return left if guidance.confidence is None or calibration is None else within(calibration, guidance.confidence, gamma, left)


def within(calibration: wire.Calibration, confidence: float, gamma: float, most: float) -> float:
    """Return the largest predicted length whose real length is at most ``most`` with a confidence, by the next stored level; 0 if
    there is none. All in tokens, gamma that of the length model."""
    level = min((name for name in calibration.log_ratio if float(name) >= confidence), key=float)
    bounds = [0.0, *(math.log1p(-min(edge, 1 - wire.SMALLEST_VALUE)) / math.log(gamma) for edge in calibration.edges), math.inf]
    for place, ratio in reversed([*enumerate(calibration.log_ratio[level])]):
        length = min(most * math.exp(-ratio), bounds[place + 1])
        if length >= bounds[place]:
            return length
    return 0.0


USUAL_SPREAD = 1.0
"""Standard deviation of ln(real / predicted length), of a length model without calibration."""
LEAST_SPREAD = 0.1
QUARTILES = 1.349
"""Standard deviations between the quartiles of a normal distribution."""


def spread_of(calibration: wire.Calibration | None) -> tuple[float, float]:
    """Return the median of ln(real / predicted length), and its standard deviation by its quartiles: medians over the bins of the
    value."""
    if calibration is None or not {"0.25", "0.5", "0.75"} <= calibration.log_ratio.keys():
        return 0.0, USUAL_SPREAD
    quartiles = zip(calibration.log_ratio["0.25"], calibration.log_ratio["0.75"], strict=True)
    spread = statistics.median((high - low) / QUARTILES for low, high in quartiles)
    return statistics.median(calibration.log_ratio["0.5"]), max(spread, LEAST_SPREAD)


@dataclass(eq=False, slots=True, kw_only=True)
class AuxRequest(Request):
    """The length model's side of a guided generation."""

    owner: GenerateRequest
    on_lenvm: bool = True

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
    packed_guidance: bytes = b""
    """:func:`engine.runner.lenvm.draws.pack_guidance` of it; empty before the first guided draw."""
    section_ends: tuple[int, ...] = ()
    """Tokens, beside the end of sequence, that end the guided section."""
    candidates: int = 0
    """Largest number of tokens that the length model evaluates for a draw."""
    aux_request: AuxRequest | None = None
    allowed: Bits | None = None
    """``Sampling.allowed_token_ids``."""
    forecast: ScoringRequest | None = None
    """The forecast that it waits for."""
    expected_tokens: float = 0.0
    """Forecast of the output tokens of each sequence; 0 without one."""
    depends_on_output: bool = False
    """Whether penalties or ``bad_words`` make a draw depend on the tokens drawn before it other than through the model."""

    @classmethod
    def of(cls, message: wire.Generate, received: float, adapter: LoadedAdapter | None = None) -> GenerateRequest:
        """A prompt whose own log-probabilities are asked for is computed by its first branch, the others share a prefix."""
        prompt = ints(message.prompt)
        whole = message.prompt_logprobs is not None
        prefix, start = (EMPTY, prompt) if whole else (prompt[:-1], prompt[-1:])
        request = cls(
            id=message.id,
            prefix=prefix,
            caller=message.caller,
            adapter=adapter,
            size=len(prefix) + message.sampling.n * len(start),
            received=received,
            priority=message.priority,
            expires=None if message.deadline is None else received + message.deadline,
            message=message,
            prompt=prompt,
            length_guidance=effective(message),
            allowed=_allowed(message.sampling),
            depends_on_output=_depends_on_output(message.sampling),
        )
        request.branches = [Branch(request, i, IntBuffer(start)) for i in range(message.sampling.n)]
        if message.thinking_limit is not None:
            for branch in request.branches:
                branch.thinking = GuidedSection(message.thinking_limit.thinking, "thinking")
        if request.length_guidance is not None:
            request.candidates = top_k(message)
            request.section_ends = (*message.sampling.stop_token_ids, *closing(request.length_guidance))
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
        aux = self.aux_request
        if self.prefix.size != self.prefix_slots.size or (aux is not None and aux.prefix.size != aux.prefix_slots.size):
            return 0
        return len(self.branches) * (1 + self.candidates)

    def draws(self, branch: Branch) -> bool:
        """Whether a token is drawn behind the newest of ``branch``."""
        return self.offset(branch) < self.message.sampling.max_tokens

    def may_run_ahead(self, branch: Branch) -> bool:
        if self.depends_on_output or branch.constraint is not None or branch.draft.size:
            return False
        if self.length_guidance is not None and self.length_guidance.unit != "tokens":
            return False
        if branch.section is not None:
            self.guided_from(branch)  # reads the known tokens
            if not branch.section.settled:
                return False
        if branch.thinking is not None and self._may_be_forced(branch, self.offset(branch) + 1):
            self.forced_token(branch)  # reads the known tokens
            if not branch.thinking.settled:
                return False
        return self.offset(branch) + 1 < self.message.sampling.max_tokens

    def guided_from(self, branch: Branch) -> int | None:
        """Return the number of output tokens before the section that is guided; None if the next draw of ``branch`` is not guided.
        The newest token must be known, unless the section is settled."""
        if self.length_guidance is None or (branch.thinking is not None and self.forced_token(branch) is not None):
            return None
        if branch.section is None:
            return 0
        if not branch.section.settled:
            branch.section.read(self.output(branch))
        return branch.section.begin

    def in_tokens(
        self, branch: Branch, drawn: int, spellings: Sequence[bytes], measured: Mapping[wire.LengthUnit, float]
    ) -> wire.LengthGuidance:
        """Return the guidance with its target in tokens: those ``drawn``, and what is left. The newest token must be known.
        ``spellings``, ``measured``: see :class:`Written`."""
        guidance = self.length_guidance
        assert guidance is not None
        assert guidance.target_length is not None
        if branch.written is None:
            given = self.prompt[: len(self.prompt) - self.message.resume_offset][-PROMPT_TOKENS:]
            branch.written = Written(guidance.unit, given.tolist(), spellings, measured)
        written = branch.written
        written.add(self.output(branch)[written.read :].tolist(), spellings)
        return msgspec.structs.replace(guidance, target_length=drawn + round(written.left(guidance.target_length)), unit="tokens")

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
        return self.message.resume_offset + branch.tokens.size - branch.given

    def output(self, branch: Branch) -> Ints:
        """Output tokens of ``branch`` so far, those of an earlier attempt included."""
        earlier = self.prompt[len(self.prompt) - self.message.resume_offset :]
        return np.concatenate([earlier, branch.outputs])


def forecast_of(request: GenerateRequest) -> ScoringRequest | None:
    """Return the score that forecasts the length of ``request``, which precedes all other requests of its tenant. None for one that
    an earlier attempt has begun, and for one with images."""
    if request.message.resume_offset or request.images is not None:
        return None
    forecast = ScoringRequest(
        id=request.id,
        prefix=request.prompt[:-1],
        caller=request.caller,
        size=request.prompt.size,
        received=request.received,
        delay=-math.inf,
        on_lenvm=True,
        readout=wire.LengthValue(),
        rows=[[]],
        forecasts=request,
    )
    forecast.branches = [Branch(forecast, 0, IntBuffer(request.prompt[-1:]))]
    return forecast


def expected_tokens(message: wire.Generate, z: float, gamma: float, calibration: wire.Calibration | None) -> float:
    """Return the expected output tokens of a sequence, its end included, within what ``message`` asks for.

    z: raw value at the end of the prompt. gamma, calibration: the length model's. With a calibration, this is the median length.
    0, as without a forecast, if the length model's numbers overflow for the prompt.
    """
    if math.isnan(z):
        return 0.0
    small = math.exp(-abs(z))
    value = 1 / (1 + small) if z >= 0 else small / (1 + small)
    tokens = (max(z, 0.0) + math.log1p(small)) / -math.log(gamma)  # -ln(1 - value) / -ln(gamma), also where value rounds to 1
    if calibration is not None and "0.5" in calibration.log_ratio:
        tokens = max(tokens, 1.0) * math.exp(calibration.log_ratio["0.5"][bisect_right(calibration.edges, value)])
    guidance = effective(message)
    if guidance is not None and guidance.target_length is not None and guidance.applies_to == "both" and guidance.unit == "tokens":
        aim = guidance.target_length + 1.0
        bounds = {"le": (0.0, aim), "within": (0.0, aim), "ge": (aim, math.inf)}
        low, high = bounds.get(guidance.constraint or "", (aim, aim)) if guidance.target_length_mode == "total" else (0.0, math.inf)
        tokens = min(max(tokens, low), high)
    return min(max(tokens, 1.0), float(message.sampling.max_tokens))


def _depends_on_output(sampling: wire.Sampling) -> bool:
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    return penalties != (0.0, 0.0, 1.0) or any(len(word) > 1 for word in sampling.bad_words)


def _allowed(sampling: wire.Sampling) -> Bits | None:
    if sampling.allowed_token_ids is None:
        return None
    return bits_of(sampling.allowed_token_ids, words_of(max(sampling.allowed_token_ids) + 1))
