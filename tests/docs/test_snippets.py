"""Programs and calls that the pages show run against the model that they name, and the examples of /schema are answered."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.fakes import FakeEngine, adapter
from tests.gateway.conftest import gateways
from tests.parts import need
from tests.processes import Pod, Program, gateway_before
from yardstick_llm.engine.demo import MODELS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples/demo_models/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "sh", "shell", "console", "javascript", "js"}
SERVER = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
FAILING = 'set -euo pipefail\ncurl() { command curl --silent --show-error --fail-with-body "$@"; echo; }\n'
"""Makes an error of the server an error of the script."""

CLUSTER = "needs a cluster"
OTHER_SERVERS = "names servers that are not here"
LONG_WORK = "runs for minutes; tests of the command run it with small sizes"
NOT_RUN = {
    ("README.md", "make serve   # make"): "makes an environment; tests/gateway/commands runs `yardstick serve`",
    ("README.md", "MODEL=Qwen/Qwen3-0.6B"): "downloads models",
    ("README.md", "--model BAAI/bge-reranker"): "downloads models; tests/test_encoders_end_to_end.py has such calls",
    ("README.md", "all-MiniLM-L6-v2"): "needs an encoder; tests/test_encoders_end_to_end.py has such calls",
    ("README.md", "make images\n$ helm install"): CLUSTER,
    ("README.md", "YARDSTICK_API_KEY=$(kubectl"): CLUSTER,
    ("README.md", "apply -k loadgen/deploy"): CLUSTER,
    ("README.md", "--reset-then-reuse-values"): CLUSTER,
    ("README.md", "make images VARIANT=cuda"): CLUSTER,
    ("README.md", "make release"): CLUSTER,
    ("README.md", "yardstick load run"): LONG_WORK,
    ("docs/caching.md", "redis://cache:6379"): OTHER_SERVERS,
    ("docs/catalogue.md", "split --lines"): "names a file of the reader",
    ("docs/catalogue.md", "python -m benchmarks"): LONG_WORK,
    ("docs/limits.md", "http://engine:8100"): OTHER_SERVERS,
    ("docs/generation.md", "--lenvm-model /models"): "names models of the reader",
    ("docs/length.md", "yardstick lenvm train"): "names models of the reader; tests/test_lenvm_end_to_end.py runs the commands",
    ("docs/models.md", "--lora support"): "names models of the reader",
    ("docs/models.md", '"model": "support"'): "names models of the reader; tests/test_lora_end_to_end.py has such calls",
    ("docs/models.md", "load_lora_adapter"): "names adapters of the reader; tests/test_lora_end_to_end.py has such calls",
    ("docs/offline.md", "--input pairs.jsonl"): "names files of the reader; tests/gateway/commands runs the commands",
    ("docs/offline.md", "--items items.txt"): "names a file of the reader; tests/gateway/commands/test_lists.py runs the command",
    ("docs/offline.md", "recipes/ray_data.py"): "names a bucket of the reader; tests/examples/recipes runs the command",
    ("docs/generation.md", "examples.thinking_model"): LONG_WORK,
    ("docs/generation.md", "get_weather"): "needs a model with tools; tests/gateway/api/test_tools_api.py calls them",
    ("docs/models.md", "data:image/png"): "needs a model of 7 GB; tests/test_vision_end_to_end.py has such calls",
}
"""Snippets that cannot run here: page and a text of the snippet, and why. Whole pages have their own table."""
PAGES_NOT_RUN = {
    "docs/clients.md": "tests/clients runs these programs",
    "docs/load.md": LONG_WORK,
    "docs/operations.md": CLUSTER,
    "docs/quickstart.md": "test_quickstart.py runs its blocks in their order",
    "docs/recipes.md": "tests/examples/recipes runs these programs",
    "docs/benchmarks": LONG_WORK,
}


class Snippet(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    def run(self, **environment: str) -> None:
        """Run it: a program in this process, whose clients are imported once, and shell commands in a shell.

        ``environment``: variables of the shell.
        """
        if self.language == "python":
            with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(self.text, f"{self.page}:{self.line}", "exec"), {"__name__": "__main__"})
                gc.collect()  # clients that it leaves open
            return
        script = re.sub(r"^\$ ", "", self.text, flags=re.M) if self.language == "console" else self.text
        command = ["bash", "-c", FAILING + script]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{self.page}:{self.line}: {done.stdout}{done.stderr}"


def snippets() -> Iterator[Snippet]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S):
            if found[1] in LANGUAGES:
                yield Snippet(str(page.relative_to(ROOT)), text.count("\n", 0, found.start()) + 1, found[1], found[2])


def reasons_of(snippet: Snippet) -> list[object]:
    """Return the entries of the tables that keep ``snippet`` from running."""
    pages = [page for page in PAGES_NOT_RUN if snippet.page == page or snippet.page.startswith(f"{page}/")]
    return [*pages, *(entry for entry in NOT_RUN if entry[0] == snippet.page and entry[1] in snippet.text)]


ALL = list(snippets())
RUN = [snippet for snippet in ALL if not reasons_of(snippet)]


@pytest.fixture(scope="module")
def demo() -> Iterator[Program]:
    """A gateway before an engine with the demo models, as ``yardstick serve`` starts them."""
    flags = ("--lenvm-model", str(MODELS / "lenvm"), "--max-total-tokens", "16384")
    with Pod(MODELS / "base", "--name", "yardstick-demo", *flags) as pod, gateway_before(pod) as gateway:
        yield gateway


def test_each_snippet_runs_or_has_one_reason() -> None:
    assert len(RUN) >= 10
    assert {f"{snippet.page}:{snippet.line}": found for snippet in ALL if len(found := reasons_of(snippet)) > 1} == {}
    used = {reason for snippet in ALL for reason in reasons_of(snippet)}
    assert [entry for entry in (*NOT_RUN, *PAGES_NOT_RUN) if entry not in used] == []


@pytest.mark.slow
@pytest.mark.parametrize("snippet", RUN, ids=[f"{snippet.page}:{snippet.line}" for snippet in RUN])
def test_snippets_run(demo: Program, snippet: Snippet) -> None:
    if snippet.language != "python" and "curl" in snippet.text:
        need("curl")
    assert SERVER.search(snippet.text), "it names the server of `yardstick serve`"
    snippet._replace(text=SERVER.sub(demo.url, snippet.text)).run()


@pytest.mark.slow
def test_the_examples_of_the_schema_are_answered(demo: Program) -> None:
    """Those of the demo model's endpoints by it, the others by fake engines of the kind that they need."""
    paths = demo.client.get("/schema/openapi.json").raise_for_status().json()["paths"]
    examples = [
        (method, path, operation["requestBody"]["content"]["application/json"]["example"])
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "requestBody" in operation
    ]
    several = {"/embed_all", "/embed_sparse"}
    embedding = {"/embed", "/v1/embeddings", "/embeddings", "/v1/embed", "/v2/embed", "/", "/similarity"}
    classifying = {"/v1/classify", "/classify", "/predict"}
    loading = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    with gateways() as start:
        clients: dict[str, httpx.Client] = {
            **dict.fromkeys(embedding, start(FakeEngine(capabilities=("embed",), embedding_size=8))),
            **dict.fromkeys(
                several, start(FakeEngine(capabilities=("sparse", "token_vectors"), encoder=True, token_vector_size=8))
            ),
            **dict.fromkeys(classifying, start(FakeEngine(capabilities=("classify",), classes=("bad", "good")))),
            **dict.fromkeys(loading, start(FakeEngine(loadable={"support": adapter("aa11", "red")}))),
        }
        assert clients.keys() <= paths.keys()
        answers = {}
        for method, path, example in examples:
            client = clients.get(path, demo.client)
            answer = client.request(method, path.replace("{name}", "shoes"), json=example)
            answers[path] = (answer.status_code, "" if answer.is_success else answer.text)
    assert answers == dict.fromkeys(answers, (200, ""))
    assert len(answers) > 25
