"""How output tokens are drawn: every row by its own parameters, work done only for the rows that ask for it.

In this order, as Hugging Face transformers and vLLM apply them:

1. repetition penalty over prompt and output, then presence and frequency penalties over the output, then ``logit_bias``;
   before ``min_tokens``, end-of-sequence and stop tokens are excluded;
2. temperature (0 takes the largest logit, the lowest id among equals, and ends here);
3. top-k; top-p over what top-k kept, renormalised; min-p relative to the most probable token;
4. a draw from what is left.

Each filter is a threshold on the logit, so tokens exactly as probable as the last one kept are kept too: the set does not depend
on how a device sorts equals.

**Noise.** The draw is the Gumbel-max trick: the largest ``logit + gumbel``. A row's noise is the SplitMix64 stream (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators") whose state is a hash of (seed, sequence index, output position);
token id t takes its t-th output. So noise is a pure function of these four numbers: the same in any batch, process or device, and a
generation can be resumed elsewhere. It is made of 64-bit integer operations that wrap, and two logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.wire import Sampling

Tokens = Sequence[int] | npt.NDArray[np.int32]

CHUNK_ELEMENTS = 1 << 24
"""Logits worked on at a time, where temporaries are several times as large."""
CPU_CHUNK_ELEMENTS = 1 << 18
"""The same on a CPU, whose caches hold so many: noise takes a third of the time that it takes on 2^22 (one core)."""
FIRST_LOOK = 2048
"""Of so many largest logits top-p usually needs no more; sorting a vocabulary of 150,000 takes ten times as long."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment and its two multipliers
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingRow:
    """One sequence about to get its next token."""

    params: Sampling
    index: int
    """Which of the request's ``n`` sequences."""
    position: int
    """Output tokens drawn before this one, also by an earlier attempt."""
    prompt_tokens: Tokens
    output_tokens: Tokens
    eos_ids: tuple[int, ...]
    """The model's end-of-sequence tokens."""


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The next token of every row, [rows] int64, on the device of ``logits``.

    logits: [rows, vocab], float32, left as they are. All token ids of the rows must be below vocab. Where everything is
    excluded, some valid id comes back.
    """
    logits = _edit(logits, rows)
    drawn = [at for at, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn:
        return logits.argmax(-1)
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = logits.argmax(-1)
    where = torch.tensor(drawn, device=logits.device)
    tokens[where] = _draw(logits[where], [rows[at] for at in drawn])
    return tokens


def token_logprobs(logits: Tensor, chosen: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own log-probabilities, at temperature 1, of the chosen tokens and of the ``top_n`` most probable ones.

    logits: [rows, vocab]; chosen: [rows] int64. -> (chosen [rows], ids [rows, top_n] int64, their values [rows, top_n]), float32,
    most probable first.
    """
    parts = []
    for part, ids in zip(_row_chunks(logits), _row_chunks(chosen, logits.shape[-1]), strict=True):
        part = part.float()
        total = part.logsumexp(-1, keepdim=True)
        top, top_ids = part.topk(top_n, dim=-1)
        parts.append((part.gather(1, ids.unsqueeze(1)).squeeze(1) - total.squeeze(1), top_ids, top - total))
    values, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return values, top_ids, top


def noise_key(seed: int, index: int, position: int) -> int:
    """State of the SplitMix64 stream that is the noise of one draw, in [0, 2^64)."""
    key = _mix(seed & _MASK)
    for number in (index, position):
        key = _mix(key + _GOLDEN * (number + 1) & _MASK)
    return key


