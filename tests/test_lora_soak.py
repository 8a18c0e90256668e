"""An engine process whose adapters are loaded, replaced and unloaded while clients use them: right answers and flat memory.

``LORA_SOAK_SECONDS`` chooses how long it lasts; the default is for CI. A slow machine takes longer, until there were enough loads.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import wire
from tests.checkpoints import make_checkpoint
from tests.engine.adapters import merge, some_tokens, write_adapter
from tests.processes import Pod, wait_until

SECONDS = float(os.environ.get("LORA_SOAK_SECONDS", "6"))
ADAPTERS, NAMES, LOADED, ON_DEVICE = 8, ("a", "b", "c", "d"), 4, 2
RANK = 128
SLACK_MIB = 50
"""Growth that is allowed between a third of the time and the end, beside four adapters."""
SLOW_SECONDS = 60
"""Time for loads that are missing when the others are over."""
LABELS, OUTPUT = [5, 17, 300], 6

pytestmark = [pytest.mark.usefixtures("as_in_production"), pytest.mark.slow, pytest.mark.timeout(int(3 * SECONDS + 300))]


class Case(msgspec.Struct):
    """A prompt, and what merged weights make of it: for each adapter, and first for none."""

    prefix: list[int]
    branches: list[list[int]]
    rows: list[Any] = []
    texts: list[list[int]] = []


@torch.inference_mode()
def complete(case: Case, model: PreTrainedModel) -> None:
    """Add what ``model`` answers."""
    logits = [model(torch.tensor([case.prefix + branch])).logits[0, -1] for branch in case.branches]
    case.rows.append([pytest.approx(row.log_softmax(-1)[LABELS].tolist(), abs=1e-5, rel=1e-5) for row in logits])
    tokens = list(case.prefix)
    for _ in range(OUTPUT):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    case.texts.append(tokens[len(case.prefix) :])


class Soak:
    """Clients of a pod, each in a thread, and what they have found."""

    def __init__(self, pod: Pod, cases: list[Case]) -> None:
        self.pod = pod
        self.cases = cases
        self.digests = [""]
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.over = threading.Event()

    def post(self, client: httpx.Client, path: str, message: msgspec.Struct) -> httpx.Response:
        return client.post(path, content=wire.encode(message))

    def load(self, client: httpx.Client, name: str, adapter: int) -> None:
        answer = self.post(client, "/adapters/load", wire.LoadAdapter(name, f"a{adapter}", replace=True))
        if answer.status_code == 200:
            found = msgspec.msgpack.decode(answer.content, type=wire.Adapter)
            if adapter + 1 == len(self.digests):
                self.digests.append(found.digest)
            assert found.digest == self.digests[adapter + 1]
            self.counts["load"] += 1
        else:
            failed = msgspec.msgpack.decode(answer.content, type=wire.Failed)
            assert failed.code == "overloaded", failed
            self.counts["refused"] += 1

    def change(self, client: httpx.Client, rng: random.Random) -> None:
        """Load, replace or unload an adapter."""
        name = rng.choice(NAMES)
        if rng.random() < 0.3:
            assert self.post(client, "/adapters/unload", wire.UnloadAdapter(name)).status_code in (204, 404)
            self.counts["unload"] += 1
        else:
            self.load(client, name, rng.randrange(ADAPTERS))
        time.sleep(rng.random() * 0.02)

    def use(self, client: httpx.Client, rng: random.Random) -> None:
        """Score or generate with an adapter that may be loaded just now."""
        which, case, name = rng.randrange(len(self.digests)), rng.choice(self.cases), f"{rng.getrandbits(64):x}"
        if rng.random() < 0.7:
            labels = wire.Labels(LABELS)
            message = wire.Score(name, case.prefix, case.branches, labels, adapter=self.digests[which])
            answer = self.post(client, "/score", message)
            if self.accepted(answer, which):
                assert msgspec.msgpack.decode(answer.content, type=wire.Scored).rows == case.rows[which], which
        else:
            sampling = wire.Sampling(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
            answer = self.post(client, "/generate", wire.Generate(name, case.prefix, sampling, adapter=self.digests[which]))
            if self.accepted(answer, which):
                reader = wire.FrameReader()
                deltas = reader.feed(answer.content)
                assert [token for delta in deltas for token in delta.tokens] == case.texts[which], (which, deltas)

    def accepted(self, answer: httpx.Response, which: int) -> bool:
        """Whether the engine had the adapter; any other refusal is a fault."""
        if answer.status_code == 200:
            self.counts["answer" if which else "base"] += 1
            return True
        failed = msgspec.msgpack.decode(answer.content, type=wire.Failed)
        assert (failed.code, bool(which)) == ("unknown_adapter", True), failed
        self.counts["missing"] += 1
        return False

    def follow(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.pod.url, timeout=60) as client:
            while not self.over.is_set():
                try:
                    (self.change if seed == 0 else self.use)(client, rng)
                except Exception as error:
                    self.faults.append(repr(error))
                    self.over.set()


@pytest.fixture
def soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Soak]:
    # What oneDNN keeps for each number of rows grows for a long time.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "16")
    model = make_checkpoint(tmp_path / "base", "qwen3", hidden_size=128, intermediate_size=2048, num_hidden_layers=2)
    rng = random.Random(1)
    cases = [Case(some_tokens(rng, 4, 40), [some_tokens(rng, 1, 12) for _ in range(3)]) for _ in range(6)]
    for seed in range(-1, ADAPTERS):
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if seed >= 0:
            merge(whole, write_adapter(tmp_path / "adapters" / f"a{seed}", whole, rank=RANK, seed=seed))
        for case in cases:
            complete(case, whole)
    limits = ("--max-loras", str(LOADED), "--max-loras-device", str(ON_DEVICE), "--max-lora-rank", str(RANK), "--threads", "1")
    pod = Pod(model, "--name", "tiny", "--lora-root", str(tmp_path / "adapters"), "--max-total-tokens", "1500", *limits)
    threading.Thread(target=lambda: [None for _ in pod.process.stderr], daemon=True).start()
    yield Soak(pod.wait_ready(), cases)
    pod.close()


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_adapters_come_and_go_under_load(soak: Soak) -> None:
    for adapter in range(ADAPTERS):
        soak.load(soak.pod.client, NAMES[0], adapter)
    size = soak.pod.read("/adapters", wire.Adapters).adapters[0].bytes
    enough = 1 + 3 * SLACK_MIB * 2**20 // size  # if a third of the adapters were kept, it would show
    threads = [threading.Thread(target=soak.follow, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    soak.over.wait(SECONDS / 3)
    loads, early = soak.counts["load"], resident_mib(soak.pod.loop_pid)
    soak.over.wait(2 * SECONDS / 3)
    try:
        wait_until(lambda: soak.over.is_set() or soak.counts["load"] > loads + enough, SLOW_SECONDS, pause=0.1)
    finally:
        soak.over.set()
        for thread in threads:
            thread.join()
    late = resident_mib(soak.pod.loop_pid)
    assert soak.faults == []
    stats = soak.pod.read("/stats", wire.Stats)
    wait_until(lambda: soak.pod.read("/stats", wire.Stats).running == 0)
    listed = soak.pod.read("/adapters", wire.Adapters).adapters
    print(f"{dict(soak.counts)}, {stats.adapter_swaps} copies, {size / 2**20:.1f} MiB each, {early:.0f} MiB, later {late:.0f} MiB")
    for kind in ("load", "unload", "answer", "base", "missing"):
        assert soak.counts[kind] > 5, kind
    later = soak.counts["load"] - loads
    assert late - early < SLACK_MIB + 4 * size / 2**20, f"after {later} loads of {size / 2**20:.1f} MiB"
    wait_until(lambda: (stats := soak.pod.read("/stats", wire.Stats)).slots_free + stats.slots_cached == stats.slots_total)
    held = sum(each.bytes for each in listed)
    wait_until(lambda: soak.pod.read("/stats", wire.Stats).adapter_bytes == held)
    stats = soak.pod.read("/stats", wire.Stats)
    assert 0 < stats.adapter_loads <= soak.counts["load"]
    assert stats.adapter_swaps > ADAPTERS
