"""The endpoints of text-embeddings-inference: requests to token ids."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec

from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.presets.preset import Task
from yardstick_llm.gateway.requests.endpoint import Endpoint, Model
from yardstick_llm.gateway.requests.length import Texts
from yardstick_llm.gateway.requests.rerank import RERANK, RerankRequest
from yardstick_llm.gateway.requests.score import ScoreRequest, read_pairs
from yardstick_llm.gateway.requests.texts import EMBEDDINGS, ClassifyRequest, EmbeddingsRequest, read_classified
from yardstick_llm.gateway.schemas.common import MAX_ITEMS, Activation, Side, Truncation
from yardstick_llm.gateway.schemas.parameters import EndpointName, TokenId
from yardstick_llm.gateway.text.prepared import Prepared

_Sentences = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]


class Sentences(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence that is compared with others."""

    source_sentence: str
    sentences: _Sentences


Inputs = str | Sentences | Annotated[list[str | TokenId | list[str | TokenId]], msgspec.Meta(min_length=1, max_length=1 << 20)]


class TeiParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Options of Hugging Face's `InferenceClient` and of TEI's `/similarity`."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    """With a classifier: the function of the logits; the preset's own by default."""
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """With a classifier: return this many classes, the most probable first."""
    truncate: bool | None = None
    """The field `truncate`."""
    truncation_direction: Side | None = None
    """The field `truncation_direction`."""
    prompt_name: str | None = None
    """The field `prompt_name`."""


class TeiRequest(Activation, kw_only=True):
    """Do what the model is for: embed, classify or rerank. Give `inputs`, or `query` and `texts`."""

    endpoint: ClassVar[EndpointName] = "tei"
    inputs: Inputs | None = None
    """For an embedding model: texts, lists of token ids, or an object with `source_sentence` and `sentences`, which are compared.
    For a classifier: a text, or a list of lists of one text. For a reranker: a pair of texts, or a list of pairs."""
    query: str | None = None
    """For a reranker: the query of `texts`."""
    texts: _Sentences | None = None
    """For a reranker: the documents."""
    return_text: bool | None = None
    """With `texts`: repeat each document in its result."""
    prompt_name: str | None = None
    """With an embedding model: name of one of its prompts, which goes before each text."""
    normalize: bool | None = True
    """With an embedding model: scale embeddings to length 1."""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """With an embedding model: length of the embeddings; the model's size by default."""
    parameters: TeiParameters | None = None
    """Options in the form of `InferenceClient`. With a classifier, the answer to one text is then a list in a list."""

    @property
    def batched(self) -> bool:
        """Whether `inputs` is a list of lists, whose answer is a list of answers."""
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    @property
    def cutting(self) -> dict[str, Any]:
        """The fields of :class:`Activation`, with those of `parameters` where they have no value."""
        fields = {name: getattr(self, name) for name in Activation.__struct_fields__}
        given = self.parameters or TeiParameters()
        for name in ("truncate", "truncation_direction"):
            fields[name] = getattr(given, name) if fields[name] is None else fields[name]
        return fields


def outline(inputs: Inputs) -> Inputs:
    """Return a small value of the same form as ``inputs``, which stands for it where only the form matters."""
    if isinstance(inputs, Sentences):
        return Sentences(source_sentence="", sentences=[""])
    if isinstance(inputs, str):
        return ""
    first = inputs[0]
    if isinstance(first, list):
        return [["" if isinstance(part, str) else 0 for part in first[:3]]]
    return ["" if isinstance(part, str) else 0 for part in inputs[:3]]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A class of a text."""

    label: str
    score: float
    """Its probability; its logit with `raw_scores`, and for a model with one class."""


class SparseValue(msgspec.Struct, frozen=True, kw_only=True):
    """The weight of a token of the vocabulary."""

    index: int
    value: float


class TeiInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/info`."""

    model_id: str
    model_sha: str | None = None
    """Not known to the gateway."""
    model_dtype: str | None = None
    """Not known to the gateway."""
    model_type: dict[str, dict[str, Any]]
    """`embedding` with `pooling` (unless the model has token vectors alone), or `classifier` or `reranker` with `id2label` and
    `label2id`. Empty for a model without such a task."""
    max_input_length: int
    """Most tokens of a prompt."""
    max_batch_tokens: int
    """Most tokens of a request."""
    max_client_batch_size: int
    """Texts that a request may have, however long they are; clients send as many. More short ones are possible."""
    auto_truncate: bool
    """Whether long texts are cut where a request has no `truncate`; otherwise they are errors."""
    version: str


ONE_TEXT = 'The model is a classifier of texts: `inputs` is a text, or a list of lists of one text, such as [["a"], ["b"]].'
TaskRequest = EmbeddingsRequest | ClassifyRequest | RerankRequest | ScoreRequest


