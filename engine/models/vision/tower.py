"""Models of text and images: the vision tower of Qwen2.5-VL, which embeds the patches of an image, one embedding for each merged
patch, and the decoder that takes them in place of token embeddings, with positions of three axes.

Blocks attend within windows of the image, and a few of them to the whole image. Patches are put in the order of their windows
(:func:`grid_of`), so that each window is a run of rows. Source: Bai et al. 2025, "Qwen2.5-VL Technical Report", arXiv 2502.13923,
and Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention

from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import Attend, Decoder
from yardstick_llm.engine.models.modules import Linear
from yardstick_llm.engine.models.transfer import Upload
from yardstick_llm.engine.models.vision.config import VisionConfig
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.rms_norm import rms_norm
from yardstick_llm.kernels.rope import rope
from yardstick_llm.kernels.silu_mul import silu_mul

Longs = npt.NDArray[np.int64]

REMEMBERED = 256
"""Grids whose order is kept; the images of many requests have few sizes."""


class WindowRun(NamedTuple):
    """Consecutive patches, in the order of the tower, that make windows of one size."""

    begin: int
    end: int
    length: int
    """Patches of each window; divides ``end - begin``."""


class Grid(NamedTuple):
    """Order and places of the patches of images of one size."""

    order: Longs
    """[patches] place in :class:`engine.wire.Image` of each patch in the order of the tower"""
    inverse: Longs
    """[tokens] place, in the order of the tower, of each merged patch of the image"""
    places: Longs
    """[patches, 2] row and column of each patch of :class:`engine.wire.Image`"""
    windows: list[WindowRun]

    @property
    def tokens(self) -> int:
        """Merged patches."""
        return len(self.inverse)


@lru_cache(REMEMBERED)
def grid_of(rows: int, columns: int, merge: int, window: int) -> Grid:
    """rows, columns: of patches, multiples of ``merge``; window: side of a window, in merged patches."""
    high, wide, unit = rows // merge, columns // merge, merge**2
    row, column = np.divmod(np.arange(high * wide), wide)
    window_of = row // window * (-(-wide // window)) + column // window
    sizes = np.bincount(window_of)
    # Windows of one size together, each with its merged patches in the order of the image.
    merged = np.lexsort((np.arange(high * wide), window_of, sizes[window_of]))
    order = (merged[:, None] * unit + np.arange(unit)).flatten()
    inner_row, inner_column = np.divmod(np.arange(unit), merge)
    places = np.stack([row[:, None] * merge + inner_row, column[:, None] * merge + inner_column], 2).reshape(-1, 2)
    return Grid(order, np.argsort(merged), places, _runs(np.sort(sizes[sizes > 0]).astype(np.int64), unit))


def _runs(sizes: Longs, unit: int) -> list[WindowRun]:
    """sizes: merged patches of each window, in order."""
    lengths, counts = np.unique(sizes, return_counts=True)
    ends = np.cumsum(lengths * counts) * unit
    begins = [0, *ends[:-1].tolist()]
    return [
        WindowRun(begin, end, length) for begin, end, length in zip(begins, ends.tolist(), (lengths * unit).tolist(), strict=True)
    ]


NORM_EPS = 1e-6
"""Epsilon of the tower's norms; no configuration changes it."""
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN, which torch prefers on Hopper GPUs from release 2.13 on. It builds a plan for each shape, in some 30 ms, and an
image of a new size has a shape for each size of its windows."""
PREFIX = "visual."
"""Before the names of the tower's tensors in checkpoints."""


class Norm(nn.Module):
    """A root-mean-square normalisation of rows."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, size] -> [rows, size]"""
        return rms_norm(x, self.weight, NORM_EPS)


