"""``python -m gateway``: runs the gateway as a process. Its imports take a second, in which signals end it as they do later."""

from __future__ import annotations

import sys

from gateway.process.early_end import end_quietly

if __name__ == "__main__":
    end_quietly()
    from gateway.server import main

    sys.exit(main())
