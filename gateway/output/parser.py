"""Reads tool calls out of text that arrives in chunks: a cursor, the parts of an answer, and the base of all parsers.

A parser is a generator, written as if all of the text were there. It yields where it needs more and goes on when that has arrived,
so the result does not depend on how the text is divided. Text between :attr:`Scanner.mark` and :attr:`Scanner.at` was read and not
passed on: it becomes content if the call that it seemed to begin turns out to be malformed.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import ClassVar, TypeVar

import msgspec

from yardstick_llm.gateway.schemas.chat import CUSTOM_INPUT

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser: yields where it needs more text, and returns a T."""

_NO_SPACE = re.compile(r"[^ \t\r\n]")
_SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_CLOSES = {"}": "{", "]": "["}


class Malformed(Exception):
    """The text is not a call, or it ended inside one."""


class Scanner:
    """A cursor in the text so far."""

    def __init__(self) -> None:
        self.text = ""
        """The text from :attr:`mark` on, or from a little before."""
        self.at = 0
        """Characters of :attr:`text` that were read."""
        self.mark = 0
        """Characters of :attr:`text` that were passed on or consumed."""
        self.begin = 0
        """Characters of the answer before :attr:`text`."""
        self.ended = False
        """Whether no more text will come."""

    def add(self, text: str) -> None:
        """Append a chunk, and forget the text before :attr:`mark`."""
        self.begin += self.mark
        self.text = self.text[self.mark :] + text
        self.at -= self.mark
        self.mark = 0

    @property
    def unread(self) -> bool:
        """Whether there is a next character."""
        return self.at < len(self.text)

    def more(self) -> Steps[None]:
        """Wait for more text. Raises :class:`Malformed` at the end of the text."""
        if self.ended:
            raise Malformed
        yield

    def peek(self) -> Steps[str]:
        """Return the next character without reading it. Raises :class:`Malformed` at the end of the text."""
        while not self.unread:
            yield from self.more()
        return self.text[self.at]

    def space(self) -> Steps[None]:
        """Read whitespace, up to the end of the text."""
        while True:
            found = _NO_SPACE.search(self.text, self.at)
            self.at = found.start() if found else len(self.text)
            if found or self.ended:
                return
            yield

    def begins(self, literal: str) -> Steps[bool]:
        """Read ``literal`` if it comes next, and return whether it did."""
        while len(self.text) - self.at < len(literal) and literal.startswith(self.text[self.at :]) and not self.ended:
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> Steps[None]:
        """Read ``literal``. Raises :class:`Malformed` if it does not come next."""
        if not (yield from self.begins(literal)):
            raise Malformed

    def until(self, *ends: str, most: int) -> Steps[str]:
        """Return the text before the first of ``ends``, which is not read. Raises :class:`Malformed` beyond ``most`` characters."""
        longest = max(map(len, ends))
        searched = 0  # characters from ``at`` on that contain no end
        while True:
            found = [place for end in ends if (place := self.text.find(end, self.at + searched)) >= 0]
            stop = min(found, default=len(self.text) - longest + 1)
            if stop - self.at > most:
                raise Malformed
            if found:
                read = self.text[self.at : stop]
                self.at = stop
                return read
            searched = max(0, len(self.text) - self.at - longest + 1)
            yield from self.more()

    def before(self, markers: tuple[str, ...], passed: Callable[[int], None]) -> Steps[bool]:
        """Read text up to the first of ``markers``, which is not read; return False at the end of the text. ``passed`` moves
        :attr:`mark` to the place that it gets: the end of the text that is certain, without the whitespace before it."""
        searched, spaces = self.at - self.mark, 0  # characters from the mark on without a marker; those known to be whitespace
        while True:
            begin, unknown = self.mark + searched, self.mark + spaces
            found = min((place for marker in markers if (place := self.text.find(marker, begin)) >= 0), default=-1)
            end = found if found >= 0 else held_for(self.text, begin, markers)
            if (certain := before_space(self.text, unknown, end)) > unknown:
                passed(certain)
            if found >= 0:
                self.at = found
                return True
            if self.ended:
                return False
            searched = spaces = end - self.mark
            yield

    def string(self) -> Steps[str]:
        """Read a JSON string and return its text with the quotes."""
        begin = self.at - self.mark
        yield from self.expect('"')
        yield from self._string_end()
        return self.text[self.mark + begin : self.at]

    def value(self, passed: Callable[[], None]) -> Steps[None]:
        """Read a JSON object or list; brackets and strings are checked, the rest is taken as it is. ``passed`` is called before
        each wait and at the end, and may move :attr:`mark`. Raises :class:`Malformed` where a bracket does not match."""
        opened: list[str] = []
        while True:
            found = _STRUCTURE.search(self.text, self.at)
            if found is None:
                self.at = len(self.text)
                passed()
                yield from self.more()
                continue
            self.at = found.start()
            sign = found[0]
            if sign in _CLOSES and (not opened or opened.pop() != _CLOSES[sign]):
                passed()
                raise Malformed
            self.at += 1
            if sign == '"':
                yield from self._string_end(passed)
            elif sign in "{[":
                opened.append(sign)
            if not opened:
                passed()
                return

    def _string_end(self, passed: Callable[[], None] | None = None) -> Steps[None]:
        """Read up to the closing quote, which is read too."""
        while True:
            found = _STRING_STOP.search(self.text, self.at)
            if found is None:
                self.at = len(self.text)
            elif found[0] == '"':
                self.at = found.end()
                return
            elif found.end() < len(self.text):
                self.at = found.end() + 1
                continue
            else:
                self.at = found.start()
            if passed is not None:
                passed()
            yield from self.more()


