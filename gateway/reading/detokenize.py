"""``/detokenize``: token ids to text, as the response body."""

from __future__ import annotations

import msgspec

from gateway.reading.endpoint import Endpoint, Model
from gateway.schemas.tokenize import DetokenizeRequest, DetokenizeResponse
from gateway.text.prepared import Prepared

LIGHT_TOKENS = 1024
"""Most tokens that are converted on the event loop, in less than a millisecond."""


def _read(request: DetokenizeRequest, model: Model) -> Prepared:
    model.bounds.check("max_request_tokens", len(request.tokens), "tokens", "tokens")
    model.facts.check_ids(request.tokens, "tokens")
    response = DetokenizeResponse(prompt=model.vocabulary.decode(request.tokens, skip_special_tokens=False))
    return Prepared([], param="tokens", response=memoryview(msgspec.json.encode(response)), converted=len(request.tokens))


DETOKENIZE = Endpoint(
    kind=DetokenizeRequest,
    bulk={"tokens": [], "user": ""},
    read=_read,
    is_light=lambda request: len(request.tokens) <= LIGHT_TOKENS,
    characters=lambda request, _: len(request.tokens),
)
