"""Encoders before a fake engine: the exact tokens of texts and pairs, and what sentence-transformers files say about them.

The tokeniser is a small WordPiece of BERT's form. What it should give comes from transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.fakes import CORPUS, FakeEngine
from tests.gateway.answers import check_refused
from tests.gateway.conftest import Start, gateways
from tests.processes import wait_until
from yardstick_llm.engine import wire
from yardstick_llm.gateway.scoring.similarity import similarity
from yardstick_llm.gateway.text.preset_template import pair_lengths

QUERY = "What is a quick brown fox?"
DOCUMENTS = ["The fox jumps over the lazy dog.", "Red running shoes", "Blue [SEP] table", "", "shoes " * 60]
SIZE = 12
CONTEXT = 32


@cache
def bert(pair: str = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1") -> str:
    """``tokenizer.json`` of a WordPiece."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        [*CORPUS, *"query: document. !?"], trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    )
    marks = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, marks)
    tokenizer.enable_truncation(8)  # published files have such traces of their training
    tokenizer.enable_padding(length=16)
    return str(tokenizer.to_str())


def reference(pair: str | None = None) -> Any:
    library = tokenizers.Tokenizer.from_str(bert(pair) if pair else bert())
    library.no_truncation()
    library.no_padding()
    return PreTrainedTokenizerFast(tokenizer_object=library, pad_token="[PAD]", split_special_tokens=True)


def encoder(*capabilities: str, files: dict[str, Any] | None = None, **fields: Any) -> FakeEngine:
    written = {name: json.dumps(content).encode() for name, content in (files or {}).items()}
    options = {"max_context": CONTEXT, "tokenizer": bert(), "embedding_size": SIZE, "template": None, "model_files": written}
    return FakeEngine(**{"capabilities": capabilities, "encoder": True} | options | fields)


def asked(engine: FakeEngine) -> list[tuple[list[int], list[int]]]:
    """Prefix and branch of every prompt that the engine computed."""
    return [(score.prefix, branch) for score in engine.scores for branch in score.branches]


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    return client.post(path, json=body, headers={"cache-control": "no-cache"}).raise_for_status()


@pytest.mark.parametrize("pair", ["[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", "[CLS] $A [SEP] [SEP] $B [SEP]"], ids=["bert", "roberta"])
@pytest.mark.parametrize(
    ("query", "truncation"),
    [(QUERY, "longest_first"), ("fox " * 20, "longest_first"), ("fox " * 20, "only_second")],
    ids=["short", "long", "second"],
)
def test_pairs_have_the_tokens_of_transformers(start: Start, pair: str, query: str, truncation: str) -> None:
    """Cut as a cross-encoder cuts them: the longer text first, or as its files say."""
    files = {"sentence_bert_config.json": {"processing_kwargs": {"text": {"truncation": truncation}}}}
    engine = encoder("classify", classes=("score",), tokenizer=bert(pair), files=files)
    client = start(engine)
    answer = post(client, "/v1/rerank", query=query, documents=DOCUMENTS).json()
    wanted = reference(pair)(
        [query] * len(DOCUMENTS), DOCUMENTS, truncation=truncation, max_length=CONTEXT, return_token_type_ids=True
    )
    found = {tuple(prefix + branch): len(prefix) for prefix, branch in asked(engine)}
    assert found.keys() == {tuple(ids) for ids in wanted["input_ids"]}
    if "$B:1" in pair:
        types = zip(wanted["input_ids"], wanted["token_type_ids"], strict=True)
        assert found == {tuple(ids): types.index(1) for ids, types in types}
    assert answer["meta"]["truncated"] == [4]
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    for index, document in enumerate(DOCUMENTS):
        (alone,) = post(client, "/v1/score", text_1=query, text_2=document).json()["data"]
        assert alone["score"] == pytest.approx(scores[index]), "a row has the number of its document"


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 30), st.sampled_from(["longest_first", "only_first", "only_second"]))
def test_pairs_are_cut_as_by_the_library(first: int, second: int, most: int, truncation: str) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.enable_truncation(most, strategy=truncation)
    wanted = (most, 0) if truncation == "only_second" else (0, most)
    with suppress(Exception):  # the library refuses where the other text alone is too long, and raises no other class
        kept = library.encode("a " * first, "a " * second)
        wanted = kept.sequence_ids.count(0), kept.sequence_ids.count(1)
    assert pair_lengths(first, second, most, truncation) == wanted


@pytest.fixture(scope="module")
def cross() -> Iterator[tuple[FakeEngine, httpx.Client]]:
    engine = encoder("classify", classes=("score",))
    with gateways() as start_gateway:
        yield engine, start_gateway(engine)


