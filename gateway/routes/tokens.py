"""What clients send as tokens, and text on its way to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from gateway.errors import InvalidRequest
from gateway.pool.replica import ServedModel
from gateway.schemas.chat import ChatMessage
from gateway.text.chat_template import ChatTemplateError

INLINE_CHARACTERS = 20_000
"""Text up to this length is tokenised where it is (some 5 ms); longer text in a thread, so that others are served meanwhile."""

P = ParamSpec("P")
T = TypeVar("T")


class Prompt(NamedTuple):
    """One prompt of a request."""

    param: str
    """Where it stands in the request."""
    ids: list[int]
    text: str | None
    """None where it came as token ids."""


async def read_prompts(
    model: ServedModel, given: str | list[str | int | list[int]], param: str, *, at_most: int, add_special_tokens: bool = True
) -> list[Prompt]:
    """The prompts in ``given``: a text, several texts, one list of token ids, or several such lists.

    Raises :class:`InvalidRequest`.
    """
    encode = model.tokenizer.encode_batch
    if isinstance(given, str):
        (ids,) = await tokenised(len(given), encode, [given], add_special_tokens=add_special_tokens)
        return [Prompt(param, ids, given)]
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    ids = [prompt for prompt in given if isinstance(prompt, int)]
    lists = [prompt for prompt in given if isinstance(prompt, list)]
    if len(given) not in (len(texts), len(ids), len(lists)):
        raise InvalidRequest(f"`{param}` mixes kinds; give texts, or token ids, or lists of token ids.", param=param)
    if ids:
        check_ids(model, ids, param)
        return [Prompt(param, ids, None)]
    if len(given) > at_most:
        raise InvalidRequest(f"`{param}` has {len(given)} prompts; at most {at_most} are answered at once.", param=param)
    if texts:
        encoded = await tokenised(sum(map(len, texts)), encode, texts, add_special_tokens=add_special_tokens)
        return [Prompt(f"{param}[{index}]", *pair) for index, pair in enumerate(zip(encoded, texts, strict=True))]
    for index, tokens in enumerate(lists):
        check_ids(model, tokens, f"{param}[{index}]")
    return [Prompt(f"{param}[{index}]", tokens, None) for index, tokens in enumerate(lists)]


def rendered(model: ServedModel, messages: list[ChatMessage], variables: dict[str, Any] | None) -> str:
    """The conversation as a text with special tokens in it. ``variables`` are the client's, none of which may take the place of our
    own. Slow for long ones: call it in a worker thread. Raises :class:`InvalidRequest`."""
    taken = {"messages", "tools", "documents", "self"} & (variables or {}).keys()
    if taken:
        raise InvalidRequest(f"`chat_template_kwargs` must not set {min(taken)!r}.", param="chat_template_kwargs")
    try:
        return model.template.render([message.for_template() for message in messages], **(variables or {}))
    except ChatTemplateError as error:
        raise InvalidRequest(f"{error}.", param="messages") from None


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
