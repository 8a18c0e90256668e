"""``POST /v1/score`` with all items of a catalogue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from litestar import Request, Response

from gateway.cache.base import Row
from gateway.handling.body import Body
from gateway.handling.catalogue_answers import answer_catalogue
from gateway.handling.catalogue_scan import Result, Scan, Scanner
from gateway.handling.reader import Reading
from gateway.ids import new_id
from gateway.routes.score_forms import LARGE_SCORES, LabelForm, ScoreAnswer, check_score
from gateway.schemas.score import ScoreChunk, ScoreRequest, ScoreResponse
from gateway.schemas.usage import PromptTokensDetails, Usage


async def score_catalogue(
    scanner: Scanner, request: Request[Any, Any, Any], data: Body[ScoreRequest], body: Reading[ScoreRequest]
) -> Response[ScoreAnswer]:
    """Score all items of a catalogue. Raises :class:`GatewayError`."""
    fields = body.fields
    scan = await scanner.open(request, data, body, relative=bool(fields.apply_softmax))
    check_score(scan.whole.model, fields)
    form = _ScoredCatalogue(scan, LabelForm([], softmax=bool(fields.apply_softmax)), f"score-{new_id()}")
    return await answer_catalogue(scanner, form, stream=bool(fields.stream), top_n=fields.top_n)


@dataclass(frozen=True)
class _ScoredCatalogue:
    field: ClassVar[str] = LabelForm.field
    large: ClassVar[int] = LARGE_SCORES
    scan: Scan
    labels: LabelForm
    id: str

    def rank(self, row: Row) -> float:
        return self.labels.rank(row)

    def rows(self, results: list[Result]) -> Iterator[list[float]]:
        return (self.labels.item(result.index, result.id, result.row).scores for result in results)

    def chunk(self, results: list[Result]) -> ScoreChunk:
        return ScoreChunk(id=self.id, data=[self.labels.item(result.index, result.id, result.row) for result in results])

    def closing(self, best: list[Result]) -> ScoreResponse:
        scan = self.scan
        return ScoreResponse(
            id=self.id,
            object="scoring",
            created=int(time.time()),
            model=scan.whole.model.name,
            scores=[],
            usage=Usage(scan.tokens, scan.tokens, prompt_tokens_details=PromptTokensDetails(scan.cached_tokens)),
            ids=[result.id for result in best],
        )
