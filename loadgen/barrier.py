"""Lets workers start together: each creates a file in a folder that all share, and waits until every worker's file is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from loadgen.arrivals import Share
from loadgen.errors import LoadError, reason_of

WAIT_SECONDS = 600.0
"""Longest wait for the other workers."""
_PAUSE = 0.05


async def meet(folder: Path, share: Share, stopped: Callable[[], bool]) -> None:
    """Return once all workers are ready, or the run was stopped. Raises :class:`LoadError` if they are not ready in time."""
    try:
        _enter(folder, share)
        deadline = time.monotonic() + WAIT_SECONDS
        while (ready := _ready(folder, share)) < share.of and not stopped():
            if time.monotonic() > deadline:
                remedy = "start all, with the same --together"
                raise LoadError(f"{ready} of {share.of} workers were ready within {WAIT_SECONDS:g} s; {remedy}")
            await asyncio.sleep(_PAUSE)
    except OSError as error:
        reason = reason_of(error)
        raise LoadError(f"cannot use {folder} for --together: {reason}; name a folder that all workers can write") from None


def _enter(folder: Path, share: Share) -> None:
    mine = folder / f"ready-{share.index}-of-{share.of}"
    folder.mkdir(parents=True, exist_ok=True)
    if mine.exists():
        raise LoadError(f"{mine} is left from an earlier run; choose another folder for --together")
    mine.touch(exist_ok=False)


def _ready(folder: Path, share: Share) -> int:
    return sum(1 for _ in folder.glob(f"ready-*-of-{share.of}"))
