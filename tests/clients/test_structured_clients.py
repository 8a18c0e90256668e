"""Published clients parse constrained answers of chat completions and responses."""

from __future__ import annotations

import pytest

from tests.clients.environments import run_client
from tests.processes import Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_openai_sdk_for_node_with_zod(demo: Program) -> None:
    printed = run_client("node_structured.mjs", demo.url, "yardstick-demo")
    for shoe in (printed["chat"], printed["response"]):
        assert shoe["colour"] in ("red", "blue")
        assert 30 <= shoe["size"] <= 50
        assert isinstance(shoe["laces"], bool)
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(printed["events"])
