"""Engines behind a Kubernetes Service: the gateway lists its EndpointSlices once and then watches them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import msgspec
from kubernetes.client import DiscoveryV1Api

from yardstick_llm.gateway.pool.discovery import Endpoint, Source, http_url
from yardstick_llm.gateway.process.kubernetes import (
    SILENCE_SECONDS,
    WATCH_SECONDS,
    Access,
    Resource,
    Selected,
    Watcher,
    find_access,
)
from yardstick_llm.gateway.settings import ServiceAddress

STOP_SECONDS = 1.0
"""Time for the thread to end, after its connection was cut."""


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


class _Slice(Resource, frozen=True):
    address_type: str = msgspec.field(default="IPv4", name="addressType")
    endpoints: list[_SliceEndpoint] | None = None
    ports: list[_Port] | None = None


async def endpoint_slices(
    address: ServiceAddress,
    *,
    access: Callable[[], Access] = lambda: find_access(os.environ),
    watch_seconds: int = WATCH_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
) -> Source:
    """Yield the endpoints of one Service after each change."""
    loop, news = asyncio.get_running_loop(), asyncio.Queue[Sequence[Endpoint]]()
    known: list[Endpoint] | None = None

    def found(slices: Collection[_Slice]) -> None:
        nonlocal known
        if (endpoints := endpoints_of(slices, address.port)) != known:
            known = endpoints
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(news.put_nowait, endpoints)

    selected = Selected(
        f"endpoints of {address.service}",
        lambda client: DiscoveryV1Api(client).list_namespaced_endpoint_slice,
        {"label_selector": f"kubernetes.io/service-name={address.service}"},
        address.namespace,
    )
    watcher = Watcher(selected, _Slice, found, access=access, watch_seconds=watch_seconds, silence_seconds=silence_seconds)
    thread = watcher.start()
    try:
        while True:
            yield await news.get()
    finally:
        watcher.stop()
        await asyncio.to_thread(thread.join, STOP_SECONDS)


def endpoints_of(slices: Iterable[_Slice], port: int | str) -> list[Endpoint]:
    """Return one endpoint for each pod. A pod may be in several slices: one per address family (IPv4 is preferred), or two while
    the control plane moves it (then it is draining only if all slices say so).

    Pods that are not ready are included, because the gateway's probes notice sooner when they become ready.
    """
    found: dict[str, Endpoint] = {}
    for each in sorted(slices, key=lambda item: (item.address_type, item.metadata.name)):
        number = port if isinstance(port, int) else next((entry.port for entry in each.ports or () if entry.name == port), None)
        for endpoint in each.endpoints or () if number else ():
            pod = endpoint.pod.uid if endpoint.pod and endpoint.pod.uid else endpoint.addresses[0]
            seen = Endpoint(http_url(endpoint.addresses[0], number or 0), bool(endpoint.conditions.terminating))
            if pod not in found or (found[pod].draining and not seen.draining):
                found[pod] = seen
    return sorted(found.values())
