"""Captures the steps of a model in CUDA graphs, where that is possible and there is memory for them.

The processes that share a model make their graphs at the same time, each those of its part: the same ones in the same order, or
none. They agree before each capture and at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from yardstick_llm.engine.models.encoder import Encoder, Model
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lora.linear import CapturedRows
from yardstick_llm.engine.runner.attention.base import MOST_SLOTS, AttentionBackend
from yardstick_llm.engine.runner.attention.flashinfer import FixedFlashInfer, FlashInferAttention, fixed_bytes
from yardstick_llm.engine.runner.attention.select import problem_of
from yardstick_llm.engine.runner.attention.triton import FixedTritonAttention
from yardstick_llm.engine.runner.attention.whole import FixedWholeAttention, WholeAttention
from yardstick_llm.engine.runner.distributed.shard import LeadingDecoder, PartLost, ShardedDecoder
from yardstick_llm.engine.runner.graphs import (
    BUCKETS,
    GRAPH_BYTES,
    LARGE_BUCKETS,
    Capture,
    Captured,
    CudaCapture,
    FixedAttention,
    StepGraphs,
)
from yardstick_llm.engine.runner.machine import step_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")
AdaptedRows = Callable[[Sequence[int]], CapturedRows]
"""Numbers of tokens -> the rows of adapters in steps that are captured for them."""


def make_graphs(
    decoder: Model,
    attention: AttentionBackend | WholeAttention,
    wanted: str,
    most_tokens: int,
    adapters: AdaptedRows | None = None,
) -> list[StepGraphs]:
    """Capture small steps if this is ``wanted`` (one of :data:`~engine.settings.CUDA_GRAPHS`) and possible, and large ones where
    the memory that is left allows it. ``attention``: of this process. ``most_tokens``: of a step.

    Raises :class:`ModelError` if ``wanted`` is "on" and steps cannot be captured.
    """
    small = captured("CUDA graphs", decoder, wanted, lambda: _capture(decoder, attention, most_tokens, adapters))
    if small is None:
        return []
    sizes = [size for size in LARGE_BUCKETS if size <= most_tokens]
    if not sizes:
        return [small]
    needed = large_graph_bytes(decoder, attention, sizes, adapted=adapters is not None)
    free = _free_bytes(decoder, needed)
    if isinstance(decoder, ShardedDecoder):
        free = decoder.least(free)
        if decoder.least(needed) != -decoder.least(-needed):
            logger.warning("CUDA graphs of large steps: off, the processes of the model have different attention backends")
            return [small]
    if free < needed:
        logger.warning("CUDA graphs of large steps: off, they need %d MiB, and %d are free", needed >> 20, free >> 20)
        return [small]
    large = captured("CUDA graphs of large steps", decoder, wanted, lambda: _capture_large(decoder, attention, sizes, adapters))
    return [small] if large is None else [small, large]


def large_graph_bytes(decoder: Model, attention: AttentionBackend | WholeAttention, sizes: Sequence[int], *, adapted: bool) -> int:
    """Bytes of the device that graphs of ``sizes`` tokens take: of the graphs themselves, of the largest step's tensors in their
    pool and in the run before the capture, of their inputs and outputs, and of attention's tables and outputs."""
    weight, most, layouts = decoder.embed.weight, sizes[-1], 1
    if isinstance(attention, FlashInferAttention):
        layouts, fixed = FixedFlashInfer.layouts, fixed_bytes(attention, most)
    else:  # each graph has an output of its own
        width = decoder.config.num_heads * decoder.config.head_dim * weight.dtype.itemsize
        fixed = (1 + adapted) * sum(sizes) * width + 8 * MOST_SLOTS
    rows = layouts * sum(sizes) if _whole(decoder) else most  # hidden rows of each graph, or residuals that all share
    kept = most * 2 * torch.int64.itemsize + rows * weight.shape[1] * weight.dtype.itemsize
    return layouts * (1 + adapted) * len(sizes) * GRAPH_BYTES + 2 * step_bytes(decoder, most) + kept + fixed


def captured(what: str, decoder: Model, wanted: str, capture: Callable[[], T]) -> T | None:
    """Return what ``capture`` returns; None where it is not ``wanted``, or a process of the model cannot do it. Raises
    :class:`ModelError` if ``wanted`` is "on" and one cannot, and :class:`PartLost`."""
    if wanted == "off":
        return None
    problem = _graphs_problem(decoder)
    try:
        made = None if problem is not None else capture()
        _agree(decoder, able=problem is None)
        if problem is None:
            return made
    except PartLost:
        raise
    except Exception as error:  # an error of CUDA or of Triton's compiler; the engine works without graphs
        problem = f"capturing them failed: {str(error).partition(chr(10))[0].rstrip('.') or type(error).__name__}"
        elsewhere = isinstance(error, FailedElsewhere)
        logger.warning("%s: off, %s", what, problem, exc_info=wanted == "auto" and not elsewhere)
        if not elsewhere:
            _agree(decoder, able=False)
    else:
        if decoder.embed.weight.is_cuda:
            level = logging.WARNING if isinstance(decoder, ShardedDecoder) else logging.INFO  # others may be able
            logger.log(level, "%s: off, %s", what, problem)
    if wanted == "on":
        raise ModelError(f"{what} cannot be used here: {problem}. Start without --cuda-graphs on.")
    return None


