"""Generates the sequences of one prompt, and of several prompts, as pieces in the order of arrival."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from engine import wire
from gateway.breathing import Breath
from gateway.errors import EngineLost
from gateway.generation.merge import merged
from gateway.generation.relay import Relay
from gateway.generation.sequence import Piece, PromptTokens, Sequence, TextOptions
from gateway.pool.dispatch import Dispatcher
from gateway.pool.replica import ServedModel

CONCURRENT_PROMPTS = 64
"""Prompts of one request that are generated at a time; the others wait here and not in the engine's queue."""


class ToolCalls(NamedTuple):
    """Tool calls of a generation."""

    family: str
    """Format of the calls."""
    calls: int
    malformed: int
    """Calls that broke off, or were passed on as text."""


class Generation:
    """One prompt being generated: the engine request, its ``n`` sequences and its token counts."""

    def __init__(
        self,
        model: ServedModel,
        request: wire.Generate,
        options: TextOptions,
        *,
        first_index: int = 0,
        echo: str | None = None,
        most_expected: int,
    ) -> None:
        """``first_index``: index of the prompt's first choice in the answer. ``echo``: the prompt's text, which is sent first.
        ``most_expected``: upper bound on the expected tokens of a sequence."""
        self.model = model
        self.request = request
        self.cached_tokens = 0
        self.queue_seconds = 0.0
        """Time that the request waited in an engine's queue, in seconds."""
        self.expected_tokens = len(request.prompt) + request.sampling.n * min(request.sampling.max_tokens, most_expected)
        """Expected tokens of the prompt and all sequences."""
        self._relay: Relay | None = None
        self._logprobs = options.logprobs
        self._format = options.format
        self._prompt = None if echo is None else PromptTokens(model.tokenizer, request.prompt, echo)
        """Tokens of the prompt, if it is echoed."""
        prompt = request.prompt
        offset = len(echo or "")
        self.sequences = [
            Sequence(first_index + index, model.tokenizer, prompt, options, offset=offset) for index in range(request.sampling.n)
        ]

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all sequences so far."""
        return sum([sequence.completion_tokens for sequence in self.sequences])

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the thinking sections of all sequences so far; None if the answers have none."""
        if self._format is None or self._format.thinking is None:
            return None
        return sum([sequence.reasoning_tokens for sequence in self.sequences])

    @property
    def tool_calls(self) -> ToolCalls | None:
        """Tool calls of all sequences so far; None if there are no tools."""
        if self._format is None or self._format.tools is None:
            return None
        readers = [sequence.reader for sequence in self.sequences if sequence.reader is not None]
        calls, malformed = (sum(getattr(reader, name) for reader in readers) for name in ("calls", "malformed"))
        return ToolCalls(self._format.tools.family, calls, malformed)

    @property
    def used_tokens(self) -> int:
        """Prompt tokens, if an engine was given the prompt, plus output tokens of all sequences so far."""
        prompt = len(self.request.prompt) if self._relay is not None and self._relay.sent else 0
        return prompt + self.completion_tokens

    async def pieces(self, dispatcher: Dispatcher) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces in batches, as they arrive, until every sequence has ended. Raises :class:`GatewayError`."""
        early: list[wire.Delta] = []  # deltas that arrived before all log-probabilities of the prompt
        unfinished = len(self.sequences)
        prompt = self._prompt
        self._relay = Relay(dispatcher, self.model, self.request)
        async with aclosing(self._relay.deltas()) as batches:
            async for batch in batches:
                pieces: list[Piece] = []
                for delta in batch:
                    self.cached_tokens += delta.cached_tokens
                    self.queue_seconds += delta.queue_seconds
                if prompt is not None:
                    early += [delta for delta in batch if delta.tokens or delta.finish]
                    if self._logprobs and not await prompt.push_all(batch):
                        continue
                    pieces += [Piece(sequence.index, prompt.text, prompt.tokens) for sequence in self.sequences]
                    prompt, batch = None, early
                breath = Breath() if len(batch) > 1 else None
                for delta in batch:
                    if delta.index >= len(self.sequences):
                        raise EngineLost("The engine sent a sequence that was not asked for.")
                    piece = self.sequences[delta.index].push(delta)
                    if piece.finish:
                        unfinished -= 1
                    if piece.text or piece.tokens or piece.finish:
                        pieces.append(piece)
                    if breath is not None and breath.due:
                        yield pieces
                        pieces = []
                        await breath.take()
                yield pieces
                if not unfinished:
                    return
        raise EngineLost("The engine's answer is incomplete; try again.")


def run_all(generations: list[Generation], dispatcher: Dispatcher) -> AsyncGenerator[list[Piece], None]:
    """Yield the pieces of all prompts. The first failure ends all of them, as closing the iterator does."""
    return merged([generation.pieces(dispatcher) for generation in generations], CONCURRENT_PROMPTS)
