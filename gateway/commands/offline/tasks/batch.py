"""``yardstick batch``: OpenAI's batch files, in which each line is a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.commands.errors import WrongUsage
from gateway.commands.offline.rows import Row, Source
from gateway.commands.offline.tasks.base import Answer, Call, Item, Refusal, RowError, Task, encoded
from gateway.commands.offline.tasks.duplicates import first_duplicate

_ID = "batch_req_"


class _Request(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class _Response(msgspec.Struct):
    status_code: int
    request_id: str | None
    body: Any


class _Line(msgspec.Struct):
    id: str


class Batch(Task):
    """One request in each row; the answer is written as OpenAI's batch API does."""

    command = "batch"

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def check(self, source: Source) -> None:
        """Check that no two requests have one ``custom_id``, by which their answers are told apart."""
        found = first_duplicate(lambda: source.rows(()), _custom_id)
        if found is not None:
            problem = f"the custom_id {found.name[:200]!r} is that of line {found.first}; give each request its own"
            raise WrongUsage(f"{source.path}, line {found.second}: {problem}")

    def item(self, row: Row) -> Item:
        try:
            request = msgspec.convert(row.fields, _Request)
        except msgspec.ValidationError as error:
            raise RowError(f"not a request of a batch file: {error}") from None
        if request.method != "POST":
            raise RowError(f"the method is {request.method!r}; only POST is supported")
        if not request.url.startswith("/") or request.url.startswith("//"):
            raise RowError(f"the url is {request.url[:200]!r}; give a path such as /v1/chat/completions")
        if request.body.get("stream"):
            raise RowError("`stream` is not supported in a batch file")
        return Item(row, request)

    def call(self, items: Sequence[Item]) -> Call:
        request: _Request = items[0].content
        return Call(request.url, msgspec.json.encode(request.body))

    def lines(self, items: Sequence[Item], answer: Answer) -> list[bytes]:
        (item,) = items
        response = _Response(answer.status, answer.request_id, msgspec.json.decode(answer.content))
        custom_id = item.content.custom_id
        return [encoded({"id": _id(item.row), "custom_id": custom_id, "response": response, "error": None})]

    def failure(self, row: Row, refusal: Refusal) -> bytes:
        response, error = None, {"code": refusal.code, "message": refusal.message}
        if refusal.status is not None:
            try:
                body = msgspec.json.decode(refusal.content)
            except (msgspec.DecodeError, UnicodeDecodeError):
                body = {"error": error}
            response = _Response(refusal.status, refusal.request_id, body)
        custom_id = row.fields.get("custom_id")
        fields = {"id": _id(row), "custom_id": custom_id, "response": response, "error": None if response else error}
        return encoded({"row": row.number, "line": row.line, **fields})

    def row_of(self, line: bytes) -> int:
        return int(msgspec.json.decode(line, type=_Line).id.removeprefix(_ID))


def _custom_id(row: Row) -> str | None:
    custom_id = row.fields.get("custom_id")
    return custom_id if isinstance(custom_id, str) else None


def _id(row: Row) -> str:
    return f"{_ID}{row.number}"
