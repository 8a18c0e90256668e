"""Bodies of Text Embeddings Inference whose meaning depends on the model's task, as requests of the endpoints of that task."""

from __future__ import annotations

from typing import cast

from gateway.errors import InvalidRequest
from gateway.presets.preset import Task
from gateway.reading.endpoint import Endpoint, Model
from gateway.reading.rerank import RERANK
from gateway.reading.score import SCORE
from gateway.reading.texts import EMBEDDINGS, read_classified
from gateway.schemas.classify import ClassifyRequest
from gateway.schemas.embeddings import EmbeddingsRequest
from gateway.schemas.length import Texts
from gateway.schemas.rerank import RerankRequest
from gateway.schemas.score import ScoreRequest
from gateway.schemas.tei import Sentences, TeiParameters, TeiRequest, outline
from gateway.schemas.truncation import MAX_ITEMS, Truncation
from gateway.text.prepared import Prepared

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
    if task == "classify":
        return ClassifyRequest(input=_single_texts(request), **request.cutting)
    pairs = request.inputs if request.batched else [request.inputs]
    if len(pairs) > MAX_ITEMS:
        raise InvalidRequest(f"`inputs` has {len(pairs)} pairs; at most {MAX_ITEMS} are allowed.", param="inputs")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            message = "The model is a reranker: send `query` and `texts`, or `inputs` that is a pair of texts or a list of pairs."
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
        message = 'The model is a classifier of texts: `inputs` is a text, or a list of lists of one text, such as [["a"], ["b"]].'
        raise InvalidRequest(message, param="inputs")
    return [text[0] for text in lists]  # type: ignore[index, misc]


def _read(request: TeiRequest, model: Model) -> Prepared:
    preset = model.texts.preset
    asked = request_of_task(request, None if preset is None else preset.preset.task)
    if isinstance(asked, ClassifyRequest):
        return read_classified(asked, model, "inputs")
    if isinstance(asked, RerankRequest):
        return RERANK.read(asked, model)
    try:
        return EMBEDDINGS.read(asked, model) if isinstance(asked, EmbeddingsRequest) else SCORE.read(asked, model)
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
    is_light=lambda _: False,
    characters=_characters,
)
