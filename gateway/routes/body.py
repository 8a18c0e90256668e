"""Hands a handler its decoded body, and documents it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, TypeVar

import msgspec
from litestar import post
from litestar._openapi.schema_generation import SchemaCreator
from litestar.dto import AbstractDTO, DTOFieldDefinition
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from gateway.exchange import Exchange
from gateway.openapi import ERRORS, ApiOperation
from gateway.schemas.decoding import BodyDecoder

T = TypeVar("T", bound=msgspec.Struct)


def post_json(path: str, kind: type[msgspec.Struct], tag: str) -> HTTPRouteHandler:
    """``litestar.post`` for a handler whose ``data`` is a ``kind``."""
    dto = JsonBody[kind]  # type: ignore[valid-type]
    return post(path, status_code=200, dto=dto, return_dto=None, responses=ERRORS, operation_class=ApiOperation, tags=[tag])


class JsonBody(AbstractDTO[T]):
    """Decodes a JSON body whatever its content type says; names the fields it ignores in ``x-yardstick-ignored``."""

    _decoder: ClassVar[BodyDecoder[Any]]

    def decode_bytes(self, value: bytes) -> Any:
        """Raises :class:`InvalidRequest`."""
        data, ignored = self._decoder.decode(value)
        Exchange.of(self.asgi_connection).name_ignored(ignored)
        return data

    @classmethod
    def create_for_field_definition(cls, *_: Any, **__: Any) -> None:
        """Nothing is generated: the struct itself is the transfer object."""
        cls._decoder = BodyDecoder(cls.model_type)

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,  # noqa: ARG003 - the framework's signature
        schema_creator: SchemaCreator,
    ) -> Reference | Schema:
        """The struct's own schema."""
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def generate_field_definitions(cls, *_: Any) -> Generator[DTOFieldDefinition, None, None]:
        """Not asked for, as nothing is generated."""
        yield from ()

    @classmethod
    def detect_nested_field(cls, *_: Any) -> bool:
        """Not asked for, as nothing is generated."""
        return False
