"""Attention through FlashInfer's paged prefill kernel "fa2" with pages of one token.

A run is a row with its own list of pages, so runs share a prefix by naming the same slots, and a causal row needs no mask. Rows
of one token go through the same kernel: it multiplies on tensor cores, which FlashInfer's decoding kernel does not unless asked,
and packs the query heads of a key head, of any number, into its tile.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.branches import plan_branches
from engine.batch import ExtendSegment
from engine.ints import Ints, as_ints
from engine.kvcache.kv import KVCache
from engine.models.config import ModelConfig
from engine.models.decoder import FusedAttend, Heads, PlainAttend
from kernels.attention_spec import PLAIN, AttentionSpec

VERSION = "0.6.6"
"""A step is planned through attributes that FlashInfer does not promise, so no other version will do."""
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 << 20
"""Partial results of long rows: at most 2 tiles of 128 rows a processor and key head, of which 8 query heads of 128 each make
138 MB on 132 processors."""
ALIGNMENT = 4
"""Numbers: each table starts at a multiple of 16 bytes."""


class FlashInferAttention(AttentionBackend):
    """NVIDIA GPUs from compute capability 8.0.

    Steps alternate between two wrappers. Planning fills a wrapper's pinned buffer and copies it to the device without waiting, so
    that buffer may be filled again only when the step is done; with at most two steps in flight, the one before the last is.
    """

    def __init__(self, kv: KVCache, heads: int, specs: Sequence[AttentionSpec] = ()) -> None:
        super().__init__(kv, specs)
        assert all(spec == PLAIN for spec in self.specs)
        self._heads = heads
        self._value_scales: Tensor | None = None
        """[layers, heads, 1], exact in the model's dtype."""
        if kv.scales is not None:
            group = heads // kv.keys.shape[2]
            self._value_scales = kv.scales[:, 1].repeat_interleave(group, 1).unsqueeze(2).to(kv.dtype)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=kv.keys.device)
        self._wrappers: Iterator[Any] = cycle([self._wrapper(workspace) for _ in range(2)])

    @classmethod
    def problem(cls, device: torch.device, config: ModelConfig, dtype: torch.dtype, kept: torch.dtype) -> str | None:
        if not config.attends_plainly:
            return "its prebuilt kernels have no sliding windows, soft caps or scales of attention"
        return problem(device, config.head_dim, dtype, kept)

    def plan(self, segments: Sequence[ExtendSegment]) -> FusedAttend:
        wrapper = next(self._wrappers)
        out_cache_loc = self._plan_step(wrapper, segments)

        def attend(layer: int, heads: Heads) -> Tensor:
            q = self.write(layer, heads, out_cache_loc)
            pages = self.kv.keys[layer].unsqueeze(1), self.kv.values[layer].unsqueeze(1)  # [slots, 1, kv_heads, head_dim]
            # Without an output tensor, the wrapper allocates one and fills it with zeros first.
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            wrapper.run(q, pages, out=out)
            return out if self._value_scales is None else out.mul_(self._value_scales[layer])

        return FusedAttend(attend)

    def plan_branches(self, prefixes: Sequence[Ints], branches: Sequence[int], counts: Tensor) -> PlainAttend:
        return plan_branches(self.kv, prefixes, branches, counts)

    def _wrapper(self, workspace: Tensor) -> Any:
        """A wrapper planned for one row of one token, which loads the kernel, or compiles it, and settles all but the lengths."""
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        kv_heads, head_dim = self.kv.keys.shape[2:]
        ends = torch.tensor([0, 1], dtype=torch.int32)
        page = torch.zeros(1, dtype=torch.int32, device=workspace.device)
        dtypes = {"q_data_type": self.kv.dtype, "kv_data_type": self.kv.keys.dtype}
        last = torch.ones(1, dtype=torch.int32)
        wrapper.plan(ends, ends, page, last, self._heads, kv_heads, head_dim, 1, causal=True, **dtypes)
        return wrapper

    def _plan_step(self, wrapper: Any, segments: Sequence[ExtendSegment]) -> Tensor:
        """Plan a step in which only lengths and pages differ from the last one. Returns the slots of the new tokens, [tokens].

        ``wrapper.plan`` would take Python's ``max`` over a tensor of all rows, 5 ms for 1100 rows, and copy four times.
        """
        counts = np.array([len(segment.tokens) for segment in segments], np.int32)
        lengths = np.array([len(segment.context) for segment in segments], np.int32)
        qo_indptr, kv_indptr = _cumulate(counts), _cumulate(lengths)
        kv_indices = as_ints(segment.context for segment in segments)
        out_cache_loc = as_ints(segment.context[-len(segment.tokens) :] for segment in segments)
        tables = send([qo_indptr, kv_indptr, kv_indices, np.ones(len(segments), np.int32), out_cache_loc], self.kv.keys.device)
        wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf = tables[:2]
        wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf = tables[2:4]
        wrapper._batch_size = len(segments)
        kv_heads, head_dim = self.kv.keys.shape[2:]
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            torch.from_numpy(qo_indptr),
            torch.from_numpy(kv_indptr),
            torch.from_numpy(lengths),
            int(qo_indptr[-1]),
            len(segments),
            self._heads,
            kv_heads,
            1,  # page size, in tokens
            False,  # no CUDA graph
            head_dim,
            head_dim,
            True,  # causal
            -1,  # no sliding window
            -1,  # no fixed chunk size
            False,  # long contexts may be split over blocks
            0,  # thread blocks of other kernels at the same time
        )
        return tables[4].long()


def problem(device: torch.device, head_dim: int, dtype: torch.dtype, kept: torch.dtype) -> str | None:
    """Why FlashInfer cannot run here, as a clause; None where it can. ``kept``: of keys and values."""
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
        ready = compiled(head_dim, dtype, kept)
    except ImportError as error:
        return f"flashinfer-python lacks something it imports: {error}"
    except OSError as error:  # it writes a log when it is imported
        return f"flashinfer-python cannot write its files below FLASHINFER_WORKSPACE_BASE: {error.strerror}"
    return None if ready or _compiler() else "its kernel has to be compiled first, and nvcc and ninja are not both here"


def compiled(head_dim: int, dtype: torch.dtype, kept: torch.dtype) -> bool:
    """Whether the kernel is there already; it takes minutes to compile. Raises ImportError where FlashInfer is not whole."""
    return bool(_module(head_dim, dtype, kept).is_compiled)


def origin(head_dim: int, dtype: torch.dtype, kept: torch.dtype) -> str:
    """Where the kernel comes from: :attr:`engine.wire.AttentionChoice.modules`."""
    return "prebuilt" if _module(head_dim, dtype, kept).is_aot else "compiled"


def _module(head_dim: int, dtype: torch.dtype, kept: torch.dtype) -> Any:
    """FlashInfer's ``JitSpec`` of the kernel of _wrapper: no positional encoding, sliding window, soft cap or float16 product."""
    modules = import_module("flashinfer.jit.attention.modules")
    return modules.gen_batch_prefill_module("fa2", dtype, kept, dtype, torch.int32, head_dim, head_dim, 0, False, False, False)


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
