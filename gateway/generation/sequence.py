"""One output sequence: turns the engine's deltas into text, and ends at the engine's finish or at a stop string."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost
from yardstick_llm.gateway.output.answer import AnswerFormat, AnswerReader
from yardstick_llm.gateway.output.parser import Part
from yardstick_llm.gateway.text.vocabulary import Detokenizer, StopStrings, Vocabulary

Finish = Literal["stop", "length"]

LEAST_LOGPROB = -9999.0
"""Replaces −∞, which JSON cannot represent, as in OpenAI's API: the log-probability of a candidate that guidance excludes."""

_NO_VALUES: Mapping[int, float] = MappingProxyType({})


class Token(msgspec.Struct, gc=False):
    """One token with its log-probabilities. The garbage collector skips it: a pass over the tokens of a long prompt takes 20 ms."""

    id: int
    logprob: float | None
    top: abc.Sequence[tuple[int, float]]
    """Most probable tokens at this position, best first."""
    values: Mapping[int, float]
    """Length values of the tokens in ``top`` that the length model evaluated, by token id, if guided values were requested."""
    offset: int
    """Characters of text before the token."""


class Piece(msgspec.Struct):
    """New output of a sequence."""

    index: int
    """Index of the choice in the answer."""
    text: str
    tokens: list[Token] = []
    """Tokens whose text begins in ``text``, if log-probabilities were requested."""
    finish: Finish | None = None
    completion_tokens: int = 0
    """Tokens of the sequence up to this piece, including those whose text is held back."""
    parts: list[Part] | None = None
    """``text`` divided into parts; None if the answer is all text. Text that may still become a call is held back."""
    calls: int = 0
    """Tool calls of the sequence up to this piece; 0 if the arguments of one of them are not complete."""
    token_ids: list[int] = []
    """Ids of the tokens since the last piece, including those whose text is held back or left out, if ids were requested."""


@dataclass(frozen=True)
class TextOptions:
    """Options for turning a sequence's tokens into text."""

    logprobs: bool = False
    stops: abc.Sequence[str] = ()
    min_tokens: int = 0
    """Stop strings that are complete before this many tokens do not end the sequence."""
    skip_special_tokens: bool = True
    keeps_stop: bool = False
    """Whether the stop string or token that ends the sequence stays in its text."""
    end_logprob: bool = False
    """Whether a token that ends the sequence, such as EOS, has log-probabilities even if its text is left out. Clients that echo a
    prompt count entries from the end: lm-eval reads ``token_logprobs[:-1]`` with ``max_tokens`` 1."""
    format: AnswerFormat | None = None
    """How the text is divided into parts; None for text that is not."""
    token_ids: bool = False
    """Whether pieces have token ids."""