def test_many_pairs_in_one_request(cross: tuple[FakeEngine, httpx.Client]) -> None:
    """Each query goes to the engine once, with its documents, and the result cache knows pairs from any request."""
    engine, client = cross
    engine.scores.clear()
    queries = [QUERY, "red", QUERY, "blue"]
    documents = ["fox", "shoes", "dog", "table"]
    together = post(client, "/v1/score", text_1=queries, text_2=documents).json()["data"]
    assert len(engine.scores) == len(set(queries))
    assert sorted(len(score.branches) for score in engine.scores) == [1, 1, 2]
    for entry, query, document in zip(together, queries, documents, strict=True):
        answer = client.post("/v1/score", json={"text_1": query, "text_2": document})
        assert (answer.headers["x-yardstick-cache"], answer.json()["data"][0]["score"]) == ("1/1", pytest.approx(entry["score"]))
    predicted = post(client, "/predict", inputs=[list(pair) for pair in zip(queries, documents, strict=True)]).json()
    assert [each[0]["score"] for each in predicted] == pytest.approx([entry["score"] for entry in together])


def test_texts_of_a_cross_encoder_can_be_refused_or_cut(cross: tuple[FakeEngine, httpx.Client]) -> None:
    engine, client = cross
    whole = {"query": QUERY, "documents": ["fox", "shoes " * 60], "truncate": False}
    check_refused(client.post("/v1/rerank", json=whole), "documents[1]", f"is {CONTEXT} tokens")
    partial = {"truncate": False, "partial_results": True}
    answer = post(client, "/v1/rerank", query=QUERY, documents=["shoes " * 60, "fox"], **partial).json()
    assert ([each["index"] for each in answer["results"]], [each["index"] for each in answer["errors"]]) == ([1], [0])
    engine.scores.clear()
    post(client, "/v1/rerank", query="fox " * 30, documents=["shoes " * 60], max_tokens_per_query=3, truncate_prompt_tokens=16)
    ((prefix, branch),) = asked(engine)
    assert (len(prefix), len(branch)) == (5, 11)
    short = {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 2}
    check_refused(client.post("/v1/rerank", json=short), "truncate_prompt_tokens")


NLI = ("contradiction", "entailment", "neutral")
IDENTITY = "torch.nn.modules.linear.Identity"
ACTIVATIONS: list[tuple[dict[str, Any] | None, str]] = [
    (None, "sigmoid"),
    ({"sentence_transformers": {"activation_fn": IDENTITY}}, "none"),
    ({"sbert_ce_default_activation_function": IDENTITY}, "none"),
    ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "4.1"}}, "sigmoid"),
]


def test_the_activation_of_a_cross_encoder(start: Start) -> None:
    """A name such as "rerank" is no reason to refuse it: the tokeniser joins the pair."""
    names = [f"bge-reranker-v2-m{number}" for number in range(len(ACTIVATIONS))]
    client = start(
        *(
            encoder(
                "classify",
                classes=("score",),
                files={} if config is None else {"config.json": config},
                model=name,
                fingerprint=name,
            )
            for name, (config, _) in zip(names, ACTIVATIONS, strict=True)
        )
    )
    for name, (_, activation) in zip(names, ACTIVATIONS, strict=True):
        preset = client.get(f"/v1/models/{name}").json()["preset"]
        assert (preset["task"], preset["activation"], preset["fallback"]) == ("rerank", activation, False)
        pair = {"model": name, "text_1": QUERY, "text_2": "fox"}
        (score,) = post(client, "/v1/score", **pair).json()["data"]
        (raw,) = post(client, "/v1/score", **pair, raw_scores=True).json()["data"]
        assert score["score"] == pytest.approx(1 / (1 + math.exp(-raw["score"])) if activation == "sigmoid" else raw["score"])


