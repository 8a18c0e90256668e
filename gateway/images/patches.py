"""Resizes images to whole merged patches, and puts their pixels into the order of a vision model's patches.

The pixels equal those of transformers' ``Qwen2VLImageProcessorPil`` before it normalises them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from PIL import Image as Pillow

from engine.wire import Image, VisionInfo, image_digest
from gateway.images.decode import MAX_RATIO
from gateway.images.errors import ImageError

CHANNELS = 3


class Size(NamedTuple):
    """Height and width, in pixels."""

    height: int
    width: int


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """Return the size of an image whose sides are multiples of ``factor``, whose area is between ``min_pixels`` and
    ``max_pixels``, and whose proportions are nearly those given. Raises :class:`ImageError` for extreme proportions.

    This is ``smart_resize`` of transformers' Qwen2-VL, with the same rounding.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ImageError("shape", f"has {width} x {height} pixels; one side must not be more than {MAX_RATIO} times the other")
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
    return Size(rows * factor, columns * factor)


def prepare(image: Pillow.Image, vision: VisionInfo, *, max_pixels: int | None = None) -> Image:
    """Resize an RGB image and cut it into patches. ``max_pixels``: instead of the model's, if it is smaller.

    Raises :class:`ImageError`.
    """
    most = vision.max_pixels if max_pixels is None else min(max_pixels, vision.max_pixels)
    factor = vision.patch_size * vision.merge_size
    least = min(vision.min_pixels, most)
    height, width = smart_resize(image.height, image.width, factor=factor, min_pixels=least, max_pixels=most)
    if (width, height) != image.size:
        image = image.resize((width, height), Pillow.Resampling.BICUBIC)
    rows, columns = height // vision.patch_size, width // vision.patch_size
    pixels = patch_order(image.tobytes(), columns, patch=vision.patch_size, merge=vision.merge_size)
    return Image(image_digest(rows, columns, pixels), rows, columns, pixels)


def patch_order(pixels: bytes, columns: int, *, patch: int, merge: int) -> bytes:
    """Reorder pixels from ``[height, width, 3]`` to ``[rows / merge, columns / merge, merge, merge, 3, patch, patch]``.

    ``columns``: width in patches. Each step of the inner loop moves one pixel of one channel of all merged patches with a strided
    copy in C, so the number of steps does not depend on the image.
    """
    line = columns * patch * CHANNELS  # bytes of a row of pixels
    stride = merge * merge * CHANNELS * patch * patch  # bytes of a merged patch
    height = len(pixels) // line
    ordered = bytearray(len(pixels))
    view = memoryview(pixels)
    for merge_y in range(merge):
        for y in range(patch):
            # pixel row y of patch row merge_y of every merged patch, one after another
            band = b"".join([view[top * line : (top + 1) * line] for top in range(merge_y * patch + y, height, merge * patch)])
            for merge_x in range(merge):
                for x in range(patch):
                    for channel in range(CHANNELS):
                        place = (((merge_y * merge + merge_x) * CHANNELS + channel) * patch + y) * patch + x
                        begin = (merge_x * patch + x) * CHANNELS + channel
                        ordered[place::stride] = band[begin :: merge * patch * CHANNELS]
    return bytes(ordered)
