"""Reads the gateway's settings from the environment and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

import msgspec

from gateway.configuration.checks import PREFIX, SettingsError, invalid
from gateway.settings import Settings


def load_settings(environment: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Merge ``environment`` (names that begin with ``YARDSTICK_``) and ``flags`` (by attribute; None means not given; flags win).

    Raises :class:`SettingsError`.
    """
    known = Settings.__struct_fields__
    given: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        if name not in known:
            alike = " or ".join(PREFIX + field.upper() for field in get_close_matches(name, known))
            raise SettingsError(f"{variable}: there is no such setting; unset it{alike and f', or use {alike}'}")
        given[name] = [part.strip() for part in text.split(",") if part.strip()] if name in _LISTS else text
    given |= {name: value for name, value in flags.items() if value is not None}
    types = get_type_hints(Settings, include_extras=True)
    return Settings(**{"engines": ()} | {name: _convert(name, value, types[name]) for name, value in given.items()})


def _convert(name: str, value: object, kind: object) -> Any:
    """Convert ``value``, which may be text, to the type of the setting ``name``."""
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=lambda to, text: to(text))
    except msgspec.ValidationError as error:
        raise invalid(name, f"{value!r} does not fit", str(error)[:1].lower() + str(error)[1:]) from None


_LISTS = (
    "engines",
    "allowed_hosts",
    "cors_origins",
    "presets",
    "tool_parsers",
    "reasoning_parsers",
    "aliases",
    "fallbacks",
    "image_hosts",
)
