"""Chooses the preset of a served model: the server's setting, then ``yardstick.toml`` beside the weights, then the model's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path

from gateway.presets.preset import MAX_BYTES, Preset, PresetError, parse_preset

FALLBACKS = {"classify": "classifier", "embed": "embedding", "score": "judge"}
"""Presets of models that no other preset is for, by the first of these capabilities that the model has."""
ONE_CLASS = "cross-encoder"
"""Preset in place of "classifier" of a model whose head has one number: such a model is a reranker."""
TASK_WORDS = ("rerank", "zerank", "guard", "reward", "embed")
NO_PRESET = "none"
"""Value of the setting for a model that should have none."""


@cache
def builtin() -> dict[str, str]:
    """Return the TOML text of each preset in the package, by name."""
    folder = files("gateway.presets") / "builtin"
    return {file.name.removesuffix(".toml"): file.read_text("utf-8") for file in sorted(folder.iterdir(), key=str)}


@cache
def builtin_presets() -> dict[str, Preset]:
    """Return the presets in the package, by name."""
    return {name: parse_preset(text.encode()) for name, text in builtin().items()}


def choose(
    model: str,
    architecture: str,
    capabilities: Collection[str],
    *,
    classes: int = 0,
    beside: str | None,
    chosen: Mapping[str, str],
) -> str | None:
    """Return the TOML text of the preset of ``model``; None if it has none. Raises :class:`PresetError`.

    ``classes``: numbers of the model's head. ``beside``: the text of ``yardstick.toml`` beside the weights. ``chosen``: the setting
    ``presets``, from model name to the name or file of a preset.
    """
    name = chosen.get(model) or chosen.get(_short(model))
    if name == NO_PRESET:
        return None
    if name is not None or beside is not None:
        text = beside or "" if name is None else named(name)
        if problem := unreadable(parse_preset(text.encode()), capabilities, classes):
            raise PresetError(problem)
        return text
    fitting = [
        name
        for name, preset in builtin_presets().items()
        if fits(preset, model, architecture) and not unreadable(preset, capabilities, classes)
    ]
    # A name that fits several presets does not say which prompt is right.
    name = fitting[0] if len(fitting) == 1 else fallback_of(capabilities, classes)
    return None if name is None else builtin()[name]


def is_fallback(preset: str, model: str, *, beside: str | None, chosen: Mapping[str, str]) -> bool:
    """Whether the preset of this name was taken because no other is for ``model``; the other arguments are those of
    :func:`choose`."""
    named_by_operator = beside is not None or model in chosen or _short(model) in chosen
    return preset in (*FALLBACKS.values(), ONE_CLASS) and not named_by_operator


def names_a_task(model: str) -> bool:
    """Whether a model's name says that it was trained with a prompt of its own, which no fallback has."""
    return any(word in _short(model) for word in TASK_WORDS)


def unreadable(preset: Preset, capabilities: Collection[str], classes: int) -> str | None:
    """Return why ``preset`` cannot serve a model with these capabilities, whose head has ``classes`` numbers; None if it can."""
    if preset.task == "embed":
        return None if "embed" in capabilities else f"{preset.name} is for embeddings, and the model has none"
    if preset.labels:
        return None if "score" in capabilities else f"{preset.name} reads probabilities of tokens, and the model has none"
    if "classify" not in capabilities:
        return f"{preset.name} reads a classification head, and the model has none"
    if preset.task == "rerank" and classes > 1:
        return f"{preset.name} reads one number, and the model's head has {classes} classes"
    return None


def fallback_of(capabilities: Collection[str], classes: int) -> str | None:
    """Return the name of the preset of a model that no other preset is for."""
    name = next((name for capability, name in FALLBACKS.items() if capability in capabilities), None)
    return ONE_CLASS if name == FALLBACKS["classify"] and classes == 1 else name


def named(name: str) -> str:
    """Return the text of the preset called ``name``, or in the file ``name``. Raises :class:`PresetError`."""
    if name in builtin():
        return builtin()[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise PresetError(f"there is no preset {name!r}; name one of {', '.join(builtin())}, or a .toml file")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(f"the file {name!r} cannot be read: {error}") from None


def fits(preset: Preset, model: str, architecture: str) -> bool:
    """Whether ``preset`` is for models of this name and architecture."""
    named = any(fnmatchcase(_short(model), pattern.lower()) for pattern in preset.models)
    return named and (not preset.architectures or architecture in preset.architectures)


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
