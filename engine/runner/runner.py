"""One step: the batch's tokens through the model, and from their last hidden rows what each request asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine import wire
from engine.attention.base import AttentionBackend
from engine.core import Batch, Branch, GenerateRequest, Ints, Run, ScoreRequest, as_ints
from engine.models.decoder import Decoder
from engine.sampling import SamplingRow, sample, token_logprobs
from engine.scoring import label_logprobs, next_token_logprobs


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a sequence."""

    branch: Branch
    token: int
    logprobs: wire.Logprobs | None


@dataclass(slots=True)
class Result:
    """What a step brought, in the order of the batch."""

    scored: list[tuple[Branch, list[float]]] = field(default_factory=list)
    """Label log-probabilities of branches that are complete."""
    drawn: list[Drawn] = field(default_factory=list)
    ended: list[Branch] = field(default_factory=list)
    """Sequences that are complete without drawing anything: ``max_tokens`` is reached."""


class Runner:
    """Owns the model and, through the attention backend, the keys and values; knows nothing of queues or slots' owners."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, eos_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._attention = attention
        self._eos = tuple(eos_token_ids)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Result:
        """Compute every run of ``batch``. Prompt log-probabilities are left with their branches."""
        tokens = torch.from_numpy(as_ints(run.tokens for run in batch.runs)).long()
        positions = torch.from_numpy(np.concatenate([_positions(run) for run in batch.runs]))
        hidden = self._decoder(tokens, positions, self._attention.plan(batch.runs))
        result = Result()
        score: list[tuple[int, Branch, list[int]]] = []
        draw: list[tuple[int, Branch, GenerateRequest]] = []
        start = 0
        for run in batch.runs:
            end = start + len(run.tokens)
            request, branch = run.request, run.branch
            if branch is not None and isinstance(request, GenerateRequest):
                self._collect_prompt(hidden[start:end], run, branch, request)
            if branch is not None and run.completes:
                if isinstance(request, ScoreRequest):
                    score.append((end - 1, branch, request.labels))
                elif isinstance(request, GenerateRequest) and request.offset(branch) < request.message.sampling.max_tokens:
                    draw.append((end - 1, branch, request))
                else:
                    result.ended.append(branch)
            start = end
        result.scored = self._score(hidden, score)
        result.drawn = self._draw(hidden, draw)
        return result

    def _score(self, hidden: Tensor, rows: list[tuple[int, Branch, list[int]]]) -> list[tuple[Branch, list[float]]]:
        if not rows:
            return []
        last = hidden[[row for row, _, _ in rows]]
        values = label_logprobs(self._decoder, last, [labels for _, _, labels in rows])
        return [(branch, logprobs) for (_, branch, _), logprobs in zip(rows, values, strict=True)]

    def _draw(self, hidden: Tensor, rows: list[tuple[int, Branch, GenerateRequest]]) -> list[Drawn]:
        if not rows:
            return []
        logits = self._decoder.logits(hidden[[row for row, _, _ in rows]]).float()
        chosen = sample(logits, [self._sampling_row(branch, request) for _, branch, request in rows])
        wanted = [i for i, (_, _, request) in enumerate(rows) if request.message.logprobs is not None]
        logprobs: dict[int, wire.Logprobs] = {}
        if wanted:
            counts = [rows[i][2].message.logprobs or 0 for i in wanted]
            values = token_logprobs(logits[wanted], chosen[wanted], max(counts))
            logprobs = dict(zip(wanted, split_logprobs(values, counts), strict=True))
        drawn = chosen.tolist()
        return [Drawn(branch, drawn[i], logprobs.get(i)) for i, (_, branch, _) in enumerate(rows)]

    def _sampling_row(self, branch: Branch, request: GenerateRequest) -> SamplingRow:
        return SamplingRow(
            params=request.message.sampling,
            index=branch.index,
            position=request.offset(branch),
            prompt_tokens=request.prompt[: len(request.prompt) - request.message.resume_offset],
            output_tokens=request.output(branch),
            eos_ids=self._eos,
        )

    def _collect_prompt(self, hidden: Tensor, run: Run, branch: Branch, request: GenerateRequest) -> None:
        """Row i of a prompt predicts its token i + 1; the last row predicts output."""
        top = request.message.prompt_logprobs
        if top is None or branch.index or len(branch.outputs):
            return
        first = len(run.context) - len(run.tokens)
        following = torch.from_numpy(request.prompt[first + 1 : first + len(run.tokens) + 1]).long()
        if first == 0:
            branch.prompt_logprobs.append(wire.Logprobs([None], [[]], [[]]))
        if not len(following):
            return
        branch.prompt_logprobs += split_logprobs(
            next_token_logprobs(self._decoder, hidden[: len(following)], following, top), [top] * len(following)
        )


def split_logprobs(values: tuple[Tensor, Tensor, Tensor], counts: Sequence[int]) -> list[wire.Logprobs]:
    """One :class:`wire.Logprobs` a row of :func:`token_logprobs`' result, with the row's own number of alternatives."""
    rows = zip(*(part.tolist() for part in values), counts, strict=True)
    return [wire.Logprobs([chosen], [ids[:count]], [top[:count]]) for chosen, ids, top, count in rows]


def join_logprobs(pieces: Sequence[wire.Logprobs]) -> wire.Logprobs:
    """Log-probabilities of consecutive runs of tokens as one."""
    return wire.Logprobs(
        [value for piece in pieces for value in piece.chosen],
        [ids for piece in pieces for ids in piece.top_tokens],
        [values for piece in pieces for values in piece.top],
    )


def _positions(run: Run) -> Ints:
    return np.arange(len(run.context) - len(run.tokens), len(run.context), dtype=np.int64)  # type: ignore[return-value]
