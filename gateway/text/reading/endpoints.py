"""All endpoints whose bodies are read, by their names in messages."""

from __future__ import annotations

from typing import Any

from gateway.text.reading.catalogue import CATALOGUE, CATALOGUE_ITEMS, CATALOGUE_WARM
from gateway.text.reading.chat import CHAT
from gateway.text.reading.completions import COMPLETIONS
from gateway.text.reading.detokenize import DETOKENIZE
from gateway.text.reading.endpoint import Endpoint
from gateway.text.reading.length import LENGTH
from gateway.text.reading.rerank import RERANK
from gateway.text.reading.responses import RESPONSES
from gateway.text.reading.score import SCORE
from gateway.text.reading.texts import CLASSIFY, EMBEDDINGS
from gateway.text.reading.tokenize import TOKENIZE

ENDPOINTS: dict[str, Endpoint[Any]] = {
    "score": SCORE,
    "rerank": RERANK,
    "classify": CLASSIFY,
    "embeddings": EMBEDDINGS,
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "length": LENGTH,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
    "catalogue": CATALOGUE,
    "catalogue_items": CATALOGUE_ITEMS,
    "catalogue_warm": CATALOGUE_WARM,
}
NAMES = {endpoint.kind: name for name, endpoint in ENDPOINTS.items()}
