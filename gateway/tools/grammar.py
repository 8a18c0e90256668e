"""Grammars that force tool calls with valid arguments, and that let a thinking section come first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.tools.families.registry import FAMILIES
from gateway.tools.frame import Function
from gateway.tools.lark import Lark, TokenOf
from gateway.tools.thinking import Tags

_SPACE = r"/[ \n]{0,4}/"


def forced_calls(family: str, functions: Sequence[Function], lark: Lark, *, several: bool) -> str:
    """Match an answer that consists of calls. Raises :class:`~gateway.tools.frame.SchemaError`."""
    frame = FAMILIES[family].frame
    calls = frame.calls(lark, functions, several=several)
    return calls if frame.marker is None else f"{lark.marker(frame.marker)} {calls}"


def free_calls(family: str, functions: Sequence[Function], lark: Lark, *, several: bool) -> str:
    """Match text, calls, or text and then calls. The text cannot contain what the family's parser would read as a call."""
    frame, markers = FAMILIES[family].frame, FAMILIES[family].parser.markers
    calls = frame.calls(lark, functions, several=several)
    if frame.marker is None:  # a text must not begin like a call
        begin = rf"/([ \n]*[^ \n{re.escape(frame.first or '{')}](.|\n)*)?/"
        return f"{calls} | {lark.text_without('answer', markers, begin)}"
    before = lark.text_until("before_calls", frame.marker, without=[marker for marker in markers if marker != frame.marker])
    return f"{lark.text_without('answer', markers)} | {before} {calls}"


def tool_grammar(
    family: str,
    functions: Sequence[Function],
    token_of: TokenOf,
    *,
    forced: bool,
    several: bool,
    thinking: Tags | None = None,
    opened: bool = False,
) -> str:
    """Return the grammar of an answer that calls ``functions``: it must (``forced``) or may. ``several``: it may call several times.

    ``thinking``: tags of the section that may come first, which the prompt has ``opened`` or not; None if there is none. Raises
    :class:`~gateway.tools.frame.SchemaError`.
    """
    lark = Lark(token_of)
    answer = (forced_calls if forced else free_calls)(family, functions, lark, several=several)
    return lark.build(after_thinking(lark, lark.rule("answer", answer), thinking, opened=opened))


def after_thinking(lark: Lark, answer: str, tags: Tags | None, *, opened: bool) -> str:
    """Match a thinking section, which is optional unless the prompt has ``opened`` it, and then the rule ``answer``."""
    if tags is None:
        return answer
    section = lark.text_until("thinking", tags.close)
    space = lark.rule("AFTER_THINKING", _SPACE)
    return f"{section} {space} {answer}" if opened else f"({lark.marker(tags.open)} {section} {space})? {answer}"
