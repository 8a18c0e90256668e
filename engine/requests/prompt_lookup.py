"""Prompt lookup: drafts of the next tokens of a sequence, from an earlier place in its prompt or output (n-gram speculation).

Where the last n tokens of a sequence occurred before, the tokens behind that place are a draft of what comes next. A step
computes the draft behind the newest token and draws at each of these positions as plain decoding would, because a draw depends on
the logits, the seed, the sequence and the position alone. Draws are kept up to the first one that differs from the draft. So a
draft decides how many tokens a step yields and never which ones.

Source: Saxena 2023, "Prompt Lookup Decoding". Drafts that are not accepted cost work, so a sequence has a *credit* of draft tokens:
accepted ones raise it, rejected ones lower it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from yardstick_llm.engine.ints import EMPTY, MASK_64, Ints

MOST_INDEXED = 1 << 17
"""Tokens at the end of a prompt that are searched."""
MOST_BITS = 17
"""Logarithm of the entries of a table: at most 512 KiB each."""
FIRST_CREDIT = 4.0
MOST_CREDIT = 64.0
REGAINED = 1 / 32
"""Credit for each output token, up to :data:`FIRST_CREDIT`. It bounds the rejected draft tokens of an output: at most one for each
32 output tokens, beside the first credit and one for each accepted token."""
WAIT_COST = 0.5
"""Credit for waiting for a draw, where the next step could start before it is known."""

_FACTOR = 0x9E3779B97F4A7C15  # odd, 2^64 over the golden ratio


class NgramTable:
    """The last place of each n-gram: the number of tokens up to its end.

    It is direct-mapped. N-grams of one entry displace each other, so memory is bounded, and readers compare the tokens.
    """

    __slots__ = ("_places", "_shift")

    def __init__(self, ngrams: int) -> None:
        """``ngrams``: how many are expected."""
        bits = min(max(ngrams, 128).bit_length() + 1, MOST_BITS)
        self._shift = 64 - bits
        self._places = np.zeros(1 << bits, np.int32)

    def put(self, key: int, place: int) -> None:
        """Set the last place of the n-gram with :func:`key_of` ``key``."""
        self._places[key >> self._shift] = place

    def put_all(self, tokens: Ints, ngram: int, before: int) -> None:
        """Put all n-grams of ``tokens``, which ``before`` other tokens precede."""
        count = len(tokens) - ngram + 1
        if count <= 0:
            return
        keys = np.zeros(count, np.uint64)
        for place in range(ngram):
            keys += tokens[place : place + count].astype(np.uint64) + np.uint64(1)
            keys *= np.uint64(_FACTOR)
        self._places[keys >> np.uint64(self._shift)] = np.arange(before + ngram, before + ngram + count)

    def get(self, key: int) -> int:
        """Return a place where an n-gram with ``key`` may end; 0 for none."""
        return int(self._places[key >> self._shift])


def key_of(ngram: Sequence[int]) -> int:
    """Return a hash of 64 bits, of which the upper ones are mixed best."""
    key = 0
    for token in ngram:
        key = (key + token + 1) * _FACTOR & MASK_64
    return key


class PromptIndex:
    """The n-grams of a prompt, for all sequences of a request. Built when a sequence first needs it."""

    def __init__(self, prompt: Ints, ngram: int) -> None:
        """``ngram``: tokens of an n-gram, at least 1."""
        self.prompt = prompt
        self.ngram = ngram
        self._table: NgramTable | None = None

    def get(self, key: int) -> int:
        """See :meth:`NgramTable.get`. The n-gram at the end of the prompt is not among them, because nothing known follows it."""
        if self._table is None:
            before = max(0, len(self.prompt) - MOST_INDEXED)
            indexed = self.prompt[before:-1]
            self._table = NgramTable(len(indexed))
            self._table.put_all(indexed, self.ngram, before)
        return self._table.get(key)


class Lookup:
    """The drafts of one sequence."""

    __slots__ = ("_accepted", "_draft_tokens", "_drafted", "_ends", "_found", "_index", "_next", "_table", "credit")

    def __init__(self, index: PromptIndex, draft_tokens: int, most_output: int, ends: Container[int]) -> None:
        """``draft_tokens``: most tokens of a draft; ``most_output``: of the output; ``ends``: tokens that end it, which no draft
        has, because what follows them is not needed."""
        self._index = index
        self._draft_tokens = draft_tokens
        self._ends = ends
        self._table = NgramTable(most_output)
        self._next = 0  # output tokens up to the first n-gram that is not in the table
        self._found = 0
        self._drafted = self._accepted = 0
        self.credit = FIRST_CREDIT
        """Draft tokens that may be computed now."""

    def matches(self, output: Ints) -> bool:
        """Whether the last tokens of prompt and ``output`` occurred before."""
        return self._find(output) > 0

    def draft(self, output: Ints, limit: int) -> Ints:
        """Return at most ``limit`` tokens that may follow ``output``, the whole output so far. Calls with the same output return
        the same. Behind the end of what is known, the draft repeats itself, as the text does if the draft is right."""
        place, limit = self._find(output), min(limit, self._draft_tokens, int(self.credit))
        if not place or limit <= 0:
            return EMPTY
        known = len(self._index.prompt) + len(output)
        found = self._tokens(output, place, min(place + limit, known))
        for count, token in enumerate(found):
            if token in self._ends:
                return np.array(found[:count], np.int32)
        return np.resize(np.array(found, np.int32), limit)

    def check(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft were drawn."""
        self.credit = min(self.credit + accepted - (drafted - accepted), MOST_CREDIT)
        self._drafted += drafted
        self._accepted += accepted

    def charge_wait(self) -> bool:
        """Pay for waiting for a draw; returns False if there is no credit for it."""
        if self.credit < 1 + WAIT_COST:
            return False
        self.credit -= WAIT_COST
        return True

    def take_counts(self) -> tuple[int, int]:
        """Return the numbers of drafted and accepted tokens since the last call."""
        counts = self._drafted, self._accepted
        self._drafted = self._accepted = 0
        return counts

    def _find(self, output: Ints) -> int:
        """Return the place behind the last earlier occurrence of the last n tokens; 0 for none. Work is proportional to the tokens
        since the last call."""
        for count in range(self._next, len(output) + 1):
            last = self._tokens(output, len(self._index.prompt) + count - self._index.ngram, len(self._index.prompt) + count)
            self._found = 0
            if len(last) == self._index.ngram:
                key = key_of(last)
                if count == len(output):
                    self._found = self._place(output, key, last)
                self._table.put(key, len(self._index.prompt) + count)
            if count:
                self.credit = max(self.credit, min(self.credit + REGAINED, FIRST_CREDIT))
        self._next = len(output) + 1
        return self._found

    def _place(self, output: Ints, key: int, last: list[int]) -> int:
        for place in (self._table.get(key), self._index.get(key)):
            if place and self._tokens(output, place - len(last), place) == last:
                return place
        return 0

    def _tokens(self, output: Ints, start: int, end: int) -> list[int]:
        """Tokens of prompt and output from place ``start``; none if it is negative."""
        prompt = self._index.prompt
        if start >= len(prompt):
            return output[start - len(prompt) : end - len(prompt)].tolist()  # type: ignore[no-any-return]
        if start < 0:
            return []
        return prompt[start:end].tolist() + output[: max(0, end - len(prompt))].tolist()  # type: ignore[no-any-return]
