"""The control channel of a model that several nodes share: node 0, which has rank 0, orders the processes of the others. No torch.

Node 0 listens on ``--dist-init-addr``. Each other node (:mod:`engine.server.node`) keeps a connection to it, and opens one more for
each of its processes, which leads to the store where all processes find each other and which listens on node 0's loopback address
alone. A connection begins with a handshake: node 0 sends a nonce, the node its :class:`Hello`, node 0 a :class:`Welcome` or a
:class:`Refused`. Node and node 0 prove with HMAC-SHA256 over both nonces that they have a token of ``--token-file``, which is never
sent. Everything is msgpack with its length before it, and each length is bounded.

Then node 0 sends the orders of :mod:`engine.runner.distributed.shard`, and the node a :class:`Loaded`, :class:`Failed` or
:class:`Leaving`. If a node is lost after all nodes have loaded, node 0 exits and the other nodes join again: a group is one engine.

What the processes exchange in a step goes over connections of gloo or NCCL, which are neither authenticated nor encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

LENGTH_BYTES = 8
"""Before each message: its length, little-endian."""
MAX_MESSAGE_BYTES = 64 << 10
"""Largest message, orders excepted."""
HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 64
"""Connections that have not proved anything yet. Node 0 closes more at once."""
SEND_SECONDS = 60.0
"""Longest time for which a node takes no byte of an order."""
REPORT_SECONDS = 30.0
"""Time between two lines about nodes that are missing."""
DRAIN_SIGNAL = signal.SIGUSR1
"""To node 0's server. A second SIGTERM would end it at once, and whatever ends all nodes sends each its own."""
_CLIENT, _SERVER = b"client", b"server"
"""Who signs. Of the same length, so that no signature of one is that of the other."""
_NONCE_BYTES, _MAC_BYTES = 32, hashlib.sha256().digest_size
_SOCKET_OPTIONS = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 8000}
"""With these Linux ends a connection within eight seconds after the other machine or the network is gone."""


READY = "ready"
"""The line of a worker that has loaded its part."""


class Assignment(msgspec.Struct, frozen=True):
    """Settings and rank of one process."""

    settings: EngineSettings
    rank: int
    """1 and up; rank 0 is the process that sends the orders."""
    port: int
    """Port of the loopback address that leads to the store where the processes find each other."""
    fingerprint: str = ""
    """That of the model in rank 0; empty: not compared."""

    @property
    def command(self) -> list[str]:
        """The command that starts the process."""
        return [sys.executable, "-m", "yardstick_llm.engine.runner.distributed.worker", msgspec.json.encode(self).decode()]


class Hello(msgspec.Struct, frozen=True):
    """First message of a node: its rank, its options and the version of its code."""

    nonce: bytes
    code: str
    """See :func:`code_digest`."""
    nnodes: int
    node_rank: int
    tensor_parallel: int
    to_store: bool = False
    """Whether the connection is one to the store."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The node is part of the group."""

    settings: EngineSettings
    """Settings of node 0. ``device`` is the kind of device that it computes on."""
    fingerprint: str
    """See :func:`~engine.models.loader.fingerprint`."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The node is not part of the group now; it may ask again."""

    reason: str


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """All processes of the node have loaded their parts."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The node cannot load its part, and ends."""

    reason: str


class Leaving(msgspec.Struct, tag="leaving", frozen=True):
    """The node has been asked to end. Node 0 drains, and the node computes until it closes the connection."""


Report = Loaded | Failed | Leaving


class Address(NamedTuple):
    """``--dist-init-addr``."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether all nodes are on one machine, as in tests."""
        return self.host == "localhost" or (self.is_number and ipaddress.ip_address(self.host).is_loopback)

    @property
    def is_number(self) -> bool:
        """Whether the host is an IP address and not a name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def address_of(settings: EngineSettings) -> Address:
    """``--dist-init-addr`` of one of several nodes. Raises :class:`ModelError` where it is none."""
    given = settings.dist_init_addr
    host, _, port = (given or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ModelError(f"--dist-init-addr is {given}, but must be HOST:PORT, where node 0 listens for the others.")
    return Address(host, int(port))


def check_group(settings: EngineSettings) -> None:
    """Raise :class:`ModelError` for options of nodes that do not go together."""
    if settings.node_rank >= settings.nnodes:
        raise ModelError(
            f"--node-rank is {settings.node_rank} and --nnodes is {settings.nnodes}; "
            f"nodes have the numbers 0 to {settings.nnodes - 1}."
        )
    if settings.nnodes == 1:
        return
    if settings.tensor_parallel % settings.nnodes:
        raise ModelError(
            f"--tensor-parallel is {settings.tensor_parallel} and --nnodes is {settings.nnodes}; "
            "give --tensor-parallel the number of processes on all nodes together, as many on each."
        )
    address_of(settings)
    if settings.dist_token_file is None:
        raise ModelError("--nnodes needs --token-file: nodes prove with its token that they belong together.")


@cache
def code_digest() -> str:
    """Digest of the code that all nodes must have in the same version: this package's and PyTorch's."""
    root = Path(__file__).parents[3]
    digest = hashlib.sha256(version("torch").encode())
    for path in sorted(path for folder in ("engine", "kernels") for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def frame(message: msgspec.Struct) -> bytes:
    """``message`` with its length before it."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


