"""Images of requests: data URLs, decoding to RGB with bounds that are checked before pixels are decoded, and patches.

Only worker processes decode: Pillow's decoders are C code that reads untrusted data. The result equals that of transformers for the
same file: the orientation of the EXIF data is applied (``transformers.image_utils.load_image``), transparency is put on white
(``transformers.image_transforms.convert_to_rgb``), and the pixels of patches are those of ``Qwen2VLImageProcessorPil`` before it
normalises them."""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
import warnings
import zlib
from io import BytesIO
from typing import Literal, NamedTuple

from PIL import Image as Pillow
from PIL import ImageOps

from yardstick_llm.engine.wire import Image, VisionInfo, image_digest
from yardstick_llm.gateway.errors import InvalidRequest

Reason = Literal[
    "data_url",  # the URL is not of a known form, or its base64 is not valid
    "format",  # the file is of no known format
    "pixels",  # too many pixels
    "scans",  # too many scans of a JPEG file
    "shape",  # extreme proportions, or sides that are too long
    "corrupt",  # the file is not valid
    "host",  # the URL's host is not allowed
    "fetch",  # the URL could not be fetched
    "model",  # the model reads no images
    "endpoint",  # the endpoint reads no images
    "count",  # too many images
    "tokens",  # the images have too many tokens
    "token",  # a text spells the token of an image
    "template",  # the chat template does not show the images
]
"""Why an image was refused; a label of the metric ``yardstick_images_refused_total``."""


class ImageError(ValueError):
    """An image cannot be used. The text is for the client and goes on after the name of the message part."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class InvalidImage(InvalidRequest):
    """The answer to a request with an image that cannot be used. The message names the field."""

    code = "invalid_image"

    def __init__(self, message: str, *, param: str | None = None, reason: Reason) -> None:
        super().__init__(message, param=param)
        self.reason: Reason = reason


_HEADER = re.compile(r"data:image/[A-Za-z0-9.+-]{1,32}(;[a-z]+=[A-Za-z0-9.+-]{1,64})*;base64", re.IGNORECASE)
MAX_HEADER = 256
"""Longest part of a data URL before its comma, in characters."""


def is_data_url(url: str) -> bool:
    """Whether ``url`` is meant as a data URL."""
    return url[:5].lower() == "data:"


def read_data_url(url: str) -> bytes:
    """Return the content of a data URL such as ``data:image/png;base64,iVBOR...``. Raises :class:`ImageError`."""
    comma = url.find(",", 0, MAX_HEADER)
    if comma < 0 or not _HEADER.fullmatch(url[:comma]):
        raise ImageError("data_url", "is not a data URL of an image; write it like data:image/png;base64,iVBOR...")
    return read_base64(url[comma + 1 :])


def read_base64(text: str) -> bytes:
    """Return the bytes of base64 without line breaks. Raises :class:`ImageError`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("data_url", "has content that is not base64") from None


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_SIDE = 1 << 16
"""Largest width and height in the header of a file, in pixels."""
MAX_RATIO = 200
"""Largest ratio of the sides, that of transformers' ``smart_resize``."""

_START_OF_SCAN = b"\xff\xda"
"""Begins each scan of a JPEG file. Coded data do not contain it; the other images of a file, such as thumbnails, have their own."""

_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
)
"""Exceptions that Pillow's parsers raise for corrupt files. A :class:`MemoryError` is the worker's."""


def decode(content: bytes, *, max_pixels: int, max_scanned: float = math.inf) -> Pillow.Image:
    """Return the image in ``content`` as RGB; of an animation, the first frame. Raises :class:`ImageError`.

    ``max_pixels``: most pixels of the image in the file, checked in its header. ``max_scanned``: most pixels of all scans.
    """
    if not content:
        raise ImageError("corrupt", "is an empty file")
    Pillow.MAX_IMAGE_PIXELS = None  # max_pixels is checked instead
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata
        image = _opened(content)
        _check_size(image, max_pixels)
        if scanned_pixels(image.width * image.height, content) > max_scanned:
            raise ImageError("scans", f"has too many scans for {image.width} x {image.height} pixels; store it with fewer")
        try:
            image.load()
            return _rgb(_oriented(image))
        except _ERRORS as error:
            raise ImageError("corrupt", f"is not a valid {image.format} file: {_short(error)}") from None


def scanned_pixels(pixels: int, content: bytes) -> int:
    """Return the number of pixels that a decoder passes over. Each scan of a JPEG file takes it as long as a tenth to a third of
    the image, even if the scan has 50 bytes."""
    return pixels * (max(1, content.count(_START_OF_SCAN)) if content.startswith(b"\xff\xd8") else 1)


def _opened(content: bytes) -> Pillow.Image:
    """Read the header."""
    try:
        return Pillow.open(BytesIO(content), formats=FORMATS)
    except _ERRORS:
        raise ImageError("format", "is not a valid PNG, JPEG, WebP, GIF or BMP file") from None


def _check_size(image: Pillow.Image, max_pixels: int) -> None:
    """Raise :class:`ImageError` for an image whose pixels must not be decoded."""
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError("pixels", f"has {width} x {height} pixels; at most {max_pixels} are accepted in one request")
    if min(width, height) < 1 or max(width, height) > MAX_SIDE:
        raise ImageError("shape", f"has {width} x {height} pixels; each side has 1 to {MAX_SIDE}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError("shape", f"has {width} x {height} pixels; one side must not be more than {MAX_RATIO} times the other")


def _oriented(image: Pillow.Image) -> Pillow.Image:
    """Apply the orientation of the EXIF data. Unreadable EXIF data are ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except _ERRORS:
        return image


def _rgb(image: Pillow.Image) -> Pillow.Image:
    """Convert to RGB; transparency is put on white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return Pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _short(error: BaseException) -> str:
    return str(error)[:100] or type(error).__name__


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
