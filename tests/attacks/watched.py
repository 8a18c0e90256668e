"""``python -m tests.attacks.watched``: the gateway, with a watchdog that looks every millisecond and counts in small steps.

With its own intervals it misses most turns that are shorter than 25 ms, as they begin and end between two looks.
"""

from __future__ import annotations

import sys
from functools import partialmethod

from tests.tuned import main
from yardstick_llm.gateway.ops.metrics import ProcessMetrics
from yardstick_llm.gateway.process import event_loop as watchdog

STEP_SECONDS, STEPS = 0.001, 300

if __name__ == "__main__":
    watchdog.BUSY_SECONDS = watchdog.CALM_SECONDS = watchdog.IDLE_SECONDS = 0.001
    steps = tuple(STEP_SECONDS * step for step in range(1, STEPS + 1))
    ProcessMetrics._histogram = partialmethod(ProcessMetrics._histogram, buckets=steps)
    sys.exit(main())
