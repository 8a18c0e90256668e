"""Invariants of slots after every step, and a fake model that checks them: a slot's content is determined by what led to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.requests.batch import Batch, CandidatePass
from yardstick_llm.engine.requests.core import Branch, ItemBlock, ItemGroup, Request
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.scheduling.allocation import KVPool
from yardstick_llm.engine.scheduling.fair_queue import rank
from yardstick_llm.engine.scheduling.scheduler import Scheduler


class SlotContents:
    """Stands in for keys and values: each slot of each model holds the hash of all tokens up to its own."""

    def __init__(self) -> None:
        self._contents: dict[tuple[bool, int], int] = {}
        self._adopting: list[tuple[CandidatePass, int]] = []
        self.lenvm_tokens = 0
        """Computed on the length model for sure: candidates are not counted."""

    def compute(self, batch: Batch, skipped: Container[CandidatePass] = ()) -> None:
        """Write every run's slots, then check that each context spells the prefix and branch of its request. What the draws of
        the batch add is written by :meth:`adopt`."""
        ahead = [candidate_pass for candidate_pass in batch.candidate_passes.values() if candidate_pass not in skipped]
        lenvm_segments = batch.lenvm_segments + [
            candidate_pass.pending for candidate_pass in ahead if candidate_pass.pending is not None
        ]
        for segment in batch.segments + lenvm_segments:
            own = segment.context[-len(segment.tokens) :]
            assert len(set(own.tolist())) == len(own)
            for slot, expected in zip(
                own, self._expected(segment.request, segment.branch, len(segment.context))[-len(own) :], strict=True
            ):
                self._contents[segment.request.on_lenvm, int(slot)] = expected
        for segment in batch.segments + lenvm_segments:
            self._check(segment.request, segment.branch, segment.context)
        for candidate_pass in ahead:
            self._check(candidate_pass.branch.request, candidate_pass.branch, candidate_pass.prefix)
            known = candidate_pass.branch.request.prefix.size + len(candidate_pass.branch.tokens)
            assert len(candidate_pass.prefix) == known  # else a candidate would be at the wrong position
            assert candidate_pass.slot not in candidate_pass.prefix
        self._adopting = [(candidate_pass, len(candidate_pass.branch.tokens)) for candidate_pass in ahead]
        self.lenvm_tokens += sum(len(segment.tokens) for segment in lenvm_segments)

    def adopt(self) -> None:
        """Adopt the step's draws on the length model; their tokens are known by now."""
        for candidate_pass, known in self._adopting:
            if len(candidate_pass.branch.tokens) > known:
                expected = self._expected(candidate_pass.branch.request, candidate_pass.branch, len(candidate_pass.prefix) + 1)
                self._contents[True, candidate_pass.slot] = expected[-1]
        self._adopting = []

    def _check(self, request: Request, branch: Branch | None, slots: Ints) -> None:
        found = [self._contents[request.on_lenvm, int(slot)] for slot in slots]
        assert found == self._expected(request, branch, len(slots))

    def _expected(self, request: Request, branch: Branch | None, count: int) -> list[int]:
        tokens = request.prefix.tolist() + (branch.tokens.view.tolist() + branch.draft.tolist() if branch else [])
        chain, hashes = 0, []
        for token in tokens[:count]:
            chain = hash((chain, token))
            hashes.append(chain)
        return hashes


def check(scheduler: Scheduler) -> None:
    """On each model each slot is free, or in the prefix cache, or a branch's own; references are those of requests."""
    for on_lenvm, kv_pool in enumerate(scheduler.kv_pools):
        _check_kv_pool(kv_pool, [part for part in parts_of(scheduler) if part.on_lenvm == on_lenvm])
    items = [part for part in parts_of(scheduler) if part.group is not None]
    others = sum(len(branch.slots) for request in items for branch in request.branches)
    others += sum(len(request.prefix_slots) for request in items if request.salt is None)
    assert scheduler.allocator.other_item_tokens == others
    assert scheduler.allocator.without_place == sum(not request.takes_place for request in scheduler.running)
    assert scheduler.allocator.items_running == sum(request.group is not None for request in scheduler.running)
    for request in scheduler.requests:
        if isinstance(request, ItemGroup):
            _check_group(request, scheduler)
            continue
        assert request.branches
        assert isinstance(request, GenerateRequest) or all(branch.given == len(branch.tokens) for branch in request.branches)
        for part in request.with_aux[1:]:
            assert [branch.main_branch for branch in part.branches] == request.branches
            assert all(len(branch.slots) <= len(branch.tokens) + 1 for branch in part.branches)
    check_flows(scheduler)


def queued(request: Request) -> Request:
    """The queued part of a request: its forecast, as long as that is not computed, or the request itself."""
    return request.forecast if isinstance(request, GenerateRequest) and request.forecast else request


