"""Short texts are read on the event loop, with the prompts and the errors that workers give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.handling import reader
from gateway.presets.select import builtin
from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, gateways, metric
from tests.gateway.text.test_metered_template import FILES

USER = {"role": "user", "content": " red shoes"}
SAYS = {"messages": [USER], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
READ = {
    "chat": ("chat/completions", SAYS),
    "turns": ("chat/completions", SAYS | {"messages": [USER, {"role": "assistant", "content": "Yes."}, USER]}),
    "parts": ("chat/completions", SAYS | {"messages": [{"role": "user", "content": [{"type": "text", "text": "red"}]}]}),
    "without thinking": ("chat/completions", SAYS | {"enable_thinking": False}),
    "variables": ("chat/completions", SAYS | {"chat_template_kwargs": {"enable_thinking": False}}),
    "continued": (
        "chat/completions",
        SAYS | {"messages": [USER, {"role": "assistant", "content": "Yes"}], "continue_final_message": True},
    ),
    "response": ("responses", {"input": " red shoes", "max_output_tokens": 16}),
    "items of a response": (
        "responses",
        {
            "input": [
                {"role": "user", "content": "red"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "blue"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "shoes"}]},
            ],
            "instructions": "Be brief.",
            "max_output_tokens": 16,
            "text": {"format": {"type": "text"}},
        },
    ),
    "completion": ("completions", {"prompt": "red shoes", "max_tokens": 1}),
    "prompts": ("completions", {"prompt": ["red", "blue table"], "max_tokens": 1, "echo": True}),
    "score": ("score", {"query": "Is it relevant? ", "items": ["red", "blue"], "labels": [" Yes", " No"]}),
    "items first": ("score", {"query": " Is it?", "items": ["red", "blue"], "labels": [" Yes"], "item_first": True}),
    "likelihood": ("score", {"query": "red", "items": [" shoes", " table"], "readout": "likelihood"}),
    "rerank": ("rerank", {"query": "Is it red?", "documents": ["red shoes", "", "blue"], "return_documents": True}),
    "rerank with an instruction": ("rerank", {"query": "red", "documents": ["blue"], "instruct": "Find red.", "truncate": True}),
    "rerank in part": ("rerank", {"query": "red", "documents": ["red", "blue"], "partial_results": True}),
    "one text with many": ("score", {"text_1": "Is it red?", "text_2": ["red shoes", "blue table"]}),
    "pairs": ("score", {"text_1": ["Is it red?", "Is it blue?"], "text_2": ["red shoes", "blue"], "instruction": "Find it."}),
}
"""Requests that the event loop reads."""
LEFT = {
    "emoji": ("chat/completions", SAYS | {"messages": [{"role": "user", "content": "red \U0001f98a"}]}),
    "control token": ("chat/completions", SAYS | {"messages": [{"role": "user", "content": "red<|im_end|>"}]}),
    "tools": ("chat/completions", SAYS | {"tools": [TOOL]}),
    "constraint": ("chat/completions", SAYS | {"response_format": {"type": "json_object"}}),
    "tools of a response": (
        "responses",
        {"input": " red", "max_output_tokens": 16, "tools": [{"type": "function", "name": "find", "parameters": {}}]},
    ),
    "truncated response": ("responses", {"input": " red shoes", "max_output_tokens": 16, "truncation": "auto"}),
    "constraints of a response": (
        "responses",
        {
            "input": " red",
            "max_output_tokens": 16,
            "text": {"format": {"type": "json_object"}},
            "response_format": {"type": "json_object"},
        },
    ),
    "words": ("completions", {"prompt": "red", "bad_words": ["blue"], "max_tokens": 1}),
    "long": ("completions", {"prompt": "red shoes " * 600, "max_tokens": 1}),
    "too long": ("completions", {"prompt": "a b " * 900, "max_tokens": 2000}),
    "empty": ("score", {"query": "", "items": [""], "labels": [" Yes"]}),
    "label": ("score", {"query": "red", "items": ["blue"], "labels": ["relevant or not"]}),
    "last message": ("chat/completions", SAYS | {"messages": [{"role": "user", "content": ""}], "continue_final_message": True}),
    "variable": ("chat/completions", SAYS | {"chat_template_kwargs": {"messages": []}}),
    "control token of a document": ("rerank", {"query": "red", "documents": ["red", "<|im_end|>"]}),
    "cut document": ("rerank", {"query": "red", "documents": ["red shoes or a blue table"], "max_tokens_per_doc": 2}),
    "document that is too long": ("rerank", {"query": "red", "documents": ["red", "a b " * 900]}),
    "document that is left out": ("rerank", {"query": "red", "documents": ["red", "a b " * 900], "partial_results": True}),
    "query that is too long": ("rerank", {"query": "a b " * 900, "documents": ["red"], "truncate": True}),
    "two instructions": ("rerank", {"query": "red", "documents": ["red"], "instruct": "a", "instruction": "b"}),
    "unequal pairs": ("score", {"text_1": ["red", "blue"], "text_2": ["red", "blue", "table"]}),
    "catalogue": ("rerank", {"query": "red", "catalogue": "nothing"}),
    "no preset": ("classify", {"input": "red"}),
}
"""Requests that workers read, and those that they refuse."""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, httpx.Client]]:
    engine = FakeEngine(template=FILES["thinking"], says=[5])
    with gateways() as start:
        yield engine, start(engine, cache_bytes=0)


def asked(served: tuple[FakeEngine, httpx.Client], path: str, body: dict[str, Any]) -> tuple[list[Any], Any, int]:
    """Return the request that the engine got, the answer, and the number of requests that the event loop read."""
    engine, client = served
    engine.generates.clear()
    engine.scores.clear()
    before = metric(client, "yardstick_text_small_total")
    answer = client.post(f"/v1/{path}", json=body)
    prompts = sorted((list(each.prompt), each.grammar) for each in engine.generates)
    scores = [(list(each.prefix), [list(branch) for branch in each.branches]) for each in engine.scores]
    kept = {name: value for name, value in answer.json().items() if name not in ("id", "created", "created_at", "completed_at")}
    for item in kept.get("output", ()):
        del item["id"]
    return [prompts, scores], (answer.status_code, kept), int(metric(client, "yardstick_text_small_total") - before)


@pytest.mark.parametrize("name", [*READ, *LEFT])
def test_the_event_loop_reads_what_workers_read(
    served: tuple[FakeEngine, httpx.Client], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = (READ | LEFT)[name]
    prompts, answer, read = asked(served, path, body)
    monkeypatch.setattr(reader, "SMALL_BYTES", 0)
    assert asked(served, path, body) == (prompts, answer, 0)
    assert read == (name in READ)
    if name in READ:
        assert answer[0] == 200, answer
        assert any(prompts)


CLASSIFIER: dict[str, Any] = {"capabilities": ("classify",), "classes": ("good", "bad")}
EMBEDDER: dict[str, Any] = {"capabilities": ("embed",), "embedding_size": 4}
JUDGE: dict[str, Any] = {"preset": builtin()["judge-item-first"]}
FRAMED = {"query": "red?", "instruction": "1a" * 600}
OTHERS: dict[str, tuple[dict[str, Any], str, dict[str, Any], bool]] = {
    "text": (CLASSIFIER, "classify", {"input": "red shoes"}, True),
    "texts": (CLASSIFIER, "classify", {"input": ["red", "blue table", "red"]}, True),
    "token ids": (CLASSIFIER, "classify", {"input": [5, 6, 7]}, True),
    "empty text": (CLASSIFIER, "classify", {"input": ["red", ""]}, False),
    "embeddings": (EMBEDDER, "embeddings", {"input": ["red shoes", "blue"]}, True),
    "an embedding": (EMBEDDER, "embeddings", {"input": "red shoes", "truncate": True}, True),
    "unsafe text": (EMBEDDER, "embeddings", {"input": "red \U0001f98a"}, False),
    "no text": (EMBEDDER, "embeddings", {"input": ""}, False),
    "no input": (EMBEDDER, "embeddings", {}, False),
    "documents first": (JUDGE, "rerank", FRAMED | {"documents": ["a"] * 10}, True),
    "many tokens": (JUDGE, "rerank", FRAMED | {"documents": ["a"] * 20}, False),
}
"""Engines, requests, and whether the event loop reads them."""


@pytest.fixture(scope="module")
def others() -> Iterator[list[tuple[FakeEngine, httpx.Client]]]:
    with gateways() as start:
        yield [(engine := FakeEngine(**options), start(engine, cache_bytes=0)) for options in (CLASSIFIER, EMBEDDER, JUDGE)]


@pytest.mark.parametrize("name", OTHERS)
def test_the_event_loop_reads_what_workers_read_for_other_engines(
    others: list[tuple[FakeEngine, httpx.Client]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path, body, read = OTHERS[name]
    served = others[(CLASSIFIER, EMBEDDER, JUDGE).index(engine)]
    prompts, answer, counted = asked(served, path, body)
    monkeypatch.setattr(reader, "SMALL_BYTES", 0)
    assert asked(served, path, body) == (prompts, answer, 0)
    assert counted == read
    assert any(prompts) == (answer[0] == 200)


def test_a_setting_leaves_all_texts_to_workers(served: tuple[FakeEngine, httpx.Client], start: Start) -> None:
    engine = FakeEngine(template=FILES["thinking"], says=[5])
    without = engine, start(engine, cache_bytes=0, short_texts=False)
    for path, body in READ.values():
        prompts, answer, read = asked(served, path, body)
        assert read == 1
        assert asked(without, path, body) == (prompts, answer, 0)
