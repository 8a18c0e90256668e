"""What must hold of slots after every step, and a model that checks it without one: a slot's content is what led to it."""

from __future__ import annotations

from engine.core import Batch, GenerateRequest
from engine.scheduler import Scheduler


class SlotContents:
    """Stands in for keys and values: each slot holds the hash of all tokens up to its own."""

    def __init__(self) -> None:
        self._contents: dict[int, int] = {}

    def compute(self, batch: Batch) -> None:
        """Write every run's slots, then check that each context spells the prefix and branch of its request."""
        for run in batch.runs:
            own = run.context[-len(run.tokens) :]
            assert len(set(own.tolist())) == len(own)
            for slot, expected in zip(own, self._expected(run)[-len(own) :], strict=True):
                self._contents[int(slot)] = expected
        for run in batch.runs:
            assert [self._contents[int(slot)] for slot in run.context] == self._expected(run)

    def _expected(self, run) -> list[int]:
        tokens = run.request.prefix.tolist() + (run.branch.tokens.view.tolist() if run.branch else [])
        chain, hashes = 0, []
        for token in tokens[: len(run.context)]:
            chain = hash((chain, token))
            hashes.append(chain)
        return hashes


def check(scheduler: Scheduler) -> None:
    """Each slot is free, or in the prefix cache, or a branch's own; references are exactly those of the requests."""
    cache = scheduler.cache
    nodes = list(cache.nodes())
    owners = [scheduler.pool.free_slots.tolist()] + [node.slots.tolist() for node in nodes]
    owners += [branch.slots.view.tolist() for request in scheduler.requests for branch in request.branches]
    owned = [slot for slots in owners for slot in slots]
    assert sorted(owned) == list(range(scheduler.pool.size))

    references = {id(node): 0 for node in nodes}
    for request in scheduler.requests:
        node, held = request.node, []
        while node is not None and node is not cache.root:
            references[id(node)] += 1
            held.append(node.slots.tolist())
            node = node.parent
        if request.node is not None:
            assert [slot for slots in reversed(held) for slot in slots] == request.prefix_slots.view.tolist()
    for node in nodes:
        assert node.references == references[id(node)]
        assert len(node.tokens) == len(node.slots) > 0
        assert node.parent.children[int(node.tokens[0])] is node
        assert all(node.references >= child.references for child in node.children.values())
    assert cache.evictable == sum(len(node.tokens) for node in nodes if not node.references)
    for request in scheduler.requests:
        assert request.branches
        assert isinstance(request, GenerateRequest) or all(branch.given == len(branch.tokens) for branch in request.branches)
