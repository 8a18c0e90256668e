"""Links between pages lead to files, and the files that the architecture page names exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pages() -> list[str]:
    """The pages that git knows; without git, those in ``docs``."""
    if git := shutil.which("git"):
        done = subprocess.run([git, "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
        if found := [page for page in done.stdout.split() if (ROOT / page).exists()]:
            return found
    return [str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")]


PAGES = pages()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        assert not anchor or found.suffix != ".md" or anchor in anchors(found), target


def test_the_files_that_the_architecture_page_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:gateway|engine|kernels|benchmarks|tests|loadgen|tracing)/[\w/.]*)`", text)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_the_tests_that_the_security_page_names_exist() -> None:
    path = None
    named = re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, name in named:
        path = ROOT / "tests" / file if file else path
        assert path is not None
        assert path.is_file(), file
        assert f"def {name}(" in path.read_text(encoding="utf-8") or not name, f"{path}::{name}"
