"""Settings with an entry ``NAME=VALUE`` for each model: presets, formats of answers, aliases and fallbacks.

The functions return the entries as a dictionary and raise :class:`~gateway.configuration.checks.SettingsError` for an invalid one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from gateway.configuration.checks import invalid
from gateway.output.answer import NO_FORMAT, THINKING, Formats
from gateway.output.families import FAMILIES
from gateway.presets.preset import NO_PRESET, PresetError, named, parse_preset


def read_presets(entries: Sequence[str]) -> dict[str, str]:
    """Return the name or file of the preset of each model."""
    chosen = {}
    for entry, model, preset in _of_models("presets", entries, "PRESET"):
        if preset != NO_PRESET:
            try:
                parse_preset(named(preset).encode())
            except PresetError as error:
                raise invalid("presets", f"{entry!r}: {error}", "correct it") from None
        chosen[model] = preset
    return chosen


def read_formats(tool_parsers: Sequence[str], reasoning_parsers: Sequence[str]) -> dict[str, Formats]:
    """Return the formats of the answers of each model."""
    formats: dict[str, Formats] = {}
    settings: tuple[tuple[str, Sequence[str], Collection[str]], ...] = (
        ("tool_parsers", tool_parsers, FAMILIES),
        ("reasoning_parsers", reasoning_parsers, THINKING),
    )
    for setting, entries, known in settings:
        field = setting.removesuffix("s")
        for entry, model, name in _of_models(setting, entries, "FORMAT"):
            if name != NO_FORMAT and name not in known:
                choices = ", ".join([*known, NO_FORMAT])
                raise invalid(setting, f"{entry!r} names no format", f"write one of {choices}")
            formats[model] = msgspec.structs.replace(formats.get(model, Formats()), **{field: name})
    return formats


def read_aliases(entries: Sequence[str]) -> dict[str, str]:
    """Return the model of each alias."""
    chosen = _unique("aliases", entries, "ALIAS=MODEL")
    for alias, model in chosen.items():
        if model in chosen:
            raise invalid("aliases", f"{alias!r} stands for {model!r}, which is an alias", "name the model itself")
    return chosen


def read_fallbacks(entries: Sequence[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the fallback of each model. ``aliases``: from :func:`read_aliases`."""
    chosen = _unique("fallbacks", entries, "MODEL=FALLBACK")
    for model, fallback in chosen.items():
        if model in aliases:
            raise invalid("fallbacks", f"{model!r} is an alias", f"name the model itself, {aliases[model]!r}")
        if aliases.get(fallback, fallback) == model:
            raise invalid("fallbacks", f"{model!r} cannot replace itself", "name another model")
    return chosen


def _of_models(setting: str, entries: Sequence[str], kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield each entry ``MODEL=NAME`` with its model, which may contain ``=``, and its name."""
    for entry in entries:
        model, _, name = entry.rpartition("=")
        if not model or not name:
            raise invalid(setting, f"{entry!r} names no model and {kind.lower()}", f"write MODEL={kind}")
        yield entry, model, name


def _unique(setting: str, entries: Sequence[str], form: str) -> dict[str, str]:
    """Return the entries ``NAME=VALUE``, of which no two have the same name."""
    pairs: dict[str, str] = {}
    for entry in entries:
        key, _, value = (part.strip() for part in entry.partition("="))
        if not key or not value:
            raise invalid(setting, f"{entry!r} does not name both", f"write {form}")
        if key in pairs:
            raise invalid(setting, f"{key!r} has two entries", "keep one of them")
        pairs[key] = value
    return pairs
