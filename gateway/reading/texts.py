"""``/v1/classify`` and ``/v1/embeddings``: texts to token ids, as the model's preset prescribes."""

from __future__ import annotations

from gateway.errors import InvalidRequest
from gateway.presets.preset import Task
from gateway.reading.endpoint import Endpoint, Model
from gateway.reading.pairs import Pairs, preset_of
from gateway.reading.prompts import LIGHT_TEXTS, characters_of, is_text, read_prompts, sorted_out
from gateway.schemas.classify import ClassifyRequest
from gateway.schemas.cohere import CohereEmbedRequest
from gateway.schemas.embeddings import EmbeddingsRequest
from gateway.schemas.length import MAX_TEXTS, Texts
from gateway.schemas.truncation import CUTS, Truncation
from gateway.text.prepared import Prepared
from gateway.text.prompts import share_prefix


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
    as_query = "query" in (request.input_type, request.prompt_name) or request.instruction is not None
    if as_query and "document" in (request.input_type, request.prompt_name):
        raise InvalidRequest("`instruction` is for queries; set `input_type` to query.", param="instruction")
    return _read(model, "embed", request, given, param, as_query=as_query, instruction=request.instruction)


def _cohere_embed(request: CohereEmbedRequest, model: Model) -> Prepared:
    texts, as_query = request.texts, request.input_type == "search_query"
    return Pairs(model, preset_of(model, "embed"), request.cuts, "texts", as_query=as_query).prepared(texts, texts=True)


def _read(
    model: Model, task: Task, cuts: Truncation, given: Texts, param: str, *, as_query: bool = False, instruction: str | None = None
) -> Prepared:
    if not is_text(given):
        if instruction is not None:
            raise InvalidRequest("`instruction` goes with texts; token ids are complete prompts.", param="instruction")
        check_uncut(cuts)
        prepared = read_prompts(model, given, param, at_most=MAX_TEXTS, sequences=0)
        for index, row in enumerate(prepared.rows):
            if not row:
                empty = prepared.param_of(index)
                raise InvalidRequest(f"`{empty}` is empty; there is no token to read.", param=empty)
            model.facts.check_prompt(len(row), prepared.param_of(index))
        prefix, rows = share_prefix([[*row] for row in prepared.rows])
        return Prepared(rows, prefix, param=prepared.param)
    texts, _, _ = sorted_out(given, param, MAX_TEXTS)
    pairs = Pairs(model, preset_of(model, task), cuts, param, instruction=instruction, as_query=as_query)
    return pairs.prepared(texts)


def check_uncut(cuts: Truncation) -> None:
    """Raise :class:`InvalidRequest` for fields that would cut token ids, which are complete prompts."""
    wrong = next((name for name in CUTS if getattr(cuts, name) not in (None, False)), None)
    if wrong is not None:
        raise InvalidRequest(f"`{wrong}` goes with texts; token ids are complete prompts, so shorten them yourself.", param=wrong)


def _light(given: Texts | None) -> bool:
    return given is None or (not is_text(given) and (len(given) <= LIGHT_TEXTS or isinstance(given[0], int)))


CLASSIFY = Endpoint(
    kind=ClassifyRequest,
    bulk={"input": "", "user": ""},
    read=read_classified,
    is_light=lambda _: False,
    characters=lambda request, _: characters_of(request.input),
)
EMBEDDINGS = Endpoint(
    kind=EmbeddingsRequest,
    bulk={"input": "", "inputs": "", "instruction": "", "user": ""},
    read=_embed,
    is_light=lambda request: _light(request.input) and _light(request.inputs),
    characters=lambda request, _: characters_of(request.input) + characters_of(request.inputs),
)
COHERE_EMBED = Endpoint(
    kind=CohereEmbedRequest,
    bulk={"texts": [""]},
    read=_cohere_embed,
    is_light=lambda _: False,
    characters=lambda request, _: sum(map(len, request.texts)),
)
