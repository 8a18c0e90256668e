"""Bodies of whole and of streamed answers, for all endpoints that generate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import msgspec

from gateway.generation.generation import Generation, PromptOutput
from gateway.generation.sequence import Piece, Token
from gateway.handling.streams import sse
from gateway.ids import new_id
from gateway.schemas.usage import Usage

_encoder = msgspec.json.Encoder()


class Answer(ABC):
    """Converts pieces to the response bodies of one endpoint."""

    @abstractmethod
    def logprobs(self, tokens: list[Token]) -> msgspec.Struct | None:
        """Return a struct of lists with one entry for each of ``tokens``, or None if no log-probabilities were requested."""

    text_only = True
    """Whether the chunks of one choice that have text and log-probabilities differ in nothing else."""

    def event(self, piece: Piece, usage: Usage | None) -> bytes | None:
        """Return :meth:`chunk` as an event."""
        has_more = piece.finish or piece.token_ids or piece.parts is not None
        if has_more or usage is not None or not piece.text or not self.text_only:
            chunk = self.chunk(piece, usage)
            return None if chunk is None else sse(chunk)
        before, middle, after = self._around.get(piece.index) or self._encode_around(piece.index)
        logprobs = self.logprobs(piece.tokens) if after else None
        if logprobs is None:
            return before + _encoder.encode(piece.text) + middle
        return b"%b%b%b%b%b" % (before, _encoder.encode(piece.text), middle, _encoder.encode(logprobs), after)

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """Return :meth:`event` of a piece that is text alone: what stands before the text, a JSON string, and after it. Only while
        :attr:`text_only`, and without log-probabilities."""
        before, after, logprobs = self._around.get(index) or self._encode_around(index)
        assert not logprobs
        return before, after

    @cached_property
    def _around(self) -> dict[int, tuple[bytes, bytes, bytes]]:
        """The encoded event of each choice before its text, after it, and after its log-probabilities, if they were requested."""
        return {}

    def _encode_around(self, index: int) -> tuple[bytes, bytes, bytes]:
        mark = new_id()
        chunk = self.chunk(Piece(index, mark), None)
        assert chunk is not None
        before, after = sse(chunk).split(b'"%b"' % mark.encode())
        around = before, after, b""
        if (logprobs := self.logprobs([])) is not None:
            middle, empty, after = after.partition(_encoder.encode(logprobs))
            assert empty, "log-probabilities follow the text"
            around = before, middle, after
        self._around[index] = around
        return around

    @abstractmethod
    def whole(self, choices: list[Piece], logprobs: list[Any], usage: Usage, prompts: list[PromptOutput]) -> msgspec.Struct:
        """Return the body of an answer that is not streamed. ``logprobs`` holds the result of :meth:`logprobs` for each choice; its
        lists may be JSON-encoded already. ``prompts`` has one entry for each prompt."""

    @abstractmethod
    def chunk(self, piece: Piece, usage: Usage | None) -> msgspec.Struct | None:
        """Return the event for new output of one choice; None if the client has nothing to learn yet. ``usage``: the choice's token
        counts so far, if they were requested."""

    def chosen(self, choices: list[Piece], _: list[Generation], /) -> list[Piece]:
        """Return the choices of the answer. If some are left out, the others get the indices from 0 on."""
        return choices

    @abstractmethod
    def opening(self, index: int, usage: Usage | None, /) -> msgspec.Struct | None:
        """Return the event that introduces a choice, or None if the endpoint has none. ``usage``: as for :meth:`chunk`."""

    @abstractmethod
    def closing(self, usage: Usage) -> msgspec.Struct:
        """Return the event with the token counts."""
