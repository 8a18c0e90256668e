"""The parameters of the guided draws of one step: on the host, and as tensors on the device.

As with :mod:`engine.device.sampling_rows`, what all draws of a request have in common is packed once, as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import wire
from engine.batch import CandidatePass
from engine.device.sampling_rows import SamplingRows
from engine.device.transfer import Upload
from engine.requests.length_guidance import target
from kernels.length_tilt import RULES, Tilts

GUIDANCE = np.dtype([("rule", "i8"), ("scale", "f8"), ("log_gamma", "f8"), ("value_min", "f8"), ("entropy_threshold", "f8")])
"""Guidance of a request. rule: its place in :data:`RULES`; log_gamma: NaN for the length model's own."""


@dataclass(slots=True)
class GuidedRows:
    """Guided draws of one step, [rows] each unless said otherwise."""

    sampling: SamplingRows = field(default_factory=SamplingRows)
    packed: list[bytes] = field(default_factory=list)
    """:func:`pack`"""
    top_k: list[int] = field(default_factory=list)
    """Most candidates."""
    ends: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens, beside the end of sequence, that end the section."""
    passes: list[CandidatePass] = field(default_factory=list)
    any_greedy: bool = False
    """Whether some row has temperature 0."""
    targets: dict[int, tuple[wire.LengthGuidance, int]] = field(default_factory=dict)
    """Guidance of the rows that have a constraint, by place, and the output tokens drawn so far of the guided section."""

    def __len__(self) -> int:
        return len(self.packed)


class Parameters(NamedTuple):
    """Parameters of guided rows on the device, [rows] each unless said otherwise."""

    top_k: Tensor
    """int64"""
    ends: Tensor
    """[rows, tokens] int64: tokens that end the text; -1 fills short rows."""
    entropy_thresholds: Tensor
    """float32"""
    tilts: Tilts


def pack(guidance: wire.LengthGuidance) -> bytes:
    """Return ``guidance`` as :data:`GUIDANCE`."""
    rule = RULES.index(guidance.constraint or guidance.mode)
    log_gamma = math.log(guidance.gamma) if guidance.gamma else math.nan
    row = (rule, guidance.scale, log_gamma, guidance.value_min, guidance.entropy_threshold)
    return np.array([row], GUIDANCE).tobytes()


def prepare_guidance(rows: GuidedRows, gamma: float, eos_ids: Sequence[int], device: torch.device) -> Parameters:
    """Copy the parameters to the device in one copy that the host does not wait for. ``gamma``: the length model's own."""
    table = np.frombuffer(b"".join(rows.packed), GUIDANCE)
    log_gammas = np.where(np.isnan(table["log_gamma"]), math.log(gamma), table["log_gamma"])
    aims = np.zeros(len(rows))
    for row, (guidance, drawn) in rows.targets.items():
        aims[row] = target(guidance, drawn, guidance.gamma or gamma)
    upload = Upload()
    top_k, rule, end_ids = upload.add(rows.top_k), upload.add(table["rule"]), upload.add(_end_table(rows.ends, eos_ids))
    floats = np.stack([table["scale"], log_gammas, aims, table["value_min"], table["entropy_threshold"]])
    packed = upload.add(floats.view(np.int64))
    upload.send(device)
    scale, log_gamma, aim, value_min, entropy = packed.tensor.view(torch.float64).view(5, -1)
    tilts = Tilts(rule.tensor, scale, log_gamma, aim, value_min)
    return Parameters(top_k.tensor, end_ids.tensor.view(len(rows), -1), entropy.float(), tilts)


def _end_table(ends: Sequence[tuple[int, ...]], eos_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """[rows, most tokens]: ``eos_ids`` and the row's ``ends``. Most rows have the same."""
    distinct = {each: place for place, each in enumerate(dict.fromkeys(ends))}
    table = np.full((len(distinct), max(1, len(eos_ids) + max(map(len, distinct)))), -1, np.int64)
    for each, place in distinct.items():
        ids = (*eos_ids, *each)
        table[place, : len(ids)] = ids
    return table[[distinct[each] for each in ends]]