class Sequence:
    """Holds back incomplete characters and text that may become a stop string, with their tokens, until they are certain."""

    def __init__(
        self, index: int, tokenizer: Vocabulary, prompt: abc.Sequence[int], options: TextOptions, *, offset: int = 0
    ) -> None:
        """``offset``: characters before the sequence in its text (an echoed prompt)."""
        self.index = index
        self.finish: Finish | None = None
        self.completion_tokens = 0
        """Tokens up to and including the one that ended the sequence."""
        self.logprob = 0.0
        """Sum of the log-probabilities of these tokens, if log-probabilities were requested."""
        self.draft_tokens = self.accepted_draft_tokens = 0
        """Draft tokens that engines computed, and those of them that were drawn."""
        self._options = options
        self._simple = not (options.stops or options.format or options.token_ids)
        """Whether a delta in the middle of the sequence is its text, which is certain, and log-probabilities."""
        self._plain = self._simple and not options.logprobs
        """Whether it is its text alone."""
        shown = options.format.shown if options.format else ()
        self._quoted = tokenizer.quoted(skip_special_tokens=options.skip_special_tokens)
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=options.skip_special_tokens, shown=shown)
        self.reader = AnswerReader(options.format) if options.format else None
        """Divides the text into parts; None if the answer is all text."""
        self._stops = StopStrings(options.stops)
        self._received = 0
        self._read = offset  # end of the text read so far, in characters
        self._emitted = offset  # end of the text passed on so far, in characters
        self._held_back = ""  # text read and not passed on
        self._waiting: list[Token] = []  # tokens not passed on yet

    @property
    def may_end_early(self) -> bool:
        """Whether the sequence may end before the engine ends it: at a stop string, or after the last tool call."""
        return bool(self._options.stops) or (self._options.format is not None and self._options.format.tools is not None)

    def push(self, delta: wire.Delta) -> Piece:
        """Process one delta, which follows the last one (:mod:`gateway.generation.relay` sees to it), and return the new output."""
        if delta.draft_tokens:
            self.draft_tokens += delta.draft_tokens
            self.accepted_draft_tokens += delta.accepted_draft_tokens
        if self._simple and delta.finish is None and self.finish is None:
            if self._plain:
                self.completion_tokens = self._received = self._received + len(delta.tokens)
                return Piece(self.index, self._detokenizer.push(delta.tokens), completion_tokens=self._received)
            if len(delta.tokens) == 1:
                return self._push_one(delta)
        assert delta.finish != "abort", "another engine goes on with the sequence"
        self._received += len(delta.tokens)
        if self.finish is not None:  # a stop string ended this sequence, and the engine still generates the others
            return Piece(self.index, "", completion_tokens=self.completion_tokens)
        before = self.completion_tokens
        tokens, hidden = delta.tokens, 0
        if delta.finish == "stop" and not self._options.keeps_stop:
            tokens, hidden = tokens[:-1], 1
        text = self._read_tokens(tokens, delta.logprobs)
        if self.finish is None and delta.finish is not None:
            self.completion_tokens += hidden
            text += self._end(delta.finish)
            if hidden and delta.tokens and self._options.logprobs:
                last = _token(delta.tokens[-1], len(tokens), delta.logprobs, self._read)
                self.logprob += last.logprob or 0.0
                if self._options.end_logprob:
                    self._waiting.append(last)
        parts = None if self.reader is None else self._parts(self.reader, text, tokens)
        emitted = self._emitted_tokens() if self._waiting else []
        calls = 0 if self.reader is None else self.reader.complete_calls
        counted = delta.tokens[: self.completion_tokens - before] if self._options.token_ids else []
        return Piece(self.index, text, emitted, self.finish, self.completion_tokens, parts, calls, counted)

    def push_quoted(self, delta: wire.Delta) -> bytes | None:
        """Process a delta that is one token and nothing but text, and return the text as a JSON string; empty if it adds none.
        Return None, and change nothing, if it takes :meth:`push`. Nearly every token of a stream comes here, and finds the
        processor's caches cold: a function that it calls costs as much as its work."""
        received, tokens = self._received, delta.tokens
        if not self._plain or len(tokens) != 1 or delta.finish or self.finish or delta.draft_tokens:
            return None
        if (text := self._quoted[tokens[0]]) is not None and self._detokenizer.clean:
            self.completion_tokens = self._received = received + 1
            return text
        return None

    def _push_one(self, delta: wire.Delta) -> Piece:
        """Do what :meth:`push` does, for one token with log-probabilities whose text is certain."""
        token = _token(delta.tokens[0], 0, delta.logprobs, self._read)
        self.logprob += token.logprob or 0.0
        self._waiting.append(token)
        self.completion_tokens = self._received = self._received + 1
        if not (text := self._detokenizer.push(delta.tokens)):
            return Piece(self.index, "", completion_tokens=self._received)
        self._read = self._emitted = self._read + len(text)
        emitted, self._waiting = self._waiting, []
        return Piece(self.index, text, emitted, completion_tokens=self._received)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thinking section so far."""
        return min(self.reader.reasoning_tokens, self.completion_tokens) if self.reader else 0

    def _parts(self, reader: AnswerReader, text: str, tokens: list[int]) -> list[Part]:
        """Divide new text into parts. Ends the sequence after the last tool call that it may have."""
        parts = reader.push(text, tokens)
        if self.finish is None and reader.done:
            self.finish = "stop"
        if self.finish is not None:
            parts += reader.finish()
        return parts

    def _read_tokens(self, tokens: list[int], logprobs: wire.Logprobs | None) -> str:
        """Return the certain text of ``tokens``. Tokens are processed singly only for log-probabilities and stop strings."""
        if not self._options.logprobs and not self._options.stops:
            self.completion_tokens += len(tokens)
            return self._detokenizer.push(tokens)
        emitted = ""
        for place, token in enumerate(tokens):
            if self._options.logprobs:
                self._waiting.append(_token(token, place, logprobs, self._read))
                self.logprob += self._waiting[-1].logprob or 0.0
            self.completion_tokens += 1
            emitted += self._add_text(self._detokenizer.push([token]))
            if self.finish is not None:
                break
        return emitted

    def _add_text(self, text: str) -> str:
        """Add ``text`` and return the text that is now certain. May end the sequence."""
        self._read += len(text)
        if self.completion_tokens < self._options.min_tokens:
            certain, stopped = text, False
        else:
            self._held_back += text
            certain, stopped = self._stops.push(text)
            if stopped:
                self.finish = "stop"
                certain += self._matched_stop(certain) if self._options.keeps_stop else ""
            self._held_back = self._held_back[len(certain) :]
        self._emitted += len(certain)
        return certain

    def _matched_stop(self, before: str) -> str:
        """Return the stop string that follows ``before`` in the held-back text; if several match, the shortest."""
        return min((stop for stop in self._options.stops if self._held_back.startswith(stop, len(before))), key=len)

    def _end(self, finish: Finish) -> str:
        """End the sequence and return the rest of its text."""
        emitted = self._add_text(self._detokenizer.finish())
        if self.finish is None:
            rest = self._stops.finish()
            self._emitted += len(rest)
            emitted += rest
        self.finish = self.finish or finish
        return emitted

    def _emitted_tokens(self) -> list[Token]:
        """Return the waiting tokens whose text was passed on, or began to be. At the end all are returned, except those after a
        stop string."""
        ended = self.finish is not None and self._emitted == self._read
        emitted = [token for token in self._waiting if ended or token.offset < self._emitted]
        self._waiting = self._waiting[len(emitted) :]
        return emitted


def _token(id: int, place: int, logprobs: wire.Logprobs | None, offset: int) -> Token:
    if logprobs is None or place >= len(logprobs.chosen):
        raise EngineLost("The engine sent no log-probabilities for a token.")
    chosen, ranked = logprobs.chosen[place], logprobs.top_tokens[place]
    least = LEAST_LOGPROB
    rank = zip(ranked, logprobs.top[place], strict=True)
    top: abc.Sequence[tuple[int, float]] = (
        [(token, logprob if logprob > least else least) for token, logprob in rank] if ranked else ()
    )
    values_of: Mapping[int, float] = _NO_VALUES
    if logprobs.values:
        values = zip(ranked, logprobs.values[place], strict=True)
        values_of = {token: value for token, value in values if value is not None}
    return Token(id, None if chosen is None else max(chosen, LEAST_LOGPROB), top, values_of, offset)


class PromptTokens:
    """Converts the log-probabilities of an echoed prompt, which arrive in parts, to tokens with offsets in the prompt's text."""

    def __init__(self, tokenizer: Vocabulary, ids: abc.Sequence[int], text: str) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self.text = text
        self._begin()

    def _begin(self) -> None:
        self.tokens: list[Token] = []
        """The tokens of the parts so far."""
        self._detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        self._read = 0  # end of the text of the tokens so far, in characters

    def push_all(self, deltas: list[wire.Delta]) -> bool:
        """Add the parts that ``deltas`` carry, and return whether all have arrived."""
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self._push(delta.prompt_logprobs, delta.prompt_offset)
        return len(self.tokens) == len(self._ids)

    def _push(self, logprobs: wire.Logprobs, offset: int) -> None:
        """Add the part that begins at token ``offset`` of the prompt. Another engine that takes over begins again. Raises
        :class:`EngineLost` if the part does not follow the last one."""
        if offset == 0:
            self._begin()
        if offset != len(self.tokens):
            raise EngineLost("The engine skipped or repeated log-probabilities of the prompt.")
        special, text_of = self._tokenizer.special_ids, self._tokenizer.token_text
        for place, id in enumerate(self._ids[offset : offset + len(logprobs.chosen)]):
            added = not self.tokens and id in special and not self.text.startswith(text_of(id))  # before the text, without width
            self.tokens.append(_token(id, place, logprobs, min(self._read, len(self.text))))
            if not added:
                self._read += len(self._detokenizer.push([id]))
