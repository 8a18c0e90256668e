"""``python -m yardstick_llm.engine.training``: the engine's part of ``yardstick lenvm``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from yardstick_llm.engine.server.options import add_options, made

SPLITS = ("test", "validation", "train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train or judge a length model, and return the exit code. An error is one line on standard error."""
    from yardstick_llm.engine.training.train import TrainSettings

    parser = argparse.ArgumentParser("yardstick lenvm")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a length model", description="Train a length model on sampled answers.")
    add_options(train, TrainSettings)
    train.add_argument("--resume", action="store_true", help="continue a training that was interrupted")
    train.add_argument("--allow-censored", action="store_true", help="train although most answers were cut")
    evaluate = commands.add_parser("evaluate", help="judge a length model")
    for name in ("data", "lenvm", "out"):
        evaluate.add_argument(f"--{name}", type=Path, required=True)
    evaluate.add_argument("--init")
    evaluate.add_argument("--split", choices=SPLITS, default=SPLITS[0])
    evaluate.add_argument("--device", choices=("cpu", "cuda"))
    evaluate.add_argument("--calibrate", action="store_true")
    given = parser.parse_args(arguments)
    return _run(given)


def _run(given: argparse.Namespace) -> int:
    import torch

    from yardstick_llm.engine.models.files import ModelError
    from yardstick_llm.engine.models.source import locate
    from yardstick_llm.engine.training.evaluate import evaluate
    from yardstick_llm.engine.training.train import TrainSettings, say, train

    try:
        if given.command == "train":
            values = {name: value for name, value in vars(given).items() if value is not None}
            train(made(TrainSettings, values), resume=given.resume, allow_cut=given.allow_censored)
        else:
            device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            init = None if given.init is None else locate(given.init)
            evaluate(given.data, given.lenvm, given.out, given.split, device, say, recalibrate=given.calibrate, init=init)
    except ModelError as error:
        say(f"yardstick: {error}")
        return 1
    except OSError as error:
        say(f"yardstick: {error}")
        return 1
    except torch.OutOfMemoryError:
        say("yardstick: the GPU's memory does not suffice; repeat with a smaller --tokens-per-pass, or --method lora.")
        return 1
    except KeyboardInterrupt:
        say("yardstick: interrupted; the same command continues" + (" with --resume" if given.command == "train" else ""))
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
