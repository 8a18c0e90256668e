"""Collects the items of an output from the parts of an answer, and makes the events that tell of them.

Consecutive parts of one kind are one item: thinking is a reasoning item, text a message, each tool call a function call or a
call of a custom tool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from yardstick_llm.gateway.output.parser import CallArguments, CallBegin, CallCut, Content, Part, Reasoning
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.schemas.responses import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    InputDelta,
    InputDone,
    ItemEvent,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    Status,
    SummaryDelta,
    SummaryDone,
    SummaryPart,
    SummaryText,
    TextDelta,
    TextDone,
)

_encoder = msgspec.json.Encoder()


class Output:
    """The items of one response. Events take their numbers from :meth:`number`, in the order in which they are sent."""

    def __init__(self, *, summary: bool = False, names: Mapping[str, tuple[str, str]] | None = None) -> None:
        """``names``: namespace and own name of the tools in namespaces, by the name that the model calls."""
        self.names = names or {}
        self.items: list[OutputItem] = []
        """The items that are complete."""
        self._numbers = 0
        self._item: _Open | None = None
        self.summary = summary
        """Whether reasoning items have their text as summary too."""
        self._waiting: deque[tuple[int, Any]] = deque()
        """Log-probabilities of tokens that no text has taken yet, each with the characters of the answer before it."""
        self._end = 0
        """End of the last text of a message, in characters of the answer."""

    def number(self) -> int:
        """Return the number of the next event."""
        self._numbers += 1
        return self._numbers - 1

    def push(self, parts: list[Part], logprobs: Iterable[tuple[int, Any]]) -> Iterator[Event]:
        """Add the parts of one piece. ``logprobs``: entries for its tokens, with the characters before each. The text of a part may
        follow in a later piece."""
        self._waiting.extend(logprobs)
        for part in parts:
            match part:
                case Content():
                    yield from self._turn(_Text)
                    yield from self._grow(part.text, self._taken(part.begin, part.begin + len(part.text)))
                case Reasoning():
                    yield from self._turn(_Thinking)
                    yield from self._grow(part.text, [])
                case CallBegin():
                    yield from self._close("completed")
                    yield from self._open((_CustomCall if part.custom else _Call)(self, part.id, part.name))
                case CallArguments():
                    yield from self._grow(part.text, [])
                case CallCut():
                    yield from self._close("incomplete")

    def _taken(self, begin: int, end: int) -> list[Any]:
        """Return the entries of the tokens with characters between ``begin`` and ``end``, and drop earlier ones."""
        self._end = end
        found = []
        while self._waiting and self._waiting[0][0] < end:
            at, entry = self._waiting.popleft()
            if at >= begin or not self._waiting or self._waiting[0][0] > begin:
                found.append(entry)
        return found

    def finish(self, status: Status) -> Iterator[Event]:
        """End the output. ``status``: that of the last item. An output without items gets an empty message."""
        if self._item is None and not self.items:
            yield from self._open(_Text(self))
        rest = [entry for at, entry in self._waiting if at <= self._end]  # tokens without text, such as a part of a character
        if rest and isinstance(self._item, _Text):
            yield from self._grow("", rest)
        yield from self._close(status)

    def _turn(self, kind: type[_Text | _Thinking]) -> Iterator[Event]:
        """Open an item of ``kind``, unless the open one is."""
        if not isinstance(self._item, kind):
            yield from self._close("completed")
            yield from self._open(kind(self))

    def _open(self, item: _Open) -> Iterator[Event]:
        self._item = item
        yield from item.begin()

    def _grow(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if self._item is not None:
            yield from self._item.grow(text, logprobs)

    def _close(self, status: Status) -> Iterator[Event]:
        if self._item is None:
            return
        yield from self._item.end(status)
        self.items.append(self._item.item(status))
        self._item = None


class _Open(ABC):
    """The item in progress."""

    prefix: ClassVar[str]
    delta: ClassVar[type[Any]]
    """Event of new text."""

    def __init__(self, output: Output) -> None:
        self.number = output.number
        self.id = f"{self.prefix}_{new_id()}"
        self.index = len(output.items)
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def head(self) -> dict[str, Any]:
        """Return the first fields of the next event of the item."""
        return {"sequence_number": self.number(), "output_index": self.index, "item_id": self.id}

    @abstractmethod
    def item(self, status: Status) -> OutputItem:
        """Return the item as it is now."""

    def begin(self) -> Iterator[Event]:
        """Return the events that introduce the item."""
        item = self.item("in_progress")
        yield ItemEvent(type="response.output_item.added", sequence_number=self.number(), output_index=self.index, item=item)

    def grow(self, text: str, logprobs: list[Any]) -> Iterator[Event]:  # noqa: ARG002 - of messages only
        """Add text and return its event."""
        self.texts.append(text)
        yield self.delta(delta=text, **self.head())

    def end(self, status: Status) -> Iterator[Event]:
        """Return the events that complete the item."""
        item = self.item(status)
        yield ItemEvent(type="response.output_item.done", sequence_number=self.number(), output_index=self.index, item=item)


class _OpenPart(_Open):
    """An item whose text is in one content part."""

    @property
    @abstractmethod
    def part(self) -> OutputText | ReasoningText:
        """The part so far."""

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield PartEvent(type="response.content_part.added", part=self.part, **self.head())


class _Text(_OpenPart):
    """A message."""

    prefix, delta = "msg", TextDelta

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._logprobs: list[bytes] = []
        self._whole: OutputText | None = None

    @property
    def part(self) -> OutputText:
        """The message's only part."""
        logprobs: Any = msgspec.Raw(b"[%b]" % b",".join(self._logprobs)) if self._logprobs else []
        return OutputText(text=self.text, logprobs=logprobs)

    def item(self, status: Status) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[self._whole] if self._whole else [])

    def grow(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        self.texts.append(text)
        converted: Any = []
        if logprobs:
            encoded = _encoder.encode(logprobs)
            self._logprobs.append(encoded[1:-1])
            converted = msgspec.Raw(encoded)
        yield TextDelta(**self.head(), delta=text, logprobs=converted)

    def end(self, status: Status) -> Iterator[Event]:
        self._whole = part = self.part
        yield TextDone(text=part.text, logprobs=part.logprobs, **self.head())
        yield PartEvent(type="response.content_part.done", part=part, **self.head())
        yield from super().end(status)


class _Thinking(_OpenPart):
    """A reasoning item."""

    prefix, delta = "rs", ReasoningDelta

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._summary = output.summary

    @property
    def part(self) -> ReasoningText:
        """The item's only part."""
        return ReasoningText(text=self.text)

    def item(self, status: Status) -> OutputReasoning:
        if status == "in_progress":
            return OutputReasoning(id=self.id, status=status, content=[])
        summary = [SummaryText(text=self.text)] if self._summary else []
        return OutputReasoning(id=self.id, status=status, summary=summary, content=[self.part])

    def end(self, status: Status) -> Iterator[Event]:
        part = self.part
        yield ReasoningDone(text=part.text, **self.head())
        yield PartEvent(type="response.content_part.done", part=part, **self.head())
        if self._summary:
            kind, text, summary = "response.reasoning_summary", part.text, SummaryText(text=part.text)
            empty = SummaryText(text="")
            yield SummaryPart(type=f"{kind}_part.added", part=empty, **self.head())  # type: ignore[arg-type]
            yield SummaryDelta(delta=text, **self.head())
            yield SummaryDone(text=text, **self.head())
            yield SummaryPart(type=f"{kind}_part.done", part=summary, **self.head())  # type: ignore[arg-type]
        yield from super().end(status)


class _Call(_Open):
    """A function call."""

    prefix = "fc"
    delta: ClassVar[type[Any]] = ArgumentsDelta

    def __init__(self, output: Output, call_id: str, name: str) -> None:
        super().__init__(output)
        self._call_id = call_id
        namespace, self._name = output.names.get(name, (msgspec.UNSET, name))
        self._named: Any = {"name": self._name, "namespace": namespace}

    def item(self, status: Status) -> OutputCall | OutputCustomCall:
        return OutputCall(id=self.id, status=status, call_id=self._call_id, arguments=self.text, **self._named)

    def end(self, status: Status) -> Iterator[Event]:
        yield ArgumentsDone(**self.head(), name=self._name, arguments=self.text)
        yield from super().end(status)


class _CustomCall(_Call):
    """A call of a custom tool."""

    prefix, delta = "ctc", InputDelta

    def item(self, status: Status) -> OutputCustomCall:
        return OutputCustomCall(id=self.id, status=status, call_id=self._call_id, input=self.text, **self._named)

    def end(self, status: Status) -> Iterator[Event]:
        yield InputDone(**self.head(), input=self.text)
        yield from _Open.end(self, status)
