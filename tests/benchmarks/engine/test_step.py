"""The profile of full steps: its sums, its kinds, its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.engine.roofline import layer_flops
from benchmarks.engine.step import kind_of, measure, speeds, union
from benchmarks.engine.subject import TINY, random_decoder


def test_overlapping_kernels_count_once() -> None:
    assert union([(5, 9), (0, 4), (1, 3), (8, 12)]) == 4 + 7


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(fl", "attention"),
        ("_qk_norm_rope_write", "qk_norm_rope_write"),
        ("_silu_mul", "silu_mul"),
        ("_add_rms_norm_quantized", "norms"),
        ("void flashinfer::norm::RMSNormKernel<8u>", "norms"),
        ("_quantize_rows", "quantize_rows"),
        ("_partial_logsumexp", "label_logprobs"),
        ("Memset (Unknown)", "other"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_measured_steps_are_full() -> None:
    found = measure(lambda: random_decoder(TINY), "float32", 400, 2)
    assert found["tokens"] == 400
    assert len(found["walls_ms"]) == 2
    assert sum(kernel["ms"] for kernel in found["kernels"]) == pytest.approx(sum(found["kinds_ms"].values()))
    products = next(kernel for kernel in found["kernels"] if kernel["name"] in ("aten::mm", "aten::addmm"))
    assert products["launches"] >= 4 * TINY.num_layers
    assert found["gap_ms"] == pytest.approx(found["wall_ms"] - found["busy_ms"])


def test_adapters_are_a_part_of_the_steps() -> None:
    found = measure(lambda: random_decoder(TINY), "float32", 400, 1, adapters=2)
    assert found["tokens"] == 400
    products = next(kernel for kernel in found["kernels"] if kernel["name"] in ("aten::mm", "aten::addmm"))
    assert products["launches"] > 4 * TINY.num_layers + 1


def test_speeds_follow_from_tokens_and_times() -> None:
    found = {"tokens": 1920.0, "wall_ms": 10.0, "kinds_ms": {"products": 2.0}}
    operations = layer_flops(TINY, 1920)
    told = speeds(TINY, found, {"flops": operations / 1e-3, "quantized_flops": None})
    assert told == {
        "items_per_s": pytest.approx(1000.0),
        "products_gflops": pytest.approx(operations / 2e-3 / 1e9),
        "products_of_peak": pytest.approx(0.5),
    }


def test_the_command_measures_each_number_of_tokens_once(
    tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.engine.roofline.MATRIX", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr("benchmarks.engine.roofline.COPIED_BYTES", {"cpu": 1 << 16, "cuda": 1 << 16})
    command = ["step", "--shape", "tiny", "--quantize", "none", "fp8", "--max-batched-tokens", "200", "300", "--steps", "1"]
    assert main([*command, "--out", str(tmp_path), "--limit", "0"]) == 0
    names = [f"{form}: {what}" for form in ("float32", "float32, FP8") for what in ("peaks", "200 tokens", "300 tokens")]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == names
    for _ in range(2):
        assert main([*command, "--out", str(tmp_path), "--continue"]) == 0
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert {form: [*found] for form, found in summary["steps"].items()} == {
            form: ["200", "300"] for form in ("float32", "float32, FP8")
        }
        assert summary["peaks"]["float32, FP8"]["quantized_flops"] > 0
        assert summary["left_out"] == []
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6