class FailedElsewhere(RuntimeError):
    """Another process that shares the model cannot capture its part."""


def _agree(decoder: Model, *, able: bool) -> None:
    """Raise :class:`FailedElsewhere` where this process is ``able`` to go on and another one is not. All processes call this at the
    same time."""
    if isinstance(decoder, ShardedDecoder) and not decoder.least(able) and able:
        raise FailedElsewhere("another process of the model cannot capture them, and the log says why")


class SharedCapture:
    """Captures the same work in all processes of a model at the same time.

    The work runs once before it is captured. In that run the processes wait for each other, so an error there ends the engine. In
    the capture itself none waits, because collectives are only recorded, so all come to the next agreement.

    Sources for collectives of NCCL in CUDA graphs:

    - All ranks capture a collective or none does, and all replay the graphs of the same capture. Captured and launched ones may
      alternate, and the capture mode "global" suits a process with one GPU (NCCL's user guide, "Using NCCL with CUDA Graphs").
    - torch's watchdog thread queries the events of launched collectives, which would break a capture in this mode. It does so in
      the mode "thread_local" (https://github.com/pytorch/pytorch/pull/148594), and captured collectives are not given to it
      (https://github.com/pytorch/pytorch/pull/103503).
    - A collective with ``async_op=False`` is launched in the current stream, which is that of the capture
      (https://github.com/pytorch/pytorch/pull/150398).
    - The communicator must exist, and may allocate memory in the first collective of a kind: :meth:`ShardedDecoder.least` and the
      run before the capture see to both. SGLang does the same (``CudaGraphRunner.capture_one_batch_size``).
    """

    def __init__(self, capture: Capture, decoder: ShardedDecoder) -> None:
        self._capture = capture
        self._decoder = decoder

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        _agree(self._decoder, able=True)
        runs = 0

        def counted() -> Tensor:
            nonlocal runs
            output = work()
            runs += 1
            return output

        try:
            output, replay = self._capture(counted)
        except Exception as error:
            if runs == 0:
                raise PartLost("a step failed before it was captured in all processes that share the model") from error
            raise
        return Captured(output, partial(self._decoder.compute, replay))

    @property
    def allocated(self) -> int:
        return self._capture.allocated


def _graphs_problem(decoder: Model) -> str | None:
    """Return the reason why steps cannot be captured, as a clause; None if they can."""
    weight = decoder.embed.weight
    if not weight.is_cuda:
        return "they need an NVIDIA GPU"
    if isinstance(decoder, Encoder):
        if not decoder.layers:
            return "the model is a table"
        if decoder.config.tasks is not None:
            return "the tasks of its texts are found in each step"
        biased = decoder.is_biased or decoder.slopes is not None
        return "plain PyTorch computes the model's biases of attention" if biased else None
    return None if decoder.config.bidirectional else problem_of("triton", weight.device, decoder.config, weight.dtype)


def _free_bytes(decoder: Model, needed: int) -> int:
    """Free bytes of the device; ``needed`` where it is no GPU."""
    weight = decoder.embed.weight
    return torch.cuda.mem_get_info(weight.device)[0] if weight.is_cuda else needed


def _whole(decoder: Model) -> bool:
    """Whether large steps are captured with all of the last layer. Processes that share a model do not know the rows that rank 0
    reads, and the sums over them are hooks of whole modules."""
    return isinstance(decoder, ShardedDecoder)


def _capture(
    decoder: Model, attention: AttentionBackend | WholeAttention, most_tokens: int, adapters: AdaptedRows | None
) -> StepGraphs:
    """Capture steps of up to ``most_tokens``."""
    buckets = [size for size in BUCKETS if size <= max(most_tokens, BUCKETS[0])]
    return _step_graphs(decoder, _fixed_triton(decoder, attention, max(buckets)), buckets, adapters)


def _capture_large(
    decoder: Model, attention: AttentionBackend | WholeAttention, sizes: Sequence[int], adapters: AdaptedRows | None
) -> StepGraphs:
    """Capture steps of ``sizes`` with the engine's attention."""
    fixed: FixedAttention
    if isinstance(attention, FlashInferAttention):
        fixed = FixedFlashInfer(attention, max(sizes))
    else:
        fixed = _fixed_triton(decoder, attention, max(sizes))
    return _step_graphs(decoder, fixed, sizes, adapters, above=BUCKETS[-1], whole=_whole(decoder))


def _step_graphs(
    decoder: Model,
    fixed: FixedAttention,
    sizes: Sequence[int],
    adapters: AdaptedRows | None,
    *,
    above: int = 0,
    whole: bool = True,
) -> StepGraphs:
    rows = None if adapters is None else adapters(sizes)
    capture: Capture = CudaCapture(decoder.embed.weight.device)
    if isinstance(decoder, ShardedDecoder):
        capture = SharedCapture(capture, decoder)
    plan = decoder.plan if isinstance(decoder, LeadingDecoder) else None
    return StepGraphs(decoder, fixed, capture, sizes, rows, above=above, whole=whole, plan=plan)


def _fixed_triton(decoder: Model, attention: AttentionBackend | WholeAttention, most_tokens: int) -> FixedAttention:
    if isinstance(attention, WholeAttention):
        return FixedWholeAttention(attention, most_tokens)
    return FixedTritonAttention(attention.kv, decoder.config.num_heads, most_tokens, decoder.config.attention_specs)
