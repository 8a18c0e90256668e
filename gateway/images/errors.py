"""The errors of an image that cannot be used."""

from __future__ import annotations

from typing import Literal

from gateway.errors import InvalidRequest

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
