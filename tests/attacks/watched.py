"""``python -m tests.attacks.watched``: the gateway, with a watchdog that looks every millisecond.

With its own intervals it misses most turns that are shorter than 25 ms, as they begin and end between two looks.
"""

from __future__ import annotations

import sys

from gateway.__main__ import main
from gateway.process import watchdog

if __name__ == "__main__":
    watchdog.BUSY_SECONDS = watchdog.CALM_SECONDS = watchdog.IDLE_SECONDS = 0.001
    sys.exit(main())
