"""Names of adapters."""

from __future__ import annotations

import re

from engine.lora.errors import AdapterError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(name: str, model: str) -> None:
    """Raise :class:`AdapterError` unless ``name`` may be the name of an adapter of ``model``."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise AdapterError("The name of an adapter has 1 to 128 letters, digits, dots, underscores and hyphens.")
    if name == model:
        raise AdapterError(f"{name} is the name of the base model; give the adapter another name.")
