"""The conformance table of docs/api.md, tried cell by cell against a running server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest

from tests import templates
from tests.docs.conformance import FORMS, KINDS, Cell, declared, table
from tests.docs.generate import PAGE
from tests.fakes import FakeEngine
from tests.gateway.conftest import gateways
from tests.gateway.schemas.test_parameters import BODIES, PATHS
from yardstick_llm.gateway.http.context import MAX_NAMES
from yardstick_llm.gateway.schemas.parameters import ALL, IGNORED, REFUSED, EndpointName

TEXT = PAGE.read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

VALUES: dict[str, Any] = {
    "allowed_token_ids": [5, 6],
    "catalogue": "c",
    "timeout": 60,
    "chat_template_kwargs": {"a": 1},
    "custom_params": {"value_scale": 1.0},
    "echo": True,
    **dict.fromkeys(("ebnf", "grammar", "guided_grammar"), 'root ::= "a"'),
    **dict.fromkeys(("guided_json", "json_schema"), SCHEMA),
    **dict.fromkeys(("guided_regex", "regex"), "a+"),
    "guided_choice": ["a", "b"],
    "include": ["message.output_text.logprobs"],
    "label_token_ids": [1],
    "labels": [" Yes"],
    "length_guidance": {"scale": 1.0},
    "logit_bias": {"5": 1.0},
    "max_output_tokens": 2,
    "max_tokens_per_doc": 5,
    "max_tokens_per_query": 5,
    "messages": MESSAGES,
    "metadata": {"a": "b"},
    "prompt_lookup": {"max_tokens": 4},
    "reasoning": {"effort": "low"},
    "thinking": {"type": "disabled"},
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "stop": ["x"],
    "structured_outputs": {"regex": "a+"},
    "stream_options": {"include_usage": True},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [TOOL],
    "truncate_prompt_tokens": 500,
    "truncation": "auto",
}
"""A valid value of each parameter that works and that :func:`plain` does not find."""
VALUES_AT: dict[tuple[str, EndpointName], Any] = {
    ("best_of", "completions"): 2,
    ("documents", "score"): ["b"],
    ("input", "classify"): "a",
    ("input", "embeddings"): "a",
    ("input", "length"): "a",
    ("input", "responses"): "a",
    ("items", "score"): [[2]],
    ("label_token_ids", "score"): [1],
    ("logprobs", "completions"): 1,
    ("model", "classify"): "head",
    ("model", "embeddings"): "embedder",
    ("embedding_type", "embeddings"): "multi",
    ("prompt", "completions"): "a",
    ("prompt", "embeddings"): "a",
    ("prompt_name", "embeddings"): "query",
    ("prompt", "length"): "a",
    ("prompt", "tokenize"): "a",
    ("query", "rerank"): "a",
    ("query", "score"): [1],
    ("tokens", "detokenize"): [5],
    ("top_logprobs", "chat"): 2,
    ("top_logprobs", "responses"): 2,
    ("tools", "responses"): [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
}
_CUSTOM = {"name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}}
_CHAT_CUSTOM = {"name": "c", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}}
_ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
FORM_VALUES: dict[tuple[str, EndpointName], Any] = {
    ("tool_choice: allowed_tools", "chat"): {"type": "allowed_tools", "allowed_tools": _ALLOWED},
    ("tool_choice: allowed_tools", "responses"): {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "f"}],
    },
    ("tools: custom", "chat"): [{"type": "custom", "custom": _CHAT_CUSTOM}],
    ("tools: custom", "responses"): [{"type": "custom"} | _CUSTOM],
}
"""The values that have rows of their own."""
WITH: dict[tuple[str, EndpointName], dict[str, Any]] = {
    ("stream_options", "completions"): {"stream": True},
    ("stream_options", "chat"): {"stream": True},
    ("top_logprobs", "chat"): {"logprobs": True},
    ("top_logprobs", "responses"): {"include": ["message.output_text.logprobs"]},
    ("previous_response_id", "responses"): {},
    ("tool_choice", "chat"): {"tools": [TOOL]},
    ("tool_choice", "responses"): {"tools": [VALUES_AT["tools", "responses"][0]]},
}
"""Other parameters that one needs."""
LIKELIHOOD = {"model": "fake", "query": [1], "items": [[2]], "readout": "likelihood"}
OF_CATALOGUE = {"model": "fake", "query": "a", "catalogue": "c", "ids": ["a"]}
PAIR = {"model": "fake", "text_1": "a", "text_2": ["b"]}
INSTEAD: dict[tuple[str, EndpointName], dict[str, Any]] = {
    **{
        (name, "score"): PAIR
        for name in (
            *("text_1", "text_2", "truncate", "truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query"),
            *("truncation_direction", "truncation_side", "instruction", "instruct"),
            *("raw_scores", "use_activation", "activation", "softmax"),
        )
    },
    **{(name, endpoint): OF_CATALOGUE for endpoint in ("score", "rerank") for name in ("catalogue", "ids")},
    ("top_n", "score"): OF_CATALOGUE,
    ("readout", "score"): LIKELIHOOD,
    ("return_token_logprobs", "score"): LIKELIHOOD,
    ("queries", "score"): {"model": "fake", "queries": "a", "documents": ["b"]},
    ("documents", "score"): {"model": "fake", "queries": "a", "documents": ["b"]},
    **{(name, "score"): {"model": "fake", "data_1": "a", "data_2": ["b"]} for name in ("data_1", "data_2")},
    ("labels", "score"): {"model": "fake", "query": "a", "items": ["b"]},
    ("texts", "rerank"): {"model": "fake", "query": "a", "texts": ["b"]},
    ("passages", "rerank"): {"model": "fake", "query": "a", "passages": ["b"]},
    ("return_text", "rerank"): {"model": "fake", "query": "a", "texts": ["b"]},
    ("inputs", "embeddings"): {"model": "embedder", "inputs": "a"},
    ("prompt", "tokenize"): {"model": "fake", "prompt": "a"},
    ("prompt", "length"): {"model": "fake", "prompt": "a"},
    ("partial", "length"): {"model": "fake", "prompt": "a", "partial": "b"},
    ("messages", "length"): {"model": "fake", "messages": MESSAGES},
    ("chat_template_kwargs", "length"): {"model": "fake", "messages": MESSAGES},
}
"""Requests in another form, for parameters that the usual one does not have."""


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """A client of a gateway before three models, which serve all endpoints together."""
    head = FakeEngine(model="head", fingerprint="head", capabilities=("classify",), classes=("a", "b"))
    preset = 'name = "own"\ntask = "embed"\ntemplate = ["{document}"]\ninstructed = ["{instruction}: {document}"]'
    embedder = FakeEngine(
        model="embedder",
        fingerprint="embedder",
        capabilities=("embed", "token_vectors"),
        embedding_size=4,
        token_vector_size=4,
        preset=preset,
    )
    able = (*FakeEngine.capabilities, "grammar")
    template = "{{ reasoning_effort }}" + templates.THINKING
    with gateways() as start:
        client = start(FakeEngine(template=template, capabilities=able, added=("<think>", "</think>")), head, embedder)
        client.put("/v1/catalogues/c", json={"model": "fake", "labels": [" Yes", " No"]}).raise_for_status()
        client.put("/v1/catalogues/c/items", json=[{"id": "a", "text": "b"}]).raise_for_status()
        yield client


def shown() -> dict[str, dict[EndpointName, Cell]]:
    (part,) = re.findall(r"<!-- conformance: .*?-->\n(.*?)<!-- end -->", TEXT, flags=re.DOTALL)
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in part.strip().splitlines())
    assert tuple(head[1:]) == ALL
    return {name.strip("`"): {at: cell for at, cell in zip(ALL, cells, strict=True) if cell != "–"} for name, *cells in rows}


def ask(server: httpx.Client, name: str, endpoint: EndpointName, value: Any) -> httpx.Response:
    body = INSTEAD.get((name, endpoint), BODIES[endpoint]) | WITH.get((name, endpoint), {})
    return server.post(f"/v1/{PATHS[endpoint]}", json=body | {name: value})


def ignored(answer: httpx.Response) -> list[str]:
    return answer.headers.get("x-yardstick-ignored", "").split(", ")


@cache
def schemas(server: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/schema/openapi.json").json()["components"]["schemas"]
    return found


def plain(schema: dict[str, Any]) -> Any:
    """A value that fits a field of the OpenAPI document: the first of an enumeration, or a small number or text."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("oneOf", [schema])[0]
    if kind.get("type") == "array":
        return [plain(kind["items"])]
    return {"integer": 1, "number": 0.5, "string": "a"}.get(kind.get("type"), True)


