"""Endpoints of Text Embeddings Inference that depend on the model's task, with Hugging Face's client, and Cohere's ``embed``."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from tests.fakes import FakeEngine, ids, logprobs_after
from tests.gateway.answers import check_refused
from tests.gateway.api.test_embeddings_api import PRESET as EMBEDDER
from tests.gateway.api.test_embeddings_api import SIZE
from tests.gateway.api.test_rerank_api import DOCUMENTS, QUERY
from tests.gateway.api.test_rerank_api import PRESET as RERANKER
from tests.gateway.conftest import Start, gateways
from tests.gateway.keys import by, entry, write

TEXTS = ["red running shoes", "the quick brown fox", "blue table"]
CLASSES = ("anger", "joy", "fear")


@pytest.fixture(scope="module")
def embedder() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine(capabilities=("embed",), embedding_size=SIZE, pooling="last", preset=EMBEDDER))


@pytest.fixture(scope="module")
def classifier() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine(capabilities=("classify",), classes=CLASSES))


@pytest.fixture(scope="module")
def reranker() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine(preset=RERANKER))


def embed(client: httpx.Client, **body: Any) -> list[list[float]]:
    answer = client.post("/v1/embeddings", json={"input": TEXTS} | body).raise_for_status().json()
    return [entry["embedding"] for entry in answer["data"]]


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    return client.post(path, json=body).raise_for_status().json()


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def hugging_face(client: httpx.Client) -> InferenceClient:
    return InferenceClient(model=str(client.base_url), token="none")


def test_feature_extraction_of_hugging_face(embedder: httpx.Client) -> None:
    sdk = hugging_face(embedder)
    assert sdk.feature_extraction(TEXTS[0]).tolist() == [pytest.approx(embed(embedder)[0], abs=1e-6)]
    assert sdk.feature_extraction(TEXTS).tolist() == [pytest.approx(row, abs=1e-6) for row in embed(embedder)]
    queries = sdk.feature_extraction(TEXTS[0], prompt_name="query", normalize=False, truncate=True, truncation_direction="left")
    assert queries.tolist()[0] == pytest.approx(embed(embedder, input_type="query", normalize=False)[0], abs=1e-6)


@pytest.mark.parametrize("sentences", [TEXTS[1:], [f"sentence {number} " + "fox " * 40 for number in range(300)]])
def test_sentence_similarity_of_hugging_face(embedder: httpx.Client, sentences: list[str]) -> None:
    """The second body is read by a worker."""
    source, *others = embed(embedder, input=[TEXTS[0], *sentences])
    wanted = [pytest.approx(sum(a * b for a, b in zip(source, other, strict=True)), abs=1e-6) for other in others]
    assert hugging_face(embedder).sentence_similarity(TEXTS[0], sentences) == wanted
    inputs = {"source_sentence": TEXTS[0], "sentences": sentences}
    assert post(embedder, "/similarity", inputs=inputs, parameters={"truncate": True}) == wanted


def test_text_classification_of_hugging_face(classifier: httpx.Client) -> None:
    logits = logprobs_after(ids(TEXTS[0]), FakeEngine().vocab_size)[: len(CLASSES)]
    sdk = hugging_face(classifier)
    found = {element.label: element.score for element in sdk.text_classification(TEXTS[0])}
    assert found == {name: pytest.approx(prob) for name, prob in zip(CLASSES, probabilities(logits), strict=True)}
    (best,) = sdk.text_classification(TEXTS[0], top_k=1, function_to_apply="sigmoid")
    assert (best.label, best.score) == (CLASSES[logits.index(max(logits))], pytest.approx(1 / (1 + math.exp(-max(logits)))))


@pytest.mark.parametrize("path", ["/", "/predict"])
def test_predictions_come_best_first(classifier: httpx.Client, path: str) -> None:
    probs = [entry["probs"] for entry in post(classifier, "/v1/classify", input=TEXTS)["data"]]
    wanted = [
        [{"label": name, "score": prob} for prob, name in sorted(zip(row, CLASSES, strict=True), reverse=True)] for row in probs
    ]
    assert post(classifier, path, inputs=TEXTS[0]) == post(classifier, path, inputs=TEXTS[:1]) == wanted[0]
    assert post(classifier, path, inputs=[[text] for text in TEXTS]) == wanted
    many = [[text + " fox" * 3000] for text in TEXTS]
    short = post(classifier, path, inputs=[[text[0][:40]] for text in many], raw_scores=True)
    assert len(short) == 3
    check_refused(classifier.post(path, json={"inputs": many}), "inputs[0]")
    assert len(post(classifier, path, inputs=many, truncate=True)) == 3


def test_pairs_and_texts_of_a_reranker(reranker: httpx.Client) -> None:
    ranks = post(reranker, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert post(reranker, "/", query=QUERY, texts=DOCUMENTS) == ranks
    told = post(reranker, "/", query=QUERY, texts=DOCUMENTS, return_text=True, raw_scores=True)
    assert told == post(reranker, "/rerank", query=QUERY, texts=DOCUMENTS, return_text=True, raw_scores=True)
    scores = {rank["index"]: rank["score"] for rank in ranks}
    pairs = [[QUERY, document] for document in DOCUMENTS]
    wanted = [[{"label": "Yes", "score": pytest.approx(scores[index])}] for index in range(len(pairs))]
    assert post(reranker, "/predict", inputs=pairs) == post(reranker, "/", inputs=pairs) == wanted
    assert post(reranker, "/predict", inputs=pairs[1]) == wanted[1]


def test_what_a_model_cannot_do_is_refused(
    embedder: httpx.Client, classifier: httpx.Client, reranker: httpx.Client, shared: httpx.Client
) -> None:
    similar = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
    for client, path, body, param, words in (
        (classifier, "/", {"query": "a", "texts": ["b"]}, "model", "is not a reranker; it serves /v1/classify"),
        (embedder, "/embed_sparse", {"inputs": "a"}, "model", "has no sparse embeddings; it has embeddings of whole texts"),
        (embedder, "/predict", {"inputs": "a"}, "inputs", "/predict does not take this"),
        (embedder, "/", {"inputs": [["a"], ["b"]]}, "inputs", "is an embedding model"),
        (embedder, "/", {}, "inputs", "either"),
        (embedder, "/", {"inputs": "a", "query": "b", "texts": ["c"]}, "inputs", "either"),
        (embedder, "/", {"inputs": []}, "inputs", ""),
        (embedder, "/", {"inputs": ["a", 1]}, "inputs", "mixes"),
        (embedder, "/", {"inputs": "a", "dimensions": SIZE + 1}, "dimensions", f"have {SIZE} numbers"),
        (embedder, "/similarity", {"inputs": ["a", "b"]}, "inputs", "/similarity does not take this"),
        (embedder, "/similarity", {"inputs": {"source_sentence": "fox " * 3000, "sentences": ["b"]}}, "inputs.source_sentence", ""),
        (
            embedder,
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b", "fox " * 3000]}},
            "inputs.sentences[1]",
            "",
        ),
        (embedder, "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"] * 10_001}}, "inputs.sentences", ""),
        (classifier, "/", similar, "model", "is not an embedding model"),
        (classifier, "/v1/embeddings", {"input": "a"}, "model", "is not an embedding model; it serves"),
        (classifier, "/", {"inputs": ["a", "b"]}, "inputs", "list of lists of one text"),
        (classifier, "/predict", {"inputs": [["a", "b"]]}, "inputs", "list of lists of one text"),
        (reranker, "/", {"inputs": "a"}, "inputs", "send `query` and `texts`"),
        (reranker, "/predict", {"query": "a", "texts": ["b"]}, "query", "/predict does not take this"),
        (reranker, "/predict", {"inputs": [["a", "fox " * 3000]]}, "inputs[0]", ""),
        (reranker, "/predict", {"inputs": [["a", "b"]] * 10_001}, "inputs", "at most 10000"),
    ):
        check_refused(client.post(path, json=body), param, words)
    assert shared.post("/embed_all", json={"inputs": "a"}).status_code == 400
    assert shared.post("/", content=b"").status_code == 400


def test_info_describes_the_task(embedder: httpx.Client, classifier: httpx.Client, reranker: httpx.Client) -> None:
    assert embedder.get("/info").json()["model_type"] == {"embedding": {"pooling": "last_token"}}
    labels = {"id2label": {"0": "anger", "1": "joy", "2": "fear"}, "label2id": {"anger": 0, "joy": 1, "fear": 2}}
    info = classifier.get("/info").json()
    assert (info["model_type"], info["model_id"], info["max_input_length"]) == ({"classifier": labels}, "fake", 2048)
    assert info["auto_truncate"] is False
    assert reranker.get("/info").json()["model_type"] == {"reranker": {"id2label": {"0": "Yes"}, "label2id": {"Yes": 0}}}
    assert reranker.get("/info?model=other").status_code == 404


def test_requests_of_as_many_texts_as_info_names(start: Start) -> None:
    """Dify and Continue send as many texts as this says. Before, it said 10,000, which was more than a request may have."""
    client = start(FakeEngine(capabilities=("embed",), embedding_size=SIZE, preset=EMBEDDER), max_request_tokens=1 << 13)
    assert client.get("/info").json()["max_client_batch_size"] == 4
    client.post("/embed", json={"inputs": ["fox " * 4000] * 4, "truncate": True}).raise_for_status()
    wide = start(FakeEngine(capabilities=("embed",), embedding_size=1 << 20, preset=EMBEDDER))
    assert wide.get("/info").json()["max_client_batch_size"] == 4


def test_requests_are_charged_to_the_key(start: Start, tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", entry("one", items_per_minute=4))
    engine = FakeEngine(capabilities=("embed",), embedding_size=SIZE, preset=EMBEDDER)
    client = start(engine, api_keys_file=keys)
    body = {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}
    assert client.get("/").status_code == 200, "the console needs no key"
    assert [client.post(path, json=body).status_code for path in ("/", "/similarity", "/v2/embed")] == [401] * 3
    assert client.get("/info").status_code == 401
    keyed = by("one")
    answer = client.post("/", json=body, headers=keyed)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-items"]) == (200, "1")
    assert client.post("/similarity", json=body, headers=keyed).status_code == 429
    assert client.post("/v2/embed", json={"texts": ["a", "b"]}, headers=keyed).status_code == 429
    assert client.post("/v2/embed", json={"texts": ["a"]}, headers=keyed).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_embeddings_in_the_form_of_cohere(embedder: httpx.Client, path: str) -> None:
    plain = embed(embedder)
    kinds = ["float", "base64", "int8", "uint8", "binary", "ubinary"]
    body = {"model": "fake", "texts": TEXTS, "input_type": "search_document", "embedding_types": kinds}
    answer = post(embedder, path, **body)
    assert (answer["response_type"], answer["texts"]) == ("embeddings_by_type", TEXTS)
    assert answer["meta"] == {
        "api_version": {"version": path[2]},
        "billed_units": {"input_tokens": sum(len(ids(text)) for text in TEXTS)},
    }
    found = answer["embeddings"]
    assert found["float"] == plain
    for numbers, coded, eight, shifted, signed, unsigned in zip(plain, *(found[kind] for kind in kinds[1:]), strict=True):
        assert struct.unpack(f"<{SIZE}f", base64.b64decode(coded)) == pytest.approx(numbers, abs=1e-6)
        assert [code / 127 for code in eight] == pytest.approx(numbers, abs=0.5 / 127 + 1e-6)
        assert [code - 128 for code in shifted] == eight
        assert all(isinstance(code, int) for code in eight + shifted)
        bits = [number > 0 for byte in unsigned for number in [byte & 1 << place for place in range(7, -1, -1)]]
        assert bits == [number > 0 for number in numbers]
        assert [byte - 128 for byte in unsigned] == signed
    queries = post(embedder, path, **body | {"input_type": "search_query", "embedding_types": ["float"], "output_dimension": 8})
    assert queries["embeddings"]["float"] == embed(embedder, input_type="query", dimensions=8)


def test_inputs_of_cohere(embedder: httpx.Client) -> None:
    """The parts of an input are one text, also in a body that a worker reads."""
    for texts in (TEXTS, [*TEXTS, "fox " * 3000]):
        halves = [[text[: len(text) // 2], text[len(text) // 2 :]] for text in texts]
        inputs = [{"content": [{"type": "text", "text": half} for half in pair]} for pair in halves]
        wanted = post(embedder, "/v2/embed", texts=texts, input_type="search_query")
        found = post(embedder, "/v2/embed", inputs=inputs, input_type="search_query")
        assert (found["embeddings"], found["texts"], found["meta"]) == (wanted["embeddings"], texts, wanted["meta"])


def test_cohere_answers_lists_of_numbers_to_the_first_version(embedder: httpx.Client) -> None:
    answer = post(embedder, "/v1/embed", texts=TEXTS)
    assert (answer["response_type"], answer["embeddings"]) == ("embeddings_floats", embed(embedder))
    assert post(embedder, "/v2/embed", texts=TEXTS)["embeddings"] == {"float": embed(embedder)}
    many = [f"text {number} " + "fox " * 100 for number in range(200)]
    assert post(embedder, "/v1/embed", texts=many)["embeddings"] == embed(embedder, input=many)


def test_cohere_cuts_long_texts_at_their_end(embedder: httpx.Client) -> None:
    long = "begin " + "fox " * 3000 + "end"
    answer = embedder.post("/v2/embed", json={"texts": ["a", long]}).raise_for_status()
    assert answer.headers["x-yardstick-truncated"] == "1"
    assert answer.json()["embeddings"]["float"][1] == embed(embedder, input=long, truncate=True)[0]
    left = post(embedder, "/v2/embed", texts=[long], truncate="START")["embeddings"]["float"]
    assert left == embed(embedder, input=[long], truncate=True, truncation_direction="left")
    check_refused(embedder.post("/v2/embed", json={"texts": ["a", long], "truncate": "NONE"}), "texts[1]")


def test_errors_of_the_form_of_cohere(embedder: httpx.Client, classifier: httpx.Client) -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    part = {"content": [text]}
    for client, body, param in (
        (embedder, {"texts": []}, "texts"),
        (embedder, {"input_type": "search_query"}, "texts"),
        (embedder, {"texts": ["a"] * 10_001}, "texts"),
        (embedder, {"texts": ["a"], "inputs": [part]}, "texts"),
        (embedder, {"inputs": []}, "inputs"),
        (embedder, {"inputs": [{"content": []}]}, "inputs[0].content"),
        (embedder, {"inputs": [part, {"content": [text, image]}]}, "inputs[1].content[1]"),
        (embedder, {"inputs": [part, {"content": [{**text, "text": "fox " * 3000}]}], "truncate": "NONE"}, "inputs[1]"),
        (embedder, {"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]"),
        (embedder, {"texts": ["a"], "input_type": "image"}, "input_type"),
        (embedder, {"texts": ["a"], "output_dimension": SIZE + 1}, "output_dimension"),
        (classifier, {"texts": ["a"]}, "model"),
    ):
        check_refused(client.post("/v2/embed", json=body), param)
