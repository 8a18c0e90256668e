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
MARK = "pytest.mark.gpu"
"""Other files are not even collected: a GPU host lacks packages that they import."""
NOTHING_TO_RUN = 5


def main() -> int:
    """Run all; each test's line is printed as it ends, with the name of its process. Returns how many processes failed."""
    marked = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text(encoding="utf-8") and path not in WHOLE]
    rest = ["-m", "gpu", *map(str, marked)]
    shards = {path.stem: ["-m", "gpu or not slow", str(path)] for path in WHOLE} | {"others marked gpu": rest}
    with ThreadPoolExecutor(PROCESSES) as pool:
        ended = dict(zip(shards, pool.map(run, shards, shards.values()), strict=True))
    failed = [name for name, code in ended.items() if code not in (0, NOTHING_TO_RUN)]
    print(f"{len(ended) - len(failed)} of {len(ended)} passed; failed: {', '.join(failed) or 'none'}", flush=True)
    return len(failed)


def run(name: str, arguments: list[str]) -> int:
    """One pytest; returns its exit code. What it says comes line by line, so that a run that is cut off has said what ended."""
    command = [sys.executable, "-u", "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{name}: {line.rstrip()}", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
