"""The OpenAPI document, from structs and their docstrings, and a page that renders it without other servers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import SwaggerRenderPlugin
from litestar.openapi.spec import Components, OpenAPIResponse, Operation, Reference, RequestBody, Schema, SecurityScheme
from litestar.openapi.spec.enums import OpenAPIType
from litestar.openapi.spec.header import OpenAPIHeader
from litestar.openapi.spec.media_type import OpenAPIMediaType
from litestar.params import FromPath
from litestar.plugins import OpenAPISchemaPlugin
from litestar.typing import FieldDefinition
from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]

from yardstick_llm.gateway.errors import ErrorBody, NotFound
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest
from yardstick_llm.gateway.schemas.chat import ChatChunk, ChatCompletion
from yardstick_llm.gateway.schemas.responses import Event, ResponseBody
from yardstick_llm.tracing.version import project_version

PATH = "/schema"
_ASSETS = f"{PATH}/assets"
_MEDIA_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui-standalone-preset.js": "text/javascript",
    "swagger-ui.css": "text/css",
}


def openapi_config() -> OpenAPIConfig:
    """Return the configuration of the document at ``/schema/openapi.json`` and of the page at ``/schema``."""
    page = _Page(
        js_url=f"{_ASSETS}/swagger-ui-bundle.js",
        css_url=f"{_ASSETS}/swagger-ui.css",
        standalone_preset_js_url=f"{_ASSETS}/swagger-ui-standalone-preset.js",
        favicon="",
    )
    return OpenAPIConfig(
        title="Yardstick",
        version=project_version(),
        description="Scores lists of items with a language model, and generates text. Compatible with OpenAI's API.",
        path=PATH,
        render_plugins=[page],
        use_handler_docstrings=True,
        components=Components(security_schemes={"key": SecurityScheme(type="http", scheme="bearer", description="An API key.")}),
    )


def _error(description: str) -> ResponseSpec:
    return ResponseSpec(ErrorBody, generate_examples=False, description=description)


READ_ERRORS: dict[int, ResponseSpec] = {
    400: _error("The request is invalid; `param` names the field."),
    401: _error("No valid API key was sent."),
    403: _error("A server without keys got a request from another site (`Host` or `Origin`)."),
    404: _error("The model does not exist, or this key may not use it."),
    429: _error("The server is overloaded, or a limit of the key is reached."),
    431: _error("The headers are too large."),
    500: _error("A fault of the server; quote the `x-request-id` when you report it."),
    503: _error("No engine of the model is ready, or it is out of memory."),
}
"""Error responses of every endpoint that needs a key."""
ERRORS: dict[int, ResponseSpec] = READ_ERRORS | {
    408: _error("The body did not arrive in time."),
    413: _error("The body is too large."),
    415: _error("The body's content type or encoding is not supported."),
    502: _error("The engine was lost during the request."),
    504: _error("The engine sent nothing for too long."),
}
"""Error responses of every endpoint that takes a body."""
WRITE_ERRORS: dict[int, ResponseSpec] = READ_ERRORS | {
    403: _error("The key may not change catalogues, or a server without keys got a request from another site."),
    409: _error("A catalogue of this name has another form, or was made for another tokeniser."),
    413: _error("The body is too large, or there is no room for more items."),
}
"""Error responses of endpoints that change catalogues."""

KEY: list[dict[str, list[str]]] = [{"key": []}]
"""Security of endpoints that need an API key."""
NO_KEY: list[dict[str, list[str]]] = [*KEY, {}]
"""Security of the same endpoints on a server without a key file: a key may be sent, and is ignored."""

_STREAM = (
    "With `stream`: server-sent events, each `data: ` and one object. The last event is `data: [DONE]`. A stream that breaks ends"
    " with an event of the schema `ErrorBody` and without `[DONE]`."
)
_TYPED_STREAM = (
    "With `stream`: server-sent events, each `event: ` with its type and `data: ` with one object. The last event is"
    " `response.completed`, `response.incomplete` or, for a stream that breaks, `response.failed`."
)
_RESPONSE_EVENTS = get_args(Event)
_EVENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "ChatCompletion": (("ChatChunk",), _STREAM),
    "Completion": (("Completion",), _STREAM),
    "ResponseBody": (tuple(event.__name__ for event in _RESPONSE_EVENTS), _TYPED_STREAM),
}
"""Schemas of streamed events, and a description of the stream, by the schema of the answer without streaming."""
_RATES = {
    f"x-ratelimit-{what}-{rate}": f"{meaning} {rate}; only if the key has this limit."
    for rate in ("requests", "tokens", "items")
    for what, meaning in (
        ("limit", "Limit of the key per minute for"),
        ("remaining", "Remaining part of the limit for"),
        ("reset", "Time, such as `6m0s`, until the whole limit is available again for"),
    )
}
_SUCCESS_HEADERS = {"x-yardstick-ignored": "Fields of the request that were ignored; absent if there are none.", **_RATES}
_CACHE = {"x-yardstick-cache": "Results that were in the cache, of all results: `3/10`."}
_CUT = {"x-yardstick-truncated": "Number of texts that were cut; `2, query` if the query was cut too. Absent if none was."}
_PRESET = {
    "x-yardstick-preset-fallback": "Preset of a model that no preset is for, whose own prompt may differ; absent for other models.",
}
_GENERATION = {
    "x-yardstick-expected-tokens": "Output tokens that the length model expected of all sequences; absent without a forecast.",
    "x-yardstick-fallback": "Model that answered because the requested one has no ready engine; absent otherwise.",
    "x-yardstick-truncated": "Number of messages that `truncation` left out; absent if none was.",
}
_HEADERS_OF_TAG = {"scoring": _CACHE | _CUT | _PRESET, "length": _CACHE, "generation": _GENERATION}


_DESCRIBE = "Describe: red running shoes"
EXAMPLES: dict[str, object] = {
    "ScoreRequest": {
        "query": "Query: red running shoes\nItem: ",
        "items": ["crimson jogging sneakers\nRelevant:", "blue running shoes\nRelevant:"],
        "labels": [" Yes", " No"],
        "apply_softmax": True,
    },
    "RerankRequest": {"query": "red running shoes", "documents": ["blue running shoes", "crimson jogging sneakers"], "top_n": 1},
    "CatalogueRequest": {"template": "{item}\nQuestion: {query}", "labels": [" Yes", " No"]},
    "ItemsRequest": [{"id": "sku-1", "text": "Red running shoes"}, {"id": "sku-2", "text": "Oak table"}],
    "ClassifyRequest": {"input": ["red running shoes", "blue table"]},
    "EmbeddingsRequest": {"input": ["red running shoes", "blue table"]},
    "CohereEmbedRequest": {"texts": ["red running shoes", "blue table"], "input_type": "search_document"},
    "TeiRequest": {"inputs": "red running shoes"},
    "CompletionRequest": {"prompt": f"{_DESCRIBE}\n", "max_tokens": 30},
    "ChatRequest": {"messages": [{"role": "user", "content": _DESCRIBE}], "max_tokens": 30},
    "ResponseRequest": {"input": _DESCRIBE, "max_output_tokens": 30},
    "LengthRequest": {"input": f"{_DESCRIBE}\n"},
    "TokenizeRequest": {"prompt": "red running shoes"},
    "DetokenizeRequest": {"tokens": [5, 6, 7]},
    "LoadAdapterRequest": {"lora_name": "support", "lora_path": "support"},
    "UnloadAdapterRequest": {"lora_name": "support"},
}
"""An example of each body, by its schema. They name no model, so they are for a server of one model of the endpoint's kind."""


