"""Cache keys of scores. Within one salt, equal prompts, readouts and fingerprints have equal keys, wherever a prompt is divided
into prefix, branch and suffix. Likelihoods are an exception, because the division says which tokens they are of, and so are
registered items, whose digests are hashed in place of their tokens: they share no results with prompts that are given whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from engine import wire
from gateway.text.prepared import PlacedIds, content_of


def result_keys(
    fingerprint: str,
    readout: wire.ScoreReadout,
    prefix: Sequence[int],
    branches: Sequence[Sequence[int]],
    suffix: Sequence[int] = (),
    *,
    salt: str,
) -> list[bytes]:
    """Return one 16-byte digest for each ``prefix + branch + suffix``. Likelihoods go without a suffix.

    Token ids are in [0, 2**32); an image counts as its digest. ``salt`` is hexadecimal; only requests with equal salts share
    results. An empty salt gives the keys of a server whose API keys share all results.
    """
    registered = bool(branches) and isinstance(branches[0], PlacedIds)
    common = hashlib.blake2b(digest_size=16, person=b"registered" if registered else b"")
    # The encoding is unambiguous: no part contains a separator, a salt ends with a colon, and JSON begins with a brace.
    tokens = readout.tokens if isinstance(readout, wire.Labels) and not readout.raw else None
    asked = msgspec.json.encode(readout).decode() if tokens is None else ",".join(map(str, tokens))
    divided = f"{len(prefix)}\0" if isinstance(readout, wire.Likelihood) else ""
    common.update(f"{fingerprint}\0{salt and salt + ':'}{asked}\0{divided}".encode())
    common.update(content_of(prefix))
    end = content_of(suffix)
    keys = []
    for branch in branches:
        digest = common.copy()
        digest.update(content_of(branch))
        digest.update(end)
        keys.append(digest.digest())
    return keys
