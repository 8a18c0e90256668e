"""Cache keys of scores. Within one salt, equal prompts, labels and fingerprints have equal keys, wherever a prompt is divided into
prefix and branch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def result_keys(
    fingerprint: str, labels: Sequence[int], prefix: Sequence[int], branches: Sequence[Sequence[int]], *, salt: str
) -> list[bytes]:
    """Return one 16-byte digest for each ``prefix + branch``. Token ids are in [0, 2**32). ``salt`` is hexadecimal; only requests
    with equal salts share results. An empty salt gives the keys of a server whose API keys share all results."""
    common = hashlib.blake2b(digest_size=16)
    # The encoding is unambiguous: no part contains a separator, and a colon follows only a salt.
    common.update(f"{fingerprint}\0{salt and salt + ':'}{','.join(map(str, labels))}\0".encode())
    common.update(array("I", prefix))
    keys = []
    for branch in branches:
        digest = common.copy()
        digest.update(array("I", branch))
        keys.append(digest.digest())
    return keys
