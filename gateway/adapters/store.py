"""The adapters that were loaded through the API, so that replicas that join later get them too."""

from __future__ import annotations

from typing import Protocol

import msgspec

from gateway.pool.adapters import Reference

MOST_KEPT = 256
"""Most adapters that are remembered, of all models together."""


class Unavailable(Exception):
    """The store cannot be read or changed at present."""


class Full(Exception):
    """There is no room for another adapter."""


class Loaded(msgspec.Struct, frozen=True):
    """An adapter that replicas should have."""

    base: str
    name: str
    path: str
    """The path that engines read."""
    digest: str
    """Digest that the first engine reported."""

    @property
    def reference(self) -> Reference:
        """Which adapter it is."""
        return Reference(self.base, self.name)


class LoadedStore(Protocol):
    """Where loaded adapters are remembered. Every method raises :class:`Unavailable`."""

    async def all(self) -> dict[Reference, Loaded]:
        """Return what is remembered."""

    async def put(self, loaded: Loaded) -> None:
        """Remember an adapter in place of an earlier one of its name. Raises :class:`Full`."""

    async def remove(self, reference: Reference) -> bool:
        """Forget an adapter; return whether it was remembered."""


class MemoryLoaded:
    """Remembers in this process: for one gateway, until it ends."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._loaded: dict[Reference, Loaded] = {}

    async def all(self) -> dict[Reference, Loaded]:
        """See :class:`LoadedStore`."""
        return dict(self._loaded)

    async def put(self, loaded: Loaded) -> None:
        """See :class:`LoadedStore`."""
        if loaded.reference not in self._loaded and len(self._loaded) >= self._most:
            raise Full
        self._loaded[loaded.reference] = loaded

    async def remove(self, reference: Reference) -> bool:
        """See :class:`LoadedStore`."""
        return self._loaded.pop(reference, None) is not None
