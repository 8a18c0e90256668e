"""The replicas that discovery finds: probed in the background and grouped by the model that they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from engine import wire
from gateway.errors import InvalidRequest, ModelNotFound, NotReady, UnusableModel
from gateway.ops.collectors import fleet
from gateway.ops.metrics import Telemetry
from gateway.pool.adapters import AdapterDirectory
from gateway.pool.client import REFUSED, UNANSWERED, Readiness
from gateway.pool.discovery.base import Discovery, Endpoint
from gateway.pool.names import Names
from gateway.pool.probe_times import ProbeTimes
from gateway.pool.replica import Replica, ServedModel
from gateway.pool.samples import model_samples, replica_samples
from gateway.pool.silence import AwakeClock, watch_silence
from gateway.presets.preset import Fitted, PresetError, choose, is_fallback
from gateway.text.vocabulary import TokenizerError
from gateway.workers.workers import Workers

logger = logging.getLogger(__name__)

TOKENIZER_TURN_SECONDS = 2.0
"""The gateway asks one replica of a model for the tokeniser; after this time it also asks another one."""


class Pool:
    """The served models. Between :meth:`start` and :meth:`stop` the pool follows its sources and probes every replica."""

    def __init__(
        self,
        sources: Mapping[str, Discovery],
        connect: Callable[[str, str], Replica],
        telemetry: Telemetry,
        workers: Workers,
        *,
        probe_seconds: float,
        silence_seconds: float,
        startup_seconds: float,
        presets: Mapping[str, str] | None = None,
        names: Names | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        """``sources``: by entry of the setting ``engines``. ``connect``: creates the replica for a URL and the entry that listed
        it. ``workers``: worker processes that load the models' tokenisers. ``presets``: name or file of models' presets."""
        self._sources = sources
        self._connect = connect
        self._workers = workers
        self._probe_times = ProbeTimes(probe_seconds)
        self._silence_seconds = silence_seconds
        self._startup_seconds = startup_seconds
        self._presets = presets or {}
        self.names = names or Names()
        self.adapters = AdapterDirectory(workers, lambda: self._served.values(), presets=self._presets, names=self.names)
        self._clock = clock or AwakeClock()
        self._telemetry = telemetry
        self._found: dict[str, Sequence[Endpoint]] = {}  # by entry, once it is known
        self._replicas: dict[str, Replica] = {}  # by URL
        self._served: dict[tuple[str, str], ServedModel] = {}  # by name and fingerprint
        self._learned: set[str] = set()  # entries that have led to a model
        self._turns: dict[tuple[str, str], asyncio.Lock] = {}  # by name and fingerprint, while the tokeniser is fetched
        self._followers: list[asyncio.Task[None]] = []
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        telemetry.watch(
            lambda: fleet(
                replica_samples(self._replicas.values(), self._served.values()),
                model_samples(self._served.values()),
                telemetry.begin,
            )
        )

    def start(self) -> None:
        """Start the background tasks."""
        self._followers = [asyncio.create_task(self._follow(entry, source)) for entry, source in self._sources.items()]
        listening = watch_silence(self._clock, lambda: self._watchers, self._silence_seconds, self._silenced)
        self._followers.append(asyncio.create_task(listening))

    async def stop(self) -> None:
        """Stop the background tasks."""
        tasks = [*self._followers, *self._watchers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            versions = [served for served in self._served.values() if served.name == real]
            return versions[0] if len(versions) == 1 else max(versions, key=lambda m: (len(m.ready), len(m.replicas)))
        if real is not None and (adapter := self.adapters.find(real)) is not None:
            return adapter
        if not names or self._starting(real) or self.adapters.may_appear(real):
            raise NotReady("The engine has not started yet; try again soon.", retry_after=1)
        raise ModelNotFound(f"The model {name!r} does not exist; served here: {_listed(names)}.", param="model")

    def versions(self, name: str) -> list[ServedModel]:
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

    def _model_name(self, replica: Replica) -> str:
        """Return the name of the model of ``replica``; empty if it is not known."""
        return next((served.name for served in self._served.values() if replica in served.replicas), "")

    async def _follow(self, entry: str, source: Discovery) -> None:
        async for endpoints in source.follow():
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
        replica.leave()
        if not replica.in_flight:
            self._watchers.pop(replica).cancel()
        for served in self._served.values():
            if replica in served.replicas:
                served.replicas.remove(replica)
        self.adapters.forget(replica)
        logger.info("engine %s: gone", replica.client.url)

    async def _watch(self, replica: Replica) -> None:
        phase = self._probe_times.phase()
        while not replica.gone or replica.in_flight:
            try:
                await self._look(replica)
            except TokenizerError as error:
                if replica.problem is None:
                    logger.error("engine %s: %s", replica.client.url, error)
                replica.problem = str(error)
            except Exception as error:  # a malformed answer must not end the watch
                replica.ready = False
                logger.warning("engine %s: %s", replica.client.url, error)
            await asyncio.sleep(self._probe_times.pause(phase, asyncio.get_running_loop().time()))
        del self._watchers[replica]

    async def _look(self, replica: Replica) -> None:
        """Probe ``replica`` and update its state. Reads ``/info`` whenever it becomes ready, as it may serve another model."""
        answer = await self._probe(replica)
        ready = answer.ready
        replica.problem = replica.problem if ready else None
        if ready and not replica.ready:
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
        elif replica.ready and not ready:
            logger.warning("engine %s: not ready", replica.client.url)
        elif ready:
            await self.adapters.follow(replica, answer.adapters)
        replica.ready = ready

    async def _probe(self, replica: Replica) -> Readiness:
        """Return what the pod reports. :func:`watch_silence` acts while the answer is outstanding."""
        if replica.unanswered_since is None:
            replica.unanswered_since = self._clock.now()
        answer = await replica.client.ready()
        if answer is not UNANSWERED:
            replica.unanswered_since = None
            replica.silent = False
            replica.expected = replica.expected if answer is REFUSED else answer.model
        return answer

    def _silenced(self, replica: Replica) -> None:
        """Give up a replica that left a probe unanswered for too long: its waits end, and it gets no request until it answers."""
        if replica.ready or replica.in_flight:
            self._telemetry.engines.silences.labels(self._model_name(replica)).inc()
            logger.warning("engine %s: silent, given up with %d requests", replica.client.url, replica.in_flight)
        replica.ready = False
        replica.give_up()

    async def _served_as(self, info: wire.Info, replica: Replica) -> ServedModel:
        """Return the model that ``info`` describes; a new one gets its tokeniser from ``replica``."""
        key = (info.model, info.fingerprint)
        if key not in self._served:
            async with self._turn(key):
                if key not in self._served:
                    files = await replica.client.tokenizer()
                    preset = self._preset(info, files)
                    text, vocabulary = await self._workers.load(msgspec.structs.replace(files, preset=preset))
                    return ServedModel(
                        info, vocabulary, text, preset_is_fallback=self._falls_back(info, files, vocabulary.table.fitted)
                    )
        return self._served[key]

    def _falls_back(self, info: wire.Info, files: wire.TokenizerFiles, fitted: Fitted | None) -> bool:
        """Whether no preset is for the model, so that a fallback prompts it; the log has a warning."""
        if fitted is None or not is_fallback(fitted.preset.name, info.model, beside=files.preset, chosen=self._presets):
            return False
        message = "model %s: no preset is for this name; %r is used, unless presets name another"
        logger.warning(message, info.model, fitted.preset.name)
        return True

    def _preset(self, info: wire.Info, files: wire.TokenizerFiles) -> str | None:
        """Return the text of the model's preset. Raises :class:`TokenizerError`."""
        try:
            return choose(
                info.model,
                files.architecture,
                info.capabilities,
                classes=len(info.classes),
                beside=files.preset,
                chosen=self._presets,
            )
        except PresetError as error:
            raise TokenizerError(f"the preset cannot be used: {error}") from None

    @asynccontextmanager
    async def _turn(self, key: tuple[str, str]) -> AsyncIterator[None]:
        """Wait until no other replica of the model is asked for the tokeniser, for at most :data:`TOKENIZER_TURN_SECONDS`."""
        turn, held = self._turns.setdefault(key, asyncio.Lock()), False
        with suppress(TimeoutError):
            async with asyncio.timeout(TOKENIZER_TURN_SECONDS):
                held = await turn.acquire()
        try:
            yield
        finally:
            if held:
                turn.release()

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
        self._served = {known: served for known, served in self._served.items() if self._remembered(served, replica)}
        return model

    @staticmethod
    def _remembered(served: ServedModel, news: Replica) -> bool:
        """Whether to keep ``served``. A model without replicas is kept until every entry that led to it leads to another model."""
        if not served.replicas:
            served.sources.discard(news.source)
        return bool(served.replicas or served.sources)


def _listed(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
