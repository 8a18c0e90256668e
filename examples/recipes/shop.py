"""Labelled searches of an invented shop, which the demo model knows: ``python -m examples.recipes.shop FOLDER``.

Writes ``searches.jsonl``, 20 searches (``query``) of 50 ``documents`` with their ``grades``: 2 where all is as asked, 1 if
one attribute is wrong and 0 if two are. Words may be synonyms. Also writes ``pairs.parquet`` with the columns ``query`` and
``document``, and ``pairs.jsonl`` with the same rows and ``relevant``: a document of each grade for 600 other searches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from examples.demo_models.corpus.catalogue import Product, as_phrase, as_title, draw_product, draw_words, with_wrong
from examples.demo_models.corpus.relevance import draw_asked

SEARCHES, PAIRS = 20, 600
GRADES = (2,) * 5 + (1,) * 15 + (0,) * 30


def document(product: Product, asked: tuple[str, ...], grade: int, rng: Random) -> str:
    """A title of ``product`` with none, one or two and more of the attributes ``asked`` replaced."""
    for attribute in rng.sample(asked, 2 - grade):
        product = with_wrong(product, attribute, rng)
    return as_title(draw_words(product.only(asked), rng), rng)


def search(rng: Random, grades: tuple[int, ...]) -> dict[str, object]:
    """A search with a document of each grade."""
    product, asked = draw_product(rng), draw_asked(rng)
    query = as_phrase(draw_words(product.only(asked), rng))
    return {"query": query, "documents": [document(product, asked, grade, rng) for grade in grades], "grades": list(grades)}


def main(folder: str) -> None:
    """Write the files."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    out, rng = Path(folder), Random(7)
    out.mkdir(parents=True, exist_ok=True)
    searches = [search(rng, tuple(rng.sample(GRADES, len(GRADES)))) for _ in range(SEARCHES)]
    out.joinpath("searches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in searches), encoding="utf-8")
    pairs = [
        {"query": row["query"], "document": text, "relevant": grade == 2}
        for row in (search(rng, (2, 1, 0)) for _ in range(PAIRS))
        for text, grade in zip(row["documents"], row["grades"], strict=True)  # type: ignore[call-overload]
    ]
    out.joinpath("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    columns = {name: [pair[name] for pair in pairs] for name in ("query", "document")}
    parquet.write_table(pyarrow.table(columns), out / "pairs.parquet")


if __name__ == "__main__":
    main(*sys.argv[1:])
