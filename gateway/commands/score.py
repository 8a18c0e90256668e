"""``yardstick score`` and ``rerank`` of a list of items: sends it to a running gateway, in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.commands.errors import CommandError
from gateway.commands.results import Results
from gateway.errors import ErrorBody
from gateway.schemas.rerank import RerankResponse
from gateway.schemas.score import ScoreResponse

T = TypeVar("T")
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


class Job(Protocol):
    """The fields that every job has."""

    @property
    def url(self) -> str:
        """URL of the gateway."""

    @property
    def api_key(self) -> str | None:
        """API key."""


@dataclass(frozen=True)
class ScoreJob:
    """Options of the command line."""

    query: str
    labels: tuple[str, ...]
    url: str
    api_key: str | None
    model: str | None
    apply_softmax: bool
    item_first: bool
    batch: int
    suffix: str = ""
    """Text appended to every item, such as a question about it."""


@dataclass(frozen=True)
class RerankJob:
    """Options of the command line."""

    query: str
    url: str
    api_key: str | None
    model: str | None
    instruction: str | None
    truncate: bool
    top_n: int | None
    batch: int


def rerank(job: RerankJob, lines: Iterable[str]) -> Results:
    """Rank the lines of ``lines`` that are not empty, the most relevant first. Raises :class:`CommandError`."""
    documents = _read(lines)
    given = {"query": job.query, "model": job.model, "instruction": job.instruction, "truncate": job.truncate or None}
    fields = {name: value for name, value in given.items() if value is not None}
    scores, model, tokens = [0.0] * len(documents), "", 0
    with _client(job) as client, _progress() as progress:
        task = progress.add_task("Ranking", total=len(documents))
        for start, batch in zip(range(0, len(documents), job.batch), _batches(documents, job.batch), strict=True):
            answer = _post(client, job, "/v1/rerank", fields | {"documents": batch}, RerankResponse)
            for result in answer.results:
                scores[start + result.index] = result.relevance_score
            model, tokens = answer.model, tokens + answer.usage.total_tokens
            progress.advance(task, len(batch))
    whole = Results(model, ("relevance",), documents, [[score] for score in scores], tokens, heading="{}").by_first_label()
    return replace(whole, items=whole.items[: job.top_n], scores=whole.scores[: job.top_n])


def run(job: ScoreJob, lines: Iterable[str]) -> Results:
    """Score each line of ``lines`` that is not empty, with a progress bar on standard error. Raises :class:`CommandError`."""
    return score_items(job, _read(lines))


def score_items(job: ScoreJob, items: list[str]) -> Results:
    """Score ``items``, which may have several lines each; the results omit the suffix. Raises :class:`CommandError`."""
    scores: list[list[float]] = []
    model, tokens = job.model or "", 0
    with _client(job) as client, _progress() as progress:
        task = progress.add_task("Scoring", total=len(items))
        for batch in _batches(items, job.batch):
            answer = _score(client, job, batch)
            scores += [row or [] for row in answer.scores]  # only requests with `partial_results` have rows of None
            model, tokens = answer.model, tokens + answer.usage.total_tokens
            progress.advance(task, len(batch))
    return Results(model, job.labels, items, scores, tokens)


def _client(job: Job) -> httpx.Client:
    headers = {"authorization": f"Bearer {job.api_key}"} if job.api_key else {}
    try:
        return httpx.Client(base_url=job.url, headers=headers, timeout=_TIMEOUT)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise CommandError(f"--url or --api-key cannot be used ({error}); check for typing errors") from None


def _read(lines: Iterable[str]) -> list[str]:
    try:
        items = [item for line in lines if (item := line.rstrip("\r\n"))]
    except UnicodeDecodeError as error:
        raise CommandError(f"the items are not UTF-8 text (byte {error.start}); convert the file first") from None
    if not items:
        raise CommandError("there are no items to score; give a file with one item a line")
    return items


def _batches(items: list[str], size: int) -> Iterator[list[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _score(client: httpx.Client, job: ScoreJob, items: list[str]) -> ScoreResponse:
    body: dict[str, Any] = {
        "query": job.query,
        "items": [item + job.suffix for item in items],
        "labels": job.labels,
        "apply_softmax": job.apply_softmax,
        "item_first": job.item_first,
    }
    if job.model is not None:
        body["model"] = job.model
    return _post(client, job, "/v1/score", body, ScoreResponse)


def _post(client: httpx.Client, job: Job, path: str, body: dict[str, Any], kind: type[T]) -> T:
    try:
        response = client.post(path, json=body)
    except httpx.RequestError as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"no answer from {job.url} ({reason}); check --url, or start a server with `yardstick serve`") from None
    if not response.is_success:
        raise CommandError(_refusal(response))
    try:
        return msgspec.json.decode(response.content, type=kind)
    except ValueError:  # also of bytes that are not UTF-8
        raise CommandError(f"{job.url} did not answer as a Yardstick gateway does; check --url") from None


def _refusal(response: httpx.Response) -> str:
    hint = " Send the key with --api-key or YARDSTICK_API_KEY." if response.status_code == 401 else ""
    try:
        message = msgspec.json.decode(response.content, type=ErrorBody).error.message
    except msgspec.DecodeError:
        message = f"HTTP status {response.status_code}"
    return f"the server refused: {message}{hint}"


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
