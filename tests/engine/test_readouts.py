"""Which outputs a step has, and that each readout writes only its own results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import wire
from engine.batch import Batch, ExtendSegment
from engine.device.transfer import Download, Upload
from engine.models.loader import load_model
from engine.readouts.base import Readout, ReadoutContext, StepResult, StepTensors
from engine.readouts.draws import DrawReadout
from engine.readouts.labels import LabelReadout
from engine.readouts.likelihoods import LikelihoodReadout
from engine.readouts.logits import LabelLogitsReadout
from engine.readouts.plan import OutputPlan
from engine.readouts.prompts import PromptLogprobsReadout
from engine.requests.core import Request, ScoringRequest
from engine.requests.generation import GenerateRequest
from tests.checkpoints import VOCAB_SIZE, make_checkpoint


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ReadoutContext:
    decoder = load_model(make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2")).requires_grad_(False)
    return ReadoutContext(
        decoder,
        (0,),
        lambda hidden, branches: [],
        lambda branches: [(decoder.token_head, slice(0, len(branches)))],
    )


def batch_of(*requests: Request) -> Batch:
    """All tokens of the branches of ``requests``."""
    batch = Batch()
    for request in requests:
        for branch in request.branches:
            context = np.arange(len(request.prefix) + len(branch.tokens), dtype=np.int32)
            batch.add(ExtendSegment(request, branch, branch.tokens.view.copy(), context))
    return batch


def run(plan: OutputPlan, context: ReadoutContext, batch: Batch) -> StepResult:
    """The results of the main model's readouts, from random hidden rows."""
    upload, download = Upload(), Download(torch.device("cpu"))
    for readout in plan.main:
        readout.upload(upload)
    upload.send(torch.device("cpu"))
    rows = torch.randn(batch.tokens, 64)
    hidden = {readout: rows[readout.hidden_rows] for readout in plan.main}
    logits = {readout: context.decoder.logits(rows[readout.logit_rows]) for readout in plan.main}
    for readout in plan.main:
        readout.queue(StepTensors(hidden, logits), download)
    download.send()
    download.wait()
    result = StepResult()
    for readout in plan.main:
        readout.read(result)
    return result


def kinds(readouts: list[Readout]) -> list[type[Readout]]:
    return [type(readout) for readout in readouts]


def test_each_request_has_its_readouts(context: ReadoutContext) -> None:
    score = ScoringRequest.of(wire.Score("s", [1, 2], [[3], [4, 5]], wire.Labels([7, 8, 9])), 0.0)
    drawn = GenerateRequest.of(wire.Generate("g", [1, 2, 3], wire.Sampling(n=2)), 0.0)
    echo = GenerateRequest.of(wire.Generate("e", [1, 2, 3], wire.Sampling(max_tokens=0), prompt_logprobs=1), 0.0)
    batch = batch_of(score, drawn, echo)
    plan = OutputPlan(batch, context)
    assert kinds(plan.main) == [LabelReadout, DrawReadout, PromptLogprobsReadout]
    assert plan.lenvm == []
    assert plan.branches == [*score.branches, *drawn.branches, *echo.branches]
    result = run(plan, context, batch)
    assert [(branch, len(row)) for branch, row in result.rows] == [(branch, 3) for branch in score.branches]
    assert [draw.branch for draw in result.drawn] == [*echo.branches, *drawn.branches]
    assert [draw.token is None for draw in result.drawn] == [True, False, False]
    assert all(0 <= draw.token < VOCAB_SIZE and draw.logprobs is None for draw in result.drawn[1:])
    (part,) = result.prompts
    assert (part.start, [len(piece.chosen) for piece in part.logprobs]) == (0, [1, 1, 1])
    assert part.logprobs[0].chosen == [None]


