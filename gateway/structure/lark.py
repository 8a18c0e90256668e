"""Builds Lark grammars for llguidance: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from gateway.structure.schema import for_llguidance

ANY_TEXT = r"/(.|\n)*/"
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""Whitespace in JSON as ``json.dumps`` writes it, which is what models see of tools and calls in their prompts. ``lenient`` would
ignore keywords that cannot be enforced."""

TokenOf = Callable[[str], int | None]
"""Id of the control token with this spelling; None where the spelling is text. Control tokens never match text in a grammar."""

_CONTROL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Spellings of control tokens within a text."""


class Lark:
    """A grammar being built. Methods return expressions for the right side of a rule."""

    def __init__(self, token_of: TokenOf) -> None:
        self._token_of = token_of
        self._rules: dict[str, str] = {}
        self._embedded: dict[str, dict[str, Any]] = {}

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

    def spelled(self, text: str) -> str:
        """Match ``text``, and each control token that it spells as such."""
        pieces = [piece for piece in self._pieces(text) if piece]
        return " ".join(map(self.marker, pieces)) if pieces else '""'

    def has_control(self, text: str) -> bool:
        """Whether ``text`` spells a control token."""
        return any(self._token_of(piece) is not None for piece in self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        """``text``, divided into control tokens and the texts between them."""
        pieces = [""]
        at = 0
        for found in _CONTROL.finditer(text):
            if self._token_of(found[0]) is not None:
                pieces += [text[at : found.start()], found[0]]
                at = found.end()
        return [*pieces, text[at:]]

    def json(self, schema: dict[str, Any] | bool) -> str:
        """Match JSON that fits ``schema``, in :data:`JSON_STYLE` unless its ``x-guidance`` says otherwise."""
        whole = for_llguidance(schema) if isinstance(schema, dict) else {"allOf": [schema]}
        options = whole.get("x-guidance", {})
        style = JSON_STYLE | options if isinstance(options, dict) else options
        return f"%json {json.dumps(whole | {'x-guidance': style})}"

    def text_until(self, name: str, marker: str, without: Iterable[str] = (), begin: str = ANY_TEXT) -> str:
        """Match text that fits the expression ``begin``, without the texts ``without``, and the first ``marker`` after it.
        ``name``: of the rules to add."""
        text = self.text_without(name, without, begin)
        if not self.has_control(marker):
            return self.rule(f"{name}_end", f"{text} {self.literal(marker)}", lazy=True)
        return f"{text} {self.spelled(marker)}"

    def text_without(self, name: str, without: Iterable[str], begin: str = ANY_TEXT) -> str:
        """Match text that fits the expression ``begin`` and has none of the texts ``without``."""
        escaped = "|".join(_escaped(text) for text in without)
        excluded = rf" & ~/(.|\n)*({escaped})(.|\n)*/" if escaped else ""
        return self.rule(f"{name.upper()}_TEXT", begin + excluded)

    def embedded(self, name: str, grammar: str) -> str:
        """Match another grammar of llguidance: Lark, or JSON with one grammar, which becomes the grammar ``name``."""
        own = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        first, *others = own
        self._embedded[name] = first | {"name": name}
        self._embedded |= {other["name"]: other for other in others}
        return f"@{name}"

    def build(self, start: str) -> str:
        """Return the grammar that begins with the expression ``start``."""
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._rules.values(), ""])
        return json.dumps({"grammars": [{"lark_grammar": text}, *self._embedded.values()]}) if self._embedded else text


def _escaped(text: str) -> str:
    """Return ``text`` as a part of a regular expression between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
