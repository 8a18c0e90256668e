"""A decoder of text and images: embeddings of images take the place of token embeddings, and their positions have three axes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Attend, Decoder
from engine.models.vision.tower import VisionTower


class ImageRows(NamedTuple):
    """Tokens of images among the tokens of one forward pass."""

    rows: Tensor
    """[image tokens] int64, places among the tokens of the pass"""
    embeddings: Tensor
    """[image tokens, hidden]"""
    positions: Tensor
    """[3, image tokens] int64: time, row and column"""


class VisionDecoder(Decoder):
    """The decoder, its tower, and what its next forward pass inserts.

    All three axes of a text token's position are equal, so a pass without images is that of any decoder.
    """

    axes: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, dtype)
        assert config.vision is not None
        self.tower = VisionTower(config.vision, dtype)
        self.images: ImageRows | None = None
        """Taken by the next forward pass."""
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(config.rope_sections))
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """See :meth:`Decoder.forward`. Tokens and positions in the rows of :attr:`images` are not used."""
        try:
            return super().forward(tokens, positions, attend, rows)
        finally:
            self.images = None

    def outer_views(self) -> dict[str, Tensor]:
        return super().outer_views() | self.tower.checkpoint_views()

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = super()._embedded(tokens)
        return x if self.images is None else x.index_copy(0, self.images.rows, self.images.embeddings)

    def _rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        rotations = super()._rotations(positions)
        if self.images is None:
            return rotations
        turned = super()._rotations(self.images.positions.index_select(0, self.axes).T)
        rows = self.images.rows
        return [
            (cos.index_copy(0, rows, own_cos), sin.index_copy(0, rows, own_sin))
            for (cos, sin), (own_cos, own_sin) in zip(rotations, turned, strict=True)
        ]
