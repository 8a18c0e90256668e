"""Adapters of a pod: the paths of its HTTP server, and loading beside the loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_checkpoint
from tests.engine.adapters import write_adapter
from tests.processes import Pod, wait_until
from yardstick_llm.engine import wire
from yardstick_llm.engine.server.loop_client import LoopClient
from yardstick_llm.engine.settings import EngineSettings


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def pod(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for seed in range(2):
        write_adapter(root / f"a{seed}", model, seed=seed)
    pod = Pod(directory, "--name", "tiny", "--lora", f"first={root / 'a0'}", "--lora-root", str(root), "--max-loras", "2")
    yield pod.wait_ready()
    pod.close()


def post(pod: Pod, path: str, message: msgspec.Struct) -> tuple[int, bytes]:
    answer = pod.client.post(path, content=wire.encode(message))
    return answer.status_code, answer.content


def failed(content: bytes) -> wire.Failed:
    return msgspec.msgpack.decode(content, type=wire.Failed)


def test_adapters_are_loaded_used_and_unloaded(pod: Pod) -> None:
    listed = pod.read("/adapters", wire.Adapters)
    assert ([adapter.name for adapter in listed.adapters], listed.max_adapters, listed.max_rank) == (["first"], 2, 64)
    first = listed.adapters[0]
    status, content = post(pod, "/adapters/load", wire.LoadAdapter("second", "a1"))
    second = msgspec.msgpack.decode(content, type=wire.Adapter)
    assert (status, second.name, second.rank) == (200, "second", 4)
    assert pod.read("/adapters", wire.Adapters).adapters == [first, second]
    rows = []
    for digest in ("", first.digest, second.digest):
        status, content = post(pod, "/score", wire.Score("s", [5, 6], [[7]], wire.Labels([1]), adapter=digest))
        assert status == 200
        rows.append(msgspec.msgpack.decode(content, type=wire.Scored).rows[0][0])
    assert len(set(rows)) == 3
    status, content = post(pod, "/adapters/load", wire.LoadAdapter("third", "a1"))
    assert (status, "--max-loras" in failed(content).message) == (400, True)
    assert post(pod, "/adapters/unload", wire.UnloadAdapter("second")) == (204, b"")
    status, content = post(pod, "/score", wire.Score("s", [5, 6], [[7]], wire.Labels([1]), adapter=second.digest))
    assert (status, failed(content).code, failed(content).retryable) == (404, "unknown_adapter", True)
    status, content = post(pod, "/adapters/unload", wire.UnloadAdapter("second"))
    assert (status, failed(content).code) == (404, "unknown_adapter")
    # Without another request, within the second in which a loop without work reports its statistics.
    wait_until(lambda: (stats := pod.read("/stats", wire.Stats)).adapters == 1 and stats.adapter_bytes == first.bytes, 2)
    stats = pod.read("/stats", wire.Stats)
    assert (stats.adapter_loads, stats.adapter_load_failures, stats.refused_adapter) == (2, 1, 1)
    assert "yardstick_engine_adapters 1.0" in pod.client.get("/metrics").text


def revision(pod: Pod, path: str = "/readyz") -> str:
    return pod.client.get(path).raise_for_status().headers[wire.ADAPTERS_HEADER]


def test_the_revision_of_adapters_changes_with_each_load_and_unload(pod: Pod) -> None:
    found = [revision(pod)]
    assert revision(pod) == revision(pod, "/adapters") == found[0], "it stays the same otherwise"
    for path, message in (
        ("/adapters/load", wire.LoadAdapter("third", "a1")),
        ("/adapters/load", wire.LoadAdapter("third", "a0", replace=True)),
        ("/adapters/unload", wire.UnloadAdapter("third")),
    ):
        status, _ = post(pod, path, message)
        assert status in (200, 204)
        found.append(revision(pod))
        assert revision(pod, "/adapters") == found[-1]
    assert len(set(found)) == 4, "the list is as at first; its revision is not"


def test_revisions_of_two_processes_differ() -> None:
    """They have loaded the same model."""
    clients = [LoopClient(EngineSettings(model="tiny", name="tiny")) for _ in range(2)]
    assert [client.adapters_headers for client in clients] == [{}, {}], "not before the model is loaded"
    for client in clients:
        client.adapters = wire.Adapters([])
    assert len({client.adapters_headers[wire.ADAPTERS_HEADER] for client in clients}) == 2


def test_faulty_commands(pod: Pod, root: Path) -> None:
    for path in ("/adapters/load", "/adapters/unload"):
        status, content = post(pod, path, wire.Abort("x"))
        assert (status, failed(content).code) == (400, "invalid")
    status, content = post(pod, "/adapters/load", wire.LoadAdapter("x", "../tiny"))
    assert status == 400
    assert str(root) not in failed(content).message
    assert pod.client.post("/adapters/load", content=b"x" * (1 << 17)).status_code == 413