def test_pairs_are_classified(start: Start) -> None:
    """Each pair has the tokens of its tokeniser, and as many probabilities as there are classes."""
    engine = encoder("classify", classes=NLI)
    client = start(engine)
    pairs = [["The fox jumps.", "The fox sleeps."], ["Red shoes", "Blue shoes " * 40], ["Red shoes", ""]]
    answers = post(client, "/predict", inputs=pairs).json()
    first, second = map(list, zip(*pairs, strict=True))
    wanted = reference()(first, second, truncation="longest_first", max_length=CONTEXT, return_token_type_ids=True)
    found = {tuple(prefix + branch): len(prefix) for prefix, branch in asked(engine)}
    types = zip(wanted["input_ids"], wanted["token_type_ids"], strict=True)
    assert found == {tuple(ids): types.index(1) for ids, types in types}
    for answer, pair in zip(answers, pairs, strict=True):
        assert {each["label"] for each in answer} == set(NLI)
        assert sum(each["score"] for each in answer) == pytest.approx(1)
        assert post(client, "/predict", inputs=pair).json() == answer
    assert post(client, "/", inputs=pairs).json() == answers
    check_refused(client.post("/predict", json={"inputs": [["a", "b"], ["c"]]}), "inputs")
    check_refused(client.post("/predict", json={"inputs": pairs, "truncate": False}), "inputs[1]")


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("config", [config for config, activation in ACTIVATIONS if activation == "none"], ids=str)
def test_classes_of_a_head_without_activation_have_probabilities(start: Start, config: dict[str, Any], multi_label: bool) -> None:
    """Identity, which NLI cross-encoders name, is CrossEncoder's default for several classes."""
    client = start(encoder("classify", classes=NLI, multi_label=multi_label, files={"config.json": config}))

    def of(logits: list[float]) -> Any:
        total = sum(map(math.exp, logits))
        return pytest.approx([1 / (1 + math.exp(-logit)) if multi_label else math.exp(logit) / total for logit in logits])

    bodies: list[dict[str, Any]] = [{"inputs": ["The fox jumps.", "The fox sleeps."]}, {"inputs": "Red shoes"}]
    for path, body in product(("/predict", "/"), bodies):
        raw = post(client, path, **body, raw_scores=True).json()
        assert [each["score"] for each in post(client, path, **body).json()] == of([each["score"] for each in raw])
    (raw,) = post(client, "/v1/classify", input="Red shoes", raw_scores=True).json()["data"]
    (found,) = post(client, "/v1/classify", input="Red shoes").json()["data"]
    assert found["probs"] == of(raw["probs"])


FOLDER = {
    "modules.json": [],
    "sentence_bert_config.json": {"max_seq_length": 20, "do_lower_case": True},
    "config_sentence_transformers.json": {
        "prompts": {"query": "query: ", "passage": "document. ", "Classification": "blue: "},
        "default_prompt_name": "passage",
        "similarity_fn_name": "dot",
    },
}


@pytest.fixture(scope="module")
def embedder() -> Iterator[tuple[FakeEngine, httpx.Client]]:
    engine = encoder("embed", "sparse", "token_vectors", files=FOLDER, token_vector_size=4)
    with gateways() as start_gateway:
        yield engine, start_gateway(engine)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "document. "),
        ({"prompt_name": "query"}, "query: "),
        ({"prompt_name": "Classification"}, "blue: "),
        ({"prompt_name": "document"}, "document. "),
        ({"input_type": "query"}, "query: "),
        ({"input_type": "passage"}, "document. "),
        ({"input_type": "classification"}, "blue: "),
        ({"input_type": "clustering"}, "document. "),
        ({"prompt": "red "}, "red "),
        ({"prompt": ""}, ""),
    ],
    ids=str,
)
def test_prompts_of_sentence_transformers(embedder: tuple[FakeEngine, httpx.Client], fields: dict[str, str], prompt: str) -> None:
    engine, client = embedder
    engine.scores.clear()
    texts = [" Quick brown fox ", "shoes " * 40]
    answer = post(client, "/v1/embeddings", input=texts, **fields)
    wanted = reference()([prompt + text for text in texts], truncation=True, max_length=20)["input_ids"]
    assert sorted(asked(engine)) == sorted(([], ids) for ids in wanted)
    assert answer.headers["x-yardstick-truncated"] == "1"
    if "prompt_name" in fields:
        assert post(client, "/embed", inputs=texts, **fields).json() == [each["embedding"] for each in answer.json()["data"]]
    if fields.get("input_type") in ("classification", "clustering"):
        cohere = post(client, "/v2/embed", texts=texts, **fields).json()
        assert cohere["embeddings"]["float"] == [each["embedding"] for each in answer.json()["data"]]


def test_an_unknown_prompt_is_refused_with_the_known_ones(embedder: tuple[FakeEngine, httpx.Client]) -> None:
    _, client = embedder
    for body, param, words in (
        ({"input": "a", "prompt_name": "Query"}, "prompt_name", "'query', 'passage', 'Classification', 'document'"),
        ({"input": "a", "prompt_name": "query", "prompt": "b: "}, "prompt_name", ""),
        ({"input": [[1, 2]], "prompt_name": "query"}, "prompt_name", ""),
        ({"input": "shoes " * 40, "truncate": False}, "input[0]", "is 20 tokens"),
    ):
        check_refused(client.post("/v1/embeddings", json=body), param, words)
    info = client.get("/info").json()
    assert (info["max_input_length"], info["auto_truncate"]) == (20, True)


