"""The API's own description: structs with their docstrings, and a page to read it that needs no other server."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar._openapi.schema_generation import SchemaCreator
from litestar._openapi.schema_generation.plugins.struct import StructSchemaPlugin
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import SwaggerRenderPlugin
from litestar.openapi.spec import Components, Schema, SecurityScheme
from litestar.params import FromPath
from litestar.typing import FieldDefinition
from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]

from gateway.errors import ErrorBody, NotFound

PATH = "/schema"
_ASSETS = f"{PATH}/assets"
_MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui-standalone-preset.js": "text/javascript",
    "swagger-ui.css": "text/css",
}


def openapi_config() -> OpenAPIConfig:
    """The document at ``/schema/openapi.json`` and the page at ``/schema``."""
    page = _Page(
        js_url=f"{_ASSETS}/swagger-ui-bundle.js",
        css_url=f"{_ASSETS}/swagger-ui.css",
        standalone_preset_js_url=f"{_ASSETS}/swagger-ui-standalone-preset.js",
        favicon="",
    )
    return OpenAPIConfig(
        title="Yardstick",
        version=version("yardstick-llm"),
        description="Scores lists of items with a language model, and writes text of steered length. Compatible with OpenAI's API.",
        path=PATH,
        render_plugins=[page],
        use_handler_docstrings=True,
        components=Components(security_schemes={"key": SecurityScheme(type="http", scheme="bearer")}),
    )


ERRORS: dict[int, ResponseSpec] = {
    400: ResponseSpec(ErrorBody, description="The request cannot be answered; `param` says where it is wrong."),
    401: ResponseSpec(ErrorBody, description="No valid API key was sent."),
    404: ResponseSpec(ErrorBody, description="The model does not exist."),
    413: ResponseSpec(ErrorBody, description="The body is too large."),
    429: ResponseSpec(ErrorBody, description="There is too much to do; `Retry-After` says when to try again."),
    503: ResponseSpec(ErrorBody, description="The model is not ready; `Retry-After` says when to try again."),
}
"""What every generating or scoring endpoint may answer instead."""


def asset_route() -> HTTPRouteHandler:
    """What the page loads."""

    @get(f"{_ASSETS}/{{name:str}}", include_in_schema=False, sync_to_thread=True)
    def asset(name: FromPath[str]) -> Response[bytes]:
        """Serve one file of the page."""
        if name not in _MEDIA_TYPES:
            raise NotFound("There is no such file.")
        headers = {"cache-control": "max-age=86400"}
        return Response((swagger_ui_path / name).read_bytes(), media_type=_MEDIA_TYPES[name], headers=headers)

    return asset


class DocumentedStructs(StructSchemaPlugin):
    """Schemas of structs, with the docstrings of the class and of its attributes as descriptions."""

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: SchemaCreator) -> Schema:
        """The schema of one struct."""
        schema = super().to_openapi_schema(field_definition, schema_creator)
        schema.description = inspect.getdoc(field_definition.type_)
        for name, description in attribute_docstrings(field_definition.type_).items():
            described = (schema.properties or {}).get(name)
            if isinstance(described, Schema):
                described.description = description
        return schema


@cache
def attribute_docstrings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each attribute of ``kind`` and of the structs it extends; they live in the source only."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(msgspec.Struct)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, note in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(note, ast.Expr):
                found[field.target.id] = inspect.cleandoc(ast.literal_eval(note.value))
    return found


class _Page(SwaggerRenderPlugin):
    """Swagger UI 4, which reads OpenAPI 3.0 but not the 3.1 that the document is written in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", **options)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """The page."""
        return super().render(request, as_openapi_3_0(openapi_schema) | {"openapi": "3.0.3"})


def as_openapi_3_0(schema: Any) -> Any:
    """``schema`` in the words of OpenAPI 3.0: ``nullable`` for a null type, ``enum`` for ``const``, flags for exclusive bounds."""
    if isinstance(schema, list):
        return [as_openapi_3_0(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: as_openapi_3_0(value) for key, value in schema.items()}
    if "const" in told:
        told["enum"] = [told.pop("const")]
    if isinstance(told.get("type"), list):
        told["oneOf"] = [as_openapi_3_0({"type": kind}) for kind in told.pop("type")]
    if told.get("type") == "null":
        told = {key: value for key, value in told.items() if key != "type"} | {"nullable": True}
    if {"nullable": True} in told.get("oneOf", []):
        told["oneOf"].remove({"nullable": True})
        told["nullable"] = True
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if exclusive in told:
            told |= {bound: told[exclusive], exclusive: True}
    return told
