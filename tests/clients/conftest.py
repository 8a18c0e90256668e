"""Gateways before a fake reranker, a fake embedding model and an engine with the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.api.test_encoders import encoder
from tests.gateway.conftest import gateways
from tests.processes import Pod, Program, gateway_before
from yardstick_llm.engine.demo import MODELS

RERANKER = """
name = "reranker"
task = "rerank"
template = ["find: {query}", "\\nin: {document}\\nRelevant:"]
labels = [" Yes", " No"]
"""
EMBEDDER = {
    "modules.json": b"[]",
    "config_sentence_transformers.json": b'{"prompts": {"query": "query: ", "passage": "document. "}}',
}
EMBEDDING_SIZE = 24


@pytest.fixture(scope="session")
def reranker() -> Iterator[httpx.Client]:
    with gateways() as start:
        yield start(FakeEngine(model="reranker", preset=RERANKER))


@pytest.fixture(scope="session")
def embedder() -> Iterator[httpx.Client]:
    """A client of a gateway before a fake encoder, a folder of sentence-transformers."""
    with gateways() as start:
        yield start(encoder("embed", model="embedder", embedding_size=EMBEDDING_SIZE, model_files=EMBEDDER))


@pytest.fixture(scope="session")
def demo() -> Iterator[Program]:
    """A gateway before an engine with the demo model in float32, named ``yardstick-demo``."""
    flags = ("--dtype", "float32", "--max-total-tokens", "16384")
    with Pod(MODELS / "base", "--name", "yardstick-demo", *flags) as pod, gateway_before(pod) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables: Hugging Face's libraries write their caches into a folder of the tests."""
    return {"HF_HOME": str(tmp_path_factory.mktemp("hf")), "OMP_NUM_THREADS": "1"}
