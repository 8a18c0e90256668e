"""``python -m yardstick_llm.gateway`` runs the gateway as a process, and ``yardstick`` a subcommand.

The imports of both take a second, in which signals end them as they do later.
"""

from __future__ import annotations

import os
import signal
import sys

from yardstick_llm.gateway.process.signals import INTERRUPTED, end_quietly


def yardstick() -> None:
    """Run a subcommand of ``yardstick``. Ctrl-C ends it with one status at any time, without a traceback."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from yardstick_llm.gateway.cli import main

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    end_quietly()
    from yardstick_llm.gateway.server import main

    sys.exit(main())
