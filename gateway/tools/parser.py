"""The base of the parsers of tool calls: passes text on as content until a call begins, and again where one is malformed."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

from gateway.tools.custom_input import CustomInput
from gateway.tools.parts import CallArguments, CallBegin, CallCut, Content, Part
from gateway.tools.scanner import Malformed, Scanner, Steps, before_space, held_for

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
        self._searched = 0
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
        scan = self.scan
        searched = scan.at - scan.mark
        while True:
            begin = scan.mark + searched
            found = min((place for marker in self.markers if (place := scan.text.find(marker, begin)) >= 0), default=-1)
            end = found if found >= 0 else held_for(scan.text, begin, self.markers)
            self.tell(before_space(scan.text, scan.mark, end))
            if found >= 0:
                scan.at = found
                return True
            if scan.ended:
                if not self.calls or scan.text[scan.mark :].strip():
                    self.tell(len(scan.text))
                return False
            searched = end - scan.mark
            yield

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
