"""Adapters that come and go beside requests: right answers, and nothing is kept of those that are gone."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_checkpoint
from tests.engine.adapters import merge, write_adapter
from tests.engine.integrity import check
from tests.engine.parity import some_tokens
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.lora.config import AdapterError
from yardstick_llm.engine.models.lora.slots import LoadedAdapter
from yardstick_llm.engine.settings import EngineSettings

LABELS, ADAPTERS, LOADED, ROUNDS = [5, 17, 300], 5, 3, 60


def live() -> list[LoadedAdapter]:
    """All adapters in this process's memory."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is LoadedAdapter]


class Clients:
    """Requests for adapters that are loaded, replaced and unloaded at random."""

    def __init__(self, loop: Loop, prefix: list[int], branches: list[list[int]], expected: list[Tensor]) -> None:
        self.loop = loop
        self.prefix, self.branches, self.expected = prefix, branches, expected
        self.sent: dict[str, int] = {}
        self.correct = 0

    def change(self, rng: random.Random, root: Path, number: int) -> None:
        """Load an adapter under some name, send requests for it, and perhaps unload it or abort a request."""
        which, name = rng.randrange(ADAPTERS), f"n{rng.randrange(LOADED)}"
        try:
            digest = self.loop.adapters.load(name, root / f"a{which}", replace=True).digest
        except AdapterError as error:
            if not error.retryable:
                raise
            return
        self.sent[f"s{number}"] = which
        sampling = wire.Sampling(max_tokens=rng.randint(1, 30))
        self.loop.submit(wire.Score(f"s{number}", self.prefix, self.branches, wire.Labels(LABELS), adapter=digest))
        self.loop.submit(wire.Generate(f"g{number}", self.prefix, sampling, adapter=digest))
        if rng.random() < 0.3:
            self.loop.submit(wire.Abort(f"g{rng.randrange(number + 1)}"))
        if rng.random() < 0.4:
            self.loop.adapters.unload(name)

    def step(self) -> None:
        for reply in self.loop.step():
            assert not isinstance(reply, wire.Failed), reply
            if isinstance(reply, wire.Scored):
                wanted = self.expected[self.sent[reply.id]]
                torch.testing.assert_close(torch.tensor(reply.rows), wanted, atol=1e-5, rtol=1e-5)
                self.correct += 1
        check(self.loop._scheduler)


@pytest.mark.slow
def test_nothing_is_kept_of_adapters_that_are_gone(tmp_path: Path) -> None:
    model, rng = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=1), random.Random(1)
    prefix, branches, expected = some_tokens(rng, 20, 20), [some_tokens(rng, 1, 6) for _ in range(2)], []
    for seed in range(ADAPTERS):
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        merge(whole, write_adapter(tmp_path / f"a{seed}", whole, seed=seed))
        with torch.inference_mode():
            logits = [whole(torch.tensor([prefix + branch])).logits[0, -1] for branch in branches]
        expected.append(torch.stack([row.log_softmax(-1)[LABELS] for row in logits]))
    before = len(live())
    settings: dict[str, Any] = {"max_loras": LOADED, "max_loras_device": 2, "max_total_tokens": 400, "overlap": True}
    loop = build_loop(EngineSettings(model=str(model), name="t", lora_root=str(tmp_path), **settings))
    clients, size = Clients(loop, prefix, branches, expected), 0
    for number in range(ROUNDS):
        clients.change(rng, tmp_path, number)
        size = max([size, *(each.bytes for each in loop.adapters.description.adapters)])
        for _ in range(rng.randrange(8)):
            clients.step()
        if number % 8 == 0:
            assert loop.stats.adapter_bytes == size * (len(live()) - before) <= 2 * LOADED * size
    while not loop.idle:
        clients.step()
    assert clients.correct == len(clients.sent) > ROUNDS / 3
    for each in loop.adapters.description.adapters:
        loop.adapters.unload(each.name)
    loop._scheduler.cache.clear()
    assert loop.stats.slots_free == loop.stats.slots_total == 400
    assert (len(live()) - before, loop.stats.adapter_bytes) == (0, 0)
