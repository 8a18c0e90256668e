"""Local copies of items that are stored in Redis, so that a hot request reads one version and no items.

A copy of a record is valid as of the *mark* that its catalogue is known to have: nothing that a later change has touched is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.catalogues.freeing import Waste
from gateway.catalogues.store import ITEM_BYTES, Spec, without_expired

MOST_CATALOGUES = 10_000
"""Most catalogues of which anything is known."""


class Mark(NamedTuple):
    """A version of a catalogue in one history of it."""

    version: int
    stamp: str
    """Random; another history that reaches the same version has another one."""


@dataclass(slots=True, eq=False)
class Copy:
    """One catalogue as the gateway knows it."""

    epoch: str
    mark: Mark
    spec: Spec | None = None
    records: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    """In the order of reading. A plain dict would take ever longer to find its first entry while entries leave at the front."""
    bytes: int = 0
    dropped: bool = False
    """Whether nothing but one request, or some that began earlier, holds this object."""


class Copies:
    """Copies of at most ``most_bytes``. When they are full, the catalogue that was used least recently loses its copies first; then
    the items that were read first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._of: OrderedDict[tuple[str, str], Copy] = OrderedDict()
        self._waste = Waste()
        self.bytes = 0
        """Bytes of all copies."""

    def known(self, owner: str, name: str) -> Copy | None:
        """Return what is known of a catalogue."""
        return self._of.get((owner, name))

    def follow(self, owner: str, name: str, asked: Mark, epoch: str, mark: Mark, changed: Sequence[str] | None) -> Copy | None:
        """Bring the copies to ``mark``, which may be earlier than theirs: Redis may have lost changes.

        ``asked``: the copies' mark when Redis was asked; ``changed``: ids that have changed since, or None if all may have. Return
        None if another request has moved the copies elsewhere meanwhile, so that this answer is about other copies; ask again then.
        """
        place = (owner, name)
        copy = self._of.get(place)
        if copy is None or copy.epoch != epoch:
            self.forget(owner, name)
            copy = self._of[place] = Copy(epoch, mark)
        elif copy.mark != mark:
            if copy.mark != asked:
                return None
            if changed is None:
                self._clear(copy)
            for id in changed or ():
                self._drop(copy, id)
            copy.mark = mark
        self._of.move_to_end(place)
        while len(self._of) > MOST_CATALOGUES:
            self.forget(*next(iter(self._of)))
        return copy

    def get(self, copy: Copy, ids: Sequence[str], now: int) -> list[bytes | None]:
        """Return the live records that there are copies of."""
        records = [*map(copy.records.get, ids)]
        return records if copy.spec is not None and copy.spec.ttl_seconds is None else without_expired(records, now)

    def keep(self, copy: Copy, mark: Mark, records: Mapping[str, bytes]) -> None:
        """Keep copies of records that were read from a catalogue that has, or had, ``mark``. If the copies have moved on since,
        these records may be out of date, and are not kept."""
        if mark != copy.mark or copy.dropped:
            return
        for id, record in records.items():
            self._drop(copy, id)
            copy.records[id] = record
            self._grow(copy, _size(id, record))
        self._make_room(copy)

    def forget(self, owner: str, name: str) -> None:
        """Drop all that is known of a catalogue."""
        copy = self._of.pop((owner, name), None)
        if copy is not None:
            self._clear(copy)
            copy.dropped = True

    def _make_room(self, kept: Copy) -> None:
        if self.bytes <= self._most_bytes:
            return
        for oldest in [copy for copy in self._of.values() if copy.records and copy is not kept]:
            self._clear(oldest)
            if self.bytes <= self._most_bytes:
                return
        while self.bytes > self._most_bytes and kept.records:
            id, record = kept.records.popitem(last=False)
            self._grow(kept, -_size(id, record))

    def _clear(self, copy: Copy) -> None:
        self._grow(copy, -copy.bytes)
        if copy.records:
            self._waste.add(copy.records)
            copy.records = OrderedDict()

    def _drop(self, copy: Copy, id: str) -> None:
        record = copy.records.pop(id, None)
        if record is not None:
            self._grow(copy, -_size(id, record))

    def _grow(self, copy: Copy, size: int) -> None:
        copy.bytes += size
        self.bytes += size


def _size(id: str, record: bytes) -> int:
    return ITEM_BYTES + len(id) + len(record)
