"""helm/values.schema.json: the parts about keys and settings are made from the gateway's types, so that both accept the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.helm.chart import CHART
from yardstick_llm.gateway.keys import ApiKey
from yardstick_llm.gateway.settings import LISTS, Settings

OTHER_VALUES = (
    "engines",
    "engine_token_file",
    "api_keys_file",
    "api_keys_secret",
    "console",
    "host",
    "port",
    "drain_seconds",
    "grace_seconds",
    "presets",
    "aliases",
    "fallbacks",
    "image_hosts",
    "redis_url",
    "redis_password_file",
    "tracing_endpoint",
)
"""Settings that the chart sets from values of its own."""
TIME = (
    r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])[Tt ]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?"
    r"([Zz]|[+-]([01][0-9]|2[0-3]):?[0-5][0-9])$"
)
"""Times that msgspec accepts. Helm checks no formats; a template checks the days of months."""


def schema() -> str:
    """The file as it should be."""
    found = json.loads((CHART / "values.schema.json").read_text())
    found["properties"]["auth"]["properties"]["keys"]["items"] = key()
    found["properties"]["gateway"]["properties"]["settings"] = settings()
    return json.dumps(found, indent=2) + "\n"


def key() -> dict[str, Any]:
    made = msgspec.json.schema(ApiKey)["$defs"]["ApiKey"]
    fields = {name: plain(field) for name, field in made["properties"].items()}
    return {"type": "object", "required": made["required"], "additionalProperties": False, "properties": fields}


def settings() -> dict[str, Any]:
    """The schema of `gateway.settings`. Lists are texts there, as in the environment."""
    _, made = msgspec.json.schema_components([Settings], schema_hook={Path: {"type": "string"}}.get)
    fields = {name: plain(field) for name, field in made["Settings"]["properties"].items() if name not in OTHER_VALUES}
    for name, field in fields.items():
        if name in LISTS:
            fields[name] = {"type": "string"}
        elif isinstance(field.get("type"), list):  # a setting without a value is left out
            field["type"] = field["type"][0]
    return {"type": "object", "additionalProperties": False, "properties": fields}


def plain(field: dict[str, Any]) -> dict[str, Any]:
    """``field`` without documentation, and without `anyOf`, with which Helm's messages do not say what is wrong."""
    if "anyOf" in field:
        (kind,) = [choice for choice in field["anyOf"] if choice != {"type": "null"}]
        return plain(kind) | {"type": [kind["type"], "null"]}
    if field.get("format") == "date-time":
        return {"type": "string", "pattern": TIME}
    return {name: value for name, value in field.items() if name not in ("default", "description")}
