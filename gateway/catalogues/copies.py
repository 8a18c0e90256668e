"""Local copies of items that are stored in Redis, so that a hot request reads one version and no items.

A copy of a record is valid as of the version that its catalogue is known to have: nothing that a later version has changed is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.catalogues.store import ITEM_BYTES, Spec, without_expired

MOST_CATALOGUES = 10_000
"""Most catalogues of which anything is known."""


@dataclass(slots=True, eq=False)
class Copy:
    """One catalogue as the gateway knows it."""

    epoch: str
    version: int
    spec: Spec | None = None
    records: dict[str, bytes] = field(default_factory=dict)
    bytes: int = 0
    dropped: bool = False
    """Whether a request that began earlier still holds this object, but nothing else does."""


class Copies:
    """Copies of at most ``most_bytes``. When they are full, the catalogue that was used least recently loses its copies first; then
    the items that were read first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._of: OrderedDict[tuple[str, str], Copy] = OrderedDict()
        self.bytes = 0
        """Bytes of all copies."""

    def known(self, owner: str, name: str) -> Copy | None:
        """Return what is known of a catalogue."""
        return self._of.get((owner, name))

    def follow(self, owner: str, name: str, epoch: str, version: int, changed: Sequence[str] | None) -> Copy:
        """Bring the copies to ``version``. ``changed``: ids that have changed since the version that was known when Redis was
        asked, or None if all may have."""
        place = (owner, name)
        copy = self._of.get(place)
        if copy is None or copy.epoch != epoch:
            self.forget(owner, name)
            copy = self._of[place] = Copy(epoch, version)
        elif version > copy.version:
            # Another request may have moved the copy on meanwhile; then this list holds more than it has to.
            if changed is None:
                self._clear(copy)
            for id in changed or ():
                self._drop(copy, id)
            copy.version = version
        self._of.move_to_end(place)
        while len(self._of) > MOST_CATALOGUES:
            self.forget(*next(iter(self._of)))
        return copy

    def get(self, copy: Copy, ids: Sequence[str], now: int) -> list[bytes | None]:
        """Return the live records that there are copies of."""
        records = [*map(copy.records.get, ids)]
        return records if copy.spec is not None and copy.spec.ttl_seconds is None else without_expired(records, now)

    def keep(self, copy: Copy, version: int, records: Mapping[str, bytes]) -> None:
        """Keep copies of records that were read at ``version``. If the copies are of a later one already, these may be out of
        date, and are not kept."""
        if version < copy.version or copy.dropped:
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
        while self.bytes > self._most_bytes:
            oldest = next((copy for copy in self._of.values() if copy.records), kept)
            if not oldest.records:
                return
            if oldest is kept:
                self._drop(kept, next(iter(kept.records)))
            else:
                self._clear(oldest)

    def _clear(self, copy: Copy) -> None:
        self._grow(copy, -copy.bytes)
        copy.records = {}

    def _drop(self, copy: Copy, id: str) -> None:
        record = copy.records.pop(id, None)
        if record is not None:
            self._grow(copy, -_size(id, record))

    def _grow(self, copy: Copy, size: int) -> None:
        copy.bytes += size
        self.bytes += size


def _size(id: str, record: bytes) -> int:
    return ITEM_BYTES + len(id) + len(record)
