"""The state of a grammar in one sequence, and the tokens that it allows next."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from engine.structured.bits import Bits, words_of
from engine.structured.checker import reason_of

MAX_MASK_SECONDS = 1.0
"""Most CPU time of one mask. llguidance bounds its work (:data:`engine.wire.GRAMMAR_LIMITS`), but not tightly."""
_REPLAYED_AT_ONCE = 32
"""Tokens that are replayed without a chance for other threads to run."""


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed. The message is a sentence for the client."""


class Constraint:
    """One sequence's matcher. :meth:`advance` and :meth:`compute_mask` alternate; the second may run in another thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._words = words_of(vocab_size)
        self._use: object = None
        self.ready = False
        """Whether :attr:`mask` is that of the next token."""
        self.problem: str | None = None
        """Why the sequence cannot go on, as a sentence; set with ``ready``."""
        self.seconds = 0.0
        """CPU time of the slowest mask so far; not affected by other programs that keep the thread waiting."""
        self.last_seconds = 0.0
        """CPU time of the last mask."""

    def fork(self, use: object = None) -> Constraint:
        """Return a copy for another sequence, which refers to ``use``. Its mask is ready if this one's is."""
        copy = Constraint(self._matcher.deep_copy(), 32 * self._mask.shape[1])
        copy._use = use
        copy._words = self._words
        copy._mask[:] = self._mask
        copy.ready, copy.problem = self.ready, self.problem
        return copy

    @property
    def mask(self) -> Bits:
        """A copy of the tokens that may come next, :func:`words_of` words: end-of-sequence tokens where the output is complete."""
        bits = np.zeros(self._words, np.uint32)
        bits[: self._mask.shape[1]] = self._mask[0].view(np.uint32)
        return bits

    @property
    def complete(self) -> bool:
        """Whether the output is complete and nothing but its end may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Take the token that was drawn. The mask is not ready afterwards."""
        self.ready = False
        self._matcher.consume_token(token)

    def replay(self, tokens: Sequence[int]) -> None:
        """Take the output of an earlier attempt. Raises :class:`GrammarError`."""
        for begin in range(0, len(tokens), _REPLAYED_AT_ONCE):
            if not self._matcher.consume_tokens(list(tokens[begin : begin + _REPLAYED_AT_ONCE])):
                raise GrammarError("The output of the earlier attempt does not follow the grammar.")

    def compute_mask(self) -> None:
        """Compute :attr:`mask`, without the interpreter's lock. Raises nothing."""
        began = time.thread_time()
        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._mask)
        seconds = time.thread_time() - began
        self.seconds = max(self.seconds, seconds)
        self.last_seconds = seconds
        if self._matcher.is_error():
            self.problem = f"The grammar is too complex to follow: {reason_of(self._matcher)}."
        elif seconds > MAX_MASK_SECONDS:
            self.problem = f"The grammar is too complex to follow: one token took more than {MAX_MASK_SECONDS:g} s."
        self.ready = True
