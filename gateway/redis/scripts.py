"""Lua scripts that Redis runs atomically, in one round trip."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from gateway.redis.connect import Client


class Script:
    """Calls a script by its digest; sends the source if Redis does not have the script."""

    def __init__(self, source: str) -> None:
        self._source = inspect.cleandoc(source)
        self._digest = hashlib.sha1(self._source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Client, keys: Sequence[bytes | str], arguments: Sequence[Any]) -> Any:
        """Run the script. On a cluster, all ``keys`` must belong to one slot."""
        try:
            return await client.execute_command("EVALSHA", self._digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await client.execute_command("EVAL", self._source, len(keys), *keys, *arguments)
