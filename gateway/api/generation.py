"""Shared by the endpoints that generate: running generations, and building their answers and streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from litestar import Response

from yardstick_llm.gateway.api.access import Quotas
from yardstick_llm.gateway.api.answers import DONE, EventStream, JsonResponse, StreamHandle, sse, while_connected
from yardstick_llm.gateway.generation.generation import DirectWriter, Generation, PromptOutput, check_size, prompt_output, run_all
from yardstick_llm.gateway.generation.sequence import Piece, Token
from yardstick_llm.gateway.http.context import AnyRequest, RequestContext
from yardstick_llm.gateway.limits.limiter import NOTHING, Cost, Lease
from yardstick_llm.gateway.ops.access_log import Account
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.ops.tracing import finished
from yardstick_llm.gateway.pool.dispatch import Dispatcher
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.process.event_loop import TimeSlice
from yardstick_llm.gateway.schemas.common import CompletionTokensDetails, PromptTokensDetails, Usage, new_id
from yardstick_llm.gateway.schemas.generation import GenerationRequest


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


_encoder = msgspec.json.Encoder()

TOKENS_AT_ONCE = 32
"""Tokens whose log-probabilities are converted to JSON at a time; with twenty for each token, this takes less than 2 ms."""


@dataclass(frozen=True)
class Generator:
    """Runs generations on engines and builds responses."""

    dispatcher: Dispatcher
    quotas: Quotas
    telemetry: Telemetry
    keepalive_seconds: float

    async def respond(
        self, request: AnyRequest, generations: list[Generation], answer: Answer, fields: GenerationRequest
    ) -> Response[Any]:
        """Charge the quota, run ``generations`` and respond as ``fields`` request: with a stream or a whole answer, and with or
        without token counts. Raises :class:`GatewayError` for failures before the first event."""
        account = RequestContext.of(request).account
        account.prompt_tokens = sum(len(generation.request.prompt) for generation in generations)
        check_size(fields, account.prompt_tokens)
        lease = await self.quotas.charge(request, tokens=sum(generation.expected_tokens for generation in generations))
        if fields.stream:
            direct = _DirectWriter(answer, generations, continuous=fields.continuous_usage)
            events = self._events(request, generations, answer, lease, account, fields, direct)
            return EventStream(events, request, self.keepalive_seconds, handle=direct)
        async with while_connected(request.scope):
            with self.counted(generations, lease, account):
                async with aclosing(run_all(generations, self.dispatcher)) as batches:
                    pieces = [piece async for batch in batches for piece in batch]
            show_forecast(request, generations)
            time_slice = TimeSlice()
            choices = answer.chosen(sorted(joined(pieces), key=lambda piece: piece.index), generations)
            logprobs = [await _encoded(answer, choice.tokens, time_slice) for choice in choices]
            prompts = [await prompt_output(generation, fields, time_slice) for generation in generations]
        return JsonResponse(answer.whole(choices, logprobs, usage_of(generations), prompts))

    async def _events(
        self,
        request: AnyRequest,
        generations: list[Generation],
        answer: Answer,
        lease: Lease | None,
        account: Account,
        fields: GenerationRequest,
        direct: _DirectWriter,
    ) -> AsyncGenerator[bytes, None]:
        usage_so_far = direct.usage_so_far
        with self.counted(generations, lease, account):
            async with aclosing(run_all(generations, self.dispatcher, direct)) as batches:
                async for batch in batches:
                    if direct.opened and len(batch) == 1 and _is_small(piece := batch[0]):  # nearly every token
                        if (event := answer.event(piece, usage_so_far(piece.index, piece.completion_tokens))) is not None:
                            yield event
                        continue
                    time_slice = TimeSlice()
                    chunks: list[bytes] = []
                    if not direct.opened:
                        direct.opened = True
                        show_forecast(request, generations)
                        openings = [answer.opening(index, usage_so_far(index)) for index in direct.prompts]
                        chunks = [sse(opening) for opening in openings if opening is not None]
                    for piece in small(joined(batch)):
                        if (event := answer.event(piece, usage_so_far(piece.index, piece.completion_tokens))) is not None:
                            chunks.append(event)
                        if time_slice.over:
                            yield b"".join(chunks)
                            chunks.clear()
                            await time_slice.yield_to_loop()
                    if chunks:
                        yield b"".join(chunks)
        if fields.includes_usage:
            yield sse(answer.closing(usage_of(generations)))
        yield DONE

    @contextmanager
    def counted(self, generations: list[Generation], lease: Lease | None, account: Account) -> Iterator[None]:
        """Run ``generations`` inside the block. The tokens are counted however the block ends."""
        try:
            yield
        finally:
            for generation in generations:
                account.cached_tokens += generation.cached_tokens
                account.completion_tokens += generation.completion_tokens
                account.queue_seconds = max(account.queue_seconds, generation.queue_seconds)
            finished(sequence.finish for generation in generations for sequence in generation.sequences)
            self.telemetry.generated(account)
            for generation in generations:
                if generation.forecast_tokens:
                    self.telemetry.forecast(generation.model.base.name, generation.forecast_tokens)
                if calls := generation.tool_calls:
                    for result, count in (("called", calls.calls), ("malformed", calls.malformed)):
                        if count:
                            self.telemetry.tool_calls.labels(calls.family, result).inc(count)
            if lease is not None:
                lease.used_tokens = sum(generation.used_tokens for generation in generations)
                lease.begun = NOTHING if lease.used_tokens == 0 else Cost(1, lease.used_tokens, 0)
            if generations[0].request.grammar:
                self.telemetry.structured.labels(generations[0].model.base.name).inc(len(generations))
            if guidance := generations[0].request.length_guidance:
                mode = guidance.constraint or guidance.mode
                self.telemetry.guided.labels(generations[0].model.base.name, mode).inc(len(generations))


class _DirectWriter(StreamHandle, DirectWriter):
    """Writes pieces to the response as events."""

    def __init__(self, answer: Answer, generations: list[Generation], *, continuous: bool) -> None:
        """``continuous``: every chunk has the token counts of its choice so far."""
        self.prompts = {
            sequence.index: len(generation.request.prompt) for generation in generations for sequence in generation.sequences
        }
        """Prompt tokens of each choice."""
        self._answer = answer
        self._continuous = continuous
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self.text_only = not continuous and answer.text_only
        self.opened = False
        """Whether the events that introduce the choices have been made."""

    def usage_so_far(self, index: int, completion_tokens: int = 0) -> Usage | None:
        """Return the token counts of a choice; None if chunks have none."""
        if not self._continuous:
            return None
        return Usage(self.prompts[index], self.prompts[index] + completion_tokens, completion_tokens)

    def is_open(self) -> bool:
        writer = self.writer
        return writer is not None and self.opened and writer.cycle is not None and writer.cycle.writable

    def send(self, piece: Piece) -> None:
        assert self.writer is not None
        for part in [piece] if len(piece.tokens) <= TOKENS_AT_ONCE else small([piece]):
            if (event := self._answer.event(part, self.usage_so_far(part.index, part.completion_tokens))) is not None:
                self.writer.write(event)

    def send_quoted(self, index: int, text: bytes) -> None:
        assert self.writer is not None
        if (around := self._around.get(index)) is None:
            around = self._around[index] = self._answer.around_text(index)
        self.writer.write(around[0] + text + around[1])


def show_forecast(request: AnyRequest, generations: list[Generation]) -> None:
    """Name the expected output tokens of all sequences in a header, if engines forecast those of each prompt. Before the response
    begins; in a stream of several prompts, those that have begun count."""
    begun = [generation for generation in generations if generation.forecast_tokens]
    if begun:
        expected = sum(generation.forecast_tokens * generation.request.sampling.n for generation in begun)
        RequestContext.of(request).headers.append((b"x-yardstick-expected-tokens", b"%d" % round(expected)))


def system_fingerprint(model: ServedModel) -> str:
    """Return the engine's fingerprint in the format of OpenAI's ``system_fingerprint``."""
    return f"fp_{model.info.fingerprint[:16]}"


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return one piece for each choice, in the order in which choices first appear."""
    parts: dict[int, list[Piece]] = {}
    for piece in pieces:
        parts.setdefault(piece.index, []).append(piece)
    return [
        Piece(
            index,
            "".join(part.text for part in of_one),
            [token for part in of_one for token in part.tokens],
            of_one[-1].finish,
            of_one[-1].completion_tokens,
            None if of_one[-1].parts is None else [part for piece in of_one for part in piece.parts or ()],
            of_one[-1].calls,
            [id for part in of_one for id in part.token_ids],
        )
        for index, of_one in parts.items()
    ]


