"""Loads and unloads adapters on all engines of a model, and brings engines that join later up to date.

What the API has loaded is remembered in the key-value store, which gateways share through Redis. A background task compares engines
with the store: it loads remembered adapters that an engine lacks, and repeats unloads that failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import (
    AdapterNotFound,
    Conflict,
    EngineSilent,
    GatewayError,
    InvalidRequest,
    NotReady,
    Overloaded,
    StoreFull,
    StoreUnavailable,
)
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.adapters import Reference
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import Replica
from yardstick_llm.gateway.process.event_loop import end_tasks
from yardstick_llm.gateway.store.base import Full, Missing, Space, Store, Unavailable

logger = logging.getLogger(__name__)

MOST_KEPT = 256
"""Most adapters that are remembered, of all models together."""
MOST_OPERATIONS = 4
"""Most loads and unloads of this gateway at a time; more are answered 429."""
RETRY_SECONDS = 2.0
CALL_SECONDS = 300.0
"""Longest time of one engine for loading an adapter, which it may have to download."""
REREAD_SECONDS = 5.0
"""Interval between two readings of the store, which other gateways change too."""
FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 300.0
"""Pauses before an adapter is loaded on an engine again after a failure; they double from the first to the longest."""
AT_ONCE = 2
"""Most engines that this gateway brings up to date at a time."""

SPACE = Space(name="adapters", bytes=4 << 20, entries=MOST_KEPT, entry_bytes=0)
_OWNER = "all"
T = TypeVar("T")


class Loaded(msgspec.Struct, frozen=True):
    """An adapter that replicas should have: a value of the store, in msgpack, named by its reference."""

    base: str
    name: str
    path: str
    """The path that engines read."""
    digest: str
    """Digest that the first engine reported."""

    @property
    def reference(self) -> Reference:
        """Which adapter it is."""
        return Reference(self.base, self.name)


class Outcome(msgspec.Struct, frozen=True):
    """The answers of a model's engines to one call."""

    done: list[Replica]
    failed: list[tuple[Replica, GatewayError]]
    adapter: wire.Adapter | None = None
    """The adapter that ``done`` loaded; None for an unload."""


