"""Downloads models and LoRA adapters to the hub's cache.

``python -m yardstick_llm.engine.models.download MODEL[@REVISION]... --lora NAME=PATH``

It runs before engines start. A Job can fill a volume that many engines share, and an init container one that a pod keeps. With
``--wait SECONDS`` nothing is downloaded: the command returns when another process has downloaded them into the same cache.
Directories and files need no download.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.source import ADAPTER_FILES, FILES, locate, split_revision

POLL_SECONDS = 1.0
"""Time between two looks for another process's download."""


def main() -> int:
    """Download, or wait for, the models of the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m yardstick_llm.engine.models.download", description=__doc__)
    kinds = "hub id, or ORG/NAME:FILE.gguf, and branch, tag or commit; or a directory or a file"
    parser.add_argument("models", nargs="*", metavar="MODEL[@REVISION]", help=kinds)
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=PATH", help="LoRA adapter, as for the engine")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="wait for another process that downloads them")
    chosen = parser.parse_args()
    wanted = [(model, FILES) for model in chosen.models]
    wanted += [(adapter.partition("=")[2], ADAPTER_FILES) for adapter in chosen.lora]
    try:
        for source, files in wanted:
            if not Path(source).exists():
                _download(source, files) if chosen.wait is None else _wait(source, files, chosen.wait)
    except (ModelError, OSError) as error:
        print(f"yardstick_llm.engine.models.download: {error}", file=sys.stderr)
        return 1
    return 0


def _download(model: str, files: Sequence[str]) -> None:
    """Download ``files`` of ``model`` and leave a mark that they are complete. A download that was interrupted continues."""
    print(f"downloading {model}", flush=True)
    locate(*split_revision(model), files=files)
    mark = _mark(model, files)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    print(f"{model} is complete", flush=True)


def _wait(model: str, files: Sequence[str], seconds: float) -> None:
    """Return when ``model`` is complete. Raises :class:`ModelError` after ``seconds``."""
    end = time.monotonic() + seconds
    print(f"waiting for {model}", flush=True)
    while not _mark(model, files).exists():
        if time.monotonic() > end:
            raise ModelError(f"{model} was not downloaded within {seconds:g} s; look at the log of the Job that downloads it.")
        time.sleep(POLL_SECONDS)


def _mark(model: str, files: Sequence[str]) -> Path:
    """The file that says that ``files`` of ``model`` are complete. A snapshot's directory exists before all of its files do."""
    from huggingface_hub.constants import HF_HUB_CACHE  # imported late, because the import takes half a second

    key = f"adapter {model}" if files is ADAPTER_FILES else model
    return Path(HF_HUB_CACHE, ".complete", hashlib.sha256(key.encode()).hexdigest()[:32])


if __name__ == "__main__":
    sys.exit(main())