async def read_frame(reader: asyncio.StreamReader, most: int = MAX_MESSAGE_BYTES) -> bytes:
    """The next message, without its length. Raises OSError or EOFError where the connection ends or the message is too long."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    if length > most:
        raise ConnectionAbortedError(f"a message of {length} bytes, where at most {most} are allowed")
    return await reader.readexactly(length)


def prepare(writer: asyncio.StreamWriter) -> None:
    """Have the connection end soon after the other side is gone, and send small messages at once."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SOCKET_OPTIONS.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_tokens(settings: EngineSettings) -> list[bytes]:
    """The tokens of the token file, the newest first; none where it cannot be read."""
    try:
        return Path(settings.dist_token_file or "").read_bytes().split()
    except OSError:
        return []


def _signed(token: bytes, side: bytes, nonces: bytes, message: bytes) -> bytes:
    return hmac.digest(token, side + nonces + message, "sha256")


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, settings: EngineSettings, *, to_store: bool = False
) -> Welcome | Refused:
    """The node's part of the handshake. Raises OSError or EOFError where the other side is no node 0 with the same token."""
    token = next(iter(read_tokens(settings)), b"")
    if not token:
        raise ConnectionAbortedError("the file of --token-file has no token")
    challenge = await read_frame(reader)
    hello = Hello(
        secrets.token_bytes(_NONCE_BYTES), code_digest(), settings.nnodes, settings.node_rank, settings.tensor_parallel, to_store
    )
    message = msgspec.msgpack.encode(hello)
    signed = _signed(token, _CLIENT, challenge, message) + message
    writer.write(len(signed).to_bytes(LENGTH_BYTES, "little") + signed)
    try:
        answer = await read_frame(reader)
    except asyncio.IncompleteReadError:
        raise ConnectionAbortedError("it closed the connection; it may have another token") from None
    if not hmac.compare_digest(answer[:_MAC_BYTES], _signed(token, _SERVER, challenge + hello.nonce, answer[_MAC_BYTES:])):
        raise ConnectionAbortedError("it does not have the same token")
    return msgspec.msgpack.decode(answer[_MAC_BYTES:], type=Welcome | Refused)


async def splice(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter], other: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Pass the bytes of each connection on to the other, until one of them ends."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    copies = {asyncio.create_task(copy(one[0], other[1])), asyncio.create_task(copy(other[0], one[1]))}
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copies:
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        one[1].close()
        other[1].close()