def held_for(text: str, begin: int, markers: tuple[str, ...]) -> int:
    """Return the place in ``text``, from ``begin`` on, of the longest end that may become one of ``markers``."""
    longest = max(map(len, markers))
    for place in range(max(begin, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[place:]) for marker in markers):
            return place
    return len(text)


def before_space(text: str, begin: int, end: int) -> int:
    """Return the end of ``text[begin:end]`` without the whitespace at its end."""
    while end > begin and text[end - 1] in _SPACE:
        end -= 1
    return end


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


_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_MOST_BEGIN = 64
"""Characters within which the text begins. Arguments of another form are passed on as they are."""
_PIECE = re.compile(
    r"""[^"\\]+  # characters without an escape
    |\\[^u]
    |\\u(?![dD][89abAB]).{4}
    |\\u[dD][89abAB]..(?:\\u.{4}|(?=[^\\]|\\[^u]))  # a pair of surrogates is one sequence
    """,
    re.VERBOSE | re.DOTALL,
)
"""The next characters of a JSON string whose meaning is certain: a complete escape sequence, or others."""


class CustomInput:
    """Decodes the text while the arguments arrive."""

    def __init__(self) -> None:
        self._read = ""
        self._begun = False
        self._ended = False
        self._verbatim = False
        """Whether the arguments have another form."""

    def push(self, arguments: str) -> str:
        """Take the next characters of the arguments and return the text that is certain now."""
        if self._verbatim:
            return arguments
        if self._ended:
            return ""
        self._read += arguments
        if not self._begun:
            found = _BEGIN.match(self._read)
            if found is None:
                self._verbatim = len(self._read) > _MOST_BEGIN or not _may_begin(self._read)
                return self._read if self._verbatim else ""
            self._begun, self._read = True, self._read[found.end() :]
        return self._decoded()

    def _decoded(self) -> str:
        """Return the text up to an escape that is not complete, or to the closing quote."""
        at, decoded = 0, []
        while (found := _PIECE.match(self._read, at)) is not None:
            decoded.append(_unescaped(found[0]) if found[0].startswith("\\") else found[0])
            at = found.end()
        self._ended = self._read.startswith('"', at)
        self._read = self._read[at:]
        return "".join(decoded)


def _may_begin(read: str) -> bool:
    """Whether ``read`` may become the beginning of the expected arguments."""
    return f'{{"{CUSTOM_INPUT}":"'.startswith("".join(read.split()))


def _unescaped(sequence: str) -> str:
    try:
        text = json.loads(f'"{sequence}"')
    except ValueError:
        return sequence
    assert isinstance(text, str)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


