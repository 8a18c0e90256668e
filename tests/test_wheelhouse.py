"""The wheels for a GPU host without internet, and FlashInfer's compiled modules as a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from scripts.flashinfer_wheel import compile_modules, pack
from tests.parts import need
from yardstick_llm.engine.runner.attention import flashinfer

ROOT = Path(__file__).parents[1]
MODULE = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
    "_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
)
"""FlashInfer's name of the kernel that the engine uses in bfloat16 for heads of 128."""


def zipped(folder: Path, *names: str, name: str = "flashinfer-0.6.6-aot-sm90a-cu130.zip") -> Path:
    with zipfile.ZipFile(folder / name, "w") as modules:
        for entry in names:
            modules.writestr(entry, entry.encode())
    return folder / name


def test_modules_are_packed_where_flashinfer_looks(tmp_path: Path) -> None:
    wheel = pack(zipped(tmp_path, "aot/", "aot/page/", "aot/page/page.so", "aot/rope/rope.so"), tmp_path / "out")
    assert wheel.name == "yardstick_flashinfer_modules-0.6.6+sm90a.cu130-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as packed:
        (module,) = [name for name in packed.namelist() if name.endswith("flashinfer/data/aot/page/page.so")]
        assert packed.read(module) == b"aot/page/page.so"
        (about,) = [packed.read(name).decode() for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
    assert {"Name: yardstick_flashinfer_modules", "Requires-Dist: flashinfer-python==0.6.6"} <= set(about.splitlines())
    again = pack(tmp_path / "flashinfer-0.6.6-aot-sm90a-cu130.zip", tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("name", ["../evil.so", "aot/page/other.so", "aot/page/../page.so", "/aot/page/page.so", "notes.txt"])
def test_a_zip_with_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no module"):
        pack(zipped(tmp_path, name), tmp_path / "out")
    with pytest.raises(ValueError, match="there is no module in it"):
        pack(zipped(tmp_path), tmp_path / "out")
    with pytest.raises(ValueError, match="the name must be like"):
        pack(zipped(tmp_path, name="modules.zip"), tmp_path / "out")


def test_a_zip_has_the_modules_that_a_gpu_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys and values in FP8, too, without which tests and ``--kv-dtype fp8`` would leave FlashInfer out."""
    need("gcc")
    asked = []

    def modules(head_dim: int, dtype: torch.dtype, kept: torch.dtype) -> list[SimpleNamespace]:
        asked.append((head_dim, dtype, kept))
        library = tmp_path / "module.so"
        return [SimpleNamespace(name=f"m{len(asked)}", jit_library_path=library, build=lambda verbose: library.touch())]

    monkeypatch.setattr(flashinfer, "modules", modules)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.cpp_ext", SimpleNamespace(get_cuda_version=lambda: Version("13.0")))
    monkeypatch.setattr(os, "environ", {**os.environ})
    path = compile_modules(tmp_path / "out")
    assert path.name == "flashinfer-0.6.6-aot-sm90a-cu130.zip"
    assert {(128, torch.bfloat16, torch.bfloat16), (128, torch.bfloat16, torch.float8_e4m3fn)} <= {*asked}
    with zipfile.ZipFile(pack(path, tmp_path)) as packed:
        assert "flashinfer/data/aot/m2/m2.so" in packed.namelist()


def only_torch(folder: Path) -> Path:
    """The Python of a new environment that has torch and triton of this one, and what they need."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    todo, seen = ["torch", "triton"], set()
    while todo:
        package = metadata.distribution(todo.pop())
        if package.name in seen:
            continue
        seen.add(package.name)
        needs = [Requirement(line) for line in package.requires or ()]
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))))
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheelhouse_is_all_that_a_host_with_torch_needs(tmp_path: Path) -> None:
    for name in ("scripts", "pyproject.toml", "constraints.txt"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path)
    modules = zipped(tmp_path, f"aot/{MODULE}/{MODULE}.so")
    version = ".".join(map(str, sys.version_info[:2]))
    environment = os.environ | {"PYTHON": sys.executable, "HOST_PYTHON": version, "FLASHINFER_ZIP": str(modules)}
    done = subprocess.run(
        ["bash", "scripts/wheelhouse.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    if "Could not find a version" in done.stderr and "Failed to establish a new connection" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    wheels = {wheel.name.partition("-")[0]: wheel.stat().st_size for wheel in (tmp_path / "wheelhouse").glob("*.whl")}
    assert {"nvidia_ml_py", "flashinfer_python", "apache_tvm_ffi", "yardstick_flashinfer_modules"} <= set(wheels)
    assert not {name for name in wheels if name in ("torch", "triton") or name.startswith(("nvidia_cu", "cuda"))}
    assert sum(wheels.values()) < 70 << 20

    python = only_torch(tmp_path / "host")
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = ["install", "--quiet", "--no-compile", "--no-index", "--no-deps", "--find-links", "wheelhouse"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | {"PIP_CONFIG_FILE": os.devnull}
    subprocess.run(
        [*pip, *install, "--requirement", "wheelhouse/requirements.txt"], cwd=tmp_path, env=clean, check=True, timeout=120
    )
    program = """
import torch, flashinfer
from yardstick_llm.engine.runner.attention.flashinfer import compiled, problem, import_module
from yardstick_llm.engine.runner.attention.select import backend_of
from yardstick_llm.engine.settings import ATTENTION_BACKENDS
import yardstick_llm.engine.loop.build, benchmarks.engine.score, yardstick_llm.gateway.app
from yardstick_llm.gateway.api.openapi import openapi_config
assert openapi_config().version, "also where the project itself is not installed"
assert import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
bf16, fp16 = torch.bfloat16, torch.float16
assert compiled(128, bf16, bf16) and not compiled(128, fp16, fp16)
print(sorted(name for name in ATTENTION_BACKENDS if backend_of(name)), torch.__version__)
"""
    checked = subprocess.run(
        [python, "-c", program],
        cwd=tmp_path,
        env=clean
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("['flashinfer', 'native', 'reference', 'triton'] ")
