"""``/v1/rerank``: forms of clients, presets, truncation, and errors."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.fakes import RAW_OFFSET, FakeEngine, ids, library, logprobs_after
from tests.gateway.answers import check_refused, events
from tests.gateway.conftest import Start

PRESET = """
name = "own"
task = "rerank"
template = ["<|im_start|>find: {query}", "\\nin: {document}<|im_end|>", "Relevant:"]
instructed = ["<|im_start|>{instruction} {query}", "\\nin: {document}<|im_end|>", "Relevant:"]
labels = [" Yes", " No"]
"""
QUERY = "red shoes"
DOCUMENTS = ["blue table", "red running shoes", "the quick brown fox", ""]
PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
ENGINE = {"preset": PRESET}


def token(text: str) -> int:
    (id,) = ids(text)
    return id


def prompt(document: str, before: str = "find: ") -> list[int]:
    """Each piece, and each text between control tokens, is tokenised by itself."""
    first = [token("<|im_start|>"), *ids(before + QUERY)]
    return [*first, *ids("\nin: " + document), token("<|im_end|>"), *ids("Relevant:")]


def expected(document: str, before: str = "find: ") -> float:
    logprobs = logprobs_after(prompt(document, before), FakeEngine().vocab_size)
    return 1 / (1 + math.exp(logprobs[token(" No")] - logprobs[token(" Yes")]))


def post(client: httpx.Client, path: str = "/v1/rerank", **body: Any) -> httpx.Response:
    return client.post(path, json={"query": QUERY, "documents": DOCUMENTS} | body)


@pytest.mark.parametrize("path", PATHS)
def test_results_come_best_first(client: httpx.Client, path: str) -> None:
    answer = post(client, path).raise_for_status().json()
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {result["index"]: pytest.approx(result["relevance_score"], rel=1e-5) for result in answer["results"]} == {
        index: expected(document) for index, document in enumerate(DOCUMENTS)
    }
    tokens = sum(len(prompt(document)) for document in DOCUMENTS)
    assert answer["usage"]["total_tokens"] == tokens == answer["meta"]["tokens"]["input_tokens"]
    assert all("document" not in result for result in answer["results"])
    assert (answer["meta"]["api_version"]["version"], answer["meta"]["truncated"]) == ("2", [])


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (3, 3), (4, 4), (0, 4), (1000, 4), (None, 4)])
def test_top_n(client: httpx.Client, top_n: int | None, count: int) -> None:
    whole = post(client).json()["results"]
    assert post(client, top_n=top_n).raise_for_status().json()["results"] == whole[:count]


def test_documents_are_objects_and_are_returned(client: httpx.Client) -> None:
    documents = [{"text": DOCUMENTS[0], "title": "ignored"}, DOCUMENTS[1]]
    results = post(client, documents=documents, return_documents=True).json()["results"]
    assert {result["index"]: result["document"] for result in results} == {0: {"text": DOCUMENTS[0]}, 1: {"text": DOCUMENTS[1]}}


def test_the_form_of_tei(client: httpx.Client) -> None:
    cohere = post(client).json()["results"]
    body = {"query": QUERY, "texts": DOCUMENTS}
    answer = client.post("/rerank", json=body).raise_for_status().json()
    assert answer == [{"index": result["index"], "score": result["relevance_score"]} for result in cohere]
    told = client.post("/rerank", json=body | {"raw_scores": True, "return_text": True, "truncate": True}).json()
    for entry in told:
        assert entry["text"] == DOCUMENTS[entry["index"]]
        assert 1 / (1 + math.exp(-entry["score"])) == pytest.approx(expected(entry["text"]), rel=1e-5)


@pytest.mark.parametrize("name", ["instruction", "instruct"])
def test_instructions(client: httpx.Client, name: str) -> None:
    results = post(client, **{name: "Look up"}).raise_for_status().json()["results"]
    assert results[0]["relevance_score"] == pytest.approx(expected(DOCUMENTS[results[0]["index"]], "Look up "), rel=1e-5)


def engine_text(tokens: list[int]) -> str:
    return str(library().decode(tokens, skip_special_tokens=False))


LONG = "the quick brown fox " * 2000


@pytest.mark.parametrize(
    "cut",
    [
        {"truncate": True},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 60},
        {"max_tokens_per_doc": 40},
        {"truncate": True, "truncation_direction": "Left"},
        {"truncate": True, "truncation_direction": "middle"},
        {"max_tokens_per_doc": 40, "truncation_direction": "middle"},
    ],
)
def test_documents_are_cut_where_that_is_allowed(client: httpx.Client, engine: FakeEngine, cut: dict[str, Any]) -> None:
    answer = post(client, documents=["short", "start " + LONG + " end"], cache_salt=str(cut), **cut).raise_for_status()
    assert (answer.json()["meta"]["truncated"], answer.headers["x-yardstick-truncated"]) == ([1], "1")
    asked = engine.scores[-1]
    whole = max((asked.prefix + branch for branch in asked.branches), key=len)
    frame = len(prompt(""))
    most = {"truncate_prompt_tokens": 60}.get(next(iter(cut)), 2048) if cut.get("truncate_prompt_tokens") != -1 else 2048
    if "max_tokens_per_doc" in cut:
        most = frame + 40 + 2
    assert most - 6 <= len(whole) <= most
    assert whole[-len(ids("Relevant:")) :] == ids("Relevant:"), "the template is never cut"
    side = cut.get("truncation_direction", "right")
    assert (" end" in engine_text(whole), "in: start" in engine_text(whole)) == (side != "right", side != "Left")


ERRORS: dict[str, tuple[dict[str, Any], str, str]] = {
    "too long": ({"documents": ["a", LONG]}, "documents[1]", "allow cutting it"),
    "no documents": ({"documents": []}, "documents", ""),
    "null": ({"documents": ["a", None]}, "documents[1]", ""),
    "mixed with a number": ({"documents": ["a", 5]}, "documents[1]", ""),
    "an object without text": ({"documents": [{"title": "a"}]}, "documents[0]", "text"),
    "both lists": ({"texts": ["a"]}, "documents", "either"),
    "two instructions": ({"instruction": "a", "instruct": "b"}, "instruct", "either"),
    "negative": ({"top_n": -1}, "top_n", ""),
    "an unknown model": ({"model": "nobody"}, "model", "nobody"),
    "a query of ids": ({"query": [1, 2]}, "query", ""),
    "too many": ({"documents": ["a"] * 10_001}, "documents", ""),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_field(client: httpx.Client, case: str) -> None:
    body, param, word = ERRORS[case]
    check_refused(post(client, **body), param, word, 404 if case == "an unknown model" else 400)


def test_a_model_without_labels_is_not_a_reranker(start: Start) -> None:
    client = start(FakeEngine(capabilities=("generate",)))
    check_refused(post(client), "model", "is not a reranker; it serves /v1/chat/completions")


@pytest.mark.parametrize(
    ("labels", "activation", "score"),
    [
        ('[" Yes"]', 'activation = "sigmoid"\nscale = 0.2', lambda yes, _: 1 / (1 + math.exp(-(yes + RAW_OFFSET) / 5))),
        ('[" Yes"]', 'activation = "none"', lambda yes, _: yes + RAW_OFFSET),
        ('[" Yes", " No"]', 'activation = "difference"', lambda yes, no: yes - no),
        ('[[" Yes", " No"], " or"]', 'activation = "softmax"', None),
    ],
)
def test_activations(start: Start, labels: str, activation: str, score: Any) -> None:
    preset = f'name = "own"\ntask = "rerank"\ntemplate = ["{{query}}: {{document}}"]\nlabels = {labels}\n{activation}\n'
    client = start(FakeEngine(preset=preset))
    (result,) = post(client, documents=["fox"]).raise_for_status().json()["results"]
    logprobs = logprobs_after(ids(QUERY + ": fox"), FakeEngine().vocab_size)
    yes, no, other = (logprobs[token(label)] for label in (" Yes", " No", " or"))
    positive = math.exp(yes) + math.exp(no)
    wanted = score(yes, no) if score else positive / (positive + math.exp(other))
    assert result["relevance_score"] == pytest.approx(wanted)


def test_a_stream_sends_results_as_they_become_known(client: httpx.Client) -> None:
    documents = [f"streamed {number}" for number in range(150)]  # the fake engine takes 64 at a time
    post(client, documents=documents[:5]).raise_for_status()
    *chunks, last = events(post(client, documents=documents, stream=True, return_documents=True))
    whole = post(client, documents=documents).json()
    results = {result["index"]: result for chunk in chunks for result in chunk["results"]}
    assert {chunk["object"] for chunk in chunks} == {"rerank.chunk"}
    assert len(chunks[0]["results"]) == 5, "those in the cache come first"
    assert {index: result["relevance_score"] for index, result in results.items()} == {
        result["index"]: result["relevance_score"] for result in whole["results"]
    }
    assert all(results[index]["document"]["text"] == document for index, document in enumerate(documents))
    assert (last["object"], last["results"], last["usage"]["total_tokens"]) == ("rerank", [], whole["usage"]["total_tokens"])


def test_a_stream_of_nothing_wrong_begins_with_an_error(client: httpx.Client) -> None:
    check_refused(post(client, documents=["a", LONG], stream=True), "documents[1]")


def test_partial_results_leave_out_what_is_too_long(client: httpx.Client) -> None:
    answer = (
        post(client, documents=["one", LONG, "two", LONG], partial_results=True, return_documents=True).raise_for_status().json()
    )
    assert sorted(result["index"] for result in answer["results"]) == [0, 2]
    assert {result["document"]["text"] for result in answer["results"]} == {"one", "two"}
    assert [(error["index"], error["code"], error["type"]) for error in answer["errors"]] == [
        (1, "context_length_exceeded", "invalid_request_error"),
        (3, "context_length_exceeded", "invalid_request_error"),
    ]
    *chunks, last = events(post(client, documents=["one", LONG, "two"], partial_results=True, stream=True))
    assert sorted(result["index"] for chunk in chunks for result in chunk["results"]) == [0, 2]
    assert [error["index"] for error in last["errors"]] == [1]
    nothing = post(client, documents=[LONG], partial_results=True).json()
    assert (nothing["results"], len(nothing["errors"])) == ([], 1)


def test_partial_results_survive_engines_that_fail(start: Start) -> None:
    """The sub-batch with the poisoned document fails; the other one is answered."""
    engine = FakeEngine(preset=PRESET)
    engine.faults.poison = token("q")
    client = start(engine)
    documents = [f"one {number}" for number in range(100)] + ["q"]  # more than the fake engine takes at a time
    assert post(client, documents=documents).status_code == 503
    answer = post(client, documents=documents, partial_results=True).raise_for_status().json()
    indices = {result["index"] for result in answer["results"]}
    errors = {error["index"]: error["message"] for error in answer["errors"]}
    assert 100 in errors
    assert "memory" in errors[100]
    assert len(indices) >= 37
    assert indices | errors.keys() == set(range(len(documents)))
    assert not indices & errors.keys()
    assert post(client, documents=["q"], partial_results=True).status_code == 503, "nothing was computed"


def test_a_query_that_leaves_no_room_is_named(client: httpx.Client) -> None:
    for allowed in ({"truncate": True}, {"partial_results": True}, {}):
        answer = post(client, query=LONG, documents=["a", "b"], **allowed)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "query"), (allowed, error)
    cut = post(client, query=LONG, documents=["a", "b"], max_tokens_per_query=20).raise_for_status()
    assert cut.json()["meta"]["query_truncated"]
    assert cut.headers["x-yardstick-truncated"] == "0, query"


def test_characters_are_bounded_before_they_are_tokenised(start: Start) -> None:
    """A chat template repeats the query for each document."""
    preset = 'name = "reward"\ntask = "rerank"\nactivation = "none"\n'
    client = start(FakeEngine(preset=preset, capabilities=("classify",), classes=("reward",)), max_request_characters=100_000)
    body = {"query": "fox " * 250, "documents": ["a"] * 200}
    check_refused(post(client, **body), "documents", "max_request_characters")
    assert post(client, query="fox", documents=["a"] * 200).status_code == 200


@pytest.mark.parametrize(("fields", "param"), [({"top_n": 1}, "top_n"), ({"documents": None, "texts": ["a"]}, "texts")])
def test_fields_that_a_stream_cannot_follow(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    check_refused(post(client, stream=True, **fields), param)


def test_a_head_with_one_number_reranks_and_gives_its_number(start: Start) -> None:
    engine = FakeEngine(capabilities=("classify",), classes=("relevance",))
    client = start(engine)
    told = post(client, query="red", documents=[" blue", " shoes"]).json()["results"]
    raw = post(client, query="red", documents=[" blue", " shoes"], raw_scores=True).json()["results"]
    prompts = [score.prefix + branch for score in engine.scores for branch in score.branches]
    assert sorted(prompts) == sorted([*ids("red"), *ids(document)] for document in (" blue", " shoes"))
    for result, number in zip(told, raw, strict=True):
        assert result["relevance_score"] == pytest.approx(1 / (1 + math.exp(-number["relevance_score"])))
    (entry,) = client.post("/v1/classify", json={"input": "red blue"}).json()["data"]
    assert entry["probs"] == client.post("/v1/classify", json={"input": "red blue", "raw": True}).json()["data"][0]["probs"]


def test_documents_are_not_cut_to_nothing(client: httpx.Client) -> None:
    """A limit below what the template and the query take is an error, and not a score of nothing."""
    for most in (0, 1, 20):
        answer = post(client, documents=["a", LONG], truncate_prompt_tokens=most)
        check_refused(answer, "truncate_prompt_tokens", f"is {most}, and a prompt has")
