"""Loads and unloads adapters in a thread of its own, on request and from a watched directory, so that steps go on meanwhile."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import wire
from engine.lora import config, tensors
from engine.lora.errors import AdapterError
from engine.lora.names import check_name
from engine.lora.registry import OFF, AdapterRegistry

logger = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
"""Time between two looks at the watched directory."""
MAX_COMMANDS = 64
FILES = config.FILE, tensors.FILE, config.MODEL_FILE
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
    files = [_file(directory / file) for file in (config.FILE, tensors.FILE)]
    try:
        return *files, _file(directory / config.MODEL_FILE)
    except FileNotFoundError:
        return *files, None


def _file(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
