"""A node of rank 1 or higher of a model that several nodes share. No torch: its processes of the model are children.

It joins node 0 (:mod:`engine.runner.distributed.group`), starts its processes as node 0 says, and passes the orders on to each.
When node 0 is gone or refuses it, it ends them and asks again; when one of them ends, the node ends too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.engine.runner.distributed.group import (
    HANDSHAKE_SECONDS,
    LENGTH_BYTES,
    READY,
    REPORT_SECONDS,
    Assignment,
    Failed,
    Leaving,
    Loaded,
    Refused,
    Welcome,
    address_of,
    frame,
    greet,
    prepare,
    read_frame,
    splice,
)
from yardstick_llm.engine.server.loop_client import Pulse, with_defaults
from yardstick_llm.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Time between two attempts to join."""
NOTICE_SECONDS = 1.0
"""Processes also end because node 0 is gone; its connection ends in this time then."""
MAX_ORDER_BYTES = 1 << 30
"""An order has the tokens of a step, and the slots of all tokens before each."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Process = asyncio.subprocess.Process


class ProcessEnded(Exception):
    """A process of this node ended, or could not load its part; the message is one line."""


class Node:
    """The engine behind the HTTP server of a node. It has the attributes of :class:`~engine.server.loop_client.LoopClient` that the
    server reads. Call :meth:`start` first."""

    stats: wire.Stats | None = None
    pulse: Pulse | None = None
    adapters_headers: dict[str, str] = {}  # noqa: RUF012  never changed

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._address = address_of(settings)
        self.name = settings.name
        self.ready: bool | None = None
        """True while all nodes compute together; None otherwise, as :attr:`LoopClient.ready`."""
        self.failure: str | None = None
        """Why the node ends, in one line."""
        self.ended = asyncio.Event()
        self._waits_for = "has not joined yet"
        self._reported = -REPORT_SECONDS
        self._leader: asyncio.StreamWriter | None = None
        self._leaving = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to join; returns at once."""
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """End the processes."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def drain(self, seconds: float) -> None:
        """Ask node 0 to drain, and return when it has ended, or after ``seconds``."""
        if self._leader is not None and self.ready and self._task is not None:
            self._leader.write(frame(Leaving()))
            self._leaving = True
            await asyncio.wait({self._task}, timeout=seconds)

    @property
    def refusal(self) -> str | None:
        """Why the group does not compute, in a sentence; None while it does."""
        return None if self.ready else self.failure or f"Node {self.settings.node_rank} {self._waits_for}."

    @property
    def dead(self) -> str | None:
        """Why the pod should be restarted; None while it need not be."""
        return self.failure

    async def _serve(self) -> None:
        """Join again and again, until a process of this node ends or the server does."""
        while not self._leaving:
            try:
                await self._join()
            except ProcessEnded as error:
                self.failure = str(error)
                self.ended.set()
                return
            except EOFError:
                self._report("the connection ended")
            except (OSError, msgspec.MsgspecError) as error:
                self._report(str(error) or "no answer")
            finally:
                self.ready = self._leader = None
            await asyncio.sleep(RETRY_SECONDS)

    def _report(self, problem: str) -> None:
        """Log a new problem at once, and the same one again after a while."""
        now, waits = asyncio.get_running_loop().time(), f"waits for node 0 at {self.settings.dist_init_addr}: {problem}"
        if waits != self._waits_for or now > self._reported + REPORT_SECONDS:
            logger.warning("node %d %s", self.settings.node_rank, waits)
            self._reported = now
        self._waits_for = waits

    async def _connect(self, *, to_store: bool = False) -> tuple[Connection, Welcome]:
        """A connection to node 0. Raises OSError or EOFError."""
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                prepare(writer)
                answer = await greet(reader, writer, self.settings, to_store=to_store)
                if isinstance(answer, Refused):
                    raise ConnectionRefusedError(answer.reason.removesuffix("."))
            except BaseException:
                writer.close()
                raise
        return (reader, writer), answer

    async def _join(self) -> None:
        """Be part of the group until it ends. Raises OSError or EOFError where node 0 is gone, and :class:`ProcessEnded`."""
        (reader, writer), welcome = await self._connect()
        own, local = self.settings, self.settings.local_processes
        settings = msgspec.structs.replace(
            welcome.settings,
            model=own.model,
            revision=own.revision,
            lenvm_model=None,
            lenvm_revision=None,
            threads=own.threads,
            machine_engines=own.machine_engines,
        )
        async with AsyncExitStack() as stack:
            stack.callback(writer.close)
            self._leader = writer
            tunnel = await asyncio.start_server(self._lead_to_store, "127.0.0.1", 0)
            stack.callback(tunnel.close)
            port = tunnel.sockets[0].getsockname()[1]
            ranks = range(own.node_rank * local, (own.node_rank + 1) * local)
            assignments = [Assignment(settings, rank, port, welcome.fingerprint) for rank in ranks]
            processes = [await stack.enter_async_context(_running(each)) for each in assignments]
            logger.info("node %d has joined and loads its part of the model", own.node_rank)
            self._waits_for = "loads its part of the model"
            tasks = {asyncio.create_task(self._relay(reader, processes)), asyncio.create_task(self._load(writer, processes))}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, writer: asyncio.StreamWriter, processes: Sequence[Process]) -> None:
        """Report when the processes have loaded their parts, and raise :class:`ProcessEnded` when one of them ends."""
        for process in processes:
            assert process.stdout is not None
            answer = (await process.stdout.readline()).decode().strip()
            if answer != READY:
                reason = answer or "A process of the model ended while it loaded its part."
                writer.write(frame(Failed(reason)))
                await writer.drain()
                raise ProcessEnded(reason)
        writer.write(frame(Loaded()))
        await asyncio.wait([asyncio.create_task(process.wait()) for process in processes], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(NOTICE_SECONDS)
        codes = [process.returncode for process in processes if process.returncode is not None]
        raise ProcessEnded(f"A process of the model ended with exit code {codes[0]}.")

    async def _relay(self, reader: asyncio.StreamReader, processes: Sequence[Process]) -> None:
        """Pass every order of node 0 on to the processes."""
        orders = 0
        while True:
            order = await read_frame(reader, MAX_ORDER_BYTES)
            for process in processes:
                assert process.stdin is not None
                with suppress(ConnectionError):  # it has ended, which _load reports
                    process.stdin.write(len(order).to_bytes(LENGTH_BYTES, "little"))
                    process.stdin.write(order)
                    await process.stdin.drain()
            orders += 1
            if orders == 2:  # the first one lets the processes find each other; the second comes when they have
                self.ready = True
                logger.info("node %d computes", self.settings.node_rank)

    async def _lead_to_store(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a process of this node to the store of the group."""
        try:
            other, _ = await self._connect(to_store=True)
            await splice((reader, writer), other)
        except (OSError, EOFError) as error:
            logger.warning("a process cannot reach the store of the group: %s", error)
        finally:
            writer.close()


@asynccontextmanager
async def _running(assignment: Assignment) -> AsyncIterator[Process]:
    """A process of the model; it is killed at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *assignment.command,
        stdin=pipe,
        stdout=pipe,
        env=with_defaults(os.environ),
        preexec_fn=os.setpgrp,  # as that of the loop, see loop_client
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