def gumbel(keys: Sequence[int], ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of each key's draw for token ids, [keys, ids], float32.

    ids: [ids] int64 for all keys alike, or [keys, ids].
    """
    state = torch.tensor([_signed(key) for key in keys], device=ids.device).unsqueeze(1)
    z = (ids + 1) * _signed(_GOLDEN) + state
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        z ^= _shift_right(z, bits)
        z *= _signed(factor)
    z ^= _shift_right(z, 31)
    uniform = _shift_right(z, 1).float().mul_(2.0**-63)
    # -log1p(-u) keeps small exponentials exact, and these are the ones that win. Both bounds keep the result finite.
    exponential = uniform.clamp_(2.0**-63, 1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _edit(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Penalties, bias and exclusions: a changed copy where a row asks for any, else ``logits`` itself."""
    edited = logits
    for entries_of, change in _EDITS:
        found = [(at, entries) for at, row in enumerate(rows) if (entries := entries_of(row)) is not None]
        if not found:
            continue
        if edited is logits:
            edited = logits.clone()
        ids = torch.from_numpy(np.concatenate([ids for _, (ids, _) in found])).to(logits.device)
        values = torch.from_numpy(np.concatenate([values for _, (_, values) in found])).to(logits.device)
        at = torch.from_numpy(np.repeat([at for at, _ in found], [len(ids) for _, (ids, _) in found])).to(logits.device)
        edited[at, ids] = change(edited[at, ids], values)
    return edited


Entries = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Token ids, each once, and a value for each."""


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
    if row.position >= row.params.min_tokens:
        return None
    ends = np.unique(np.asarray([*row.eos_ids, *row.params.stop_token_ids], np.int64))
    return ends, np.full(len(ends), -np.inf, np.float32)


def _repel(logits: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


_EDITS: tuple[tuple[Callable[[SamplingRow], Entries | None], Callable[[Tensor, Tensor], Tensor]], ...] = (
    (_repetition, _repel),
    (_penalties, torch.sub),
    (_bias, torch.add),
    (_exclusions, torch.add),
)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Steps 2 to 4 for rows with a temperature: [rows]."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    tokens, start = [], 0
    for part in _row_chunks(logits):
        some = rows[start : start + len(part)]
        start += len(part)
        kept = _filter(_scale(part, some), some)
        keys = [noise_key(row.params.seed, row.index, row.position) for row in some]
        tokens.append((kept + gumbel(keys, ids)).argmax(-1))
    return torch.cat(tokens)


def _scale(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """By temperature, with each row's largest at exactly 0, so that no temperature overflows: [rows, vocab]."""
    smallest = torch.finfo(torch.float32).tiny
    temperatures = torch.tensor([max(row.params.temperature, smallest) for row in rows], device=logits.device)
    return (logits - logits.amax(-1, keepdim=True)) / temperatures.unsqueeze(1)


def _filter(scaled: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """-inf where top-k, top-p or min-p leave a token out. scaled: [rows, vocab], as :func:`_scale` returns it."""
    vocab = scaled.shape[-1]
    widths = [_width(row.params, vocab) for row in rows]
    if not any(widths) and not any(row.params.min_p for row in rows):
        return scaled
    thresholds = torch.tensor([math.log(row.params.min_p) if row.params.min_p else -math.inf for row in rows])
    thresholds = thresholds.to(scaled.device)
    # Rows of one width at a time: the sums behind a row's top-p must not depend on the widths of others.
    for width in sorted(set(widths) - {0}):
        members = [at for at, found in enumerate(widths) if found == width]
        at = torch.tensor(members, device=scaled.device)
        found = _last_kept(scaled[at], width, [rows[member].params.top_p for member in members])
        thresholds[at] = torch.maximum(thresholds[at], found)
    return scaled.masked_fill(scaled < thresholds.unsqueeze(1), -math.inf)


def _width(params: Sampling, vocab: int) -> int:
    """How many of the largest logits decide top-k and top-p; 0: neither is asked for."""
    if 0 < params.top_k < vocab:
        return params.top_k
    return vocab if params.top_p < 1 else 0


def _last_kept(scaled: Tensor, width: int, top_p: Sequence[float]) -> Tensor:
    """The smallest logit that top-p keeps among the ``width`` largest. scaled: [rows, vocab]. -> [rows]"""
    whole = width == scaled.shape[-1]
    largest = scaled.topk(min(width, FIRST_LOOK) if whole else width).values
    if all(p >= 1 for p in top_p):
        return largest[:, -1]
    # A sum of probabilities may round above 1, so that a row that asks for all of them gets a limit out of reach.
    limits = torch.tensor([p if p < 1 else 2.0 for p in top_p], device=scaled.device).unsqueeze(1)
    total = (scaled if whole else largest).logsumexp(-1, keepdim=True)
    if largest.shape[-1] < width and bool(((largest - total).exp().sum(-1, keepdim=True) < limits).any()):
        largest = scaled.sort(descending=True).values
    probabilities = (largest - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    kept = (before < limits).sum(-1, keepdim=True).clamp(min=1)
    return largest.gather(1, kept - 1).squeeze(1)


def _mix(z: int) -> int:
    """SplitMix64's output function on Python integers."""
    z = (z ^ z >> 30) * _MIX_1 & _MASK
    z = (z ^ z >> 27) * _MIX_2 & _MASK
    return z ^ z >> 31


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's is arithmetic."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)


def _row_chunks(rows: Tensor, width: int = 0) -> tuple[Tensor, ...]:
    """Cut along the first axis so that a part has few enough elements, at ``width`` (0: its last axis) a row."""
    limit = CPU_CHUNK_ELEMENTS if rows.device.type == "cpu" else CHUNK_ELEMENTS
    return torch.split(rows, max(1, limit // (width or rows.shape[-1])))
