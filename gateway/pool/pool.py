"""The replicas that discovery finds: probed in the background and grouped by the model that they serve."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import GatewayError, InvalidRequest, ModelNotFound, NotReady, UnusableModel
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.pool.adapters import AdapterDirectory
from yardstick_llm.gateway.pool.client import REFUSED, UNANSWERED
from yardstick_llm.gateway.pool.discovery import Endpoint, Source
from yardstick_llm.gateway.pool.replica import Replica, ServedModel
from yardstick_llm.gateway.presets.preset import PresetError, choose, is_fallback
from yardstick_llm.gateway.process.event_loop import end_tasks
from yardstick_llm.gateway.text.vocabulary import TokenizerError
from yardstick_llm.gateway.workers.workers import Workers

logger = logging.getLogger(__name__)

TOKENIZER_TURN_SECONDS = 2.0
"""The gateway asks one replica of a model for the tokeniser; after this time it also asks another one."""
PHASES = 20
"""Points of time in an interval at which engines are probed. Of 100 engines, five are probed at once, which takes less than 1 ms.
All at once would delay streams, and one by one would take half as much CPU time again, because caches are cold each time."""
SHORTEST_PAUSE = 0.1
"""Shortest pause as a part of the interval. A timer may end a millisecond early, which must not lead to a second probe."""
STATS_SECONDS = 5.0
"""Interval between two requests for the statistics of an engine, of which the metrics of item caches are made."""
TICK_SECONDS = 0.25
"""Interval between two checks of all replicas for silence."""
LATE_SECONDS = 0.1
"""Tolerated delay of a tick. A longer delay means that this process was blocked or stopped."""


@dataclass(frozen=True)
class Names:
    """Names of models besides those that engines report, as operators wrote them."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Model that each alias stands for."""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """Model that takes the requests of a model without a ready engine."""

    def real(self, name: str) -> str:
        """Return the model that ``name`` stands for: ``name`` itself if it is no alias."""
        return self.aliases.get(name, name)

    def fallbacks_of(self, model: str) -> Iterator[str]:
        """Yield the fallback of ``model``, the fallback of that one, and so on, each once."""
        seen = {self.real(model)}
        while (following := self.fallbacks.get(model)) is not None and (model := self.real(following)) not in seen:
            seen.add(model)
            yield model


