"""``/v1/embeddings``, ``/v2/embed`` and ``/classify``: texts to token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.presets.preset import Task
from yardstick_llm.gateway.requests.completions import characters_of, is_light, is_text, read_prompts, sorted_out
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.requests.length import MAX_TEXTS, Texts
from yardstick_llm.gateway.requests.pairs import Pairs, preset_of
from yardstick_llm.gateway.requests.rerank import ApiVersion
from yardstick_llm.gateway.schemas.common import (
    CUTS,
    MAX_ITEMS,
    Activation,
    EndOfText,
    ImagePart,
    ModelRequest,
    Part,
    TextPart,
    Truncation,
    Usage,
)
from yardstick_llm.gateway.schemas.parameters import EndpointName
from yardstick_llm.gateway.text.prepared import Prepared
from yardstick_llm.gateway.text.prompts import share_prefix


class ClassifyRequest(Activation, kw_only=True):
    """Classify texts with a model's classification head, or with a guard model."""

    endpoint: ClassVar[EndpointName] = "classify"
    input: Texts
    """A text, several texts, one list of token ids, or several such lists. Token ids are complete prompts."""


class Category(msgspec.Struct, frozen=True, kw_only=True):
    """A category of a guard model."""

    name: str
    prob: float
    """Probability that the model names this category first, if its verdict is the first label."""


class Classification(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The classes of one text."""

    index: int
    label: str
    """The most probable class."""
    probs: list[float]
    """Probability of each class. Its logit with `raw_scores`, and for a model with one class (a reward model)."""
    num_classes: int
    categories: list[Category] | None = None
    """From a guard model, the most probable category first."""


class ClassifyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each text, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Seconds since 1970."""
    model: str
    classes: list[str]
    """Names of the classes, in the order of `probs`."""
    data: list[Classification]
    usage: Usage


EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]
InputType = Literal["search_query", "search_document", "classification", "clustering"]
Purpose = InputType | Literal["query", "document", "passage"]
QUERIES, DOCUMENTS = ("query", "search_query"), ("document", "passage", "search_document")
"""Purposes of texts in a search, in the words of this API, of Cohere and of NVIDIA."""
JinaTask = Literal[
    "retrieval.query",
    "retrieval.passage",
    "code.query",
    "code.passage",
    "classification",
    "separation",
    "clustering",
    "retrieval",
    "text-matching",
]
PURPOSES: dict[str, Purpose] = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "code.query": "query",
    "code.passage": "document",
    "classification": "classification",
    "separation": "clustering",
    "clustering": "clustering",
}
"""Purposes in the words of Jina."""


class CohereInput(msgspec.Struct, frozen=True):
    """A text in parts."""

    content: Annotated[list[Part], msgspec.Meta(min_length=1)]
    """Texts, which are joined; images are refused."""


class CohereEmbedRequest(ModelRequest, kw_only=True):
    """Embed texts, in the form of Cohere. Give `texts` or `inputs`."""

    endpoint: ClassVar[EndpointName] = "cohere_embed"
    texts: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)] | None = None
    """Texts to embed."""
    inputs: Annotated[list[CohereInput], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)] | None = None
    """Texts to embed, each in parts."""
    input_type: InputType | None = None
    """Choose the model's prompt for this purpose. A model without one embeds the texts as they are."""
    embedding_types: Annotated[list[EmbeddingType], msgspec.Meta(min_length=1, max_length=6)] | None = None
    """Forms of the embeddings: numbers, base64 of float32 in little-endian order, the numbers times 127, rounded (`int8`), these
    plus 128 (`uint8`), or the signs as bits, eight in a number of 0 to 255 (`ubinary`) or of -128 to 127 (`binary`). By default
    `float`."""
    output_dimension: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Length of the embeddings: their first numbers are kept (Matryoshka). The model's size by default."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Cut each text to this many tokens."""
    truncate: EndOfText | None = "END"
    """Where texts that are longer than the model's context are cut; with `NONE` they are errors."""

    @property
    def param(self) -> str:
        """The field that holds the texts."""
        return "texts" if self.inputs is None else "inputs"

    @property
    def cuts(self) -> Truncation:
        """How the texts are cut."""
        side = self.truncate or "END"
        return Truncation(
            truncate=side != "NONE", truncation_direction="left" if side == "START" else "right", max_tokens_per_doc=self.max_tokens
        )


class EmbedUnits(msgspec.Struct, frozen=True):
    """Part of Cohere's answer."""

    input_tokens: int


