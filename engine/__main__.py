"""``python -m yardstick_llm.engine``: serve one model.

The imports take a second, in which signals end the process as they do later.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # By default, the first process of a container loses SIGTERM. An exception could be lost in an import.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from yardstick_llm.engine.server.process import main

    sys.exit(main())