def test_embeddings_are_compared(embedder: tuple[FakeEngine, httpx.Client]) -> None:
    """With the model's similarity, and its prompts for queries and documents."""
    _, client = embedder

    def embedding(text: str, purpose: str) -> list[float]:
        body = {"input": text, "input_type": purpose, "normalize": False}
        numbers: list[float] = post(client, "/v1/embeddings", **body).json()["data"][0]["embedding"]
        return numbers

    query = embedding(QUERY, "query")
    wanted = [sum(a * b for a, b in zip(query, embedding(text, "document"), strict=True)) for text in DOCUMENTS]
    scores = post(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS).json()
    assert [entry["score"] for entry in scores["data"]] == pytest.approx(wanted, rel=1e-5)
    assert scores["usage"]["prompt_tokens"] > 0
    ranked = post(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS, return_documents=True).json()
    assert {each["index"]: each["relevance_score"] for each in ranked["results"]} == pytest.approx(
        dict(enumerate(wanted)), rel=1e-5
    )
    assert all(each["document"]["text"] == DOCUMENTS[each["index"]] for each in ranked["results"])
    assert ranked["meta"]["truncated"] == [4]
    twice = post(client, "/v1/score", text_1=[QUERY, QUERY], text_2=DOCUMENTS[:2]).json()["data"]
    assert [entry["score"] for entry in twice] == pytest.approx(wanted[:2], rel=1e-5)
    with client.stream("POST", "/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, "stream": True}) as stream:
        lines = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    found = {each["index"]: each["relevance_score"] for line in lines for each in line["results"]}
    assert found == pytest.approx(dict(enumerate(wanted)), rel=1e-5)


def test_sparse_and_token_embeddings(embedder: tuple[FakeEngine, httpx.Client]) -> None:
    """Rows have different lengths, and come from the cache as from the engine."""
    engine, client = embedder
    texts = ["fox fox shoes", "", "the lazy dog " * 30]
    ids = reference()(["document. " + text for text in texts], truncation=True, max_length=20)["input_ids"]
    for header in ("0/3", "3/3"):
        answer = client.post("/embed_sparse", json={"inputs": texts})
        assert answer.headers["x-yardstick-cache"] == header
        wanted = [[{"index": id, "value": row.count(id) / 4} for id in sorted(set(row))] for row in ids]
        assert answer.json() == wanted
        answer = client.post("/embed_all", json={"inputs": texts})
        assert (answer.headers["x-yardstick-cache"], [len(rows) for rows in answer.json()]) == (header, list(map(len, ids)))
    assert {type(score.readout) for score in engine.scores[-2:]} == {wire.Sparse, wire.TokenVectors}
    assert client.post("/embed_sparse", json={"inputs": "fox", "prompt_name": "query"}).is_success
    assert engine.scores[-1].readout == wire.Sparse(query=True)
    many = post(client, "/v1/embeddings", input=texts, embedding_type="multi").json()["data"]
    assert [[math.hypot(*vector) for vector in entry["embedding"]] for entry in many] == [
        pytest.approx([1] * (len(row) - 1)) for row in ids
    ], "the first token has none, as in bge-m3's library"
    both = {"input": "a", "embedding_type": "multi", "dimensions": 2}
    check_refused(client.post("/v1/embeddings", json=both), "dimensions")


def test_a_kind_of_embedding_that_the_model_lacks(start: Start) -> None:
    client = start(encoder("sparse", files={"modules.json": []}))
    assert client.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
    check_refused(client.post("/v1/embeddings", json={"input": "a"}), "model", "it has sparse embeddings")
    check_refused(client.post("/embed_all", json={"inputs": "a"}), "model")
    assert client.post("/embed_sparse", json={"inputs": "fox"}).is_success


@pytest.mark.parametrize("prompt", ["query: ", ""])
def test_prompts_that_the_mean_leaves_out(start: Start, prompt: str) -> None:
    """The engine is told how many tokens: as sentence-transformers counts them, those before the prompt included."""
    engine = encoder("embed", files={**FOLDER, "1_Pooling/config.json": {"include_prompt": False}})
    client = start(engine)
    post(client, "/v1/embeddings", input=DOCUMENTS[:2], prompt=prompt)
    (readout,) = {score.readout for score in engine.scores}
    assert isinstance(readout, wire.Embedding)
    assert readout.prompt_tokens == (len(reference()(prompt.strip())["input_ids"]) - 1 if prompt else 0)
    check_refused(client.post("/v1/rerank", json={"query": "a", "documents": ["b"]}), "model")


@pytest.mark.parametrize(("kind", "wanted"), [("cosine", 1.0), ("dot", 1.0), ("euclidean", -math.sqrt(14)), ("manhattan", -6.0)])
def test_similarities_of_sentence_transformers(kind: Any, wanted: float) -> None:
    """As ``util.cos_sim`` of vectors of length 1, ``dot_score``, ``euclidean_sim`` and ``manhattan_sim``."""
    assert similarity((1.0, 0.0, 2.0), (3.0, 1.0, -1.0), kind) == pytest.approx(wanted)


LATE = {
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 14,
    "document_length": 18,
    "skiplist_words": [".", "?"],
    "similarity_fn_name": "MaxSim",
}


def test_late_interaction(start: Start) -> None:
    """The tokens of PyLate: a mark behind the first token, queries filled up, punctuation of documents left out."""
    files = {"modules.json": [], "config_sentence_transformers.json": LATE}
    engine = encoder("token_vectors", files=files, token_vector_size=4, added=("[Q] ", "[D] "))
    client = start(engine)
    library = tokenizers.Tokenizer.from_str(bert())
    library.add_tokens(["[Q] ", "[D] "])
    marks = {name: library.token_to_id(name) for name in ("[Q] ", "[D] ", "[MASK]", ".", "?")}

    def tokens(text: str, mark: str, most: int) -> list[int]:
        ids = reference()(text, truncation=True, max_length=most - 1)["input_ids"]
        return [ids[0], marks[mark], *ids[1:]]

    query = tokens(QUERY, "[Q] ", 14)
    query += [marks["[MASK]"]] * (14 - len(query))
    documents = [tokens(text, "[D] ", 18) for text in DOCUMENTS]
    ranked = post(client, "/v1/rerank", query=QUERY, documents=DOCUMENTS).json()
    assert sorted(asked(engine)) == sorted(([], ids) for ids in [query, *documents])
    unseen = {len(score.branches): score.readout.expansion_tokens for score in engine.scores}
    assert unseen == {1: query.count(marks["[MASK]"]), len(DOCUMENTS): 0}, "no token sees those that fill up a query"

    def vectors(input_type: str, text: str) -> list[list[float]]:
        answer = post(client, "/v1/embeddings", input=text, input_type=input_type, embedding_type="multi")
        found: list[list[float]] = answer.json()["data"][0]["embedding"]
        return found

    asked_for = vectors("query", QUERY)
    assert len(asked_for) == 14
    wanted = {}
    for index, (text, ids) in enumerate(zip(DOCUMENTS, documents, strict=True)):
        kept = vectors("document", text)
        assert len(kept) == sum(id not in (marks["."], marks["?"]) for id in ids)
        wanted[index] = sum(max(sum(a * b for a, b in zip(one, other, strict=True)) for other in kept) for one in asked_for)
    assert {each["index"]: each["relevance_score"] for each in ranked["results"]} == pytest.approx(wanted, rel=1e-4)


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"config_sentence_transformers.json": {"prompts": {"query": 1}}}, "prompts"),
    ({"config_sentence_transformers.json": {"prompts": {"query": "{document}"}}}, "contains a placeholder"),
    ({"config_sentence_transformers.json": {"similarity_fn_name": "own.Function"}}, "similarity 'own.Function'"),
    ({"config_sentence_transformers.json": {"query_length": 1}}, "query_length"),
    ({"config_sentence_transformers.json": LATE}, "has no token '[D] '"),
    ({"modules.json": [], "sentence_bert_config.json": {"max_seq_length": -1}}, "max_length"),
    ({"modules.json": [], "sentence_bert_config.json": "[" * 100_000}, "sentence_bert_config.json"),
]


def test_damaged_files_are_named(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    models = {f"m{number}": problem for number, (_, problem) in enumerate(DAMAGED)}
    engines = [
        encoder("embed", "token_vectors", files=files, model=name, fingerprint=name)
        for name, (files, _) in zip(models, DAMAGED, strict=True)
    ]
    client = start(*engines, wait=False)
    for engine, problem in zip(engines, models.values(), strict=True):
        wait_until(lambda engine=engine, problem=problem: any(engine.url in line and problem in line for line in caplog.messages))
    assert client.get("/v1/models").json()["data"] == []
