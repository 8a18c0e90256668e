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

**Plain rows.** Nearly all rows are *plain*: nothing but the numbers of their request and the position of the draw decides it. Such
a row is the bytes that :func:`pack` made for its sequence, once, and the position. Only other rows have a :class:`SamplingRow` for
each draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.engine.ints import MASK_64, Bits, bits_of, words_of
from yardstick_llm.engine.wire import Sampling
from yardstick_llm.kernels.keep_thresholds import keep_thresholds, scale
from yardstick_llm.kernels.largest import SMALLEST_TEMPERATURE
from yardstick_llm.kernels.row_argmax import row_argmax
from yardstick_llm.kernels.seeded_sampling import GOLDEN, MIX_1, MIX_2, gumbel, seeded_draw
from yardstick_llm.kernels.token_bits import exclude_

Tokens = Sequence[int] | npt.NDArray[np.int32]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


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


Entries = tuple[Integers, Floats]
"""Token ids, each once, and a value for each."""
Change = Callable[[Tensor, Tensor], Tensor]
"""Edits logits, given a value for each: penalties, bias and exclusions."""


def changes_logits(params: Sampling) -> bool:
    """Whether some function of :data:`EDITS` may have entries for a row of these parameters."""
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


def left(row: SamplingRow) -> Bits:
    """Tokens of a row with bits that may be drawn. Where nothing is left, the sequence ends: end-of-sequence tokens, if any."""
    assert row.bits is not None
    banned = [token for token in _banned(row) if token < 32 * len(row.bits)]
    left = row.bits & ~bits_of(banned, len(row.bits)) if banned else row.bits
    if left.any() or not row.eos_ids:
        return left
    return bits_of(row.eos_ids, words_of(max(row.eos_ids) + 1))


def stacked(rows: Sequence[Bits], words: int) -> Integers:
    """Bits of all rows, each padded to an even number of ``words``, as int64."""
    stacked = np.zeros((len(rows), words), np.uint32)
    for row, bits in zip(stacked, rows, strict=True):
        row[: len(bits)] = bits
    return stacked.view(np.int64).reshape(-1)


def _repel(logits: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


EDITS: tuple[tuple[Callable[[SamplingRow], Entries | None], Change], ...] = (
    (_repetition, _repel),
    (_penalties, torch.sub),
    (_bias, torch.add),
    (_exclusions, torch.add),
)


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
