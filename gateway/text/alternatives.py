"""A regular expression for one of many texts, whose time does not depend on their number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MOST_NESTED = 256
"""Most texts that begin with each other in turn. Python's compiler of expressions is recursive and fails at some 450."""


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return an expression that matches the longest of ``texts`` at each place, and nothing if there is none.

    The texts share their beginnings in it. An alternation of hundreds of texts would try each of them at every place, which takes
    milliseconds for a few kilobytes of their common first character.

    Raises ValueError if the texts branch more than :data:`MOST_NESTED` times behind a common beginning.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_pattern(tree) if tree else "(?!)")


def _pattern(tree: dict[str, Any], depth: int = 0) -> str:
    """Return the expression of the texts in ``tree``, a node for each character; the key "" marks the end of a text."""
    if depth > MOST_NESTED:
        raise ValueError(f"more than {MOST_NESTED} added tokens begin with each other")
    branches = []
    for char, below in tree.items():
        if not char:
            continue
        shared = char
        while len(below) == 1 and "" not in below:
            ((next_char, below),) = below.items()
            shared += next_char
        branches.append(re.escape(shared) + _pattern(below, depth + 1))
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in tree else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in tree else joined
