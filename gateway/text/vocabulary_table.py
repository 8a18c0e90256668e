"""The table of a tokeniser's tokens, which decoding needs."""

from __future__ import annotations

from array import array
from typing import Any

import tokenizers

from gateway.text.spelling import Spelling
from gateway.text.vocabulary import VocabularyTable


def table_of(library: tokenizers.Tokenizer, added: list[dict[str, Any]], spelling: Spelling) -> VocabularyTable:
    """Return the bytes of all tokens of ``library``, those of its ``added`` tokens included."""
    pieces = {id: spelling.bytes_of(piece) for piece, id in library.get_vocab(with_added_tokens=True).items()}
    pieces |= {token["id"]: token["content"].encode() for token in added}
    ends, end = array("I"), 0
    for id in range(max(pieces) + 1):
        end += len(pieces.get(id, b""))
        ends.append(end)
    return VocabularyTable(
        b"".join(pieces[id] for id in sorted(pieces)),
        ends.tobytes(),
        [id for id in range(len(ends)) if id not in pieces],
        [token["id"] for token in added if token["special"]],
        spelling.strips_leading_space,
    )
