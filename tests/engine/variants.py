"""The kernels that a GPU would compile, recorded on a machine without one.

Launches are only recorded, and the kernels' references compute the results, because the interpreter takes a millisecond for each
program.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from yardstick_llm import kernels
from yardstick_llm.engine.runner.attention import base as branches
from yardstick_llm.engine.runner.attention import triton
from yardstick_llm.kernels import label_logprobs

PROCESSORS = 132
"""Multiprocessors of an H200."""
_NAMES = (
    "entr exp2 i0 i0e i1 i1e sinc ndtri log_ndtr erfc erfinv erfcx kaiser_window digamma trigamma polygamma lgamma gcd lcm zeta",
    "prod igamma igammac bessel_j0 bessel_j1 bessel_y0 bessel_y1 airy_ai",
)
JITERATED = frozenset(name for names in _NAMES for name in names.split())
"""Operations that torch compiles with NVRTC when a GPU first computes them (``jitted_gpu_kernel`` in ATen/native/cuda), with or
without ``special_`` before the name."""


class Variants(TorchDispatchMode):
    """Records each (kernel, constants, types and alignments) that is launched, as Triton's own key of its cache of kernels."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.jiterated: set[str] = set()
        self._inside_reference = False
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[Callable[..., Any], Callable[..., Any]] = {}

        def recorded(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
            self.found.add(self._key(kernel, arguments, named))

        patch.setattr(InterpretedFunction, "run", recorded)
        patch.setattr(label_logprobs, "multiprocessors", lambda device: PROCESSORS)
        patch.setattr("yardstick_llm.engine.loop.build._fuses", lambda device: True)
        for module in pkgutil.iter_modules(kernels.__path__):
            self._record_beside_references(importlib.import_module(f"yardstick_llm.kernels.{module.name}"), patch)

    def _record_beside_references(self, module: Any, patch: pytest.MonkeyPatch) -> None:
        """Let each operation of ``module`` record its kernel and compute its reference, whichever of the two the engine calls."""
        for name in [name for name in vars(module) if name.rstrip("_").endswith("_reference")]:
            launcher, reference = getattr(module, name.replace("_reference", "_triton"), None), getattr(module, name)
            if launcher is not None and reference.__module__ == module.__name__:
                both = self._both(launcher, reference)
                patch.setattr(module, name, both)
                for backend in (triton, branches):
                    if hasattr(backend, launcher.__name__):
                        patch.setattr(backend, launcher.__name__, both)
                if launcher is triton.TritonAttention.make_ready:
                    patch.setattr(triton.TritonAttention, "make_ready", staticmethod(both))

    def _both(self, launcher: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
        def both(*given: Any, **named: Any) -> Any:
            if not self._inside_reference:
                launcher(*given, **named)
            outer, self._inside_reference = self._inside_reference, True
            try:
                return reference(*given, **named)
            finally:
                self._inside_reference = outer

        return both

    def _key(self, kernel: Any, arguments: Any, named: dict[str, Any]) -> str:
        if kernel.fn not in self._binders:
            options = {name: value for name, value in kernel.kwargs.items() if name.startswith("do_not_specialize")}
            compiled = JITFunction(kernel.fn, **options)
            self._binders[kernel.fn] = create_function_from_signature(compiled.signature, compiled.params, self._backend)
        _, specialization, options = self._binders[kernel.fn](*arguments, **named)
        return f"{kernel.fn.__name__} {specialization} {sorted(options.items())}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.removeprefix("special_").rstrip("_")
        if name in JITERATED and not self._inside_reference:
            self.jiterated.add(name)
        return func(*args, **(kwargs or {}))
