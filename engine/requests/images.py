"""Images of requests: which token of a prompt is which merged patch, at which position, and which embeddings are kept.

In prompts of the engine, a token id of :data:`engine.wire.IMAGE_TOKENS` and above names an image by its number in the process
(:mod:`engine.loop.images`), so the prefix cache tells images apart as it tells tokens apart. All else follows from the tokens
up to a place: the merged patch, and the position, whose three axes are time, row and column. So keys that were computed for one
prompt are right in every prompt that begins with the same tokens. A text token behind an image continues where the larger side of
the image ends.

A step that computes tokens of an image needs the image's embeddings. They are computed in the same step, before the decoder, and
kept until others need their memory. What steps of now need is never dropped, so a request whose tokens take several steps has its
embeddings computed once; a request that was preempted may have them computed again.

A step computes a bounded number of patches, because other requests wait for the step; a larger image is computed alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.wire import IMAGE_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from yardstick_llm.engine.requests.core import Branch, Request, ScoringRequest


@dataclass(frozen=True, eq=False, weakref_slot=True, slots=True)
class KnownImage:
    """An image of a request that was accepted."""

    number: int
    """Its number in this process."""
    rows: int
    """Patches."""
    columns: int
    """Patches."""
    merge: int
    """Side of a merged patch, in patches."""
    pixels: bytes
    """See :class:`engine.wire.Image`."""

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Merged patches."""
        return self.patches // self.merge**2


class Layout(NamedTuple):
    """The tokens of a prefix or branch that came with a request. All are text if :attr:`patches` is empty."""

    positions: Ints
    """[3, tokens], or [3, 0] of text"""
    patches: Ints
    """[tokens] merged patch in its image, -1 for text; or [0] of text"""
    shift: int
    """Position of each text token behind these, less its place in the prompt."""
    images: list[tuple[KnownImage, int]]
    """Images, each with the number of tokens up to its end, or to the end of these tokens."""


@dataclass(slots=True)
class Reader:
    """Reads a prompt part by part."""

    images: Mapping[int, KnownImage]
    """By number."""
    place: int = 0
    """Tokens read."""
    position: int = 0
    """Position of the next text token, or of the image that is being read."""
    seen: int = 0
    """Tokens of an image that is not complete; 0 behind text or a complete image."""

    def copy(self) -> Reader:
        """Return a reader that goes on from here."""
        return Reader(self.images, self.place, self.position, self.seen)

    def read(self, tokens: Ints) -> Layout:
        """Read the next part."""
        named = tokens >= IMAGE_TOKENS
        if not named.any():
            layout = Layout(np.empty((3, 0), np.int32), np.empty(0, np.int32), self.position - self.place, [])
            self.place += len(tokens)
            self.position += len(tokens)
            return layout
        positions, patches = np.empty((3, len(tokens)), np.int32), np.full(len(tokens), -1, np.int32)
        images: list[tuple[KnownImage, int]] = []
        changes = np.flatnonzero(np.diff(np.where(named, tokens, -1))) + 1
        for begin, end in pairwise([0, *changes.tolist(), len(tokens)]):
            if named[begin]:
                self._read_image(self.images[int(tokens[begin]) - IMAGE_TOKENS], begin, end, positions, patches, images)
            else:
                positions[:, begin:end] = np.arange(self.position, self.position + end - begin)
                self.position += end - begin
        self.place += len(tokens)
        return Layout(positions, patches, self.position - self.place, images)

    def _read_image(
        self, image: KnownImage, begin: int, end: int, positions: Ints, patches: Ints, images: list[tuple[KnownImage, int]]
    ) -> None:
        """Fill in a run of tokens of one image, which may be shown several times on end."""
        high, wide = image.rows // image.merge, image.columns // image.merge
        while begin < end:
            count = min(end - begin, image.tokens - self.seen)
            patch, part = np.arange(self.seen, self.seen + count), slice(begin, begin + count)
            patches[part] = patch
            positions[:, part] = self.position
            positions[1, part] += (patch // wide).astype(np.int32)
            positions[2, part] += (patch % wide).astype(np.int32)
            begin += count
            self.seen += count
            images.append((image, begin))
            if self.seen == image.tokens:
                self.seen = 0
                self.position += max(high, wide)


class RequestImages:
    """The images of one request, on the main model and on the length model."""

    __slots__ = ("branches", "cache", "prefix")

    def __init__(self, cache: EmbeddingCache, images: Mapping[int, KnownImage], prefix: Ints, branches: Sequence[Ints]) -> None:
        """images: by number; prefix, branches: tokens that came with the request."""
        self.cache = cache
        reader = Reader(images)
        self.prefix = reader.read(prefix)
        self.branches = [reader.copy().read(tokens) for tokens in branches]
        """[branch], by :attr:`~engine.requests.core.Branch.index`"""

    def prefix_ready(self, batch: ImageBatch, request: Request, step: int) -> bool:
        """Whether the images in the rest of the prefix have embeddings, or get them in this step."""
        return self._ready(self.prefix, request.prefix_slots.size, batch, request, step)

    def branch_ready(self, batch: ImageBatch, branch: Branch, step: int) -> bool:
        """Whether the images in the rest of a branch, on both models, have embeddings, or get them in this step."""
        layout, ready = self.branches[branch.index], True
        for part in (branch, branch.aux_branch) if layout.images else ():
            if part is not None:
                ready = self._ready(layout, part.computed, batch, part.request, step) and ready
        return ready

    def shift(self, branch: Branch) -> int:
        """Position of a text token behind those that came with the request, less its place in the prompt."""
        return self.branches[branch.index].shift

    def _ready(self, layout: Layout, computed: int, batch: ImageBatch, request: Request, step: int) -> bool:
        needed = {image.number: image for image, end in layout.images if end > computed}
        ready = [self.cache.require(image, request, batch, step) for image in needed.values()]
        return all(ready)


class ItemImages:
    """The images of an :class:`~engine.requests.core.ItemGroup`: those of its items and of its query."""

    def __init__(self, cache: EmbeddingCache, images: Mapping[int, KnownImage], query: Ints, image_token: int) -> None:
        """query: with the numbers of images."""
        self._cache = cache
        self._images = images
        self._query = text_of(query, image_token)
        self._layouts: dict[int, RequestImages] = {}
        self.in_query = bool((query >= IMAGE_TOKENS).any())
        """Whether the query shows images. Its items are then computed one by one."""

    def attach(self, request: ScoringRequest) -> None:
        """Give the request of an item its images."""
        if request.index not in self._layouts:
            branches = [branch.tokens.view for branch in request.branches]
            self._layouts[request.index] = RequestImages(self._cache, self._images, request.prefix, branches)
        request.images = self._layouts[request.index]
        request.targets = [self._query for _ in request.targets]


def shift_of(branch: Branch) -> int:
    """:meth:`RequestImages.shift`; 0 for a request without images."""
    images = branch.request.images
    return 0 if images is None else images.shift(branch)


def text_of(tokens: Ints | Sequence[int], image_token: int) -> Ints:
    """A copy with ``image_token`` for the tokens of images, as transformers has the prompt."""
    given = np.asarray(tokens, np.int32)
    return np.where(given >= IMAGE_TOKENS, np.int32(image_token), given)


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


class ImageBatch(Protocol):
    """The part of a :class:`~engine.requests.batch.Batch` that holds images."""

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
