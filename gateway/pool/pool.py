"""The replicas that discovery finds: watched in the background, grouped by the model that they serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from engine import wire
from gateway.errors import InvalidRequest, ModelNotFound, NotReady, UnusableModel
from gateway.pool.discovery.base import Discovery, Endpoint
from gateway.pool.replica import Replica, ServedModel
from gateway.telemetry import ReplicaSample, Telemetry
from gateway.text.spelling import TokenizerError
from gateway.text.workers import Workers

logger = logging.getLogger(__name__)


class Pool:
    """Knows the models. Between :meth:`start` and :meth:`stop` it follows its sources and the readiness of every replica."""

    def __init__(
        self,
        sources: Mapping[str, Discovery],
        connect: Callable[[str, str], Replica],
        telemetry: Telemetry,
        workers: Workers,
        *,
        probe_seconds: float,
        lost_seconds: float,
    ) -> None:
        """``sources`` by entry of the setting ``engines``; ``connect`` makes the replica at a URL that an entry led to;
        ``workers`` read the models' tokenisers."""
        self._sources = sources
        self._connect = connect
        self._workers = workers
        self._probe_seconds = probe_seconds
        self._lost_seconds = lost_seconds
        self._found: dict[str, Sequence[Endpoint]] = {}  # by entry, once it is known
        self._replicas: dict[str, Replica] = {}  # by URL
        self._served: dict[tuple[str, str], ServedModel] = {}  # by name and fingerprint
        self._grouping = asyncio.Lock()  # so that two replicas of a model fetch its tokeniser once
        self._followers: list[asyncio.Task[None]] = []
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        telemetry.watch_replicas(self._samples)

    def start(self) -> None:
        """Begin to watch."""
        self._followers = [asyncio.create_task(self._follow(entry, source)) for entry, source in self._sources.items()]

    async def stop(self) -> None:
        """Watch no longer."""
        tasks = [*self._followers, *self._watchers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_ready(self) -> None:
        """Raise :class:`NotReady` unless some model can be asked."""
        if any(replica.takes_work for replica in self._replicas.values()):
            return
        problem = next((replica.problem for replica in self._replicas.values() if replica.problem), None)
        if problem is not None:
            raise UnusableModel(f"An engine's model cannot be used: {problem}.", retry_after=1)
        raise NotReady("No engine is ready; try again soon.", retry_after=1)

    @property
    def models(self) -> list[ServedModel]:
        """The models that have replicas, ready or away, one for each name."""
        return [self.model(name) for name in sorted({served.name for served in self._served.values()})]

    def model(self, name: str | None) -> ServedModel:
        """The model called ``name``; None means the only one. Where its replicas disagree on the numbers (while a new version
        is rolled out), the version that more ready replicas have. Raises :class:`ModelNotFound`, :class:`NotReady`."""
        names = {served.name for served in self._served.values()}
        if name is None:
            if len(names) > 1:
                raise InvalidRequest(f"Several models are served; set `model` to one of {_listed(names)}.", param="model")
            name = next(iter(names), None)
        if name in names:
            return max((m for m in self._served.values() if m.name == name), key=lambda m: (len(m.ready), len(m.replicas)))
        if name is None or self._starting:
            raise NotReady("The engine has not started yet; try again soon.", retry_after=1)
        raise ModelNotFound(f"The model {name!r} does not exist; served here: {_listed(names)}.", param="model")

    @property
    def _starting(self) -> bool:
        """Whether more models may come to light: an entry or a replica has yet to say what there is."""
        grouped = sum(len(model.replicas) for model in self._served.values())
        return len(self._found) < len(self._sources) or grouped < len(self._replicas)

    def _samples(self) -> Iterator[ReplicaSample]:
        names = {replica: model.name for model in self._served.values() for replica in model.replicas}
        for replica in self._replicas.values():
            yield ReplicaSample(replica.client.url, names.get(replica, ""), replica.state, replica.in_flight, replica.tokens)

    async def _follow(self, entry: str, source: Discovery) -> None:
        async for endpoints in source.follow():
            self._found[entry] = endpoints
            self._settle()

    def _settle(self) -> None:
        """Make the replicas those that all sources together have found."""
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
        """It gets nothing more; what it is working on goes on. Its model is remembered."""
        replica.draining = True
        self._watchers.pop(replica).cancel()
        for served in self._served.values():
            if replica in served.replicas:
                served.replicas.remove(replica)
        logger.info("engine %s: gone", replica.client.url)

    async def _watch(self, replica: Replica) -> None:
        while True:
            try:
                await self._look(replica)
            except TokenizerError as error:
                if replica.problem is None:
                    logger.error("engine %s: %s", replica.client.url, error)
                replica.problem = str(error)
            except Exception as error:  # whatever a pod sends, the watch goes on
                replica.ready = False
                logger.warning("engine %s: %s", replica.client.url, error)
            await asyncio.sleep(self._probe_seconds)

    async def _look(self, replica: Replica) -> None:
        """Update what is known. A pod may come back as another model, so ``/info`` is read whenever it becomes ready."""
        said = await replica.client.ready()
        self._check_alive(replica, alive=said is not None)
        ready = bool(said)
        replica.problem = replica.problem if ready else None
        if ready and not replica.ready:
            info = await replica.client.info()
            async with self._grouping:
                served = await self._group(replica, info)
            replica.problem = None
            replica.health.succeeded()  # it may be another process now
            replica.ready = True
            served.announce()
            logger.info("engine %s: ready with %s", replica.client.url, info.model)
        elif replica.ready and not ready:
            logger.warning("engine %s: not ready", replica.client.url)
        replica.ready = ready

    def _check_alive(self, replica: Replica, *, alive: bool) -> None:
        now = time.monotonic()
        if alive:
            replica.answered = now
        elif now - replica.answered > self._lost_seconds and replica.in_flight:
            logger.warning("engine %s: given up with %d requests", replica.client.url, replica.in_flight)
            replica.give_up()

    async def _group(self, replica: Replica, info: wire.Info) -> ServedModel:
        key = (info.model, info.fingerprint)
        if key not in self._served:
            files = await replica.client.tokenizer()
            text, vocabulary = await self._workers.load(files)
            self._served[key] = ServedModel(info, vocabulary, text)
        for served in self._served.values():
            if replica in served.replicas:
                served.replicas.remove(replica)
        self._served[key].replicas.append(replica)
        self._served[key].sources.add(replica.source)
        self._served = {known: served for known, served in self._served.items() if self._remembered(served, replica)}
        return self._served[key]

    @staticmethod
    def _remembered(served: ServedModel, news: Replica) -> bool:
        """A model without replicas is kept until all the places where it was found have come to serve something else."""
        if not served.replicas:
            served.sources.discard(news.source)
        return bool(served.replicas or served.sources)


def _listed(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
