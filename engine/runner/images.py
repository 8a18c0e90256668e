"""The images of a step on the device: the tower's pass, and its output for the decoder's pass."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from yardstick_llm.engine.models.transfer import Copy, Upload
from yardstick_llm.engine.models.vision.tower import ImageRows, VisionDecoder, grid_of
from yardstick_llm.engine.requests.batch import Batch, ExtendSegment, Tokens
from yardstick_llm.engine.requests.images import Embedding, EmbeddingCache, Layout
from yardstick_llm.engine.wire import IMAGE_TOKENS


@dataclass(slots=True)
class _Placed:
    """Image tokens of one pass, on their way to the device."""

    rows: list[int] = field(default_factory=list)
    positions: list[Any] = field(default_factory=list)
    """[3, tokens] of each part"""
    parts: list[Tensor] = field(default_factory=list)
    """Embeddings, in order"""
    rows_copy: Copy | None = None
    positions_copy: Copy | None = None


class StepImages:
    """Computes and inserts the images of steps. It does no work in an engine without a vision model."""

    def __init__(self, decoders: Mapping[bool, VisionDecoder] | None = None, cache: EmbeddingCache | None = None) -> None:
        """decoders: the main model's, and with the key True the length model's."""
        self._decoders = decoders or {}
        self._cache = cache
        self._placed: dict[bool, _Placed] = {}
        self._computed = 0
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def active(self) -> bool:
        """Whether the step computes tokens of images on the main model."""
        return False in self._placed

    @property
    def counts(self) -> dict[str, Any]:
        """Fields of :class:`engine.wire.Stats`."""
        if self._cache is None:
            return {}
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._events.pop(0)
            self._seconds += begin.elapsed_time(end) / 1000
        return {
            "computed_images": self._computed,
            "cached_images": self._cache.found,
            "image_bytes": self._cache.bytes,
            "tower_seconds": self._seconds,
        }

    def reset(self) -> None:
        """Forget all embeddings and counts."""
        if self._cache is not None:
            self._cache.clear()
        self._computed, self._seconds = 0, 0.0
        self._events.clear()

    def compute(self, batch: Batch) -> None:
        """Queue the towers' passes: one for all images of one size on one model."""
        if not batch.images:
            return
        alike: dict[tuple[bool, int, int], list[Embedding]] = {}
        for work in batch.images:
            image = work.embedding.image
            assert image is not None
            alike.setdefault((work.embedding.on_lenvm, image.rows, image.columns), []).append(work.embedding)
        begin, began = self._event(), time.perf_counter()
        for (on_lenvm, rows, columns), embeddings in alike.items():
            self._embed(self._decoders[on_lenvm], rows, columns, embeddings)
        self._computed += len(batch.images)
        end = self._event()
        if begin is not None and end is not None:
            self._events.append((begin, end))
        else:
            self._seconds += time.perf_counter() - began

    def place(self, tokens: Tokens, segments: Sequence[ExtendSegment], upload: Upload, *, on_lenvm: bool = False) -> None:
        """Correct ``tokens``, those of ``segments``: tokens of images get an id that the decoder knows, and all behind them their
        positions. :meth:`insert` gives the decoder the rest."""
        self._placed.pop(on_lenvm, None)
        if not self._decoders:
            return
        placed, begin = _Placed(), 0
        for segment in segments:
            count = segment.tokens.size
            if segment.request.images is not None:
                self._place(segment, slice(begin, begin + count), tokens, placed)
            begin += count
        if placed.rows:
            tokens.ids[placed.rows] = self._decoders[on_lenvm].tower.config.image_token
            placed.rows_copy = upload.add(placed.rows)
            placed.positions_copy = upload.add(np.concatenate(placed.positions, 1))
            self._placed[on_lenvm] = placed

    def insert(self, *, on_lenvm: bool = False) -> None:
        """Give the decoder the images of its next pass. Comes behind the upload that :meth:`place` was given."""
        placed = self._placed.get(on_lenvm)
        if placed is None or placed.rows_copy is None or placed.positions_copy is None:
            return
        rows = placed.parts[0] if len(placed.parts) == 1 else torch.cat(placed.parts)
        self._decoders[on_lenvm].images = ImageRows(placed.rows_copy.tensor, rows, placed.positions_copy.tensor.view(3, -1))

    def _place(self, segment: ExtendSegment, at: slice, tokens: Tokens, placed: _Placed) -> None:
        """at: the segment's places in ``tokens``."""
        images, branch, start = segment.request.images, segment.branch, segment.start
        assert images is not None
        layout = images.prefix if branch is None else images.branches[branch.index]
        given = min(max(len(layout.patches) - start, 0), at.stop - at.start)
        tokens.positions[at.start + given : at.stop] += layout.shift
        if given:
            tokens.positions[at.start : at.start + given] = layout.positions[0, start : start + given]
            self._place_images(segment, layout, start, given, at.start, placed)

    def _place_images(self, segment: ExtendSegment, layout: Layout, start: int, given: int, at: int, placed: _Placed) -> None:
        """Note the tokens of images among the first ``given`` of a segment, of which the first is at ``at`` in the pass."""
        patches, ids = layout.patches[start : start + given], segment.tokens[:given]
        shown = np.flatnonzero(patches >= 0)
        if not len(shown):
            return
        placed.rows += (shown + at).tolist()
        placed.positions.append(layout.positions[:, start + shown])
        new = (np.diff(shown) != 1) | (np.diff(patches[shown]) != 1) | (np.diff(ids[shown]) != 0)
        assert self._cache is not None
        for run in np.split(shown, np.flatnonzero(new) + 1):
            first = int(patches[run[0]])
            rows = self._cache.rows(int(ids[run[0]]) - IMAGE_TOKENS, on_lenvm=segment.request.on_lenvm)
            placed.parts.append(rows[first : first + len(run)])

    def _embed(self, decoder: VisionDecoder, rows: int, columns: int, embeddings: Sequence[Embedding]) -> None:
        config, device = decoder.tower.config, decoder.embed.weight.device
        pixels = b"".join(embedding.image.pixels for embedding in embeddings if embedding.image is not None)
        packed = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        if device.type != "cpu":
            packed = packed.pin_memory().to(device, non_blocking=True)
        grid = grid_of(rows, columns, config.merge_size, config.window)
        found = decoder.tower(packed.view(len(embeddings), rows * columns, config.patch_numbers), grid)
        for embedding, each in zip(embeddings, found, strict=True):
            embedding.rows = each if len(embeddings) == 1 else each.clone()  # so that each can be freed alone
            embedding.image = None

    def _event(self) -> torch.cuda.Event | None:
        """An event in the device's queue; None on a CPU, where work is done when it is queued."""
        if next(iter(self._decoders.values())).embed.weight.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
