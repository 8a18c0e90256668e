"""Where engines are found: entries, DNS, and the list and watch protocol of Kubernetes over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import pytest

from gateway.pool.discovery import access, kubernetes
from gateway.pool.discovery.access import Access, AccessError, find_access
from gateway.pool.discovery.address import Address, DnsAddress, ServiceAddress, StaticAddress, parse_address
from gateway.pool.discovery.base import Backoff, Discovery, Endpoint
from gateway.pool.discovery.dns import Dns
from gateway.pool.discovery.kubernetes import EndpointSlices, endpoints_of
from tests.fakes import served
from tests.processes import free_port, until


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:8100", StaticAddress("http://127.0.0.1:8100")),
        ("https://engines.example/", StaticAddress("https://engines.example")),
        ("dns://engines.default.svc:8100", DnsAddress("engines.default.svc", 8100)),
        ("kubernetes://engines:http", ServiceAddress("engines", "http")),
        ("kubernetes://models/engines:8100", ServiceAddress("engines", 8100, "models")),
    ],
)
def test_entries(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "engines:8100",
        "http://",
        "http://x:port",
        "dns://engines",
        "dns://x:1/y",
        "kubernetes://engines",
        "kubernetes://a/b/c:1",
        "kubernetes://Engines:1",
        "kubernetes://engines:70000",
        "ftp://x",
        "",
    ],
)
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it like|a port is"):
        parse_address(text)


def test_waits_grow_to_a_limit() -> None:
    backoff = Backoff(1, 8)
    waits = [backoff.wait() for _ in range(20)]
    assert all(nominal / 2 <= wait <= nominal * 1.5 for nominal, wait in zip([1, 2, 4, *[8] * 17], waits, strict=True))
    backoff.reset()
    assert backoff.wait() <= 1.5


async def test_names_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | None] = [None, ["10.0.0.2", "10.0.0.1", "fd00::1"], ["10.0.0.2"], None, ["10.0.0.2"], ["10.0.0.3"]]

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        if addresses is None:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    async with following(Dns("engines", 8100, resolve_seconds=0.01)) as seen:
        await until(lambda: len(seen) == 3)
    assert [[endpoint.url for endpoint in found] for found in seen] == [
        ["http://10.0.0.1:8100", "http://10.0.0.2:8100", "http://[fd00::1]:8100"],
        ["http://10.0.0.2:8100"],
        ["http://10.0.0.3:8100"],
    ]


async def test_a_real_name() -> None:
    async with following(Dns("localhost", 8100, resolve_seconds=1)) as seen:
        await until(lambda: bool(seen))
    assert Endpoint("http://127.0.0.1:8100") in seen[0]


# Kubernetes


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
    """Speaks list and watch as an apiserver does, and misbehaves where it is told to."""

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


@asynccontextmanager
async def following(source: Discovery) -> AsyncIterator[list[Sequence[Endpoint]]]:
    """What ``source`` brings, in a list that grows."""
    seen: list[Sequence[Endpoint]] = []

    async def follow() -> None:
        async with aclosing(source.follow()) as answers:
            async for found in answers:
                seen.append(found)

    task = asyncio.create_task(follow())
    try:
        yield seen
        assert not task.done(), "it gave up"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def watching(api: FakeApi, watch_seconds: int = 30, silence_seconds: float = 5) -> AsyncIterator[list[set[str]]]:
    """The addresses that a source in front of ``api`` has brought; draining ones end with ``!``."""
    reads = 0

    def fresh() -> Access:
        nonlocal reads
        reads += 1
        return Access(url, "models", ssl.create_default_context(), {"authorization": f"Bearer {reads}"})

    with served(api) as url:
        source = EndpointSlices(
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
    assert len(set(api.tokens)) >= 3, "credentials are read anew"


async def test_a_cut_watch_goes_on_where_it_was(api: FakeApi) -> None:
    async with watching(api) as brought:
        api.generation += 1
        api.change("ADDED", "b", "10.0.0.2")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})
    assert api.lists == 1


@pytest.mark.parametrize("how", ["status", "event"])
async def test_what_is_forgotten_is_listed_anew(api: FakeApi, how: str) -> None:
    async with watching(api) as brought:
        if how == "event":
            api.error(410)
        else:
            api.generation += 1
            api.oldest = 100
            api.version = 200
        await until(lambda: api.lists == 2)
        api.change("ADDED", "b", "10.0.0.2")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})
    assert api.lists == 2


async def test_what_went_unseen_is_gone_after_a_list(api: FakeApi) -> None:
    async with watching(api) as brought:
        api.change("ADDED", "b", "10.0.0.2")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})
        del api.slices["a"]
        api.error(410)
        await until(lambda: brought[-1] == {"10.0.0.2"})


@pytest.mark.slow
async def test_a_watch_that_hangs_is_found_out(api: FakeApi) -> None:
    api.hang = True
    async with watching(api, watch_seconds=1, silence_seconds=0.3) as brought:
        await until(lambda: len(api.watches) >= 2)
        api.hang = False
        api.change("ADDED", "b", "10.0.0.2")
        api.generation += 1
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})


@pytest.mark.parametrize("status", [401, 403, 500, 503])
async def test_the_last_good_set_holds(api: FakeApi, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with watching(api) as brought:
        api.refuse = status
        api.generation += 1
        await until(lambda: f"{status}: no" in caplog.text)
        assert brought[-1] == {"10.0.0.1"}
        api.change("ADDED", "b", "10.0.0.2")
        api.refuse = None
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})


async def test_garbage_is_listed_anew(api: FakeApi) -> None:
    async with watching(api) as brought:
        api.history.append((api.version, b"<html>\n"))
        await until(lambda: api.lists == 2)
        api.change("ADDED", "b", "10.0.0.2")
        await until(lambda: brought[-1] == {"10.0.0.1", "10.0.0.2"})


async def test_an_api_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    away = Access(f"http://127.0.0.1:{port}", "models", ssl.create_default_context(), {})
    async with following(EndpointSlices(ServiceAddress("engines", "http"), access=lambda: away)) as seen:
        await until(lambda: caplog.text.count("the last known ones stay in use") >= 3)
        api = FakeApi()
        api.change("ADDED", "a", "10.0.0.1")
        with served(api, port):
            await until(lambda: bool(seen))
            api.generation += 1


async def test_credentials_that_are_missing_for_now(caplog: pytest.LogCaptureFixture) -> None:
    def access() -> Access:
        raise AccessError("nothing there yet")

    async with following(EndpointSlices(ServiceAddress("engines", "http"), access=access)) as seen:
        await until(lambda: "nothing there yet" in caplog.text)
    assert seen == []


# Credentials


def test_the_account_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(AccessError, match="cannot be read"):
        find_access(environment)
    (tmp_path / "namespace").write_text("models\n")
    (tmp_path / "ca.crt").write_text(AUTHORITY)
    for token in ("one", "two"):
        (tmp_path / "token").write_text(f"{token}\n")
        found = find_access(environment)
        assert (found.server, found.namespace) == ("https://10.96.0.1:443", "models")
        assert found.headers == {"authorization": f"Bearer {token}"}
    assert [certificate["subject"] for certificate in found.tls.get_ca_certs()]


def test_a_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text(AUTHORITY)
    (tmp_path / "token").write_text("secret\n")
    file = tmp_path / "config"
    cluster = {"name": "c", "cluster": {"server": "https://10.0.0.1:6443", "certificate-authority": "ca.crt"}}
    config = {
        "current-context": "x",
        "clusters": [cluster],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
        "users": [{"name": "u", "user": {"tokenFile": "token"}}],
    }
    file.write_text(json.dumps(config))
    found = find_access({"KUBECONFIG": str(file), "KUBERNETES_SERVICE_HOST": "ignored"})
    assert (found.server, found.namespace) == ("https://10.0.0.1:6443", "models")
    assert found.headers == {"authorization": "Bearer secret"}
    for broken in ({"current-context": "y"}, {"users": [{"name": "u", "user": {"exec": {"command": "x"}}}]}, {"users": 1}):
        file.write_text(json.dumps(config | broken))
        with pytest.raises(AccessError):
            find_access({"KUBECONFIG": str(file)})
    with pytest.raises(AccessError, match="not run in a Kubernetes pod"):
        find_access({})


AUTHORITY = """-----BEGIN CERTIFICATE-----
MIIBmDCCAT+gAwIBAgIUQNaFcKo+GEk0EAd5mDMCR7qicBUwCgYIKoZIzj0EAwIw
ITEfMB0GA1UEAwwWYW4gYXV0aG9yaXR5IGZvciB0ZXN0czAgFw0yNjExMjExMjM0
MTFaGA8yMTI2MTAyODEyMzQxMVowITEfMB0GA1UEAwwWYW4gYXV0aG9yaXR5IGZv
ciB0ZXN0czBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABIi7P1N4n+Gfz+Um4PVw
Zohos7eufqp/KWWk1PV89bCAuvjEa5iiL7HVI2q42uo0SUpyUqE26RF9yeDbUskQ
6p+jUzBRMB0GA1UdDgQWBBSjLgCnui78MFA67RAtbVDtvYweMTAfBgNVHSMEGDAW
gBSjLgCnui78MFA67RAtbVDtvYweMTAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49
BAMCA0cAMEQCIDniMPgMpCoBAHTApw5N9vh6RgBMBQgok+rgcn+J2IOYAiB4jfA/
n7fgzyW2wqk9q92JAUtZTBVMHeedIFF/v8wQLQ==
-----END CERTIFICATE-----
"""
