"""The error of a model that cannot be served."""

from __future__ import annotations


class ModelError(Exception):
    """A model directory is absent, unsupported or damaged.

    The message is one or two plain sentences for the person who starts the engine: which file, key or tensor is wrong (file
    names without their directories) and what to do about it.
    """