@dataclass
class ApiOperation(Operation):
    """An operation that needs a key, with an example of its body, its response headers and the events of its stream."""

    def __post_init__(self) -> None:
        """Complete the body and the responses that the framework found."""
        if isinstance(self.request_body, RequestBody):
            for content in self.request_body.content.values():
                assert isinstance(content.schema, Reference)
                content.example = self.example or EXAMPLES[content.schema.ref.rpartition("_")[2]]
        for status, response in (self.responses or {}).items():
            assert isinstance(response, OpenAPIResponse)
            headers = {"x-request-id": "Id of the request: the client's own, if it sent one."}
            if status == "200" and self.request_body is not None:
                headers |= _SUCCESS_HEADERS | _HEADERS_OF_TAG.get((self.tags or [""])[0], {})
                _describe_stream(response)
            elif status in ("429", "503"):
                headers |= {"retry-after": "Seconds to wait before another try; absent if waiting does not help."}
            response.headers = {name: _header(description) for name, description in headers.items()}

    @property
    def example(self) -> object:
        """An example of the body; None for that of its schema."""
        return None


def operation_with(example: object) -> type[ApiOperation]:
    """Return the class of an operation with ``example`` as the example of its body."""
    return type("ExampleOperation", (ApiOperation,), {"example": example})