class _Member:
    """A node that is part of the group."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.loaded = False


class Nodes:
    """All nodes but this one, which is node 0. A thread listens until the process ends."""

    def __init__(self, settings: EngineSettings, fingerprint: str, store_port: int) -> None:
        """``settings``: with the device. ``store_port``: where the store listens. Raises :class:`ModelError` where the address of
        ``--dist-init-addr`` cannot be listened on."""
        self._settings = settings
        self._welcome = Welcome(settings, fingerprint)
        self._store_port = store_port
        self._code = code_digest()
        self._members: dict[int, _Member] = {}
        self._failure: str | None = None
        self._formed = False
        self._changed = threading.Condition()
        self._handshakes = 0
        self._refused: str | None = None
        self._warned = -1.0
        listener = _listen(address_of(settings))
        threading.Thread(target=lambda: asyncio.run(self._listen(listener)), name="nodes", daemon=True).start()

    def wait(self) -> None:
        """Until all nodes have loaded their parts. From then on the loss of one ends this process. Raises :class:`ModelError` where
        a node cannot load its part."""
        with self._changed:
            while missing := [rank for rank in range(1, self._settings.nnodes) if not self._has_loaded(rank)]:
                if self._failure is not None:
                    raise ModelError(self._failure)
                if not self._changed.wait(REPORT_SECONDS):
                    logger.info("nodes that have not loaded the model yet: %s", ", ".join(map(str, missing)))
            self._formed = True

    def send(self, message: bytes) -> None:
        """To all of them. Raises OSError where one is gone."""
        for member in list(self._members.values()):
            member.connection.sendall(message)

    def _has_loaded(self, rank: int) -> bool:
        return rank in self._members and self._members[rank].loaded

    async def _listen(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._meet, sock=listener)
        await server.serve_forever()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its handshake to its end."""
        try:
            if self._handshakes >= MAX_HANDSHAKES:
                return
            prepare(writer)
            self._handshakes += 1
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    hello = await self._admit(reader, writer)
            finally:
                self._handshakes -= 1
            if hello is None:
                return
            if hello.to_store:
                await splice((reader, writer), await asyncio.open_connection("127.0.0.1", self._store_port))
            else:
                await self._follow(hello.node_rank, reader, writer)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._warn(writer, str(error))
        finally:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | None:
        """Node 0's part of the handshake; None: the node is refused."""
        challenge = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_NONCE_BYTES.to_bytes(LENGTH_BYTES, "little") + challenge)
        signed = await read_frame(reader)
        proof, message = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        tokens = await asyncio.to_thread(read_tokens, self._settings)
        proved = [token for token in tokens if hmac.compare_digest(proof, _signed(token, _CLIENT, challenge, message))]
        if not proved:
            raise ConnectionAbortedError("it has no token of --token-file")
        hello = msgspec.msgpack.decode(message, type=Hello)
        reason = self._problem(hello)
        if reason not in (None, self._refused):  # a node asks again and again
            logger.error("node %d is refused: %s", hello.node_rank, reason)
            self._refused = reason
        answer = msgspec.msgpack.encode(self._welcome if reason is None else Refused(reason))
        answer = _signed(proved[0], _SERVER, challenge + hello.nonce, answer) + answer
        writer.write(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
        return hello if reason is None else None

    def _problem(self, hello: Hello) -> str | None:
        """Why a node with a token is no part of this group; None where it is."""
        ours = self._settings
        for flag, given, expected in (
            ("--nnodes", hello.nnodes, ours.nnodes),
            ("--tensor-parallel", hello.tensor_parallel, ours.tensor_parallel),
        ):
            if given != expected:
                return f"{flag} is {given} on node {hello.node_rank} and {expected} on node 0; give all nodes the same."
        if not 0 < hello.node_rank < ours.nnodes:
            return f"--node-rank is {hello.node_rank}, and must be 1 to {ours.nnodes - 1}."
        if hello.code != self._code:
            return (
                f"Node {hello.node_rank} runs other code ({hello.code}) than node 0 ({self._code}); start all from the same image."
            )
        if hello.node_rank in self._members and not hello.to_store:
            return f"There is a node {hello.node_rank} already; give each node its own --node-rank."
        return None

    async def _follow(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the reports of a node until it is gone."""
        logger.info("node %d has joined from %s", rank, writer.get_extra_info("peername")[0])
        member = self._members[rank] = _Member(writer.get_extra_info("socket").dup())
        member.connection.settimeout(SEND_SECONDS)  # the descriptor itself never blocks, as asyncio needs it
        reason = "its connection ended"
        try:
            while True:
                self._take(rank, msgspec.msgpack.decode(await read_frame(reader), type=Report))
        except asyncio.IncompleteReadError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            reason = str(error)
        finally:
            with self._changed:
                self._members.pop(rank).connection.close()
                if self._formed:
                    end(f"node {rank} is lost ({reason}), and the engine ends with it")
                self._changed.notify_all()
        logger.warning("node %d is gone (%s)", rank, reason)

    def _take(self, rank: int, report: Report) -> None:
        with self._changed:
            if isinstance(report, Loaded):
                self._members[rank].loaded = True
            elif isinstance(report, Failed):
                self._failure = f"Node {rank}: {report.reason}"
            elif self._formed:
                logger.warning("node %d is asked to end, so the engine drains", rank)
                os.kill(os.getppid(), DRAIN_SIGNAL)  # the server, which ends this process then
            self._changed.notify_all()

    def _warn(self, writer: asyncio.StreamWriter, problem: str) -> None:
        """Log why a connection is closed, at most once a second: strangers may open many."""
        if (now := time.monotonic()) > self._warned + 1:
            self._warned = now
            peer = writer.get_extra_info("peername")
            logger.warning("a connection from %s to --dist-init-addr is closed: %s", peer[0] if peer else "somewhere", problem)


def _listen(address: Address) -> socket.socket:
    """An IP address is bound as it is. A name may lead to an address that this machine does not have or does not have yet, so all
    addresses are bound for it."""
    dual = not address.is_number and not address.is_loopback and socket.has_dualstack_ipv6()
    host = address.host if address.is_number else "127.0.0.1" if address.is_loopback else ""
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, address.port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ModelError(
            f"Cannot listen on {address.host} port {address.port}: {error.strerror}; change --dist-init-addr."
        ) from None


def end(reason: str) -> NoReturn:
    """A group that has lost a process would wait for it, so the whole engine ends."""
    logger.critical(reason)
    logging.shutdown()
    os._exit(1)
