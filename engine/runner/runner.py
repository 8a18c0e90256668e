"""One step: the batch's tokens through the model, and from their last hidden rows what each request asked for. Where there is a
length model, what the step has for it goes through :mod:`engine.lenvm.guided_draws`, behind the model in the same queue.

:meth:`Runner.launch` queues the work on the device and returns; :meth:`PendingStep.wait` blocks until the results are on the host.
Nothing between the two waits for the device. On a CPU the work is done when ``launch`` returns, and ``wait`` only unpacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import wire
from engine.attention.base import AttentionBackend
from engine.core import (
    PENDING,
    Batch,
    Branch,
    CandidatePass,
    ExtendSegment,
    GenerateRequest,
    LabelScoreRequest,
    ValueRequest,
)
from engine.device.sampling import SamplingBatch, SamplingRow, draw, prepare, token_logprobs
from engine.device.transfer import Download, Upload
from engine.ints import EMPTY
from engine.lenvm.guided_draws import GuidedDraws, GuidedRow, LenVMRunner
from engine.lenvm.report import guided_logprobs, top_candidates
from engine.models.decoder import Decoder
from engine.runner.graphs import StepGraphs
from engine.runner.scoring import label_logprobs, label_table, next_token_logprobs

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a sequence."""

    branch: Branch
    token: int
    logprobs: wire.Logprobs | None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of consecutive tokens of a prompt."""

    branch: Branch
    start: int
    """Place of the first of them in the prompt."""
    logprobs: list[wire.Logprobs]


@dataclass(slots=True)
class Tally:
    """What guidance cost and did."""

    tokens: int = 0
    """Computed by the length model, candidates included."""
    guided: int = 0
    """Draws for which the length model was asked."""
    alone: int = 0
    """Draws of guided requests that were decided without it."""


@dataclass(slots=True)
class Result:
    """What a step brought, in the order of the batch; guided draws come after the others."""

    prompts: list[PromptPart] = field(default_factory=list)
    scored: list[tuple[Branch, list[float]]] = field(default_factory=list)
    """Label log-probabilities of branches that are complete."""
    valued: list[tuple[Branch, float]] = field(default_factory=list)
    """Raw values of branches that are complete."""
    drawn: list[Drawn] = field(default_factory=list)
    ended: list[Branch] = field(default_factory=list)
    """Sequences that are complete without drawing anything: ``max_tokens`` is 0."""
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class OutputPlan:
    """Which rows of a step are asked for what. Rows are places in the batch's tokens."""

    scores: list[tuple[int, Branch, list[int]]] = field(default_factory=list)
    draws: list[tuple[int, Branch, GenerateRequest]] = field(default_factory=list)
    guided: list[tuple[int, Branch, GenerateRequest]] = field(default_factory=list)
    """Draws with guidance, not among the others."""
    values: list[tuple[int, Branch]] = field(default_factory=list)
    """(place in the batch's runs on the length model, branch)"""
    ended: list[Branch] = field(default_factory=list)
    prompts: list[tuple[int, int, ExtendSegment, GenerateRequest]] = field(default_factory=list)
    """(first row, place of its token in the prompt, run, request)"""

    @classmethod
    def of(cls, batch: Batch) -> OutputPlan:
        """Read ``batch`` as it is now; branches change when the next step is scheduled."""
        asked, end = cls(), 0
        for segment in batch.segments:
            first, end = end, end + len(segment.tokens)
            request, branch = segment.request, segment.branch
            if branch is None:
                continue
            if isinstance(request, GenerateRequest) and _wants_prompt(request, branch):
                asked.prompts.append((first, len(segment.context) - len(segment.tokens), segment, request))
            if not segment.completes:
                continue
            if isinstance(request, LabelScoreRequest):
                asked.scores.append((end - 1, branch, request.labels))
            elif isinstance(request, GenerateRequest) and request.draws(branch):
                (asked.guided if branch in batch.candidate_passes else asked.draws).append((end - 1, branch, request))
            else:
                asked.ended.append(branch)
        for place, segment in enumerate(batch.lenvm_segments):
            if segment.branch is not None and isinstance(segment.request, ValueRequest) and segment.completes:
                asked.values.append((place, segment.branch))
        return asked

    @property
    def all_draws(self) -> list[tuple[int, Branch, GenerateRequest]]:
        """Those without guidance first."""
        return self.draws + self.guided

    @property
    def branches(self) -> list[Branch]:
        """Those whose result is on its way."""
        drawing, valued = [branch for _, branch, _ in self.all_draws], [branch for _, branch in self.values]
        return [branch for _, branch, _ in self.scores] + drawing + valued + self.ended


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step on its way."""

    batch: Batch
    asked: OutputPlan
    wanted: list[int]
    """Draws whose log-probabilities are asked for."""
    guided_wanted: list[int]
    """The same of guided draws."""
    skipped: list[CandidatePass]
    """Not computed, because the draw was decided without the length model."""
    download: Download

    def wait(self) -> Result:
        """The results. Raises what the device raised."""
        tensors = iter(self.download.wait())
        result = Result(ended=self.asked.ended)
        if self.asked.scores:
            rows = next(tensors).tolist()
            result.scored = [(branch, row[: len(labels)]) for (_, branch, labels), row in zip(self.asked.scores, rows, strict=True)]
        if self.asked.draws:
            tokens = next(tensors).tolist()
            logprobs: dict[int, wire.Logprobs] = {}
            if self.wanted:
                counts = [self.asked.draws[place][2].message.logprobs or 0 for place in self.wanted]
                logprobs = dict(zip(self.wanted, _split_logprobs(next(tensors), next(tensors), next(tensors), counts), strict=True))
            draws = enumerate(zip(self.asked.draws, tokens, strict=True))
            result.drawn = [Drawn(branch, token, logprobs.get(place)) for place, ((_, branch, _), token) in draws]
        for _, start, segment, request in self.asked.prompts:
            assert segment.branch is not None
            pieces = [wire.Logprobs([None], [[]], [[]])] if start == 0 else []
            if _following(start, segment, request).size:
                values = next(tensors), next(tensors), next(tensors)
                pieces += _split_logprobs(*values, [request.message.prompt_logprobs or 0] * len(values[0]))
            result.prompts.append(PromptPart(segment.branch, start + (start > 0), pieces))
        if self.asked.guided:
            self._read_guided(result, [next(tensors) for _ in range(7 if self.guided_wanted else 3)])
        if self.asked.values:
            raw = next(tensors).tolist()
            result.valued = [(branch, z) for (_, branch), z in zip(self.asked.values, raw, strict=True)]
        result.tally.tokens += sum(len(segment.tokens) for segment in self.batch.lenvm_segments)
        return result

    def _read_guided(self, result: Result, tensors: list[Tensor]) -> None:
        tokens, undecided, counts = (tensor.tolist() for tensor in tensors[:3])
        logprobs: dict[int, wire.Logprobs] = {}
        if self.guided_wanted:
            messages = [self.asked.guided[place][2].message for place in self.guided_wanted]
            counted = [counts[place] for place in self.guided_wanted]
            logprobs = dict(zip(self.guided_wanted, guided_logprobs(tensors[3:], counted, messages), strict=True))
        skipped = {candidate_pass.branch for candidate_pass in self.skipped}
        for place, (_, branch, _) in enumerate(self.asked.guided):
            result.drawn.append(Drawn(branch, tokens[place], logprobs.get(place)))
            candidate_pass = self.batch.candidate_passes[branch]
            if candidate_pass.branch not in skipped:
                pending = len(candidate_pass.pending.tokens) if candidate_pass.pending else 0
                result.tally.tokens += pending + counts[place]
        result.tally.guided += sum(undecided)
        result.tally.alone += len(undecided) - sum(undecided)


class Runner:
    """Owns the model and, through the attention backend, the keys and values; knows nothing of queues or slots' owners."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        eos_token_ids: Sequence[int],
        graphs: StepGraphs | None = None,
        lenvm: LenVMRunner | None = None,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._graphs = graphs
        self._eos = tuple(eos_token_ids)
        self._lenvm = lenvm
        self._device = attention.kv.keys.device
        self._drawn = torch.empty(0, dtype=torch.int64, device=self._device)
        """Tokens of the step before, on the device."""
        self._drawn_row: dict[Branch, int] = {}

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue every run of ``batch`` on the device."""
        asked = OutputPlan.of(batch)
        wanted, guided_wanted = (_with_logprobs(draws) for draws in (asked.draws, asked.guided))
        tensors: list[Tensor] = []
        drawn: list[Tensor] = []
        logits = None
        if batch.segments:
            tensors, drawn, logits = self._compute(batch, asked, wanted)
        skipped: list[CandidatePass] = []
        valued = None
        places = [place for place, _ in asked.values]
        if logits is not None:
            steered, valued, skipped = self._steer(logits, batch, asked, places)
            drawn.append(steered.tokens)
            tensors += [steered.tokens, steered.undecided, steered.counts]
            if guided_wanted:
                tensors += self._report(steered, asked, guided_wanted)
        elif batch.lenvm_segments:
            assert self._lenvm is not None
            valued = self._lenvm.compute(batch.lenvm_segments, places, self._resolve)
        if valued is not None:
            tensors.append(valued)
        if drawn:
            self._drawn = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        self._drawn_row = {branch: place for place, (_, branch, _) in enumerate(asked.all_draws)}
        return PendingStep(batch, asked, wanted, guided_wanted, skipped, Download(tensors))

    def _compute(self, batch: Batch, asked: OutputPlan, wanted: list[int]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Everything without guidance: the results, the tokens drawn, if any, and the logits of guided draws, if any."""
        upload = Upload()
        upload.add(np.concatenate([segment.tokens for segment in batch.segments]))
        upload.add(np.concatenate([segment.positions for segment in batch.segments]))
        for rows in self._pending(batch.segments):
            upload.add(rows)
        upload.add([row for row, *_ in asked.scores])
        upload.add([row for row, *_ in asked.all_draws])
        upload.add(label_table([labels for *_, labels in asked.scores]))
        upload.add(wanted)
        prompts = [upload.add(_following(start, segment, request)) for _, start, segment, request in asked.prompts]
        sent = upload.send(self._device)
        tokens, positions, unknown, source, score_rows, draw_rows, labels, wanted_rows = sent[:8]
        tokens = self._fill(tokens, unknown, source)
        sampling = prepare([self._sampling_row(branch, request) for _, branch, request in asked.draws], self._device)
        hidden = self._forward(tokens, positions, batch.segments)
        tensors: list[Tensor] = []
        drawn: list[Tensor] = []
        guided: Tensor | None = None
        if asked.scores:
            tensors.append(label_logprobs(self._decoder, hidden.index_select(0, score_rows), labels.view(len(score_rows), -1)))
        if asked.all_draws:
            logits = self._decoder.logits(hidden.index_select(0, draw_rows)).float()
            if asked.guided:
                logits, guided = logits[: len(asked.draws)], logits[len(asked.draws) :]
            if asked.draws:
                tensors += self._draw(logits, sampling, asked, wanted, wanted_rows)
                drawn.append(tensors[1 if asked.scores else 0])
        for (first, _, _, request), place in zip(asked.prompts, prompts, strict=True):
            following, top = sent[place], request.message.prompt_logprobs or 0
            if len(following):
                tensors += next_token_logprobs(self._decoder, hidden[first : first + len(following)], following, top)
        return tensors, drawn, guided

    @property
    def replayed(self) -> int:
        """Steps so far whose launches were replayed."""
        return 0 if self._graphs is None else self._graphs.replayed

    @property
    def replayed_passes(self) -> int:
        """The same of the length model's passes."""
        return 0 if self._lenvm is None else self._lenvm.replayed

    def _forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[ExtendSegment]) -> Tensor:
        """[tokens, hidden], through a graph where one fits."""
        hidden = None if self._graphs is None else self._graphs.forward(tokens, positions, segments)
        return self._decoder(tokens, positions, self._attention.plan(segments)) if hidden is None else hidden

    def _pending(self, segments: Sequence[ExtendSegment]) -> tuple[Longs, Longs]:
        """Rows whose token the step before is drawing, and its row there."""
        ends = np.cumsum([len(segment.tokens) for segment in segments])
        lasts = np.array([segment.tokens[-1] for segment in segments])
        rows = [(ends[at] - 1, self._drawn_row[_on_model(segments[at])]) for at in np.flatnonzero(lasts == PENDING).tolist()]
        table = np.array(rows, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def _fill(self, tokens: Tensor, unknown: Tensor, source: Tensor) -> Tensor:
        """``tokens`` with those of the step before in the rows ``unknown``."""
        return tokens.index_copy(0, unknown, self._drawn.index_select(0, source)) if len(unknown) else tokens

    def _resolve(self, tokens: Tensor, segments: Sequence[ExtendSegment]) -> Tensor:
        """Tokens of ``runs``, on the device, with those that the step before is drawing."""
        unknown, source = self._pending(segments)
        if not len(unknown):
            return tokens
        upload = Upload()
        upload.add(unknown)
        upload.add(source)
        return self._fill(tokens, *upload.send(self._device))

    def _draw(
        self, logits: Tensor, sampling: SamplingBatch, asked: OutputPlan, wanted: list[int], wanted_rows: Tensor
    ) -> list[Tensor]:
        """The next token of each row, and what log-probabilities are asked for."""
        drawn = draw(logits, sampling)
        if not wanted:
            return [drawn]
        top = max(asked.draws[place][2].message.logprobs or 0 for place in wanted)
        chosen = drawn.index_select(0, wanted_rows)
        return [drawn, *token_logprobs(logits.index_select(0, wanted_rows), chosen, top)]

    def _steer(
        self, logits: Tensor, batch: Batch, asked: OutputPlan, places: list[int]
    ) -> tuple[GuidedDraws, Tensor | None, list[CandidatePass]]:
        """The guided draws, as :meth:`Guide.steer` returns them."""
        assert self._lenvm is not None
        rows = []
        for _, branch, request in asked.guided:
            assert request.length_guidance is not None
            sampling = self._sampling_row(branch, request)
            rows.append(GuidedRow(sampling, request.length_guidance, request.candidates, batch.candidate_passes[branch]))
        return self._lenvm.draw_guided(logits, rows, batch.lenvm_segments, places, self._resolve)

    def _report(self, steered: GuidedDraws, asked: OutputPlan, wanted: list[int]) -> list[Tensor]:
        """What log-probabilities are asked for of guided draws."""
        upload = Upload()
        upload.add(wanted)
        (rows,) = upload.send(self._device)
        return top_candidates(steered, rows, max(asked.guided[place][2].message.logprobs or 0 for place in wanted))

    def _sampling_row(self, branch: Branch, request: GenerateRequest) -> SamplingRow:
        return SamplingRow(
            params=request.message.sampling,
            index=request.message.index + branch.index,
            position=request.offset(branch),
            prompt_tokens=request.prompt[: len(request.prompt) - request.message.resume_offset],
            output_tokens=request.output(branch) if request.penalised else EMPTY,
            eos_ids=self._eos,
        )


def join_logprobs(pieces: Sequence[wire.Logprobs]) -> wire.Logprobs:
    """Log-probabilities of consecutive tokens as one."""
    return wire.Logprobs(
        [value for piece in pieces for value in piece.chosen],
        [ids for piece in pieces for ids in piece.top_tokens],
        [values for piece in pieces for values in piece.top],
        [values for piece in pieces for values in piece.values],
    )


def _split_logprobs(chosen: Tensor, ids: Tensor, top: Tensor, counts: Sequence[int]) -> list[wire.Logprobs]:
    """One :class:`wire.Logprobs` a row, with the row's own number of alternatives."""
    rows = zip(chosen.tolist(), ids.tolist(), top.tolist(), counts, strict=True)
    return [wire.Logprobs([value], [row_ids[:count]], [row_top[:count]]) for value, row_ids, row_top, count in rows]


def _wants_prompt(request: GenerateRequest, branch: Branch) -> bool:
    return request.message.prompt_logprobs is not None and branch.index == 0 and not len(branch.outputs)


def _following(start: int, segment: ExtendSegment, request: GenerateRequest) -> Longs:
    """The prompt's tokens that the rows of ``run`` predict: row i predicts token i + 1, the last row of a prompt output."""
    return request.prompt[start + 1 : start + len(segment.tokens) + 1].astype(np.int64)


def _with_logprobs(draws: Sequence[tuple[int, Branch, GenerateRequest]]) -> list[int]:
    """Those whose log-probabilities are asked for."""
    return [place for place, (*_, request) in enumerate(draws) if request.message.logprobs is not None]


def _on_model(segment: ExtendSegment) -> Branch:
    """The branch that draws what ``run`` computes, on whichever model."""
    branch = segment.branch.main_branch if segment.branch is not None and segment.request.on_lenvm else segment.branch
    assert branch is not None
    return branch
