"""No request gets a 5xx response, and every error has OpenAI's format. Requests follow the server's own OpenAPI document."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from yardstick_llm.gateway.app import create_app
from yardstick_llm.gateway.settings import Settings

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.integers(-3, 400)
    | st.floats()
    | st.floats(0, 2)
    | st.text(max_size=12)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
texts = st.text(max_size=20) | st.sampled_from([" Yes", "🦊", "\0", "<|im_end|>", "\u202e", "e\u0301"])
integers = st.integers(-2, 6) | st.integers(-1, 340)
few = st.integers(0, 6)
constraints = st.sampled_from(
    [{}, {"type": "integer"}, {"not": {}}, True, "[ab]+", "(a", "a{3}", 'start: "a"', 'root ::= "a"', "start: a"]
)
NAMED: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "other", None]),
    "labels": st.lists(st.sampled_from([" Yes", " No", "a", "zz"]), max_size=3),
    "schema": constraints,
    "definition": constraints,
    "tool_choice": st.sampled_from(["none", "auto", "required", "any"]),
    "logit_bias": st.dictionaries(st.integers(-1, 340).map(str), st.floats(-110, 110), max_size=3),
    "previous_response_id": st.sampled_from(["resp_" + "0" * 32, "resp_1", ""]),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "json", "regex"), constraints),
}
"""Values of fields that the document does not describe closely enough to be right by chance."""
SHORT = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}
"""Fields that keep answers short."""


@cache
def document() -> dict[str, Any]:
    return create_app(Settings(engines=("http://127.0.0.1:1",))).openapi_schema.to_schema()


@cache
def operations() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The schema of the body, and an example, by the path of each operation that takes one by POST."""
    found = {}
    for path, methods in document()["paths"].items():
        if "requestBody" in methods.get("post", {}) and "{" not in path:
            content = methods["post"]["requestBody"]["content"]["application/json"]
            found[path] = (resolved(content["schema"]), content["example"])
    return found


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document()["components"]["schemas"][name] if name else schema


@st.composite
def values(draw: st.DrawFn, schema: dict[str, Any], depth: int = 0) -> Any:
    """A value as ``schema`` describes it; numbers may be out of its bounds."""
    schema = resolved(schema)
    if "oneOf" in schema:
        return draw(values(draw(st.sampled_from(schema["oneOf"])), depth))
    if "enum" in schema or "const" in schema:
        return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
    match schema.get("type"):
        case "array":
            size = draw(st.integers(0, 4 if depth < 3 else 1))
            return [draw(values(schema.get("items", {}), depth + 1)) for _ in range(size)]
        case "object" if "properties" in schema:
            return draw(bodies(schema, {}, depth + 1))
        case kind:
            simple = {
                "integer": integers,
                "number": st.floats(-60, 60) | st.floats(0, 1),
                "string": texts,
                "boolean": st.booleans(),
            }
            return draw(simple.get(str(kind), st.none() if kind == "null" else anything))


@st.composite
def bodies(draw: st.DrawFn, schema: dict[str, Any], begun: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """``begun``, the required fields that it lacks, and some others."""
    fields = schema["properties"]
    optional = draw(st.lists(st.sampled_from(sorted(fields)), max_size=5 if depth == 0 else 2, unique=True))
    body = dict(begun)
    for name in dict.fromkeys([*optional, *schema.get("required", ())] if depth else optional):
        body[name] = draw(NAMED[name] if name in NAMED else values(fields[name], depth + 1))
    return body


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: nearly right, with some field replaced or added, or plain bytes."""
    path = draw(st.sampled_from(sorted(operations())))
    schema, example = operations()[path]
    example = {name: value for name, value in example.items() if draw(st.integers(0, 9))} | {"model": "fake"}
    body = draw(bodies(schema, example))
    if path in SHORT:
        body[SHORT[path]] = draw(few)
    if draw(st.integers(0, 2)) == 0:
        body[draw(st.sampled_from(sorted(schema["properties"])) | st.text(max_size=8))] = draw(anything)
    encoded = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(encoded)))
        encoded = encoded[:place] + draw(st.binary(max_size=4)) + encoded[place + draw(st.integers(0, 3)) :]
    return path, encoded


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_no_request_breaks_the_server(shared: httpx.Client, request_: tuple[str, bytes]) -> None:
    path, body = request_
    answer = shared.post(path, content=body)
    allowed = (200, 400, 404, 504) if b'"timeout"' in body else (200, 400, 404)
    assert answer.status_code in allowed, (answer.status_code, path, body, answer.text)
    assert answer.headers["x-request-id"]
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2]
        ends = ("data: [DONE]", "event: response.completed\n", "event: response.incomplete\n")
        assert last.startswith(ends), answer.text
    else:
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
