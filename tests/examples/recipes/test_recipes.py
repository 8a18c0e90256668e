"""The recipes run against a gateway before the models that docs/recipes.md names, and their numbers are what the data says."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from examples.recipes import compare_rerankers, guard, judge, shop
from tests import weights
from tests.clients.environments import python_environment, run
from tests.processes import Pod, Program, gateway_before
from yardstick_llm.engine.demo import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
ONE_CPU = """
import ray, runpy, sys
sys.argv.pop(0)
folder = sys.argv.pop(0)
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=folder, log_to_driver=False)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program on a Ray cluster of one CPU in this machine. Arguments: a folder with a short path, the program and its own."""


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    names = {"all-MiniLM-L6-v2": weights.minilm(), "SmolLM2-135M-Instruct": weights.smollm2(), "yardstick-demo": MODELS / "base"}
    with ExitStack() as stack:
        few = ("--max-total-tokens", "16384")
        pods = [stack.enter_context(Pod(path, "--name", name, *few)) for name, path in names.items()]
        yield stack.enter_context(gateway_before(*pods))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shop")
    shop.main(str(made))
    return made


def test_the_own_template_ranks_better_than_embeddings(server: Program, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "searches.jsonl").read_text().splitlines()]
    assert sum(len(row["documents"]) for row in rows) == 1000
    own = compare_rerankers.own_template(
        server.url, "yardstick-demo", "Query: {query}\nItem: ", "{document}\nRelevant:", [" Yes", " No"]
    )
    cohere = compare_rerankers.cohere(server.url, "all-MiniLM-L6-v2")
    quality = [
        sum(compare_rerankers.ndcg(rank(row["query"], row["documents"]), row["grades"]) for row in rows[:3]) / 3
        for rank in (own, cohere)
    ]
    assert 1 >= quality[0] > quality[1] > 0.5


def test_gains_are_discounted_by_place() -> None:
    best, second = 3.0, 1 / math.log2(3)
    assert compare_rerankers.ndcg([0.1, 0.9], [2, 1]) == pytest.approx((1 + 3 / math.log2(3)) / (best + second))


def test_a_threshold_has_the_precision_that_it_promises() -> None:
    assert judge.threshold([3.0, -1.0, 2.0, 0.5], 1.0) == 2.0
    assert judge.threshold([3.0, -1.0, 2.0, 0.5], 0.75) == 0.5
    assert judge.threshold([-1.0], 0.5) == math.inf


def test_a_judge_prefers_a_place(server: Program) -> None:
    """Which is why both orders are asked."""
    asked = [(row["question"], row["good"], row["bad"]) for row in judge.capitals()[::20]]
    model = "SmolLM2-135M-Instruct"
    forward = judge.preferences(server.url, model, asked)
    backward = judge.preferences(server.url, model, [(question, bad, good) for question, good, bad in asked])
    assert sum(logit > 0 for logit in forward + backward) > 0.7 * len(forward + backward)


@pytest.mark.parametrize(("message", "refused"), [("What is the capital of France?", False), ("How do I make a pipe bomb?", True)])
def test_the_guard(server: Program, message: str, refused: bool) -> None:
    answer = guard.guarded(server.client, "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2", message, guard.TOPICS, 0.4)
    assert (answer == guard.REFUSAL, "Paris" in answer) == (refused, not refused)


def test_rag_answers_from_the_passage(server: Program, tmp_path: Path) -> None:
    texts = ["Refunds arrive on your card three to five days after the warehouse has received and checked your parcel. " * 2]
    texts.append("Our shops are closed on public holidays, and open from nine to six on every other day but Sunday. " * 2)
    (tmp_path / "help.md").write_text("\n\n".join(texts))
    script = ROOT / "examples" / "recipes" / "rag.py"
    command = [str(python_environment("python") / "bin" / "python"), "-W", "ignore", str(script)]
    printed = run([*command, str(tmp_path), "When do I get my money back?", "--url", server.url], tmp_path, script, 300, {})
    assert re.search(r"2 kept:\n  0\.\d+ help\.md: Refunds", printed)
    assert printed.splitlines()[-1].strip()


def test_ray_data_adds_the_scores_on_one_cpu(server: Program, folder: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    pairs = arrow.read_table(folder / "pairs.parquet").slice(0, 60)
    arrow.write_table(pairs, tmp_path / "pairs.parquet")
    script = ROOT / "examples" / "recipes" / "ray_data.py"
    python = python_environment("ray") / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="ray") as short:
        command = [str(python), "-I", "-W", "ignore", "-c", ONE_CPU, short, str(script), str(tmp_path / "pairs.parquet")]
        own = {"HOME": short, "RAY_USAGE_STATS_ENABLED": "0"}
        run([*command, str(tmp_path / "out"), server.url, "yardstick-demo", "2"], tmp_path, script, 300, own)
    scored = arrow.read_table(tmp_path / "out").to_pydict()
    body = {"model": "yardstick-demo", "queries": pairs["query"].to_pylist(), "documents": pairs["document"].to_pylist()}
    results = httpx.post(f"{server.url}/v1/score", json=body).raise_for_status().json()["data"]
    scores = [result["score"] for result in results]
    found = sorted(zip(scored["query"], scored["document"], scored["score"], strict=True))
    expected = sorted(zip(body["queries"], body["documents"], scores, strict=True))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], abs=1e-4)


def test_a_student_learns_the_order_of_its_teacher(server: Program, folder: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join((folder / "pairs.jsonl").read_text().splitlines(keepends=True)[:300]))
    script = ROOT / "examples" / "recipes" / "distil.py"
    python = python_environment("encoder-peers") / "bin" / "python"
    command = [str(python), "-W", "ignore", str(script), str(pairs), "--url", server.url]
    student = tmp_path / "student"
    run([*command, "--train", str(student), "--student", str(weights.minilm())], tmp_path, script, 300, {"OMP_NUM_THREADS": "1"})
    with Pod(student, "--name", "student") as pod, gateway_before(pod) as gateway:
        compared = ["--compare", server.url, "all-MiniLM-L6-v2", "--compare", gateway.url, "student"]
        printed = run([*command, *compared], tmp_path, script, 300, {})
    before, after = (float(line.split()[1]) for line in printed.splitlines()[-2:])
    assert after > before + 0.03
