"""``python -m engine.models.download MODEL[@REVISION]...``: download models to the hub's cache before engines start.

A Job can fill a volume that many engines share, and an init container one that a pod keeps. With ``--wait SECONDS`` nothing is
downloaded: the command returns when another process has downloaded the models into the same cache. Directories need no download.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

from engine.models.errors import ModelError
from engine.models.source import locate

POLL_SECONDS = 1.0
"""Time between two looks for another process's download."""


def main() -> int:
    """Download, or wait for, the models of the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.models.download", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL[@REVISION]", help="hub id and branch, tag or commit; or a directory")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="wait for another process that downloads them")
    chosen = parser.parse_args()
    try:
        for model in chosen.models:
            if not Path(model).is_dir():
                _download(model) if chosen.wait is None else _wait(model, chosen.wait)
    except (ModelError, OSError) as error:
        print(f"engine.models.download: {error}", file=sys.stderr)
        return 1
    return 0


def _download(model: str) -> None:
    """Download ``model`` and leave a mark that it is complete. A download that was interrupted continues."""
    name, _, revision = model.partition("@")
    print(f"downloading {model}", flush=True)
    locate(name, revision or None)
    mark = _mark(model)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    print(f"{model} is complete", flush=True)


def _wait(model: str, seconds: float) -> None:
    """Return when ``model`` is complete. Raises :class:`ModelError` after ``seconds``."""
    end = time.monotonic() + seconds
    print(f"waiting for {model}", flush=True)
    while not _mark(model).exists():
        if time.monotonic() > end:
            raise ModelError(f"{model} was not downloaded within {seconds:g} s; look at the log of the Job that downloads it.")
        time.sleep(POLL_SECONDS)


def _mark(model: str) -> Path:
    """The file that says that ``model`` is complete. A snapshot's directory exists before all of its files do."""
    from huggingface_hub.constants import HF_HUB_CACHE  # imported late, because the import takes half a second

    return Path(HF_HUB_CACHE, ".complete", hashlib.sha256(model.encode()).hexdigest()[:32])


if __name__ == "__main__":
    sys.exit(main())
