"""Counters of an engine's loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine import wire
from engine.device.compilations import Compilations
from engine.lora.registry import AdapterRegistry
from engine.readouts.base import LenVMCounts
from engine.runner.runner import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.structured_requests import StructuredRequests


@dataclass(slots=True)
class Refused:
    """Numbers of requests that the engine refused, or dropped while they waited, by reason."""

    invalid: int = 0
    queue: int = 0
    """The queue was full."""
    wait: int = 0
    """The expected wait was too long."""
    adapter: int = 0
    """The engine does not have the adapter."""
    displaced: int = 0
    """A tenant with fewer requests in a full queue took the place."""


@dataclass(slots=True)
class Counters:
    """Counts of the loop since its start."""

    replayed_before: tuple[int, int] = (0, 0)
    """Replays of the runner, of steps and of the length model's passes, before the loop began."""
    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    scored_items: int = 0
    cached_items: int = 0
    unpinned_items: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    lenvm: LenVMCounts = field(default_factory=LenVMCounts)
    refused: Refused = field(default_factory=Refused)

    def add(self, counts: LenVMCounts) -> None:
        """Add the counts of one step."""
        self.lenvm.tokens += counts.tokens
        self.lenvm.guided += counts.guided
        self.lenvm.alone += counts.alone

    def snapshot(
        self,
        info: wire.Info,
        scheduler: Scheduler,
        runner: Runner,
        structured: StructuredRequests | None,
        compilations: Compilations | None,
        adapters: AdapterRegistry,
    ) -> wire.Stats:
        """Return the counters and gauges of now."""
        return wire.Stats(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            wait_seconds=scheduler.longest_wait,
            slots_total=scheduler.pool.size,
            slots_free=scheduler.pool.available,
            slots_cached=scheduler.cache.evictable,
            slots_items=scheduler.cache.item_tokens,
            item_bytes=scheduler.cache.item_tokens * info.slot_bytes,
            slots_pinned=scheduler.cache.pins.tokens,
            slots_reserved=scheduler.reserved_slots,
            unpinned_items=self.unpinned_items,
            displaced_pins=scheduler.cache.pins.displaced,
            scored_items=self.scored_items,
            cached_items=self.cached_items,
            evicted_item_tokens=scheduler.cache.evicted_item_tokens,
            steps=self.steps,
            computed_tokens=self.computed_tokens,
            cached_tokens=self.cached_tokens,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
            replayed_steps=runner.replayed - self.replayed_before[0],
            attention_fallback=int(info.attention is not None and info.attention.fallback),
            lenvm_tokens=self.lenvm.tokens,
            guided_draws=self.lenvm.guided,
            decided_draws=self.lenvm.alone,
            replayed_lenvm_passes=runner.replayed_lenvm_passes - self.replayed_before[1],
            late_compilations=0 if compilations is None else compilations.late,
            tenants=scheduler.tenants,
            refused_invalid=self.refused.invalid,
            refused_queue=self.refused.queue,
            refused_wait=self.refused.wait,
            refused_adapter=self.refused.adapter,
            displaced=self.refused.displaced,
            **adapters.counts,
            **runner.images.counts,
            **structured.counts if structured is not None else {},
        )
