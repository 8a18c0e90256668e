"""Weights of replicas for a request or an item: rendezvous hashing.

Each goes to the replica with the largest weight. A weight depends on the digest of the request or item and on the replica only, so
adding or removing a replica moves only what prefers it: Thaler and Ravishankar, https://doi.org/10.1109/90.663936.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLIERS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""Constants of SplitMix64, https://doi.org/10.1145/2714064.2660195."""


def weight(digest: int, seed: int) -> int:
    """Return the weight of the replica with ``seed``. Both are 64-bit numbers; a cryptographic hash of both takes twice as long."""
    number = (digest ^ seed) * _MULTIPLIERS[0] & _MASK
    number = (number ^ number >> 31) * _MULTIPLIERS[1] & _MASK
    return number ^ number >> 29
