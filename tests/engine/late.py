"""A GPU that is always late, for tests without one.

Its tensors report the device ``cuda:0`` and hold their data in the memory of the CPU. Work on them is queued, as in a CUDA stream,
and runs as late as :attr:`LateGpu.pace` allows: at the latest when the host waits for an event behind it. So a copy from pinned
memory reads its source long after the host has queued it, and a result reaches the host only after its event. A copy notes what its
source held when it was queued; :attr:`LateGpu.overwritten` lists those that found something else. Pageable memory is read at once,
as CUDA does. What waits for the device otherwise, such as ``item()``, is an error.

Triton's interpreter runs the kernels, each as one piece of queued work. :class:`LateFlashInfer` is FlashInfer's wrapper with its
staging buffer; called with some work, the device captures it as a CUDA graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_map

from yardstick_llm.engine.runner.graphs import Captured

GPU = torch.device("cuda", 0)
POISON = 0x5A
"""Byte that fills memory which nothing has been written to."""
Work = Callable[[], object]


class LateTensor(torch.Tensor):
    """A tensor of the device. ``data_`` has its values once the work that is queued before is done."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> LateTensor:
        with torch.inference_mode():  # all of them, because views of others cannot be made in inference mode
            made = torch.Tensor._make_wrapper_subclass(
                cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype, device=GPU
            )
        made.data_ = data
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the late device, outside of its mode")

    # torch's own methods of these names need a guard of CUDA devices, which a build for CPUs lacks.
    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        gpu = _get_current_dispatch_mode()
        assert isinstance(gpu, LateGpu)
        return gpu._copy("copy_", (self, source, non_blocking), {})

    def __invert__(self) -> Tensor:
        return torch.ops.aten.bitwise_not.default(self)  # type: ignore[no-any-return]

    def contiguous(self) -> Tensor:  # type: ignore[override]
        return self if self.is_contiguous() else torch.ops.aten.clone.default(self, memory_format=torch.contiguous_format)

    def __getitem__(self, index: Any) -> Tensor:
        if (tables := _tables(index, self.dim())) is not None:
            return torch.ops.aten.index.Tensor(self, tables)
        with _disable_current_modes():
            return LateTensor(self.data_[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        if (tables := _tables(index, self.dim())) is not None:
            torch.ops.aten.index_put_.default(self, tables, value)
        elif isinstance(value, Tensor):
            self[index].copy_(value)
        else:
            self[index].fill_(value)

    __torch_function__ = torch._C._disabled_torch_function_impl


class LateGpu(TorchDispatchMode):
    """The device, its one stream and its pinned memory. Use as a context around everything that computes."""

    def __init__(self, patch: pytest.MonkeyPatch, pace: Callable[[], int] = lambda: 0) -> None:
        """``pace``: pieces of work that the device does for each that is queued; none unless given."""
        super().__init__()
        self.pace = pace
        self.queued = self.done = 0
        """Pieces of work so far."""
        self.overwritten: list[str] = []
        """Copies whose source changed between the call and the copy."""
        self._queue: deque[Work] = deque()
        self._recorded: list[Work] | None = None
        self._outputs: list[Tensor] = []
        self._pinned: dict[int, Tensor] = {}
        _replace(patch, self)

    def run(self, until: int) -> None:
        """Do the work up to number ``until``."""
        with _disable_current_modes(), torch.inference_mode():
            while self.done < min(until, self.queued):
                self.done += 1
                self._queue.popleft()()

    def queue(self, work: Work) -> None:
        """Put ``work`` behind everything queued before."""
        if self._recorded is not None:
            self._recorded.append(work)
            return
        self._queue.append(work)
        self.queued += 1
        self.run(self.done + self.pace())

    def move(self, module: nn.Module) -> nn.Module:
        """``module`` with its weights on the device."""
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(LateTensor(parameter.detach().clone()), requires_grad=False))
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, LateTensor(buffer.clone()))
        return module

    def whole(self, operation: Callable[..., Any], results: Callable[..., Any]) -> Callable[..., Any]:
        """``operation``, which may look at values, as one kernel. ``results``: empty ones for its arguments, or None in place."""

        def launch(*arguments: Any) -> Any:
            made, data = results(*arguments), tree_map(_data, arguments)
            self.queue(lambda: tree_map(lambda to, value: to.data_.copy_(value), made, operation(*data)))
            return made

        return launch

    allocated = 0

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        """Stands for :class:`~engine.runner.graphs.CudaCapture`: a replay spoils the results of all other graphs."""
        work()
        self._recorded = recorded = []
        output = work()
        self._recorded = None
        assert isinstance(output, LateTensor)
        self._outputs.append(output.data_)

        def replay() -> None:
            for other in self._outputs:
                if other is not output.data_:
                    self.queue(lambda other=other: other.fill_(float("nan")))
            for piece in recorded:
                self.queue(piece)

        return Captured(output, replay)

    def pin(self, data: Tensor) -> Tensor:
        """``data`` as pinned memory. It is never reused: torch's allocator waits for the copies that it knows, too."""
        self._pinned[data.untyped_storage().data_ptr()] = data
        return data

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a copy from or to ``tensor`` can be queued."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def upload(self, source: Tensor, target: Tensor, name: str) -> None:
        """Queue a copy to ``target``, memory of the device."""
        seen = source.clone()
        if not self.is_pinned(source):
            self.queue(lambda: target.copy_(seen))
            return

        def copy() -> None:
            if not torch.equal(source.view(torch.uint8), seen.view(torch.uint8)):
                self.overwritten.append(name)
            target.copy_(source)

        self.queue(copy)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        name = func.overloadpacket.__name__
        to_gpu = named.get("device") is not None and torch.device(named["device"]).type == "cuda"
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        late = any(isinstance(tensor, LateTensor) for tensor in tensors)
        if (late or to_gpu) and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode, operations that are made of others arrive whole
                return func.decompose(*args, **named)
        if name in ("_to_copy", "copy_") and (late or to_gpu):
            return self._copy(name, args, named)
        if not (late or to_gpu):
            pinned = named.pop("pin_memory", None)
            made = func(*args, **named)
            if pinned:
                self.pin(made)
                if name.startswith("empty"):
                    made.view(torch.uint8).fill_(POISON)
            return made
        assert name not in WAITING, f"{name} waits for the device"
        return self._compute(func, name, args, named)

    def _copy(self, name: str, args: Any, named: Any) -> Tensor:
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        queued = named.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if target is None:
            dtype, device = named.get("dtype") or source.dtype, torch.device(named.get("device") or source.device)
            made = torch.empty_like(_data(source), dtype=dtype)
            target = LateTensor(made) if device.type == "cuda" else made
        to, source_data = _data(target), _data(source)
        if isinstance(target, LateTensor) and not isinstance(source, LateTensor):
            waits = not (queued and self.is_pinned(source))
            assert not (waits and self.done < self.queued), "a copy that blocks, or from pageable memory, waits for the device"
            self.upload(source, to, f"copy of {list(source.shape)} {source.dtype}")
        elif isinstance(target, LateTensor):
            self.queue(lambda: to.copy_(source_data))
        else:
            assert queued, "a copy to the host waits for the device"
            assert self.is_pinned(to), "a copy to pageable memory waits for the device"
            self.queue(lambda: to.copy_(source_data))
        return target

    def _compute(self, func: Any, name: str, args: Any, named: Any) -> Any:
        """Queue an operation; its results have their memory at once."""
        if "device" in named:
            named["device"] = torch.device("cpu")
        data, data_named = tree_map(_data, (args, named))
        returns = func._schema.returns
        writes = [place for place, given in enumerate(func._schema.arguments) if given.alias_info and given.alias_info.is_write]
        if writes:
            self.queue(lambda: func(*data, **data_named))
            place = writes[0]
            return args[place] if place < len(args) else named[func._schema.arguments[place].name]
        if any(value.alias_info for value in returns):  # a view
            return tree_map(_wrap, func(*data, **data_named))
        if name.startswith(("empty", "new_empty")):
            made = func(*data, **data_named)
            made.view(torch.uint8).fill_(POISON) if made.is_contiguous() and made.dim() and made.numel() else None
            return LateTensor(made)
        shapes = func(
            *tree_map(_meta, data), **({**tree_map(_meta, data_named)} | ({"device": "meta"} if "device" in named else {}))
        )
        made = tree_map(
            lambda leaf: torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if _tensor(leaf) else leaf, shapes
        )

        def compute() -> None:
            tree_map(lambda to, value: to.copy_(value) if _tensor(to) else None, made, func(*data, **data_named))

        self.queue(compute)
        return tree_map(_wrap, made)


WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}


class LateEvent:
    """``torch.cuda.Event``."""

    gpu: LateGpu

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.mark = 0

    def record(self) -> None:
        self.mark = self.gpu.queued

    def synchronize(self) -> None:
        self.gpu.run(self.mark)

    def query(self) -> bool:
        return self.gpu.done >= self.mark

    def elapsed_time(self, end: LateEvent) -> float:
        """A millisecond for each piece of work; both events must be over, as in CUDA."""
        assert self.query()
        assert end.query()
        return float(end.mark - self.mark)


class LateFlashInfer:
    """``BatchPrefillWithPagedKVCacheWrapper`` of FlashInfer 0.6.6, as far as the engine uses it.

    As PrefillPlan in its ``attention/scheduler.cuh`` does, :meth:`_plan` writes the tiles to the pinned buffer at once and queues
    one copy of it to the device, which the kernel reads.
    """

    gpu: LateGpu
    TILE = 16

    def __init__(self, workspace: Tensor, layout: str, *, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.empty(1 << 16, dtype=torch.int32, device=GPU)
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 16, dtype=torch.int32, pin_memory=True)
        self._cached_module = SimpleNamespace(plan=self._plan)

    def plan(
        self, *arguments: Any, sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float = 0.0, **named: Any
    ) -> None:
        """The engine's first plan, of one token."""
        self._settled = sm_scale, window_left, logits_soft_cap

    def _plan(self, workspace: Tensor, device: Tensor, pinned: Tensor, qo: Tensor, kv: Tensor, lengths: Tensor, *rest: Any) -> int:
        tiles = [
            (segment, start, min(self.TILE, end - start))
            for segment, (begin, end) in enumerate(zip(qo.tolist(), qo.tolist()[1:], strict=False))
            for start in range(begin, end, self.TILE)
        ]
        count = 3 * len(tiles)
        pinned[:count] = torch.tensor(tiles, dtype=torch.int32).flatten()
        self.gpu.upload(pinned[:count], _data(device)[:count], "FlashInfer's plan")
        return len(tiles)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        tables = self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf  # type: ignore[attr-defined]
        given = [_data(tensor) for tensor in (self._int_workspace_buffer, *tables, q, *pages, out)]
        count = self._plan_info  # type: ignore[attr-defined]
        self.gpu.queue(lambda: _attend_tiles(count, *given, *self._settled))
        return out


