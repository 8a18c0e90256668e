"""Token ids to text: the bytes of every token, as plain tables.

The event loop needs this half of a tokeniser only. The other half, text to ids, lives in worker processes (``forkserver.py``),
because reading a large ``tokenizer.json`` holds the interpreter's lock for seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import msgspec


class VocabularyTable(msgspec.Struct, frozen=True):
    """The content of a :class:`Vocabulary`, in a form that is cheap to send."""

    spelled: bytes
    """The bytes of all tokens, in the order of their ids."""
    ends: bytes
    """uint32 for each id: where its bytes end in ``spelled``. They begin where the previous ones end."""
    missing: list[int]
    """Ids below the highest one that no token has."""
    special: list[int]
    """Ids of special tokens."""
    strips_leading_space: bool
    """True where one space at the start of a text is the tokeniser's own."""
    cuttable: bool = False
    """Whether texts can be cut safely (``cuts.py``), so that a query is tokenised once."""


class Vocabulary:
    """Decoding, from the exact bytes of each token, so that whole texts, streams (``detokenizer.py``) and log-probabilities
    agree, and so that an invalid byte spoils one character instead of its neighbours."""

    def __init__(self, table: VocabularyTable) -> None:
        self.table = table
        self._ends = array("I", table.ends)
        self._missing = frozenset(table.missing)
        self.special_ids = frozenset(table.special)
        self.strips_leading_space = table.strips_leading_space
        self.vocab_size = len(self._ends)
        """Highest true id + 1; the model's head may have more rows (padding)."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``, which stand at the start of a text. Bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.pieces(ids, skip_special_tokens=skip_special_tokens)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def pieces(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> Iterator[bytes]:
        """The bytes of each token that is shown."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return (self.token_bytes(id) for id in ids if id not in skipped)

    def has_token(self, id: int) -> bool:
        """True for the vocabulary and added tokens, false for the padding of the model's head."""
        return 0 <= id < self.vocab_size and id not in self._missing

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of a token; none where there is no such token."""
        if not 0 <= id < self.vocab_size:
            return b""
        return self.table.spelled[self._ends[id - 1] if id else 0 : self._ends[id]]

    def token_text(self, id: int) -> str:
        """A token as text of its own, as log-probabilities show it. A part of a character becomes U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")
