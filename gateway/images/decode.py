"""Decodes image files to RGB, with bounds that are checked before pixels are decoded.

Only worker processes decode: Pillow's decoders are C code that reads untrusted data. The result equals that of transformers for the
same file: the orientation of the EXIF data is applied (``transformers.image_utils.load_image``), and transparency is put on white
(``transformers.image_transforms.convert_to_rgb``).
"""

from __future__ import annotations

import math
import struct
import warnings
import zlib
from io import BytesIO

from PIL import Image as Pillow
from PIL import ImageOps

from gateway.images.errors import ImageError

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
