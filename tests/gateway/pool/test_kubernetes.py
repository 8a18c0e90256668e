"""Engines behind a Service: the list and watch protocol over real sockets, and the credentials for it."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import incluster_config

from tests.fakes import served
from tests.gateway.pool.test_pool import following
from tests.gateway.pool.test_tls import Terminator
from tests.processes import until
from tests.redis import Certificates
from yardstick_llm.gateway.pool import kubernetes
from yardstick_llm.gateway.pool.discovery import Endpoint
from yardstick_llm.gateway.pool.kubernetes import endpoint_slices, endpoints_of
from yardstick_llm.gateway.process import kubernetes as watching_kubernetes
from yardstick_llm.gateway.process.kubernetes import Access, AccessError, find_access
from yardstick_llm.gateway.settings import ServiceAddress


def slice_of(
    name: str, *addresses: str, version: int = 0, kind: str = "IPv4", port: int = 8100, **conditions: bool
) -> dict[str, Any]:
    """An EndpointSlice with a pod at each address."""
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": kind,
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": True, **conditions}, "targetRef": {"uid": f"pod-{address[-1]}"}}
            for address in addresses
        ],
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}],
    }


def read(*slices: dict[str, Any], port: int | str = "http") -> list[Endpoint]:
    return endpoints_of(msgspec.convert(list(slices), list[kubernetes._Slice]), port)


def test_endpoints_of_slices() -> None:
    assert read(slice_of("a", "10.0.0.1"), slice_of("b", "10.0.0.2", port=8200)) == [
        Endpoint("http://10.0.0.1:8100"),
        Endpoint("http://10.0.0.2:8200"),
    ]
    assert read(slice_of("a", "10.0.0.1"), port=7) == [Endpoint("http://10.0.0.1:7")]
    assert read(slice_of("a", "10.0.0.1"), port="other") == []
    assert read(slice_of("a", "10.0.0.1", terminating=True, ready=False)) == [Endpoint("http://10.0.0.1:8100", draining=True)]
    assert read({"metadata": {"name": "empty"}, "addressType": "IPv4", "endpoints": None, "ports": None}) == []


def test_a_pod_in_several_slices_is_one() -> None:
    both = [slice_of("v6", "fd00::1", kind="IPv6"), slice_of("v4", "10.0.0.1")]
    assert read(*both) == [Endpoint("http://10.0.0.1:8100")]
    assert read(slice_of("a", "10.0.0.1", terminating=True), slice_of("b", "10.0.0.1")) == [Endpoint("http://10.0.0.1:8100")]
    assert read(slice_of("v6", "fd00::1", kind="IPv6")) == [Endpoint("http://[fd00::1]:8100")]


class FakeApi:
    """Speaks list and watch as an apiserver does, and misbehaves on request."""

    def __init__(self) -> None:
        self.version = 10
        self.slices: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, bytes]] = []
        self.oldest = 0
        """Versions before this are forgotten: a watch from there is 410."""
        self.lists = 0
        self.watches: list[int] = []
        """The versions that watches began from."""
        self.tokens: list[str] = []
        self.refuse: int | None = None
        """A status that every call is answered with."""
        self.hang = False
        """Watches are accepted and bring nothing, not even their end."""
        self.generation = 0
        """Watches that began in an earlier one are cut."""

    def change(self, kind: str, name: str, *addresses: str, **conditions: bool) -> None:
        self.version += 1
        changed = slice_of(name, *addresses, version=self.version, **conditions)
        if kind == "DELETED":
            del self.slices[name]
        else:
            self.slices[name] = changed
        self._tell(kind, changed)

    def bookmark(self) -> None:
        self.version += 5
        self._tell("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self.version)}})

    def error(self, code: int) -> None:
        self._tell("ERROR", {"kind": "Status", "code": code, "message": "too old resource version"})

    def _tell(self, kind: str, body: dict[str, Any]) -> None:
        self.history.append((self.version, json.dumps({"type": kind, "object": body}).encode() + b"\n"))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.tokens += [value.decode() for name, value in scope["headers"] if name == b"authorization"]
        assert scope["path"] == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
        assert query["labelSelector"] == "kubernetes.io/service-name=engines"
        if self.refuse is not None:
            await self._answer(send, self.refuse, {"kind": "Status", "code": self.refuse, "message": "no"})
        elif "watch" in query:
            assert query["allowWatchBookmarks"] == "true"
            await self._watch(send, int(query["resourceVersion"]), float(query["timeoutSeconds"]))
        else:
            self.lists += 1
            await self._answer(send, 200, {"metadata": {"resourceVersion": str(self.version)}, "items": [*self.slices.values()]})

    async def _answer(self, send: Any, status: int, body: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def _watch(self, send: Any, since: int, seconds: float) -> None:
        self.watches.append(since)
        if since < self.oldest:
            await self._answer(send, 410, {"kind": "Status", "code": 410, "message": "too old resource version"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        generation, began, place = self.generation, time.monotonic(), len([1 for version, _ in self.history if version <= since])
        while self.hang or time.monotonic() - began < seconds:
            if generation != self.generation:
                raise ConnectionError("cut, as it was told")
            while place < len(self.history) and not self.hang:
                line, place = self.history[place][1], place + 1
                for part in (line[:20], line[20:]):  # events do not keep to the bounds of what is sent at a time
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.005)
        await send({"type": "http.response.body", "body": b""})


def client_of(url: str, token: str) -> ApiClient:
    settings = Configuration(host=url)
    settings.api_key["BearerToken"] = token
    settings.retries = False
    return ApiClient(settings)


@asynccontextmanager
async def watching(api: FakeApi, watch_seconds: int = 30, silence_seconds: float = 5) -> AsyncIterator[list[set[str]]]:
    """The addresses that a source in front of ``api`` has brought; draining ones end with ``!``."""
    reads = 0

    def fresh() -> Access:
        nonlocal reads
        reads += 1
        return Access(client_of(url, f"Bearer {reads}"), "models")

    with served(api) as url:
        source = endpoint_slices(
            ServiceAddress("engines", "http"), access=fresh, watch_seconds=watch_seconds, silence_seconds=silence_seconds
        )
        async with following(source) as seen:
            brought = _Brought(seen)
            await until(lambda: bool(api.watches or api.refuse))
            yield brought
        api.generation += 1  # the server ends quickly


class _Brought(list[Any]):
    def __init__(self, seen: list[Sequence[Endpoint]]) -> None:
        self._seen = seen

    def __getitem__(self, place: Any) -> Any:
        return {endpoint.url[7:-5] + "!" * endpoint.draining for endpoint in self._seen[place]} if self._seen else None


@pytest.fixture
def api() -> FakeApi:
    api = FakeApi()
    api.change("ADDED", "a", "10.0.0.1")
    return api


async def test_listed_once_and_then_watched(api: FakeApi) -> None:
    async with watching(api) as brought:
        assert brought[-1] == {"10.0.0.1"}
        api.change("ADDED", "b", "10.0.0.2", "10.0.0.3")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2", "10.0.0.3"})
        api.change("MODIFIED", "a", "10.0.0.1", terminating=True)
        await until(lambda: brought[-1] == {"10.0.0.1!", "10.0.0.2", "10.0.0.3"})
        api.change("DELETED", "b")
        await until(lambda: brought[-1] == {"10.0.0.1!"})
    assert (api.lists, api.watches) == (1, [11])


async def test_a_watch_ends_in_its_time_and_goes_on(api: FakeApi) -> None:
    async with watching(api, watch_seconds=1) as brought:
        api.bookmark()
        await until(lambda: len(api.watches) >= 3)
        api.change("ADDED", "b", "10.0.0.2")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})
    assert api.lists == 1
    assert api.watches[:2] == [11, 16], "from the bookmark on"
    assert set(api.tokens) == {"Bearer 1"}, "one client for all calls that succeed"


async def test_a_cut_watch_goes_on_where_it_was(api: FakeApi) -> None:
    async with watching(api) as brought:
        api.generation += 1
        api.change("ADDED", "b", "10.0.0.2")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})
    assert api.lists == 1


@pytest.mark.parametrize("how", ["status", "event", "garbage"])
async def test_what_is_forgotten_is_listed_anew(api: FakeApi, how: str) -> None:
    async with watching(api) as brought:
        if how == "event":
            api.error(410)
        elif how == "garbage":
            api.history.append((api.version, b"<html>\n"))
        else:
            api.generation += 1
            api.oldest = 100
            api.version = 200
        await until(lambda: api.lists == 2)
        api.change("ADDED", "b", "10.0.0.2")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})
    assert api.lists == 2


@pytest.mark.slow
async def test_a_watch_that_hangs_is_found_out(api: FakeApi) -> None:
    api.hang = True
    async with watching(api, watch_seconds=1, silence_seconds=0.3) as brought:
        await until(lambda: len(api.watches) >= 2)
        api.hang = False
        api.change("ADDED", "b", "10.0.0.2")
        api.generation += 1
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})


@pytest.mark.parametrize("status", [403, 500])
async def test_the_last_good_set_holds(api: FakeApi, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with watching(api) as brought:
        api.refuse = status
        api.generation += 1
        await until(lambda: f"{status}: no" in caplog.text)
        assert brought[-1] == {"10.0.0.1"}
        api.change("ADDED", "b", "10.0.0.2")
        api.refuse = None
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})
        assert int(api.tokens[-1].split()[1]) > 1, "credentials are read again"


async def test_the_thread_ends_with_its_follower(api: FakeApi) -> None:
    """At once, although the watch has nothing to say."""
    async with watching(api) as brought:
        await until(lambda: brought[-1] == {"10.0.0.1"})
        assert names_of_threads().count("endpoints of engines") == 1
        began = time.monotonic()
    assert time.monotonic() - began < 4  # the watch would last longer
    assert "endpoints of engines" not in names_of_threads()


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


# Credentials


@contextmanager
def secure(api: FakeApi, folder: Path) -> Iterator[tuple[str, Certificates]]:
    """An HTTPS server of the API, and its certificates."""
    certificates = Certificates(folder)
    with served(api) as url, Terminator(urlsplit(url).port or 0, certificates).running() as terminator:
        yield terminator.url, certificates


async def endpoints(environment: dict[str, str], api: FakeApi, watches: int = 1) -> set[str]:
    """Return the endpoints that a gateway with this environment finds, after this number of watches."""
    source = endpoint_slices(ServiceAddress("engines", "http"), access=lambda: find_access(environment), watch_seconds=1)
    async with following(source) as seen:
        await until(lambda: bool(seen) and len(api.watches) >= watches)
        return {endpoint.url for endpoint in seen[-1]}


async def test_the_account_of_a_pod(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / name for name in ("token", "ca.crt", "namespace")}
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(files["token"]))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(files["ca.crt"]))
    monkeypatch.setattr(watching_kubernetes, "NAMESPACE_FILE", files["namespace"])
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with secure(api, tmp_path) as (url, certificates):
        parts = urlsplit(url)
        environment = {"KUBERNETES_SERVICE_HOST": parts.hostname or "", "KUBERNETES_SERVICE_PORT": str(parts.port)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(AccessError, match="cannot be read"):
            find_access(environment)
        for name, text in {"token": "first", "ca.crt": certificates.ca.read_text(), "namespace": "models\n"}.items():
            files[name].write_text(text)
        assert await endpoints(environment, api) == {"http://10.0.0.1:8100"}
    assert set(api.tokens) == {"bearer first"}


PLUGIN = """#!{python}
import datetime, json, os, pathlib
file = pathlib.Path({count!r})
number = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(number))
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential"
status = {{"token": f"token-{{number}}", "expirationTimestamp": datetime.datetime.now(datetime.timezone.utc).isoformat()}}
print(json.dumps({{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}}))
"""


def kubeconfig(folder: Path, url: str, authority: Path, user: dict[str, Any]) -> dict[str, str]:
    """The environment of a gateway with this kubeconfig."""
    config = {
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": str(authority)}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
        "users": [{"name": "u", "user": user}],
    }
    (folder / "config").write_text(json.dumps(config))
    return {"KUBECONFIG": str(folder / "config"), "KUBERNETES_SERVICE_HOST": "ignored"}


async def test_a_credential_plugin_of_a_kubeconfig(api: FakeApi, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text(PLUGIN.format(python=sys.executable, count=str(tmp_path / "count")))
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}}
    with secure(api, tmp_path) as (url, certificates):
        found = await endpoints(kubeconfig(tmp_path, url, certificates.ca, user), api, watches=2)
    assert found == {"http://10.0.0.1:8100"}
    assert all(token.startswith("Bearer token-") for token in api.tokens)
    assert len(set(api.tokens)) >= 3, "a token that has expired is asked for again"


def test_credentials_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "config"
    for text in ("", "{", json.dumps({"current-context": "y", "clusters": [], "contexts": [], "users": []}), "users: 1"):
        file.write_text(text)
        with pytest.raises(AccessError):
            find_access({"KUBECONFIG": str(file)})
    with pytest.raises(AccessError, match="not run in a Kubernetes pod"):
        find_access({})