def _is_small(piece: Piece) -> bool:
    """Whether ``piece`` is one chunk. The end of an answer with tool calls is a chunk of its own: OpenAI's SDK takes a call to be
    complete when the chunk with the finish reason comes, and misses one that begins in it."""
    return len(piece.tokens) <= TOKENS_AT_ONCE and not (piece.calls and piece.finish)


def small(pieces: list[Piece]) -> Iterator[Piece]:
    """Divide ``pieces`` into chunks of at most ``TOKENS_AT_ONCE`` tokens with log-probabilities."""
    for piece in pieces:
        tokens = piece.tokens
        if _is_small(piece):
            yield piece
            continue
        if piece.calls and piece.finish:
            yield from small([msgspec.structs.replace(piece, finish=None)])
            yield Piece(piece.index, "", [], piece.finish, piece.completion_tokens, [], piece.calls)
            continue
        last = len(tokens) - TOKENS_AT_ONCE
        for begin in range(0, len(tokens), TOKENS_AT_ONCE):
            text = piece.text if begin == 0 else ""
            finish = piece.finish if begin >= last else None
            parts = piece.parts if begin >= last else None if piece.parts is None else []  # tokens come before their text
            ids = piece.token_ids if begin == 0 else []
            some = tokens[begin : begin + TOKENS_AT_ONCE]
            yield Piece(piece.index, text, some, finish, piece.completion_tokens, parts, piece.calls, ids)


