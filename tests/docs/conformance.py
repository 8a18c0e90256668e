"""The conformance table of docs/api.md: what each endpoint does with each parameter, derived from the schemas and tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import msgspec

from yardstick_llm.gateway.requests.worker import ENDPOINTS
from yardstick_llm.gateway.schemas.parameters import ALL, IGNORED, REFUSED, EndpointName

Cell = Literal["works", "refused", "ignored"]

KINDS = {endpoint.kind.endpoint: endpoint.kind for endpoint in ENDPOINTS.values()}
"""Struct of the request body of each endpoint."""


FORMS: dict[str, tuple[EndpointName, ...]] = {
    "tool_choice: allowed_tools": ("chat", "responses"),
    "tools: custom": ("chat", "responses"),
}
"""Values that have a row of their own: the parameter and the type of its value, with the endpoints that accept it."""


@cache
def declared(endpoint: EndpointName) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(KINDS[endpoint])}


def _cells() -> Iterator[tuple[str, EndpointName, Cell]]:
    for endpoint in ALL:
        for name in declared(endpoint):
            yield name, endpoint, "works"
    for name, endpoints in FORMS.items():
        for endpoint in endpoints:
            yield name, endpoint, "works"
    for cell, table in (("refused", REFUSED), ("ignored", IGNORED)):
        for row in table:
            for endpoint in row.endpoints:
                if row.name not in declared(endpoint):
                    yield row.name, endpoint, cell


def table() -> dict[str, dict[EndpointName, Cell]]:
    """Return the effect of each parameter on each endpoint, by the parameter's name. An endpoint is absent where the parameter has
    no meaning; there it is ignored like every unknown field."""
    found: dict[str, dict[EndpointName, Cell]] = {}
    for name, endpoint, cell in _cells():
        assert endpoint not in found.get(name, {}), f"{name} has one cell for {endpoint}"
        found.setdefault(name, {})[endpoint] = cell
    return found
