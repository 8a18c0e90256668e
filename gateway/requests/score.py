"""``/v1/score``: query, items and labels to token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal, TypeVar, cast

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.presets.preset import Task
from yardstick_llm.gateway.requests.catalogue import NAMING_BYTES, query_prompts
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.requests.images import plain, reading_content, texts_of
from yardstick_llm.gateway.requests.pairs import SEAM_TOKENS, Pairs, preset_of, to_compare
from yardstick_llm.gateway.schemas.common import (
    CUTS,
    MAX_ITEMS,
    PAIRED_DOCUMENTS,
    PAIRED_QUERIES,
    Activation,
    CatalogueIds,
    ItemError,
    ItemUsage,
    Paired,
    Query,
    Usage,
)
from yardstick_llm.gateway.schemas.parameters import EndpointName
from yardstick_llm.gateway.text.cuts import may_be_cut
from yardstick_llm.gateway.text.prepared import Prepared, Refusal, TooManyTokens
from yardstick_llm.gateway.text.prompts import (
    EmptyPromptError,
    ItemsAndSuffix,
    PrefixAndBranches,
    PromptTooLongError,
    join_ids,
    share_prefix,
    tokenise_items,
    tokenise_pairs,
)

TopN = Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS)]


class ScoreRequest(Activation, kw_only=True):
    """Score every item against one query: the probability of each label as the next token after query and item. Or, with `text_1`
    and `text_2`, score pairs of texts as the model's preset prescribes."""

    endpoint: ClassVar[EndpointName] = "score"
    query: Query | None = None
    """The common part of all prompts, as text, token ids, or content with images: a list of parts or an object."""
    items: str | Annotated[list[Query], msgspec.Meta(max_length=MAX_ITEMS)] | None = None
    """Items to score, of the same kind as the query: texts and contents, or lists of token ids. One text means a list of one. With
    `queries`: another name of `text_2`."""
    catalogue: str | None = None
    """Name of a catalogue: its items are scored in place of `items`, as its template prescribes."""
    ids: CatalogueIds | None = None
    """With `catalogue`: ids of items. Without it, all items of the catalogue are scored; set `top_n` or `stream`."""
    top_n: TopN | None = None
    """With `catalogue`: return the items with the highest scores of the first label only, the highest first, with their `ids`."""
    text_1: Paired | None = None
    """A query, or a query for each text of `text_2`. This and the next five fields are vLLM's form: the answer is `data`, with one
    score for each pair."""
    text_2: Paired | None = None
    """A document, or several."""
    queries: Paired | None = None
    """Another name of `text_1`."""
    documents: Paired | None = None
    """Another name of `text_2`."""
    data_1: Paired | None = None
    """Another name of `text_1`."""
    data_2: Paired | None = None
    """Another name of `text_2`."""
    instruction: str | None = None
    """With pairs: the instruction for the model; the preset's own by default."""
    label_token_ids: list[int] | None = None
    """Token ids to score. Give either these or `labels`."""
    labels: list[str] | None = None
    """Texts to score; each must be one token of the model."""
    readout: Literal["labels", "likelihood"] | None = "labels"
    """The result for each item: the probability of each label as the next token, or the log-probability of the item's own tokens
    after the query (`likelihood`), which needs no labels."""
    return_token_logprobs: bool | None = False
    """With `likelihood`: also return the log-probability of each token of an item."""
    apply_softmax: bool | None = False
    """Scale the scores of an item so that they sum to 1 over the labels, instead of over the whole vocabulary."""
    item_first: bool | None = False
    """Put the item before the query in the prompt."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token; true by default. Texts often contain a rendered template."""
    stream: bool | None = False
    """Send results as they become known, as server-sent events."""
    partial_results: bool | None = False
    """Answer with the results that there are, and an error for each item without one, instead of one error for the request."""
    return_item_usage: bool | None = False
    """Return the token counts of each item, and whether its result was reused. A stream has them at its end."""

    @property
    def paired(self) -> bool:
        """Whether the request has vLLM's form."""
        return any(getattr(self, name) is not None for name in (*PAIRED_QUERIES, *PAIRED_DOCUMENTS))


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Scores in the order of the items."""

    id: str
    object: Literal["scoring"]
    created: int
    """Seconds since 1970."""
    model: str
    scores: list[list[float] | None]
    """One list for each item, with the probability of each label; null for an item in `errors`."""
    usage: Usage
    ids: list[str] = []
    """Only with `catalogue`: the item of each list."""
    item_usage: ItemUsage | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_item_usage`."""
    errors: list[ItemError] = []
    """Items without scores, with `partial_results`."""


