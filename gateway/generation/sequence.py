"""One sequence: the engine's deltas in, text out, ended by the engine or by a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass, field
from typing import Literal

from engine import wire
from gateway.breathing import Breath
from gateway.errors import EngineLost
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop import StopStrings
from gateway.text.vocabulary import Vocabulary

Finish = Literal["stop", "length"]

LEAST_LOGPROB = -9999.0
"""Stands for −∞, which JSON cannot say, as in OpenAI's API: a candidate that guidance ruled out."""


@dataclass(slots=True)
class Token:
    """A token as log-probabilities show it."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]]
    """The most probable tokens at its place, best first."""
    values: dict[int, float]
    """Of guided tokens whose values were asked for: the length model's, of those of ``top`` that it judged."""
    offset: int
    """Characters of the text before it."""


@dataclass(slots=True)
class Piece:
    """What is new of a sequence."""

    index: int
    """The number of its choice in the answer."""
    text: str
    tokens: list[Token] = field(default_factory=list)
    """Where log-probabilities were asked for: the tokens that begin in ``text``."""
    finish: Finish | None = None


@dataclass(frozen=True)
class TextOptions:
    """What becomes of the tokens of a sequence."""

    logprobs: bool = False
    stops: Run[str] = ()
    min_tokens: int = 0
    """Stop strings that are complete before so many tokens do not end the sequence."""
    skip_special_tokens: bool = True
    keeps_stop: bool = False
    """The text or token that ended the sequence is part of its text."""


class Sequence:
    """Owns what is held back: characters that are not complete, text that may become a stop string, and the tokens of both."""

    def __init__(self, index: int, tokenizer: Vocabulary, prompt: Run[int], options: TextOptions, *, offset: int = 0) -> None:
        """``offset``: characters that stand before the sequence in its text (an echoed prompt)."""
        self.index = index
        self.finish: Finish | None = None
        self.completion_tokens = 0
        """Tokens up to the one that ended the sequence, that one included."""
        self._options = options
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStrings(options.stops)
        self._received = 0
        self._read = offset  # characters that the tokens so far made
        self._told = offset  # characters that were passed on
        self._unsaid = ""  # what was read and not told
        self._waiting: list[Token] = []  # tokens that begin in it

    def push(self, delta: wire.Delta) -> Piece:
        """Raises :class:`EngineLost` where ``delta`` does not follow the one before."""
        if delta.offset != self._received:
            raise EngineLost(f"The engine skipped or repeated output: at {delta.offset} instead of {self._received}.")
        if delta.finish == "abort":
            raise EngineLost("The engine gave the request up; try again.")
        self._received += len(delta.tokens)
        if self.finish is not None:  # a stop string ended it; its neighbours go on
            return Piece(self.index, "")
        tokens, hidden = delta.tokens, 0
        if delta.finish == "stop" and not self._options.keeps_stop:
            tokens, hidden = tokens[:-1], 1
        text = self._read_tokens(tokens, delta.logprobs)
        if self.finish is None and delta.finish is not None:
            self.completion_tokens += hidden
            text += self._end(delta.finish)
        return Piece(self.index, text, self._tokens_told(), self.finish)

    def _read_tokens(self, tokens: list[int], logprobs: wire.Logprobs | None) -> str:
        """One token at a time where it matters which one did it, all at once where not."""
        if not self._options.logprobs and not self._options.stops:
            self.completion_tokens += len(tokens)
            return self._detokenizer.push(tokens)
        told = ""
        for place, token in enumerate(tokens):
            if self._options.logprobs:
                self._waiting.append(_token(token, place, logprobs, self._read))
            self.completion_tokens += 1
            told += self._tell(self._detokenizer.push([token]))
            if self.finish is not None:
                break
        return told

    def _tell(self, text: str) -> str:
        """The part of the text that is certain, now that ``text`` is read too. May end the sequence."""
        self._read += len(text)
        if self.completion_tokens < self._options.min_tokens:
            certain, stopped = text, False
        else:
            self._unsaid += text
            certain, stopped = self._stops.push(text)
            if stopped:
                self.finish = "stop"
                certain += self._stop_met(certain) if self._options.keeps_stop else ""
            self._unsaid = self._unsaid[len(certain) :]
        self._told += len(certain)
        return certain

    def _stop_met(self, before: str) -> str:
        """The stop string that comes after ``before`` in the text that was held back; of several, the first to be complete."""
        return min((stop for stop in self._options.stops if self._unsaid.startswith(stop, len(before))), key=len)

    def _end(self, finish: Finish) -> str:
        """The text that nothing more will come after."""
        told = self._tell(self._detokenizer.finish())
        if self.finish is None:
            rest = self._stops.finish()
            self._told += len(rest)
            told += rest
        self.finish = self.finish or finish
        return told

    def _tokens_told(self) -> list[Token]:
        """The waiting tokens whose text has begun; the end takes them all, but for those after a stop string."""
        if not self._waiting:
            return []
        ended = self.finish is not None and self._told == self._read
        told = [token for token in self._waiting if ended or token.offset < self._told]
        self._waiting = self._waiting[len(told) :]
        return told


def _token(id: int, place: int, logprobs: wire.Logprobs | None, offset: int) -> Token:
    if logprobs is None or place >= len(logprobs.chosen):
        raise EngineLost("The engine sent no log-probabilities for a token.")
    chosen, ranked = logprobs.chosen[place], logprobs.top_tokens[place]
    top = [(token, max(logprob, LEAST_LOGPROB)) for token, logprob in zip(ranked, logprobs.top[place], strict=True)]
    values = zip(ranked, logprobs.values[place], strict=True) if logprobs.values else ()
    judged = {token: value for token, value in values if value is not None}
    return Token(id, None if chosen is None else max(chosen, LEAST_LOGPROB), top, judged, offset)


async def prompt_tokens(tokenizer: Vocabulary, ids: Run[int], text: str, logprobs: wire.Logprobs | None) -> list[Token]:
    """The tokens of an echoed prompt with their places in ``text``. A token that was put before the text takes no room."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    tokens: list[Token] = []
    offset, breath = 0, Breath()
    for place, id in enumerate(ids):
        if breath.due:
            await breath.take()
        tokens.append(_token(id, place, logprobs, min(offset, len(text))))
        if place == 0 and id in tokenizer.special_ids and not text.startswith(tokenizer.token_text(id)):
            continue
        offset += len(detokenizer.push([id]))
    return tokens
