"""Real Redis servers: processes of the ``redis-server`` on the path."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.parts import need
from tests.processes import free_port, wait_until

START_SECONDS = 20
BASE = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1")


class RedisServer:
    """One server. It keeps its port when it is started again, and nothing else."""

    def __init__(self, arguments: Sequence[str] = (), *, directory: Path, tls: Certificates | None = None, port: int = 0) -> None:
        self.port = port or free_port()
        self._directory = directory
        self._tls = tls
        listen = ["--port", str(self.port)] if tls is None else ["--port", "0", "--tls-port", str(self.port), *tls.arguments]
        self._arguments = [*BASE, *listen, "--dir", str(directory), *arguments]
        self.boot()

    @classmethod
    @contextmanager
    def start(cls, *arguments: str, tls: Certificates | None = None) -> Iterator[RedisServer]:
        """A server, until the end of the block."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            server = cls(arguments, directory=Path(directory), tls=tls)
            try:
                yield server.wait()
            finally:
                server.kill()

    @property
    def url(self) -> str:
        return f"{'redis' if self._tls is None else 'rediss'}://127.0.0.1:{self.port}/0"

    def client(self, **options: Any) -> redis.Redis:
        tls = {} if self._tls is None else {"ssl": True, "ssl_ca_certs": str(self._tls.ca)}
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0), **tls, **options)

    def boot(self) -> None:
        """Start it, again after :meth:`kill`."""
        command = [need("redis"), *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self) -> RedisServer:
        """Until it answers, if only to say that it wants a password."""
        wait_until(self._answers, START_SECONDS)
        return self

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
        return True

    def lose_directory(self) -> None:
        """It can save no more."""
        shutil.rmtree(self._directory)

    def pause(self) -> None:
        """It still has its connections, takes new ones, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Certificates:
    """An authority and what it signed for 127.0.0.1, as files in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.ca, self._certificate, self._key = (directory / name for name in ("ca.pem", "redis.pem", "redis.key"))
        authority = directory / "ca.key"
        new = (need("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        _run(*new, "-subj", "/CN=test authority", "-keyout", str(authority), "-out", str(self.ca))
        signed = ("-CA", str(self.ca), "-CAkey", str(authority), "-addext", "subjectAltName=IP:127.0.0.1")
        extensions = ("-addext", "basicConstraints=critical,CA:FALSE")
        _run(*new, "-subj", "/CN=redis", *signed, *extensions, "-keyout", str(self._key), "-out", str(self._certificate))

    @property
    def chain(self) -> tuple[Path, Path]:
        return self._certificate, self._key

    @property
    def arguments(self) -> list[str]:
        files = ["--tls-cert-file", str(self._certificate), "--tls-key-file", str(self._key), "--tls-ca-cert-file", str(self.ca)]
        return [*files, "--tls-auth-clients", "no"]


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[RedisServer]]:
    with ExitStack() as stack:
        servers = []
        for _ in range(nodes):
            port, bus = free_port(), free_port()
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            arguments = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000"]
            arguments += ["--cluster-require-full-coverage", "no"]
            servers.append((RedisServer(arguments, directory=directory, port=port), bus))
            stack.callback(servers[-1][0].kill)
        (first, first_bus), *_ = servers
        for place, (server, _bus) in enumerate(servers):
            with server.wait().client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", place * 16384 // nodes, (place + 1) * 16384 // nodes - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", place + 1)
                if server is not first:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, first_bus)
        _wait_for_cluster([server for server, _ in servers])
        yield [server for server, _ in servers]


def _wait_for_cluster(servers: list[RedisServer]) -> None:
    def formed(client: redis.Redis) -> bool:
        slots = client.execute_command("CLUSTER SLOTS")
        return client.execute_command("CLUSTER INFO")["cluster_state"] == "ok" and len(slots) == len(servers)

    for server in servers:
        with server.client() as client:
            wait_until(lambda client=client: formed(client), START_SECONDS)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
