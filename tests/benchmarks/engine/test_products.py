"""The benchmark of matrix products."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.engine import products


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(products, "REPEATED_SECONDS", 0.0)
    assert products.main(["--shape", "demo", "--rows", "2,3", "--rounds", "1", "--dtype", dtype, "--out", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "gate_up_proj, 3 × 192 × 1280" in summary["gflops"]
    assert len(summary["gflops"]) == 10
    assert all(speed > 0 for found in summary["gflops"].values() for speed in found.values())
    assert summary["dtype"] == dtype
    assert summary["least_ratio"].keys() >= {"oneDNN", "torch"}
    assert ("MKL, packed" in {summary["chosen"], *summary["least_ratio"]}) == (
        dtype == "float32" and torch.backends.mkl.is_available()
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_all_libraries_compute_the_same(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(7, 48).to(dtype), torch.randn(20, 48).to(dtype)
    for multiply in products.products_of(x, weight).values():
        torch.testing.assert_close(multiply().float(), x.float() @ weight.float().t(), rtol=tolerance, atol=4 * tolerance)
