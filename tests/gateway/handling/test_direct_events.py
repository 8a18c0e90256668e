"""Events that are written without waking the stream's task: when they may be, and what they are."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine import wire
from gateway.generation.generation import Generation
from gateway.generation.relay import Relay
from gateway.generation.sequence import Piece, TextOptions, Token
from gateway.handling.chat_answer import ChatAnswer
from gateway.handling.generator import _DirectWriter
from gateway.handling.streams import StreamHandle, _EventWriter, sse
from gateway.http.connection import Cycle
from gateway.ops.metrics import Telemetry
from gateway.pool.dispatch import Dispatcher
from gateway.routes.completions import CompletionAnswer
from gateway.schemas.chat import ChatChunk, ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.usage import Usage
from gateway.text.tokenizer import Tokenizer
from tests.fakes import ids, library

SAID = ids(' the "quick" 🦊 fox')


class Stream:
    """One chat, from the function that takes its deltas to the bytes that are written."""

    def __init__(self, *, continuous: bool) -> None:
        """``continuous``: events have token counts."""
        self.continuous = continuous
        self.written = bytearray()
        self.flow = SimpleNamespace(write_paused=False)
        tokenizer = Tokenizer.from_files(wire.TokenizerFiles(library().to_str().encode(), None, {}))
        model: Any = SimpleNamespace(name="fake", tokenizer=tokenizer, info=SimpleNamespace(fingerprint="0" * 32))
        request = wire.Generate("x", [5], wire.Sampling(max_tokens=100))
        answer = ChatAnswer(model, ChatRequest(messages=[]), None, gamma=None)
        self.handle = StreamHandle()
        self.handle.writer = _EventWriter(None, 60, self._cycle())  # type: ignore[arg-type]
        usage = (lambda _, tokens: Usage(1, 1 + tokens, tokens)) if continuous else None
        self.direct = _DirectWriter(answer, usage, self.handle)
        self.direct.opened = True
        self.generation = Generation(model, request, TextOptions(), most_expected=10)
        relay = Relay(Dispatcher(Telemetry(), wait_seconds=1, max_waiting=1), model, request)
        self.take = partial(relay._pass_on, partial(self.generation._send, self.direct))

    def _cycle(self) -> Cycle:
        cycle = object.__new__(Cycle)
        cycle.response_started = cycle.chunked_encoding = True
        cycle.disconnected = False
        cycle.flow = self.flow  # type: ignore[assignment]
        cycle.scope = {"method": "POST"}  # type: ignore[typeddict-item]
        cycle.transport = SimpleNamespace(write=self.written.extend)  # type: ignore[assignment]
        return cycle

    @property
    def chunks(self) -> list[ChatChunk]:
        lines = [line for line in bytes(self.written).split(b"\r\n") if line.startswith(b"data: ")]
        return [msgspec.json.decode(line.removeprefix(b"data: "), type=ChatChunk) for line in lines]

    @property
    def text(self) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in self.chunks)

    def close(self) -> None:
        assert self.handle.writer is not None
        self.handle.writer.stop()


@pytest.fixture(params=[False, True])
async def stream(request: pytest.FixtureRequest) -> Any:
    stream = Stream(continuous=request.param)
    yield stream
    stream.close()


async def test_the_text_is_that_of_the_tokens(stream: Stream) -> None:
    assert all(stream.take(wire.Delta("x", place, [token])) for place, token in enumerate(SAID))
    assert stream.text == library().decode(SAID)
    assert stream.generation.completion_tokens == len(SAID)
    counts = [chunk.usage and chunk.usage.completion_tokens for chunk in stream.chunks]
    assert (counts[0], counts[-1]) == ((1, len(SAID)) if stream.continuous else (None, None))


async def test_a_client_that_reads_slowly_changes_nothing_of_the_sequence(stream: Stream) -> None:
    """A delta that is not taken can be taken later: nothing was recorded of it."""
    for place, token in enumerate(SAID):
        stream.flow.write_paused = True
        assert not stream.take(wire.Delta("x", place, [token]))
        stream.flow.write_paused = False
        assert stream.take(wire.Delta("x", place, [token]))
    assert stream.text == library().decode(SAID)


@pytest.mark.parametrize(
    "changes",
    [{"finish": "length"}, {"finish": "abort"}, {"offset": 1}, {"index": 1}, {"cached_tokens": 1}, {"queue_seconds": 0.1}],
    ids=str,
)
async def test_what_is_unusual_is_left_to_the_reader(stream: Stream, changes: dict[str, Any]) -> None:
    delta = wire.Delta("x", 0, [7])
    assert not stream.take(msgspec.structs.replace(delta, **changes))
    assert not stream.written
    assert stream.take(delta)


async def test_nothing_is_written_before_the_first_event_and_after_the_end(stream: Stream) -> None:
    delta = wire.Delta("x", 0, [7])
    stream.direct.opened = False
    assert not stream.take(delta)
    stream.direct.opened = True
    writer, stream.handle.writer = stream.handle.writer, None
    assert not stream.take(delta)
    stream.handle.writer = writer
    assert stream.take(delta)


async def test_sequences_that_may_end_early_are_left_to_the_reader(stream: Stream) -> None:
    generation = Generation(stream.generation.model, stream.generation.request, TextOptions(stops=["x"]), most_expected=10)
    assert generation.sequences[0].may_end_early
    assert not stream.generation.sequences[0].may_end_early


TOKENS = [
    Token(id=SAID[0], logprob=-0.5, top=[(SAID[0], -0.5), (SAID[1], -1.25)], values={}, offset=0),
    Token(id=SAID[2], logprob=-1e-05, top=[], values={}, offset=3),
]


@pytest.mark.parametrize("tokens", [[], TOKENS[:1], TOKENS], ids=len)
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_an_event_is_its_encoded_chunk(stream: Stream, endpoint: str, logprobs: int | None, tokens: list[Token]) -> None:
    """Constant parts are encoded once."""
    model = stream.generation.model
    answer: ChatAnswer | CompletionAnswer
    if endpoint == "chat":
        fields = ChatRequest(messages=[], logprobs=logprobs is not None, top_logprobs=logprobs)
        answer = ChatAnswer(model, fields, None, gamma=None)
    else:
        answer = CompletionAnswer(model, CompletionRequest(prompt="", logprobs=logprobs), [stream.generation], gamma=None)
    for text in (' the "quick"\n', "🦊", ""):
        piece = Piece(0, text, tokens if logprobs is not None else [])
        assert answer.event(piece, None) == sse(answer.chunk(piece, None))  # type: ignore[arg-type]
        if text and logprobs is None:
            before, after = answer.around_text(0)
            assert before + msgspec.json.encode(text) + after == answer.event(piece, None)
