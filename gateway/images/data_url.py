"""Reads images in data URLs (RFC 2397), strictly: base64 only, of a type that says image."""

from __future__ import annotations

import base64
import binascii
import re

from gateway.images.errors import ImageError

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