def works(server: httpx.Client, name: str, endpoint: EndpointName) -> str:
    """Return the error of a cell that claims support; empty if the claim is right."""
    given = INSTEAD.get((name, endpoint), BODIES[endpoint])
    if name in FORMS:
        answer = ask(server, name.partition(":")[0], endpoint, FORM_VALUES[name, endpoint])
        return "" if answer.status_code == 200 else answer.text
    simple = plain(schemas(server)[KINDS[endpoint].__name__]["properties"].get(name, {}))
    value = VALUES_AT.get((name, endpoint), VALUES.get(name, given.get(name, simple)))
    if name == "previous_response_id":
        value = server.post("/v1/responses", json=BODIES["responses"] | {"store": True}).json()["id"]
    answer = ask(server, name, endpoint, value)
    if answer.status_code != 200:
        return answer.text
    return f"{value!r} is ignored" if name in ignored(answer) else ""


def refused(server: httpx.Client, name: str, endpoint: EndpointName) -> str:
    (row,) = (row for row in REFUSED if row.name == name and endpoint in row.endpoints)
    answer = ask(server, name, endpoint, ["other", "values"])
    error = answer.json().get("error", {})
    if answer.status_code != 400 or error["param"] != name or error["message"] != row.message:
        return answer.text
    for value in (None, *row.accepts):
        accepted = ask(server, name, endpoint, value)
        if accepted.status_code != 200 or name in ignored(accepted):
            return f"{value!r}: {accepted.text}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ALL)
def test_every_cell_is_true(server: httpx.Client, endpoint: EndpointName) -> None:
    checks = {"works": works, "refused": refused}
    problems, unused = {}, []
    for name, cells in shown().items():
        if check := checks.get(cells.get(endpoint, "")):
            if problem := check(server, name, endpoint):
                problems[name] = f"{cells[endpoint]}: {problem}"
        elif name not in FORMS:
            unused.append(name)
    assert not problems
    for some in batched(unused, MAX_NAMES):
        body = BODIES[endpoint] | {name: {"any": ["value"]} for name in some}
        answer = server.post(f"/v1/{PATHS[endpoint]}", json=body)
        assert answer.status_code == 200, answer.text
        assert set(some) <= set(ignored(answer))


def batched(names: list[str], count: int) -> Iterator[list[str]]:
    for start in range(0, len(names), count):
        yield names[start : start + count]


def test_the_table_has_every_parameter() -> None:
    assert shown() == table()
    names = {row.name for row in (*REFUSED, *IGNORED)}.union(*(declared(endpoint) for endpoint in ALL))
    assert set(shown()) == names | set(FORMS)
