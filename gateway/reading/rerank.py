"""``/v1/rerank``: query and documents to token ids, as the model's preset prescribes."""

from __future__ import annotations

from gateway.errors import InvalidRequest
from gateway.reading.catalogue import NAMING_BYTES, query_prompts
from gateway.reading.endpoint import Endpoint, Model
from gateway.reading.images import reading_content, text_of
from gateway.reading.pairs import Pairs, preset_of
from gateway.schemas.rerank import RerankRequest
from gateway.schemas.truncation import CUTS
from gateway.text.cuts import may_be_cut
from gateway.text.prepared import Prepared

WITHOUT_CATALOGUE = (
    "documents",
    "texts",
    "return_documents",
    "return_text",
    "instruction",
    "instruct",
    "partial_results",
    *CUTS,
)
"""Fields that requests for items of a catalogue must not have: their prompts were made when the items were registered."""


def _read(request: RerankRequest, model: Model) -> Prepared:
    if request.catalogue is not None:
        wrong = next((name for name in WITHOUT_CATALOGUE if getattr(request, name) not in (None, False)), None)
        if wrong is not None:
            raise InvalidRequest(f"`{wrong}` does not go with `catalogue`.", param=wrong)
        return query_prompts(text_of(request.query), [], model)
    if (request.documents is None) == (request.texts is None):
        raise InvalidRequest("Give either `documents` or `texts`.", param="documents")
    if request.instruction is not None and request.instruct is not None:
        raise InvalidRequest("Give either `instruction` or `instruct`.", param="instruct")
    instruction = request.instruct if request.instruction is None else request.instruction
    given, param = (request.documents, "documents") if request.documents is not None else (request.texts or [], "texts")
    documents = [*map(text_of, given)]
    partial = bool(request.partial_results)
    pairs = Pairs(model, preset_of(model, "rerank"), request, param, text_of(request.query), instruction, partial=partial)
    return pairs.prepared(documents, texts=bool(request.return_documents or request.return_text))


def _characters(request: RerankRequest, query_once: bool) -> int:
    if request.catalogue is not None:
        return len(text_of(request.query))
    documents, query = request.documents or request.texts or [], text_of(request.query)
    texts = sum(len(text_of(document)) for document in documents)
    return texts + len(query) * (2 if query_once and may_be_cut(query) else len(documents))


RERANK = reading_content(
    Endpoint(
        kind=RerankRequest,
        bulk={"query": "", "documents": [""], "texts": [""], "instruction": "", "instruct": "", "user": ""},
        read=_read,
        is_light=lambda _: False,
        characters=_characters,
        most_fields_bytes=NAMING_BYTES,
    )
)
