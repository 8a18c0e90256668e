"""Engines behind a Kubernetes Service: the gateway lists its EndpointSlices once and then watches them.

The package ``kubernetes`` reads credentials and makes the calls, in one thread for each Service
(docs/decisions/kubernetes-client.md). This module has the rules above it, which follow
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes. A watch resumes from the last
``resourceVersion``, both after its regular end and after a broken connection. The slices are listed again only if the server
refuses that version (410: expired) or sends data that cannot be parsed. The last complete set stays valid until a list succeeds, so
the API may be away for any length of time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from kubernetes import config
from kubernetes.client import ApiClient, ApiException, Configuration, DiscoveryV1Api
from kubernetes.watch import Watch
from urllib3.exceptions import HTTPError

from yardstick_llm.gateway.pool.discovery import Endpoint, Source, http_url
from yardstick_llm.gateway.settings import ServiceAddress

logger = logging.getLogger(__name__)

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
WATCH_SECONDS = 60
"""Server-side length of a watch. A new watch replaces one that hangs."""
SILENCE_SECONDS = 15.0
"""Read timeout of a watch beyond :data:`WATCH_SECONDS`, and timeout of every other call."""
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 15.0
"""Nominal seconds between two calls; the wait doubles after each failure, and jitter keeps gateways apart."""
STOP_SECONDS = 1.0
"""Time for the thread to end, after its connection was cut."""


class AccessError(Exception):
    """The available credentials do not give access to the API; the message names what is missing."""


class Access(msgspec.Struct, frozen=True):
    """A client of the API. It reads a token again before the token expires; other credentials are read when it is created."""

    client: ApiClient
    namespace: str
    """Namespace of this program: of its ServiceAccount, or of the kubeconfig's current context."""


def find_access(environment: Mapping[str, str]) -> Access:
    """Read the file that ``KUBECONFIG`` names, else the pod's ServiceAccount. Blocks while a credential plugin runs. Raises
    :class:`AccessError`."""
    settings = Configuration()
    settings.retries = False  # the caller waits longer, and goes on where it was
    try:
        if path := environment.get("KUBECONFIG"):
            config.load_kube_config(path, client_configuration=settings, persist_config=False)
            context = config.list_kube_config_contexts(path)[1]["context"]
            return Access(ApiClient(settings), context.get("namespace", "default"))
        if environment.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
            settings.proxy = None  # the API is in the cluster, whatever proxy the pod has for others
            return Access(ApiClient(settings), NAMESPACE_FILE.read_text().strip())
    except Exception as error:  # the package raises what its parsers raise, of many kinds
        raise AccessError(f"the credentials for Kubernetes cannot be read: {error}") from None
    raise AccessError(
        "this process does not run in a Kubernetes pod (KUBERNETES_SERVICE_HOST is not set), and KUBECONFIG names no file"
    )


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


class _Status(msgspec.Struct, frozen=True):
    message: str = "no reason was given"


