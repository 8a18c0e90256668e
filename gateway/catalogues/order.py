"""The ids of a catalogue in memory, in the order of their last change."""

from __future__ import annotations

from collections.abc import Iterator

_BITS = 9
"""Changes of a block: 2 to this power."""


class ChangeOrder:
    """Ids by the version of their last change. Versions are added in ascending order, and each is one change.

    Blocks of 512 versions lie in ascending order. A page begins with a search among the blocks, of which there are some hundreds
    for a large catalogue, and not with all ids.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, str]] = {}

    def add(self, version: int, id: str) -> None:
        """Add the newest change."""
        self._blocks.setdefault(version >> _BITS, {})[version] = id

    def remove(self, version: int) -> None:
        """Remove a change."""
        number = version >> _BITS
        block = self._blocks[number]
        del block[version]
        if not block:
            del self._blocks[number]
        elif len(block) & (len(block) - 1) == 0:
            self._blocks[number] = dict(block)  # a dict gives no memory back when entries leave

    def after(self, version: int) -> Iterator[tuple[int, str]]:
        """Yield versions above ``version`` and their ids. Nothing may change meanwhile."""
        first = (version + 1) >> _BITS
        for number in [number for number in self._blocks if number >= first]:
            for each, id in self._blocks[number].items():
                if each > version:
                    yield each, id

    @property
    def oldest(self) -> str | None:
        """The id whose last change is the oldest; None if there are no ids."""
        block = next(iter(self._blocks.values()), None)
        return None if block is None else next(iter(block.values()))

    def clear(self) -> list[dict[int, str]]:
        """Forget all changes. Return the mappings that hold them, which the caller frees."""
        blocks = list(self._blocks.values())
        self._blocks = {}
        return blocks
