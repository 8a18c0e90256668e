"""Draws output tokens: each row by its own parameters, with work only for the rows that ask for it.

In this order, as Hugging Face transformers and vLLM apply them:

1. repetition penalty over prompt and output, then presence and frequency penalties over the output, then ``logit_bias``;
   ``bad_words`` are excluded, and before ``min_tokens`` end-of-sequence and stop tokens; then all tokens that the grammar or
   ``allowed_token_ids`` do not allow;
2. temperature (0 takes the largest logit, the lowest id among equals, and ends here);
3. top-k; top-p over what top-k kept, renormalised; min-p relative to the most probable token;
4. a draw from what is left.

Each filter is a threshold on the logit, so tokens exactly as probable as the last one kept are kept too: the set does not depend
on how a device sorts equals.

**Noise** is the SplitMix64 stream (:mod:`kernels.seeded_sampling`) whose state is a hash of (seed, sequence index, output
position), so a pure function of these and the token id: the same in any batch, process or device, and a generation can be resumed
elsewhere.

**Two halves.** :func:`prepare` turns requests into tensors, on the host and in one copy; :func:`draw` never waits for the device.
So the first can run while the step before is computed, and the second joins the queue behind the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.device.logit_edits import EDITS, Change, Floats, Integers, SamplingRow, left, stacked
from engine.device.sampling_rows import SamplingRows, noise_key, noise_keys
from engine.structured.bits import Bits
from kernels.keep_thresholds import keep_thresholds, scale
from kernels.row_argmax import row_argmax
from kernels.seeded_sampling import gumbel, seeded_draw
from kernels.token_bits import exclude_

__all__ = [
    "SamplingBatch",
    "SamplingRow",
    "SamplingRows",
    "draw",
    "draw_rows",
    "edited",
    "gumbel",
    "noise_key",
    "noise_keys",
    "prepare",
    "sample",
]

FEW = 4
"""If at most one token of this many is allowed, only the allowed ones are gathered and drawn from. With more, gathering costs too
much."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of some rows on the device, [rows] each, and what the host knows of them."""

    temperatures: Tensor
    """float32; 0 is greedy."""
    keys: Tensor
    """int64, the bits of each draw's :func:`noise_key`."""
    top_k: Tensor
    """int64; 0 keeps all."""
    top_p: Tensor
    """float32; 1 keeps all."""
    floors: Tensor
    """float32, the logarithm of min-p; -inf keeps all."""
    edits: tuple[tuple[Change, Tensor, Tensor, Tensor], ...]
    """In order: a change, and the rows, token ids and values it is for; no token of a row twice."""
    allowed: tuple[Tensor, Tensor] | None
    """Rows of which only some tokens may be drawn, [rows] int64, and those tokens as bits, [rows, words] int32."""
    greedy: bool
    """No row is drawn."""
    filtered: bool
    """Some row that is drawn has a filter."""
    few: Mapping[int, Tensor] = field(default_factory=dict)
    """On a CPU, where no row has a filter: the tokens of each row that allows few. It is drawn among them alone."""


def prepare(rows: SamplingRows, device: torch.device) -> SamplingBatch:
    """Return the parameters of ``rows`` for :func:`draw`, in one copy to the device that the host does not wait for."""
    table = rows.table
    drawn = table["temperature"] > 0
    filters = (table["top_k"] > 0) | (table["top_p"] < 1) | (table["floor"] > -np.inf)
    filtered = bool((drawn & filters).any())
    integers = [rows.keys(table).view(np.int64), table["top_k"]]
    floats = [table["temperature"], table["top_p"], table["floor"]]
    changes = []
    for entries_of, change in EDITS if rows.special else ():
        found = [(at, entries) for at, row in rows.special.items() if (entries := entries_of(row)) is not None]
        if found:
            changes.append(change)
            integers.append(np.repeat([at for at, _ in found], [len(ids) for _, (ids, _) in found]))
            integers.append(np.concatenate([ids for _, (ids, _) in found]))
            floats.append(np.concatenate([values for _, (_, values) in found]))
    held = [(at, left(row)) for at, row in rows.special.items() if row.bits is not None]
    words = max((len(bits) for _, bits in held), default=0)
    integers.append(np.array([at for at, _ in held], np.int64))
    integers.append(stacked([bits for _, bits in held], words))
    int64s, float32s = _send(integers, floats, device)
    places, values = int64s[2:-2], float32s[3:]
    edits = tuple(zip(changes, places[::2], places[1::2], values, strict=True))
    allowed = (int64s[-2], int64s[-1].view(torch.int32).view(len(held), words)) if held else None
    few = _few(held) if device.type == "cpu" and not filtered else {}
    return SamplingBatch(
        float32s[0], int64s[0], int64s[1], float32s[1], float32s[2], edits, allowed, not drawn.any(), filtered, few
    )


