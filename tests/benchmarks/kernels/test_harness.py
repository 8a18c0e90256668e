"""The benchmarks of the kernels: what they say without a GPU, and what they print with one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.engine.records import FILE, Store
from benchmarks.kernels import cli, harness
from benchmarks.kernels.cli import BENCHMARKS, main, measure
from benchmarks.kernels.harness import Gpu, Row, table
from tests.engine.depth import seeds


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchmarks", "kernels", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    ran = _run()
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr == "The benchmarks of the kernels need an NVIDIA GPU, and torch finds none on this machine.\n"


@pytest.mark.slow
def test_unknown_name() -> None:
    ran = _run("rms_norm", "rms_nrom")
    assert ran.returncode == 2
    assert "there is no benchmark named rms_nrom; there are " in ran.stderr


def test_table() -> None:
    rows = [Row("rms_norm", "[8192, 1024]", 1.2e-5, 2796.2, "GB/s", 65.03), Row("product", "[1]", 1, 0.5, "TFLOP/s", 0.1)]
    assert table(rows).splitlines() == [
        "operation  shape         µs         rate         of peak",
        "rms_norm   [8192, 1024]  12.0       2796 GB/s    65 %",
        "product    [1]           1000000.0  0.5 TFLOP/s  0 %",
    ]


class _Shapes(TorchFunctionMode):
    """Replaces allocations on a GPU by tensors with a shape and no content."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if kwargs.get("device") == "cuda" else kwargs))


class _Counting(Gpu):
    """Runs each benchmark once and takes it for a second."""

    def moved(self, name: str, shape: str, bytes_moved: float, run: Callable[[], Any]) -> Row:
        run()
        return Row(name, shape, 1.0, bytes_moved, "GB/s", 1.0)

    def computed(self, name: str, shape: str, operations: float, run: Callable[[], Any]) -> Row:
        return self.moved(name, shape, operations, run)


@pytest.mark.parametrize("name", ["label_logprobs", "lora", "qk_norm_rope", "quantize", "rms_norm", "silu_mul"])
def test_arguments_fit(name: str) -> None:
    """The references take what the benchmarks give them."""
    with _Shapes():
        rows = list(BENCHMARKS[name](_Counting("none", 4e12, 8e14)))
    assert len({(row.name, row.shape) for row in rows}) == len(rows)
    assert all(row.rate > 0 for row in rows)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("seed", seeds(quick=1, slow=10, deep=10))
def test_rows_survive_kills_at_random_moments(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock instead of a GPU; each row is measured once, and a later run goes on behind it."""
    rng, now, chosen = Random(seed), [0.0], ["quantize", "rms_norm", "silu_mul"]

    def seconds(run: Callable[[], Any]) -> float:
        now[0] += rng.uniform(0.5, 2.5)
        if rng.random() < 0.1:
            raise Killed
        return 1e-3

    monkeypatch.setattr(harness, "seconds", seconds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    for call in range(200):
        store = Store(tmp_path, resume=call > 0, limit=20.0, clock=lambda: now[0])
        end = now[0] + 20.0
        try:
            with _Shapes():
                report = measure(chosen, store)
        except Killed:
            continue
        assert now[0] <= end
        assert json.dumps(report)
        if not report["left_out"]:
            break
    with _Shapes():
        rows = [row for name in chosen for row in BENCHMARKS[name](_Counting("none", 4e12, 8e14))]
    assert [(row["name"], row["shape"]) for row in report["rows"]] == [(row.name, row.shape) for row in rows]
    assert report["gpu"]["name"] == "none"
    keys = [json.loads(line)["key"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert keys == ["GPU", *(f"{row.name}: {row.shape}" for row in rows)]


@pytest.mark.parametrize("lost", [False, True], ids=["it fails", "it breaks the GPU"])
def test_a_kernel_that_fails_does_not_stop_the_others(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the GPU computes nothing more, another process measures the others."""
    names, broken, processes = ["quantize", "rms_norm", "silu_mul"], [], [list[str]()]

    def rows(name: str, gpu: Gpu) -> Iterator[Row]:
        if name == "rms_norm":
            broken.append(lost)
        if broken and (broken[-1] or name == "rms_norm"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`")
        yield gpu.moved(name, "[1]", 1.0, lambda: None)

    def restart(arguments: Sequence[str]) -> NoReturn:
        broken.clear()
        processes.append(list(arguments))
        raise SystemExit(main(arguments))

    for name in names:
        monkeypatch.setitem(BENCHMARKS, name, partial(rows, name))
    monkeypatch.setattr(cli, "_restart", restart)
    monkeypatch.setattr(Gpu, "works", lambda gpu: not (broken and broken[-1]))
    monkeypatch.setattr(harness, "seconds", lambda run: 1e-3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    with _Shapes(), contextlib.suppress(SystemExit):
        assert main([*names, "--out", str(tmp_path), "--limit", "100"]) == 1
    assert len(processes) == 1 + lost
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in report["rows"]] == ["quantize", "silu_mul"]
    assert report["failed"] == {"rms_norm": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    assert json.loads((tmp_path / "summary.json").read_text()) == report


@pytest.mark.gpu
def test_a_benchmark() -> None:
    ran = _run("rms_norm")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["gpu"]["bandwidth"] > 1e11
    assert all(0 < row["percent"] < 150 for row in report["rows"])
