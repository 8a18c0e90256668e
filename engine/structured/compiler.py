"""Compiles grammars in threads, in a fair order between tenants, and keeps the compiled ones."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from llguidance import LLMatcher

from yardstick_llm.engine import wire
from yardstick_llm.engine.structured.checker import LIMITS, Checker, Vocabulary
from yardstick_llm.engine.structured.constraint import Constraint, FairThreads, GrammarError

GRAMMAR_ROOM = 256 << 20
"""Most memory in bytes of all compiled grammars, kept ones and those in use."""
_THREADS = 2
"""Grammars of two tenants are compiled at a time, so that a third waits for the shorter of two, not for a long one."""


class NoRoomError(Exception):
    """Grammars in use take all memory that the tenant may have."""


@dataclass(eq=False, slots=True)
class _Kept:
    """A compiled grammar."""

    tenant: str
    start: Constraint
    """The state at the start of an output."""
    heap: int
    """Its memory in bytes."""
    users: int = 0
    """Requests that use it."""


@dataclass(eq=False, slots=True)
class _Share:
    """The grammars of one tenant."""

    kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    """By text, the last used one at the end."""
    heap: int = 0
    used: int = 0
    """Bytes of those in use."""


class _Use:
    """Ends the use of a grammar when the last constraint of a request is gone."""

    __slots__ = ("_grammars", "_kept")

    def __init__(self, grammars: KeptGrammars, kept: _Kept) -> None:
        self._grammars, self._kept = grammars, kept

    def __del__(self) -> None:
        self._grammars.end_use(self._kept)


class KeptGrammars:
    """The compiled grammars, by tenant: a tenant with many evicts its own, or those of a tenant with more. Threads may share it.

    A grammar in use stays. Those that one tenant uses may take as much as is left of the room (dynamic thresholds as in
    :mod:`engine.scheduling.admission`), so others find room. Tenants share no grammar: it would be one's to evict.
    """

    def __init__(self, room: int = GRAMMAR_ROOM, most: int = wire.GRAMMAR_BOUNDS.kept) -> None:
        self.heap = 0
        """Bytes of all grammars."""
        self._used = 0
        self._count = 0
        self._room, self._most = room, most
        self._shares: dict[str, _Share] = {}
        self._lock = threading.RLock()  # the interpreter may end a use at any time

    def fork(self, tenant: str, grammar: str, count: int) -> list[Constraint] | None:
        """Return ``count`` constraints at the start of an output; None if the grammar is not kept."""
        with self._lock:
            share = self._shares.get(tenant)
            kept = None if share is None else share.kept.get(grammar)
            if share is None or kept is None:
                return None
            share.kept.move_to_end(grammar)
            kept.users += 1
            if kept.users == 1:
                share.used += kept.heap
                self._used += kept.heap
            use = _Use(self, kept)
        return [kept.start.fork(use) for _ in range(count)]

    def end_use(self, kept: _Kept) -> None:
        """One request no longer uses ``kept``."""
        with self._lock:
            kept.users -= 1
            if not kept.users:
                self._shares[kept.tenant].used -= kept.heap
                self._used -= kept.heap

    def reserve(self, tenant: str, heap: int) -> None:
        """Make room for a grammar of ``heap`` bytes, before :meth:`keep` or :meth:`give_back`. Raises :class:`NoRoomError`."""
        with self._lock:
            used = self._shares[tenant].used if tenant in self._shares else 0
            if used + heap > self._room - self._used:
                raise NoRoomError
            while self.heap + heap > self._room and self._evict(lambda share: share.heap):
                pass
            while self._count >= self._most and self._evict(lambda share: len(share.kept)):
                pass
            if self.heap + heap > self._room:
                raise NoRoomError
            self.heap += heap

    def give_back(self, heap: int) -> None:
        """Undo :meth:`reserve`."""
        with self._lock:
            self.heap -= heap

    def keep(self, tenant: str, grammar: str, start: Constraint, heap: int, count: int) -> list[Constraint]:
        """Keep a compiled grammar, for which room is reserved, and return ``count`` constraints."""
        with self._lock:
            share = self._shares.setdefault(tenant, _Share())
            share.kept[grammar] = _Kept(tenant, start, heap)
            share.heap += heap
            self._count += 1
            constraints = self.fork(tenant, grammar, count)  # at once, as unused ones may be evicted
            assert constraints is not None
            return constraints

    def _evict(self, measure: Callable[[_Share], int]) -> bool:
        """Evict the oldest unused grammar of the tenant with most by ``measure``, and return whether there is one."""
        for share in sorted(self._shares.values(), key=measure, reverse=True):
            for grammar, kept in share.kept.items():
                if not kept.users:
                    del share.kept[grammar]
                    share.heap -= kept.heap
                    self.heap -= kept.heap
                    self._count -= 1
                    if not share.kept:
                        del self._shares[kept.tenant]
                    return True
        return False


class Compiler:
    """Makes constraints from grammars. :meth:`begin` is called by one thread only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary.tokenizer
        self._checker = Checker(vocabulary)
        self._threads = FairThreads(_THREADS, "grammar-compiler")
        self._replays = FairThreads(1, "grammar-replay")
        self._kept = KeptGrammars()
        self.compiled = 0
        """Grammars compiled, found ones not counted."""
        self.refused = 0
        """Grammars refused."""
        self.seconds = 0.0
        """Time spent in checking and compiling them."""

    @property
    def heap(self) -> int:
        """Memory of compiled grammars in bytes."""
        return self._kept.heap

    def start(self) -> None:
        """Start the process that checks grammars, so that the first one does not wait for it."""
        self._checker.start()

    def begin(self, caller: wire.Caller, grammar: str, sequences: int, output: Sequence[int]) -> Future[list[Constraint]]:
        """Return a constraint for each of ``sequences`` outputs that begin with ``output``, with a mask that is ready. A kept
        grammar never waits for others that are compiled. The future raises :class:`GrammarError` and :class:`NoRoomError`."""
        constraints = self._kept.fork(caller.tenant, grammar, sequences)
        if constraints is None:
            return self._threads.submit(caller, lambda: self._compiled(caller.tenant, grammar, sequences, output))
        if len(output):
            return self._replays.submit(caller, lambda: _replayed(constraints, output))
        found: Future[list[Constraint]] = Future()
        found.set_result(constraints)
        return found

    def close(self) -> None:
        """End the threads and the process."""
        self._threads.close()
        self._replays.close()
        self._checker.close()

    def _compiled(self, tenant: str, grammar: str, sequences: int, output: Sequence[int]) -> list[Constraint]:
        constraints = self._kept.fork(tenant, grammar, sequences)
        if constraints is None:
            began = time.perf_counter()
            try:
                constraints = self._compile(tenant, grammar, sequences)
                self.compiled += 1
            except GrammarError:
                self.refused += 1
                raise
            finally:
                self.seconds += time.perf_counter() - began
        return _replayed(constraints, output)

    def _compile(self, tenant: str, grammar: str, sequences: int) -> list[Constraint]:
        problem, heap = self._checker.check(grammar)
        if problem:
            raise GrammarError(problem)
        self._kept.reserve(tenant, heap)
        try:
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
            start = Constraint(matcher, self._vocabulary.vocab_size)
            start.compute_mask()
            if start.problem is not None:
                raise GrammarError(start.problem)
        except BaseException:
            self._kept.give_back(heap)
            raise
        return self._kept.keep(tenant, grammar, start, heap, sequences)


def _replayed(constraints: list[Constraint], output: Sequence[int]) -> list[Constraint]:
    for constraint in constraints if len(output) else ():
        constraint.replay(output)
        constraint.compute_mask()
    return constraints
