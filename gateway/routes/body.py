"""Passes the bytes of a request body to a handler, and documents its schema."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from litestar import Request, post, put
from litestar._openapi.schema_generation import SchemaCreator
from litestar.dto import AbstractDTO, DTOFieldDefinition
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from gateway.openapi import ERRORS, WRITE_ERRORS, ApiOperation

T = TypeVar("T", bound=msgspec.Struct)


class Body(Generic[T]):
    """The bytes of a request body that should hold a ``T`` as JSON."""

    def __init__(self, content: bytes) -> None:
        self.content = content


def post_json(path: str | Sequence[str], kind: type[msgspec.Struct], tag: str) -> HTTPRouteHandler:
    """Return ``litestar.post`` for a handler whose ``data`` is a ``Body[kind]``. The content type is not checked."""
    return _with_body(post, path, kind, tag, ERRORS)


def put_json(path: str, kind: type[msgspec.Struct], tag: str) -> HTTPRouteHandler:
    """:func:`post_json` for ``litestar.put``."""
    return _with_body(put, path, kind, tag, ERRORS | WRITE_ERRORS)


def _with_body(
    method: type[post | put],
    path: str | Sequence[str],
    kind: type[msgspec.Struct],
    tag: str,
    errors: dict[int, ResponseSpec],
) -> HTTPRouteHandler:
    dto = JsonBody[kind]  # type: ignore[valid-type]
    return method(
        path,
        status_code=200,
        dto=dto,
        return_dto=None,
        responses=errors,
        operation_class=ApiOperation,
        tags=[tag],
        request_class=_Whole,
    )


class _Whole(Request[Any, Any, Any]):
    """A request whose body arrives in one message, because :class:`gateway.limits.admission.Admission` has read it."""

    async def body(self) -> bytes:
        """Return the body."""
        message: Any = await self.receive()
        body: bytes = message["body"]
        return body


class JsonBody(AbstractDTO[T]):
    """Passes the body on without decoding it; ``gateway/routes/reading.py`` decodes it."""

    def decode_bytes(self, value: Any) -> Any:
        """Wrap the body."""
        return Body[T](value)

    @classmethod
    def create_for_field_definition(cls, *_: Any, **__: Any) -> None:
        """Generate nothing: the struct itself is the transfer object."""

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,  # noqa: ARG003 - the framework's signature
        handler_id: str,  # noqa: ARG003 - the framework's signature
        schema_creator: SchemaCreator,
    ) -> Reference | Schema:
        """Return the struct's own schema."""
        return schema_creator.for_field_definition(FieldDefinition.from_annotation(cls.model_type))

    @classmethod
    def generate_field_definitions(cls, *_: Any) -> Generator[DTOFieldDefinition, None, None]:
        """Yield nothing. The framework does not call this, as no transfer object is generated."""
        yield from ()

    @classmethod
    def detect_nested_field(cls, *_: Any) -> bool:
        """Return False. The framework does not call this, as no transfer object is generated."""
        return False
