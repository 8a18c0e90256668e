"""``python -m engine.bench score``"""

from __future__ import annotations

import argparse

from engine.bench import score


def main() -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser("python -m engine.bench", description="Benchmarks of the engine on this machine.")
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("score", help="scoring against Hugging Face transformers, in one process")
    command.add_argument("--repeats", type=int, default=15, help="requests measured (%(default)s)")
    arguments = parser.parse_args()
    score.main(arguments.repeats)


if __name__ == "__main__":
    main()
