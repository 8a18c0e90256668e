"""A LoRA adapter on a served model, as requests see it: a model of its own on the replicas that have the adapter."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine import wire
from gateway.errors import AdapterNotFound, GatewayError, NotReady
from gateway.pool.replica import Replica, ServedModel
from gateway.text.vocabulary import Vocabulary


@dataclass(eq=False, kw_only=True)
class AdapterModel(ServedModel):
    """One version of an adapter: a digest on one base model. ``replicas`` are those that have it, a part of the base's.

    ``info`` is the base's with the adapter's name and capabilities. Its fingerprint includes the digest, so cached results, shared
    computations and placements of adapters and of their base never mix.
    """

    parent: ServedModel
    adapter: wire.Adapter
    lost: Callable[[Replica], None]
    """Called for a replica that turned out to lack the adapter."""
    awaited: Callable[[], bool]
    """Whether the adapter should be loaded and may appear soon."""
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
    def qualified(self) -> str:
        """``base:adapter``, which no other model can be called."""
        return f"{self.parent.name}:{self.adapter.name}"

    @property
    def gone(self) -> bool:
        """Whether the adapter is unloaded: the base has a ready replica, no replica has the adapter, and none should."""
        return not self.replicas and self.parent.has_ready and not self.awaited()

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
        self.lost(replica)

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
        if self.gone:
            raise self._absent()

    async def wait_ready(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a ready replica, or until the adapter is unloaded. Returns whether there is a ready one."""
        self.parent.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while not self.has_ready and not self.gone:
                    await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self.parent.waiting -= 1
        return self.has_ready

    def _absent(self) -> GatewayError:
        if any(other.adapter.name == self.adapter.name and other.replicas for other in self.parent.adapters.values()):
            return NotReady(f"The adapter {self.name!r} was replaced while the request waited; send it again.", retry_after=1)
        return AdapterNotFound(f"The adapter {self.name!r} was unloaded; GET /v1/models lists what is served.", param="model")


def adapter_model(
    parent: ServedModel,
    adapter: wire.Adapter,
    text: str,
    vocabulary: Vocabulary,
    *,
    preset_is_fallback: bool,
    lost: Callable[[Replica], None],
    awaited: Callable[[], bool],
) -> AdapterModel:
    """Create the model of ``adapter`` on ``parent``. ``text``, ``vocabulary``, ``preset_is_fallback``: see :class:`ServedModel`."""
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
        hedges=parent.hedges,
        preset_is_fallback=preset_is_fallback,
        parent=parent,
        adapter=adapter,
        lost=lost,
        awaited=awaited,
    )