class VisionBlock(nn.Module):
    """One layer of the tower."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.head_dim = config.heads, config.head_dim
        self.norm1, self.norm2 = Norm(size, dtype), Norm(size, dtype)
        self.qkv = Linear(size, 3 * size, dtype=dtype)
        self.proj = Linear(size, size, dtype=dtype)
        self.gate_up = Linear(size, 2 * config.intermediate_size, dtype=dtype)
        self.down = Linear(config.intermediate_size, size, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, images: int, runs: list[WindowRun]) -> Tensor:
        """x: [images · patches, hidden], images of one size; cos, sin: [images · patches, head_dim / 2]; ``runs``: of the patches
        of one image that attend to each other. -> like x"""
        x = x + self.proj(self._attend(self.qkv(self.norm1(x)), cos, sin, images, runs))
        return x + self.down(silu_mul(self.gate_up(self.norm2(x))))  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, images: int, runs: list[WindowRun]) -> Tensor:
        q, k, v = qkv.view(len(qkv), 3, self.heads, self.head_dim).unbind(1)
        apart = (images, -1, self.heads, self.head_dim)
        q, k, v = rope(q, cos, sin).view(apart), rope(k, cos, sin).view(apart), v.reshape(apart)
        out = torch.empty_like(q)  # [images, patches, heads, head_dim]
        for run in runs:
            asked, keys, values = (_windows(part, run) for part in (q, k, v))
            answered = scaled_dot_product_attention(asked, keys, values).transpose(1, 2)
            out[:, run.begin : run.end] = answered.reshape(images, run.end - run.begin, self.heads, self.head_dim)
        return out.view(len(qkv), -1)


def _windows(x: Tensor, run: WindowRun) -> Tensor:
    """x: [images, patches, heads, head_dim] -> [images · windows of the run, heads, length, head_dim]"""
    part = x[:, run.begin : run.end]
    return part.reshape(-1, run.length, *x.shape[2:]).transpose(1, 2)


class VisionTower(nn.Module):
    """The whole tower. Weights are uninitialised until a loader fills them; then comes :meth:`fold`."""

    patch_weight: Tensor
    table: Tensor
    inverse_frequencies: Tensor

    def __init__(self, config: VisionConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        shape = (config.hidden_size, 3, config.frames, config.patch_size, config.patch_size)
        self.patch_embed = nn.Parameter(torch.empty(shape, dtype=dtype))
        """The weights in the checkpoint's form, with a kernel for each frame of a patch; empty after :meth:`fold`."""
        self.register_buffer("patch_weight", torch.empty(0, dtype=dtype), persistent=False)
        self.blocks = nn.ModuleList(VisionBlock(config, dtype) for _ in range(config.depth))
        merged = config.hidden_size * config.merge_size**2
        self.merge_norm = Norm(config.hidden_size, dtype)
        self.merge_in = Linear(merged, merged, dtype=dtype)
        self.merge_out = Linear(merged, config.out_size, dtype=dtype)
        self.register_buffer("table", normalised_values(config).to(dtype), persistent=False)
        quarter = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self.register_buffer("inverse_frequencies", 1.0 / config.theta**quarter, persistent=False)

    @torch.no_grad()
    def fold(self) -> None:
        """Sum the kernels of the frames of a patch, which are the same frame in a still image, once after weights are loaded."""
        wide = self.patch_embed.float().sum(2).flatten(1)
        self.patch_weight = wide.to(self.patch_embed.dtype)
        self.patch_embed = nn.Parameter(torch.empty(0, dtype=wide.dtype), requires_grad=False)

    @torch.inference_mode()
    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Embed images of one size.

        pixels: [images, rows · columns, 3 · patch_size²] uint8, in the order of :class:`engine.wire.Image`.
        -> [images, tokens, out_size], in the order of the image's tokens.
        """
        images, patches, _ = pixels.shape
        upload = Upload()
        order, inverse, places = (upload.add(array) for array in (grid.order, grid.inverse, grid.places))
        upload.send(pixels.device)
        x = linear(self._normalised(pixels.index_select(1, order.tensor)), self.patch_weight)
        cos, sin = self._rotations(places.tensor.view(-1, 2).index_select(0, order.tensor), images)
        with sdpa_kernel(ATTENTION):
            for index, block in enumerate(self.blocks):
                runs = [WindowRun(0, patches, patches)] if index in self.config.full_attention else grid.windows
                x = block(x, cos, sin, images, runs)
        x = self.merge_norm(x).view(images * grid.tokens, -1)
        x = self.merge_out(gelu(self.merge_in(x))).view(images, grid.tokens, -1)
        return x.index_select(1, inverse.tensor)  # type: ignore[no-any-return]

    def _normalised(self, pixels: Tensor) -> Tensor:
        """[images, patches, numbers] uint8 -> [images · patches, numbers], each value that of its channel's table"""
        channels = pixels.view(-1, 3, self.config.patch_size**2).int()
        offsets = 256 * torch.arange(3, device=pixels.device, dtype=torch.int32).view(1, 3, 1)
        return self.table.flatten().index_select(0, (channels + offsets).flatten()).view(len(channels), -1)

    def _rotations(self, places: Tensor, images: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles of all patches, [images · patches, head_dim / 2] float32: by row, then by column.

        places: [patches, 2] row and column
        """
        angles = (places.float().unsqueeze(2) * self.inverse_frequencies).flatten(1).repeat(images, 1)
        return angles.cos(), angles.sin()

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Checkpoint name of each tensor -> the parameter, or part of one, that it fills, detached and writable."""
        return {PREFIX + name: view.detach() for name, view in self._views()}

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        yield "patch_embed.proj.weight", self.patch_embed
        for index, block in enumerate(self.blocks):
            assert isinstance(block, VisionBlock)
            names = {"norm1": block.norm1, "norm2": block.norm2, "attn.qkv": block.qkv, "attn.proj": block.proj}
            for name, module in (names | {"mlp.down_proj": block.down}).items():
                for kind, parameter in module.named_parameters():
                    yield f"blocks.{index}.{name}.{kind}", parameter
            for kind, parameter in block.gate_up.named_parameters():
                for name, half in zip(("gate_proj", "up_proj"), parameter.chunk(2), strict=True):
                    yield f"blocks.{index}.mlp.{name}.{kind}", half
        for name, module in {"ln_q": self.merge_norm, "mlp.0": self.merge_in, "mlp.2": self.merge_out}.items():
            for kind, parameter in module.named_parameters():
                yield f"merger.{name}.{kind}", parameter


def normalised_values(config: VisionConfig) -> Tensor:
    """The tower's input for each value of a channel, [3, 256] float32, rounded as in transformers' processor in NumPy."""
    constants = config.preprocessing
    rescaled = (np.arange(256, dtype=np.float64) * constants.rescale).astype(np.float32)
    mean, std = (np.array(values, np.float32)[:, None] for values in (constants.mean, constants.std))
    return torch.from_numpy((rescaled - mean) / std)


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
