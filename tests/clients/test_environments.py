"""Environments of clients are made once, and only an index that cannot be reached skips a test."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import httpx
import pytest

from tests.clients import environments
from tests.clients.environments import PINS, download, link_installed, ready


def test_an_index_that_cannot_be_reached_skips() -> None:
    with pytest.raises(pytest.skip.Exception, match="cannot be reached"):
        download(["false"], ["false"])


def test_packages_that_cannot_be_installed_fail() -> None:
    with pytest.raises(pytest.fail.Exception):
        download(["false"], ["true"])


def test_an_environment_is_made_once_and_again_if_it_was_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path / "clients")
    made: list[Path] = []

    def install(directory: Path) -> None:
        directory.mkdir()
        made.append(directory)
        if len(made) == 1:
            raise OSError("interrupted")

    with pytest.raises(OSError, match="interrupted"):
        ready("some", b"pins", install)
    assert ready("some", b"pins", install) == ready("some", b"pins", install) == made[0]
    assert len(made) == 2
    assert ready("some", b"other pins", install) != made[0]


def test_packages_that_are_installed_in_the_pinned_version_are_linked(tmp_path: Path) -> None:
    installed = metadata.version("httpx")
    assert link_installed([f"httpx=={installed}", "idna==1.0", "no-such-package==1.0"], tmp_path) == [
        "idna==1.0",
        "no-such-package==1.0",
    ]
    (package,) = metadata.distributions(path=[str(tmp_path)])
    assert (package.name, package.version) == ("httpx", installed)
    assert (tmp_path / "httpx" / "__init__.py").samefile(httpx.__file__)
    assert not (tmp_path / "idna").exists()


@pytest.mark.parametrize("path", sorted(PINS.iterdir()), ids=lambda path: path.name)
def test_pins_are_exact(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines
    assert all(("@" if path.suffix == ".npm" else "==") in line for line in lines)


def test_the_compromised_release_of_litellm_is_not_pinned() -> None:
    assert "litellm==1.107.0" not in (PINS / "litellm.txt").read_text(encoding="utf-8")