def _attend_tiles(
    count: int,
    plan: Tensor,
    qo: Tensor,
    kv: Tensor,
    indices: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scale: float | None,
    window_left: int,
    cap: float,
) -> None:
    for segment, start, size in plan[: 3 * count].view(-1, 3).tolist():
        end, context = int(qo[segment + 1]), indices[int(kv[segment]) : int(kv[segment + 1])].long()
        seen = len(context) - (end - start) + 1  # by the tile's first query
        group = q.shape[1] // keys.shape[2]
        k, v = (pages[context[: seen + size - 1], 0].repeat_interleave(group, 1) for pages in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[start : start + size], k) * (q.shape[2] ** -0.5 if scale is None else scale)
        scores = scores if cap == 0 else cap * (scores / cap).tanh()
        position, own = torch.arange(len(k)), seen - 1 + torch.arange(size)[:, None]
        hidden = (position > own) | (position + (window_left if window_left >= 0 else len(k)) < own)
        out[start : start + size] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def _replace(patch: pytest.MonkeyPatch, gpu: LateGpu) -> None:
    """Let torch, Triton and FlashInfer of this process use ``gpu``."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    def queued(kernel: Any, *arguments: Any, **named: Any) -> None:
        data, data_named = tree_map(_data, (arguments, named))
        late = any(isinstance(argument, LateTensor) for argument in arguments)
        gpu.queue(lambda: launch(kernel, *data, **data_named)) if late else launch(kernel, *arguments, **named)

    event = type("Event", (LateEvent,), {"gpu": gpu})
    wrapper = type("Wrapper", (LateFlashInfer,), {"gpu": gpu})
    patch.setattr(InterpretedFunction, "run", queued)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: gpu.pin(tensor.clone()))
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(torch.cuda, "Event", event)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 36, 1 << 36))
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=4))
    patch.setitem(__import__("sys").modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper))


def _tables(index: Any, axes: int) -> list[Tensor | None] | None:
    """The tensors of an index, with None for whole axes before them; None of one without a tensor, which gives a view."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, Tensor) for part in parts):
        return None
    if parts[0] is ...:
        parts = (slice(None),) * (axes - len(parts) + 1) + parts[1:]
    return [None if isinstance(part, slice) and part == slice(None) else part for part in parts]


def _tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _data(value: Any) -> Any:
    return value.data_ if isinstance(value, LateTensor) else value


def _wrap(value: Any) -> Any:
    return LateTensor(value) if isinstance(value, Tensor) else value


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@contextmanager
def computing(gpu: LateGpu) -> Iterator[LateGpu]:
    """Everything inside runs on ``gpu``; its work is done at the end."""
    with gpu:
        yield gpu
        gpu.run(gpu.queued)
