"""Names of results: within one salt, the same prompt and labels on the same numerics have the same key, however the prompt was
split."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def result_keys(
    fingerprint: str, labels: Sequence[int], prefix: Sequence[int], branches: Sequence[Sequence[int]], *, salt: str
) -> list[bytes]:
    """One 16-byte digest for each ``prefix + branch``. Token ids are in [0, 2**32). ``salt``: hexadecimal; results are shared only
    between equal ones. Without a salt the key is that of a server whose keys share everything."""
    common = hashlib.blake2b(digest_size=16)
    # Unambiguous: no part contains a separator, and only a salt is followed by a colon.
    common.update(f"{fingerprint}\0{salt and salt + ':'}{','.join(map(str, labels))}\0".encode())
    common.update(array("I", prefix))
    keys = []
    for branch in branches:
        digest = common.copy()
        digest.update(array("I", branch))
        keys.append(digest.digest())
    return keys
