"""Runs one generation on several replicas, one after another: if a replica fails, another resumes after the last received token.

The noise of a token depends only on (seed, sequence index, position), so the resumed output is the output that the first replica
would have sent. Each sequence is resumed by a request of its own, because ``resume_offset`` applies to one sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import EngineLost, GatewayError
from yardstick_llm.gateway.pool.connection import OnDelta
from yardstick_llm.gateway.pool.dispatch import Attempts, Dispatcher
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.schemas.common import new_id

T = TypeVar("T")


class Relay:
    """Keeps the output of each open sequence, from which another replica can resume."""

    def __init__(self, dispatcher: Dispatcher, model: ServedModel, request: wire.Generate) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._request = request
        self._open: dict[int, list[int]] = {index: [] for index in range(request.sampling.n)}
        """Output so far of each sequence that has not ended, by index."""
        self._attempts = dispatcher.attempts()

    @property
    def sent(self) -> bool:
        """Whether the request was sent to a replica."""
        return self._attempts.sent

    async def deltas(self, on_delta: OnDelta | None = None) -> AsyncGenerator[list[wire.Delta], None]:
        """Yield deltas in batches, as they arrive, without gaps or repeats, until every sequence has ended. Single deltas that
        ``on_delta`` processes are not yielded. Close the iterator to abort. Raises :class:`GatewayError` if no other replica can
        resume."""
        attempts = self._attempts
        handler = None if on_delta is None else partial(self._pass_on, on_delta)
        try:
            async with aclosing(self._dispatcher.generate(self._model, self._request, attempts, handler)) as batches:
                async for batch in batches:
                    good, fault = self._accept(batch)
                    if good:
                        yield good
                    if fault is not None:
                        raise fault
            if self._open:
                raise _ended_early()
            return
        except GatewayError as error:
            self._dispatcher.check_retry(error, self._model, attempts)
        runs = [
            self._resumed(index, Attempts(attempts.wait_seconds, list(attempts.replicas), number=attempts.number))
            for index in list(self._open)
        ]
        async with aclosing(merged(runs)) as batches:
            async for batch in batches:
                yield batch

    async def _resumed(self, index: int, attempts: Attempts) -> AsyncGenerator[list[wire.Delta], None]:
        """Yield the remaining deltas of one sequence."""
        while index in self._open:
            self._dispatcher.resumed(self._model)
            rest = _rest_of(self._request, self._open[index], index)
            try:
                async with aclosing(self._dispatcher.generate(self._model, rest, attempts)) as batches:
                    async for batch in batches:
                        # the prompt's cached tokens were counted by the first attempt
                        renamed = [msgspec.structs.replace(delta, index=index, cached_tokens=0) for delta in batch]
                        good, fault = self._accept(renamed)
                        if good:
                            yield good
                        if fault is not None:
                            raise fault
                if index in self._open:
                    raise _ended_early()
            except GatewayError as error:
                self._dispatcher.check_retry(error, self._model, attempts)

    def _pass_on(self, on_delta: OnDelta, delta: wire.Delta) -> bool:
        """Return whether ``on_delta`` has processed ``delta``, which continues its sequence and does not end it."""
        output = self._open.get(delta.index)
        if output is None or delta.offset != len(output) or delta.finish is not None or not on_delta(delta):
            return False
        output += delta.tokens
        return True

    def _accept(self, batch: list[wire.Delta]) -> tuple[list[wire.Delta], EngineLost | None]:
        """Record deltas. Return those before the first one that does not continue its sequence, and the error for that one."""
        for place, delta in enumerate(batch):
            output = self._open.get(delta.index)
            if output is None:
                fault = "The engine sent a sequence that was not asked for, or that had ended."
            elif delta.finish == "abort":
                fault = "The engine aborted the request; try again."
            elif delta.offset != len(output):
                fault = f"The engine skipped or repeated output: at {delta.offset} instead of {len(output)}."
            else:
                output += delta.tokens
                if delta.finish is not None:
                    del self._open[delta.index]
                continue
            return batch[:place], EngineLost(fault, retryable=True)
        return batch, None


def _ended_early() -> EngineLost:
    return EngineLost("The engine's answer ended too early; try again.", retryable=True)


def _rest_of(generate: wire.Generate, output: list[int], index: int) -> wire.Generate:
    """Return a request for the remainder of one sequence of ``generate`` after ``output``. It has a new id, because a replica may
    still hold the first attempt or resume another sequence of the same request."""
    return msgspec.structs.replace(
        generate,
        id=new_id(),
        prompt=generate.prompt + output,
        resume_offset=generate.resume_offset + len(output),
        sampling=msgspec.structs.replace(generate.sampling, n=1),
        index=generate.index + index,
        prompt_logprobs=None if output or index else generate.prompt_logprobs,
    )


async def merged(streams: Sequence[AsyncGenerator[T, None]], at_once: int = 64) -> AsyncGenerator[T, None]:
    """Yield every item of ``streams``, in the order of arrival; ``at_once`` of them run at a time. The first failure ends all, as
    closing does."""
    arrived: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(maxsize=2 * at_once)
    waiting = iter(streams)

    async def run() -> None:
        try:
            for stream in waiting:
                async with aclosing(stream):
                    async for news in stream:
                        await arrived.put((news,))
                await arrived.put(None)
        except Exception as error:  # the consumer raises it
            await arrived.put(error)

    runs = [asyncio.create_task(run()) for _ in range(min(at_once, len(streams)))]
    try:
        unfinished = len(streams)
        while unfinished:
            arrival = await arrived.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                unfinished -= 1
            else:
                yield arrival[0]
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
