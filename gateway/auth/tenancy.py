"""Identity of a request's caller for engines and caches: tenant, weight, cache salt, priority."""

from __future__ import annotations

import hashlib

from litestar.connection import ASGIConnection

from engine import wire
from gateway.cache.policy import CachePolicy
from gateway.context import RequestContext
from gateway.errors import InvalidRequest
from gateway.keys import PRIORITY_RANGE


def caller_of(connection: ASGIConnection, *, cache_salt: str | None = None) -> wire.Caller:  # type: ignore[type-arg]
    """Return the caller for messages to engines. ``cache_salt`` is the client's own. ``Cache-Control: no-store`` keeps the prompt
    out of engines' prefix caches."""
    context = RequestContext.of(connection)
    keeps = CachePolicy.of(connection).write
    key = context.key
    if key is None:
        return wire.Caller(context.id.decode(), cache_salt=salt_of(b"", cache_salt), keep_prefix=keeps)
    salt = key.cache_salt if cache_salt is None else salt_of(key.cache_group, cache_salt)
    return wire.Caller(context.id.decode(), key.id, key.weight, salt, keeps)


def salt_of(group: bytes, cache_salt: str | None) -> str:
    """Return the namespace of ``cache_salt`` within a trust group, in hexadecimal. It is unique for each pair, so no choice of
    ``cache_salt`` reaches another group. It is empty for the shared group without a ``cache_salt``."""
    if cache_salt is None:
        return group.hex()
    # The key has a fixed length, and unsalted names are digests with another `person` (see ApiKey.cache_group).
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, key=group, person=b"yardstick-salt").hexdigest()


def priority_of(connection: ASGIConnection, priority: int | None) -> int:  # type: ignore[type-arg]
    """Return the priority of a request that asks for ``priority``. The default is 0, or the number nearest to 0 in the key's range.

    Raises :class:`InvalidRequest` for a priority outside the range.
    """
    key = RequestContext.of(connection).key
    least, most = PRIORITY_RANGE if key is None else (key.priority_min, key.priority_max)
    if priority is None:
        return min(max(0, least), most)
    if least <= priority <= most:
        return priority
    whose = "here" if key is None else "with this API key"
    raise InvalidRequest(f"`priority` is {priority}; {whose} it is {least} to {most}.", param="priority")
