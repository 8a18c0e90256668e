"""Compiles grammars in a thread of its own, and keeps the compiled ones."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.structured.constraint import Constraint, GrammarError, reason_of
from engine.wire import GRAMMAR_LIMITS

KEPT_GRAMMARS = 128
"""Compiled grammars that are kept, the last used ones; each takes up to a few MiB."""


class Compiler:
    """Makes constraints from grammars. :meth:`begin` is called by one thread only."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS._asdict())
        self._threads = ThreadPoolExecutor(1, "grammar-compiler")
        self._kept: OrderedDict[str, Constraint] = OrderedDict()
        """Constraints at the start of an output, by grammar. Only the thread touches them."""
        self.compiled = 0
        """Grammars compiled, found ones not counted."""
        self.seconds = 0.0
        """Time spent in compiling them."""

    def begin(self, grammar: str, sequences: int, output: Sequence[int]) -> Future[list[Constraint]]:
        """Return a constraint for each of ``sequences`` outputs that begin with ``output``, with a mask that is ready. The future
        raises :class:`GrammarError`."""
        return self._threads.submit(self._constraints, grammar, sequences, output)

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _constraints(self, grammar: str, sequences: int, output: Sequence[int]) -> list[Constraint]:
        constraints = [self._compiled(grammar).fork() for _ in range(sequences)]
        for constraint in constraints if len(output) else ():
            constraint.replay(output)
            constraint.compute_mask()
        return constraints

    def _compiled(self, grammar: str) -> Constraint:
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        began = time.perf_counter()
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(f"The grammar is not valid: {reason_of(matcher)}.")
        compiled = Constraint(matcher, self._vocabulary.vocab_size)
        compiled.compute_mask()
        if compiled.problem is not None:
            raise GrammarError(compiled.problem)
        self.compiled += 1
        self.seconds += time.perf_counter() - began
        self._kept[grammar] = compiled
        if len(self._kept) > KEPT_GRAMMARS:
            self._kept.popitem(last=False)
        return compiled
