"""Builds Lark grammars for llguidance, and rewrites them for texts within JSON.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from yardstick_llm.gateway.output.constraint import GrammarTextError, json_of

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
        return json_of(schema, JSON_STYLE)

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


ESCAPED = '"\\\n\r\t\b\f'
"""The characters that have an escape. Other control characters cannot be written."""
_PLAIN = r"[^\"\\\x00-\x1f]"
_NAMED_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_COMMON = {
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "NEWLINE": r"/(\r?\n)+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
}
"""Terminals of the library ``common`` that match characters with escapes."""
_SAFE_COMMON = frozenset(
    {"DIGIT", "HEXDIGIT", "INT", "SIGNED_INT", "DECIMAL", "FLOAT", "SIGNED_FLOAT", "NUMBER", "SIGNED_NUMBER"}
    | {"LCASE_LETTER", "UCASE_LETTER", "LETTER", "WORD", "CNAME"}
)
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<range>"(?:\\.|[^"\\])*"\s*\.\.\s*"(?:\\.|[^"\\])*")
    |(?P<string>"(?:\\.|[^"\\])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |%import\s+common\.(?P<imported>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |(?P<refused>%json|%regex|%lark|%import|@[\w-]+|<[^<>\s]+>)
    |(?P<other>[^"/#%@<]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_CODE = re.compile(r"x([0-9a-fA-F]{2})|[xu]\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})")
_ESCAPE = re.compile(rf"\\(?:{_CODE.pattern}|[pP]\{{[^}}]*\}}|[pP]?.)", re.DOTALL)
_PROPERTY = re.compile(r"\\[pP](?:[LMN]|\{[LMN]\w?\})")
"""Classes of letters, marks and numbers, none of which has an escape."""
_GROUP = re.compile(r"\((?:\?(?:(?P<flags>[a-zA-Z-]*)[:)]|P?<\w+>))?")


def quoted(grammar: str) -> str:
    """Return ``grammar`` for texts within a JSON string. Raises :class:`GrammarTextError` for a part that cannot be rewritten."""
    pieces: list[str] = []
    for found in _TOKEN.finditer(grammar):
        kind, text = found.lastgroup, found[0]
        if kind == "string":
            pieces.append(_string(text))
        elif kind == "regex":
            pieces.append(_regex(text))
        elif kind == "range":
            first, last = (_decoded(each) for each in re.findall(r'"(?:\\.|[^"\\])*"', text))
            pieces.append(f"/{_quoted_class(f'[{_in_class(first)}-{_in_class(last)}]')}/")
        elif kind in ("imported", "alias"):
            pieces.append(_import(found["imported"], found["alias"], text))
        elif kind == "refused":
            raise GrammarTextError(f"{text[:64]} is not possible within a text of JSON")
        elif kind == "other":
            pieces.append(text)
    return "".join(pieces)


def _import(name: str, alias: str | None, text: str) -> str:
    if name in _SAFE_COMMON:
        return text
    if name in _COMMON:
        return f"{alias or name}: {_regex(_COMMON[name])}"
    raise GrammarTextError(f"%import common.{name[:64]} is not possible within a text of JSON")


def _decoded(literal: str) -> str:
    try:
        text = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", literal))
    except ValueError:
        raise GrammarTextError(f"{literal[:64]} is not a string") from None
    assert isinstance(text, str)
    return text


def _string(literal: str) -> str:
    """Rewrite a string. The letters of escapes have one case, even if others are matched in both."""
    ignores_case = literal.endswith("i")
    text = _decoded(literal.removesuffix("i"))
    if not ignores_case:
        return json.dumps(_spelled(text))
    runs = [run for run in re.split(r'(["\\\x00-\x1f])', text) if run]
    pieces = [json.dumps(_spelled(run)) + ("" if len(run) == 1 and _has_escape(run) else "i") for run in runs]
    return f"({' '.join(pieces)})" if pieces else '""'


def _has_escape(char: str) -> bool:
    return char in ESCAPED or char < " "


def _spelled(text: str) -> str:
    """Return ``text`` as it is spelled within a JSON string."""
    if any(char < " " and char not in ESCAPED for char in text):
        raise GrammarTextError("a control character is not possible within a text of JSON")
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _regex(literal: str) -> str:
    body, _, flags = literal[1:].rpartition("/")
    if "x" in flags:
        raise GrammarTextError("the flag x of a regular expression is not possible within a text of JSON")
    return f"/{''.join(_atoms(body, dot_matches_newline='s' in flags))}/{flags}"


def _atoms(body: str, *, dot_matches_newline: bool) -> Iterator[str]:
    """Rewrite a regular expression, part by part."""
    at = 0
    while at < len(body):
        char = body[at]
        if char == "[":
            end = _class_end(body, at)
            yield _quoted_class(body[at:end])
        elif char == "\\":
            end = _escape_end(body, at)
            yield _escape(body[at:end])
        elif char == ".":
            end = at + 1
            yield _choice(f"[{_PLAIN}]", [each for each in ESCAPED if dot_matches_newline or each != "\n"])
        elif char == "(":
            found = _GROUP.match(body, at)
            assert found is not None
            if set(found["flags"] or "") & set("sxR") or (body.startswith("(?", at) and len(found[0]) == 1):
                raise GrammarTextError(f"{body[at : at + 8]} in a regular expression is not possible within a text of JSON")
            end = found.end()
            yield found[0]
        else:
            end = at + 1
            yield f"(?-i:{_escaped(_spelled(char))})" if _has_escape(char) else char
        at = end


def _escape_end(body: str, at: int) -> int:
    """Return the end of the escape sequence that begins at ``at``."""
    found = _ESCAPE.match(body, at)
    assert found is not None, "a backslash is never the last character between slashes"
    return found.end()


def _escape(text: str) -> str:
    """Rewrite an escape sequence outside of a class."""
    name = text[1:2]
    if name.lower() in (*_NAMED_CLASSES, "p"):
        return _quoted_class(f"[{text}]")
    if name.isalpha() and name not in _CONTROLS and not _CODE.fullmatch(text[1:]):
        raise GrammarTextError(f"{text} in a regular expression is not possible within a text of JSON")
    char = _character(text)
    return f"(?-i:{_escaped(_spelled(char))})" if _has_escape(char) else text


def _character(text: str) -> str:
    """Return the character that an escape sequence stands for."""
    found = _CODE.fullmatch(text[1:])
    if found is not None:
        code = int(found[1] or found[2] or found[3], 16)
        if code > 0x10FFFF:
            raise GrammarTextError(f"{text} is no character")
        return chr(code)
    return _CONTROLS.get(text[1:], text[1:])


def _class_end(body: str, begin: int) -> int:
    """Return the end of the class that begins at ``begin``; classes may be nested."""
    depth, at = 0, begin
    while at < len(body):
        if body[at] == "\\":
            at = _escape_end(body, at)
            continue
        if body[at] == "[":
            depth += 1
            at += 1 + body.startswith("^", at + 1)
            at += body.startswith("]", at)  # the first one is a member
            continue
        depth -= body[at] == "]"
        at += 1
        if not depth:
            return at
    raise GrammarTextError("a class in a regular expression has no end")


def _quoted_class(text: str) -> str:
    """Rewrite a class of characters: the members that stand for themselves, or the escape of another."""
    return _choice(f"[{text}&&{_PLAIN}]", [each for each in ESCAPED if _contains(text, each)])


def _choice(plain: str, escaped: list[str]) -> str:
    escapes = [_escaped(_spelled(each)) for each in escaped]
    return f"(?:{plain}|(?-i:{'|'.join(escapes)}))" if escapes else f"(?:{plain})"


def _contains(text: str, char: str) -> bool:
    """Whether the class ``text`` has the member ``char``, one of :data:`ESCAPED`. Raises :class:`GrammarTextError` for
    operations on classes."""
    inner = text[1:-1]
    negated = inner.startswith("^")
    at = int(negated)
    found = False
    while at < len(inner):
        if inner[at] == "[":
            end = _class_end(inner, at)
            if inner.startswith("[:", at):
                raise GrammarTextError(f"{inner[at:end]} is not possible within a text of JSON")
            found, at = found or _contains(inner[at:end], char), end
            continue
        if inner[at : at + 2] in ("&&", "--", "~~"):
            raise GrammarTextError("operations on classes are not possible within a text of JSON")
        end = _escape_end(inner, at) if inner[at] == "\\" else at + 1
        member = inner[at:end]
        at = end
        name = member[1:2] if len(member) > 1 else ""
        if name.lower() in _NAMED_CLASSES:
            found = found or (_contains(f"[{_NAMED_CLASSES[name.lower()]}]", char) != name.isupper())
            continue
        if name in ("p", "P"):
            if not _PROPERTY.fullmatch(member):
                raise GrammarTextError(f"{member} is not possible within a text of JSON")
            found = found or name == "P"
            continue
        low = high = _character(member) if name else member
        if inner.startswith("-", at) and at + 1 < len(inner):
            end = _escape_end(inner, at + 1) if inner[at + 1] == "\\" else at + 2
            last = inner[at + 1 : end]
            high, at = (_character(last) if len(last) > 1 else last), end
        found = found or low <= char <= high
    return found != negated


def _in_class(char: str) -> str:
    if len(char) != 1:
        raise GrammarTextError("a range needs single characters")
    return f"\\u{{{ord(char):x}}}"