class EmbedMeta(msgspec.Struct, frozen=True):
    """Part of Cohere's answer."""

    api_version: ApiVersion
    billed_units: EmbedUnits


class CohereEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of the texts, in their order."""

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | dict[str, list[str | list[float]]]
    """By type; from `/v1/embed` without `embedding_types`, lists of numbers."""
    texts: list[str]
    meta: EmbedMeta


class EmbeddingsRequest(Truncation, kw_only=True):
    """Embed texts."""

    endpoint: ClassVar[EndpointName] = "embeddings"
    input: Texts | None = None
    """A text, several texts, one list of token ids, or several such lists. Token ids are complete prompts."""
    inputs: Texts | None = None
    """`input` in the form of TEI."""
    input_type: Purpose | None = None
    """Choose the model's prompt for this purpose; the model's default prompt if it has none. `query` puts the preset's instruction
    before each text."""
    prompt_name: str | None = None
    """Name of one of the model's prompts, which goes before each text, as in sentence-transformers; `query` and `document` are
    always known."""
    prompt: str | None = None
    """A text that goes before each text, in place of one of the model's prompts."""
    instruction: str | None = None
    """Instruction for queries; the preset's own by default. It implies `input_type` `query`."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is that of the numbers as float32 in little-endian order."""
    embedding_type: Literal["single", "multi", "float", "base64"] | None = None
    """`multi` returns a vector for each token of a text, from a model that has these. `float` and `base64` are Jina's form of
    `encoding_format`."""
    dimensions: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Length of the embeddings: their first numbers are kept (Matryoshka). The model's size by default, or with 0."""
    output_dimension: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """`dimensions` in the form of Voyage."""
    normalize: bool | None = True
    """Scale embeddings to length 1."""
    task: JinaTask | None = None
    """`input_type` in the words of Jina, or the model's prompt of this name. `retrieval` and `text-matching` choose a prompt of a
    model of several tasks only."""

    @property
    def purpose(self) -> Purpose | None:
        """`input_type`, or what `task` says of it."""
        return self.input_type or PURPOSES.get(self.task or "")

    @property
    def in_base64(self) -> bool:
        """Whether the embeddings are base64 text."""
        return "base64" in (self.encoding_format, self.embedding_type)


class EmbeddingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one text."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: tuple[float | tuple[float, ...], ...] | str
    """Numbers, or base64 text; with `multi`, a list of vectors, or the base64 of all of them, one after another."""


class EmbeddingsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each text, in the order of the request."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: Usage


def read_classified(request: ClassifyRequest, model: Model, param: str = "input") -> Prepared:
    """Read texts to classify. ``param``: field of the client's body that holds them. Raises :class:`InvalidRequest`."""
    prepared = _read(model, "classify", request, request.input, param)
    categories = None if model.text is None or model.text.preset is None else model.text.preset.fitted.categories_prefix
    if not categories:
        return prepared
    # Each text has a second prompt, which ends with what the model writes before a category.
    rows = []
    for index, row in enumerate(prepared.rows):
        rows += [[*row], [*row, *categories]]
        model.facts.check_prompt(len(prepared.prefix) + len(rows[-1]), prepared.param_of(index))
    model.bounds.check("max_request_tokens", len(prepared.prefix) + sum(map(len, rows)), "tokens", param)
    return Prepared(rows, prepared.prefix, param=prepared.param, truncated=prepared.truncated)


def _embed(request: EmbeddingsRequest, model: Model) -> Prepared:
    if (request.input is None) == (request.inputs is None):
        raise InvalidRequest("Give either `input` or `inputs`.", param="input")
    given, param = (request.input, "input") if request.input is not None else (request.inputs, "inputs")
    assert given is not None
    named = {name: getattr(request, name) for name in ("prompt", "prompt_name", "input_type")}
    named["task"] = "text-matching" if request.task == "text-matching" else PURPOSES.get(request.task or "")
    asked = {name: value for name, value in named.items() if value is not None}
    if not is_text(given):
        prompts = (name for name, value in asked.items() if value not in DOCUMENTS)
        if (wrong := "instruction" if request.instruction is not None else next(prompts, None)) is not None:
            raise InvalidRequest(f"`{wrong}` goes with texts; token ids are complete prompts.", param=wrong)
        return _read(model, "embed", request, given, param)
    if len(asked) > 1 and len(set(asked.values())) > 1:
        first, second, *_ = asked
        raise InvalidRequest(f"Give one of `{first}` and `{second}`.", param=second)
    preset = preset_of(model, "embed").preset
    task = request.task if request.task in preset.prompts else None
    name, prompt = request.prompt_name or task or request.purpose, request.prompt
    if request.prompt_name is not None and request.prompt_name not in preset.prompt_names:
        known = ", ".join(map(repr, preset.prompt_names))
        raise InvalidRequest(f"`prompt_name` is {name!r}; the prompts of {model.facts.name!r} are {known}.", param="prompt_name")
    if request.instruction is not None and (prompt is not None or name not in (None, *QUERIES)):
        raise InvalidRequest("`instruction` is for queries; set `input_type` to query.", param="instruction")
    return _prompted(request, model, given, param, name, prompt=prompt, instruction=request.instruction)