class AdapterManager:
    """The operations behind ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, and the background task."""

    def __init__(
        self,
        pool: Pool,
        store: Store,
        telemetry: Telemetry,
        *,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval``: seconds between two comparisons of engines with the store."""
        self.known: dict[Reference, Loaded] = {}
        """The store's adapters at the last reading, with the changes that this gateway made since."""
        self._store = store
        self._pool = pool
        self._telemetry = telemetry
        self._interval = interval
        self._clock = clock
        self._busy: set[Reference] = set()  # adapters that this gateway loads or unloads right now
        self._unloads: dict[Replica, set[str]] = {}  # names still to be unloaded: it failed, or the replica was not ready
        self._read_at = float("-inf")
        self._pauses: dict[tuple[Replica, Loaded], tuple[float, float]] = {}
        """Length of the last pause, and the time until which an adapter is not loaded on a replica again."""
        self._updates: dict[Replica, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        pool.adapters.awaited = lambda reference: reference in self.known and reference not in self._busy

    def start(self) -> None:
        """Start the background task."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop the task and the calls that it has begun."""
        await end_tasks(self._task, *self._updates.values())

    async def load(self, base: str, name: str, path: str, *, replace: bool) -> Outcome:
        """Load an adapter on every ready engine of ``base`` and remember it; at least one engine has it then. Raises
        :class:`GatewayError`."""
        reference = Reference(base, name)
        if not wire.ADAPTER_NAME.fullmatch(name):
            raise InvalidRequest("The name of an adapter has 1 to 128 letters, digits, and `._-`.", param="lora_name")
        if name in self._pool.names.aliases or self._pool.versions(name):
            message = f"{name!r} is the name of a model that is served here; choose another one."
            raise InvalidRequest(message, param="lora_name")
        async with self._operation(reference):
            ready = [replica for replica in self._replicas_of(base) if replica.takes_work]
            if not ready:
                raise NotReady(f"The model {base!r} has no ready engine; try again soon.", retry_after=1)
            replicas = [replica for replica in ready if replica.takes_adapters]
            if not replicas:
                message = f"The engines of {base!r} take no adapters; start them with `--lora-root`."
                raise InvalidRequest(message, param="model")
            if not await self._read():
                raise _unavailable()
            if reference not in self.known and len(self.known) >= MOST_KEPT:
                raise StoreFull(f"{MOST_KEPT} adapters are remembered, the most that there may be; unload some.")
            outcome = await self._load_on(replicas, wire.LoadAdapter(name, path, replace), "load")
            if outcome.adapter is None:
                raise outcome.failed[0][1]
            for replica in self._replicas_of(base):
                self._unloads.get(replica, set()).discard(name)
            await self._refresh(replicas)
            loaded = Loaded(base, name, path, outcome.adapter.digest)
            try:
                await self._store.put(SPACE, _OWNER, [(str(reference), msgspec.msgpack.encode(loaded))])
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
            replicas = self._replicas_of(reference.base)
            holders = [replica for replica in replicas if reference.name in replica.adapters]
            remembered = 0
            try:
                with suppress(Missing):
                    remembered = await self._store.remove(SPACE, _OWNER, [str(reference)])
            except Unavailable:
                raise _unavailable() from None
            self.known.pop(reference, None)
            asked = [replica for replica in replicas if replica.takes_work and replica.takes_adapters]
            outcome = await self._unload_on(asked, reference.name)
            if not (outcome.done or outcome.failed or remembered or holders):
                raise AdapterNotFound(f"The model {reference.base!r} has no adapter {reference.name!r}.", param="lora_name")
            later = [*(replica for replica, _ in outcome.failed), *(replica for replica in holders if not replica.takes_work)]
            for replica in later:
                self._unloads.setdefault(replica, set()).add(reference.name)
            await self._refresh(asked)
            logger.info("adapter %s: unloaded on %d engines, %d to follow", reference, len(outcome.done), len(later))
        return outcome

    @asynccontextmanager
    async def _operation(self, reference: Reference) -> AsyncIterator[None]:
        """Run one of at most :data:`MOST_OPERATIONS` operations, and of one adapter only one."""
        if reference in self._busy:
            message = f"The adapter {reference.name!r} is being loaded or unloaded; try again soon."
            raise Conflict(message, param="lora_name", retry_after=RETRY_SECONDS)
        if len(self._busy) >= MOST_OPERATIONS:
            raise Overloaded("Other adapters are being loaded or unloaded; try again soon.", retry_after=RETRY_SECONDS)
        self._busy.add(reference)
        try:
            yield
        finally:
            self._busy.discard(reference)

    # --- fan-out

    def _replicas_of(self, base: str) -> list[Replica]:
        """Return the engines of all versions of the model called ``base``, ready or not."""
        return [replica for served in self._pool.versions(base) for replica in served.replicas]

    async def _load_on(self, replicas: Sequence[Replica], load: wire.LoadAdapter, operation: str) -> Outcome:
        """Load an adapter on all ``replicas``. One whose weights differ from those of most others counts as failed."""
        answers = await asyncio.gather(*[_limited(replica.client.load_adapter(load)) for replica in replicas])
        pairs = list(zip(replicas, answers, strict=True))
        failed = [(replica, answer) for replica, answer in pairs if isinstance(answer, GatewayError)]
        loaded = [(replica, answer) for replica, answer in pairs if isinstance(answer, wire.Adapter)]
        adapter, done = None, list[Replica]()
        if loaded:
            digest = Counter(each.digest for _, each in loaded).most_common(1)[0][0]
            adapter = next(each for _, each in loaded if each.digest == digest)
            done = [replica for replica, each in loaded if each.digest == digest]
            message = "The path has other weights there than on other engines; use a volume that all engines share."
            failed += [(replica, InvalidRequest(message, param="lora_path")) for replica, _ in loaded if replica not in done]
        self._telemetry.adapter_operated(operation, len(done), len(failed))
        return Outcome(done, failed, adapter)

    async def _unload_on(self, replicas: Sequence[Replica], name: str) -> Outcome:
        """Unload an adapter on all ``replicas``. Those that do not have it are neither done nor failed."""
        unload = wire.UnloadAdapter(name)
        answers = await asyncio.gather(*[_limited(replica.client.unload_adapter(unload)) for replica in replicas])
        done, failed = list[Replica](), list[tuple[Replica, GatewayError]]()
        for replica, error in zip(replicas, answers, strict=True):
            if error is None:
                done.append(replica)
            elif not isinstance(error, AdapterNotFound):
                failed.append((replica, error))
        self._telemetry.adapter_operated("unload", len(done), len(failed))
        return Outcome(done, failed)

    async def _refresh(self, replicas: Sequence[Replica]) -> None:
        await asyncio.gather(*[self._pool.adapters.refresh(replica) for replica in replicas])

    async def _read(self) -> bool:
        """Read the store; return whether it answered. What was read before stays valid while it does not."""
        known: dict[Reference, Loaded] = {}
        after: int | None = 0
        try:
            while after is not None:
                page = await self._store.page(SPACE, _OWNER, after, MOST_KEPT)
                read = (msgspec.msgpack.decode(value, type=Loaded) for _, value in page.entries)
                known |= {loaded.reference: loaded for loaded in read}
                after = page.next
        except Missing:
            known = {}  # none was loaded yet
        except Unavailable:
            return False
        self.known = known
        self._read_at = self._clock()
        self._pool.adapters.settle()
        return True

    # --- engines that join later

    async def _follow(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # a fault must not end the task
                logger.exception("adapters cannot be compared")
            missed = self._pool.adapters.missed
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await missed.wait()
            missed.clear()

    async def look(self) -> None:
        """Compare once, and start to bring engines up to date."""
        if self._clock() >= self._read_at + REREAD_SECONDS:
            await self._read()
        self._unloads = {replica: names for replica, names in self._unloads.items() if names and not replica.gone}
        remembered = set(self.known.values())
        self._pauses = {key: pause for key, pause in self._pauses.items() if not key[0].gone and key[1] in remembered}
        bases = {loaded.base for loaded in remembered}
        for replica in {*self._unloads, *(replica for base in bases for replica in self._replicas_of(base))}:
            if len(self._updates) >= AT_ONCE:
                return
            if replica not in self._updates and replica.takes_work and (self._unloads.get(replica) or self._lacking(replica)):
                task = self._updates[replica] = asyncio.create_task(self._update(replica))
                task.add_done_callback(lambda _, replica=replica: self._updates.pop(replica, None))  # type: ignore[misc]

    def _lacking(self, replica: Replica) -> list[Loaded]:
        """Return the remembered adapters that ``replica`` lacks, without those that pause or are being loaded."""
        return [
            loaded
            for loaded in self.known.values()
            if replica.takes_adapters
            and loaded.reference not in self._busy
            and any(replica in served.replicas for served in self._pool.versions(loaded.base))
            and ((has := replica.adapters.get(loaded.name)) is None or has.digest != loaded.digest)
            and self._pauses.get((replica, loaded), (0.0, 0.0))[1] <= self._clock()
        ]

    async def _update(self, replica: Replica) -> None:
        """Repeat unloads on ``replica``, and load what it lacks."""
        for name in sorted(self._unloads.get(replica, ())):
            if not (await self._unload_on([replica], name)).failed:
                self._unloads.get(replica, set()).discard(name)
        if self._lacking(replica) and await self._read():  # another gateway may have unloaded what is missing
            for loaded in self._lacking(replica):
                await self._restore(replica, loaded)
        await self._pool.adapters.refresh(replica)

    async def _restore(self, replica: Replica, loaded: Loaded) -> None:
        outcome = await self._load_on([replica], wire.LoadAdapter(loaded.name, loaded.path, replace=True), "restore")
        pause = min(2 * self._pauses.get((replica, loaded), (FIRST_PAUSE_SECONDS / 2, 0.0))[0], LONGEST_PAUSE_SECONDS)
        if outcome.failed:
            logger.warning("engine %s: adapter %s is not loaded: %s", replica.client.url, loaded.reference, outcome.failed[0][1])
        elif outcome.adapter is not None and outcome.adapter.digest != loaded.digest:
            logger.warning("engine %s: the files of %s have changed since it was loaded", replica.client.url, loaded.reference)
            pause = LONGEST_PAUSE_SECONDS
        self._pauses[replica, loaded] = (pause, self._clock() + pause)
        if outcome.done and await self._read() and loaded.reference not in self.known:  # it was unloaded meanwhile
            await self._unload_on([replica], loaded.name)


async def _limited(call: Awaitable[T]) -> T | GatewayError:
    """Return the answer or the error of one engine."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            return await call
    except TimeoutError:
        return EngineSilent(f"The engine did not answer within {CALL_SECONDS:g} s.")
    except GatewayError as error:
        return error


def _unavailable() -> StoreUnavailable:
    message = "Redis, which remembers loaded adapters, does not answer, so none can be loaded or unloaded; try again."
    return StoreUnavailable(message, retry_after=1)
