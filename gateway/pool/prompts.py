"""Prefill-only requests, and their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine import wire
from gateway.pool.replica import Replica
from gateway.text.prepared import Ids


class Prompts(msgspec.Struct, frozen=True):
    """A tokenised prefill-only request: the prompts ``prefix + branch + suffix``, and what is read after each. Not more than one of
    ``prefix`` and ``suffix`` has tokens."""

    prefix: Ids
    branches: Sequence[Ids]
    readout: wire.ScoreReadout
    priority: int = 0
    caller: wire.Caller = wire.Caller()
    suffix: Ids = ()
    """Where it has tokens, each branch is an item whose tokens are worth keeping in the prefix cache of one replica."""
    pin_seconds: float | None = None
    """See :class:`engine.wire.ScoreItems`."""
    images: Sequence[wire.Image] = ()
    """Images that the prompts name, each once; their tokens are in :class:`gateway.text.prepared.ImageIds`."""
    may_hedge: bool = True
    """Whether late sub-batches may be sent to a second replica; never those that run after others (``priority`` above 0)."""

    @property
    def lengths(self) -> list[int]:
        """Length of each prompt, in tokens."""
        shared = len(self.prefix) + len(self.suffix)
        return [shared + len(branch) for branch in self.branches]


class SubBatch(NamedTuple):
    """The branches of a request that one message carries."""

    indices: list[int]
    """The index of each branch in the request."""
    affinity: bytes | None = None
    """See :func:`gateway.pool.placement.affinity_of`."""
    replica: Replica | None = None
    """The replica that keeps its items."""


def any_readout(info: wire.Info) -> wire.ScoreReadout:
    """Return a readout that the model has, for requests that only fill prefix caches and whose rows are not used."""
    return wire.Labels([0]) if "score" in info.capabilities else wire.Classes()