def parts_of(scheduler: Scheduler) -> list[Request]:
    """Everything that may hold slots: requests, aux requests, and the items of groups that run."""
    parts: list[Request] = []
    for request in map(queued, scheduler.requests):
        for running in request.parts.values() if isinstance(request, ItemGroup) else [request]:
            parts += running.items if isinstance(running, ItemBlock) else running.with_aux
    return parts


def _check_group(group: ItemGroup, scheduler: Scheduler) -> None:
    """Each item waits, runs or is done, and what runs is among the running requests."""
    running = [part for part in scheduler.running if part.group is group]
    assert running == [part for part in scheduler.running if part in group.parts.values()]
    assert len(running) == len(group.parts)
    items = [item for part in running for item in (part.items if isinstance(part, ItemBlock) else [part])]
    done = [index for index, row in enumerate(group.rows) if row]
    assert sorted([*group.waiting, *(item.index for item in items), *done]) == list(range(len(group.rows)))
    assert group.left == len(group.rows) - len(done)
    assert group.size == sum(len(group.items[index]) + len(group.query) for index in group.waiting)
    for block in running:
        if isinstance(block, ItemBlock):
            assert block.slots.tolist() == [slot for item in block.items for slot in item.branches[0].slots.tolist()]
            assert block.taken == len(block.slots)


def check_flows(scheduler: Scheduler) -> None:
    """Each request is in the flow of its tenant, once, and what a flow counts is what its requests have."""
    flows = scheduler.queue.flows
    assert set(flows) == {request.caller.tenant for request in scheduler.requests}, "idle tenants have no state"
    assert scheduler.waiting == sum(len(flow.waiting) for flow in flows.values())
    for tenant, flow in flows.items():
        running = [request for request in scheduler.running if request.caller.tenant == tenant]
        waiting = [request for _, _, request in flow.waiting]
        assert waiting == sorted(waiting, key=lambda request: (rank(request), request.arrival))
        own = [queued(request) for request in scheduler.requests if request.caller.tenant == tenant]
        assert {request.arrival for request in waiting} == {request.arrival for request in own if waits(request, running)}
        assert list(flow.running.values()) == running
        assert list(flow.running) == [request.arrival for request in running]
        assert flow.waiting_tokens == sum(request.size for request in waiting)
        for kv_pool in range(len(scheduler.kv_pools)):
            with_aux = [part for request in running for part in request.with_aux if part.on_lenvm == kv_pool]
            for part in with_aux:
                branches = len(part.slots) if isinstance(part, ItemBlock) else sum(len(branch.slots) for branch in part.branches)
                assert branches <= part.taken <= branches + len(part.prefix_slots)
            assert flow.held[kv_pool] == sum(part.taken for part in with_aux)


def waits(request: Request, running: list[Request]) -> bool:
    """Whether something of a request is to be among the waiting."""
    return len(request.waiting) > 0 if isinstance(request, ItemGroup) else request not in running


def _check_kv_pool(kv_pool: KVPool, with_aux: list[Request]) -> None:
    cache = kv_pool.cache
    nodes = list(cache.nodes())
    owners = [kv_pool.pool.free_slots.tolist()] + [node.slots.tolist() for node in nodes]
    owners += [branch.slots.tolist() for part in with_aux for branch in part.branches]
    owned = [slot for slots in owners for slot in slots]
    assert sorted(owned) == list(range(kv_pool.pool.size))

    references = {id(node): 0 for node in nodes}
    roots: dict[str | None, list[Request]] = defaultdict(list)
    for part in with_aux:
        node, held = part.node, []
        while node is not None and node.parent is not None:
            references[id(node)] += 1
            held.append(node.slots.tolist())
            node = node.parent
        if part.node is not None:
            roots[node.salt].append(part)
            assert [slot for slots in reversed(held) for slot in slots] == part.prefix_slots.view.tolist()
    for node in nodes:
        assert node.references == references[id(node)]
        assert len(node.tokens) == len(node.slots) > 0
        assert node.parent.children[int(node.tokens[0])] is node
        assert all(node.references >= child.references for child in node.children.values())
    for root in cache.roots:
        own = 1 if root.salt is None else len(roots[root.salt])
        assert root.references == (0 if root is cache.root else own)
        assert root.children or root.references or root is cache.root, "a tree without tokens and requests is dropped"
    for salt, requests in roots.items():
        assert all(part.salt == salt for part in requests), "a request is in the tree of its salt"
    assert cache.evictable == sum(len(node.tokens) for node in nodes if not node.references)
    assert cache.held_item_tokens == sum(len(node.tokens) for node in nodes if node.references and node.item)
