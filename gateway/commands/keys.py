"""``yardstick keys``: edits the file of API keys that ``--api-keys-file`` names."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec

from gateway.commands.errors import CommandError
from gateway.keys import ApiKey, KeyFile, parse_keys

_RANDOM_BYTES = 32


def new(name: str, file: Path, **fields: Any) -> None:
    """Add a key to ``file`` and print it once to standard output. ``fields`` are attributes of :class:`ApiKey`.

    Raises :class:`CommandError`.
    """
    known = _read(file)
    if any(key.name == name for key in known):
        raise CommandError(f"{file} has a key named {name} already; choose another name, or remove that entry first")
    key = f"ys-{secrets.token_urlsafe(_RANDOM_BYTES)}"
    try:
        # convert: a constructor call would not check the values
        entry = msgspec.convert({"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}, ApiKey)
    except msgspec.ValidationError as error:
        raise CommandError(f"no key was created: {error}") from None
    _write(file, KeyFile([*known, entry]))
    print(key)
    print(f"This is the only time the key is shown; {file} keeps its hash. Serve with --api-keys-file {file}", file=sys.stderr)


def _read(file: Path) -> list[ApiKey]:
    if not file.exists():
        return []
    try:
        return parse_keys(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} is not a file of API keys ({error}); name another one") from None


def _write(file: Path, content: KeyFile) -> None:
    """Replace the file atomically, readable by its owner only."""
    text = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(text)
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CommandError(f"cannot write {file}: {(error.strerror or str(error)).lower()}") from None
