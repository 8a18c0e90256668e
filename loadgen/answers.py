"""Reads responses: checks them against the API, counts tokens, and measures when text arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import aiohttp
import msgspec

from loadgen.records import Record
from loadgen.workloads import AnyWorkload, Embeddings, Rerank, Score


class BadAnswer(Exception):
    """The response violates the API; the message says how."""


class StreamFailed(Exception):
    """The stream ended with an error event; the message is the server's."""


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Scores(msgspec.Struct):
    scores: list[list[float]]
    usage: _Usage = _Usage()


class _Result(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Result]
    usage: _Usage = _Usage()


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage = _Usage()


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    """One choice of a chat or completion, whole or streamed."""

    message: _Message | None = None
    delta: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str | None:
        message = self.message or self.delta
        return message.content if message is not None else self.text


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Refusal(msgspec.Struct):
    error: _Error


_scores = msgspec.json.Decoder(_Scores)
_ranking = msgspec.json.Decoder(_Ranking)
_embeddings = msgspec.json.Decoder(_Embeddings)
_answer = msgspec.json.Decoder(_Answer)
_refusal = msgspec.json.Decoder(_Refusal)
_DETAIL = 200
"""Most characters of an error message that are kept."""


async def read(response: aiohttp.ClientResponse, record: Record, workload: AnyWorkload, clock: Callable[[], float]) -> str:
    """Complete ``record`` from a response with status 200, and return the generated text; empty if nothing is generated.

    Raises :class:`BadAnswer`, :class:`StreamFailed` and aiohttp's errors.
    """
    try:
        match workload:
            case Score():
                _read_scores(await response.read(), record, workload)
            case Rerank():
                _read_ranking(await response.read(), record, workload)
            case Embeddings():
                _read_embeddings(await response.read(), record)
            case _ if workload.stream:
                return await _read_stream(response, record, clock)
            case _:
                return _read_answer(await response.read(), record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(str(error)) from None
    return ""


def reason(body: bytes) -> str:
    """Return the reason in a response with another status: the error's message, or the start of the body."""
    try:
        said = _refusal.decode(body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = body.decode(errors="replace")
    return " ".join(said.split())[:_DETAIL]


def _read_scores(body: bytes, record: Record, workload: Score) -> None:
    answer = _scores.decode(body)
    if len(answer.scores) != record.items:
        raise BadAnswer(f"{len(answer.scores)} score lists for {record.items} items")
    labels = workload.label_count
    if any(len(scores) != labels for scores in answer.scores):
        raise BadAnswer(f"an item has not {labels} scores")
    record.prompt_tokens = answer.usage.prompt_tokens


def _read_ranking(body: bytes, record: Record, workload: Rerank) -> None:
    answer = _ranking.decode(body)
    wanted, found = workload.results(record.items), {result.index for result in answer.results}
    if len(answer.results) != wanted or len(found) != wanted or not all(0 <= index < record.items for index in found):
        raise BadAnswer(f"{len(answer.results)} results for {len(found)} documents, instead of one for each of {wanted}")
    record.prompt_tokens = answer.usage.prompt_tokens


def _read_embeddings(body: bytes, record: Record) -> None:
    answer = _embeddings.decode(body)
    if [entry.index for entry in answer.data] != list(range(record.items)):
        raise BadAnswer(f"{len(answer.data)} embeddings for {record.items} texts, or another order")
    lengths = {len(entry.embedding) for entry in answer.data}
    if len(lengths) != 1 or 0 in lengths:
        raise BadAnswer("embeddings of different lengths, or empty ones")
    record.prompt_tokens = answer.usage.prompt_tokens


def _read_answer(body: bytes, record: Record) -> str:
    answer = _answer.decode(body)
    if not answer.choices or any(choice.content is None for choice in answer.choices):
        raise BadAnswer("an answer without text")
    _count(answer.usage, record)
    return answer.choices[0].content or ""


async def _read_stream(response: aiohttp.ClientResponse, record: Record, clock: Callable[[], float]) -> str:
    events, ended, done = Events(), 0, False
    gaps: list[float] = []
    texts: list[str] = []
    async for chunk in response.content.iter_any():
        now = clock()
        for event in events.feed(chunk):
            if event == b"[DONE]":
                done = True
                continue
            answer = _answer.decode(event)
            if answer.error is not None:
                raise StreamFailed(answer.error.message[:_DETAIL])
            ended += sum(choice.finish_reason is not None for choice in answer.choices)
            if any(choice.content for choice in answer.choices):
                texts.append(answer.choices[0].content or "")
                _mark(record, gaps, now)
            _count(answer.usage, record)
    record.gaps = gaps
    if not done:
        raise aiohttp.ClientPayloadError("the stream ended without [DONE]")
    if not ended:
        raise BadAnswer("a stream without a finish reason")
    return "".join(texts)


def _mark(record: Record, gaps: list[float], now: float) -> None:
    """Record the arrival of a piece of text."""
    if record.last_token is None:
        record.first_token = now
    else:
        gaps.append(round(now - record.last_token, 6))
    record.last_token = now


def _count(usage: _Usage | None, record: Record) -> None:
    if usage is not None:
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens or 0


class Events:
    """Parser of server-sent events, from chunks with any boundaries."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each complete event. The data is one line, because it is JSON."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
