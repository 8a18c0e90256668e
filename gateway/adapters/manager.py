"""Loads and unloads adapters on all engines of a model, and brings engines that join later up to date.

What the API has loaded is remembered in a store (:mod:`gateway.adapters.store`), which gateways share through Redis. An engine that
lacks a remembered adapter gets it (:mod:`gateway.adapters.restoring`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine import wire
from gateway.adapters.calls import Outcome, load_on, replicas_of, unload_on
from gateway.adapters.store import MOST_KEPT, Full, Loaded, LoadedStore, Unavailable
from gateway.errors import AdapterNotFound, Conflict, InvalidRequest, NotReady, Overloaded, StoreFull, StoreUnavailable
from gateway.ops.metrics import Telemetry
from gateway.pool.adapters import Reference
from gateway.pool.pool import Pool
from gateway.pool.replica import Replica

logger = logging.getLogger(__name__)

MOST_OPERATIONS = 4
"""Most loads and unloads of this gateway at a time; more are answered 429."""
RETRY_SECONDS = 2.0


class AdapterManager:
    """The operations behind ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

    def __init__(self, pool: Pool, store: LoadedStore, telemetry: Telemetry) -> None:
        self.store = store
        self.known: dict[Reference, Loaded] = {}
        """The store's adapters at the last reading, with the changes that this gateway made since."""
        self.busy: set[Reference] = set()
        """Adapters that this gateway loads or unloads right now."""
        self.unloads: dict[Replica, set[str]] = {}
        """Names that are still to be unloaded, by replica: unloading failed there, or the replica was not ready."""
        self._pool = pool
        self._telemetry = telemetry

    async def load(self, base: str, name: str, path: str, *, replace: bool) -> Outcome:
        """Load an adapter on every ready engine of ``base`` and remember it; at least one engine has it then. Raises
        :class:`GatewayError`."""
        reference = Reference(base, name)
        self._check_name(reference)
        async with self._operation(reference):
            replicas = self._ready(base)
            await self._read()
            if reference not in self.known and len(self.known) >= MOST_KEPT:
                raise StoreFull(f"{MOST_KEPT} adapters are remembered, the most that there may be; unload some.")
            outcome = await load_on(replicas, wire.LoadAdapter(name, path, replace))
            self._count("load", outcome)
            if outcome.adapter is None:
                raise outcome.failed[0][1]
            for replica in replicas_of(self._pool, base):
                self.unloads.get(replica, set()).discard(name)
            await self._refresh(replicas)
            loaded = Loaded(base, name, path, outcome.adapter.digest)
            try:
                await self.store.put(loaded)
            except (Unavailable, Full):
                logger.error("adapter %s: loaded, but not remembered", reference)
                message = "The adapter is loaded, but engines that join later will not get it; send the request again."
                raise StoreUnavailable(message, retry_after=1) from None
            self.known[reference] = loaded
            logger.info("adapter %s: loaded on %d of %d engines", reference, len(outcome.done), len(replicas))
        return outcome

    async def unload(self, reference: Reference) -> Outcome:
        """Unload an adapter everywhere and forget it. Raises :class:`GatewayError`, such as :class:`AdapterNotFound`."""
        async with self._operation(reference):
            replicas = replicas_of(self._pool, reference.base)
            holders = [replica for replica in replicas if reference.name in replica.adapters]
            remembered = await self._forget(reference)
            asked = [replica for replica in replicas if replica.takes_work and replica.takes_adapters]
            outcome = await unload_on(asked, reference.name)
            self._count("unload", outcome)
            if not (outcome.done or outcome.failed or remembered or holders):
                raise AdapterNotFound(f"The model {reference.base!r} has no adapter {reference.name!r}.", param="lora_name")
            later = [*(replica for replica, _ in outcome.failed), *(replica for replica in holders if not replica.takes_work)]
            for replica in later:
                self.unloads.setdefault(replica, set()).add(reference.name)
            await self._refresh(asked)
            logger.info("adapter %s: unloaded on %d engines, %d to follow", reference, len(outcome.done), len(later))
        return outcome

    @asynccontextmanager
    async def _operation(self, reference: Reference) -> AsyncIterator[None]:
        """Run one of at most :data:`MOST_OPERATIONS` operations, and of one adapter only one."""
        if reference in self.busy:
            message = f"The adapter {reference.name!r} is being loaded or unloaded; try again soon."
            raise Conflict(message, param="lora_name", retry_after=RETRY_SECONDS)
        if len(self.busy) >= MOST_OPERATIONS:
            raise Overloaded("Other adapters are being loaded or unloaded; try again soon.", retry_after=RETRY_SECONDS)
        self.busy.add(reference)
        try:
            yield
        finally:
            self.busy.discard(reference)

    def _check_name(self, reference: Reference) -> None:
        if not wire.ADAPTER_NAME.fullmatch(reference.name):
            message = "The name of an adapter has 1 to 128 letters, digits, and `._-`."
            raise InvalidRequest(message, param="lora_name")
        if reference.name in self._pool.names.aliases or self._pool.versions(reference.name):
            message = f"{reference.name!r} is the name of a model that is served here; choose another one."
            raise InvalidRequest(message, param="lora_name")

    def _ready(self, base: str) -> list[Replica]:
        """Return the engines that load adapters. Raises :class:`NotReady`, :class:`InvalidRequest`."""
        ready = [replica for replica in replicas_of(self._pool, base) if replica.takes_work]
        if not ready:
            raise NotReady(f"The model {base!r} has no ready engine; try again soon.", retry_after=1)
        able = [replica for replica in ready if replica.takes_adapters]
        if not able:
            message = f"The engines of {base!r} take no adapters; start them with `--lora-root`."
            raise InvalidRequest(message, param="model")
        return able

    async def _read(self) -> None:
        try:
            self.known = await self.store.all()
        except Unavailable:
            raise _unavailable() from None

    async def _forget(self, reference: Reference) -> bool:
        try:
            remembered = await self.store.remove(reference)
        except Unavailable:
            raise _unavailable() from None
        self.known.pop(reference, None)
        return remembered

    async def _refresh(self, replicas: list[Replica]) -> None:
        await asyncio.gather(*(self._pool.adapters.refresh(replica) for replica in replicas))

    def _count(self, operation: str, outcome: Outcome) -> None:
        self._telemetry.adapter_operated(operation, len(outcome.done), len(outcome.failed))


def _unavailable() -> StoreUnavailable:
    message = "Redis, which remembers loaded adapters, does not answer, so none can be loaded or unloaded; try again."
    return StoreUnavailable(message, retry_after=1)
