"""Generations with a grammar: those whose grammar is being compiled, and those whose mask is being computed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from yardstick_llm.engine import wire
from yardstick_llm.engine.requests.core import Branch, Request
from yardstick_llm.engine.requests.generation import GenerateRequest
from yardstick_llm.engine.scheduling.scheduler import Scheduler
from yardstick_llm.engine.structured.checker import Vocabulary
from yardstick_llm.engine.structured.compiler import Compiler, NoRoomError
from yardstick_llm.engine.structured.constraint import Constraint, GrammarError, MaskThreads

NO_ROOM = "The grammars in use take all the memory that the engine has for them; try again later."


class StructuredRequests:
    """Prepares the constraints of branches. One thread, the loop's, calls it."""

    def __init__(self, vocabulary: Vocabulary, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._compiler = Compiler(vocabulary)
        self._threads = MaskThreads()
        self._compiling: dict[str, tuple[GenerateRequest, Future[list[Constraint]]]] = {}
        self._advanced: list[Branch] = []
        """Branches whose masks are to be started."""
        self._waiting: list[Branch] = []
        """Branches whose masks were started and not seen to be ready."""
        self._begun = 0
        self._masks = 0
        self._mask_seconds = 0.0

    @property
    def compiling(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return len(self._compiling)

    @property
    def counts(self) -> dict[str, Any]:
        """Fields of :class:`engine.wire.Stats`."""
        return {
            "structured_requests": self._begun,
            "compiled_grammars": self._compiler.compiled,
            "refused_grammars": self._compiler.refused,
            "compile_seconds": self._compiler.seconds,
            "compiling": len(self._compiling),
            "grammar_bytes": self._compiler.heap,
            "masks": self._masks,
            "mask_seconds": self._mask_seconds,
        }

    def start(self) -> None:
        """Start what the first grammar would otherwise wait for."""
        self._compiler.start()

    def begin(self, request: GenerateRequest) -> None:
        """Compile the grammar of a new request."""
        self._begun += 1
        message = request.message
        output = message.prompt[len(message.prompt) - message.resume_offset :]
        self._compiling[request.id] = request, self._compiler.begin(request.caller, message.grammar, message.sampling.n, output)

    def get(self, request_id: str) -> GenerateRequest | None:
        """The request with this id whose grammar is not compiled yet."""
        found = self._compiling.get(request_id)
        return None if found is None else found[0]

    def remove(self, request: GenerateRequest) -> None:
        """Forget a request whose grammar is not compiled yet."""
        self._compiling.pop(request.id)[1].cancel()

    def displace(self, caller: wire.Caller, scheduler: Scheduler) -> Request | None:
        """Remove and return a request that waits for its grammar, or in the queue of ``scheduler``, so that one of ``caller`` can
        take its place: of these two, of the tenant with most for its weight (:meth:`Scheduler.displace`)."""
        newest = {request.caller.tenant: request for request, _ in self._compiling.values()}
        numbers = Counter(request.caller.tenant for request, _ in self._compiling.values())
        longest, most = None, (numbers[caller.tenant] + 1) / caller.weight
        for tenant, request in newest.items():
            if numbers[tenant] / request.caller.weight > most:
                longest, most = request, numbers[tenant] / request.caller.weight
        displaced = scheduler.displace(caller, above=0.0 if longest is None else most)
        if displaced is None and longest is not None:
            self.remove(longest)
            return longest
        return displaced

    def advance(self, branch: Branch, token: int) -> None:
        """Take a token that ``branch`` drew and that did not end the sequence."""
        if branch.constraint is not None:
            branch.constraint.advance(token)
            self._advanced.append(branch)

    def start_masks(self) -> None:
        """Start the masks of the branches that advanced."""
        if self._advanced:
            self._threads.start([(each.request.caller, each.constraint) for each in self._advanced if each.constraint is not None])
            self._waiting += self._advanced
            self._advanced = []

    def queue_settled(self, scheduler: Scheduler, step_seconds: float) -> Iterator[tuple[Request, wire.Failed]]:
        """Wait a bounded time for masks, queue the requests whose grammar is compiled, and remove those that cannot follow theirs,
        or whose deadline passed first. Yields these, with the reply. ``step_seconds``: time of the last step."""
        for request, reply in [*self._settle_masks(step_seconds), *self._settle_compiled(scheduler)]:
            queued = scheduler.get(request.id) is request
            if queued:
                scheduler.remove(request)
            if queued or request.first_computed is None:
                yield request, reply
        for request, _ in list(self._compiling.values()):
            if request.expires is not None and request.expires <= self._clock():
                self.remove(request)
                yield request, wire.Failed(request.id, "deadline", "The deadline passed before its grammar was compiled.")

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        self._threads.close()

    def _settle_masks(self, step_seconds: float) -> Iterator[tuple[GenerateRequest, wire.Failed]]:
        """Yields the requests that cannot go on; they are still in the queue."""
        if not self._waiting:
            return
        self._threads.wait(step_seconds)
        ready, self._waiting = _divided(self._waiting)
        for branch in ready:
            constraint = branch.constraint
            assert constraint is not None
            assert isinstance(branch.request, GenerateRequest)
            self._masks += 1
            self._mask_seconds += constraint.last_seconds
            if constraint.problem is not None and not branch.done:
                yield branch.request, wire.Failed(branch.request.id, "invalid", constraint.problem)

    def _settle_compiled(self, scheduler: Scheduler) -> Iterator[tuple[GenerateRequest, wire.Failed]]:
        """Yields the requests that cannot begin."""
        for request, compiling in [entry for entry in self._compiling.values() if entry[1].done()]:
            del self._compiling[request.id]
            try:
                constraints = compiling.result()
            except GrammarError as error:
                yield request, wire.Failed(request.id, "invalid", str(error))
            except NoRoomError:
                yield request, wire.Failed(request.id, "overloaded", NO_ROOM, retryable=True, retry_after=1.0)
            else:
                for branch, constraint in zip(request.branches, constraints, strict=True):
                    branch.constraint = constraint
                scheduler.add(request)


def _divided(branches: Sequence[Branch]) -> tuple[list[Branch], list[Branch]]:
    """Branches whose mask is ready, and the others."""
    ready: list[Branch] = []
    waiting: list[Branch] = []
    for branch in branches:
        (ready if branch.constraint is not None and branch.constraint.ready else waiting).append(branch)
    return ready, waiting
