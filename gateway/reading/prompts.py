"""Reads a field that is a text, a list of texts, a list of token ids, or a list of such lists."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import InvalidRequest
from gateway.reading.endpoint import Model
from gateway.text.bounds import TooManyTokens
from gateway.text.prepared import Prepared

Given = str | list[str | int | list[int]]

LIGHT_TEXTS = 128
"""Most lists of token ids that the event loop reads by itself."""


def read_prompts(
    model: Model,
    given: Given,
    param: str,
    *,
    at_most: int,
    sequences: int = 1,
    echo: bool = False,
    add_special_tokens: bool = True,
    parse_special_tokens: bool = True,
) -> Prepared:
    """Read the prompts in ``given``, the value of field ``param``. Each prompt gets ``sequences`` answers (0 means that it is only
    evaluated), which repeat it with ``echo``.

    Raises :class:`InvalidRequest`.
    """
    texts, lists, numbered = sorted_out(given, param, at_most)
    prompts: Sequence[str | list[int]] = texts or lists
    model.bounds.check("max_sequences", len(prompts) * sequences, "sequences (prompts and `n`)", param)
    rows: list[list[int]] = []
    tokens = 0
    for index, prompt in enumerate(prompts):
        rows.append(
            _row(
                model,
                prompt,
                numbered.replace("[]", f"[{index}]"),
                add_special_tokens=add_special_tokens,
                parse_special_tokens=parse_special_tokens,
            )
        )
        tokens += len(rows[-1]) * (sequences if echo else 1)
        model.bounds.check("max_request_tokens", tokens, "tokens or more", param)
    shown = (texts or [model.vocabulary.decode(row, skip_special_tokens=False) for row in rows]) if echo else None
    return Prepared(rows, texts=shown, param=numbered)


def _row(model: Model, prompt: str | list[int], param: str, *, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
    if isinstance(prompt, list):
        model.facts.check_ids(prompt, param)
        return prompt
    try:
        return model.texts.tokenizer.encode(
            prompt,
            limit=model.facts.context,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
        )
    except TooManyTokens as error:
        raise model.facts.too_long(error, param) from None


def sorted_out(given: Given, param: str, at_most: int) -> tuple[list[str], list[list[int]], str]:
    """Return texts, or lists of token ids, and ``param`` with "[]" if there can be several. Raises :class:`InvalidRequest`."""
    if isinstance(given, str):
        return [given], [], param
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    ids = [prompt for prompt in given if isinstance(prompt, int)]
    lists = [prompt for prompt in given if isinstance(prompt, list)]
    if len(given) not in (len(texts), len(ids), len(lists)):
        raise InvalidRequest(f"`{param}` mixes kinds; give texts, or token ids, or lists of token ids.", param=param)
    if ids:
        return [], [ids], param
    if len(given) > at_most:
        raise InvalidRequest(f"`{param}` has {len(given)} prompts; at most {at_most} are allowed.", param=param)
    return texts, lists, f"{param}[]"


def is_text(given: Given | None) -> bool:
    """Whether ``given`` contains a text."""
    return isinstance(given, str) or (given is not None and any(isinstance(prompt, str) for prompt in given))


def characters_of(given: Given | None) -> int:
    """Return the number of characters of all texts in ``given``."""
    if given is None or isinstance(given, str):
        return len(given or "")
    return sum(len(prompt) for prompt in given if isinstance(prompt, str))
