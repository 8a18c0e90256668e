"""Decoding of token ids to text, from plain tables with the bytes of every token.

The event loop needs only this half of a tokeniser. Texts are encoded in worker processes (``forkserver.py``), because loading a
large ``tokenizer.json`` holds the interpreter's lock for seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from gateway.presets.fitted import Fitted

T = TypeVar("T")

MOST_ENCODED = 1 << 15
"""Most tokens whose log-probabilities, and whose texts, are kept as JSON; by estimate they take 8 MB and 5 MB."""


class VocabularyTable(msgspec.Struct, frozen=True):
    """The content of a :class:`Vocabulary`, in a form that is cheap to send."""

    spelled: bytes
    """Bytes of all tokens, in the order of their ids."""
    ends: bytes
    """End of each id's bytes in ``spelled``, as uint32. They begin at the end of the previous id's bytes."""
    missing: list[int]
    """Ids below the highest one that have no token."""
    special: list[int]
    """Ids of special tokens."""
    strips_leading_space: bool
    """Whether the tokeniser adds one space at the start of a text."""
    cuttable: bool = False
    """Whether texts can be cut safely (``cuts.py``), so that a query is tokenised once."""
    fitted: Fitted | None = None
    """The model's preset; None if it has none."""


class Vocabulary:
    """Decodes from the exact bytes of each token, so that whole texts, streams (``detokenizer.py``) and log-probabilities agree,
    and an invalid byte affects one character and not its neighbours."""

    def __init__(self, table: VocabularyTable) -> None:
        self.table = table
        self._ends = array("I", table.ends)
        self._missing = frozenset(table.missing)
        self.special_ids = frozenset(table.special)
        self.strips_leading_space = table.strips_leading_space
        self.vocab_size = len(self._ends)
        """Highest id with a token, plus 1; the model's head may have more rows (padding)."""
        self._spellings = _Table(self.vocab_size, self._spelling, {})
        self._without: dict[frozenset[int], Mapping[int, bytes]] = {}
        """Bytes of the tokens by id, by the special tokens among them that have bytes."""
        self._shown = self._hiding(frozenset())
        self._quoted = {skip: self._quoting(self.spellings(skip_special_tokens=skip)) for skip in (False, True)}
        self.texts: Mapping[int, str] = _Table(self.vocab_size, self._text, {})
        """The result of :meth:`token_text` for every id."""
        self.encoded: Mapping[int, tuple[bytes, bytes]] = _Table(self.vocab_size, self._around_logprob, {}, most=MOST_ENCODED)
        """JSON of a log-probability of every id: the bytes before and after the number, without the closing brace."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids`` from the start of a text. Bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(map(self.spellings(skip_special_tokens=skip_special_tokens).__getitem__, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def spellings(self, *, skip_special_tokens: bool, shown: Sequence[int] = ()) -> Mapping[int, bytes]:
        """Return a mapping from every id to the bytes that it adds to a text: none for special tokens that are skipped. Those in
        ``shown`` are not."""
        if not skip_special_tokens:
            return self._spellings
        return self._hiding(frozenset(shown)) if shown else self._shown

    def quoted(self, *, skip_special_tokens: bool) -> Mapping[int, bytes | None]:
        """Return a mapping from every id to the JSON string of the text that it adds: empty if it adds none, and None if its bytes
        are no complete characters."""
        return self._quoted[skip_special_tokens]

    def has_token(self, id: int) -> bool:
        """Return True for vocabulary and added tokens, False for the padding of the model's head."""
        return 0 <= id < self.vocab_size and id not in self._missing

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token; empty if there is no such token."""
        return self._spellings[id]

    def token_text(self, id: int) -> str:
        """Return one token as text, for log-probabilities. A part of a character becomes U+FFFD."""
        return self.texts[id]

    def _hiding(self, shown: frozenset[int]) -> Mapping[int, bytes]:
        """Return bytes by id, none for special tokens but ``shown``. Models have one or two formats, so few mappings are kept."""
        if shown not in self._without:
            hidden = dict.fromkeys(self.special_ids - shown, b"")
            self._without[shown] = _Table(self.vocab_size, self._spellings.__getitem__, hidden)
        return self._without[shown]

    def _quoting(self, spellings: Mapping[int, bytes]) -> Mapping[int, bytes | None]:
        def quote(id: int) -> bytes | None:
            try:
                return msgspec.json.encode(spelling.decode()) if (spelling := spellings[id]) else b""
            except UnicodeDecodeError:
                return None

        return _Table(self.vocab_size, quote, {}, most=MOST_ENCODED)

    def _spelling(self, id: int) -> bytes:
        if not 0 <= id < self.vocab_size:
            return b""
        return self.table.spelled[self._ends[id - 1] if id else 0 : self._ends[id]]

    def _text(self, id: int) -> str:
        return self._spellings[id].decode("utf-8", "replace")

    def _around_logprob(self, id: int) -> tuple[bytes, bytes]:
        text, spelling = msgspec.json.encode(self.texts[id]), msgspec.json.encode(list(self._spellings[id]))
        return b'{"token":%b,"logprob":' % text, b',"bytes":%b' % spelling


class _Table(dict[int, T]):
    """Entries by token id. Each is made when it is first looked up; ids without a token are not kept. ``most``: entries after which
    the table begins anew; None: there is no limit."""

    def __init__(self, size: int, make: Callable[[int], T], known: Mapping[int, T], most: int | None = None) -> None:
        super().__init__(known)
        self._size = size
        self._make = make
        self._most = size if most is None else most

    def __missing__(self, id: int) -> T:
        made = self._make(id)
        if 0 <= id < self._size:
            if len(self) >= self._most:
                self.clear()
            self[id] = made
        return made
