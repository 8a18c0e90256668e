"""``yardstick keys``: edits the file of API keys that ``--api-keys-file`` names."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from yardstick_llm.gateway.commands import CommandError
from yardstick_llm.gateway.commands.files import replace_file
from yardstick_llm.gateway.keys import ApiKey, KeyFile, parse_keys

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
    _write(file, [*known, entry])
    try:
        print(key, flush=True)
    except OSError as error:  # the key was not shown, so nobody can use it
        _write(file, known)
        raise CommandError(f"no key was created, because it cannot be shown: {(error.strerror or str(error)).lower()}") from None
    print(f"This is the only time the key is shown; {file} keeps its hash. Serve with --api-keys-file {file}", file=sys.stderr)


def _write(file: Path, keys: Sequence[ApiKey]) -> None:
    text = msgspec.json.format(msgspec.json.encode(KeyFile([*keys])), indent=2) + b"\n"
    replace_file(file.resolve(), text, mode=0o600)


def _read(file: Path) -> list[ApiKey]:
    if not file.exists():
        return []
    try:
        keys, problems = parse_keys(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} is not a file of API keys ({error}); name another one") from None
    if problems:
        raise CommandError(f"{file} has entries that do not count ({problems[0]}); correct or remove them first")
    return keys
