"""Generates the sequences of one prompt, and of several prompts, as pieces in the order of arrival; and what answers show of a
prompt itself, in vLLM's format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost, InvalidRequest
from yardstick_llm.gateway.generation.relay import Relay, merged
from yardstick_llm.gateway.generation.sequence import Piece, PromptTokens, Sequence, TextOptions, Token
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.schemas.generation import GenerationRequest, PromptLogprob

CONCURRENT_PROMPTS = 64
"""Prompts of one request that are generated at a time; the others wait here and not in the engine's queue."""
TOKENS_AT_ONCE = 32
"""Tokens whose log-probabilities are encoded at a time; with twenty for each token, this takes less than a millisecond."""

MAX_ENTRIES = 1 << 20
"""Most log-probabilities of prompts in one answer, about 70 MB."""


class ToolCalls(NamedTuple):
    """Tool calls of a generation."""

    family: str
    """Format of the calls."""
    calls: int
    malformed: int
    """Calls that broke off, or were passed on as text."""


class DirectWriter(Protocol):
    """A way to the client that needs no task: pieces can be sent from the event of the connection that brought them."""

    def is_open(self) -> bool:
        """Return whether pieces can be sent now; all earlier ones have been sent."""

    def send(self, piece: Piece) -> None:
        """Send ``piece``."""

    text_only: bool
    """Whether :meth:`send_quoted` can be called."""

    def send_quoted(self, index: int, text: bytes) -> None:
        """Send a piece that has nothing but text. ``text``: a JSON string."""


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
        prompt_logprobs: int | None = None,
        most_expected: int,
    ) -> None:
        """``first_index``: index of the prompt's first choice in the answer. ``echo``: the prompt's text, which is sent first.
        ``prompt_logprobs``: number of top tokens at each position of the prompt to keep in ``prompt_tokens``; None: none are kept.
        ``most_expected``: upper bound on the expected tokens of a sequence."""
        self.model = model
        self.request = request
        self.cached_tokens = 0
        self.queue_seconds = 0.0
        """Time that the request waited in an engine's queue, in seconds."""
        self.forecast_tokens = 0.0
        """Output tokens of each sequence that an engine's length model expects; 0 without a forecast."""
        self.expected_tokens = len(request.prompt) + request.sampling.n * min(request.sampling.max_tokens, most_expected)
        """Expected tokens of the prompt and all sequences."""
        self._relay: Relay | None = None
        self._logprobs = options.logprobs
        self._format = options.format
        self._echoes = echo is not None
        self.prompt_logprobs = prompt_logprobs
        reads_prompt = self._echoes or prompt_logprobs is not None
        self._prompt = PromptTokens(model.tokenizer, request.prompt, echo or "") if reads_prompt else None
        """Tokens of the prompt, if it is echoed or if its log-probabilities are kept."""
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
    def prompt_tokens(self) -> list[Token]:
        """The tokens of the prompt, if their log-probabilities are kept and have arrived."""
        return [] if self._prompt is None or self.prompt_logprobs is None else self._prompt.tokens

    @property
    def used_tokens(self) -> int:
        """Prompt tokens, if an engine was given the prompt, plus output tokens of all sequences so far."""
        prompt = len(self.request.prompt) if self._relay is not None and self._relay.sent else 0
        return prompt + self.completion_tokens

    async def pieces(self, dispatcher: Dispatcher, direct: DirectWriter | None = None) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces in batches, as they arrive, until every sequence has ended. Pieces in the middle of a sequence may go to
        ``direct`` instead. Raises :class:`GatewayError`."""
        early: list[wire.Delta] = []  # deltas that arrived before all log-probabilities of the prompt
        unfinished = len(self.sequences)
        prompt = self._prompt
        self._relay = Relay(dispatcher, self.model, self.request)
        on_delta = None if direct is None or self.sequences[0].may_end_early else partial(self._send, direct)
        async with aclosing(self._relay.deltas(on_delta)) as batches:
            async for batch in batches:
                pieces: list[Piece] = []
                for delta in batch:
                    self.cached_tokens += delta.cached_tokens
                    self.queue_seconds += delta.queue_seconds
                    self.forecast_tokens = max(self.forecast_tokens, delta.expected_tokens)
                if prompt is not None:
                    early += [delta for delta in batch if delta.tokens or delta.finish]
                    if self.request.prompt_logprobs is not None and not prompt.push_all(batch):
                        continue
                    if self._echoes:
                        tokens = prompt.tokens if self._logprobs else []
                        pieces += [Piece(sequence.index, prompt.text, tokens) for sequence in self.sequences]
                    prompt, batch = None, early
                time_slice = TimeSlice() if len(batch) > 1 else None
                for delta in batch:
                    piece = self.sequences[delta.index].push(delta)
                    if piece.finish:
                        unfinished -= 1
                    if piece.text or piece.tokens or piece.finish or piece.token_ids:
                        pieces.append(piece)
                    if time_slice is not None and time_slice.over:
                        yield pieces
                        pieces = []
                        await time_slice.yield_to_loop()
                yield pieces
                if not unfinished:
                    return
        raise EngineLost("The engine's answer is incomplete; try again.")

    def _send(self, direct: DirectWriter, delta: wire.Delta) -> bool:
        """Send the piece of ``delta`` at once, or return False."""
        told_once = delta.prompt_logprobs is not None or delta.cached_tokens or delta.queue_seconds or delta.expected_tokens
        if told_once or not direct.is_open():
            return False
        sequence = self.sequences[delta.index]
        if direct.text_only and (text := sequence.push_quoted(delta)) is not None:
            if text:
                direct.send_quoted(sequence.index, text)
            return True
        piece = sequence.push(delta)
        if piece.text or piece.tokens or piece.token_ids:
            direct.send(piece)
        return True


def run_all(
    generations: list[Generation], dispatcher: Dispatcher, direct: DirectWriter | None = None
) -> AsyncGenerator[list[Piece], None]:
    """Yield the pieces of all prompts. The first failure ends all of them, as closing the iterator does. Pieces of a single prompt
    may go to ``direct`` instead."""
    if len(generations) == 1:
        return generations[0].pieces(dispatcher, direct)
    return merged([generation.pieces(dispatcher) for generation in generations], CONCURRENT_PROMPTS)


@dataclass(frozen=True)
class PromptOutput:
    """Fields of an answer; UNSET if they were not requested."""

    token_ids: list[int] | msgspec.UnsetType
    logprobs: Any
    """A list as JSON (``msgspec.Raw``)."""


class _TokenIds(Mapping[int, str]):
    """Shows each token as ``token_id:ID``."""

    def __getitem__(self, id: int) -> str:
        return f"token_id:{id}"

    def __iter__(self) -> Any:
        raise TypeError("every id has an entry")

    def __len__(self) -> int:
        raise TypeError("every id has an entry")


TOKEN_IDS: Mapping[int, str] = _TokenIds()
"""Takes the place of a vocabulary's texts with ``return_tokens_as_token_ids``."""


