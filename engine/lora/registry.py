"""The adapters of an engine by name and digest. One thread changes it; the loop's thread reads it."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

from engine import wire
from engine.lora.adapter import LoadedAdapter
from engine.lora.errors import AdapterError
from engine.lora.names import check_name
from engine.lora.reader import AdapterReader
from engine.lora.slots import DeviceSlots

OFF = "it was started without --lora, --lora-directory and --lora-root"


class AdapterRegistry:
    """Loads, replaces and unloads adapters. A change that fails leaves everything as it was."""

    def __init__(self, reader: AdapterReader | None = None, slots: DeviceSlots | None = None, most: int = 0) -> None:
        """``reader``: None where the engine takes no adapters. ``most``: adapters at once."""
        self._reader = reader
        self._slots = slots
        self._most = most
        self._by_name: dict[str, LoadedAdapter] = {}
        self._by_digest: dict[str, LoadedAdapter] = {}
        """Replaced as a whole, because another thread reads it."""
        self._unloaded: weakref.WeakSet[LoadedAdapter] = weakref.WeakSet()
        """Unloaded adapters that requests still use."""
        self._loads = self._failures = 0
        self._seconds = 0.0

    @classmethod
    def of(cls, adapter: LoadedAdapter) -> AdapterRegistry:
        """A registry of one adapter, which loads no others."""
        registry = cls()
        registry._by_digest = {adapter.digest: adapter}
        return registry

    def get(self, digest: str) -> LoadedAdapter | None:
        """The adapter of this digest; None if there is none, or for an empty digest."""
        return self._by_digest.get(digest) if digest else None

    def named(self, name: str) -> LoadedAdapter | None:
        """The adapter of this name."""
        return self._by_name.get(name)

    @property
    def description(self) -> wire.Adapters:
        """All adapters, by name."""
        if self._reader is None:
            return wire.Adapters([], problem=OFF)
        adapters = [self._by_name[name].description for name in sorted(self._by_name)]
        return wire.Adapters(adapters, self._most, self._reader.max_rank)

    @property
    def counts(self) -> dict[str, Any]:
        """Fields of :class:`engine.wire.Stats`."""
        return {
            "adapters": len(self._by_name),
            "adapter_bytes": sum(adapter.description.bytes for adapter in self._held()),
            "adapter_loads": self._loads,
            "adapter_load_failures": self._failures,
            "adapter_load_seconds": self._seconds,
            "adapter_swaps": 0 if self._slots is None else self._slots.swaps,
        }

    def load(self, name: str, directory: Path, *, replace: bool = False) -> LoadedAdapter:
        """Load the adapter in ``directory``, or return the one that has this name and these files. Raises :class:`AdapterError`."""
        began = time.perf_counter()
        try:
            adapter = self._load(name, directory, replace=replace)
        except AdapterError:
            self._failures += 1
            raise
        finally:
            self._seconds += time.perf_counter() - began
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter; requests in progress finish with it. Raises :class:`AdapterError`."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise AdapterError(f"There is no adapter {name[:128]!r} to unload.", "unknown_adapter")
        self._retire(adapter)

    def _load(self, name: str, directory: Path, *, replace: bool) -> LoadedAdapter:
        if self._reader is None:
            raise AdapterError(f"This engine takes no adapters: {OFF}.")
        check_name(name, self._reader.info.model)
        old = self._by_name.get(name)
        if old is None and len(self._by_name) >= self._most:
            raise AdapterError(f"This engine has {self._most} adapters, the most it takes (--max-loras); unload one first.")
        if len(self._unloaded) >= self._most:
            reason = "Requests still use as many unloaded adapters as the engine takes; try again when they have ended."
            raise AdapterError(reason, "overloaded", retryable=True)
        adapter = self._reader.read(name, directory)
        if old is not None and old.digest == adapter.digest:
            return old
        if old is not None and not replace:
            raise AdapterError(f"The adapter {name} has other weights now; unload it first, or replace it with `load_inplace`.")
        self._by_name[name] = adapter
        self._loads += 1
        self._retire(old)
        return adapter

    def _held(self) -> set[LoadedAdapter]:
        """All adapters in host memory, those of equal files under two names twice. Other threads may change the collections, so
        these are copied first."""
        return {*list(self._by_name.values()), *list(self._unloaded)}

    def _retire(self, old: LoadedAdapter | None) -> None:
        self._by_digest = {adapter.digest: adapter for adapter in self._by_name.values()}
        if old is not None:
            self._unloaded.add(old)
