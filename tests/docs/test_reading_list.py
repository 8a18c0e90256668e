"""The core of the score path, as docs/architecture.md lists it, is short enough to be read in one day."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_FILES = 4200, 40
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Lines without blank lines, comments, docstrings and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    kept: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            kept.update(range(token.start[0], token.end[0] + 1))
    return len(kept - left_out)


def test_the_core_of_the_score_path_is_short() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("### The core in code\n")[2].partition("\n## ")[0]
    files = [name for line in re.findall(r"^\d\. .*", section, re.M) for name in re.findall(r"`([^`]+)`", line)]
    assert len(files) > 20
    assert len(set(files)) == len(files) <= MOST_FILES
    lines = {name: lines_of_code((ROOT / name).read_text()) for name in files}
    assert sum(lines.values()) <= MOST_LINES, lines
