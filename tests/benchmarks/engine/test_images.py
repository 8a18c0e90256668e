"""The benchmark of images at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import images


def test_it_compares_pixels_and_embeddings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert images.main(["--quick", "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads((tmp_path / "summary.json").read_text())
    assert list(told["pixels"]) == ["JPEG 64 x 48", "PNG 64 x 48"]
    assert list(told["tower"]) == ["16 x 16 patches"]
    for row in (*told["pixels"].values(), *told["tower"].values()):
        assert min(row["ours"], row["transformers"], row["ratio"]) > 0
        assert len(row["ratios"]) == 2
    assert all(row["decode"] > 0 for row in told["pixels"].values())
    assert told["tower"]["16 x 16 patches"]["largest_difference"] < 1e-3


def test_other_pixels_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    content = images.photograph("PNG", 56, 56)
    monkeypatch.setattr(images, "photograph", lambda *_: content)
    real = images.prepare

    def wrong(*arguments: object) -> object:
        image = real(*arguments)  # type: ignore[arg-type]
        pixels = np.frombuffer(image.pixels, np.uint8) ^ 1
        return images.Image(image.digest, image.rows, image.columns, pixels.tobytes())

    monkeypatch.setattr(images, "prepare", wrong)
    with pytest.raises(SystemExit, match="not those of transformers"):
        images.pixels("PNG", 56, 56, 1)