class AwakeClock:
    """Monotonic seconds during which this process could receive messages.

    The clock advances by at most ``TICK_SECONDS + LATE_SECONDS`` between two ticks. A gateway that was blocked or suspended for an
    hour therefore treats no engine as silent, whichever of its tasks runs first afterwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked = clock()
        self._awake = 0.0

    def now(self) -> float:
        """Seconds since the clock was created."""
        return self._awake + min(self._clock() - self._ticked, TICK_SECONDS + LATE_SECONDS)

    def tick(self) -> None:
        """Advance the clock. Must be called every :data:`TICK_SECONDS`."""
        self._awake, self._ticked = self.now(), self._clock()


class Pool:
    """The served models. Between :meth:`start` and :meth:`stop` the pool follows its sources and probes every replica."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        connect: Callable[[str, str], Replica],
        telemetry: Telemetry,
        workers: Workers,
        *,
        probe_seconds: float,
        silence_seconds: float,
        startup_seconds: float,
        presets: Mapping[str, str] | None = None,
        names: Names | None = None,
    ) -> None:
        """``sources``: by entry of the setting ``engines``. ``connect``: creates the replica for a URL and the entry that listed
        it. ``workers``: worker processes that load the models' tokenisers. ``presets``: name or file of models' presets."""
        self._sources = sources
        self._connect = connect
        self._workers = workers
        self._probe_seconds = probe_seconds
        self._silence_seconds = silence_seconds
        self._startup_seconds = startup_seconds
        self._presets = presets or {}
        self.names = names or Names()
        self.adapters = AdapterDirectory(workers, lambda: self._served.values(), presets=self._presets, real=self.names.real)
        self._clock = AwakeClock()
        self._phases = itertools.cycle(range(PHASES))
        self._telemetry = telemetry
        self._found: dict[str, Sequence[Endpoint]] = {}  # by entry, once it is known
        self._replicas: dict[str, Replica] = {}  # by URL
        self._served: dict[tuple[str, str], ServedModel] = {}  # by name and fingerprint
        self._learned: set[str] = set()  # entries that have led to a model
        self._turns: dict[tuple[str, str], asyncio.Lock] = {}  # by name and fingerprint, while the tokeniser is fetched
        self._followers: list[asyncio.Task[None]] = []
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        telemetry.watch(self._fleet)
        telemetry.watch(self._reported)

    def start(self) -> None:
        """Start the background tasks."""
        self._followers = [asyncio.create_task(self._follow(entry, source)) for entry, source in self._sources.items()]
        self._followers.append(asyncio.create_task(self._watch_silence()))

    async def stop(self) -> None:
        """Stop the background tasks, and close idle connections."""
        await end_tasks(*self._followers, *self._watchers.values())
        for replica in self._replicas.values():
            replica.client.close()

    # --- the models

    def check_ready(self) -> None:
        """Return once any model is known: the gateway then answers from the cache and lets requests wait for an engine. Until then
        raise :class:`NotReady`, or :class:`UnusableModel` if a model's tokeniser is unusable."""
        if self._served:
            return
        problem = next((replica.problem for replica in self._replicas.values() if replica.problem), None)
        if problem is not None:
            raise UnusableModel(f"An engine's model cannot be used: {problem}.", retry_after=1)
        raise NotReady("No engine is ready; try again soon.", retry_after=1)

    @property
    def models(self) -> list[ServedModel]:
        """One model for each name that has been served, also if its replicas are away."""
        return [self.model(name) for name in sorted({served.name for served in self._served.values()})]

    def model(self, name: str | None) -> ServedModel:
        """Return the model or adapter called ``name``; None means the only model. If replicas of one name have different
        fingerprints (during a roll-out), the version with more ready replicas is returned. Raises :class:`ModelNotFound`,
        :class:`NotReady` if the model may appear soon, and :class:`InvalidRequest` if ``name`` is None and there are several
        models."""
        names = {served.name for served in self._served.values()}
        if name is None:
            if len(names) > 1:
                raise InvalidRequest(f"Several models are served; set `model` to one of {_listed(names)}.", param="model")
            name = next(iter(names), None)
        real = None if name is None else self.names.real(name)
        if real in names:
            versions = self.versions(real)
            return versions[0] if len(versions) == 1 else max(versions, key=lambda m: (len(m.ready), len(m.replicas)))
        if real is not None and (adapter := self.adapters.find(real)) is not None:
            return adapter
        if not names or self._starting(real) or self.adapters.may_appear(real):
            raise NotReady("The engine has not started yet; try again soon.", retry_after=1)
        raise ModelNotFound(f"The model {str(name)[:200]!r} does not exist; served here: {_listed(names)}.", param="model")

    def versions(self, name: str | None) -> list[ServedModel]:
        """Return the known versions of the model called ``name``."""
        return [served for served in self._served.values() if served.name == name]

    def fallback(self, name: str, may_use: Callable[[str], bool]) -> ServedModel | None:
        """Return the first fallback of the model called ``name`` that has a ready replica and that ``may_use`` accepts."""
        model = self.names.real(name)
        for other in self.names.fallbacks_of(model):
            with suppress(ModelNotFound, NotReady):
                found = self.model(other)
                if found.has_ready and may_use(other):
                    self._telemetry.fell_back(model, other)
                    self._telemetry.engines.missing.labels(model).inc()
                    return found
        return None

    def _starting(self, name: str | None) -> bool:
        """Whether the model called ``name`` may appear soon: an engine reports that it loads or serves it, or the gateway has just
        started and some entry of ``engines`` has not led to a model yet."""
        if any(replica.expected == name for replica in self._replicas.values()):
            return True
        return self._clock.now() < self._startup_seconds and not self._learned.issuperset(self._sources)

    # --- discovery

    async def _follow(self, entry: str, source: Source) -> None:
        async for endpoints in source:
            self._found[entry] = endpoints
            self._settle()

    def _settle(self) -> None:
        """Update the replicas to the union of what all sources have found."""
        wanted = {endpoint.url: (entry, endpoint) for entry, found in self._found.items() for endpoint in found}
        for url in self._replicas.keys() - wanted.keys():
            self._forget(self._replicas.pop(url))
        for url, (entry, endpoint) in wanted.items():
            if url not in self._replicas:
                replica = self._replicas[url] = self._connect(url, entry)
                self._watchers[replica] = asyncio.create_task(self._watch(replica))
                logger.info("engine %s: found", url)
            if endpoint.draining and not self._replicas[url].draining:
                logger.info("engine %s: draining", url)
            self._replicas[url].draining = endpoint.draining

    def _forget(self, replica: Replica) -> None:
        """Send no more requests to ``replica``; open requests finish, and it is probed until then. Its model is remembered."""
        replica.draining = replica.gone = True
        if not replica.in_flight:
            self._watchers.pop(replica).cancel()
        for served in self._served.values():
            if replica in served.replicas:
                served.replicas.remove(replica)
        self.adapters.forget(replica)
        logger.info("engine %s: gone", replica.client.url)

    # --- probes

    async def _watch(self, replica: Replica) -> None:
        """Probe ``replica``. It has a phase in the interval, so that the probes of all stay spread when they were delayed together,
        such as by a blocked event loop."""
        loop, phase, seconds = asyncio.get_running_loop(), next(self._phases) / PHASES, self._probe_seconds
        stats_at = 0.0
        while not replica.gone or replica.in_flight:
            try:
                await self._look(replica)
                if replica.state == "ready" and loop.time() >= stats_at:
                    stats_at = loop.time() + STATS_SECONDS
                    with suppress(GatewayError, TimeoutError):  # what it reported before stays
                        async with asyncio.timeout(seconds):
                            replica.stats = await replica.client.stats()
            except TokenizerError as error:
                if replica.problem is None:
                    logger.error("engine %s: %s", replica.client.url, error)
                replica.problem = str(error)
            except Exception as error:  # a malformed answer must not end the watch
                replica.ready = False
                logger.warning("engine %s: %s", replica.client.url, error)
            part = (phase - loop.time() / seconds) % 1
            await asyncio.sleep(seconds * (part if part > SHORTEST_PAUSE else part + 1))
        del self._watchers[replica]

    async def _look(self, replica: Replica) -> None:
        """Probe ``replica`` and update its state. Reads ``/info`` whenever it becomes ready, as it may serve another model."""
        if replica.unanswered_since is None:
            replica.unanswered_since = self._clock.now()
        answer = await replica.client.ready()
        if answer is not UNANSWERED:
            replica.unanswered_since, replica.silent = None, False
            replica.expected = replica.expected if answer is REFUSED else answer.model
        replica.problem = replica.problem if answer.ready else None
        if answer.ready and not replica.ready:
            info = await replica.client.info()
            served = await self._served_as(info, replica)
            if replica.gone:
                return
            served = self._group(replica, served)
            await self.adapters.joined(replica)
            replica.problem = None
            replica.health.succeeded()  # the replica may be a new process
            replica.ready = True
            served.announce()
            self.adapters.settle()
            logger.info("engine %s: ready with %s", replica.client.url, info.model)
        elif replica.ready and not answer.ready:
            logger.warning("engine %s: not ready", replica.client.url)
        elif answer.ready and (answer.adapters is None or answer.adapters != replica.adapters_revision):
            await self.adapters.refresh(replica)
        replica.ready = answer.ready

    async def _watch_silence(self) -> None:
        """Give up each replica that leaves a probe unanswered for too long: its waits end, and it gets no request until it answers.
        Not a part of :meth:`_watch`, which waits for the answer."""
        while True:
            self._clock.tick()
            now = self._clock.now()
            for replica in list(self._watchers):
                since = replica.unanswered_since
                if since is None or replica.silent or now - since <= self._silence_seconds:
                    continue
                replica.silent = True
                if replica.ready or replica.in_flight:
                    model = next((served.name for served in self._served.values() if replica in served.replicas), "")
                    self._telemetry.engines.silences.labels(model).inc()
                    logger.warning("engine %s: silent, given up with %d requests", replica.client.url, replica.in_flight)
                replica.ready = False
                replica.give_up()
            await asyncio.sleep(TICK_SECONDS)

    # --- grouping by model

    async def _served_as(self, info: wire.Info, replica: Replica) -> ServedModel:
        """Return the model that ``info`` describes; a new one gets its tokeniser from ``replica``, unless another replica of the
        model is asked for it and answers soon."""
        key = (info.model, info.fingerprint)
        if key in self._served:
            return self._served[key]
        turn, held = self._turns.setdefault(key, asyncio.Lock()), False
        with suppress(TimeoutError):
            async with asyncio.timeout(TOKENIZER_TURN_SECONDS):
                held = await turn.acquire()
        try:
            return self._served[key] if key in self._served else await self._load(info, replica)
        finally:
            if held:
                turn.release()

    async def _load(self, info: wire.Info, replica: Replica) -> ServedModel:
        """Load the tokeniser of ``replica``. Raises :class:`TokenizerError`. The log has a warning if no preset is for the model,
        so that a fallback prompts it."""
        files = await replica.client.tokenizer()
        try:
            preset = choose(
                info.model,
                files.architecture,
                info.capabilities,
                classes=len(info.classes),
                encoder=info.encoder,
                beside=files.preset,
                chosen=self._presets,
                model_files=files.model_files,
            )
        except PresetError as error:
            raise TokenizerError(f"the preset cannot be used: {error}") from None
        text, vocabulary = await self._workers.load(msgspec.structs.replace(files, preset=preset))
        fitted = vocabulary.table.fitted
        falls_back = fitted is not None and is_fallback(fitted.preset.name, info.model, beside=files.preset, chosen=self._presets)
        if fitted is not None and falls_back:
            message = "model %s: no preset is for this name; %r is used, unless presets name another"
            logger.warning(message, info.model, fitted.preset.name)
        return ServedModel(info, vocabulary, text, preset_is_fallback=falls_back)

    def _group(self, replica: Replica, model: ServedModel) -> ServedModel:
        """Add ``replica`` to the replicas of ``model``, or of an equal model that is known already; return that model."""
        key = (model.info.model, model.info.fingerprint)
        self._learned.add(replica.source)
        self._turns.pop(key, None)
        for served in self._served.values():
            if replica in served.replicas:
                served.replicas.remove(replica)
        model = self._served.setdefault(key, model)
        model.replicas.append(replica)
        model.sources.add(replica.source)
        for known, served in list(self._served.items()):
            if not served.replicas:  # it is kept until every entry that led to it leads to another model
                served.sources.discard(replica.source)
                if not served.sources:
                    del self._served[known]
        return model

    # --- metrics

    def _fleet(self) -> Iterator[Metric]:
        """Yield metrics of all replicas and known models; a removed replica has no series, a model without replicas has."""
        ready = sum(replica.state in ("ready", "half_open", "ejected") for replica in self._replicas.values())
        yield GaugeMetricFamily("yardstick_engines_ready", "Engines that take requests.", value=ready)
        model = ["model"]
        by_model = GaugeMetricFamily("yardstick_model_engines_ready", "Engines of a model that take requests.", labels=model)
        waiting = GaugeMetricFamily(
            "yardstick_model_requests_waiting", "Requests that wait for an engine of a model to be ready.", labels=model
        )
        adapters = GaugeMetricFamily("yardstick_adapters", "Adapters of a model that an engine has.", labels=model)
        for name in sorted({served.name for served in self._served.values()}):
            versions = self.versions(name)
            self._telemetry.begin(name)
            by_model.add_metric([name], sum(len(served.ready) for served in versions))
            waiting.add_metric([name], sum(served.waiting for served in versions))
            held = {each.adapter.name for served in versions for each in served.adapters.values() if each.replicas}
            adapters.add_metric([name], len(held))
        yield from (by_model, waiting, adapters)
        names = {replica: served.name for served in self._served.values() for replica in served.replicas}
        states = GaugeMetricFamily("yardstick_engines", "Engines by state.", labels=["model", "state"])
        counts = Counter((names.get(replica, ""), replica.state) for replica in self._replicas.values())
        for labels, count in counts.items():
            states.add_metric(labels, count)
        yield states
        engine = ["engine", "model"]
        in_flight = GaugeMetricFamily("yardstick_engine_requests_in_flight", "Requests in progress on an engine.", labels=engine)
        tokens = GaugeMetricFamily(
            "yardstick_engine_tokens_in_flight", "Tokens of the requests in progress on an engine.", labels=engine
        )
        for url, replica in self._replicas.items():
            in_flight.add_metric([url, names.get(replica, "")], replica.in_flight)
            tokens.add_metric([url, names.get(replica, "")], replica.tokens)
        yield from (in_flight, tokens)

    def _reported(self) -> Iterator[Metric]:
        """Yield what engines reported last, for each engine that has. Every gateway reports the same."""
        for kind, families in ((GaugeMetricFamily, _REPORTED_GAUGES), (CounterMetricFamily, _REPORTED_COUNTERS)):
            for reported, (name, text) in families.items():
                family = kind(f"yardstick_{name}", text, labels=["engine"])
                for url, replica in self._replicas.items():
                    if replica.stats is not None:
                        family.add_metric([url], getattr(replica.stats, reported))
                yield family


_REPORTED_GAUGES = {
    "slots_items": ("item_cache_tokens", "Tokens of items in the prefix cache of an engine."),
    "item_bytes": ("item_cache_bytes", "Bytes of keys and values of items in the prefix cache of an engine."),
    "compiling": ("grammar_queue", "Requests of an engine that wait until their grammar is compiled."),
}
_REPORTED_COUNTERS = {
    "scored_items": ("item_cache_scored_items", "Items that an engine scored and that came before the query."),
    "cached_items": ("item_cache_found_items", "Of these, items that were in its prefix cache whole."),
    "evicted_item_tokens": ("item_cache_evicted_tokens", "Tokens of items evicted from the prefix cache of an engine."),
}
"""Metrics and their descriptions, by field of :class:`engine.wire.Stats`."""


def _listed(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