MAX_NAME = 256
"""Most characters that are read as the name of a function or a parameter."""
_NAME_KEYS = frozenset({"name"})
_SILENT_KEYS = frozenset({"id", "type"})


class ToolParser(ABC):
    """Reads the text of one answer, chunk by chunk, and returns its parts.

    No text raises or is lost: what is not a complete, well-formed beginning of a call of a known function is content. Once a call
    has begun, its arguments are passed on as they arrive; if they break off, the call is cut, and what follows them is content.
    """

    markers: ClassVar[tuple[str, ...]]
    """Texts of which each begins a call wherever it occurs."""
    arguments_keys: ClassVar[frozenset[str]] = frozenset({"arguments", "parameters"})
    """Names of the arguments in a call that is a JSON object."""

    def __init__(
        self,
        functions: Mapping[str, Sequence[str]],
        new_id: Callable[[], str],
        most_calls: int | None = None,
        customs: Collection[str] = (),
    ) -> None:
        """``functions``: names of the tools that may be called, each with its parameters that are not texts. ``most_calls``: the
        answer ends after this many calls; None for no limit. ``customs``: those of the tools that take a text."""
        self.functions = functions
        self.customs = customs
        self._input: CustomInput | None = None
        """Reads the text out of the arguments; None in the call of a function."""
        self.calls = 0
        """Calls that have begun."""
        self.complete = 0
        """Calls whose arguments are complete."""
        self.forced = False
        """Whether the answer consists of calls, so that text outside of them is unfinished markup, which is dropped."""
        self.malformed = 0
        """Calls that broke off, or were passed on as content."""
        self.done = False
        """Whether the answer has all calls that it may have; the text after them is dropped."""
        self.scan = Scanner()
        self._new_id = new_id
        self._most_calls = most_calls
        self._parts: list[Part] = []
        self._open = False
        self._steps = self._answer()
        next(self._steps)

    @property
    def full(self) -> bool:
        """Whether the answer has as many calls as it may have."""
        return self._most_calls is not None and self.calls >= self._most_calls

    def push(self, text: str) -> list[Part]:
        """Read ``text`` and return the parts that are certain now."""
        self.scan.add(text)
        return self._run()

    def finish(self) -> list[Part]:
        """Return the rest at the end of the answer."""
        self.scan.add("")
        self.scan.ended = True
        return self._run()

    def _run(self) -> list[Part]:
        if not self.done:
            next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _answer(self) -> Steps[None]:
        yield from self._attempted(self.opening)
        while not self.done and (yield from self._content()):
            yield from self._attempted(self.call)

    def _attempted(self, read: Callable[[], Steps[None]]) -> Steps[None]:
        """Read a call; what is left of a malformed one becomes content."""
        calls = self.calls
        try:
            yield from read()
        except Malformed:
            if self.calls > calls or self.markers_read():
                self.malformed += 1
            self.cut()
            self.tell(self.scan.at)
        else:
            self.done = self.full

    def markers_read(self) -> bool:
        """Whether the text that was read and not passed on begins with a marker."""
        read = self.scan.text[self.scan.mark : self.scan.at].lstrip()
        return read.startswith(self.markers)

    def opening(self) -> Steps[None]:
        """Read calls that may only be at the beginning of an answer."""
        return
        yield

    @abstractmethod
    def call(self) -> Steps[None]:
        """Read one call, from one of :attr:`markers` on. Raises :class:`Malformed`."""

    def calls_in_list(self, read: Callable[[], Steps[None]]) -> Steps[None]:
        """Read ``[call, call, …]``, each call with ``read``. Stops behind the last call that the answer may have."""
        scan = self.scan
        yield from scan.expect("[")
        while True:
            yield from scan.space()
            yield from read()
            if self.full:
                return
            yield from scan.space()
            if not (yield from scan.begins(",")):
                break
        yield from scan.expect("]")
        self.consume()

    def _content(self) -> Steps[bool]:
        """Pass content on, without the whitespace before the next marker, and stop before the marker. Return False at the end."""
        if (yield from self.scan.before(self.markers, self.tell)):
            return True
        if not self.calls or self.scan.text[self.scan.mark :].strip():
            self.tell(len(self.scan.text))
        return False

    def tell(self, end: int) -> None:
        """Pass the text from :attr:`Scanner.mark` to ``end`` on as content."""
        text = self.scan.text[self.scan.mark : end]
        if text and not self.forced:
            self._parts.append(Content(text, self.scan.begin + self.scan.mark))
        self.scan.mark = end
        self.scan.at = max(self.scan.at, end)

    def begin(self, name: str) -> None:
        """Begin a call; the text that was read until now was its markup. Raises :class:`Malformed` for an unknown function."""
        if name not in self.functions:
            raise Malformed
        custom = name in self.customs
        self._input = CustomInput() if custom else None
        self._parts.append(CallBegin(self.calls, self._new_id(), name, custom))
        self.calls += 1
        self._open = True
        self.consume()

    def end(self) -> None:
        """The arguments of the current call are complete."""
        self._open = False
        self.complete += 1

    def cut(self) -> None:
        """End the current call, if its arguments are not complete."""
        if self._open:
            self._open = False
            self._parts.append(CallCut(self.calls - 1))

    def end_members(self, before: str) -> None:
        """End arguments that were passed on member by member. ``before``: text before the next member."""
        self.arguments("{}" if before == "{" else "}")
        self.end()

    def consume(self) -> None:
        """Drop what was read and not passed on: it was markup."""
        self.scan.mark = self.scan.at

    def arguments(self, text: str) -> None:
        """Pass characters of the current call's arguments on; what was read until now is dropped."""
        arguments = text if self._input is None else self._input.push(text)
        if arguments:
            self._parts.append(CallArguments(self.calls - 1, arguments, self._input is not None))
        self.consume()

    def raw_arguments(self) -> Steps[None]:
        """Read a JSON object, which comes next, and pass it on as the arguments of the current call while it arrives."""
        yield from self.scan.value(self._pass_arguments)
        self.end()

    def _pass_arguments(self) -> None:
        self.arguments(self.scan.text[self.scan.mark : self.scan.at])

    def json_call(self) -> Steps[None]:
        """Read ``{"name": …, "arguments": {…}}``, whose keys may come in any order."""
        scan = self.scan
        yield from scan.expect("{")
        began = self.calls
        name: str | None = None
        arguments: str | None = None
        while True:
            yield from scan.space()
            key = self.decoded((yield from scan.string()))
            yield from scan.space()
            yield from scan.expect(":")
            yield from scan.space()
            if key in _NAME_KEYS and name is None:
                name = self.decoded((yield from scan.string()))
                if name not in self.functions:
                    raise Malformed
            elif key in self.arguments_keys and arguments is None and self.calls == began:
                arguments = yield from self._json_arguments(name)
            elif key in _SILENT_KEYS or self.calls > began:
                yield from self._skipped()
            else:
                raise Malformed
            yield from scan.space()
            if (yield from scan.peek()) != ",":
                break
            yield from scan.expect(",")
        yield from scan.expect("}")
        if self.calls == began:
            if name is None:
                raise Malformed
            self.begin(name)
            self.arguments(arguments or "{}")
            self.end()
        self.consume()

    def _json_arguments(self, name: str | None) -> Steps[str]:
        """Read the arguments. If the name is known, they are passed on while they arrive, and the call has begun."""
        scan = self.scan
        first = yield from scan.peek()
        if first == '"':  # a text that holds the JSON object
            return self.decoded((yield from scan.string()))
        if first == "n":
            yield from scan.expect("null")
            return "{}"
        if first != "{":
            raise Malformed
        if name is not None:
            self.begin(name)
            yield from self.raw_arguments()
            return ""
        begin = scan.at - scan.mark
        yield from scan.value(lambda: None)
        return scan.text[scan.mark + begin : scan.at]

    def _skipped(self) -> Steps[None]:
        """Read a value that has no meaning here."""
        scan = self.scan
        first = yield from scan.peek()
        if first == '"':
            yield from scan.string()
        elif first in "{[":
            yield from scan.value(lambda: None)
        else:
            yield from scan.until(",", "}", "]", most=MAX_NAME)

    @staticmethod
    def decoded(text: str) -> str:
        """Return the value of a JSON string. Raises :class:`Malformed`."""
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            raise Malformed from None
        assert isinstance(value, str)
        return value