def request_of_task(request: TeiRequest, task: Task | None) -> TaskRequest:
    """Return ``request`` as a request of the endpoint that serves ``task``. Raises :class:`InvalidRequest`."""
    if (request.inputs is None) == (request.query is None):
        raise InvalidRequest("Give either `inputs`, or `query` and `texts`.", param="inputs")
    if (request.query is None) != (request.texts is None):
        raise InvalidRequest("`query` and `texts` go together.", param="texts")
    if request.query is not None:
        return RerankRequest(query=request.query, texts=request.texts, return_text=request.return_text, **request.cutting)  # type: ignore[arg-type]
    assert request.inputs is not None
    if isinstance(request.inputs, Sentences) or task == "embed":
        return _embeddings(request)
    if task == "classify" and not _has_pairs(request):
        return ClassifyRequest(input=_single_texts(request), **request.cutting)
    pairs = request.inputs if request.batched else [request.inputs]
    if len(pairs) > MAX_ITEMS:
        raise InvalidRequest(f"`inputs` has {len(pairs)} pairs; at most {MAX_ITEMS} are allowed.", param="inputs")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            message = "The model reads pairs: send `query` and `texts`, or `inputs` that is a pair of texts or a list of pairs."
            raise InvalidRequest(message, param="inputs")
    queries, documents = [pair[0] for pair in pairs], [pair[1] for pair in pairs]  # type: ignore[index]
    return ScoreRequest(text_1=queries, text_2=documents, **request.cutting)  # type: ignore[arg-type]


def _embeddings(request: TeiRequest) -> EmbeddingsRequest:
    """Return the request for embeddings. With sentences to compare, the source sentence is the last text."""
    given, inputs = request.parameters or TeiParameters(), request.inputs
    compared = isinstance(inputs, Sentences)
    texts = [*inputs.sentences, inputs.source_sentence] if isinstance(inputs, Sentences) else inputs
    if isinstance(texts, list) and any(isinstance(part, str) for text in texts if isinstance(text, list) for part in text):
        raise InvalidRequest("The model is an embedding model: `inputs` is a text, or a list of texts.", param="inputs")
    cutting = {name: value for name, value in request.cutting.items() if name in Truncation.__struct_fields__}
    return EmbeddingsRequest(
        inputs=cast(Texts, texts),
        prompt_name=request.prompt_name or given.prompt_name,
        normalize=True if compared else request.normalize,
        dimensions=request.dimensions,
        **cutting,
    )


def _has_pairs(request: TeiRequest) -> bool:
    """Whether the first of the texts is a pair."""
    first = request.inputs[0] if request.batched else request.inputs  # type: ignore[index]
    return isinstance(first, list) and len(first) == 2 and all(isinstance(text, str) for text in first)


def _single_texts(request: TeiRequest) -> Texts:
    """Return the texts of a classifier. In a list of lists, each has one text."""
    inputs = request.inputs
    if isinstance(inputs, str):
        return inputs
    assert isinstance(inputs, list)
    lists = inputs if request.batched else [inputs]
    for text in lists:
        if isinstance(text, list) and isinstance(text[:1] and text[0], str) and len(text) == 1:
            continue
        raise InvalidRequest(ONE_TEXT, param="inputs")
    return [text[0] for text in lists]  # type: ignore[index, misc]


def _read(request: TeiRequest, model: Model) -> Prepared:
    preset = model.texts.preset
    asked = request_of_task(request, None if preset is None else preset.preset.task)
    if isinstance(asked, ClassifyRequest):
        return read_classified(asked, model, "inputs")
    if isinstance(asked, RerankRequest):
        return RERANK.read(asked, model)
    if isinstance(asked, ScoreRequest) and preset is not None and preset.preset.task == "classify" and not model.facts.encoder:
        raise InvalidRequest(ONE_TEXT, param="inputs")
    try:
        if isinstance(asked, EmbeddingsRequest):
            return EMBEDDINGS.read(asked, model)
        return read_pairs(asked, model, "classify" if preset is not None and preset.preset.task == "classify" else "rerank")
    except InvalidRequest as error:
        raise _renamed(error, request) from None


def _renamed(error: InvalidRequest, request: TeiRequest) -> InvalidRequest:
    """Return ``error`` with the names of the fields in the client's body."""
    names = {"text_1": "inputs", "text_2": "inputs"}
    if isinstance(request.inputs, Sentences):
        count = len(request.inputs.sentences)
        names = {f"inputs[{count}]": "inputs.source_sentence", "inputs": "inputs.sentences"}
    for name, own in names.items():
        if error.param is not None and error.param.startswith(name):
            param = own + error.param.removeprefix(name)
            return type(error)(error.message.replace(f"`{error.param}`", f"`{param}`"), param=param)
    return error


def _characters(request: TeiRequest, query_once: bool) -> int:
    if request.query is not None and request.texts is not None:
        return RERANK.characters(RerankRequest(query=request.query, texts=request.texts), query_once)  # type: ignore[arg-type]
    inputs = request.inputs
    if isinstance(inputs, Sentences):
        return len(inputs.source_sentence) + sum(map(len, inputs.sentences))
    texts = [inputs] if isinstance(inputs, str) else inputs or []
    parts = (part for text in texts for part in (text if isinstance(text, list) else [text]))
    return sum(len(part) for part in parts if isinstance(part, str))


TEI = Endpoint(
    kind=TeiRequest,
    bulk={"inputs": outline, "query": "", "texts": [""]},
    read=_read,
    characters=_characters,
)
