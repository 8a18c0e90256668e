"""helm/values.schema.json, whose parts about keys are made from the gateway's own types, so that both accept the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tests.helm.chart import CHART
from yardstick_llm.gateway.keys import ApiKey

TIME = (
    r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])[Tt ]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?"
    r"([Zz]|[+-]([01][0-9]|2[0-3]):?[0-5][0-9])$"
)
"""Times that msgspec accepts. Helm checks no formats; a template checks the days of months."""


def schema() -> str:
    """The file as it should be."""
    found = json.loads((CHART / "values.schema.json").read_text())
    found["properties"]["auth"]["properties"]["keys"]["items"] = key()
    return json.dumps(found, indent=2) + "\n"


def key() -> dict[str, Any]:
    """The schema of an entry of ``auth.keys``."""
    made = msgspec.json.schema(ApiKey)["$defs"]["ApiKey"]
    fields = {name: plain(field) for name, field in made["properties"].items()}
    return {"type": "object", "required": made["required"], "additionalProperties": False, "properties": fields}


def plain(field: dict[str, Any]) -> dict[str, Any]:
    """``field`` without documentation, and without `anyOf`, with which Helm's messages do not say what is wrong."""
    if "anyOf" in field:
        (kind,) = [choice for choice in field["anyOf"] if choice != {"type": "null"}]
        return plain(kind) | {"type": [kind["type"], "null"]}
    if field.get("format") == "date-time":
        return {"type": "string", "pattern": TIME}
    return {name: value for name, value in field.items() if name not in ("default", "description")}
