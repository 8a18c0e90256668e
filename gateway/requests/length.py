"""``/v1/length``: texts, or a prompt and partial answers, to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.requests import chat
from yardstick_llm.gateway.requests.completions import characters_of, is_light, read_prompts
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.schemas.chat import ChatMessage
from yardstick_llm.gateway.schemas.common import MAX_ITEMS, ModelRequest, Usage
from yardstick_llm.gateway.schemas.generation import Gamma
from yardstick_llm.gateway.schemas.parameters import EndpointName, TokenId
from yardstick_llm.gateway.text.cuts import may_be_cut
from yardstick_llm.gateway.text.prepared import Prepared
from yardstick_llm.gateway.text.prompts import EmptyPromptError, PromptTooLongError, join_ids, share_prefix, tokenise_pairs

Texts = str | Annotated[list[str | TokenId | list[TokenId]], msgspec.Meta(min_length=1, max_length=1 << 20)]
MAX_TEXTS = MAX_ITEMS


class LengthRequest(ModelRequest, kw_only=True):
    """Estimate how much text follows each given text. Give `input`, `prompt` or `messages`."""

    endpoint: ClassVar[EndpointName] = "length"
    input: Texts | None = None
    """Complete texts so far, prompt and answer: a text, several texts, one list of token ids, or several such lists."""
    prompt: Texts | None = None
    """Texts like `input`; with `partial`, the one prompt, as text or token ids, of all partial answers."""
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    """A conversation whose answer is to begin, or begins with `partial`."""
    partial: Texts | None = None
    """With `prompt` or `messages`: one or several partial answers, as text, or as token ids if `prompt` is given as token ids."""
    gamma: Gamma | None = None
    """Discount factor that converts values to tokens; the length model's own by default."""
    chat_template_kwargs: dict[str, Any] | None = None
    """With `messages`: further variables for the model's chat template."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token. The default is true in texts and false in `messages`."""


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """The length model's estimate after one text."""

    index: int
    """Index of the text in the request."""
    value: float
    """Mean of 1 − gamma^(remaining tokens), from 0 (the text ends) to 1."""
    remaining_tokens: float
    """The value in tokens, ln(1 − value) / ln(gamma), including the token that ends the text: a proxy below the mean length."""
    intervals: dict[str, tuple[float, float]] | None = None
    """Bounds of the real remaining tokens by their probability, `0.5` and `0.9`, as the calibration of the length model measured
    them; null if it has none, or with a `gamma` that is not its own."""


class LengthResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each text, in the order of the request."""

    id: str
    object: Literal["length"] = "length"
    created: int
    """Seconds since 1970."""
    model: str
    gamma: float
    """Discount factor that converted values to tokens."""
    data: list[Remaining]
    usage: Usage


def _read(request: LengthRequest, model: Model) -> Prepared:
    given = [name for name in ("input", "prompt", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        message = "Give one of `input` (texts), `prompt` (with `partial` answers) and `messages`."
        raise InvalidRequest(message, param=given[1] if given else "input")
    if request.partial is not None and request.input is not None:
        raise InvalidRequest("`partial` goes with `prompt` or `messages`; `input` is whole texts.", param="partial")
    if request.messages is not None:
        return _conversation(request, model)
    if request.prompt is not None and request.partial is not None:
        return _partial_answers(request, model, request.prompt, request.partial)
    whole = request.prompt if request.input is None else request.input
    assert whole is not None
    parses = request.parse_special_tokens is not False
    texts = read_prompts(model, whole, given[0], at_most=MAX_TEXTS, sequences=0, parse_special_tokens=parses)
    return _shared(texts, model)


def _shared(texts: Prepared, model: Model) -> Prepared:
    """Split off the common prefix of the texts."""
    for index, row in enumerate(texts.rows):
        if not row:
            raise _empty(texts.param_of(index))
        model.facts.check_prompt(len(row), texts.param_of(index))
    prefix, rows = share_prefix([[*row] for row in texts.rows])
    return Prepared(rows, prefix, param=texts.param)


def _numbered(param: str, index: int) -> str:
    return param.replace("[]", f"[{index}]")


def _empty(param: str) -> InvalidRequest:
    return InvalidRequest(f"`{param}` is empty; send at least one token.", param=param)


def _partial_answers(request: LengthRequest, model: Model, prompt: Texts, partial: Texts) -> Prepared:
    """Read a prompt and partial answers. Raises :class:`InvalidRequest` if there are several prompts or the kinds differ."""
    param = "partial" if isinstance(partial, str) or isinstance(partial[0], int) else "partial[]"
    if isinstance(prompt, str):
        texts = _answers(partial)
        parses = request.parse_special_tokens is not False
        return _pairs(model, prompt, texts, param, add_special_tokens=True, parse_special_tokens=parses)
    start = [id for id in prompt if isinstance(id, int)]
    if len(start) != len(prompt):
        message = "`partial` goes with one prompt, a text or one list of token ids; give other texts whole, as `input`."
        raise InvalidRequest(message, param="partial")
    model.facts.check_ids(start, "prompt")
    lists = _lists(model, partial)
    for index, answer in enumerate(lists):
        model.facts.check_prompt(len(start) + len(answer), _numbered(param, index))
    model.bounds.check("max_request_tokens", len(start) + sum(map(len, lists)), "tokens", "partial")
    try:
        prefix, rows = join_ids(start, lists)
    except EmptyPromptError as error:
        raise _empty(_numbered(param, error.index)) from None
    return Prepared(rows, prefix, param=param)


def _answers(partial: Texts) -> list[str]:
    """Return partial answers given as texts."""
    if isinstance(partial, str):
        return [partial]
    texts = [answer for answer in partial if isinstance(answer, str)]
    _check_kinds(texts, partial, "text")
    return texts


def _lists(model: Model, partial: Texts) -> list[list[int]]:
    """Return partial answers given as token ids."""
    if isinstance(partial, str) or isinstance(partial[0], int):
        ids = [id for id in partial if isinstance(id, int)]
        _check_kinds(ids, partial, "token ids")
        model.facts.check_ids(ids, "partial")
        return [ids]
    lists = [answer for answer in partial if isinstance(answer, list)]
    _check_kinds(lists, partial, "token ids")
    for index, answer in enumerate(lists):
        model.facts.check_ids(answer, f"partial[{index}]")
    return lists


def _check_kinds(fitting: Sequence[object], partial: Texts, kind: str) -> None:
    if len(fitting) != len(partial):
        message = f"`partial` is not all of the prompt's kind, which is {kind}; give all as text, or all as token ids."
        raise InvalidRequest(message, param="partial")
    if len(fitting) > MAX_TEXTS and not isinstance(fitting[0], int):
        message = f"`partial` has {len(fitting)} prompts; at most {MAX_TEXTS} are allowed."
        raise InvalidRequest(message, param="partial")


def _conversation(request: LengthRequest, model: Model) -> Prepared:
    """Read a conversation, or a conversation with each partial answer. Partial answers are treated as texts of users."""
    answers = _answers(request.partial or "")
    param = "messages" if request.partial is None else "partial" if isinstance(request.partial, str) else "partial[]"
    marked = chat.render(
        model,
        request.messages or [],
        request.chat_template_kwargs,
        parse_special_tokens=request.parse_special_tokens,
        followed_by=answers,
    )
    tokenizer = model.texts.tokenizer
    text, own = tokenizer.lift(marked) if marked.mark else (marked.text, [])
    pairs = _pairs(model, text, answers, param, add_special_tokens=False, parse_special_tokens=not marked.mark)
    prefix = [*pairs.prefix]
    places = tokenizer.kept_places(prefix)
    rows = [tokenizer.restore([*row], own[places:]) for row in pairs.rows]
    return Prepared(rows, tokenizer.restore(prefix, own), param=param)


def _pairs(
    model: Model, prompt: str, answers: list[str], param: str, *, add_special_tokens: bool, parse_special_tokens: bool
) -> Prepared:
    """Tokenise the prompt with each of the answers."""
    try:
        prefix, rows = tokenise_pairs(
            model.texts.tokenizer,
            prompt,
            answers,
            limit=model.facts.context,
            bounds=model.bounds,
            param=param.removesuffix("[]"),
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
        )
    except PromptTooLongError as error:
        raise model.facts.too_long(error.tokens, _numbered(param, error.index)) from None
    except EmptyPromptError as error:
        raise _empty(_numbered(param, error.index)) from None
    return Prepared(rows, prefix, param=param)


def _characters(request: LengthRequest, query_once: bool) -> int:
    answers = 1 if request.partial is None or isinstance(request.partial, str) else len(request.partial)
    once = characters_of(request.prompt) + chat.characters_of(request.messages)
    cut = query_once and (not isinstance(request.prompt, str) or may_be_cut(request.prompt))
    return once * (min(answers, 2) if cut else answers) + characters_of(request.partial) + characters_of(request.input)


LENGTH = Endpoint(
    kind=LengthRequest,
    bulk={
        "input": "",
        "prompt": "",
        "partial": "",
        "messages": chat.CHAT.bulk["messages"],
        "chat_template_kwargs": {},
        "user": "",
    },
    read=_read,
    is_light=lambda request: request.messages is None and all(map(is_light, (request.input, request.prompt, request.partial))),
    characters=_characters,
)
