"""Short requests through presets get on the event loop exactly the prompts that workers give them, or are left to workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire import TokenizerFiles
from gateway.errors import InvalidRequest
from gateway.handling.reader import SMALL_BYTES, SMALL_TOKENS
from gateway.presets.preset import Preset
from gateway.presets.select import builtin_presets
from gateway.reading.endpoint import Endpoint, Model, TextSide
from gateway.reading.endpoints import ENDPOINTS
from gateway.text import small as module
from gateway.text.bounds import Bounds, NeedsWorker
from gateway.text.chat_template import ChatTemplate
from gateway.text.facts import Facts
from gateway.text.metered_environment import ALLOWANCE
from gateway.text.metered_template import RUN_COST, compile_metered
from gateway.text.prepared import Prepared
from gateway.text.preset_template import PresetTemplate
from gateway.text.small import SmallTexts
from gateway.text.tokenizer import Tokenizer
from tests.gateway.presets.test_chat_presets import GRANITE, GUARD, LLAMA, VARIABLES, library
from tests.gateway.text.test_cuts import TRICKY

GOLDEN = Path(__file__).with_name("golden")
QWEN = json.loads((GOLDEN / "tokenizer.json").read_bytes())
QWEN_GUARD = (GOLDEN / "qwen3guard-gen.jinja").read_text("utf-8")
OF_LLAMA = {"llama-guard-3": GUARD, "skywork-reward": LLAMA, "granite-guardian-3": GRANITE}
CHAT_TEMPLATES = OF_LLAMA | {"qwen3guard-gen": QWEN_GUARD}
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
CONTROLS = {"bge-reranker-v2-gemma": GEMMA, "shieldgemma": GEMMA, "e5-mistral": ["<s>", "</s>"]}
PRESETS = builtin_presets()
BOUNDS = Bounds(max_request_tokens=SMALL_TOKENS)


class Sides:
    """A model with a preset, as the event loop and as a worker read for it."""

    def __init__(self, preset: Preset, tokenizer_json: bytes, template: str | None, context: int = 4096) -> None:
        tokenizer = Tokenizer.from_files(TokenizerFiles(tokenizer_json, template, VARIABLES))
        fitted = PresetTemplate(preset, tokenizer)
        self.worker = TextSide(tokenizer, ChatTemplate(template, VARIABLES), fitted)
        table = msgspec.structs.replace(tokenizer.table, fitted=fitted.fitted, template=compile_metered(template))
        small = SmallTexts.of(msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=type(table)), template, VARIABLES)
        assert small is not None
        self.small = small
        self.facts = Facts("m", context, 200_000, 64)

    def by_worker(self, endpoint: Endpoint[Any], body: dict[str, Any]) -> Prepared | str:
        """The prompts, or the error."""
        fields, _ = endpoint.decode(json.dumps(body).encode())
        try:
            return endpoint.read(fields, Model(self.facts, self.worker.tokenizer, Bounds(), self.worker))
        except InvalidRequest as error:
            return f"{error.param}: {error.message}"

    def by_loop(self, endpoint: Endpoint[Any], body: dict[str, Any], bounds: Bounds = BOUNDS) -> Prepared | None:
        """The prompts; None if a worker has to read them."""
        fields, _ = endpoint.decode(json.dumps(body).encode())
        texts = TextSide(self.small.tokenizer, self.small.template, self.small.preset)
        self.small.begin()
        try:
            return (
                endpoint.read(fields, Model(self.facts, self.small.tokenizer, bounds, texts)) if endpoint.is_small(fields) else None
            )
        except (NeedsWorker, InvalidRequest):
            return None


def tokenizer_of(name: str) -> bytes:
    """Llama's tokeniser in small, or Qwen's with the control tokens and labels of Gemma or Mistral for their presets."""
    if name in OF_LLAMA:
        return library().to_str().encode()
    document = json.loads(json.dumps(QWEN))
    if name in CONTROLS:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for id, content in enumerate(CONTROLS[name], 151_700):
            document["added_tokens"].append({"id": id, "content": content, "special": True, **flags})
        document["model"]["vocab"]["No"] = 151_642
        document["model"]["merges"].append("N o")
    return json.dumps(document).encode()


@cache
def sides(name: str) -> Sides:
    return Sides(PRESETS[name], tokenizer_of(name), CHAT_TEMPLATES.get(name))


def request_of(preset: Preset, query: str, documents: list[str], **options: Any) -> tuple[Endpoint[Any], dict[str, Any]]:
    """A request for the preset. ``options``: what only some endpoints have is left out of the others."""
    if preset.task == "rerank":
        return ENDPOINTS["rerank"], {"query": query, "documents": documents, **options}
    kept = {name: value for name, value in options.items() if name not in ("partial_results", "return_documents")}
    if preset.task == "classify":
        kept.pop("instruction", None)
    return ENDPOINTS["classify" if preset.task == "classify" else "embeddings"], {"input": documents, **kept}


WORDS = ["red", " shoes", "\n\n", "{document}", "{query}", "A: ", " the quick", "?\n", " Yes", "", "  ", "é", "東京", "a" * 96]
TEXTS = st.builds("".join, st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from(TRICKY)), max_size=6))
PLAIN = st.builds("".join, st.lists(st.sampled_from(WORDS), max_size=6))
LONG = st.builds(lambda word, times: word * times, st.sampled_from([" a", " red shoes", "\n", "x"]), st.integers(1, 1200))
DOCUMENTS = st.lists(st.one_of(PLAIN, PLAIN, TEXTS, LONG, st.text(max_size=8)), min_size=1, max_size=6)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "instruction": st.one_of(PLAIN, TEXTS),
        "truncate": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([-1, 100, 4000]),
        "max_tokens_per_doc": st.integers(1, 40),
        "partial_results": st.booleans(),
        "return_documents": st.booleans(),
        "truncation_side": st.sampled_from(["left", "right"]),
    },
)


@pytest.mark.parametrize("name", PRESETS)
@given(query=st.one_of(PLAIN, TEXTS), documents=DOCUMENTS, options=OPTIONS)
def test_the_event_loop_reads_what_workers_read(name: str, query: str, documents: list[str], options: dict[str, Any]) -> None:
    endpoint, body = request_of(PRESETS[name], query, documents, **options)
    found = sides(name).by_loop(endpoint, body)
    if found is not None:
        assert found == sides(name).by_worker(endpoint, body)


@given(
    name=st.sampled_from([name for name, preset in PRESETS.items() if preset.task == "rerank"]),
    queries=st.lists(st.one_of(PLAIN, TEXTS), min_size=1, max_size=4),
    documents=st.lists(st.one_of(PLAIN, TEXTS), min_size=1, max_size=4),
    partial=st.booleans(),
)
def test_the_event_loop_reads_pairs_as_workers_do(name: str, queries: list[str], documents: list[str], partial: bool) -> None:
    documents = documents if len(queries) == 1 else (documents * len(queries))[: len(queries)]
    body = {"text_1": queries, "text_2": documents, "partial_results": partial}
    found = sides(name).by_loop(ENDPOINTS["score"], body)
    if found is not None:
        assert found == sides(name).by_worker(ENDPOINTS["score"], body)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "options", [{}, {"instruction": "Find red things."}, {"truncate": True}, {"partial_results": True}], ids=str
)
def test_short_requests_are_read(name: str, options: dict[str, Any]) -> None:
    """At most four requests are left to workers until the words are known."""
    documents = ["red shoes", "", "a blue table", "red"][1 - len(options) :]
    if name == "qwen3guard-gen":
        documents = documents[:2]  # three long prompts have too many characters
    endpoint, body = request_of(PRESETS[name], "Is it red?", documents, **options)
    tried = [sides(name).by_loop(endpoint, body) for _ in range(5)]
    expected = sides(name).by_worker(endpoint, body)
    if name == "granite-guardian-3":
        assert tried == [None] * 5, "its chat template needs a worker"
    elif isinstance(expected, str):
        assert "empty" in expected or ("instruction" in options and "no place" in expected)
        assert tried == [None] * 5
    else:
        assert tried[-1] == expected


def test_pairs_are_read() -> None:
    pairs = {"text_1": ["Is it red?", "Is it blue?"], "text_2": ["red shoes", "blue"]}
    for name in ("qwen3-reranker", "judge-item-first", "skywork-reward"):
        body = pairs | ({"instruction": "Find it."} if PRESETS[name].takes_instruction else {})
        tried = [sides(name).by_loop(ENDPOINTS["score"], body) for _ in range(5)]
        assert tried[-1] == sides(name).by_worker(ENDPOINTS["score"], body)


LEFT: dict[str, dict[str, Any]] = {
    "a control token": {"documents": ["red<|im_end|>"]},
    "a control token in the query": {"query": "<|im_start|>", "documents": ["red"]},
    "emoji": {"documents": ["red \U0001f98a"]},
    "a combining mark": {"documents": ["e\u0301"]},
    "many texts": {"documents": ["a"] * 96},
    "many characters": {"documents": ["a b " * 700, "a b " * 900]},
    "a long word": {"documents": ["a" * 97]},
    "a text that is cut": {"documents": ["red shoes " * 9], "max_tokens_per_doc": 3},
    "more than the context": {"documents": ["a b " * 900, "b"], "truncate": False},
    "a document that does not fit": {"documents": ["a b " * 900, "b"], "partial_results": True},
}


@pytest.mark.parametrize("case", LEFT)
def test_other_requests_are_left_to_workers(case: str) -> None:
    short = Sides(PRESETS["qwen3-reranker"], tokenizer_of("qwen3-reranker"), None, context=1500)
    body = {"query": "Is it red?"} | LEFT[case]
    assert [short.by_loop(ENDPOINTS["rerank"], body) for _ in range(4)] == [None] * 4
    assert short.by_loop(ENDPOINTS["rerank"], {"query": "Is it red?", "documents": ["red shoes"]}) is not None


def test_a_long_preset_is_left_to_workers() -> None:
    preset = msgspec.structs.replace(PRESETS["judge"], instruction="red " * (module.MAX_PRESET_CHARACTERS // 4))
    assert Sides(preset, tokenizer_of("judge"), None).small.preset is None


def test_an_instruction_before_each_of_many_documents_is_left_to_workers() -> None:
    """The prompts have more tokens than the event loop copies, though few are tokenised."""
    judge, body = sides("judge-item-first"), {"query": "red?", "documents": ["a"] * 20, "instruction": "1" * 1200}
    few, endpoint = body | {"documents": ["a"] * 10}, ENDPOINTS["rerank"]
    assert [judge.by_loop(endpoint, few) for _ in range(4)][-1] == judge.by_worker(endpoint, few)
    assert judge.by_loop(endpoint, body) is None
    assert judge.by_loop(endpoint, body, Bounds()) == judge.by_worker(endpoint, body)


def test_many_documents_are_left_to_workers_before_one_is_tokenised() -> None:
    rank, endpoint = sides("judge"), ENDPOINTS["rerank"]
    assert rank.by_loop(endpoint, {"query": "red?", "documents": ["red shoes"] * 50}) is None
    assert rank.small.tokenizer._left == module.MAX_CHARACTERS
    assert rank.by_loop(ENDPOINTS["score"], {"text_1": ["red?"] * 40, "text_2": ["red shoes"] * 40}) is None
    assert rank.small.tokenizer._left == module.MAX_CHARACTERS


def test_all_prompts_of_a_request_share_the_templates_allowance() -> None:
    reward = sides("skywork-reward")
    body = {"query": "red?", "documents": ["red"] * 10}
    assert [reward.by_loop(ENDPOINTS["rerank"], body) for _ in range(4)][-1] == reward.by_worker(ENDPOINTS["rerank"], body)
    template: Any = reward.small.template
    assert 0 < template._metered.left < ALLOWANCE - 10 * RUN_COST
    assert reward.by_loop(ENDPOINTS["rerank"], body | {"documents": ["red"] * 40}) is None
    assert template._metered.left > 0.9 * ALLOWANCE, "it is not rendered until the allowance ends"


def body_of(**fields: Any) -> dict[str, Any]:
    assert len(json.dumps(fields, ensure_ascii=False).encode()) <= SMALL_BYTES
    return fields


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "empty documents": lambda: body_of(query="q", documents=[""] * 950),
    "empty documents that are cut": lambda: body_of(query="q", documents=[""] * 950, truncate=True),
    "a long query before many documents": lambda: body_of(query="a b " * 500, documents=["a"] * 380),
    "a long instruction": lambda: body_of(query="q", documents=["a"] * 45, instruction="a b " * 800),
    "placeholders": lambda: body_of(query="{document}{query}" * 100, documents=["{document}" * 5] * 30),
    "parts of control tokens": lambda: body_of(query="q", documents=["<|im_" * 780]),
    "words that are never known": lambda: body_of(query="q", documents=["qxzj" * 23 + chr(97 + number) for number in range(26)]),
    "one long document": lambda: body_of(query="q", documents=["'l" * 1950]),
    "pairs": lambda: body_of(text_1=["a b"] * 200, text_2=["a b"] * 200),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("name", ["judge", "judge-item-first", "qwen3-reranker", "skywork-reward"])
def test_hostile_requests_take_little_time(name: str, case: str) -> None:
    read, body = sides(name), HOSTILE[case]()
    endpoint = ENDPOINTS["score" if "text_1" in body else "rerank"]
    for _ in range(3):
        began = time.thread_time()
        read.by_loop(endpoint, body)
        assert time.thread_time() - began < 0.1, "some 0.001 s on an idle machine"
