"""Bounds of stores, which settings give."""

from __future__ import annotations

from typing import NamedTuple


class CatalogueBounds(NamedTuple):
    """Bounds of a store, in bytes."""

    group_bytes: int
    """Bound of the catalogues of one owner."""
    bytes: int
    """Bound of all catalogues."""


class ResponseBounds(NamedTuple):
    """Bounds of a store."""

    entries: int
    bytes: int
    seconds: float
    """Time for which a response is kept."""
