"""``/v1/responses``: create, stream, store, retrieve, list and delete, before a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, ids
from tests.gateway.answers import rendered
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import by, entry, write
from yardstick_llm.engine import wire

PATH = "/v1/responses"
ASK = {"input": "The fox", "seed": 5, "max_output_tokens": 8}


def create(client: httpx.Client, status: int = 200, key: str = "", **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={**ASK, **body}, headers=by(key) if key else {})
    assert answer.status_code == status, answer.text
    return answer.json()


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events; their names are their types, and their numbers count from 0."""
    answer = client.post(PATH, json={**ASK, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def turns(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def stable(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what differs between equal requests."""
    body = body | dict.fromkeys(("id", "created_at", "completed_at"))
    return body | {"output": [item | {"id": None} for item in body["output"]]}


def test_a_response(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("red running")
    told = create(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert rendered(engine) == turns(("system", "Be brief."), ("user", "The fox"))
    (message,) = told["output"]
    assert told["id"].startswith("resp_")
    assert message["id"].startswith("msg_")
    assert message["content"] == [{"type": "output_text", "text": "red running", "annotations": [], "logprobs": []}]
    assert (message["role"], message["status"], told["status"]) == ("assistant", "completed", "completed")
    assert (told["instructions"], told["metadata"], told["temperature"]) == ("Be brief.", {"a": "b"}, 0.5)
    assert (told["store"], told["truncation"], told["tool_choice"], told["model"]) == (False, "disabled", "auto", "fake")
    prompt, output = len(engine.generates[-1].prompt), len(engine.says) + 1
    assert told["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


def test_a_response_that_reaches_its_limit_is_incomplete(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("red running shoes, blue table")
    told = create(client, max_output_tokens=2)
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert told["output"][0]["status"] == "incomplete"
    assert stream(client, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_items_become_messages(client: httpx.Client, engine: FakeEngine) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c"}],
        },
        {"role": "user", "content": "d"},
    ]
    create(client, input=items)
    assert rendered(engine) == turns(("system", "Be brief."), ("user", "a\nb"), ("assistant", "c"), ("user", "d"))


def test_a_stream_tells_the_whole_response(client: httpx.Client, engine: FakeEngine) -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, events = create(client, **body), stream(client, **body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole["status"]]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert stable(events[-1]["response"]) == stable(whole)
    (message,) = events[-1]["response"]["output"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert {(event["item_id"], event["output_index"], event["content_index"]) for event in deltas} == {(message["id"], 0, 0)}
    text = message["content"][0]["text"]
    assert "".join(event["delta"] for event in deltas) == text
    logprobs = message["content"][0]["logprobs"]
    assert [entry for event in deltas for entry in event["logprobs"]] == logprobs
    assert len(logprobs) == 8
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    assert events[-4]["text"] == events[-3]["part"]["text"] == events[-2]["item"]["content"][0]["text"] == text
    assert events[0]["response"]["output"] == []
    assert (events[0]["response"]["status"], events[0]["response"]["usage"]) == ("in_progress", None)


def test_a_chat_with_the_same_messages_has_the_same_answer(client: httpx.Client, engine: FakeEngine) -> None:
    told = create(client, temperature=0.7, top_k=20)
    body = {"messages": [{"role": "user", "content": "The fox"}], "seed": 5, "max_tokens": 8, "temperature": 0.7, "top_k": 20}
    said = client.post("/v1/chat/completions", json=body).json()
    assert told["output"][0]["content"][0]["text"] == said["choices"][0]["message"]["content"]
    first, second = engine.generates
    assert (first.prompt, first.sampling) == (second.prompt, second.sampling)


def test_a_broken_stream_ends_with_a_failed_response(client: httpx.Client, engine: FakeEngine) -> None:
    before = metric(client, 'yardstick_broken_streams_total{code="internal_error",model="fake"}')
    engine.faults.fail_after = 3
    last = stream(client, store=True)[-1]
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
    assert last["response"]["store"] is False
    assert metric(client, 'yardstick_broken_streams_total{code="internal_error",model="fake"}') == before + 1
    engine.faults.fail_after = None
    engine.faults.fail = wire.Failed("", "overloaded", "full")
    assert client.post(PATH, json=ASK | {"stream": True}).status_code == 429


def test_a_conversation_goes_on_from_a_stored_response(client: httpx.Client, engine: FakeEngine) -> None:
    engine.says = ids("red")
    first = create(client, store=True, instructions="Be brief.")
    assert first["store"] is True
    second = stream(client, store=True, previous_response_id=first["id"], input=[{"role": "user", "content": "b"}])[-1]["response"]
    assert rendered(engine) == turns(("user", "The fox"), ("assistant", "red"), ("user", "b"))
    assert second["previous_response_id"] == first["id"]
    assert client.delete(f"{PATH}/{first['id']}").json() == {"id": first["id"], "object": "response", "deleted": True}
    create(client, previous_response_id=second["id"], input="c")
    assert rendered(engine) == turns(("user", "The fox"), ("assistant", "red"), ("user", "b"), ("assistant", "red"), ("user", "c"))
    gone = create(client, 404, previous_response_id=first["id"])["error"]
    assert (gone["code"], gone["param"]) == ("response_not_found", "previous_response_id")


def test_stored_responses_are_retrieved_listed_and_deleted(client: httpx.Client, engine: FakeEngine) -> None:
    told = create(client, store=True, input=[{"role": "user", "content": text} for text in "abc"])
    path = f"{PATH}/{told['id']}"
    assert client.get(path).json() == told
    page = client.get(f"{path}/input_items", params={"limit": 2}).json()
    assert [item["content"] for item in page["data"]] == ["c", "b"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, page["data"][0]["id"], page["data"][1]["id"])
    rest = client.get(f"{path}/input_items", params={"limit": 2, "after": page["last_id"]}).json()
    assert ([item["content"] for item in rest["data"]], rest["has_more"]) == (["a"], False)
    forward = client.get(f"{path}/input_items", params={"order": "asc"}).json()
    assert [item["content"] for item in forward["data"]] == ["a", "b", "c"]
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_other"}, {"limit": "many"}):
        assert client.get(f"{path}/input_items", params=query).status_code == 400
    assert client.get(path, params={"stream": "true"}).status_code == 400
    assert client.delete(path).status_code == 200
    for answer in (client.get(path), client.delete(path), client.get(f"{path}/input_items")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    hidden = client.post(PATH, json=ASK | {"store": True}, headers={"cache-control": "no-store"})
    assert (hidden.status_code, hidden.json()["error"]["param"]) == (400, "store")
    unstored = create(client)
    assert client.get(f"{PATH}/{unstored['id']}").status_code == 404
    assert client.get(f"{PATH}/{'x' * 5000}").status_code == 404


def test_another_key_does_not_see_a_response(start: Start, tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", entry("one"), entry("two", requests_per_minute=4))
    client = start(FakeEngine(), api_keys_file=keys)
    path = f"{PATH}/{create(client, key='one', store=True)['id']}"
    assert client.get(path).status_code == 401
    assert client.get(path, headers=by("one")).status_code == 200
    assert client.get(path, headers=by("two")).status_code == 404
    assert client.delete(path, headers=by("two")).status_code == 404
    mine = f"{PATH}/{create(client, key='two', store=True)['id']}"
    assert client.get(mine, headers=by("two")).status_code == 200
    limited = client.get(mine, headers=by("two"))
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert client.get(path, headers=by("one")).status_code == 200


def test_the_store_may_be_off_and_has_bounds(start: Start) -> None:
    engine = FakeEngine()
    off = start(engine, stored_responses_bytes=0)
    assert create(off, 400, store=True)["error"]["param"] == "store"
    assert create(off, 404, previous_response_id="resp_" + "0" * 32)["error"]["code"] == "response_not_found"
    small = start(stored_responses=2, stored_response_bytes=600, engines=(engine.url,), wait=False)
    create(off)
    while small.get("/readyz").status_code != 200:
        pass
    assert create(small, 400, store=True, input="a " * 400)["error"]["param"] == "store"
    assert create(small, 400, store=True, instructions="a " * 400)["error"]["param"] == "store"
    told = [create(small, store=True)["id"] for _ in range(3)]
    assert [small.get(f"{PATH}/{id}").status_code for id in told] == [404, 200, 200]


def test_truncation_leaves_out_the_oldest_items(client: httpx.Client, engine: FakeEngine) -> None:
    items = [{"role": "user" if place % 2 == 0 else "assistant", "content": f"{place}: " + "fox " * 100} for place in range(21)]
    refused = create(client, 400, input=items)["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")
    answer = client.post(PATH, json=ASK | {"input": items, "truncation": "auto", "instructions": "Be brief."})
    assert answer.status_code == 200, answer.text
    told = rendered(engine)
    assert told.startswith("<|im_start|>system\nBe brief.")
    left_out = int(answer.headers["x-yardstick-truncated"])
    assert 0 < left_out < 20
    assert f"\n{left_out}: fox" in told
    assert f"\n{left_out - 1}: fox" not in told
    assert "\n20: fox" in told
    one_more = create(client, 400, input=items[-1]["content"] * 30, truncation="auto")["error"]
    assert one_more["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
        ({"input": "a", "instructions": "b " * 3000}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["web_search_call.action.sources"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": "b" * 513}}, "metadata[...]"),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"previous_response_id": "resp_1:2"}, "previous_response_id"),
        ({"messages": []}, "messages"),
    ],
)
def test_wrong_requests(shared: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = shared.post(PATH, json=ASK | body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param