def _prompted(
    cuts: Truncation,
    model: Model,
    given: Texts,
    param: str,
    name: str | None,
    *,
    prompt: str | None = None,
    instruction: str | None = None,
    texts: bool = False,
) -> Prepared:
    """Read texts to embed with the prompt that ``name`` (or a purpose) chooses, or with ``prompt``."""
    template = preset_of(model, "embed")
    as_query = name in QUERIES or instruction is not None
    if prompt is None and not (as_query and template.preset.instructed and name not in template.preset.prompts):
        prompt = template.preset.prompt_for("query" if as_query else "document" if name in DOCUMENTS else name)
    pairs = Pairs(model, template, cuts, param, instruction=instruction, as_query=as_query, prompt=prompt)
    return pairs.prepared(sorted_out(given, param, MAX_TEXTS)[0], texts=texts)


def _cohere_embed(request: CohereEmbedRequest, model: Model) -> Prepared:
    if (request.texts is None) == (request.inputs is None):
        raise InvalidRequest("Give either `texts` or `inputs`; images have no embeddings here.", param="texts")
    for index, given in enumerate(request.inputs or []):
        place = next((place for place, part in enumerate(given.content) if isinstance(part, ImagePart)), None)
        if place is not None:
            image = f"inputs[{index}].content[{place}]"
            raise InvalidRequest(f"`{image}` is an image; send texts, since embedding models here read no images.", param=image)
    return _prompted(request.cuts, model, [*_cohere_texts(request)], request.param, request.input_type, texts=True)


def _cohere_texts(request: CohereEmbedRequest) -> Iterator[str]:
    yield from request.texts or []
    for given in request.inputs or []:
        yield "".join(part.text for part in given.content if isinstance(part, TextPart))


def _read(model: Model, task: Task, cuts: Truncation, given: Texts, param: str) -> Prepared:
    if not is_text(given):
        wrong = next((name for name in CUTS if getattr(cuts, name) not in (None, False, "NONE")), None)
        if wrong is not None:
            message = f"`{wrong}` goes with texts; token ids are complete prompts, so shorten them yourself."
            raise InvalidRequest(message, param=wrong)
        prepared = read_prompts(model, given, param, at_most=MAX_TEXTS, sequences=0)
        for index, row in enumerate(prepared.rows):
            if not row:
                empty = prepared.param_of(index)
                raise InvalidRequest(f"`{empty}` is empty; there is no token to read.", param=empty)
            model.facts.check_prompt(len(row), prepared.param_of(index))
        rows = [[*row] for row in prepared.rows]
        prefix, rows = ([], rows) if model.facts.encoder else share_prefix(rows)
        return Prepared(rows, prefix, param=prepared.param)
    texts, _, _ = sorted_out(given, param, MAX_TEXTS)
    return Pairs(model, preset_of(model, task), cuts, param).prepared(texts)


CLASSIFY = Endpoint(
    kind=ClassifyRequest,
    bulk={"input": "", "user": ""},
    read=read_classified,
    characters=lambda request, _: characters_of(request.input),
)
EMBEDDINGS = Endpoint(
    kind=EmbeddingsRequest,
    bulk={"input": "", "inputs": "", "instruction": "", "prompt": "", "user": ""},
    read=_embed,
    is_light=lambda request: is_light(request.input) and is_light(request.inputs),
    characters=lambda request, _: characters_of(request.input) + characters_of(request.inputs),
)
COHERE_EMBED = Endpoint(
    kind=CohereEmbedRequest,
    bulk={"texts": [""], "inputs": [CohereInput([TextPart("")])]},
    read=_cohere_embed,
    characters=lambda request, _: sum(map(len, _cohere_texts(request))),
)
