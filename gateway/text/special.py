"""Keeps control tokens in users' messages plain text, while those of the chat template stay control tokens.

A control token is an added token that ``tokenizer.json`` marks as special, or that is spelled with a bar beside a bracket
(``<|im_end|>``, ``<｜User｜>``), which some models do not mark. Other added tokens, such as ``<think>`` and ``<tool_call>``, are
text that both users and templates write; they are tokens wherever they occur.

Before a template runs, a *mark* is inserted into every control token that a user wrote. The mark is one private-use character that
does not occur in the request or the template. In the rendered text, a control token without the mark comes from the template. It
is replaced by a *sentinel*, an added token with a secret random spelling, and the marks are removed. The tokeniser then encodes the
whole text at once, with control tokens as plain text, and each sentinel's id is replaced by the id of its control token."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

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


_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_BARRED = re.compile(r"[<\[{(][|｜].*|.*[|｜][>\]})]", re.DOTALL)

_SPELLED = re.compile(r"<\|\w+\|>")

Flags = tuple[bool, bool]
"""``lstrip`` and ``rstrip`` of an added token: whether it absorbs the whitespace before and after it."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered chat template."""

    text: str
    mark: str = ""
    """The character in users' control tokens; empty if there are none."""

    def followed_by(self, text: str) -> Marked:
        """Return the text with ``text`` behind it."""
        return Marked(self.text + text, self.mark)


class ControlTokens:
    """The control tokens of one tokeniser."""

    def __init__(self, added_tokens: Iterable[Mapping[str, Any]]) -> None:
        """``added_tokens``: as in ``tokenizer.json``."""
        controls = [token for token in added_tokens if token["special"] or _BARRED.fullmatch(token["content"])]
        self.unmarked = {token["content"] for token in controls if not token["special"]}
        """Control tokens that ``tokenizer.json`` does not mark as special."""
        self._ids = {token["content"]: token["id"] for token in controls}
        self._flags: dict[str, Flags] = {
            token["content"]: (bool(token.get("lstrip")), bool(token.get("rstrip"))) for token in controls
        }
        self._pattern = any_of(self._ids) if self._ids else None
        self._prefixes = {text[:end] for text in self._ids for end in range(1, len(text))}
        self._suffixes = {text[start:] for text in self._ids for start in range(1, len(text))}
        self._longest = max(map(len, self._ids), default=0)
        self._first_characters = {text[:1] for text in self._ids}
        self._last_characters = {text[-1:] for text in self._ids}

    @property
    def flags(self) -> set[Flags]:
        """The combinations of flags that occur."""
        return set(self._flags.values())

    def divide(self, text: str) -> list[int | str]:
        """Return the ids of the control tokens in ``text``, and the texts between them, in order."""
        parts: list[int | str] = []
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            parts += [text[start : match.start()], self._ids[match[0]]]
            start = match.end()
        parts.append(text[start:])
        return [part for part in parts if part != ""] or [""]

    def strips(self, id: int) -> bool:
        """Whether a control token absorbs whitespace beside it."""
        return any(any(self._flags[text]) for text, token in self._ids.items() if token == id)

    @staticmethod
    def looks_like_control(text: str) -> str | None:
        """Return the first part of ``text`` that is spelled like a control token; None if there is none."""
        match = _SPELLED.search(text)
        return None if match is None else match[0]

    def may_form(self, text: str) -> bool:
        """Whether ``text`` contains a control token, or a part of one that a template may complete."""
        return self._pattern is not None and (
            self._pattern.search(text) is not None or self._begins_one(text) or self._ends_one(text)
        )

    def mark(self, text: str, mark: str) -> str:
        """Return ``text`` with ``mark`` in every control token, and at ends where one may begin or end."""
        if self._pattern is None:
            return text
        marked = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return (mark if self._ends_one(text) else "") + marked + (mark if self._begins_one(text) else "")

    def lift(self, marked: Marked, sentinels: Mapping[Flags, str]) -> tuple[str, list[int]]:
        """Return the text without marks and with a sentinel for each control token of the template, and the ids of these."""
        ids: list[int] = []

        def sentinel(match: re.Match[str]) -> str:
            ids.append(self._ids[match[0]])
            return sentinels[self._flags[match[0]]]

        text = self._pattern.sub(sentinel, marked.text) if self._pattern else marked.text
        for spelling in (marked.mark, json.dumps(marked.mark)[1:-1], quote(marked.mark)):  # template filters may escape the mark
            text = text.replace(spelling, "")
        return text, ids

    def _begins_one(self, text: str) -> bool:
        """Whether ``text`` ends with the beginning of a control token."""
        if self._first_characters.isdisjoint(text[-self._longest :]):
            return False
        return any(text[-length:] in self._prefixes for length in range(1, min(self._longest, len(text) + 1)))

    def _ends_one(self, text: str) -> bool:
        """Whether ``text`` begins with the end of a control token."""
        if self._last_characters.isdisjoint(text[: self._longest]):
            return False
        return any(text[:length] in self._suffixes for length in range(1, min(self._longest, len(text) + 1)))


def texts_in(value: Any) -> list[str]:
    """Return all texts of a JSON value, including names."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for each in value for text in texts_in(each)]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in texts_in(each)]
    return []


def new_mark(texts: Iterable[str]) -> str:
    """Return a character that occurs in none of ``texts``."""
    texts = list(texts)
    while any((mark := chr(random.choice(_PRIVATE_USE))) in text for text in texts):
        pass
    return mark


def with_marks(value: Any, controls: ControlTokens, mark: str) -> Any:
    """Return a JSON value with ``mark`` in the control tokens of its texts."""
    if isinstance(value, str):
        return controls.mark(value, mark)
    if isinstance(value, list):
        return [with_marks(each, controls, mark) for each in value]
    if isinstance(value, dict):
        return {controls.mark(name, mark): with_marks(each, controls, mark) for name, each in value.items()}
    return value
