"""Encoders from their folders, behind gateway and engine as the processes they are, compared with sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch.nn.functional import normalize

from tests import weights
from tests.clients.environments import run_client
from tests.encoders import add_module, load_reference, make_encoder
from tests.gateway.api.test_encoders import bert
from tests.processes import Pod, Program, gateway_before

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "That is a happy person",
    "That is a happy dog",
    "Today is a sunny day",
    "",
    "  The Quick brown fox, Überprüfung 東京 \n",
    "how to change a tyre " * 100,
]


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder with random weights, whose score is a logit."""
    folder = make_encoder(tmp_path_factory.mktemp("cross-encoder"), "bert", "classes", num_labels=1)
    (folder / "tokenizer.json").write_text(bert())
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128, "model_input_names": inputs} | special
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def gateway(cross: Path) -> Iterator[Program]:
    """A gateway before both models."""
    with (
        Pod(weights.minilm(), "--name", "minilm") as pod,
        Pod(cross, "--name", "cross") as other,
        gateway_before(pod, other) as gateway,
    ):
        yield gateway


def post(gateway: Program, path: str, **body: Any) -> Any:
    answer = gateway.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def embed(gateway: Program, texts: list[str], **fields: Any) -> list[list[float]]:
    answer = post(gateway, "/v1/embeddings", model="minilm", input=texts, **fields)
    return [entry["embedding"] for entry in answer["data"]]


def close_to(wanted: list[list[float]]) -> list[Any]:
    return [pytest.approx(row, abs=1e-5) for row in wanted]


def test_embeddings_and_scores_are_those_of_sentence_transformers(gateway: Program, cross: Path) -> None:
    pairs = [[query, document] for query in ("red shoes?", "fox " * 90) for document in ("The lazy dog.", "", "blue table " * 40)]
    folder = str(weights.minilm())
    calls = [{"folder": folder, "texts": TEXTS}, {"folder": folder, "texts": TEXTS, "prompt": "query: "}]
    calls.append({"folder": str(cross), "pairs": pairs})
    plain, prompted, predicted = run_client("sentence_reference.py", json.dumps(calls), environment="encoder-peers")
    assert embed(gateway, TEXTS) == close_to(plain[0])
    assert embed(gateway, TEXTS, prompt="query: ") == close_to(prompted[0])
    similar = post(gateway, "/v1/score", model="minilm", text_1=TEXTS[0], text_2=TEXTS)
    assert [entry["score"] for entry in similar["data"]] == pytest.approx(plain[1][0], abs=1e-5)
    # The example on the model's page: 0.6949 and 0.2563 for the sentences that it compares.
    assert [round(entry["score"], 2) for entry in similar["data"][1:3]] == [0.69, 0.26]
    scores = post(gateway, "/v1/score", model="cross", text_1=[pair[0] for pair in pairs], text_2=[pair[1] for pair in pairs])
    assert [entry["score"] for entry in scores["data"]] == pytest.approx(predicted, abs=1e-5)
    assert len({round(score, 4) for score in predicted}) == len(pairs), "the scores tell the pairs apart"
    for query in {pair[0] for pair in pairs}:
        documents = [document for each, document in pairs if each == query]
        ranked = post(gateway, "/v1/rerank", model="cross", query=query, documents=documents)["results"]
        wanted = [score for pair, score in zip(pairs, predicted, strict=True) if pair[0] == query]
        assert {each["index"]: each["relevance_score"] for each in ranked} == pytest.approx(dict(enumerate(wanted)), abs=1e-5)
        assert [each["index"] for each in ranked] == sorted(range(len(wanted)), key=wanted.__getitem__, reverse=True)


QUERY, DOCUMENTS = "What is red?", ["Red running shoes.", "", "Blue, blue table? No. " * 30, "the lazy dog"]
SIZE, QUERY_LENGTH, DOCUMENT_LENGTH = 16, 24, 40


@torch.inference_mode()
def test_ranks_by_token_vectors_are_those_of_pylate(tmp_path: Path) -> None:
    """PyLate's default: the tokens that fill up a query see its others, and are seen by none."""
    folder, library = make_encoder(tmp_path, "bert"), tokenizers.Tokenizer.from_str(bert())
    library.add_tokens(["[Q] ", "[D] "])
    (folder / "tokenizer.json").write_text(library.to_str())
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer", "path": ""}]))
    weight = torch.randn(SIZE, 64, generator=torch.Generator().manual_seed(3)) / 8
    dense = {"in_features": 64, "out_features": SIZE, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    add_module(folder, "Dense", dense, {"linear.weight": weight})
    config = {"query_length": QUERY_LENGTH, "document_length": DOCUMENT_LENGTH, "similarity_fn_name": "MaxSim"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    model = load_reference(folder, "bert", "embed")
    library.no_padding()
    skipped = {library.token_to_id(mark) for mark in ".,?!:;"}

    def vectors(text: str, mark: str, most: int, *, fill: bool) -> torch.Tensor:
        library.enable_truncation(most - 1)
        ids = library.encode(text).ids
        ids = [ids[0], library.token_to_id(mark), *ids[1:]]
        expansion = most - len(ids) if fill else 0
        tokens = torch.tensor([ids + [library.token_to_id("[MASK]")] * expansion])
        hidden = model(tokens, attention_mask=torch.tensor([[1] * len(ids) + [0] * expansion])).last_hidden_state[0]
        found = normalize(hidden @ weight.T, dim=1)
        return found if fill else found[[place for place, id in enumerate(ids) if id not in skipped]]

    query = vectors(QUERY, "[Q] ", QUERY_LENGTH, fill=True)
    documents = [vectors(text, "[D] ", DOCUMENT_LENGTH, fill=False) for text in DOCUMENTS]
    wanted = [(query @ document.T).max(dim=1).values.sum().item() for document in documents]
    with Pod(folder, "--name", "colbert") as pod, gateway_before(pod) as gateway:
        ranked = post(gateway, "/v1/rerank", model="colbert", query=QUERY, documents=DOCUMENTS)
        body = {"model": "colbert", "input": DOCUMENTS, "input_type": "document", "embedding_type": "multi"}
        embedded = post(gateway, "/v1/embeddings", **body)["data"]
    scores = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    assert scores == pytest.approx(dict(enumerate(wanted)), abs=1e-4)
    assert ranked["meta"]["truncated"] == [2]
    for entry, document in zip(embedded, documents, strict=True):
        torch.testing.assert_close(torch.tensor(entry["embedding"]), document, atol=1e-4, rtol=1e-4)
