"""Names of adapters."""

from __future__ import annotations

from engine import wire
from engine.lora.errors import AdapterError


def check_name(name: str, model: str) -> None:
    """Raise :class:`AdapterError` unless ``name`` may be the name of an adapter of ``model``."""
    if not wire.ADAPTER_NAME.fullmatch(name) or name in {".", ".."}:
        raise AdapterError("The name of an adapter has 1 to 128 letters, digits, dots, underscores and hyphens.")
    if name == model:
        raise AdapterError(f"{name} is the name of the base model; give the adapter another name.")
