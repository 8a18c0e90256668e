"""``python -m engine.bench score``"""

from __future__ import annotations

import argparse
import os
import sys

from engine.link import MALLOC


def main() -> None:
    """Run one benchmark, under the memory settings that the engine's loop runs under."""
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "engine.bench", *sys.argv[1:]], MALLOC | os.environ)  # noqa: S606
    from engine.bench import score

    parser = argparse.ArgumentParser("python -m engine.bench", description="Benchmarks of the engine on this machine.")
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("score", help="scoring against Hugging Face transformers, in one process")
    command.add_argument("--repeats", type=int, default=15, help="requests measured (%(default)s)")
    arguments = parser.parse_args()
    score.main(arguments.repeats)


if __name__ == "__main__":
    main()
