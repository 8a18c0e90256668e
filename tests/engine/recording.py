"""CUDA graphs without a GPU: work is recorded as the operations that reach PyTorch and the kernels that Triton's interpreter runs,
and replayed from that record alone, on the same tensors. As in a graph, whatever Python decided while recording stays decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from yardstick_llm.engine.runner.graphs import Captured

Step = Callable[[], None]


class Recorder(TorchDispatchMode):
    """A :class:`~engine.runner.graphs.Capture`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.allocated = 0
        self._steps: list[Step] | None = None
        from triton.runtime.interpreter import InterpretedFunction

        launch = InterpretedFunction.run

        def recorded(kernel: Any, *arguments: Any, **named: Any) -> None:
            steps, self._steps = self._steps, None  # what the interpreter itself does is no part of the work
            launch(kernel, *arguments, **named)
            self._steps = steps
            if steps is not None:
                steps.append(lambda: launch(kernel, *arguments, **named))

        patch.setattr(InterpretedFunction, "run", recorded)
        modules = [f"kernels.{name}" for name in ("rms_norm", "qk_norm_rope", "whole_attention")]
        for module in (*modules, "engine.models.encoder"):  # as on a GPU, whose work this stands for
            patch.setattr(f"yardstick_llm.{module}.compiles", lambda *_: False)

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        work()
        self._steps = steps = []
        with self:
            output = work()
        self._steps = None
        assert steps

        def replay() -> None:
            for step in steps:
                step()

        return Captured(output, replay)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if self._steps is not None:
            places = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self._steps.append(lambda: again(func, args, named, places))
        return result


def again(func: Any, args: Any, named: Any, places: list[Tensor]) -> None:
    """Bring what ``func`` gives now to where it was when it was recorded; views and what is written in place are there already."""
    found = tree_leaves(func(*args, **named))
    for leaf in found:
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()  # a collective
    leaves = [leaf for leaf in found if isinstance(leaf, Tensor)]
    for place, leaf in zip(places, leaves, strict=True):
        if leaf.data_ptr() != place.data_ptr():
            place.copy_(leaf)
