"""What is told of guided draws: log-probabilities of the distribution each token was drawn from, and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from engine import wire
from engine.lenvm.guided_draws import GuidedDraws


def top_candidates(steered: GuidedDraws, rows: Tensor, top_n: int) -> list[Tensor]:
    """Of ``rows``, [some] int64: log-probability of the token, and of the ``top_n`` most probable candidates ids, log-probabilities
    and values, [some, top_n] each, fewer where there are no more."""
    p = steered.probabilities.index_select(0, rows)
    ranked, order = p.sort(descending=True, stable=True)
    order = order[:, :top_n]
    ids, values = (table.index_select(0, rows).gather(1, order) for table in (steered.ids, steered.values))
    return [steered.logprobs.index_select(0, rows), ids, ranked[:, :top_n].log(), values]


def guided_logprobs(tensors: Sequence[Tensor], counts: Sequence[int], messages: Sequence[wire.Generate]) -> list[wire.Logprobs]:
    """:func:`top_candidates` on the host, a row a message; counts: candidates of each. What cannot be drawn is told only where its
    value is asked for."""
    rows = zip(*(tensor.tolist() for tensor in tensors), counts, messages, strict=True)
    return [_logprobs(*row) for row in rows]


def _logprobs(
    chosen: float, ids: list[int], top: list[float], values: list[float], count: int, message: wire.Generate
) -> wire.Logprobs:
    valued = message.length_guidance is not None and message.length_guidance.return_values
    told = min(message.logprobs or 0, count if valued else sum(value > -math.inf for value in top))
    read = [[None if math.isnan(value) else value for value in values[:told]]] if valued else []
    return wire.Logprobs([chosen], [ids[:told]], [top[:told]], read)
