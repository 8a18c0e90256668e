"""The replicas at a fixed list of URLs: watched in the background, grouped by the model that they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from engine import wire
from gateway.errors import InvalidRequest, ModelNotFound, NotReady, UnusableModel
from gateway.pool.client import EngineClient
from gateway.pool.replica import Replica, ServedModel
from gateway.telemetry import Telemetry
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger(__name__)


class Pool:
    """Knows the models. Between :meth:`start` and :meth:`stop` it follows the readiness of every replica."""

    def __init__(self, clients: Sequence[EngineClient], telemetry: Telemetry, *, probe_seconds: float) -> None:
        self._replicas = [Replica(client) for client in clients]
        self._telemetry = telemetry
        self._probe_seconds = probe_seconds
        self._served: dict[tuple[str, str], ServedModel] = {}  # by name and fingerprint
        self._grouping = asyncio.Lock()  # so that two replicas of a model fetch its tokeniser once
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch."""
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self._replicas]

    async def stop(self) -> None:
        """Watch no longer."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def check_ready(self) -> None:
        """Raise :class:`NotReady` unless some model can be asked."""
        if any(replica.ready for replica in self._replicas):
            return
        problem = next((replica.problem for replica in self._replicas if replica.problem), None)
        if problem is not None:
            raise UnusableModel(f"An engine's model cannot be used: {problem}.", retry_after=1)
        raise NotReady("No engine is ready; try again soon.", retry_after=1)

    @property
    def models(self) -> list[ServedModel]:
        """The models that have replicas, ready or not, one for each name."""
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
        if name is None or sum(len(m.replicas) for m in self._served.values()) < len(self._replicas):
            raise NotReady("The engine has not started yet; try again soon.", retry_after=1)
        raise ModelNotFound(f"The model {name!r} does not exist; served here: {_listed(names)}.", param="model")

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
            self._telemetry.engines_ready.set(sum(other.ready for other in self._replicas))
            await asyncio.sleep(self._probe_seconds)

    async def _look(self, replica: Replica) -> None:
        """Update what is known. A pod may come back as another model, so ``/info`` is read whenever it becomes ready."""
        ready = await replica.client.ready()
        replica.problem = replica.problem if ready else None
        if ready and not replica.ready:
            info = await replica.client.info()
            async with self._grouping:
                await self._group(replica, info)
            replica.problem = None
            logger.info("engine %s: ready with %s", replica.client.url, info.model)
        elif replica.ready and not ready:
            logger.warning("engine %s: not ready", replica.client.url)
        replica.ready = ready

    async def _group(self, replica: Replica, info: wire.Info) -> None:
        key = (info.model, info.fingerprint)
        for served in self._served.values():
            if replica in served.replicas:
                served.replicas.remove(replica)
        if key not in self._served:
            files = await replica.client.tokenizer()
            tokenizer = await asyncio.to_thread(Tokenizer.from_files, files)
            self._served[key] = ServedModel(info, tokenizer, ChatTemplate(files.chat_template, files.special_tokens))
        self._served[key].replicas.append(replica)
        self._served = {key: served for key, served in self._served.items() if served.replicas}


def _listed(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