async def _encoded(answer: Answer, tokens: list[Token], time_slice: TimeSlice) -> msgspec.Struct | None:
    """Return ``answer.logprobs(tokens)``. For many tokens its lists are JSON-encoded in parts, so that neither building nor
    encoding them blocks the event loop."""
    if time_slice.over:
        await time_slice.yield_to_loop()
    if len(tokens) <= TOKENS_AT_ONCE:
        return answer.logprobs(tokens)
    kind: type[msgspec.Struct] | None = None
    parts: dict[str, list[bytes]] = {}
    for begin in range(0, len(tokens), TOKENS_AT_ONCE):
        if (logprobs := answer.logprobs(tokens[begin : begin + TOKENS_AT_ONCE])) is None:
            return None
        kind = type(logprobs)
        for name in logprobs.__struct_fields__:
            if (entries := getattr(logprobs, name)) is not msgspec.UNSET:
                parts.setdefault(name, []).append(_encoder.encode(entries)[1:-1])
        if time_slice.over:
            await time_slice.yield_to_loop()
    assert kind is not None
    return kind(**{name: msgspec.Raw(b"[%b]" % b",".join(lists)) for name, lists in parts.items()})


def usage_of(generations: list[Generation]) -> Usage:
    """Return the token counts of a whole answer. A prompt counts once, however many completions it has."""
    prompt = completion = cached = 0
    for generation in generations:
        prompt += len(generation.request.prompt)
        completion += generation.completion_tokens
        cached += generation.cached_tokens
    return Usage(prompt, prompt + completion, completion, PromptTokensDetails(cached), _completion_details(generations))


def _completion_details(generations: list[Generation]) -> CompletionTokensDetails | None:
    reasoning = generations[0].reasoning_tokens
    sequences = [sequence for generation in generations for sequence in generation.sequences]
    drafted = sum(sequence.draft_tokens for sequence in sequences)
    if not drafted:
        return None if reasoning is None else CompletionTokensDetails(reasoning)
    accepted = sum(sequence.accepted_draft_tokens for sequence in sequences)
    return CompletionTokensDetails(reasoning or 0, accepted, drafted - accepted)
