"""Embeddings of images: which of them a step computes, and which are kept.

A step that computes tokens of an image needs the image's embeddings. They are computed in the same step, before the decoder, and
kept until others need their memory. What steps of now need is never dropped, so a request whose tokens take several steps has its
embeddings computed once; a request that was preempted may have them computed again.

A step computes a bounded number of patches, because other requests wait for the step; a larger image is computed alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.requests.images import KnownImage

if TYPE_CHECKING:
    from torch import Tensor

    from engine.requests.core import Request


@dataclass(eq=False, slots=True)
class Embedding:
    """The embeddings of one image on one model."""

    image: KnownImage | None
    """None once it is computed: pixels belong to requests."""
    on_lenvm: bool
    bytes: int
    rows: Tensor | None = None
    """[tokens, hidden]; None until a step is launched that computes it"""
    step: int = 0
    """Last step that needs it."""
    reader: str = ""
    """Id of the last request that needs it."""


@dataclass(frozen=True, eq=False, slots=True)
class ImageWork:
    """An image that a step computes."""

    request: Request
    """One of those that need it; it fails with the step."""
    embedding: Embedding
    key: tuple[int, bool]
    cache: EmbeddingCache

    def forget(self) -> None:
        """Drop the embedding, because the step failed."""
        self.cache.forget(self)


class ImageBatch(Protocol):
    """The part of a :class:`~engine.batch.Batch` that holds images."""

    images: list[ImageWork]

    def add_image(self, work: ImageWork, tokens: int) -> None:
        """Let the step embed an image of ``tokens``."""


class EmbeddingCache:
    """Embeddings by image and model, the least recently needed first."""

    def __init__(self, token_bytes: Mapping[bool, int], max_bytes: int, max_patches: int) -> None:
        """token_bytes: of one token's embedding, on the main model and on the length model; max_bytes: kept beside what steps need;
        max_patches: of one step."""
        self._token_bytes = token_bytes
        self._max_bytes = max_bytes
        self._max_patches = max_patches
        self._embeddings: OrderedDict[tuple[int, bool], Embedding] = OrderedDict()
        self.bytes = 0
        """Bytes of all embeddings that are kept or that the current step computes."""
        self.found = 0
        """Times that a request needed embeddings that were there."""

    def require(self, image: KnownImage, request: Request, batch: ImageBatch, step: int) -> bool:
        """Let ``batch``, the step of that number, use the embeddings of an image; computes them in it if they are not there.
        Returns False where the step has enough patches without it."""
        key = image.number, request.on_lenvm
        embedding = self._embeddings.get(key)
        if embedding is None:
            patches = sum(work.embedding.image.patches for work in batch.images if work.embedding.image is not None)
            if batch.images and patches + image.patches > self._max_patches:
                return False
            embedding = Embedding(image, request.on_lenvm, image.tokens * self._token_bytes[request.on_lenvm])
            self._embeddings[key] = embedding
            self.bytes += embedding.bytes
            batch.add_image(ImageWork(request, embedding, key, self), image.tokens)
        elif embedding.reader != request.id:
            self.found += 1
        embedding.reader = request.id
        embedding.step = step
        self._embeddings.move_to_end(key)
        self._evict(step)
        return True

    def rows(self, number: int, *, on_lenvm: bool) -> Tensor:
        """Return the embeddings of an image that this step requires, [tokens, hidden]."""
        rows = self._embeddings[number, on_lenvm].rows
        assert rows is not None
        return rows

    def forget(self, work: ImageWork) -> None:
        """Drop the embedding of ``work``, if it is still kept."""
        if self._embeddings.get(work.key) is work.embedding:
            self._drop(work.key)

    def clear(self) -> None:
        """Drop all embeddings and counts. No step is in flight."""
        self._embeddings.clear()
        self.bytes = self.found = 0

    def _evict(self, step: int) -> None:
        while self.bytes > self._max_bytes:
            key, oldest = next(iter(self._embeddings.items()))
            if oldest.step >= step:
                return
            self._drop(key)

    def _drop(self, key: tuple[int, bool]) -> None:
        self.bytes -= self._embeddings.pop(key).bytes
