"""The parameters of the draws of one step on the host, as few Python objects as possible for each.

Nearly all rows are *plain*: nothing but the numbers of their request and the position of the draw decides it. Such a row is the
bytes that :func:`pack` made for its sequence, once, and the position. Only other rows have a :class:`SamplingRow` for each draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine.device.logit_edits import SamplingRow, changes_logits
from engine.ints import MASK_64
from engine.wire import Sampling
from kernels.largest import SMALLEST_TEMPERATURE
from kernels.seeded_sampling import GOLDEN, MIX_1, MIX_2

PACKED = np.dtype([("key", np.uint64), ("top_k", np.int64), ("temperature", "f4"), ("top_p", "f4"), ("floor", "f4")], align=True)
"""Numbers of a sequence that its draws need on the device. key: the mixed seed and index (:func:`noise_keys`); floor: the logarithm
of min-p."""

_INCREMENT = np.uint64(GOLDEN)
_ROUNDS = ((np.uint64(30), np.uint64(MIX_1)), (np.uint64(27), np.uint64(MIX_2)))
_LAST_SHIFT = np.uint64(31)


class SamplingRows:
    """Rows of one step."""

    def __init__(self, rows: Iterable[SamplingRow] = ()) -> None:
        self.packed: list[bytes] = []
        """[rows] :data:`PACKED`, as bytes: those of all rows are joined at once."""
        self.positions: list[int] = []
        """[rows] output tokens drawn before this one, also by an earlier attempt."""
        self.special: dict[int, SamplingRow] = {}
        """Rows that are not plain, by place: some draws of their request change or exclude logits."""
        for row in rows:
            self.add(row)

    def __len__(self) -> int:
        return len(self.packed)

    def add(self, row: SamplingRow, packed: bytes = b"") -> None:
        """Append a row. ``packed``: :func:`pack` of it, where it is known."""
        if row.bits is not None or changes_logits(row.params):
            self.special[len(self.packed)] = row
        self.add_plain(packed or pack(row.params, row.index), row.position)

    def add_plain(self, packed: bytes, position: int) -> None:
        """Append a plain row."""
        self.packed.append(packed)
        self.positions.append(position)

    @property
    def table(self) -> npt.NDArray[np.void]:
        """[rows] of :data:`PACKED`"""
        return np.frombuffer(b"".join(self.packed), PACKED)

    def keys(self, table: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
        """The :func:`noise_key` of each draw. ``table``: :attr:`table`."""
        return mixed(table["key"], self.positions)


def pack(params: Sampling, index: int) -> bytes:
    """Return the row of :data:`PACKED` for sequence ``index`` of a request."""
    temperature = max(params.temperature, SMALLEST_TEMPERATURE) if params.temperature > 0 else 0.0
    floor = math.log(params.min_p) if params.min_p else -math.inf
    key = int(_sequence_keys([params.seed], [index])[0])
    return np.array([(key, params.top_k, temperature, params.top_p, floor)], PACKED).tobytes()


def noise_key(seed: int, index: int, position: int) -> int:
    """State of the SplitMix64 stream that is the noise of one draw, in [0, 2^64)."""
    return int(noise_keys([seed], [index], [position])[0])


def noise_keys(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """The :func:`noise_key` of each draw."""
    return mixed(_sequence_keys(seeds, indices), positions)


def _sequence_keys(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.uint64]:
    return mixed(_mix(np.array([seed & MASK_64 for seed in seeds], np.uint64)), indices)


def mixed(keys: npt.NDArray[np.uint64], numbers: Sequence[int]) -> npt.NDArray[np.uint64]:
    """``keys``, each mixed with one of ``numbers``."""
    return _mix(keys + _INCREMENT * (np.array(numbers, np.uint64) + np.uint64(1)))


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function. Arrays of unsigned integers wrap."""
    for bits, factor in _ROUNDS:
        z = (z ^ z >> bits) * factor
    return z ^ z >> _LAST_SHIFT
