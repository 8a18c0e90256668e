"""Takes the images of accepted messages into requests, and gives images their numbers in this process.

An image is identified by its digest and the cache salt of its caller. A caller therefore cannot learn from response times whether
a caller with another salt has sent the same image. Numbers only rise, and no two images share one. A forgotten image gets a new
number, under which the prefix cache has nothing. Images of a caller that keeps no prefixes get a new number each time.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from yardstick_llm.engine import wire
from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.models.vision.config import VisionConfig
from yardstick_llm.engine.requests.core import ItemGroup, Request, ScoringRequest
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.requests.images import EmbeddingCache, ItemImages, KnownImage, RequestImages, text_of

REMEMBERED = 1 << 16
"""Images whose numbers are kept, least recently used first out: about 10 MB."""
MOST_NUMBERS = (1 << 31) - wire.IMAGE_TOKENS
"""Token ids are 32 bits. At a hundred new images a second, numbers last four months."""


class ImageRegistry:
    """Gives numbers to images. One thread, the loop's, calls it."""

    def __init__(self, merge: int, remembered: int = REMEMBERED) -> None:
        """``merge``: side of a merged patch, in patches."""
        self._merge = merge
        self._remembered = remembered
        self._next = itertools.count().__next__
        self._numbers: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self.pixel_bytes = 0
        """Bytes of pixels that open requests hold."""
        self.exhausted = False
        """Whether no number is left; the pod must be started again to read new images."""

    def register(self, image: wire.Image, caller: wire.Caller) -> KnownImage:
        """Return ``image``, whose digest was compared with its pixels, with its number."""
        known = KnownImage(self._number(image.digest, caller), image.rows, image.columns, self._merge, image.pixels)
        self.pixel_bytes += len(image.pixels)
        weakref.finalize(known, self._drop, len(image.pixels)).atexit = False
        return known

    def _number(self, digest: bytes, caller: wire.Caller) -> int:
        key = caller.cache_salt, digest
        number = self._numbers.get(key) if caller.keep_prefix else None
        if number is None:
            number = self._next()
            self.exhausted = number >= MOST_NUMBERS - wire.MAX_IMAGES
        if caller.keep_prefix:
            self._numbers[key] = number
            self._numbers.move_to_end(key)
            if len(self._numbers) > self._remembered:
                self._numbers.popitem(last=False)
        return number

    def _drop(self, count: int) -> None:
        self.pixel_bytes -= count


MOST_PIXEL_BYTES = 4 << 30
"""Most bytes of pixels that open requests hold together. Further images are refused, as if the queue were full."""

Message = wire.Score | wire.ScoreItems | wire.Generate


class ImageIntake:
    """Makes the images of messages those of requests."""

    def __init__(self, config: VisionConfig, cache: EmbeddingCache, most_bytes: int = MOST_PIXEL_BYTES) -> None:
        self._config = config
        self.cache = cache
        self.registry = ImageRegistry(config.merge_size)
        self._most_bytes = most_bytes

    def full(self, message: Message) -> bool:
        """Whether there is no memory for the images of ``message``, or no number."""
        if not message.images:
            return False
        given = sum(len(image.pixels) for image in message.images)
        held = self.registry.pixel_bytes
        return self.registry.exhausted or (held > 0 and held + given > self._most_bytes)

    def attach(self, request: Request, message: Message) -> None:
        """Replace the tokens of images in a new request of ``message`` by those of this process, and give it its images."""
        known = [self.registry.register(image, message.caller) for image in message.images]
        ids = np.array([wire.IMAGE_TOKENS + image.number for image in known], np.int32)
        images = {image.number: image for image in known}
        if isinstance(request, ItemGroup):
            self._attach_items(request, images, ids)
            return
        if isinstance(request, GenerateRequest):
            request.prompt = text_of(request.prompt, self._config.image_token)
        elif isinstance(request, ScoringRequest):
            request.targets = [text_of(tokens, self._config.image_token) for tokens in request.targets]
        rename(request.prefix, ids)
        for branch in request.branches:
            rename(branch.tokens.view, ids)
        request.images = RequestImages(self.cache, images, request.prefix, [branch.tokens.view for branch in request.branches])
        for part in request.with_aux:
            part.images = request.images

    def _attach_items(self, group: ItemGroup, images: Mapping[int, KnownImage], ids: Ints) -> None:
        lengths = [prefix.size for prefix in group.prefixes]
        group.items = [renamed(item, ids) for item in group.items]
        group.prefixes = [item[:length] for item, length in zip(group.items, lengths, strict=True)]
        rename(group.query.view, ids)
        group.item_images = ItemImages(self.cache, images, group.query.view, self._config.image_token)


def rename(tokens: Ints, ids: Ints) -> None:
    """Replace token ids of images in place. ids: [images] by place in the message"""
    shown = np.flatnonzero(tokens >= wire.IMAGE_TOKENS)
    if len(shown):
        tokens[shown] = ids[tokens[shown] - wire.IMAGE_TOKENS]


def renamed(tokens: Ints, ids: Ints) -> Ints:
    """A copy after :func:`rename`."""
    copy = np.array(tokens, np.int32)
    rename(copy, ids)
    return copy
