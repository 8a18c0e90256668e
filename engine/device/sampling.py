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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.structured.bits import Bits, bits_of, words_of
from engine.wire import Sampling
from kernels.candidates import SMALLEST_TEMPERATURE
from kernels.keep_thresholds import keep_thresholds
from kernels.row_chunks import row_chunks
from kernels.seeded_sampling import GOLDEN, MIX_1, MIX_2, gumbel, seeded_draw
from kernels.token_bits import exclude_

__all__ = [
    "SamplingBatch",
    "SamplingRow",
    "TokenLogprobs",
    "draw",
    "edited",
    "gumbel",
    "noise_key",
    "noise_keys",
    "prepare",
    "sample",
    "token_logprobs",
]

Tokens = Sequence[int] | npt.NDArray[np.int32]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_MASK = (1 << 64) - 1
_INCREMENT = np.uint64(GOLDEN)
_ROUNDS = ((np.uint64(30), np.uint64(MIX_1)), (np.uint64(27), np.uint64(MIX_2)))
_LAST_SHIFT = np.uint64(31)


class SamplingRow(msgspec.Struct, frozen=True, eq=False):
    """Parameters of one draw."""

    params: Sampling
    index: int
    """Which of the request's ``n`` sequences."""
    position: int
    """Output tokens drawn before this one, also by an earlier attempt."""
    prompt_tokens: Tokens
    output_tokens: Tokens
    eos_ids: tuple[int, ...]
    """The model's end-of-sequence tokens."""
    bits: Bits | None = None
    """The only tokens that the grammar and ``allowed_token_ids`` allow; None for all."""
    complete: bool = False
    """Whether the grammar allows nothing but the end of the output, so that ``min_tokens`` cannot hold."""
    packed: bytes = b""
    """:func:`pack` of ``params``, where it was kept from an earlier draw of the request."""


_PACKED = np.dtype(
    [("seed", np.uint64), ("top_k", np.int64), ("temperature", "f4"), ("top_p", "f4"), ("floor", "f4"), ("changes", "i4")]
)


def pack(params: Sampling) -> bytes:
    """Return the numbers of ``params`` that a draw needs on the device, and whether it may change logits, as bytes: those of all
    rows of a step are joined at once."""
    temperature = max(params.temperature, SMALLEST_TEMPERATURE) if params.temperature > 0 else 0.0
    floor = math.log(params.min_p) if params.min_p else -math.inf
    seed = int(_mix(np.array([params.seed & _MASK], np.uint64))[0])
    row = (seed, params.top_k, temperature, params.top_p, floor, _changes_logits(params))
    return np.array([row], _PACKED).tobytes()


Change = Callable[[Tensor, Tensor], Tensor]
"""Edits logits, given a value for each: penalties, bias and exclusions."""


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


def prepare(rows: Sequence[SamplingRow], device: torch.device) -> SamplingBatch:
    """Return the parameters of ``rows`` for :func:`draw`, in one copy to the device that the host does not wait for."""
    table = np.frombuffer(b"".join([row.packed or pack(row.params) for row in rows]), _PACKED)
    drawn = table["temperature"] > 0
    filtered = (table["top_k"] > 0) | (table["top_p"] < 1) | (table["floor"] > -np.inf)
    keys = _keys(table["seed"], [row.index for row in rows], [row.position for row in rows])
    integers, floats = [keys.view(np.int64), table["top_k"]], [table["temperature"], table["top_p"], table["floor"]]
    changes = []
    changed = [(at, rows[at]) for at in np.flatnonzero(table["changes"]).tolist()]
    for entries_of, change in _EDITS:
        found = [(at, entries) for at, row in changed if (entries := entries_of(row)) is not None]
        if found:
            changes.append(change)
            integers.append(np.repeat([at for at, _ in found], [len(ids) for _, (ids, _) in found]))
            integers.append(np.concatenate([ids for _, (ids, _) in found]))
            floats.append(np.concatenate([values for _, (_, values) in found]))
    held = [(at, _left(row)) for at, row in enumerate(rows) if row.bits is not None]
    words = max((len(bits) for _, bits in held), default=0)
    integers.append(np.array([at for at, _ in held], np.int64))
    integers.append(_stacked([bits for _, bits in held], words))
    longs, shorts = _send(integers, floats, device)
    places, values = longs[2:-2], shorts[3:]
    edits = tuple(zip(changes, places[::2], places[1::2], values, strict=True))
    allowed = (longs[-2], longs[-1].view(torch.int32).view(len(held), words)) if held else None
    flags = {"greedy": not drawn.any(), "filtered": bool((drawn & filtered).any())}
    return SamplingBatch(shorts[0], longs[0], longs[1], shorts[1], shorts[2], edits, allowed, **flags)


