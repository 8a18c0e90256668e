"""LoRA adapters: models of their own on the replicas that have them, and the names that clients use for them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import AdapterNotFound, GatewayError, InvalidRequest, NotReady
from yardstick_llm.gateway.pool.replica import Replica, ServedModel
from yardstick_llm.gateway.presets.preset import PresetError, builtin, fallback_of, named
from yardstick_llm.gateway.text.vocabulary import TokenizerError, Vocabulary
from yardstick_llm.gateway.workers.workers import Workers

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
"""Longest wait for a replica's adapters; the next probe asks again."""


class Reference(NamedTuple):
    """An adapter, whatever its version."""

    base: str
    """Name of the base model, not an alias."""
    name: str

    def __str__(self) -> str:
        return f"{self.base}:{self.name}"


@dataclass(eq=False, kw_only=True)
class AdapterModel(ServedModel):
    """One version of an adapter: a digest on one base model. ``replicas`` are those that have it, a part of the base's.

    ``info`` is the base's with the adapter's name and capabilities. Its fingerprint includes the digest, so cached results, shared
    computations and placements of adapters and of their base never mix.
    """

    parent: ServedModel
    adapter: wire.Adapter
    directory: AdapterDirectory
    names: dict[str, AdapterModel] = field(default_factory=dict)
    """This adapter by each name that clients use for it: its own and, for each name of the base, ``base:adapter``."""

    @property
    def base(self) -> ServedModel:
        """The model that the adapter changes."""
        return self.parent

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter."""
        return self.adapter.digest

    @property
    def reference(self) -> Reference:
        """The adapter, whatever its version."""
        return Reference(self.parent.name, self.adapter.name)

    @property
    def replaced(self) -> bool:
        """Whether replicas have another version."""
        return any(other.adapter.name == self.adapter.name and other.replicas for other in self.parent.adapters.values())

    @property
    def gone(self) -> bool:
        """Whether the adapter is unloaded: the base has a ready replica, no replica has the adapter, and none should."""
        if self.replicas or not self.parent.has_ready:
            return False
        return self.replaced or not self.directory.awaited(self.reference)

    def named(self, name: str) -> AdapterModel:
        """Return this adapter under ``name``, which its answers will show. All state is shared."""
        if name == self.name:
            return self
        if name not in self.names:
            self.names[name] = dataclasses.replace(self, info=msgspec.structs.replace(self.info, model=name))
        return self.names[name]

    def lacks(self, replica: Replica) -> None:
        """Send no more requests to ``replica``, and ask it for its adapters."""
        self.remove(replica)
        self.directory.refresh_soon(replica)

    def remove(self, replica: Replica) -> None:
        """Note that ``replica`` does not have the adapter."""
        if replica in self.replicas:
            self.replicas.remove(replica)
            self.announce()

    def add(self, replica: Replica) -> None:
        """Note that ``replica`` has the adapter."""
        if replica not in self.replicas:
            self.replicas.append(replica)
            self.announce()

    def check_served(self) -> None:
        """Raise :class:`AdapterNotFound`, or :class:`NotReady`, for an adapter that is unloaded."""
        if not self.gone:
            return
        if self.replaced:
            raise NotReady(f"The adapter {self.name!r} was replaced while the request waited; send it again.", retry_after=1)
        raise AdapterNotFound(f"The adapter {self.name!r} was unloaded; GET /v1/models lists what is served.", param="model")


class AdapterDirectory:
    """Keeps :attr:`ServedModel.adapters` of all models up to date, and finds adapters by name."""

    def __init__(
        self,
        workers: Workers,
        served: Callable[[], Iterable[ServedModel]],
        *,
        presets: Mapping[str, str],
        real: Callable[[str], str],
    ) -> None:
        """``served``: returns the known models. ``presets``: see :class:`gateway.pool.pool.Pool`. ``real``: returns the model that
        a name stands for."""
        self._workers = workers
        self._served = served
        self._presets = presets
        self._real = real
        self._asking: dict[Replica, asyncio.Task[None]] = {}
        self.awaited: Callable[[Reference], bool] = lambda _: False
        """Whether an adapter that no replica has should be loaded, and may appear soon."""
        self.missed = asyncio.Event()
        """Set when no replica has an adapter that is awaited."""

    async def refresh(self, replica: Replica) -> None:
        """Ask ``replica`` for its adapters. If it does not answer, those that it had are assumed."""
        if not replica.takes_adapters:
            return
        async with replica.adapters_turn:
            replica.adapters_revision = None  # it stays unknown if this fails, so that the next probe asks again
            try:
                async with asyncio.timeout(REFRESH_SECONDS):
                    found, revision = await replica.client.adapters()
            except (GatewayError, TimeoutError) as error:
                logger.info("engine %s: its adapters are unknown: %s", replica.client.url, error)
                return
            replica.takes_adapters = found.max_adapters > 0 or bool(found.adapters)
            await self._update(replica, {adapter.name: adapter for adapter in found.adapters})
            replica.adapters_revision = revision

    async def joined(self, replica: Replica) -> None:
        """Ask a replica that becomes ready for its adapters; it may be a new process."""
        replica.takes_adapters = True
        for model in self._all():
            if replica not in model.parent.replicas:
                model.remove(replica)
        await self.refresh(replica)

    def refresh_soon(self, replica: Replica) -> None:
        """Start :meth:`refresh` in the background, unless one is running."""
        if replica not in self._asking:
            task = self._asking[replica] = asyncio.create_task(self.refresh(replica))
            task.add_done_callback(lambda _: self._asking.pop(replica, None))

    def forget(self, replica: Replica) -> None:
        """Note that ``replica`` is gone, or serves another model."""
        replica.adapters = {}
        for model in self._all():
            model.remove(replica)

    def find(self, name: str) -> AdapterModel | None:
        """Return the adapter called ``name``, ``adapter`` or ``base:adapter``; of several versions, the one with most ready
        replicas. Raises :class:`InvalidRequest` if several models have an adapter called ``name``."""
        base, colon, short = name.rpartition(":")
        if colon:
            real = self._real(base)
            found = [model for model in self._all() if model.adapter.name == short and model.parent.name == real]
        else:
            found = [model for model in self._all() if model.adapter.name == short]
            if len({model.parent.name for model in found}) > 1:
                message = f"Several models have an adapter called {name!r}; send `model` as `BASE:{name}`."
                raise InvalidRequest(message, param="model")
        best = max(found, key=lambda model: (len(model.ready), len(model.replicas)), default=None)
        return None if best is None or best.gone else best.named(name)

    def may_appear(self, name: str | None) -> bool:
        """Whether ``name`` is ``base:adapter`` of a model without a ready replica, or an adapter that is being loaded."""
        base, _, short = (name or "").rpartition(":")
        bases = [served for served in self._served() if not base or served.name == self._real(base)]
        if any(self.awaited(Reference(served.name, short)) for served in bases):
            return True
        return (
            bool(base and bases)
            and wire.ADAPTER_NAME.fullmatch(short) is not None
            and not any(served.has_ready for served in bases)
        )

    def reference(self, name: str) -> Reference | None:
        """Return the adapter that ``name`` means; None if it means none, or is ambiguous, or is the name of a model."""
        if self._real(name) != name or any(model.name == name for model in self._served()):
            return None
        try:
            found = self.find(name)
        except InvalidRequest:
            return None
        return None if found is None else found.reference

    def listed(self) -> dict[str, AdapterModel]:
        """Return all adapters by the shortest name that means each of them."""
        listed: dict[str, AdapterModel] = {}
        for reference in sorted({model.reference for model in self._all()}):
            if (found := self.find(str(reference))) is not None:
                name = reference.name if self.reference(reference.name) == reference else str(reference)
                listed[name] = found.named(name)
        return listed

    async def _update(self, replica: Replica, adapters: dict[str, wire.Adapter]) -> None:
        """Make ``adapters`` those of ``replica``."""
        replica.adapters = adapters
        parent = next((served for served in self._served() if replica in served.replicas), None)
        wanted = {(adapter.name, adapter.digest) for adapter in adapters.values()}
        for model in self._all():
            if model.parent is not parent or (model.adapter.name, model.adapter.digest) not in wanted:
                model.remove(replica)
        for adapter in adapters.values() if parent else ():
            assert parent is not None
            key = (adapter.name, adapter.digest)
            if key not in parent.adapters:
                created = await self._create(parent, adapter)
                parent.adapters.setdefault(key, created)
            if not replica.gone and replica in parent.replicas:
                parent.adapters[key].add(replica)
        self.settle()
        if any(not model.replicas and self.awaited(model.reference) for model in self._all()):
            self.missed.set()

    def settle(self) -> None:
        """Forget the adapters that are unloaded; requests that wait for one end. Call it when fewer may be awaited."""
        for served in self._served():
            for model in list(served.adapters.values()):
                if model.gone:
                    del served.adapters[model.adapter.name, model.adapter.digest]
                    model.announce()

    async def _create(self, parent: ServedModel, adapter: wire.Adapter) -> AdapterModel:
        text, vocabulary, is_fallback = await self._text_of(parent, adapter)
        fingerprint = hashlib.blake2b(f"{parent.info.fingerprint}\0{adapter.digest}".encode(), digest_size=16).hexdigest()
        info = msgspec.structs.replace(
            parent.info,
            model=adapter.name,
            fingerprint=fingerprint,
            capabilities=list(adapter.capabilities),
            classes=list(adapter.classes),
            multi_label=adapter.multi_label,
            regression=adapter.regression,
        )
        return AdapterModel(
            info=info,
            tokenizer=vocabulary,
            text=text,
            preset_is_fallback=is_fallback,
            parent=parent,
            adapter=adapter,
            directory=self,
        )

    async def _text_of(self, parent: ServedModel, adapter: wire.Adapter) -> tuple[str, Vocabulary, bool]:
        """Return the tokeniser of ``parent`` with the preset of ``adapter``, and whether this is a fallback. It is the
        configured preset; otherwise one for the adapter's own capabilities, such as a classification head on a model that
        generates.
        """
        try:
            preset, is_fallback = self._preset_of(parent, adapter)
            if preset is not None:
                files = msgspec.structs.replace(self._workers.files(parent.text), preset=preset)
                return *await self._workers.load(files), is_fallback
        except (PresetError, TokenizerError) as error:
            logger.error("adapter %s:%s: its preset cannot be used: %s", parent.name, adapter.name, error)
        return parent.text, parent.tokenizer, parent.preset_is_fallback

    def _preset_of(self, parent: ServedModel, adapter: wire.Adapter) -> tuple[str | None, bool]:
        """Return the text of the preset, None for that of ``parent``, and whether it is a fallback. Raises :class:`PresetError`."""
        chosen = self._presets.get(f"{parent.name}:{adapter.name}") or self._presets.get(adapter.name)
        if chosen is not None and chosen != "none":
            return named(chosen), False
        of_base, own = (fallback_of(each.capabilities, len(each.classes)) for each in (parent.info, adapter))
        return (None, False) if own is None or own == of_base else (builtin()[own], True)

    def _all(self) -> Iterator[AdapterModel]:
        for served in list(self._served()):
            yield from list(served.adapters.values())