def _few(held: Sequence[tuple[int, Bits]]) -> dict[int, Tensor]:
    """Return the tokens of the rows that allow at most one in :data:`FEW`."""
    found = {}
    for at, bits in held:
        if FEW * int(np.bitwise_count(bits).sum()) <= 32 * len(bits):
            found[at] = torch.from_numpy(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_)))
    return found


def draw_rows(logits: Tensor, rows: SamplingRows, *, in_place: bool = False) -> Tensor:
    """:func:`prepare` and :func:`draw` in one. Rows that only take the largest logit need no parameters on the device."""
    if not rows.special and not (rows.table["temperature"] > 0).any():
        return row_argmax(logits)
    return draw(logits, prepare(rows, logits.device), in_place=in_place)


def draw(logits: Tensor, batch: SamplingBatch, *, in_place: bool = False) -> Tensor:
    """The next token of every row, [rows] int64, on the device of ``logits``.

    logits: [rows, vocab], float32, left as they are unless ``in_place``. Token ids of the rows must be below vocab. Where all is
    excluded, some valid id comes back. Does not wait for a GPU.
    """
    if batch.few:
        return _draw_apart(logits if in_place else logits.clone(), batch)
    logits = edited(logits, batch, in_place=in_place)
    if batch.greedy:
        return row_argmax(logits)
    thresholds = None
    if batch.filtered:
        thresholds = keep_thresholds(logits, batch.temperatures, batch.top_k, batch.top_p, batch.floors)
    return seeded_draw(logits, batch.temperatures, batch.keys, thresholds)


def edited(logits: Tensor, batch: SamplingBatch, *, in_place: bool = False) -> Tensor:
    """``logits``, [rows, vocab] float32, after penalties, bias and exclusions; a copy where there are any, unless ``in_place``."""
    if (batch.edits or batch.allowed is not None) and not in_place:
        logits = logits.clone()
    for change, rows, ids, values in batch.edits:
        logits[rows, ids] = change(logits[rows, ids], values)
    if batch.allowed is not None:
        exclude_(logits, *batch.allowed)
    return logits


def _draw_apart(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """:func:`draw` on a CPU, where some rows allow few tokens: noise, which takes most of the time, is computed for these alone.

    Changes ``logits``.
    """
    assert batch.allowed is not None
    rows, bits = batch.allowed
    many = torch.tensor([row not in batch.few for row in rows.tolist()])
    edited(logits, replace(batch, allowed=(rows[many], bits[many])), in_place=True)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    others = torch.tensor([row for row in range(len(logits)) if row not in batch.few], dtype=torch.int64)
    if len(others):
        tokens[others] = seeded_draw(logits[others], batch.temperatures[others], batch.keys[others], None)
    for row, ids in batch.few.items():
        tokens[row] = _draw_among(logits[row], ids[ids < logits.shape[1]], batch.temperatures[row], batch.keys[row])
    return tokens


def _draw_among(logits: Tensor, ids: Tensor, temperature: Tensor, key: Tensor) -> Tensor | int:
    """Draw one of ``ids``, of a row without filters; 0 where there is none."""
    if not len(ids):
        return 0
    values = logits[ids].unsqueeze(0)
    if temperature > 0:
        values = scale(values, temperature.unsqueeze(0)) + gumbel(key.unsqueeze(0), ids)
    return ids[values.argmax()]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """:func:`draw_rows` of these rows; ``logits`` stay as they are."""
    return draw_rows(logits, SamplingRows(rows))


def _send(
    integers: Sequence[Integers], floats: Sequence[Floats], device: torch.device
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Arrays to the device in one copy, from pinned memory where there is a GPU to copy to: int64 and float32, in their order."""
    int_lengths, float_lengths = [len(array) for array in integers], [len(array) for array in floats]
    packed = torch.empty(2 * sum(int_lengths) + sum(float_lengths), dtype=torch.int32, pin_memory=device.type == "cuda")
    words = packed.numpy()
    np.concatenate(integers, out=words[: 2 * sum(int_lengths)].view(np.int64))
    np.concatenate(floats, out=words[2 * sum(int_lengths) :].view(np.float32))
    first, second = torch.split(packed.to(device, non_blocking=True), [2 * sum(int_lengths), sum(float_lengths)])
    return torch.split(first.view(torch.int64), int_lengths), torch.split(second.view(torch.float32), float_lengths)