def prompt_ids(generation: Generation, fields: GenerationRequest) -> list[int] | None:
    """Return the token ids of the prompt if they were requested."""
    if not fields.return_token_ids:
        return None
    prompt, vision = generation.request.prompt, generation.model.info.vision
    if vision is None or not generation.request.images:
        return prompt
    return [vision.image_token if id >= wire.IMAGE_TOKENS else id for id in prompt]


def check_size(fields: GenerationRequest, tokens: int) -> None:
    """Raise :class:`InvalidRequest` if the log-probabilities of ``tokens`` prompt tokens would make the answer too large."""
    if fields.prompt_logprobs is not None and tokens * (fields.prompt_logprobs + 1) > MAX_ENTRIES:
        most = f"at most {MAX_ENTRIES} log-probabilities of prompts are returned at once"
        message = f"`prompt_logprobs` is too large for {tokens} prompt tokens: {most}; ask for fewer, or send less text."
        raise InvalidRequest(message, param="prompt_logprobs")


async def prompt_output(generation: Generation, fields: GenerationRequest, time_slice: TimeSlice) -> PromptOutput:
    """Return what ``fields`` request of the prompt. Log-probabilities are encoded in slices."""
    ids = prompt_ids(generation, fields)
    shown = msgspec.UNSET if ids is None else ids
    if fields.prompt_logprobs is None:
        return PromptOutput(shown, msgspec.UNSET)
    texts, top = generation.model.tokenizer.texts, fields.prompt_logprobs
    parts, tokens = [], generation.prompt_tokens
    for begin in range(0, len(tokens), TOKENS_AT_ONCE):
        parts.append(msgspec.json.encode([_entry(texts, token, top) for token in tokens[begin : begin + TOKENS_AT_ONCE]])[1:-1])
        if time_slice.over:
            await time_slice.yield_to_loop()
    return PromptOutput(shown, msgspec.Raw(b"[%b]" % b",".join(parts)))


def _entry(texts: Mapping[int, str], token: Token, top: int) -> dict[str, PromptLogprob] | None:
    """Return the token and the ``top`` most probable ones at its position, by id."""
    if token.logprob is None:
        return None
    ranked = {id: (rank, logprob) for rank, (id, logprob) in enumerate(token.top[:top], start=1)}
    own = {} if token.id in ranked else {token.id: (None, token.logprob)}
    return {
        str(id): PromptLogprob(logprob=logprob, rank=rank, decoded_token=texts[id])
        for id, (rank, logprob) in (own | ranked).items()
    }
