"""What must hold of slots after every step, and a model that checks it without one: a slot's content is what led to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from engine.core import Batch, Branch, GenerateRequest, Ints, Lookahead, Request
from engine.fair_queue import rank
from engine.scheduler import Lane, Scheduler


class SlotContents:
    """Stands in for keys and values: each slot of each model holds the hash of all tokens up to its own."""

    def __init__(self) -> None:
        self._contents: dict[tuple[bool, int], int] = {}
        self._adopting: list[tuple[Lookahead, int]] = []
        self.value_tokens = 0
        """Computed on the length model for sure: candidates are not counted."""

    def compute(self, batch: Batch, skipped: Container[Lookahead] = ()) -> None:
        """Write every run's slots, then check that each context spells the prefix and branch of its request. What the draws of
        the batch add is written by :meth:`adopt`."""
        ahead = [lookahead for lookahead in batch.lookaheads.values() if lookahead not in skipped]
        value_runs = batch.values + [lookahead.pending for lookahead in ahead if lookahead.pending is not None]
        for run in batch.runs + value_runs:
            own = run.context[-len(run.tokens) :]
            assert len(set(own.tolist())) == len(own)
            for slot, expected in zip(own, self._expected(run.request, run.branch, len(run.context))[-len(own) :], strict=True):
                self._contents[run.request.on_length_model, int(slot)] = expected
        for run in batch.runs + value_runs:
            self._check(run.request, run.branch, run.context)
        for lookahead in ahead:
            self._check(lookahead.branch.request, lookahead.branch, lookahead.prefix)
            known = lookahead.branch.request.prefix.size + len(lookahead.branch.tokens)
            assert len(lookahead.prefix) == known  # else a candidate would be at the wrong position
            assert lookahead.slot not in lookahead.prefix
        self._adopting = [(lookahead, len(lookahead.branch.tokens)) for lookahead in ahead]
        self.value_tokens += sum(len(run.tokens) for run in value_runs)

    def adopt(self) -> None:
        """What the step drew, on the length model; its tokens are known by now."""
        for lookahead, known in self._adopting:
            if len(lookahead.branch.tokens) > known:
                expected = self._expected(lookahead.branch.request, lookahead.branch, len(lookahead.prefix) + 1)
                self._contents[True, lookahead.slot] = expected[-1]
        self._adopting = []

    def _check(self, request: Request, branch: Branch | None, slots: Ints) -> None:
        found = [self._contents[request.on_length_model, int(slot)] for slot in slots]
        assert found == self._expected(request, branch, len(slots))

    def _expected(self, request: Request, branch: Branch | None, count: int) -> list[int]:
        tokens = request.prefix.tolist() + (branch.tokens.view.tolist() if branch else [])
        chain, hashes = 0, []
        for token in tokens[:count]:
            chain = hash((chain, token))
            hashes.append(chain)
        return hashes


def check(scheduler: Scheduler) -> None:
    """On each model each slot is free, or in the prefix cache, or a branch's own; references are exactly those of the requests."""
    for on_length_model, lane in enumerate(scheduler.lanes):
        halves = [half for request in scheduler.requests for half in request.halves if half.on_length_model == on_length_model]
        _check_lane(lane, halves)
    for request in scheduler.requests:
        assert request.branches
        assert isinstance(request, GenerateRequest) or all(branch.given == len(branch.tokens) for branch in request.branches)
        for half in request.halves[1:]:
            assert [branch.twin for branch in half.branches] == request.branches
            assert all(len(branch.slots) <= len(branch.tokens) + 1 for branch in half.branches)
    check_flows(scheduler)


def check_flows(scheduler: Scheduler) -> None:
    """Each request is in the flow of its tenant, once, and what a flow counts is what its requests have."""
    flows = scheduler._queue.flows
    assert set(flows) == {request.caller.tenant for request in scheduler.requests}, "idle tenants have no state"
    running = {request.id for request in scheduler.running}
    for tenant, flow in flows.items():
        own = {request.id: request for request in scheduler.requests if request.caller.tenant == tenant}
        waiting = [request for _, _, request in flow.waiting]
        assert waiting == sorted(waiting, key=lambda request: (rank(request), request.arrival))
        assert {request.id for request in waiting} == own.keys() - running
        assert list(flow.running) == [request.id for request in scheduler.running if request.id in own]
        assert flow.waiting_tokens == sum(request.size for request in waiting)
        for lane in range(len(scheduler.lanes)):
            halves = [half for request in own.values() for half in request.halves if half.on_length_model == lane]
            for half in halves:
                branches = sum(len(branch.slots) for branch in half.branches)
                assert branches <= half.taken <= branches + len(half.prefix_slots)
            assert flow.held[lane] == sum(half.taken for half in halves)


def _check_lane(lane: Lane, halves: list[Request]) -> None:
    cache = lane.cache
    nodes = list(cache.nodes())
    owners = [lane.pool.free_slots.tolist()] + [node.slots.tolist() for node in nodes]
    owners += [branch.slots.view.tolist() for half in halves for branch in half.branches]
    owned = [slot for slots in owners for slot in slots]
    assert sorted(owned) == list(range(lane.pool.size))

    references = {id(node): 0 for node in nodes}
    roots: dict[str | None, list[Request]] = defaultdict(list)
    for half in halves:
        node, held = half.node, []
        while node is not None and node.parent is not None:
            references[id(node)] += 1
            held.append(node.slots.tolist())
            node = node.parent
        if half.node is not None:
            roots[node.salt].append(half)
            assert [slot for slots in reversed(held) for slot in slots] == half.prefix_slots.view.tolist()
    for node in nodes:
        assert node.references == references[id(node)]
        assert len(node.tokens) == len(node.slots) > 0
        assert node.parent.children[int(node.tokens[0])] is node
        assert all(node.references >= child.references for child in node.children.values())
    for root in cache.roots:
        assert root.references == (0 if root is cache.root else 1 if root.salt is None else len(roots[root.salt]))
        assert root.children or root.references or root is cache.root, "a tree without tokens and requests is dropped"
    for salt, requests in roots.items():
        assert all(half.salt == salt for half in requests), "a request is in the tree of its salt"
    assert cache.evictable == sum(len(node.tokens) for node in nodes if not node.references)
