"""Attention on a CPU in float32, by the compiled loops of :mod:`kernels.native`: from rows of queries to rows of keys and values
that lie anywhere, without padding, masks or copies of a whole context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.row_chunks import share
from yardstick_llm.kernels.runtime import flat, loops
from yardstick_llm.kernels.soft_cap import NO_CAP

Longs = npt.NDArray[np.int64]

MOST_QUERIES = 256
"""Queries of a task. It copies the keys and values that they see."""
UNBOUNDED = 1 << 40
"""More tokens than a context has."""
NO_DISTANCES = np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.float32)
SHARES = 4
"""Parts of the work for each thread, so that the last ones end at about the same time."""
SHARE = 1 << 20
"""Queries · keys · size of a head that are worth another part."""


class Piece(NamedTuple):
    """Consecutive queries, and the keys that they may see."""

    start: int
    """Row of the first query."""
    queries: int
    context: npt.NDArray[np.integer]
    """Rows of the keys."""
    before: int
    """Place of the first query's own key in the context."""


class Work(NamedTuple):
    """The tasks of one step. All layers share them."""

    rows: Longs
    """Rows of all contexts."""
    tasks: Longs
    """See :func:`kernels.native.attend`."""
    shares: list[slice]
    """Tasks that a thread computes together; longer ones first."""


def plan(pieces: Iterable[Piece], heads: int, kv_heads: int, size: int, *, causal: bool) -> Work:
    """Prepare a step. ``size``: of a head. ``causal``: no query sees a key after its own."""
    contexts: list[npt.NDArray[np.integer]] = []
    rows, places = [], 0
    for start, count, context, before in pieces:
        contexts.append(context)
        for first in range(0, count, MOST_QUERIES):
            part = min(MOST_QUERIES, count - first)
            width = before + first + part if causal else len(context)
            rows.append((start + first, part, places, width, before + first))
        places += len(context)
    parts = np.array(rows, np.int64).reshape(-1, 5)
    parts = parts[np.argsort(-parts[:, 1] * parts[:, 3], kind="stable")]
    tasks = np.concatenate([np.repeat(parts, kv_heads, 0), np.tile(np.arange(kv_heads), len(parts))[:, None]], 1)
    costs = np.cumsum(tasks[:, 1] * tasks[:, 3]) * (heads // kv_heads * size)
    whole = int(costs[-1]) if len(costs) else 0
    count = min(SHARES * torch.get_num_threads(), 1 + whole // SHARE) if torch.get_num_threads() > 1 else 1
    ends = [*np.searchsorted(costs, np.arange(1, count) * (whole / count)).tolist(), len(tasks)]
    shares = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if end > begin]
    index = np.concatenate(contexts).astype(np.int64, copy=False) if contexts else np.empty(0, np.int64)
    return Work(index, tasks, shares)


def reach_of(spec: AttentionSpec) -> int:
    """Places before and after its own that a query sees, where it sees both."""
    return UNBOUNDED if spec.window is None else spec.window // 2


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, work: Work, left: int, right: int, spec: AttentionSpec, *, narrow: bool = False
) -> Tensor:
    """A query sees the keys from ``left`` before its own to ``right`` after it. ``narrow``: factors of products are rounded to
    bfloat16, where the processor multiplies these.

    q: [tokens, heads, size] float32; k, v: [rows, kv_heads, size]; heads and their numbers contiguous. -> [tokens, heads, size]
    """
    heads, size = q.shape[1:]
    out = torch.empty(q.shape)
    cap = 0.0 if spec.soft_cap == NO_CAP else spec.soft_cap
    given = [part for each in (q, k, v) for part in (_numbers(each), each.stride(0))]
    scale, fold, into, attend = np.float32(spec.scale_of(size)), heads // k.shape[1], flat(out), loops().attend
    narrow = narrow and loops().HAS_PAIRS and size % 2 == 0

    def compute(span: slice) -> None:
        attend(
            *given, work.rows, work.tasks[span], left, right, scale, np.float32(cap), *NO_DISTANCES, heads, fold, size, narrow, into
        )

    share(compute, work.shares)
    return out


def _numbers(x: Tensor) -> npt.NDArray[np.float32]:
    """All numbers from the first row's to the last row's, those between rows too."""
    count = (len(x) - 1) * x.stride(0) + x.shape[1] * x.shape[2] if len(x) else 0
    return flat(x.as_strided((count,), (1,)))
