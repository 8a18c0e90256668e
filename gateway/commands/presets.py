"""``yardstick presets``: lists the presets of the package, and prints or checks one."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Column, Table

from yardstick_llm.gateway.commands import CommandError
from yardstick_llm.gateway.presets.preset import FALLBACKS, ONE_CLASS, Preset, PresetError, builtin_presets, named, parse_preset


def list_presets() -> None:
    """Print a table of the presets in the package."""
    folded = [Column(name, overflow="fold") for name in ("models", "read after the prompt")]
    table = Table(Column("preset", no_wrap=True), "serves", *folded, "score")
    for name, preset in builtin_presets().items():
        table.add_row(name, preset.task, _models(preset), _read(preset), _score(preset))
    Console().print(table)


def show_preset(name: str) -> None:
    """Print the TOML text of a preset, by name or file. Raises :class:`CommandError` if it cannot be read."""
    try:
        text = named(name)
        parse_preset(text.encode())
    except PresetError as error:
        raise CommandError(f"{name}: {error}") from None
    sys.stdout.write(text)


def _models(preset: Preset) -> str:
    if preset.models:
        return ", ".join(preset.models)
    if preset.name == ONE_CLASS:
        return "others whose head has one number"
    fallback = (f"others that can {capability}" for capability, name in FALLBACKS.items() if name == preset.name)
    return next(fallback, "those of the setting `presets`")


def _read(preset: Preset) -> str:
    if preset.task == "embed":
        return "the embedding"
    if not preset.labels:
        return "the head"
    return ", ".join("/".join((label,) if isinstance(label, str) else label) for label in preset.labels)


def _score(preset: Preset) -> str:
    return "" if preset.task == "embed" else {"sigmoid": f"sigmoid of {preset.scale:g} x"}.get(preset.activation, preset.activation)
