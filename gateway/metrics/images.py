"""Metrics of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry

from gateway.metrics.base import Metrics


class Pixels(Protocol):
    """An image that is ready for an engine."""

    @property
    def pixels(self) -> memoryview:
        """The pixels of all patches."""


class ImageMetrics(Metrics):
    """Images of requests: received, refused and fetched."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._images = self._counter("images", "Images that were prepared for engines; equal ones of a request count once.")
        self._bytes = self._counter("image_bytes", "Bytes of the pixels of these images.")
        self._refused = self._counter("images_refused", "Requests that were refused because of an image.", "reason")
        self._fetches = self._counter("image_fetches", "Images that were fetched from URLs, by outcome.", "result")
        self._fetch_seconds = self._histogram("image_fetch_seconds", "Time that fetching an image takes.")

        self._held = self._gauge("image_bytes_held", "Bytes of fetched files and of pixels that requests in progress hold.")

    def watch(self, read: Callable[[], int]) -> None:
        """Report the bytes held that the function returns."""
        self._held.set_function(read)

    def read(self, images: Sequence[Pixels]) -> None:
        """Record the images of a request."""
        if images:
            self._images.inc(len(images))
            self._bytes.inc(sum(len(image.pixels) for image in images))

    def refused(self, reason: str) -> None:
        """Count a refused request, see :data:`gateway.images.decode.Reason`; ``room``: the server holds too many images."""
        self._refused.labels(reason).inc()

    def fetched(self, result: str, seconds: float) -> None:
        """Record a fetch: ``ok``, ``host`` or ``fetch``."""
        self._fetches.labels(result).inc()
        self._fetch_seconds.observe(seconds)
