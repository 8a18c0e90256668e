"""Triton where it can run: on a GPU, or in its interpreter (``TRITON_INTERPRET=1``, for tests without one).

Elsewhere stand-ins let the kernels' modules be imported, so that a CPU needs no Triton and starts without it.
"""

from __future__ import annotations

import os
from typing import Any

import torch

AVAILABLE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


class _Absent:
    """Takes the place of a module that is not needed here: every attribute is itself, and calling it gives back what it decorates."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self


if AVAILABLE:
    import triton
    import triton.language as tl
else:
    triton = tl = _Absent()

__all__ = ["AVAILABLE", "tl", "triton"]
