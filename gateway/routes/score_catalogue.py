"""``POST /v1/score`` with all items of a catalogue."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response

from gateway.ids import new_id
from gateway.pool.split import cut
from gateway.routes.body import Body
from gateway.routes.catalogue_scan import Best, Result, Scan, Scanner
from gateway.routes.large import with_rows
from gateway.routes.reading import Reading
from gateway.routes.score_forms import LARGE_SCORES, LabelForm, ScoreAnswer, check_score
from gateway.routes.scoring import RESULTS_PER_EVENT
from gateway.schemas.score import ScoreChunk, ScoreRequest, ScoreResponse
from gateway.schemas.usage import PromptTokensDetails, Usage
from gateway.streams import DONE, sse


@dataclass(frozen=True)
class ScoredCatalogue:
    """Scores all items of a catalogue."""

    scanner: Scanner

    async def answer(
        self, request: Request[Any, Any, Any], data: Body[ScoreRequest], body: Reading[ScoreRequest]
    ) -> Response[ScoreAnswer]:
        """Return the best items, or with ``stream`` all results as they become known. Raises :class:`GatewayError`."""
        fields = body.fields
        scan = await self.scanner.open(request, data, body, relative=bool(fields.apply_softmax))
        check_score(scan.whole.model, fields)
        form, id = LabelForm([], softmax=bool(fields.apply_softmax)), f"score-{new_id()}"
        if fields.stream:
            return self.scanner.scoring.streams.response(self._events(scan, form, id, fields.top_n), request)
        best = await self.scanner.best(scan, form.rank, fields.top_n or 0)
        headers = {"x-yardstick-cache": f"{scan.hits}/{scan.items}"}
        rows = (form.item(result.index, result.id, result.row).scores for result in best)
        return await with_rows(self._closing(scan, id, best), "scores", rows, large=len(best) > LARGE_SCORES, headers=headers)

    async def _events(self, scan: Scan, form: LabelForm, id: str, top_n: int | None) -> AsyncGenerator[bytes, None]:
        best = Best(form.rank, top_n or 0)
        async with aclosing(self.scanner.parts(scan)) as parts:
            async for part in parts:
                for few in cut(best.add(part) if top_n else part, RESULTS_PER_EVENT):
                    yield sse(ScoreChunk(id=id, data=[form.item(result.index, result.id, result.row) for result in few]))
        kept = best.results
        scores = [form.item(result.index, result.id, result.row).scores for result in kept]
        yield sse(msgspec.structs.replace(self._closing(scan, id, kept), scores=scores))
        yield DONE

    def _closing(self, scan: Scan, id: str, best: list[Result]) -> ScoreResponse:
        return ScoreResponse(
            id=id,
            object="scoring",
            created=int(time.time()),
            model=scan.whole.model.name,
            scores=[],
            usage=Usage(scan.tokens, scan.tokens, prompt_tokens_details=PromptTokensDetails(scan.cached_tokens)),
            ids=[result.id for result in best],
        )
