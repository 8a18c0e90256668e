"""``python -m yardstick_llm.engine``: serve one model.

The imports take a second, in which signals end the process as they do later.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # by default, the first process of a container loses it
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    from yardstick_llm.engine.server.process import main

    sys.exit(main())
