"""``python -m engine``: serve one model. The imports take a second, in which signals end the process as they do later."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # by default, the first process of a container loses SIGTERM
        signal.signal(number, lambda *_: sys.exit(0))
    from engine.server import main

    sys.exit(main())
