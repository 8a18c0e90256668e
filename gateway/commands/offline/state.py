"""The state file beside an output: it lets only the same command on the same input continue a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.commands.errors import WrongUsage
from gateway.commands.replace_file import replace_file

_FIRST_BYTES = 1 << 20


class Finished(msgspec.Struct, frozen=True):
    """Numbers of a run that has ended."""

    rows: int
    failed: int


class State(msgspec.Struct, frozen=True):
    """Content of the state file."""

    command: str
    options: str
    """Digest of the options that change results."""
    input_bytes: int
    input_start: str
    """Digest of the first MiB."""
    finished: Finished | None = None


def state_of(command: str, options: Mapping[str, Any], source: Path) -> State:
    """Return the state of a run that begins. Raises :class:`WrongUsage`."""
    try:
        with source.open("rb") as stream:
            start = stream.read(_FIRST_BYTES)
            size = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise WrongUsage(f"cannot read {source}: {(error.strerror or str(error)).lower()}") from None
    return State(command, _digest(msgspec.json.encode(options, order="sorted")), size, _digest(start))


def read_state(path: Path) -> State | None:
    """Return the content of a state file; None if there is none. Raises :class:`WrongUsage`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        remedy = "remove it and the output, or name another --output"
        raise WrongUsage(f"{path} is no state file of a run ({error}); {remedy}") from None


def check_same(found: State, new: State, output: Path) -> None:
    """Check that a run may continue. Raises :class:`WrongUsage` that says what has changed."""
    remedy = f"repeat the command that began {output}, or name another --output"
    if found.command != new.command:
        raise WrongUsage(f"{output} was begun by `yardstick {found.command}`; {remedy}")
    if found.options != new.options:
        raise WrongUsage(f"{output} was begun with other options; {remedy}")
    if (found.input_bytes, found.input_start) != (new.input_bytes, new.input_start):
        raise WrongUsage(f"the input has changed since {output} was begun; name another --output, or remove the old one")


def write_state(path: Path, state: State) -> None:
    """Replace the state file atomically. Raises :class:`CommandError`."""
    replace_file(path, msgspec.json.encode(state) + b"\n")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
