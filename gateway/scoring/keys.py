"""Names of results: the same prompt and labels on the same numerics have the same key, however the prompt was split."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def result_keys(fingerprint: str, labels: Sequence[int], prefix: Sequence[int], branches: Sequence[Sequence[int]]) -> list[bytes]:
    """One 16-byte digest for each ``prefix + branch``. Token ids are in [0, 2**32)."""
    common = hashlib.blake2b(digest_size=16)
    common.update(f"{fingerprint}\0{','.join(map(str, labels))}\0".encode())
    common.update(array("I", prefix))
    keys = []
    for branch in branches:
        digest = common.copy()
        digest.update(array("I", branch))
        keys.append(digest.digest())
    return keys
