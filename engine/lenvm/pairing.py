"""Checks that a length model fits a base model, and reads its γ. The weights of the length model contain neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.models.config import load_config
from engine.models.errors import ModelError
from engine.models.files import read_json

GAMMA_FILE = "lenvm.json"
DEFAULT_GAMMA = 0.997
"""Gamma of the checkpoints published with "Length Value Model", arXiv 2604.27039, for models of the Qwen2.5 generation."""


def gamma_of(directory: Path, given: float | None) -> float:
    """Return γ of the length model in ``directory``: ``given``, or the value of :data:`GAMMA_FILE`, or the default.

    Raises :class:`ModelError` if it is not in (0, 1).
    """
    path = directory / GAMMA_FILE
    stored = read_json(path).get("gamma") if path.is_file() else None
    gamma = next(value for value in (given, stored, DEFAULT_GAMMA) if value is not None)
    if not isinstance(gamma, float) or not 0 < gamma < 1:
        raise ModelError(f"The length model's gamma is {gamma!r}; give one between 0 and 1 with --lenvm-gamma.")
    return gamma


def check_pairing(base: Path, length: Path) -> None:
    """Check that token ids and images mean the same to both models.

    Raises :class:`ModelError` if their tokenisers differ or, if one has none, the sizes of their vocabularies, or if one alone
    reads images. With equal tokenisers a vocabulary may be padded.
    """
    vocabularies = [_vocabulary(directory) for directory in (base, length)]
    sizes = [load_config(directory).vocab_size for directory in (base, length)]
    towers = [load_config(directory).vision for directory in (base, length)]
    patches = [None if tower is None else (tower.patch_size, tower.merge_size) for tower in towers]
    if patches[0] != patches[1]:
        raise ModelError(
            f"The length model {length.name} and the model {base.name} do not read images alike; pair two models that read images "
            "in patches of one size, or two that read none."
        )
    alike = sizes[0] == sizes[1] if None in vocabularies else vocabularies[0] == vocabularies[1]
    if not alike:
        raise ModelError(
            f"The length model {length.name} does not have the vocabulary of the model {base.name} "
            f"({sizes[1]} and {sizes[0]} rows); give a length model that was trained for this model with --lenvm-model."
        )


def _vocabulary(directory: Path) -> dict[str, Any] | None:
    """Return token ids by text; None without a ``tokenizer.json``."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    vocabulary = content["model"]["vocab"]
    return {"added": added, "vocabulary": vocabulary}
