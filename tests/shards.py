"""``python -m tests.shards``: what tests a GPU, a process for each file, because most of the time goes into compiling kernels.

Kernels and backends run all their quick tests there, not only those marked ``gpu``: on other machines the interpreter runs them.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROCESSES = 12
TESTS = Path(__file__).parent
WHOLE = (
    *sorted((TESTS / "kernels").glob("test_*.py")),
    TESTS / "engine/attention/test_backends.py",
    TESTS / "engine/test_graphs.py",
    TESTS / "engine/lenvm/test_pass_graphs.py",
)
"""Files whose tests take the device, whichever it is."""
NOTHING_TO_RUN = 5


def main() -> int:
    """Run all, print what each process said last, and all of it where it failed. Returns how many failed."""
    rest = ["-m", "gpu", str(TESTS), *(f"--ignore={path}" for path in WHOLE)]
    shards = {path.stem: ["-m", "gpu or not slow", str(path)] for path in WHOLE} | {"others marked gpu": rest}
    with ThreadPoolExecutor(PROCESSES) as pool:
        ended = dict(zip(shards, pool.map(run, shards.values()), strict=True))
    failed = [name for name, process in ended.items() if process.returncode not in (0, NOTHING_TO_RUN)]
    for name, process in ended.items():
        lines = process.stdout.strip().splitlines()
        print(process.stdout if name in failed else f"{name}: {lines[-1] if lines else 'nothing said'}")
    print(f"{len(ended) - len(failed)} of {len(ended)} passed; failed: {', '.join(failed) or 'none'}")
    return len(failed)


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """One pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