def test_a_segment_that_does_not_complete_its_branch_has_no_output(context: ReadoutContext) -> None:
    score = ScoringRequest.of(wire.Score("s", [], [[3, 4, 5]], wire.Labels([7])), 0.0)
    batch = Batch()
    batch.add(ExtendSegment(score, score.branches[0], np.array([3, 4], np.int32), np.arange(2, dtype=np.int32)))
    batch.add(ExtendSegment(score, None, np.array([3, 4], np.int32), np.arange(2, dtype=np.int32)))
    plan = OutputPlan(batch, context)
    assert (plan.main, plan.lenvm, plan.branches) == ([], [], [])


def test_a_step_mixes_readouts_of_scores(context: ReadoutContext) -> None:
    plain = ScoringRequest.of(wire.Score("p", [1, 2], [[3], [4, 5]], wire.Labels([7, 8, 9])), 0.0)
    raw = ScoringRequest.of(wire.Score("r", [1, 2], [[3], [4, 5]], wire.Labels([7], raw=True)), 0.0)
    likely = ScoringRequest.of(wire.Score("l", [1, 2], [[3], [4, 5]], wire.Likelihood()), 0.0)
    batch = batch_of(plain, raw, likely)
    plan = OutputPlan(batch, context)
    assert kinds(plan.main) == [LabelReadout, LabelLogitsReadout, LikelihoodReadout]
    assert plan.branches == [*plain.branches, *raw.branches, *likely.branches]
    lengths = [(branch, len(row)) for branch, row in run(plan, context, batch).rows]
    assert lengths == [
        *((branch, 3) for branch in plain.branches),
        *((branch, 1) for branch in raw.branches),
        *zip(likely.branches, (2, 3), strict=True),
    ]


def test_a_likelihood_computes_the_rows_that_predict_its_tokens() -> None:
    request = ScoringRequest.of(wire.Score("l", [1, 2], [[3], [4, 5, 6]], wire.Likelihood()), 0.0)
    assert request.prefix.tolist() == [1]
    assert [branch.tokens.view.tolist() for branch in request.branches] == [[2], [2, 4, 5]]
    assert [targets.tolist() for targets in request.targets] == [[3], [4, 5, 6]]
    assert request.size == 1 + 1 + 3


def test_a_mean_has_the_whole_prompt_in_each_branch() -> None:
    message = wire.Score("e", [1, 2], [[3], [4, 5]], wire.Embedding())
    last, mean = ScoringRequest.of(message, 0.0), ScoringRequest.of(message, 0.0, mean_pooling=True)
    assert (last.prefix.tolist(), last.size) == ([1, 2], 5)
    assert (mean.prefix.tolist(), mean.size) == ([], 7)
    assert [branch.tokens.view.tolist() for branch in mean.branches] == [[1, 2, 3], [1, 2, 4, 5]]


def test_parts_of_a_likelihood_are_joined_and_replaced(context: ReadoutContext) -> None:
    """A branch computed in parts, then preempted and computed again in others."""
    request = ScoringRequest.of(wire.Score("l", [1], [[3, 4, 5, 6, 7]], wire.Likelihood()), 0.0)
    (branch,) = request.branches
    rows = []
    for start, end in ((0, 2), (2, 4), (0, 3), (3, 5)):
        batch = Batch()
        slots = np.arange(len(request.prefix) + end, dtype=np.int32)
        batch.add(ExtendSegment(request, branch, branch.tokens.view[start:end].copy(), slots))
        plan = OutputPlan(batch, context)
        assert plan.branches == ([branch] if end == 5 else [])
        rows += run(plan, context, batch).rows
        assert branch.partial is not None
        assert branch.partial.tokens == end
    assert [(found, len(row)) for found, row in rows] == [(branch, 6)]


def test_values_are_read_from_the_length_models_segments(context: ReadoutContext) -> None:
    request = ScoringRequest.of(wire.Score("v", [1], [[2], [3, 4]], wire.LengthValue()), 0.0)
    batch = batch_of(request)
    assert (len(batch.lenvm_segments), batch.segments) == (2, [])
    plan = OutputPlan(batch, context)
    assert plan.main == []
    assert plan.length_values.segment_indices == [0, 1]
    assert plan.branches == request.branches
