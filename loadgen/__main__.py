"""``python -m loadgen`` is ``yardstick load``."""

from loadgen.cli import main

if __name__ == "__main__":
    main()