class ItemScores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of one item, in a stream."""

    index: int
    scores: list[float]
    id: str | msgspec.UnsetType = msgspec.UNSET
    """Only with `catalogue`."""


class ScoreChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: scores of some items, in no order."""

    id: str
    object: Literal["scoring.chunk"] = "scoring.chunk"
    data: list[ItemScores]


class ItemLikelihood(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The log-probability of one item after the query."""

    index: int
    logprob: float
    """Sum over the item's tokens. -9999 or less represents a probability of zero."""
    mean_logprob: float
    """Mean over the item's tokens."""
    tokens: int
    """Number of the item's tokens."""
    is_greedy: bool
    """Whether each token is the most probable one at its place: greedy decoding would write this item."""
    token_logprobs: list[float] | None = None
    """The log-probability of each token, with `return_token_logprobs`."""


class LikelihoodChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: likelihoods of some items, in no order."""

    id: str
    object: Literal["likelihood.chunk"] = "likelihood.chunk"
    data: list[ItemLikelihood]


class Likelihoods(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Likelihoods in the order of the items."""

    id: str
    object: Literal["likelihood"]
    created: int
    """Seconds since 1970."""
    model: str
    data: list[ItemLikelihood]
    usage: Usage
    item_usage: ItemUsage | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_item_usage`."""
    errors: list[ItemError] = []
    """Items without a likelihood, with `partial_results`."""


class PairScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float
    """Greater is more relevant. The preset says in which range."""


class PairChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream: scores of some pairs, in no order."""

    id: str
    object: Literal["list.chunk"] = "list.chunk"
    data: list[PairScore]


class PairScores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Scores of pairs, in the order of the request."""

    id: str
    object: Literal["list"]
    created: int
    """Seconds since 1970."""
    model: str
    data: list[PairScore]
    usage: Usage
    item_usage: ItemUsage | msgspec.UnsetType = msgspec.UNSET
    """Only with `return_item_usage`."""
    errors: list[ItemError] = []
    """Pairs without a score, with `partial_results`."""


SHOWN_TOKENS = 16
"""Most tokens of a multi-token label that the error message shows. Encoding stops beyond this number."""


def labels_of(request: ScoreRequest, model: Model) -> list[int]:
    """Return the token ids of the labels. Raises :class:`InvalidRequest`."""
    given: Sequence[str | int] | None = request.labels if request.labels is not None else request.label_token_ids
    if given is None or (request.labels is not None and request.label_token_ids is not None):
        raise InvalidRequest("Give either `labels` (texts) or `label_token_ids`, to say which tokens are scored.", param="labels")
    param = "labels" if request.labels is not None else "label_token_ids"
    if not given:
        raise InvalidRequest(f"`{param}` is empty; name at least one token.", param=param)
    if len(given) > model.facts.max_labels:
        raise InvalidRequest(f"`{param}` has {len(given)} labels; at most {model.facts.max_labels} are allowed.", param=param)
    labels = [_label(model, label, index) if isinstance(label, str) else label for index, label in enumerate(given)]
    for index, label in enumerate(labels):
        if not model.vocabulary.has_token(label):
            known = f"ids are 0 to {model.vocabulary.vocab_size - 1}"
            raise InvalidRequest(
                f"`{param}[{index}]`: {label} is not a token of {model.facts.name!r}; {known}.", param=f"{param}[{index}]"
            )
    return labels


def _label(model: Model, text: str, index: int) -> int:
    """Return the token id of a text label. A long label is not tokenised."""
    tokenizer, pieces = model.texts.tokenizer, ""
    try:
        ids = tokenizer.encode(text, limit=SHOWN_TOKENS, add_special_tokens=False)
        if len(ids) == 1:
            return ids[0]
        length = f"{len(ids)} tokens"
        pieces = ": " + (", ".join(f"{tokenizer.token_text(id)!r} ({id})" for id in ids) or "none")
    except TooManyTokens as error:
        length = str(error)
    raise InvalidRequest(
        f"`labels[{index}]`: {text[:100]!r} is {length} of {model.facts.name!r}, not one{pieces}."
        " Choose a label that is one token.",
        param=f"labels[{index}]",
    )


T = TypeVar("T")


def check_kinds(query: str | list[int], items: Sequence[str | list[int]]) -> None:
    """Raise :class:`InvalidRequest` unless query and items are all texts or all lists of token ids."""
    index = next((index for index, item in enumerate(items) if isinstance(item, str) != isinstance(query, str)), None)
    if index is not None:
        kind = "text" if isinstance(query, str) else "token ids"
        raise InvalidRequest(
            f"`items[{index}]` is of another kind than `query`, which is {kind}; give all as text, or all as token ids.",
            param=f"items[{index}]",
        )


def join_token_ids(model: Model, query: list[int], items: Sequence[str | list[int]]) -> PrefixAndBranches:
    """Read token ids. All lengths are checked before anything is joined. Raises :class:`EmptyPromptError`."""
    lists = _checked_ids(model, query, items)
    model.bounds.check("max_request_tokens", len(query) + sum(map(len, lists)), "tokens", "items")
    return join_ids(query, lists)


def _checked_ids(model: Model, query: list[int], items: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the items, which are token ids. Raises :class:`InvalidRequest` for unknown ids and prompts that are too long."""
    lists = [item for item in items if not isinstance(item, str)]
    model.facts.check_ids(query, "query")
    for index, item in enumerate(lists):
        model.facts.check_ids(item, f"items[{index}]")
        model.facts.check_prompt(len(query) + len(item), f"items[{index}]")
    return lists


def item_first_prompts(
    request: ScoreRequest, model: Model, query: str | list[int], items: Sequence[str | list[int]]
) -> ItemsAndSuffix:
    """Return the beginning of each prompt, and the query behind it. Raises :class:`EmptyPromptError`."""
    if isinstance(query, list):
        lists = _checked_ids(model, query, items)
        model.bounds.check("max_request_tokens", len(query) * len(lists) + sum(map(len, lists)), "tokens", "items")
        if not query and not all(lists):
            raise EmptyPromptError(next(index for index, item in enumerate(lists) if not item))
        return lists, query
    return _tokenised(tokenise_items, request, model, query, items)


def fitting_items(
    query: str | list[int], model: Model, items: Sequence[str | list[int]]
) -> tuple[list[str | list[int]], list[Refusal]]:
    """Return the items whose prompts fit into the context, and the errors of the others. Raises :class:`ContextExceeded` if no item
    fits beside the query."""
    if isinstance(query, list):
        model.facts.check_prompt(len(query), "query")
        room = model.facts.context - len(query)
    else:
        try:
            room = model.facts.context - len(model.texts.tokenizer.encode(query, limit=model.facts.context)) - SEAM_TOKENS
        except TooManyTokens as error:
            raise model.facts.too_long(error, "query") from None
    fitting: list[str | list[int]] = []
    refused = []
    for index, item in enumerate(items):
        long = len(item) > room if isinstance(item, list) else model.texts.tokenizer.shorten(item, max(0, room))[1]
        if long:
            long_item = model.facts.too_long(TooManyTokens(model.facts.context, exact=False), f"items[{index}]")
            refused.append(Refusal(index, long_item.message, long_item.code))
        else:
            fitting.append(item)
    return fitting, refused


def _tokenised(tokenise: Callable[..., T], request: ScoreRequest, model: Model, query: str, items: Sequence[str | list[int]]) -> T:
    """Tokenise texts within the bounds of the model and of the server. Raises :class:`EmptyPromptError`, and
    :class:`InvalidRequest` for prompts that are too long."""
    texts = [item for item in items if isinstance(item, str)]
    try:
        return tokenise(
            model.texts.tokenizer,
            query,
            texts,
            limit=model.facts.context,
            bounds=model.bounds,
            parse_special_tokens=request.parse_special_tokens is not False,
        )
    except PromptTooLongError as error:
        raise model.facts.too_long(error.tokens, f"items[{error.index}]") from None


WITHOUT = ("labels", "label_token_ids", "apply_softmax", "item_first")
"""Fields that do not go with likelihoods."""
MAX_ITEM_TOKENS = 1 << 15
"""Most tokens of an item. Its log-probabilities come in one message, which takes the event loop two milliseconds."""


def read_likelihoods(request: ScoreRequest, model: Model, query: str | list[int], items: Sequence[str | list[int]]) -> Prepared:
    """Return the prompts of a request for likelihoods. Raises :class:`InvalidRequest`."""
    request.refuse(WITHOUT, "does not go with the readout `likelihood`, which is of the items' own tokens.")
    check_kinds(query, items)
    partial, refused = bool(request.partial_results), list[Refusal]()
    if partial:
        items, refused = fitting_items(query, model, items)
    left_out = {refusal.index for refusal in refused}
    places = [place for place in range(len(items) + len(left_out)) if place not in left_out]
    rows: Iterator[list[int] | None]
    if isinstance(query, list):
        if query:
            join_token_ids(model, query, items)  # checks ids and lengths
        ids, rows = query, (item if isinstance(item, list) else None for item in items)
    else:
        tokenizer, plain = model.texts.tokenizer, request.parse_special_tokens is False
        try:
            body = tokenizer.encode(query, limit=model.facts.context, add_special_tokens=False, parse_special_tokens=not plain)
        except TooManyTokens as error:
            raise model.facts.too_long(error, "query") from None
        begin, end = tokenizer.affixes
        ids = [*begin, *body]
        texts = [item if isinstance(item, str) else "" for item in items]
        # An empty item is refused below; a text in its place keeps its query and item from being an empty prompt.
        rows = _own_tokens(ids, _tokenised(tokenise_pairs, request, model, query, [text or "a" for text in texts]), end)
        rows = ([] if text == "" else row for text, row in zip(texts, rows, strict=True))
    return _prompts(model, ids, rows, places, refused, partial=partial)


def _own_tokens(query: list[int], found: PrefixAndBranches, end: Sequence[int]) -> Iterator[list[int] | None]:
    """Yield the tokens of each prompt behind those of the query; None if the prompt does not begin with them.

    ``query``: tokens of the query alone. ``found``: tokens of query and item together. ``end``: special tokens behind each text,
    which are not the item's.
    """
    prefix, branches = found
    shared, more = query[: len(prefix)], query[len(prefix) :]  # what the query has beyond the prefix is in each branch
    begin = prefix[len(query) :]  # what the prefix has beyond the query is of each item
    for branch in branches:
        if prefix[: len(query)] != shared or branch[: len(more)] != more:
            yield None
        else:
            yield [*begin, *branch[len(more) : len(branch) - len(end)]]


def _prompts(
    model: Model,
    query: list[int],
    rows: Iterator[list[int] | None],
    places: Sequence[int],
    refused: list[Refusal],
    *,
    partial: bool,
) -> Prepared:
    """Return the prompts. ``places`` are the indices of the items in the request. Raises :class:`InvalidRequest`; with ``partial``,
    an item without a likelihood is refused alone."""
    if not query:
        message = "`query` is empty; the likelihood of an item needs at least one token before it."
        raise InvalidRequest(message, param="query")
    kept: list[list[int]] = []
    tokens = len(query)
    for place, row in zip(places, rows, strict=True):
        if row and len(row) <= MAX_ITEM_TOKENS:
            kept.append(row)
            tokens += len(row)
            model.bounds.check("max_request_tokens", tokens, "tokens or more", "items")
            continue
        message = _problem(f"items[{place}]", row)
        if not partial:
            raise InvalidRequest(message, param=f"items[{place}]")
        refused.append(Refusal(place, message))
    return Prepared(kept, query, param="items[]", refused=sorted(refused, key=lambda refusal: refusal.index))


def _problem(param: str, row: list[int] | None) -> str:
    if row is None:
        return (
            f"`{param}`: the tokeniser joins the end of `query` and the beginning of this item into one token, so that the item's"
            " own tokens are not defined. Begin the items with the space, instead of ending the query with it, or send token ids."
        )
    if not row:
        return f"`{param}` is empty; there is no token to read."
    return f"`{param}` has {len(row)} tokens; the likelihood of at most {MAX_ITEM_TOKENS} is computed."


def read_pairs(request: ScoreRequest, model: Model, task: Task = "rerank") -> Prepared:
    """Read pairs of texts: one query with each document, or query and document number by number. ``task``: ``rerank``, or
    ``classify`` for an encoder that classifies pairs."""
    others = ("query", "labels", "label_token_ids") if _in_items(request) else ("query", "items", "labels", "label_token_ids")
    request.refuse(others, "does not go with `text_1` and `text_2`, whose labels the preset names.")
    queries, query_param = _one_of(request, *PAIRED_QUERIES)
    documents, param = _one_of(request, *PAIRED_DOCUMENTS, *(("items",) if _in_items(request) else ()))
    preset = preset_of(model, task)
    if request.item_first and not preset.preset.item_first:
        message = (
            f"The preset {preset.preset.name!r} puts the query before the document; send `query` and `items` with `item_first`."
        )
        raise InvalidRequest(message, param="item_first")
    partial = bool(request.partial_results)
    if len(queries) not in (1, len(documents)):
        message = f"`{query_param}` has {len(queries)} texts and `{param}` has {len(documents)}; give one, or as many."
        raise InvalidRequest(message, param=query_param)
    if preset.preset.task == "embed":
        asked = (query_param, queries)
        return to_compare(model, preset, request, asked, (param, documents), request.instruction, partial=partial)
    if len(queries) == 1:
        pairs = Pairs(model, preset, request, param, queries[0], request.instruction, query_param=query_param, partial=partial)
        return pairs.prepared(documents)
    characters = sum(map(len, (*queries, *documents))) + len(request.instruction or "") * len(queries)
    model.bounds.check("max_request_characters", characters, "characters that must be tokenised", param)
    prompts: list[list[int]] = []
    seams: list[int] = []
    tokens, truncated, refused = 0, [], []
    for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
        named = f"{query_param}[{index}]"
        pairs = Pairs(model, preset, request, param, query, request.instruction, query_param=named, first=index, partial=partial)
        pair = pairs.prepared([document])
        truncated += [index] if pair.truncated or pair.query_truncated else []
        if pair.refused:
            refused += [msgspec.structs.replace(refusal, index=index) for refusal in pair.refused]
            continue
        prompts.append([*pair.prefix, *pair.rows[0], *pair.suffix])
        seams.append(len(pair.prefix))
        tokens += len(prompts[-1])
        model.bounds.check("max_request_tokens", tokens, "tokens or more", param)
    if model.facts.encoder:
        seams = seams if preset.typed else []
        return Prepared(prompts, seams=seams, param=f"{param}[]", truncated=truncated, refused=refused)
    prefix, rows = share_prefix(prompts) if prompts else ([], [])
    return Prepared(rows, prefix, param=f"{param}[]", truncated=truncated, refused=refused)


def _in_items(request: ScoreRequest) -> bool:
    """Whether the documents are in ``items``, as vLLM allows beside ``queries``."""
    return request.queries is not None and request.items is not None


def _one_of(request: ScoreRequest, *names: str) -> tuple[list[str], str]:
    """Return the texts of the one field that is given, and its name."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"Give one of {' and '.join(f'`{name}`' for name in names)}.", param=names[0])
    value = getattr(request, given[0])
    return _items_of(value) if given[0] == "items" else texts_of(value), given[0]


def _items_of(items: str | list[Query]) -> list[str]:
    """Return ``items`` as documents. Raises :class:`InvalidRequest`."""
    if not items:
        raise InvalidRequest("`items` is empty; send at least one text.", param="items")
    for index, item in enumerate([] if isinstance(items, str) else items):
        if not isinstance(item, str):
            message = f"`items[{index}]` is token ids; with `queries`, send texts."
            raise InvalidRequest(message, param=f"items[{index}]")
    return [items] if isinstance(items, str) else cast("list[str]", items)


ONLY_PAIRED = ("instruction", *CUTS)
"""Fields that only pairs of texts may have."""
WITHOUT_CATALOGUE = ("items", *PAIRED_QUERIES, *PAIRED_DOCUMENTS, "partial_results", "parse_special_tokens")
"""Fields that requests for items of a catalogue must not have, besides :data:`ONLY_PAIRED`."""
LIGHT_ITEMS = 500


def _read(request: ScoreRequest, model: Model) -> Prepared:
    if request.return_token_logprobs and request.readout != "likelihood":
        raise InvalidRequest("`return_token_logprobs` goes with the readout `likelihood`.", param="return_token_logprobs")
    if request.catalogue is not None:
        return _of_catalogue(request, model)
    if request.paired:
        if request.readout == "likelihood":
            raise InvalidRequest("The readout `likelihood` goes with `query` and `items`.", param="readout")
        return read_pairs(request, model)
    if request.query is None or request.items is None:
        missing = "query" if request.query is None else "items"
        raise InvalidRequest(f"`{missing}` is missing; give `query` and `items`, or `text_1` and `text_2`.", param=missing)
    cut = next((name for name in ONLY_PAIRED if getattr(request, name) is not None and getattr(request, name) is not False), None)
    if cut is not None:
        raise InvalidRequest(f"`{cut}` goes with `text_1` and `text_2`; `query` and `items` are never changed.", param=cut)
    query, items = plain(request.query), [*map(plain, [request.items] if isinstance(request.items, str) else request.items)]
    if request.readout == "likelihood":
        return read_likelihoods(request, model, query, items)
    labels = labels_of(request, model)
    model.bounds.check("max_scores", len(items) * len(labels), "scores (items and labels)", "items")
    check_kinds(query, items)
    refused: list[Refusal] = []
    if request.partial_results:
        items, refused = fitting_items(query, model, items)
    prefix: list[int] = []
    suffix: list[int] = []
    try:
        if request.item_first:
            rows, suffix = item_first_prompts(request, model, query, items)
        elif isinstance(query, str):
            prefix, rows = _tokenised(tokenise_pairs, request, model, query, items)
        else:
            prefix, rows = join_token_ids(model, query, items)
    except EmptyPromptError as error:
        raise InvalidRequest(f"{error}.", param=f"items[{error.index}]") from None
    tokens = len(prefix) + sum(map(len, rows)) + len(suffix) * len(rows)
    model.bounds.check("max_request_tokens", tokens, "tokens", "items")
    return Prepared(rows, prefix, suffix, labels, param="items[]", refused=refused)


def _of_catalogue(request: ScoreRequest, model: Model) -> Prepared:
    """Read the query and the labels; no labels are read for a request that leaves them to the catalogue."""
    request.refuse((*WITHOUT_CATALOGUE, *ONLY_PAIRED), "does not go with `catalogue`.")
    if request.readout == "likelihood":
        raise InvalidRequest("The readout `likelihood` goes with `query` and `items`.", param="readout")
    if request.query is None:
        raise InvalidRequest("`query` is missing.", param="query")
    named = request.labels is not None or request.label_token_ids is not None
    return query_prompts(plain(request.query), labels_of(request, model) if named else [], model)


def _is_light(request: ScoreRequest) -> bool:
    if request.paired or request.catalogue is not None or isinstance(request.query, str) or request.labels is not None:
        return False
    return request.items is None or len(request.items) <= LIGHT_ITEMS


def _characters(request: ScoreRequest, query_once: bool) -> int:
    items = [request.items] if isinstance(request.items, str) else request.items or []
    if request.paired:
        fields = map(texts_of, (getattr(request, name) for name in (*PAIRED_QUERIES, *PAIRED_DOCUMENTS)))
        return sum(len(text) for field in (*fields, items) for text in field if isinstance(text, str))
    texts = sum(len(item) for item in items if isinstance(item, str)) + sum(map(len, request.labels or ()))
    if not isinstance(request.query, str):
        return texts
    if request.catalogue is not None:
        return texts + len(request.query)
    return texts + len(request.query) * (2 if query_once and may_be_cut(request.query) else len(items))


SCORE = reading_content(
    Endpoint(
        kind=ScoreRequest,
        bulk={
            "query": "",
            "items": "",
            "labels": [],
            "label_token_ids": [],
            **{name: [""] for name in (*PAIRED_QUERIES, *PAIRED_DOCUMENTS)},
            "instruction": "",
            "user": "",
        },
        read=_read,
        is_light=_is_light,
        characters=_characters,
        most_fields_bytes=NAMING_BYTES,
    )
)
