"""What clients send as tokens, and text on its way to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gateway.errors import InvalidRequest
from gateway.pool.replica import ServedModel

INLINE_CHARACTERS = 20_000
"""Text up to this length is tokenised where it is (some 5 ms); longer text in a thread, so that others are served meanwhile."""

P = ParamSpec("P")
T = TypeVar("T")


async def tokenised(characters: int, tokenise: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``tokenise(...)``, which reads ``characters`` of text."""
    if characters <= INLINE_CHARACTERS:
        return tokenise(*args, **kwargs)
    return await asyncio.to_thread(tokenise, *args, **kwargs)


def check_ids(model: ServedModel, ids: list[int], param: str) -> None:
    """Raise :class:`InvalidRequest` unless all of a prompt's ``ids`` are rows of the model."""
    size = model.info.vocab_size
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return
    place, id = next((place, id) for place, id in enumerate(ids) if not 0 <= id < size)
    message = f"`{param}[{place}]`: {id} is not a token of {model.name!r}; ids are 0 to {size - 1}."
    raise InvalidRequest(message, param=f"{param}[{place}]")
