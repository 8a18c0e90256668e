"""Changes of one draw's logits that its parameters ask for: values for some tokens, and exclusions. Computed on the host.

The order is that of :mod:`engine.device.sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.structured.bits import Bits, bits_of, words_of
from engine.wire import Sampling

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
