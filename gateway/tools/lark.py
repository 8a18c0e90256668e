"""Builds Lark grammars for llguidance: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

ANY_TEXT = r"/(.|\n)*/"
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""Whitespace in JSON as ``json.dumps`` writes it, which is what models see of tools and calls in their prompts. ``lenient`` would
ignore keywords that cannot be enforced."""
CONSTRAINT = "constraint"
"""Name of the grammar that :meth:`Lark.constraint` refers to."""

TokenOf = Callable[[str], int | None]
"""Id of the control token with this spelling; None where the spelling is text. Control tokens never match text in a grammar."""


class Lark:
    """A grammar being built. Methods return expressions for the right side of a rule."""

    def __init__(self, token_of: TokenOf) -> None:
        self._token_of = token_of
        self._rules: dict[str, str] = {}
        self._constraint: dict[str, Any] | None = None

    def rule(self, name: str, expression: str, *, lazy: bool = False) -> str:
        """Add a rule, or a terminal if ``name`` is in capitals. ``lazy``: it ends as early as possible."""
        self._rules[name] = f"{name}{'[lazy]' if lazy else ''}: {expression}"
        return name

    def literal(self, text: str) -> str:
        """Match ``text``."""
        return json.dumps(text)

    def marker(self, text: str) -> str:
        """Match ``text``, as a control token if it is one."""
        id = self._token_of(text)
        return self.literal(text) if id is None else f"<[{id}]>"

    def json(self, schema: dict[str, Any]) -> str:
        """Match JSON that fits ``schema``."""
        return f"%json {json.dumps(schema | {'x-guidance': JSON_STYLE})}"

    def text_until(self, name: str, marker: str, without: Iterable[str] = ()) -> str:
        """Match any text, without the texts ``without``, and the first ``marker`` after it. ``name``: of the rules to add."""
        text = self.text_without(name, without)
        if self._token_of(marker) is None:
            return self.rule(f"{name}_end", f"{text} {self.literal(marker)}", lazy=True)
        return f"{text} {self.marker(marker)}"

    def text_without(self, name: str, without: Iterable[str], begin: str = ANY_TEXT) -> str:
        """Match text that fits the expression ``begin`` and has none of the texts ``without``."""
        escaped = "|".join(_escaped(text) for text in without)
        excluded = rf" & ~/(.|\n)*({escaped})(.|\n)*/" if escaped else ""
        return self.rule(f"{name.upper()}_TEXT", begin + excluded)

    def constraint(self, grammar: str) -> str:
        """Match another grammar of llguidance: Lark, or JSON with one grammar."""
        own = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        self._constraint = own | {"name": CONSTRAINT}
        return f"@{CONSTRAINT}"

    def build(self, start: str) -> str:
        """Return the grammar that begins with the expression ``start``."""
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._rules.values(), ""])
        return text if self._constraint is None else json.dumps({"grammars": [{"lark_grammar": text}, self._constraint]})


def _escaped(text: str) -> str:
    """Return ``text`` as a part of a regular expression between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
