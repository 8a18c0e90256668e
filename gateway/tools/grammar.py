"""Grammars that force tool calls with valid arguments, and that let a thinking section come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.structure.lark import Lark, TokenOf
from gateway.tools.families.registry import FAMILIES
from gateway.tools.frame import Function
from gateway.tools.thinking import Tags

_CONSTRAINT = "constraint"
_SPACE = r"/[ \n]{0,4}/"


@dataclass(frozen=True)
class Calls:
    """The tool calls of an answer."""

    family: str
    """Key of :data:`~gateway.tools.families.registry.FAMILIES`."""
    functions: Sequence[Function]
    """Functions that may be called; at least one."""
    forced: bool
    """Whether the answer consists of calls, or may also be text, or text and then calls."""
    several: bool
    """Whether there may be several."""


def answer_grammar(
    token_of: TokenOf, *, calls: Calls | None = None, constraint: str = "", thinking: Tags | None = None, opened: bool = False
) -> str:
    """Return the grammar of an answer.

    ``constraint``: grammar of an answer without calls; empty for any text. ``thinking``: tags of the section that may come first,
    which the prompt has ``opened`` or not; None if there is none. Raises :class:`~gateway.tools.frame.SchemaError`.
    """
    lark = Lark(token_of)
    if calls is None:
        answer = lark.embedded(_CONSTRAINT, constraint)
    elif calls.forced:
        answer = _first_marker(lark, calls) + _calls(lark, calls)
    else:
        answer = _free_calls(lark, calls, constraint)
    return lark.build(_after_thinking(lark, lark.rule("answer", answer), thinking, opened=opened))


def _calls(lark: Lark, calls: Calls) -> str:
    return FAMILIES[calls.family].frame.calls(lark, calls.functions, several=calls.several)


def _first_marker(lark: Lark, calls: Calls) -> str:
    marker = FAMILIES[calls.family].frame.marker
    return "" if marker is None else f"{lark.marker(marker)} "


def _free_calls(lark: Lark, calls: Calls, constraint: str) -> str:
    """Match text, calls, or text and then calls; with a ``constraint``, what it allows or calls."""
    frame, markers = FAMILIES[calls.family].frame, FAMILIES[calls.family].parser.markers
    expression = _calls(lark, calls)
    if constraint:
        return f"{_first_marker(lark, calls)}{expression} | {lark.embedded(_CONSTRAINT, constraint)}"
    return frame.free(lark, expression, markers)


def _after_thinking(lark: Lark, answer: str, tags: Tags | None, *, opened: bool) -> str:
    """Match a thinking section, which is optional unless the prompt has ``opened`` it, and then the rule ``answer``."""
    if tags is None:
        return answer
    section = lark.text_until("thinking", tags.close)
    following = lark.rule("AFTER_THINKING", _SPACE)
    return f"{section} {following} {answer}" if opened else f"({lark.spelled(tags.open)} {section} {following})? {answer}"
