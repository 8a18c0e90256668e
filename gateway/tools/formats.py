"""Formats of a model's answers that the settings choose."""

from __future__ import annotations

import msgspec

AUTOMATIC, NO_FORMAT = "auto", "none"
"""Formats that are chosen by the model's chat template, and that are not looked for."""


class Formats(msgspec.Struct, frozen=True):
    """Formats of a model's answers that the settings choose."""

    tool_parser: str = AUTOMATIC
    """Key of :data:`gateway.tools.families.registry.FAMILIES`, or one of the above."""
    reasoning_parser: str = AUTOMATIC
    """Key of :data:`gateway.tools.thinking.THINKING`, or one of the above."""
