"""``yardstick keys``, which edits the file of API keys that ``--api-keys-file`` names, and ``yardstick presets``, which lists the
presets of the package, and prints or checks one: the subcommands that need no server."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table

from yardstick_llm.gateway.commands import CommandError
from yardstick_llm.gateway.commands.files import reason_of, replace_file
from yardstick_llm.gateway.keys import ApiKey, KeyFile, parse_keys
from yardstick_llm.gateway.presets.preset import FALLBACKS, ONE_CLASS, Preset, PresetError, builtin_presets, named, parse_preset

_RANDOM_BYTES = 32


def new_key(name: str, file: Path, **fields: Any) -> None:
    """Add a key to ``file`` and print it once to standard output. ``fields`` are attributes of :class:`ApiKey`.

    Raises :class:`CommandError`.
    """
    known = _read_keys(file)
    if any(key.name == name for key in known):
        raise CommandError(f"{file} has a key named {name} already; choose another name, or remove that entry first")
    key = f"ys-{secrets.token_urlsafe(_RANDOM_BYTES)}"
    try:
        # convert: a constructor call would not check the values
        entry = msgspec.convert({"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}, ApiKey)
    except msgspec.ValidationError as error:
        raise CommandError(f"no key was created: {error}") from None
    _write_keys(file, [*known, entry])
    try:
        print(key, flush=True)
    except OSError as error:  # the key was not shown, so nobody can use it
        _write_keys(file, known)
        raise CommandError(f"no key was created, because it cannot be shown: {reason_of(error)}") from None
    print(f"This is the only time the key is shown; {file} keeps its hash. Serve with --api-keys-file {file}", file=sys.stderr)


def _write_keys(file: Path, keys: Sequence[ApiKey]) -> None:
    text = msgspec.json.format(msgspec.json.encode(KeyFile([*keys])), indent=2) + b"\n"
    replace_file(file.resolve(), text, mode=0o600)


def _read_keys(file: Path) -> list[ApiKey]:
    if not file.exists():
        return []
    try:
        keys, problems = parse_keys(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} is not a file of API keys ({error}); name another one") from None
    if problems:
        raise CommandError(f"{file} has entries that do not count ({problems[0]}); correct or remove them first")
    return keys


def list_presets() -> None:
    """Print a table of the presets in the package."""
    folded = [Column(name, overflow="fold") for name in ("models", "read after the prompt")]
    table = Table(Column("preset", no_wrap=True), "serves", *folded, "score")
    for name, preset in builtin_presets().items():
        table.add_row(name, preset.task, _models_of(preset), _reading(preset), _score_of(preset))
    Console().print(table)


def show_preset(name: str) -> None:
    """Print the TOML text of a preset, by name or file. Raises :class:`CommandError` if it cannot be read."""
    try:
        text = named(name)
        parse_preset(text.encode())
    except PresetError as error:
        raise CommandError(f"{name}: {error}") from None
    sys.stdout.write(text)


def _models_of(preset: Preset) -> str:
    if preset.models:
        return ", ".join(preset.models)
    if preset.name == ONE_CLASS:
        return "others whose head has one number"
    fallback = (f"others that can {capability}" for capability, name in FALLBACKS.items() if name == preset.name)
    return next(fallback, "those of the setting `presets`")


def _reading(preset: Preset) -> str:
    if preset.task == "embed":
        return "the embedding"
    if not preset.labels:
        return "the head"
    return ", ".join("/".join(label if isinstance(label, tuple) else (str(label),)) for label in preset.labels)


def _score_of(preset: Preset) -> str:
    return "" if preset.task == "embed" else {"sigmoid": f"sigmoid of {preset.scale:g} x"}.get(preset.activation, preset.activation)
