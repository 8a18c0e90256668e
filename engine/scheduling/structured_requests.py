"""Generations with a grammar: those whose grammar is being compiled, and those whose mask is being computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine import wire
from engine.requests.core import Branch, Request
from engine.requests.generation import GenerateRequest
from engine.scheduling.scheduler import Scheduler
from engine.structured.compiler import Compiler, NoRoomError
from engine.structured.constraint import Constraint, GrammarError
from engine.structured.masks import MaskThreads
from engine.structured.vocabulary import Vocabulary

NO_ROOM = "The grammars in use take all the memory that the engine has for them; try again later."


@dataclass(slots=True)
class Settled:
    """Structured requests that became ready, or failed, since the last step."""

    compiled: list[GenerateRequest] = field(default_factory=list)
    """Requests that can be queued now."""
    failed: list[tuple[GenerateRequest, wire.ErrorCode, str]] = field(default_factory=list)
    """Requests that cannot begin or go on, with the reason as a code and a sentence. Those that were queued are still in the
    queue."""


class StructuredRequests:
    """Prepares the constraints of branches. One thread, the loop's, calls it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
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

    def expire(self, now: float) -> list[GenerateRequest]:
        """Remove the requests whose deadline passed before their grammar was compiled; returns them."""
        late = [request for request, _ in self._compiling.values() if request.expires is not None and request.expires <= now]
        for request in late:
            self.remove(request)
        return late

    def displaceable(self, caller: wire.Caller) -> tuple[GenerateRequest | None, float]:
        """Return the newest request of the tenant with most requests whose grammar is not compiled, for its weight, and their
        number for the weight.

        None and 0 if ``caller`` would have as many with one more.
        """
        newest = {request.caller.tenant: request for request, _ in self._compiling.values()}
        numbers = Counter(request.caller.tenant for request, _ in self._compiling.values())
        tenant, most = caller.tenant, (numbers[caller.tenant] + 1) / caller.weight
        for each, request in newest.items():
            if numbers[each] / request.caller.weight > most:
                tenant, most = each, numbers[each] / request.caller.weight
        return (None, 0.0) if tenant == caller.tenant else (newest[tenant], most)

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

    def settle(self, step_seconds: float) -> Settled:
        """Wait a bounded time for masks, and return the requests that changed. ``step_seconds``: time of the last step."""
        settled = Settled()
        self._settle_masks(settled, step_seconds)
        for request, compiling in [entry for entry in self._compiling.values() if entry[1].done()]:
            del self._compiling[request.id]
            self._settle_compiled(request, compiling, settled)
        return settled

    def queue_settled(self, scheduler: Scheduler, step_seconds: float) -> Iterator[tuple[Request, wire.ErrorCode, str]]:
        """Queue the requests whose grammar is compiled, and remove those that cannot follow theirs.

        Yields these, with the reason as a code and a sentence. ``step_seconds``: time of the last step.
        """
        settled = self.settle(step_seconds)
        for request in settled.compiled:
            scheduler.add(request)
        for request, code, problem in settled.failed:
            queued = scheduler.get(request.id) is request
            if queued:
                scheduler.remove(request)
            if queued or request.first_computed is None:
                yield request, code, problem

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        self._threads.close()

    def _settle_masks(self, settled: Settled, step_seconds: float) -> None:
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
                settled.failed.append((branch.request, "invalid", constraint.problem))

    def _settle_compiled(self, request: GenerateRequest, compiling: Future[list[Constraint]], settled: Settled) -> None:
        try:
            constraints = compiling.result()
        except GrammarError as error:
            settled.failed.append((request, "invalid", str(error)))
            return
        except NoRoomError:
            settled.failed.append((request, "overloaded", NO_ROOM))
            return
        for branch, constraint in zip(request.branches, constraints, strict=True):
            branch.constraint = constraint
        settled.compiled.append(request)


def _divided(branches: Sequence[Branch]) -> tuple[list[Branch], list[Branch]]:
    """Branches whose mask is ready, and the others."""
    ready: list[Branch] = []
    waiting: list[Branch] = []
    for branch in branches:
        (ready if branch.constraint is not None and branch.constraint.ready else waiting).append(branch)
    return ready, waiting
