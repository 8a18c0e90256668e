"""The version of the project."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def project_version() -> str:
    """Return the version; "unknown" where the project was not installed by pip: in the engine's image, and in a checkout."""
    try:
        return version("yardstick-llm")
    except PackageNotFoundError:
        return "unknown"
