"""The adapters of an engine by name and digest, and the thread that changes them, on request and from a watched directory, so that
steps go on meanwhile. The loop's thread reads the registry."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.lora.config import CONFIG_FILE, MODEL_FILE, AdapterError, check_name
from yardstick_llm.engine.models.lora.reader import WEIGHTS_FILE, AdapterReader
from yardstick_llm.engine.models.lora.slots import DeviceSlots, LoadedAdapter

logger = logging.getLogger(__name__)


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


WATCH_SECONDS = 2.0
"""Time between two looks at the watched directory."""
MAX_COMMANDS = 64
FILES = CONFIG_FILE, WEIGHTS_FILE, MODEL_FILE
"""Files of an adapter that are read."""
MAX_ENTRIES = 10_000
"""Entries of the watched directory that are looked at."""

Command = wire.LoadAdapter | wire.UnloadAdapter
Answer = Callable[[wire.Adapter | wire.Failed | None], None]
Signature = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of change of each file that an adapter's digest depends on; None for one that it lacks."""


class LoraManager:
    """The thread that changes an :class:`AdapterRegistry`."""

    def __init__(
        self,
        registry: AdapterRegistry,
        changed: Callable[[wire.Adapters], None],
        *,
        root: Path | None = None,
        watched: Path | None = None,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        """``changed``: called in this thread with all adapters after each change. ``root``: the directory below which commands may
        load; None: nowhere. ``watched``: see :attr:`engine.settings.EngineSettings.lora_directory`."""
        self._registry = registry
        self._changed = changed
        self._root = root
        self._watched = watched
        self._seconds = watch_seconds
        self._commands: queue.Queue[tuple[Command, Answer]] = queue.Queue(MAX_COMMANDS)
        self._seen: dict[str, Signature] = {}
        """Files of each watched adapter at the last look."""
        self._tried: dict[str, Signature] = {}
        """Files of each watched adapter that were loaded, or that could not be."""
        self._own: set[str] = set()
        """Names that were loaded from the watched directory."""

    def start(self) -> None:
        """Load the adapters of the watched directory, and start the thread."""
        self.look(settled=True)
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def submit(self, command: Command, answer: Answer) -> None:
        """Queue a command; ``answer`` is called once, at once if the queue is full."""
        try:
            self._commands.put_nowait((command, answer))
        except queue.Full:
            answer(wire.Failed("", "overloaded", "Too many adapters wait to be loaded.", retryable=True, retry_after=1.0))

    def execute(self, command: Command) -> wire.Adapter | wire.Failed | None:
        """Load or unload an adapter; None: it is unloaded."""
        try:
            if isinstance(command, wire.LoadAdapter):
                adapter = self._registry.load(command.name, self._directory(command.path), replace=command.replace)
                self._own.discard(command.name)
                return adapter.description
            self._registry.unload(command.name)
            self._own.discard(command.name)
        except AdapterError as error:
            return wire.Failed("", error.code, str(error), retryable=error.retryable)
        except (OSError, MemoryError, RuntimeError):
            logger.exception("the adapter %s cannot be loaded", command.name[:128])
            return wire.Failed("", "internal", "The adapter cannot be loaded; the engine's log says why.")
        return None

    def look(self, *, settled: bool = False) -> None:
        """Follow the watched directory. An adapter is read when its files are as they were at the last look, or if ``settled``."""
        if self._watched is None:
            return
        found = dict(_adapters(self._watched))
        for name, files in found.items():
            if self._tried.get(name) != files and (settled or self._seen.get(name) == files):
                self._tried[name] = files
                self._follow(name, self._watched / name)
        for name in [name for name in self._tried if name not in found]:
            del self._tried[name]
            if name in self._own:
                self._own.discard(name)
                self._unload(name)
        self._seen = found

    def _run(self) -> None:
        while True:
            try:
                command, answer = self._commands.get(timeout=None if self._watched is None else self._seconds)
            except queue.Empty:
                before = self._registry.description
                try:
                    self.look()
                except (OSError, MemoryError, RuntimeError):
                    logger.exception("the directory of adapters cannot be followed")
                if self._registry.description != before:
                    self._changed(self._registry.description)
                continue
            result = self.execute(command)
            self._changed(self._registry.description)
            answer(result)

    def _follow(self, name: str, directory: Path) -> None:
        try:
            if self._registry.named(name) is not None and name not in self._own:
                raise AdapterError(f"{name} was loaded in another way; unload it first.")
            self._registry.load(name, directory, replace=True)
        except AdapterError as error:
            logger.warning("the watched adapter %s is not loaded: %s", name, error)
            if error.retryable:
                del self._tried[name]
        else:
            self._own.add(name)
            logger.info("loaded the watched adapter %s", name)

    def _unload(self, name: str) -> None:
        try:
            self._registry.unload(name)
        except AdapterError:
            return  # a command was faster
        logger.info("unloaded the watched adapter %s, which was removed", name)

    def _directory(self, path: str) -> Path:
        """The directory that a command names. Raises :class:`AdapterError` if it may not be loaded."""
        if self._registry.description.max_adapters == 0:
            raise AdapterError(f"This engine takes no adapters: {OFF}.")
        if self._root is None:
            raise AdapterError("This engine loads no adapters on request; start it with --lora-root.")
        root = self._root.resolve()
        try:
            directory = (root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            directory = root.parent
        if directory == root or not directory.is_relative_to(root):
            raise AdapterError("The path is not below the directory of --lora-root.")
        if not directory.is_dir():
            raise AdapterError("There is no such directory below that of --lora-root.", "invalid")
        for file in FILES:
            if not Path(os.path.realpath(directory / file)).is_relative_to(root):
                raise AdapterError(f"{file} is a link to a file that is not below the directory of --lora-root.")
        return directory


def _adapters(directory: Path) -> Iterator[tuple[str, Signature]]:
    """Name and files of each adapter in a watched directory."""
    try:
        names = sorted(entry.name for _, entry in zip(range(MAX_ENTRIES), directory.iterdir(), strict=False))
    except OSError as error:
        logger.warning("the directory of adapters cannot be read: %s", error.strerror)
        return
    for name in names:
        try:
            if not name.startswith("."):
                check_name(name, "")
                yield name, _signature(directory / name)
        except (OSError, AdapterError):
            continue  # no adapter, or not all of it yet


def _signature(directory: Path) -> Signature:
    """Raises :class:`OSError` where a file that an adapter needs is missing."""
    files = [_file(directory / file) for file in (CONFIG_FILE, WEIGHTS_FILE)]
    try:
        return *files, _file(directory / MODEL_FILE)
    except FileNotFoundError:
        return *files, None


def _file(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
