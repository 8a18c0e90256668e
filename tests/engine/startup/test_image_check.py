"""The check that runs when an engine's image is built."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from engine.startup import image_check
from tests.parts import need


def test_every_module_is_imported() -> None:
    assert image_check.import_all() > 100


def test_an_extension_is_compiled_where_there_are_headers(tmp_path: Path) -> None:
    need("gcc")
    image_check.compile_extension(Path(sysconfig.get_path("include")))
    with pytest.raises(subprocess.CalledProcessError):
        image_check.compile_extension(tmp_path)


def test_modules_with_missing_libraries_are_found(tmp_path: Path) -> None:
    def module(name: str, source: str) -> None:
        (tmp_path / name).mkdir()
        command = [need("gcc"), "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name / f"{name}.so")]
        subprocess.run(command, input=source, text=True, check=True)

    module("page", "int page(void) { return 1; }")
    assert image_check.load_modules(tmp_path) == 1
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "broken.so").write_bytes(b"no library")
    with pytest.raises(OSError, match=r"broken\.so"):
        image_check.load_modules(tmp_path)


@pytest.mark.parametrize(("budget", "status"), [("1", 1), ("2", 0)])
def test_the_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, status: int) -> None:
    (tmp_path / "file").write_bytes(bytes(2 << 20))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["image_check", "cpu", budget])
    assert image_check.main() == status