def draw(logits: Tensor, batch: SamplingBatch, *, in_place: bool = False) -> Tensor:
    """The next token of every row, [rows] int64, on the device of ``logits``.

    logits: [rows, vocab], float32, left as they are unless ``in_place``. Token ids of the rows must be below vocab. Where all is
    excluded, some valid id comes back. Does not wait for a GPU.
    """
    logits = edited(logits, batch, in_place=in_place)
    if batch.greedy:
        return logits.argmax(-1)
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


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """:func:`prepare` and :func:`draw` in one."""
    return draw(logits, prepare(rows, logits.device))


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one token in each row, and of the most probable tokens."""

    chosen: Tensor
    """[rows] float32"""
    top_tokens: Tensor
    """[rows, top_n] int64, most probable first"""
    top: Tensor
    """[rows, top_n] float32"""


def token_logprobs(logits: Tensor, chosen: Tensor, top_n: int) -> TokenLogprobs:
    """The model's own log-probabilities, at temperature 1, of the chosen tokens and of the ``top_n`` most probable ones.

    logits: [rows, vocab]; chosen: [rows] int64.
    """
    parts = []
    for part, ids in zip(row_chunks(logits), row_chunks(chosen, logits.shape[-1]), strict=True):
        part = part.float()
        total = part.logsumexp(-1, keepdim=True)
        top, top_ids = part.topk(top_n, dim=-1)
        parts.append(TokenLogprobs(part.gather(1, ids.unsqueeze(1)).squeeze(1) - total.squeeze(1), top_ids, top - total))
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def noise_key(seed: int, index: int, position: int) -> int:
    """State of the SplitMix64 stream that is the noise of one draw, in [0, 2^64)."""
    return int(noise_keys([seed], [index], [position])[0])


def noise_keys(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """The :func:`noise_key` of each draw."""
    return _keys(_mix(np.array([seed & _MASK for seed in seeds], np.uint64)), indices, positions)


def _keys(keys: npt.NDArray[np.uint64], indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """:func:`noise_keys`, where ``keys`` are the mixed seeds."""
    for numbers in (indices, positions):
        keys = _mix(keys + _INCREMENT * (np.array(numbers, np.uint64) + np.uint64(1)))
    return keys


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function. Arrays of unsigned integers wrap."""
    for bits, factor in _ROUNDS:
        z = (z ^ z >> bits) * factor
    return z ^ z >> _LAST_SHIFT


def _send(
    integers: Sequence[Integers], floats: Sequence[Floats], device: torch.device
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Arrays to the device in one copy, from pinned memory where there is a GPU to copy to: int64 and float32, in their order."""
    longs, shorts = [len(array) for array in integers], [len(array) for array in floats]
    packed = torch.empty(2 * sum(longs) + sum(shorts), dtype=torch.int32, pin_memory=device.type == "cuda")
    words = packed.numpy()
    np.concatenate(integers, out=words[: 2 * sum(longs)].view(np.int64))
    np.concatenate(floats, out=words[2 * sum(longs) :].view(np.float32))
    first, second = torch.split(packed.to(device, non_blocking=True), [2 * sum(longs), sum(shorts)])
    return torch.split(first.view(torch.int64), longs), torch.split(second.view(torch.float32), shorts)


Entries = tuple[Integers, Floats]
"""Token ids, each once, and a value for each."""


def _changes_logits(params: Sampling) -> bool:
    """Whether some function of :data:`_EDITS` may have entries for a row."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.min_tokens > 0
        or bool(params.logit_bias or params.bad_words)
    )


def _repetition(row: SamplingRow) -> Entries | None:
    if row.params.repetition_penalty == 1:
        return None
    seen = np.unique(np.concatenate([np.asarray(row.prompt_tokens, np.int64), np.asarray(row.output_tokens, np.int64)]))
    return seen, np.full(len(seen), row.params.repetition_penalty, np.float32)


def _penalties(row: SamplingRow) -> Entries | None:
    params = row.params
    if params.presence_penalty == 0 == params.frequency_penalty:
        return None
    seen, counts = np.unique(np.asarray(row.output_tokens, np.int64), return_counts=True)
    return seen, (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


def _bias(row: SamplingRow) -> Entries | None:
    bias = row.params.logit_bias
    return (np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)) if bias else None


def _exclusions(row: SamplingRow) -> Entries | None:
    if row.bits is not None or not (banned := _banned(row)):
        return None
    excluded = np.unique(np.asarray(banned, np.int64))
    return excluded, np.full(len(excluded), -np.inf, np.float32)


def _banned(row: SamplingRow) -> list[int]:
    """Tokens that ``bad_words`` and ``min_tokens`` exclude from the next draw."""
    banned = list(_last_of_bad_words(row.params.bad_words, row.output_tokens)) if row.params.bad_words else []
    if row.position < row.params.min_tokens and not row.complete:
        banned += [*row.eos_ids, *row.params.stop_token_ids]
    return banned


def _last_of_bad_words(words: Sequence[tuple[int, ...]], output: Tokens) -> Iterator[int]:
    for *before, last in words:
        if not before or (len(before) <= len(output) and list(output[len(output) - len(before) :]) == before):
            yield last


def _left(row: SamplingRow) -> Bits:
    """Tokens of a row with bits that may be drawn. Where nothing is left, the sequence ends: end-of-sequence tokens, if any."""
    assert row.bits is not None
    banned = [token for token in _banned(row) if token < 32 * len(row.bits)]
    left = row.bits & ~bits_of(banned, len(row.bits)) if banned else row.bits
    if left.any() or not row.eos_ids:
        return left
    return bits_of(row.eos_ids, words_of(max(row.eos_ids) + 1))


def _stacked(rows: Sequence[Bits], words: int) -> Integers:
    """Bits of all rows, each padded to an even number of ``words``, as int64."""
    stacked = np.zeros((len(rows), words), np.uint32)
    for row, bits in zip(stacked, rows, strict=True):
        row[: len(bits)] = bits
    return stacked.view(np.int64).reshape(-1)


def _repel(logits: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


_EDITS: tuple[tuple[Callable[[SamplingRow], Entries | None], Change], ...] = (
    (_repetition, _repel),
    (_penalties, torch.sub),
    (_bias, torch.add),
    (_exclusions, torch.add),
)
