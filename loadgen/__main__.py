"""``python -m yardstick_llm.loadgen`` is ``yardstick load``."""

import os
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # during the imports; by default, Python shows a traceback
    from yardstick_llm.loadgen.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
