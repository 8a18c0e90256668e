"""The parts of an answer: text, thinking and tool calls, in the order in which the model writes them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str
    begin: int = 0
    """Characters of thinking, text and markup before it."""


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the thinking section."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins. Its arguments follow."""

    call: int
    """Position of the call in the answer, from 0."""
    id: str
    name: str
    custom: bool = False
    """Whether the tool takes a text instead of arguments."""


class CallArguments(msgspec.Struct, frozen=True):
    """The next characters of a call's arguments, which together are a JSON object, or of the text for a custom tool."""

    call: int
    text: str
    custom: bool = False


class CallCut(msgspec.Struct, frozen=True):
    """A call ended before its arguments were complete, so it must not be run."""

    call: int


Part = Content | Reasoning | CallBegin | CallArguments | CallCut


class Call(msgspec.Struct):
    """A tool call, with the arguments so far."""

    id: str
    name: str
    arguments: str = ""
    custom: bool = False


class Joined(msgspec.Struct):
    """All parts of an answer, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = []


def joined(parts: Iterable[Part]) -> Joined:
    """Put the parts of an answer, or of a piece of it, together, without calls that were cut. Takes time linear in their text."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[CallBegin, list[str]]] = {}
    for part in parts:
        match part:
            case Content():
                content.append(part.text)
            case Reasoning():
                reasoning.append(part.text)
            case CallBegin():
                calls[part.call] = (part, [])
            case CallArguments():
                calls[part.call][1].append(part.text)
            case CallCut():
                del calls[part.call]
    tool_calls = [Call(begin.id, begin.name, "".join(arguments), begin.custom) for begin, arguments in calls.values()]
    return Joined("".join(content), "".join(reasoning), tool_calls)


_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """Return a new id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a new id of nine letters and digits, which is what Mistral's chat templates accept."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