async def endpoint_slices(
    address: ServiceAddress,
    *,
    access: Callable[[], Access] = lambda: find_access(os.environ),
    watch_seconds: int = WATCH_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
) -> Source:
    """Yield the endpoints of one Service after each change."""
    loop, news = asyncio.get_running_loop(), asyncio.Queue[Sequence[Endpoint]]()

    def found(endpoints: Sequence[Endpoint]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(news.put_nowait, endpoints)

    watcher = _Watcher(address, access, found, watch_seconds, silence_seconds)
    # a daemon: a call that hangs must not keep the gateway from ending
    thread = threading.Thread(target=watcher.run, name=f"endpoints of {address.service}", daemon=True)
    thread.start()
    try:
        while True:
            yield await news.get()
    finally:
        watcher.stop()
        await asyncio.to_thread(thread.join, STOP_SECONDS)


class _Watcher:
    """The blocking part, which runs in a thread of its own."""

    def __init__(
        self,
        address: ServiceAddress,
        access: Callable[[], Access],
        found: Callable[[Sequence[Endpoint]], None],
        watch_seconds: int,
        silence_seconds: float,
    ) -> None:
        self._address, self._connect, self._found = address, access, found
        self._watch_seconds, self._silence_seconds = watch_seconds, silence_seconds
        self._wait = SHORTEST_WAIT
        self._slices: dict[str, _Slice] = {}
        self._version: str | None = None  # resourceVersion of the last change; None: list before watching
        self._access: Access | None = None  # None: read the credentials again
        self._watch: Watch | None = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End :meth:`run` from another thread."""
        self._stopped.set()
        if (watch := self._watch) is not None:
            watch.stop()

    def run(self) -> None:
        """List and watch until :meth:`stop`."""
        known: list[Endpoint] | None = None
        while not self._stopped.is_set():
            try:
                for _ in self._changes():
                    self._wait = SHORTEST_WAIT
                    endpoints = endpoints_of(self._slices.values(), self._address.port)
                    if endpoints != known:
                        known = endpoints
                        self._found(endpoints)
            except Exception as error:  # nothing that the API answers may end the loop
                self._failed(error)
            self._stopped.wait(self._wait * random.uniform(0.5, 1.5))
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._disconnect()

    def _failed(self, error: Exception) -> None:
        """Forget what may be wrong after ``error``: the connection, and the version unless it was the connection alone."""
        if self._stopped.is_set():
            return
        refused = isinstance(error, ApiException) and bool(error.status)  # without a status no answer came
        expired = isinstance(error, ApiException) and error.status == 410
        if refused or not isinstance(error, ApiException | AccessError | OSError | HTTPError):
            self._version = None
        if not expired:
            self._disconnect()
            message = _reason(error) if isinstance(error, ApiException) else str(error) or type(error).__name__
            logger.warning("endpoints of %s: %s; the last known ones stay in use", self._address.service, message)

    def _disconnect(self) -> None:
        if self._access is not None:
            self._access.client.close()
        self._access = None

    def _changes(self) -> Iterator[None]:
        """Yield each time the slices or their version changed, until the watch ends."""
        if self._access is None:
            self._access = self._connect()
        api = DiscoveryV1Api(self._access.client)
        namespace = self._address.namespace or self._access.namespace
        selector = f"kubernetes.io/service-name={self._address.service}"
        if self._version is None:
            response = api.list_namespaced_endpoint_slice(
                namespace, label_selector=selector, _request_timeout=self._silence_seconds, _preload_content=False
            )
            if response.status != 200:
                raise ApiException(status=response.status, body=response.data)
            # the package's own models refuse a slice without endpoints
            listed = msgspec.json.decode(response.data, type=_SliceList)
            self._slices = {item.metadata.name: item for item in listed.items}
            self._version = listed.metadata.resource_version
            yield
        began, self._watch = time.monotonic(), Watch(return_type="object")
        for event in self._watch.stream(
            api.list_namespaced_endpoint_slice,
            namespace,
            label_selector=selector,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=self._watch_seconds,
            _request_timeout=(self._silence_seconds, self._watch_seconds + self._silence_seconds),
        ):
            if event is None:
                raise ValueError("an event of the watch is not JSON")
            changed = msgspec.convert(event["raw_object"], _Slice)
            self._version = changed.metadata.resource_version
            if event["type"] == "DELETED":
                self._slices.pop(changed.metadata.name, None)
            elif event["type"] != "BOOKMARK":
                self._slices[changed.metadata.name] = changed
            yield
        if time.monotonic() - began > 1:  # a regular end without events is no failure
            self._wait = SHORTEST_WAIT


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


def _reason(error: ApiException) -> str:
    """Return status and message of an answer, or why there is none."""
    if not error.status:
        return str(error.reason).strip()
    try:
        message = msgspec.json.decode(error.body or b"{}", type=_Status).message
    except msgspec.MsgspecError:
        message = str(error.reason)
    return f"{error.status}: {message}"
