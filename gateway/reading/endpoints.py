"""All endpoints whose bodies are read, by their names in messages."""

from __future__ import annotations

from typing import Any

from gateway.reading.catalogue import CATALOGUE, CATALOGUE_ITEMS
from gateway.reading.chat import CHAT
from gateway.reading.completions import COMPLETIONS
from gateway.reading.detokenize import DETOKENIZE
from gateway.reading.endpoint import Endpoint
from gateway.reading.length import LENGTH
from gateway.reading.rerank import RERANK
from gateway.reading.responses import RESPONSES
from gateway.reading.score import SCORE
from gateway.reading.tei import TEI
from gateway.reading.texts import CLASSIFY, COHERE_EMBED, EMBEDDINGS
from gateway.reading.tokenize import TOKENIZE

ENDPOINTS: dict[str, Endpoint[Any]] = {
    "score": SCORE,
    "rerank": RERANK,
    "classify": CLASSIFY,
    "embeddings": EMBEDDINGS,
    "cohere_embed": COHERE_EMBED,
    "tei": TEI,
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "length": LENGTH,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
    "catalogue": CATALOGUE,
    "catalogue_items": CATALOGUE_ITEMS,
}
NAMES = {endpoint.kind: name for name, endpoint in ENDPOINTS.items()}
