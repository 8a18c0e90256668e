"""Numbers of images in one process.

An image is identified by its digest and the cache salt of its caller. A caller therefore cannot learn from response times whether
a caller with another salt has sent the same image. Numbers only rise, and no two images share one. A forgotten image gets a new
number, under which the prefix cache has nothing. Images of a caller that keeps no prefixes get a new number each time.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict

from engine import wire
from engine.requests.images import KnownImage

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
