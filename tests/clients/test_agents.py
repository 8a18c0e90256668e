"""Tool loops of the OpenAI Agents SDK over ``/v1/responses``, and of the OpenAI SDK for Node.js over both, and its parser.

The demo model calls no tools, so an engine says what the test chooses: a call first, and then an answer. Gateway, sockets and SDK
are real.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests import templates
from tests.clients.environments import run_client, run_together
from tests.fakes import FakeEngine, ids, library
from tests.gateway.conftest import gateways
from tests.processes import Program
from yardstick_llm.engine import wire

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ANSWER = "It is warm in Zürich."
KINDS = ["tool_call_item", "tool_call_output_item", "message_output_item"]


def speaks(engine: FakeEngine) -> None:
    """Let ``engine`` call the tool, and answer when the prompt has the tool's output."""

    class Requests(list[wire.Generate]):
        def append(self, request: wire.Generate) -> None:
            super().append(request)
            told = library().decode(request.prompt, skip_special_tokens=False)
            engine.says = ids(ANSWER if "It is 22 degrees in Zürich." in told else CALL)

    engine.generates = Requests()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeEngine, httpx.Client]]:
    engine = FakeEngine(model="caller", template=templates.HERMES, capabilities=(*FakeEngine.capabilities, "grammar"))
    speaks(engine)
    with gateways() as start:
        yield engine, start(engine)


def url(client: httpx.Client) -> str:
    return f"{client.base_url}".rstrip("/") + "/v1"


def test_tool_loops(server: tuple[FakeEngine, httpx.Client]) -> None:
    """One over stored responses is streamed, and one ends in a single answer."""
    engine, client = server
    given = (url(client), engine.model)
    streamed, whole = run_together("python", ("agents_stream.py", *given), ("agents_loop.py", *given))
    assert streamed == {"answer": ANSWER, "streamed": ANSWER, "kinds": KINDS}
    assert whole == {"answer": ANSWER, "kinds": KINDS, "requests": 2}
    assert "Be brief." in library().decode(engine.generates[-1].prompt)


def test_tool_loops_of_the_sdk_for_node(server: tuple[FakeEngine, httpx.Client]) -> None:
    engine, client = server
    told = run_client("node_tools.mjs", url(client), engine.model)
    assert told["chat"] == {"answer": ANSWER, "streamed": ANSWER, "calls": 1}
    assert told["response"] == ANSWER
    assert told["kinds"] == ["user", "function_call", "function_call_output"]
    names = {f"response.function_call_arguments.{kind}" for kind in ("delta", "done")}
    assert names | {"response.completed"} <= {*told["events"]}


def test_the_sdk_for_node_parses_constrained_answers(demo: Program) -> None:
    printed = run_client("node_structured.mjs", demo.url, "yardstick-demo")
    for shoe in (printed["chat"], printed["response"]):
        assert shoe["colour"] in ("red", "blue")
        assert 30 <= shoe["size"] <= 50
        assert isinstance(shoe["laces"], bool)
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(printed["events"])
