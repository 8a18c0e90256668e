"""Scores of queries and documents from their embeddings."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import starmap
from operator import mul, sub
from typing import Literal

from yardstick_llm.gateway.scoring.scorer import Row


def similarity(query: Row, document: Row, kind: Literal["cosine", "dot", "euclidean", "manhattan"]) -> float:
    """Return the similarity as sentence-transformers defines it: the product of two embeddings, which is their cosine if they have
    length 1, or the negative distance."""
    if kind == "euclidean":
        return -math.dist(query, document)
    if kind == "manhattan":
        return -math.fsum(map(abs, starmap(sub, zip(query, document, strict=True))))
    return math.fsum(map(mul, query, document))


def vectors_of(row: Row, size: int, ids: Sequence[int] = (), skipped: Collection[int] = ()) -> list[Row]:
    """Return the token vectors in a row of :class:`engine.wire.TokenVectors`, each of ``size`` numbers, without those of tokens in
    ``skipped``. ``ids``: the row's tokens."""
    vectors = [row[begin : begin + size] for begin in range(0, len(row), size)]
    return [vector for vector, id in zip(vectors, ids, strict=True) if id not in skipped] if skipped else vectors


def max_similarity(queries: Sequence[Sequence[Row]], documents: Sequence[Sequence[Row]]) -> list[float]:
    """Return MaxSim of each document and its query, or the only query: the sum over the query's vectors of the largest product with
    a vector of the document (ColBERT, https://arxiv.org/abs/2004.12832). Takes some milliseconds for each document."""
    import numpy

    asked = [numpy.array(query, numpy.float32) for query in queries]
    found = []
    for place, document in enumerate(documents):
        query = asked[place if len(asked) > 1 else 0]
        found.append(float((query @ numpy.array(document, numpy.float32).T).max(axis=1).sum()) if document else 0.0)
    return found
