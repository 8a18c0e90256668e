"""Real Redis servers: in containers where Docker can start one, else processes of the ``redis-server`` on the path.

``YARDSTICK_TEST_REDIS_IMAGE`` names the image; one that cannot be had is no error, as registries may be out of reach. Where there
is neither, tests fail and say what to install. Containers share the host's network, so that ports and addresses are the same
either way.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.parts import need
from tests.processes import free_port, wait_until

IMAGE = os.environ.pop("YARDSTICK_TEST_REDIS_IMAGE", "redis:7.4-alpine")
"""Taken out of the environment because gateways, which inherit it, refuse settings that they do not know."""
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
        self._runner: _Process | _Container
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
        """A client of a test's own."""
        tls = {} if self._tls is None else {"ssl": True, "ssl_ca_certs": str(self._tls.ca)}
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0), **tls, **options)

    def boot(self) -> None:
        """Start it, again after :meth:`kill`."""
        image = _image()
        self._runner = _Container(image, self._arguments, self._directory) if image else _Process(self._arguments)

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
        self._runner.pause()

    def resume(self) -> None:
        self._runner.resume()

    def kill(self) -> None:
        self._runner.kill()


class _Process:
    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen([need("redis"), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Container:
    def __init__(self, image: str, arguments: list[str], directory: Path) -> None:
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(image).with_command(["redis-server", *arguments])
        container = container.with_volume_mapping(str(directory), str(directory), "rw")
        self._container = container.with_kwargs(network_mode="host", user=str(os.getuid())).start()

    def pause(self) -> None:
        self._container.get_wrapped_container().pause()

    def resume(self) -> None:
        self._container.get_wrapped_container().unpause()

    def kill(self) -> None:
        self._container.stop(force=True)


@cache
def _image() -> str | None:
    """The image, if Docker runs here and has it or can fetch it."""
    command = shutil.which("docker")
    # Asked before the library is: where nothing answers, that leaves a socket open.
    if command is None or subprocess.run([command, "info"], capture_output=True).returncode != 0:
        return None
    import docker
    from testcontainers.core.config import testcontainers_config

    testcontainers_config.ryuk_disabled = True  # it would need another image; every server here ends with its block
    with closing(docker.from_env(timeout=60)) as engine:
        try:
            engine.images.get(IMAGE)
        except docker.errors.ImageNotFound:
            try:
                engine.images.pull(IMAGE)
            except docker.errors.DockerException:
                return None
    return IMAGE


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
        """Certificate and key of the server."""
        return self._certificate, self._key

    @property
    def arguments(self) -> list[str]:
        files = ["--tls-cert-file", str(self._certificate), "--tls-key-file", str(self._key), "--tls-ca-cert-file", str(self.ca)]
        return [*files, "--tls-auth-clients", "no"]


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[RedisServer]]:
    """A cluster of primaries, each with its part of the slots."""
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
