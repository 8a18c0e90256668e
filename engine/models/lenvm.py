"""The length-value model: a decoder and a small head that predicts how much of a text is still to come.

Checkpoint and convention as published with "Length Value Model", arXiv 2604.27039: v = sigmoid(z) = 1 − γ^remaining in (0, 1),
larger for longer. γ is not part of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn

from yardstick_llm.engine import wire
from yardstick_llm.engine.models import checkpoint
from yardstick_llm.engine.models.checkpoint import ADAPTER, Read, Stored, StoredCodes, read_codes
from yardstick_llm.engine.models.config import ModelConfig, load_config
from yardstick_llm.engine.models.decoder import Attend
from yardstick_llm.engine.models.files import ModelError, is_gguf, read_json
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.formats.published import read_stored
from yardstick_llm.engine.models.gguf.tokenizer import tokenizer_document
from yardstick_llm.engine.models.loader import HEAD, decoder_views, fill, make_decoder, write_checkpoint
from yardstick_llm.engine.models.modules import Linear
from yardstick_llm.engine.models.registry import family_of
from yardstick_llm.engine.models.rope import LongRope
from yardstick_llm.engine.models.source import locate

GAMMA_FILE = "lenvm.json"
DEFAULT_GAMMA = 0.997
"""Gamma of the checkpoints published with "Length Value Model", arXiv 2604.27039, for models of the Qwen2.5 generation."""


def facts_of(directory: Path) -> dict[str, Any]:
    """Return :data:`GAMMA_FILE` of the length model in ``directory``; empty without it. Raises :class:`ModelError`."""
    path = directory / GAMMA_FILE
    return read_json(path) if path.is_file() else {}


def gamma_of(directory: Path, given: float | None) -> float:
    """Return γ of the length model in ``directory``: ``given``, or the value of :data:`GAMMA_FILE`, or the default.

    Raises :class:`ModelError` if it is not in (0, 1).
    """
    stored = facts_of(directory).get("gamma")
    gamma = next(value for value in (given, stored, DEFAULT_GAMMA) if value is not None)
    if not isinstance(gamma, float) or not 0 < gamma < 1:
        raise ModelError(f"The length model's gamma is {gamma!r}; give one between 0 and 1 with --lenvm-gamma.")
    return gamma


def calibration_of(directory: Path) -> wire.Calibration | None:
    """Return the calibration in :data:`GAMMA_FILE`; None if there is none. Raises :class:`ModelError` if it is damaged."""
    stored = facts_of(directory).get("calibration")
    try:
        found = None if stored is None else msgspec.convert(stored, wire.Calibration)
        if found is not None:
            sizes = {len(ratios) for ratios in found.log_ratio.values()}
            if sizes != {len(found.edges) + 1} or found.edges != sorted(found.edges) or not all(map(_is_level, found.log_ratio)):
                raise ValueError("its levels, bins or bounds do not fit")
    except ValueError as error:
        raise ModelError(f"The calibration in {GAMMA_FILE} is damaged ({error}); train the length model again.") from None
    return found


def unit_tokens_of(directory: Path) -> dict[wire.LengthUnit, float]:
    """Return the tokens of a word, sentence or character in :data:`GAMMA_FILE`, as far as they were measured. Raises
    :class:`ModelError` if they are no positive numbers."""
    stored = facts_of(directory).get("unit_tokens", {})
    try:
        return msgspec.convert(stored, dict[wire.LengthUnit, Annotated[float, msgspec.Meta(gt=0, le=1e6)]])
    except ValueError as error:
        raise ModelError(
            f"unit_tokens in {GAMMA_FILE} are damaged ({error}); measure them with `lenvm evaluate --calibrate`."
        ) from None


def _is_level(name: str) -> bool:
    return 0 < float(name) < 1


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

    stored, own = facts_of(length).get("tokenizer"), tokenizer_digest(base)
    if stored is not None and own is not None and stored != own:
        raise ModelError(
            f"The length model {length.name} was trained for another tokeniser than that of the model {base.name}; give a length "
            "model that was trained for this model with --lenvm-model."
        )


def tokenizer_digest(directory: Path) -> str | None:
    """Return a digest of the token ids by text, 32 hexadecimal digits; None for a folder without a ``tokenizer.json``."""
    vocabulary = _vocabulary(directory)
    return None if vocabulary is None else hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()[:32]


def _vocabulary(directory: Path) -> dict[str, Any] | None:
    """Return token ids by text, also of a GGUF file; None for a folder without a ``tokenizer.json``."""
    path = directory / "tokenizer.json"
    if not is_gguf(directory) and not path.is_file():
        return None
    content = tokenizer_document(directory) if is_gguf(directory) else read_json(path)
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    vocabulary = content["model"]["vocab"]
    return {"added": added, "vocabulary": vocabulary}


HEAD_PREFIX = "v_head."


class ValueHead(nn.Module):
    """Linear, SiLU, Linear to one number. Weights are uninitialised until a loader or a trainer fills them."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc = Linear(hidden_size, hidden_size, dtype=dtype)
        self.summary = Linear(hidden_size, 1, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] after the final norm. -> z, [rows], float32."""
        return self.summary(nn.functional.silu(self.fc(hidden))).squeeze(-1).float()  # type: ignore[no-any-return]


class LenVM(nn.Module):
    """A decoder without a language-model head, and the value head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.decoder = make_decoder(dataclasses.replace(config, tied=True, classes=()), dtype)
        self.head = ValueHead(config.hidden_size, dtype)

    @property
    def config(self) -> ModelConfig:
        """The decoder's; always tied, because there is no other head."""
        return self.decoder.config

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Hidden rows of a flat run of tokens, as :meth:`Decoder.forward`: [tokens or rows, hidden]."""
        return self.decoder(tokens, positions, attend, rows)  # type: ignore[no-any-return]

    def value(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden: [rows, hidden]. -> (z, v), [rows] each, float32, v = sigmoid(z)."""
        z = self.head(hidden)
        return z, z.sigmoid()

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Checkpoint name of each tensor of the value head -> its parameter, detached and writable."""
        return {HEAD_PREFIX + name: parameter.detach() for name, parameter in self.head.named_parameters()}


def check_servable(config: ModelConfig) -> None:
    """Raise :class:`ModelError` for an architecture that a length model cannot have."""
    if not config.attends_plainly:
        raise ModelError(
            f"A length model cannot have sliding windows, soft caps or scales of attention, as this {config.architecture} has."
        )
    if isinstance(config.rope, LongRope):
        raise ModelError(f"A length model cannot have rotations of the type longrope, as this {config.architecture} has.")


_LAYER = re.compile(rf"(?:{re.escape(checkpoint.BODY_PREFIX)})?layers\.(\d+)\.")


def first_layers(config: ModelConfig, layers: int | None) -> ModelConfig:
    """Return the configuration of the first ``layers`` layers and the final norm; None: of all. Raises :class:`ModelError`."""
    if layers is None:
        return config
    if layers > config.num_layers:
        raise ModelError(f"The model has {config.num_layers} layers, not {layers}; give a smaller --layers.")
    unrotated = tuple(layer for layer in config.unrotated if layer < layers)
    return dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers], unrotated=unrotated)


def weights_of(stored: Mapping[str, Stored], layers: int | None) -> dict[str, Stored]:
    """Return the weights that a model of the first ``layers`` layers has; None: all."""
    found = {name: _LAYER.match(name) for name in stored}
    return {name: each for name, each in stored.items() if layers is None or (at := found[name]) is None or int(at[1]) < layers}


def load_lenvm(
    model: str | Path,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    layers: int | None = None,
    base: Path | None = None,
) -> LenVM:
    """The value model in a directory or hub repository, converted to ``dtype``, in evaluation mode.

    ``quantize``: as :func:`~engine.models.loader.load_model`; the value head stays in ``dtype``. The checkpoint's ``lm_head`` is
    ignored, unless it is all there is of a tied embedding. ``layers``: the first ones, which are loaded; None: all. ``base``: the
    model that it adds to, where it is an adapter. Raises :class:`~engine.models.files.ModelError`.
    """
    directory = locate(model)
    config = first_layers(load_config(directory), layers)
    check_servable(config)
    value_model = LenVM(config, dtype)
    ignored, unread = [HEAD], tuple[str, ...]()
    if is_adapter(directory):  # its weights are those of a whole model
        layers, ignored, unread = config.num_layers, [HEAD, "score.weight"], family_of(config.architecture).unread
    stored = weights_of(_read_headers(directory, base), layers)
    head = value_model.checkpoint_views()
    checkpoint.check(stored, decoder_views(value_model.decoder, stored) | head, ignored, unread)
    checkpoint.copy(stored, head)
    fill(value_model.decoder, stored, quantize)
    return value_model.eval()


def save_lenvm(model: LenVM, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json`` and one ``model.safetensors`` with decoder and head; ``dtype`` None keeps the model's."""
    write_checkpoint(model.decoder.checkpoint_views() | model.checkpoint_views(), model.config, directory, dtype)


