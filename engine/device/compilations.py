"""Counts kernels that Triton compiles. A compilation takes up to 25 seconds, in which the engine does nothing else, so all are to
happen before the engine is ready (:mod:`engine.startup.warm_up`).
"""

from __future__ import annotations

import logging
from typing import Any

from kernels.runtime import AVAILABLE, INTERPRETED, triton

logger = logging.getLogger(__name__)


class Compilations:
    """Kernels that this process compiled or loaded from Triton's cache on disk. One object at a time counts."""

    def __init__(self) -> None:
        self.early = 0
        """Before :meth:`ready`."""
        self.late = 0
        """Since then, while requests waited."""
        self._ready = False
        if AVAILABLE and not INTERPRETED:
            triton.knobs.runtime.jit_post_compile_hook = self._count  # type: ignore[assignment, unused-ignore]

    def ready(self) -> None:
        """Begin to serve: compilations from now on are late, and logged."""
        self._ready = True

    def _count(self, *, repr: str, **_: Any) -> None:
        """Triton's hook. repr: the kernel, its options and the types of its arguments."""
        if not self._ready:
            self.early += 1
            return
        self.late += 1
        logger.warning("compiled a kernel while requests waited: %s", repr)
