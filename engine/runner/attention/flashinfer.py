"""Attention through FlashInfer's paged prefill kernel "fa2" with pages of one token.

A run is a row with its own list of pages, so runs share a prefix by naming the same slots, and a causal row needs no mask. Rows
of one token go through the same kernel: it multiplies on tensor cores, which FlashInfer's decoding kernel does not unless asked,
and packs the query heads of a key head, of any number, into its tile.

Whether there is a window or a soft cap is a constant of FlashInfer's kernels, so each of these variants is a module of its own;
their sizes and the scale are arguments. A step has one plan for each distinct spec of the layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from itertools import accumulate, cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from yardstick_llm.engine.ints import Ints, as_ints
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.decoder import FusedAttend, Heads, PlainAttend
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.runner.attention.base import MOST_SLOTS, AttentionBackend, KVCache, plan_branches
from yardstick_llm.kernels.attention_layout import within
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec
from yardstick_llm.kernels.label_logprobs import multiprocessors
from yardstick_llm.kernels.soft_cap import NO_CAP

VERSION = "0.6.6"
"""A step is planned through attributes that FlashInfer does not promise, so no other version will do."""
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 << 20
"""Least room for partial results of long rows; see :func:`workspace_bytes`."""
TILE_ROWS, MIDDLE_TILE_ROWS = 128, 64
"""Most rows of a tile, and those of a tile for short segments or heads of more than :data:`MIDDLE_HEAD_DIM` elements."""
MIDDLE_HEAD_DIM = 128
MOST_LISTED = 4 * MOST_SLOTS
"""Slots that the contexts of a captured step may list together: 16 MiB."""
SMALL_WORKSPACE_BYTES = 16 << 20
"""Room for the plan of one row, which is all that the wrappers of captured steps plan by themselves."""
WRAPPER_BYTES = (8 << 20) + (128 << 10)
"""Memory of the device that each wrapper of FlashInfer allocates."""
ALIGNMENT = 4
"""Numbers: each table starts at a multiple of 16 bytes."""


class FlashInferAttention(AttentionBackend):
    """NVIDIA GPUs from compute capability 8.0.

    Steps alternate between two wrappers. Planning fills a wrapper's pinned buffer and copies it to the device without waiting, so
    that buffer may be filled again only when the step is done; with at most two steps in flight, the one before the last is.
    """

    def __init__(self, kv: KVCache, heads: int, specs: Sequence[AttentionSpec] = ()) -> None:
        super().__init__(kv, specs)
        self.heads = heads
        self._value_scales: Tensor | None = None
        """[layers, heads, 1], exact in the model's dtype."""
        if kv.scales is not None:
            group = heads // kv.keys.shape[2]
            self._value_scales = kv.scales[:, 1].repeat_interleave(group, 1).unsqueeze(2).to(kv.dtype)
        kv_heads, head_dim = kv.keys.shape[2:]
        room = workspace_bytes(heads, kv_heads, head_dim, multiprocessors(kv.keys.device))
        workspace = torch.empty(room, dtype=torch.uint8, device=kv.keys.device)
        distinct = list(dict.fromkeys(self.specs))
        self._wrappers = cycle([{spec: self.wrapper(workspace, spec) for spec in distinct} for _ in range(2)])
        """Wrappers of a step by the spec of their layers."""

    @classmethod
    def problem(cls, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> str | None:
        return problem(device, config.head_dim, dtype, kept, config.attention_specs)

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        wrappers = next(self._wrappers)
        slots = self._plan_step(wrappers, segments)

        def attend(layer: int, heads: Heads) -> Tensor:
            q = self.write(layer, heads, slots)
            # Without an output tensor, the wrapper allocates one and fills it with zeros first.
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self.run(wrappers[self.specs[layer]], layer, q, out)
            return out

        return FusedAttend(attend)

    def run(self, wrapper: Any, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend from ready queries, [tokens, heads, head_dim], as ``wrapper`` is planned, to the keys and values of ``layer``."""
        pages = self.kv.keys[layer].unsqueeze(1), self.kv.values[layer].unsqueeze(1)  # [slots, 1, kv_heads, head_dim]
        wrapper.run(q, pages, out=out)
        if self._value_scales is not None:
            out.mul_(self._value_scales[layer])

    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        return plan_branches(self.kv, prefixes, branches, counts)

    def wrapper(self, workspace: Tensor, spec: AttentionSpec) -> Any:
        """A wrapper planned for one row of one token, which loads the kernel, or compiles it, and settles all but the lengths.

        Wrappers share ``workspace``, which a kernel uses only while it runs.
        """
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        kv_heads, head_dim = self.kv.keys.shape[2:]
        ends = torch.tensor([0, 1], dtype=torch.int32)
        page = torch.zeros(1, dtype=torch.int32, device=workspace.device)
        settled = {
            "q_data_type": self.kv.dtype,
            "kv_data_type": self.kv.keys.dtype,
            "sm_scale": spec.scale_of(head_dim),
            "window_left": window_left(spec),
            "logits_soft_cap": spec.soft_cap,
        }
        last = torch.ones(1, dtype=torch.int32)
        wrapper.plan(ends, ends, page, last, self.heads, kv_heads, head_dim, 1, causal=True, **settled)
        return wrapper

    def _plan_step(self, wrappers: Mapping[AttentionSpec, Any], segments: Sequence[ExtendSegment]) -> Tensor:
        """Plan a step in which only lengths and pages differ from the last one. Returns the slots of the new tokens, [tokens].

        ``wrapper.plan`` would take Python's ``max`` over a tensor of all rows, 5 ms for 1100 rows, and copy four times.
        """
        counts = np.array([len(segment.tokens) for segment in segments], np.int32)
        lengths = np.array([len(segment.context) for segment in segments], np.int32)
        qo_indptr, kv_indptr = _cumulate(counts), _cumulate(lengths)
        kv_indices = as_ints(segment.context for segment in segments)
        out_cache_loc = as_ints(segment.context[-len(segment.tokens) :] for segment in segments)
        tables = send([qo_indptr, kv_indptr, kv_indices, np.ones(len(segments), np.int32), out_cache_loc], self.kv.keys.device)
        for spec, wrapper in wrappers.items():
            wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf = tables[:2]
            wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf = tables[2:4]
            wrapper._batch_size = len(segments)
            wrapper._plan_info = self._plan_info(wrapper, spec, qo_indptr, kv_indptr, lengths)
        return tables[4].long()

    def _plan_info(self, wrapper: Any, spec: AttentionSpec, qo_indptr: Ints, kv_indptr: Ints, lengths: Ints) -> Any:
        """FlashInfer's plan of a step for the layers of one spec."""
        kv_heads, head_dim = self.kv.keys.shape[2:]
        return wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            torch.from_numpy(qo_indptr),
            torch.from_numpy(kv_indptr),
            torch.from_numpy(lengths),
            int(qo_indptr[-1]),
            len(lengths),
            self.heads,
            kv_heads,
            1,  # page size, in tokens
            False,  # no CUDA graph
            head_dim,
            head_dim,
            True,  # causal
            window_left(spec),
            -1,  # no fixed chunk size
            False,  # long contexts may be split over blocks
            0,  # thread blocks of other kernels at the same time
        )


class FixedFlashInfer:
    """Attention of a :class:`FlashInferAttention` from tables of fixed address and size, so that a CUDA graph can capture it.

    FlashInfer's own plan for CUDA graphs splits every context and merges the parts. The tables here are those of its plan for
    unsplit contexts (``PrefillPlan`` in its ``attention/scheduler.cuh``), padded: tiles of padding belong to a segment without
    tokens. The rows of a tile are pairs of a token and one of the query heads of a key head.
    """

    layouts = 2
    """Few segments in large tiles; many in small ones."""

    def __init__(self, backend: FlashInferAttention, most_tokens: int) -> None:
        kv = backend.kv
        self._backend = backend
        self._group = backend.heads // kv.keys.shape[2]
        numbers = max(self._room(most_tokens, layout).begins[-1] for layout in range(self.layouts)) + MOST_LISTED
        self._tables = torch.zeros(numbers, dtype=torch.int32, device=kv.keys.device)
        self._out = torch.zeros(most_tokens, backend.heads, kv.keys.shape[3], dtype=kv.dtype, device=kv.keys.device)
        workspace = torch.empty(SMALL_WORKSPACE_BYTES, dtype=torch.uint8, device=kv.keys.device)
        self._wrappers = {spec: backend.wrapper(workspace, spec) for spec in dict.fromkeys(backend.specs)}

    def attend(self, tokens: int, layout: int = 0) -> FusedAttend:
        """Attention of a step of ``tokens``, as :meth:`fill` last described it in ``layout``; until then all of them are padding.
        Its output is valid until the next step is queued; rows of padding hold any numbers."""
        room, backend = self._room(tokens, layout), self._backend
        self._fill((), room)
        parts = room.within(self._tables)

        def attend(layer: int, heads: Heads) -> Tensor:
            q = backend.write(layer, heads, parts.out_cache_loc.view(torch.int64))
            wrapper = self._wrappers[backend.specs[layer]]
            wrapper._int_workspace_buffer = self._tables
            wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf = parts.qo_indptr, parts.kv_indptr
            wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf = parts.kv_indices, parts.last_page_len
            wrapper._batch_size = room.segments
            wrapper._plan_info = room.plan_info()
            out = self._out[:tokens]
            backend.run(wrapper, layer, q, out)
            return out

        return FusedAttend(attend)

    def fill(self, segments: Sequence[ExtendSegment], tokens: int) -> int | None:
        """Queue the copy of the tables of ``segments``, padded to ``tokens``; return their layout. None, and no copy, where none
        fits."""
        layout = next((layout for layout in range(self.layouts) if len(segments) < self._room(tokens, layout).segments), None)
        if layout is None:
            return None
        return layout if self._fill(segments, self._room(tokens, layout)) else None

    def _fill(self, segments: Sequence[ExtendSegment], room: _Room) -> bool:
        lengths = np.array([len(segment.context) for segment in segments], np.int32)
        listed = int(lengths.sum())
        if listed > MOST_LISTED:
            return False
        packed = torch.zeros(room.begins[-1] + listed, dtype=torch.int32, pin_memory=self._tables.is_cuda)
        parts = room.within(packed)
        counts = np.array([len(segment.tokens) for segment in segments], np.int32)
        tiles = -(-counts * self._group // room.tile)
        used = int(tiles.sum())
        parts.request_indices.fill_(room.segments - 1)
        parts.request_indices.numpy()[:used] = np.repeat(np.arange(len(segments), dtype=np.int32), tiles)
        parts.qo_tile_indices.numpy()[:used] = within(tiles.astype(np.int64))
        parts.kv_chunk_size.fill_(np.iinfo(np.int32).max)
        for part, each in ((parts.qo_indptr, counts), (parts.kv_indptr, lengths)):
            part.numpy()[1 : len(segments) + 1] = np.cumsum(each)
            part[len(segments) + 1 :] = int(each.sum())
        parts.last_page_len.fill_(1)
        slots = parts.out_cache_loc.view(torch.int64)
        slots[counts.sum() :] = self._backend.kv.padding_slot
        if segments:
            slots.numpy()[: counts.sum()] = as_ints(segment.context[-len(segment.tokens) :] for segment in segments)
            parts.kv_indices.numpy()[:] = as_ints(segment.context for segment in segments)
        self._tables[: len(packed)].copy_(packed, non_blocking=True)
        return True

    def _room(self, tokens: int, layout: int) -> _Room:
        return _Room.of(tokens, layout, self._group, self._backend.kv.keys.shape[3])


class _Tables(NamedTuple):
    """Parts of the tables of a captured step, int32, in their order."""

    request_indices: Tensor
    """[tiles] segment of each tile"""
    qo_tile_indices: Tensor
    """[tiles] number of the tile within its segment"""
    kv_tile_indices: Tensor
    """[tiles] zeros: no context is split"""
    kv_chunk_size: Tensor
    """[1]"""
    qo_indptr: Tensor
    """[segments + 1], which is where outputs lie, too"""
    kv_indptr: Tensor
    """[segments + 1]"""
    last_page_len: Tensor
    """[segments] ones"""
    out_cache_loc: Tensor
    """[2 · tokens], int64 in pairs"""
    kv_indices: Tensor
    """the rest"""


class _Room(NamedTuple):
    """Sizes of the tables of a captured step."""

    tokens: int
    tile: int
    """Rows of a tile."""
    segments: int
    """The last one stays empty: tiles of padding belong to it."""
    tiles: int

    @classmethod
    def of(cls, tokens: int, layout: int, group: int, head_dim: int) -> _Room:
        """Room for ``tokens`` in segments of on average 128 tokens or more, or of 16."""
        tile = MIDDLE_TILE_ROWS if layout == 1 or head_dim > MIDDLE_HEAD_DIM else TILE_ROWS
        segments = tokens // (16 if layout == 1 else 128) + 1
        return cls(tokens, tile, segments, -(-tokens * group // tile) + segments)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.tiles, self.tiles, self.tiles, 1, self.segments + 1, self.segments + 1, self.segments, 2 * self.tokens

    @property
    def begins(self) -> list[int]:
        """Where each of :class:`_Tables` begins. The last one has no end."""
        return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in self._sizes), initial=0))

    def within(self, tables: Tensor) -> _Tables:
        """The parts of ``tables``."""
        *begins, last = self.begins
        parts = (tables[begin : begin + size] for begin, size in zip(begins, self._sizes, strict=True))
        return _Tables._make((*parts, tables[last:]))

    def plan_info(self) -> list[int]:
        """What FlashInfer's plan returns (``PrefillPlanInfo``). Offsets are in bytes; those of parts that are not used are 0."""
        requests, qo_tiles, kv_tiles, chunk, qo_indptr, *_ = (4 * begin for begin in self.begins)
        return [self.tiles, self.tokens, 0, self.tile, requests, qo_tiles, kv_tiles, 0, qo_indptr, chunk, 0, 0, 0, 0, 0]


def fixed_bytes(backend: FlashInferAttention, most_tokens: int) -> int:
    """Bytes of the device that a :class:`FixedFlashInfer` takes: tables, output and workspaces."""
    kv_heads, head_dim = backend.kv.keys.shape[2:]
    rooms = (_Room.of(most_tokens, layout, backend.heads // kv_heads, head_dim) for layout in range(FixedFlashInfer.layouts))
    tables = 4 * (max(room.begins[-1] for room in rooms) + MOST_LISTED)
    output = most_tokens * backend.heads * head_dim * backend.kv.dtype.itemsize
    return tables + output + SMALL_WORKSPACE_BYTES + len(set(backend.specs)) * WRAPPER_BYTES


def workspace_bytes(heads: int, kv_heads: int, head_dim: int, processors: int) -> int:
    """Room for the partial results of any plan. A plan that needs more fails, and its step with it.

    A plan that splits rows has at most two tiles for each processor, divided among the key heads. For each tile it reserves the
    rows of all query heads and their log-sum-exps, in float32 (``PrefillPlan`` in FlashInfer's ``attention/scheduler.cuh``). With 8
    query heads of 128 for each key head, 132 processors need 140 MB, and with 16 more than :data:`WORKSPACE_BYTES`.
    """
    rows = heads * (2 * processors // kv_heads) * TILE_ROWS
    return max(WORKSPACE_BYTES, 4 * rows * (head_dim + 1))


def window_left(spec: AttentionSpec) -> int:
    """FlashInfer's window: the most tokens before a query that it sees; -1 for all."""
    return -1 if spec.window is None else spec.window - 1


def problem(
    device: torch.device, head_dim: int, dtype: torch.dtype, kept: torch.dtype, specs: Sequence[AttentionSpec] = (PLAIN,)
) -> str | None:
    """Why FlashInfer cannot run here, as a clause; None where it can. ``kept``: of keys and values; ``specs``: of the layers."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if dtype not in DTYPES:
        return "it computes in bfloat16 and float16 only"
    if head_dim not in HEAD_DIMS:
        return f"it has no kernel for heads of {head_dim} elements"
    try:
        installed = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return f"flashinfer-python {VERSION} is not installed"
    if installed != VERSION:
        return f"flashinfer-python {VERSION} is needed and {installed} is installed"
    try:
        ready = compiled(head_dim, dtype, kept, specs)
    except ImportError as error:
        return f"flashinfer-python lacks something it imports: {error}"
    except OSError as error:  # it writes a log when it is imported
        return f"flashinfer-python cannot write its files below FLASHINFER_WORKSPACE_BASE: {error.strerror}"
    return None if ready or _compiler() else "its kernel has to be compiled first, and nvcc and ninja are not both here"


def compiled(head_dim: int, dtype: torch.dtype, kept: torch.dtype, specs: Sequence[AttentionSpec] = (PLAIN,)) -> bool:
    """Whether all kernels are there already; one takes minutes to compile. Raises ImportError where FlashInfer is not whole."""
    return all(module.is_compiled for module in modules(head_dim, dtype, kept, specs))


def origin(head_dim: int, dtype: torch.dtype, kept: torch.dtype, specs: Sequence[AttentionSpec] = (PLAIN,)) -> str:
    """Where the kernels come from: :attr:`engine.wire.AttentionChoice.modules`."""
    return "prebuilt" if all(module.is_aot for module in modules(head_dim, dtype, kept, specs)) else "compiled"


def modules(head_dim: int, dtype: torch.dtype, kept: torch.dtype, specs: Sequence[AttentionSpec] = (PLAIN,)) -> list[Any]:
    """FlashInfer's ``JitSpec`` of each kernel of the wrappers: no positional encoding or float16 product, and with a sliding window
    or a soft cap where the spec has one."""
    make = import_module("flashinfer.jit.attention.modules").gen_batch_prefill_module
    variants = dict.fromkeys((spec.window is not None, spec.soft_cap != NO_CAP) for spec in specs)
    shared = "fa2", dtype, kept, dtype, torch.int32, head_dim, head_dim, 0
    return [make(*shared, windowed, capped, False) for windowed, capped in variants]


def _compiler() -> bool:
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None and shutil.which("ninja") is not None


def send(tables: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """The tables on ``device``, in one copy that the host does not wait for."""
    sizes = [len(table) for table in tables]
    room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    packed = torch.empty(sum(room), dtype=torch.int32, pin_memory=device.type == "cuda")
    for part, table in zip(torch.split(packed, room), tables, strict=True):
        part[: len(table)] = torch.from_numpy(table)
    parts = torch.split(packed.to(device, non_blocking=True), room)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _cumulate(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
