"""Sequences that are composed at once are composed like one by one: the same steps, slots and charges."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine import wire
from engine.ints import Ints
from engine.kvcache.prefix_cache import SlotPool
from engine.requests.batch import Batch
from engine.requests.core import Branch, Request, ScoringRequest
from engine.requests.generation import GenerateRequest
from engine.scheduling import scheduler as scheduling
from engine.scheduling.allocation import Allocator
from engine.scheduling.scheduler import Budget, Scheduler
from tests.engine.integrity import check

STEPS = 150


class Played:
    """A run of a scheduler with random requests and results, in which a step may be scheduled before the last one is known."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._run_ahead, guided = self._random.random() < 0.7, self._random.random() < 0.5
        slots = self._random.choice((60, 120, 400))  # few, so that requests are preempted
        self._lenvm_pool = SlotPool(slots) if guided else None
        budget = Budget(self._random.choice((16, 64)), 10)
        self._scheduler = Scheduler(SlotPool(slots), budget, lambda: 0.0, run_ahead=self._run_ahead, lenvm_pool=self._lenvm_pool)
        self._added = 0
        self._pending: list[Branch] = []
        self.steps = [self._step() for _ in range(STEPS)]

    def _step(self) -> Any:
        while len(self._scheduler.requests) < 12 and self._random.random() < 0.5:
            self._scheduler.add(self._request())
        batch = self._scheduler.schedule()
        flows = self._scheduler._queue.flows.values()
        told = describe(batch), [(flow.tenant, flow.virtual, list(flow.held), flow.room) for flow in flows]
        launched = [each.branch for each in (*batch.segments, *self._valued(batch)) if each.branch is not None and each.completes]
        for branch in launched:
            branch.pending_steps += 1
        arrived, self._pending = (self._pending, launched) if self._run_ahead else (launched, [])
        for branch in arrived:
            branch.pending_steps -= 1
            if not branch.done:
                self._take(branch)
        check(self._scheduler)
        return told

    def _valued(self, batch: Batch) -> list[Any]:
        return [segment for segment in batch.lenvm_segments if isinstance(segment.request, ScoringRequest)]

    def _take(self, branch: Branch) -> None:
        request = branch.request
        if isinstance(request, GenerateRequest):
            branch.draw(self._random.randrange(9))
            if request.offset(branch) - branch.pending < request.message.sampling.max_tokens and self._random.random() > 0.02:
                return
        self._scheduler.finish(branch)

    def _request(self) -> Request:
        self._added += 1
        draws, name = self._random, str(self._added)
        prompt = [draws.randrange(3) for _ in range(draws.randint(1, 20))]
        caller = wire.Caller(tenant=draws.choice("aab"))
        if draws.random() < 0.2:
            items = [[draws.randrange(9) for _ in range(draws.randint(1, 9))] for _ in range(3)]
            return ScoringRequest.of(wire.Score(name, prompt, items, wire.Labels([1]), caller=caller), 0.0)
        penalty = 0.0 if draws.random() < 0.8 else 1.0  # with one, a draw needs the tokens before it
        sampling = wire.Sampling(max_tokens=draws.randint(0, 30), n=draws.choice((1, 1, 1, 2)), presence_penalty=penalty)
        guidance = wire.LengthGuidance(scale=2.0) if self._lenvm_pool is not None and draws.random() < 0.7 else None
        return GenerateRequest.of(wire.Generate(name, prompt, sampling, length_guidance=guidance, caller=caller), 0.0)


def describe(batch: Batch) -> Any:
    """All numbers of a batch. Slots are numbered in their order in it, because evictions at once leave the free ones in another
    order."""
    labels: dict[tuple[bool, int], int] = {}

    def told(slots: Ints, on_lenvm: bool) -> list[int]:
        return [labels.setdefault((on_lenvm, slot), len(labels)) for slot in slots.tolist()]

    segments = [
        (each.request.id, each.branch and each.branch.index, each.tokens.tolist(), told(each.context, each.request.on_lenvm))
        for each in (*batch.segments, *batch.lenvm_segments)
    ]
    passes = [
        (branch.request.id, branch.index, told(each.prefix, True), each.pending and each.pending.tokens.tolist())
        for branch, each in batch.candidate_passes.items()
    ]
    return segments, passes, batch.tokens, batch.load


def test_the_steps_are_those_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    decode, preempt = scheduling.decode, Allocator.preempt

    def counting(batch: Batch, branches: list[Branch], allocator: Allocator) -> bool:
        done = decode(batch, branches, allocator)
        counts["at once" if done else "lacked slots"] += 1
        counts["guided"] += done and any(branch.aux_branch is not None for branch in branches)
        return done

    def preempting(self: Allocator, request: Request) -> None:
        counts["preempted"] += 1
        preempt(self, request)

    monkeypatch.setattr(scheduling, "decode", counting)
    monkeypatch.setattr(Allocator, "preempt", preempting)
    at_once = [Played(seed).steps for seed in range(12)]
    assert min(counts[name] for name in ("at once", "lacked slots", "guided", "preempted")) > 20, counts
    monkeypatch.setattr(scheduling, "decoding_branch", lambda request, run_ahead: None)
    for seed, steps in enumerate(at_once):
        for number, (step, expected) in enumerate(zip(steps, Played(seed).steps, strict=True)):
            assert step == expected, (seed, number)
