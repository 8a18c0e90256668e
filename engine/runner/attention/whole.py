"""Attention of whole sequences, whose tokens all attend to each other; without slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.encoder import Encoder, Packed
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.requests.core import ScoringRequest
from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.whole_attention import lay_out, whole_attention


class WholeAttention:
    """Plans the attention of each step."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        device: torch.device,
        *,
        typed: bool = False,
        biased: Encoder | None = None,
        slopes: Tensor | None = None,
        narrow: bool = False,
    ) -> None:
        """``specs``: of each layer. ``typed``: whether the model has token types. ``biased``: the model, if it adds something
        to the scores by the distance of two tokens. ``slopes``, ``narrow``: see
        :func:`~kernels.whole_attention.whole_attention`."""
        self._slopes, self._narrow = slopes, narrow
        self._biased = biased
        self._specs = list(specs)
        self._device = device
        self._typed = typed
        backend = "triton" if device.type == "cuda" and biased is None and slopes is None else "reference"
        self.description = wire.AttentionChoice(backend, "all tokens of a sequence attend to each other")

    def plan(self, segments: Sequence[ExtendSegment]) -> Packed:
        """Prepare a step once for all layers. Each segment is a whole sequence."""
        unseen = [segment.request.unseen_tokens if isinstance(segment.request, ScoringRequest) else 0 for segment in segments]
        layout, specs = lay_out([segment.tokens.size for segment in segments], self._device, unseen), self._specs
        model = self._biased
        distances = {} if model is None else {run.length: model.distances_of(run.length) for run in layout.runs}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = None if model is None else partial(model.score_bias, layer, distances)
            return whole_attention(q, k, v, layout, specs[layer], bias, slopes=self._slopes, narrow=self._narrow)

        return Packed(attend, self._types(segments))

    def _types(self, segments: Sequence[ExtendSegment]) -> Tensor | None:
        """[tokens] int64: 1 for the second text of a pair; None if there is none."""
        firsts = [segment.request.first_tokens if isinstance(segment.request, ScoringRequest) else 0 for segment in segments]
        if not (self._typed and any(firsts)):
            return None
        lengths = [segment.tokens.size for segment in segments]
        parts = np.array([(first, length - first) for first, length in zip(firsts, lengths, strict=True)]).ravel()
        kinds = np.array([(0, int(first > 0)) for first in firsts]).ravel()
        types = torch.from_numpy(np.repeat(kinds, parts).astype(np.int64))
        return types if self._device.type == "cpu" else types.pin_memory().to(self._device, non_blocking=True)
