"""Engines behind a Service: the gateway lists its EndpointSlices once and then watches them.

The module makes two calls of the Kubernetes API directly; ``docs/decisions/kubernetes-client.md`` has the measurements behind that.
It follows https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes. A watch resumes from the
last ``resourceVersion``, both after its regular end and after a broken connection. The slices are listed again only if the server
refuses that version (410: expired) or sends data that cannot be parsed. The last complete set stays valid until a list succeeds, so
the API may be away for any length of time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Literal

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from gateway.pool.discovery.access import Access, AccessError, find_access
from gateway.pool.discovery.address import ServiceAddress
from gateway.pool.discovery.base import Backoff, Endpoint, http_url

logger = logging.getLogger(__name__)

WATCH_SECONDS = 60
"""Server-side length of a watch. A new watch reads the credentials again and replaces a watch that hangs."""
SILENCE_SECONDS = 15.0
"""Read timeout of a watch beyond :data:`WATCH_SECONDS`, and timeout of every other call."""
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 15.0
"""Nominal seconds between two calls."""


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class _Conditions(msgspec.Struct, frozen=True):
    terminating: bool | None = None


class _Pod(msgspec.Struct, frozen=True):
    uid: str = ""


class _SliceEndpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    """Equivalent addresses of one endpoint; the first is used."""
    conditions: _Conditions = _Conditions()
    pod: _Pod | None = msgspec.field(default=None, name="targetRef")


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct, frozen=True):
    metadata: _Metadata
    address_type: str = msgspec.field(default="IPv4", name="addressType")
    endpoints: list[_SliceEndpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(msgspec.Struct, frozen=True):
    metadata: _Metadata
    items: list[_Slice]


class _Event(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


_read_list = msgspec.json.Decoder(_SliceList)
_read_event = msgspec.json.Decoder(_Event)
_read_slice = msgspec.json.Decoder(_Slice)
_read_status = msgspec.json.Decoder(_Status)


class _Refused(Exception):
    """The API answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class EndpointSlices:
    """Follows the endpoints of one Service."""

    def __init__(
        self,
        address: ServiceAddress,
        *,
        access: Callable[[], Access] = lambda: find_access(os.environ),
        watch_seconds: int = WATCH_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._address = address
        self._access = access
        self._watch_seconds = watch_seconds
        self._silence_seconds = silence_seconds
        self._backoff = Backoff(SHORTEST_WAIT, LONGEST_WAIT)
        self._slices: dict[str, _Slice] = {}
        self._version: str | None = None  # resourceVersion of the last change; None: list before watching

    async def follow(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """Yield the endpoints after each change."""
        known: list[Endpoint] | None = None
        while True:
            try:
                access = await asyncio.to_thread(self._access)
                async with aclosing(self._changes(access)) as changes:
                    async for _ in changes:
                        self._backoff.reset()
                        found = endpoints_of(self._slices.values(), self._address.port)
                        if found != known:
                            known = found
                            yield found
            except (AccessError, OSError, httpx.TransportError, aiohttp.ClientError) as error:
                self._warn(error)
            except Exception as error:  # an unexpected answer must not end the loop
                self._version = None
                if not (isinstance(error, _Refused) and error.status == 410):
                    self._warn(error)
            await asyncio.sleep(self._backoff.wait())

    def _warn(self, error: Exception) -> None:
        message = str(error) or type(error).__name__
        logger.warning("endpoints of %s: %s; the last known ones stay in use", self._address.service, message)

    async def _changes(self, access: Access) -> AsyncGenerator[None, None]:
        """Yield each time the slices or their version changed, until the watch ends."""
        namespace = self._address.namespace or access.namespace
        url = f"{access.server}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        selector = {"labelSelector": f"kubernetes.io/service-name={self._address.service}"}
        transport = AiohttpTransport(verify=access.tls, trust_env=False)
        async with httpx.AsyncClient(transport=transport, headers=access.headers, timeout=self._silence_seconds) as client:
            if self._version is None:
                await self._list(client, url, selector)
                yield
            async with aclosing(self._watch(client, url, selector)) as events:
                async for _ in events:
                    yield

    async def _list(self, client: httpx.AsyncClient, url: str, selector: dict[str, str]) -> None:
        response = await client.get(url, params=selector)
        if response.status_code != 200:
            raise _refusal(response)
        found = _read_list.decode(response.content)
        self._slices = {item.metadata.name: item for item in found.items}
        self._version = found.metadata.resource_version

    async def _watch(self, client: httpx.AsyncClient, url: str, selector: dict[str, str]) -> AsyncGenerator[None, None]:
        options = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(self._watch_seconds)}
        params = selector | options | {"resourceVersion": self._version or ""}
        timeouts = httpx.Timeout(self._silence_seconds, read=self._watch_seconds + self._silence_seconds)
        began = time.monotonic()
        async with client.stream("GET", url, params=params, timeout=timeouts) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refusal(response)
            buffer = b""
            async for chunk in response.aiter_raw():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in filter(None, lines):
                    self._apply(_read_event.decode(line))
                    yield
        if time.monotonic() - began > 1:  # a regular end without events is no failure
            self._backoff.reset()

    def _apply(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = _read_status.decode(event.object)
            raise _Refused(status.code, status.message)
        changed = _read_slice.decode(event.object)
        self._version = changed.metadata.resource_version
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif event.type != "BOOKMARK":
            self._slices[changed.metadata.name] = changed


def endpoints_of(slices: Iterable[_Slice], port: int | str) -> list[Endpoint]:
    """Return one endpoint for each pod. A pod may be in several slices: one per address family (IPv4 is preferred), or two while
    the control plane moves it (then it is draining only if all slices say so).

    Pods that are not ready are included, because the gateway's probes notice sooner when they become ready.
    """
    found: dict[str, Endpoint] = {}
    for each in sorted(slices, key=lambda item: (item.address_type, item.metadata.name)):
        number = _port_number(each, port)
        for endpoint in each.endpoints or () if number else ():
            pod = endpoint.pod.uid if endpoint.pod and endpoint.pod.uid else endpoint.addresses[0]
            seen = Endpoint(http_url(endpoint.addresses[0], number or 0), bool(endpoint.conditions.terminating))
            if pod not in found or (found[pod].draining and not seen.draining):
                found[pod] = seen
    return sorted(found.values())


def _port_number(each: _Slice, port: int | str) -> int | None:
    """Return the port number; None if the slice has no port of that name."""
    if isinstance(port, int):
        return port
    return next((entry.port for entry in each.ports or () if entry.name == port), None)


def _refusal(response: httpx.Response) -> _Refused:
    try:
        message = _read_status.decode(response.content).message
    except msgspec.MsgspecError:
        message = "no reason was given"
    return _Refused(response.status_code, message)