def _header(description: str) -> OpenAPIHeader:
    return OpenAPIHeader(schema=Schema(type=OpenAPIType.STRING), description=description)


def _describe_stream(response: OpenAPIResponse) -> None:
    """Add the events if the answer may be a stream."""
    content = response.content or {}
    answer = content["application/json"].schema
    # references are shortened to the class's name once all are known
    found = _EVENTS.get(answer.ref.rpartition("_")[2]) if isinstance(answer, Reference) else None
    if found is not None:
        events, description = found
        references = [Reference(ref=f"#/components/schemas/{event}") for event in events]
        schema = references[0] if len(references) == 1 else Schema(one_of=references)
        response.content = {**content, "text/event-stream": OpenAPIMediaType(schema=schema)}
        response.description = f"The answer. {description}"


def asset_route() -> HTTPRouteHandler:
    """Return the route for the files that the page loads."""

    @get(f"{_ASSETS}/{{name:str}}", include_in_schema=False, sync_to_thread=True)
    def asset(name: FromPath[str]) -> Response[bytes]:
        """Serve one file of the page."""
        if name not in _MEDIA_TYPES:
            raise NotFound("There is no such file.")
        headers = {"cache-control": "max-age=86400"}
        return Response((swagger_ui_path / name).read_bytes(), media_type=_MEDIA_TYPES[name], headers=headers)

    return asset


class DocumentedStructs(OpenAPISchemaPlugin):
    """The framework's schemas of structs, with the docstrings of the class and of its attributes as descriptions."""

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        """Whether this is a struct, or the :class:`Body` of one."""
        return not field_definition.is_union and field_definition.is_subclass_of((msgspec.Struct, Body))

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: Any) -> Any:
        """Return the schema of one struct."""
        if field_definition.is_subclass_of(Body):
            return schema_creator.for_field_definition(field_definition.inner_types[0])
        others = (p for p in schema_creator.plugins if p is not self and isinstance(p, OpenAPISchemaPlugin))
        framework = next(p for p in others if p.is_plugin_supported_field(field_definition))
        schema: Schema = framework.to_openapi_schema(field_definition, schema_creator)
        # no handler returns these events, so their schemas are added here
        for event in {ChatCompletion: (ChatChunk,), ResponseBody: _RESPONSE_EVENTS}.get(field_definition.type_, ()):
            schema_creator.for_field_definition(FieldDefinition.from_annotation(event))
        schema.description = inspect.getdoc(field_definition.type_)
        for name, description in attribute_docstrings(field_definition.type_).items():
            described = (schema.properties or {}).get(name)
            if isinstance(described, Schema):
                described.description = description
        return schema


@cache
def attribute_docstrings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the string below each attribute of ``kind`` and of its base structs; these strings exist only in the source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(msgspec.Struct)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, note in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(note, ast.Expr):
                found[field.target.id] = inspect.cleandoc(ast.literal_eval(note.value))
    return found


class _Page(SwaggerRenderPlugin):
    """Swagger UI 4, which reads OpenAPI 3.0 but not 3.1, the version of the document."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", **options)

    def render(self, request: AnyRequest, openapi_schema: dict[str, Any]) -> bytes:
        """Render the page."""
        return super().render(request, as_openapi_3_0(openapi_schema) | {"openapi": "3.0.3"})


def as_openapi_3_0(schema: Any) -> Any:
    """Convert ``schema`` to OpenAPI 3.0: ``nullable`` for a null type, ``enum`` for ``const``, flags for exclusive bounds."""
    if isinstance(schema, list):
        return [as_openapi_3_0(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {key: as_openapi_3_0(value) for key, value in schema.items()}
    if "const" in converted:
        converted["enum"] = [converted.pop("const")]
    if isinstance(converted.get("type"), list):
        converted["oneOf"] = [as_openapi_3_0({"type": kind}) for kind in converted.pop("type")]
    if converted.get("type") == "null":
        converted = {key: value for key, value in converted.items() if key != "type"} | {"nullable": True}
    if {"nullable": True} in converted.get("oneOf", []):
        converted["oneOf"].remove({"nullable": True})
        converted["nullable"] = True
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if exclusive in converted:
            converted |= {bound: converted[exclusive], exclusive: True}
    return converted