def _read_headers(directory: Path, base: Path | None) -> dict[str, Stored]:
    """The main weights, and the head's own file where they do not hold the head."""
    if is_adapter(directory):
        if base is None:
            raise ModelError(f"The length model {directory.name} is an adapter, which is loaded with the model that it adds to.")
        stored = with_additions(read_stored(base), checkpoint.read_header(directory / ADAPTER))
    else:
        stored = read_stored(directory)
    if not any(name.startswith(HEAD_PREFIX) for name in stored):
        stored |= checkpoint.read_header(directory / checkpoint.VALUE_HEAD)
    return stored


DOWN, UP = ".lora_A", ".lora_B"
"""Behind a weight's name: the matrices [rank, in] and [out, rank] whose product an adapter adds to it."""


def is_adapter(directory: Path) -> bool:
    """Whether a length model consists of low-rank additions to another model, and a head."""
    return (directory / ADAPTER).is_file()


def with_additions(stored: Mapping[str, Stored], additions: Mapping[str, Stored]) -> dict[str, Stored]:
    """``stored`` with the product of two matrices of ``additions`` added to each weight that they name. Raises
    :class:`ModelError` if a weight is missing or its shape does not fit."""
    found = dict(stored)
    names = {name.removesuffix(DOWN).removesuffix(UP) for name in additions}
    for name in names:
        weight, down, up = stored.get(name), additions.get(name + DOWN), additions.get(name + UP)
        wanted = () if down is None or up is None else (up.shape[0], down.shape[-1])
        if weight is None or down is None or up is None or weight.shape != wanted or up.shape[1:] != down.shape[:1]:
            raise ModelError(
                f"The length model adds {name}, which the served model has in no such shape; serve the model that it was made for."
            )
        found[name] = StoredCodes(weight.path, weight.shape, weight.dtype, weight.name, partial(_sum, weight, down, up))
    return found


def _sum(weight: Stored, down: Stored, up: Stored, read: Read) -> Tensor:
    """The weight with the addition, [out, in] float32."""
    own = read_codes(weight, read) if isinstance(weight, StoredCodes) else read(weight)
    dense = own.dequantize() if isinstance(own, CodedWeight) else own
    return dense.float() + read(up).float() @ read(down).float()
