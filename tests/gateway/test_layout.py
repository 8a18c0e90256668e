"""The folders of these tests are those of the gateway."""

from __future__ import annotations

from pathlib import Path

import gateway

PACKAGE = Path(gateway.__file__).parent
TESTS = Path(__file__).parent


def test_each_folder_of_modules_has_tests_and_each_folder_of_tests_has_modules() -> None:
    modules = {file.parent.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"}
    tested = {file.parent.relative_to(TESTS) for file in TESTS.rglob("test_*.py")} - {Path("console")}  # its modules are scripts
    assert modules == tested
