"""``/v1/completions``: prompts to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.requests.chat import is_constrained, read_bad_words, read_grammar
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.schemas.common import Usage
from yardstick_llm.gateway.schemas.generation import BULK, MAX_LOGPROBS, Count, GenerationRequest, PromptLogprob
from yardstick_llm.gateway.schemas.parameters import EndpointName, TokenId
from yardstick_llm.gateway.text.prepared import Prepared, TooManyTokens

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


def is_light(given: Given | None) -> bool:
    """Whether the event loop reads ``given`` by itself: no texts, and no more than :data:`LIGHT_TEXTS` lists of token ids."""
    return given is None or (not is_text(given) and (len(given) <= LIGHT_TEXTS or isinstance(given[0], int)))


def characters_of(given: Given | None) -> int:
    """Return the number of characters of all texts in ``given``."""
    if given is None or isinstance(given, str):
        return len(given or "")
    return sum(len(prompt) for prompt in given if isinstance(prompt, str))


MAX_PROMPTS = 1024


class CompletionRequest(GenerationRequest, kw_only=True):
    """Continue one or several prompts."""

    endpoint: ClassVar[EndpointName] = "completions"
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], msgspec.Meta(min_length=1, max_length=1 << 20)]
    """A text, several texts, one list of token ids, or several such lists."""
    max_tokens: Count | None = None
    """Most tokens of each completion; the default is 16, plus twice a `target_length`. The context may end it earlier. 0 is allowed
    only with `echo`."""
    best_of: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """Draw this many completions of each prompt and return the `n` whose tokens have the highest mean log-probability; not with
    `stream`. All count as completion tokens. By default `n`."""
    add_special_tokens: bool | None = True
    """Add the special tokens, such as BOS, that the tokeniser adds to a text."""
    echo: bool | None = False
    """Put the prompt before the completion."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probability of each token, and of this many most probable tokens at its position."""

    @property
    def completions(self) -> int:
        """``n``, or its default."""
        return super().sequences

    @property
    def sequences(self) -> int:
        """Completions of each prompt to draw."""
        return max(self.completions, self.best_of or 1)

    @property
    def is_choosy(self) -> bool:
        """Whether more completions are drawn than returned."""
        return self.sequences > self.completions


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of consecutive tokens, over the whole vocabulary at temperature 1; with length guidance, over the
    candidates of each draw. All lists have the same length."""

    tokens: list[str] = []
    """Each token as text; a token that is only part of a character reads like `bytes:\\xe2\\x82`."""
    token_logprobs: list[float | None] = []
    """Null for the first token of a prompt, which has no predecessor. -9999 represents a probability of zero."""
    top_logprobs: list[dict[str, float] | None] = []
    """The most probable tokens at each position, and the token itself."""
    text_offset: list[int] = []
    """Start of each token in the text, in characters."""
    top_values: list[dict[str, float] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only with `length_guidance.return_values`: the length model's value after each of the most probable tokens, from 0 (the text
    ends) to 1. Null if the token was drawn without guidance."""
    top_remaining_tokens: list[dict[str, float] | None] | msgspec.UnsetType = msgspec.UNSET
    """These values in tokens, approximately: a proxy that lies below the mean."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or one piece of it in a stream."""

    index: int
    """Number of the completion: the `n` completions of the first prompt come first, then those of the second."""
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    """`stop`: the model or a stop text ended the completion; `length`: `max_tokens` or the context was reached."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the completion's tokens; only with `return_token_ids`."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the prompt's tokens, in the first completion of each prompt; only with `return_token_ids`."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    """Only with `prompt_logprobs`, in the first completion of each prompt: for each token of the prompt, the log-probabilities of
    the token and of the most probable ones at its position, by token id. Null for the first token."""


class Completion(msgspec.Struct, kw_only=True):
    """Completions; in a stream, their new output."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Identifies the weights and the settings that affect numbers. While it stays the same, equal requests with a seed get equal
    answers."""
    choices: list[CompletionChoice]
    usage: Usage | None = None


def _read(request: CompletionRequest, model: Model) -> Prepared:
    prepared = read_prompts(
        model,
        request.prompt,
        "prompt",
        at_most=MAX_PROMPTS,
        sequences=request.sequences,
        echo=bool(request.echo),
        add_special_tokens=request.add_special_tokens is not False,
        parse_special_tokens=request.parse_special_tokens is not False,
    )
    prepared.grammar = read_grammar(request, model)
    prepared.bad_words = read_bad_words(request, model)
    return prepared


COMPLETIONS = Endpoint(
    kind=CompletionRequest,
    bulk={"prompt": "", "user": "", **BULK},
    read=_read,
    is_light=lambda request: not is_constrained(request) and is_light(request.prompt),
    characters=lambda request, _: characters_of(request.prompt),
)
