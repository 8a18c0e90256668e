"""Objects of Kubernetes, listed once and then watched, and the credentials for it.

The package ``kubernetes`` reads credentials and makes the calls, in one thread for each watch
(docs/decisions/kubernetes-client.md). This module has the rules above it, which follow
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes. A watch resumes from the last
``resourceVersion``, both after its regular end and after a broken connection. Objects are listed again only if the server
refuses that version (410: expired) or sends data that cannot be parsed. The last complete set stays valid until a list succeeds, so
the API may be away for any length of time.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from kubernetes import config
from kubernetes.client import ApiClient, ApiException, Configuration, CoreV1Api
from kubernetes.watch import Watch
from urllib3.exceptions import HTTPError

logger = logging.getLogger(__name__)

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
WATCH_SECONDS = 60
"""Server-side length of a watch. A new watch replaces one that hangs."""
SILENCE_SECONDS = 15.0
"""Read timeout of a watch beyond :data:`WATCH_SECONDS`, and timeout of every other call."""
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 15.0
"""Nominal seconds between two calls; the wait doubles after each failure, and jitter keeps gateways apart."""
FORGET_SECONDS = 120.0
"""Time without a sign of the API after which a watched Secret does not count as known: more than a kubelet needs to write it."""


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


class Metadata(msgspec.Struct, frozen=True):
    """Metadata of an object of the API."""

    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class Resource(msgspec.Struct, frozen=True):
    """An object of the API. Subclasses add the fields that they read."""

    metadata: Metadata


class _List(msgspec.Struct, frozen=True):
    metadata: Metadata
    items: list[Any]


class _Status(msgspec.Struct, frozen=True):
    message: str = "no reason was given"


T = TypeVar("T", bound=Resource)


class Selected(msgspec.Struct, frozen=True):
    """Which objects are followed."""

    name: str
    """For the log, such as ``endpoints of engines``."""
    list_call: Callable[[ApiClient], Callable[..., Any]]
    """Returns the method of the client that lists objects of this kind in a namespace."""
    selector: Mapping[str, str]
    """``label_selector`` or ``field_selector`` of the method."""
    namespace: str | None = None
    """None: that of the credentials."""


class Watcher(Generic[T]):
    """Lists objects once and watches them then; blocks, so it runs in a thread of its own."""

    def __init__(
        self,
        selected: Selected,
        kind: type[T],
        found: Callable[[Collection[T]], None],
        *,
        access: Callable[[], Access] = lambda: find_access(os.environ),
        watch_seconds: int = WATCH_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """``found`` gets all objects after each change of theirs or of their version, and after each watch that ended regularly."""
        self._selected, self._kind, self._connect, self._found = selected, kind, access, found
        self._watch_seconds, self._silence_seconds = watch_seconds, silence_seconds
        self._wait = SHORTEST_WAIT
        self._known: dict[str, T] = {}
        self._version: str | None = None  # resourceVersion of the last change; None: list before watching
        self._access: Access | None = None  # None: read the credentials again
        self._watch: Watch | None = None
        self._stopped = threading.Event()

    def start(self) -> threading.Thread:
        """Run in a thread, a daemon: a call that hangs must not keep the gateway from ending."""
        thread = threading.Thread(target=self.run, name=self._selected.name, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """End :meth:`run` from another thread."""
        self._stopped.set()
        if (watch := self._watch) is not None:
            watch.stop()

    def run(self) -> None:
        """List and watch until :meth:`stop`."""
        while not self._stopped.is_set():
            try:
                for _ in self._changes():
                    self._wait = SHORTEST_WAIT
                    self._found(self._known.values())
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
            logger.warning("%s: %s; the last known state stays in use", self._selected.name, message)

    def _disconnect(self) -> None:
        if self._access is not None:
            self._access.client.close()
        self._access = None

    def _changes(self) -> Iterator[None]:
        """Yield each time the objects or their version changed, until the watch has ended, and then once more."""
        if self._access is None:
            self._access = self._connect()
        list_objects = self._selected.list_call(self._access.client)
        namespace = self._selected.namespace or self._access.namespace
        if self._version is None:
            response = list_objects(
                namespace, **self._selected.selector, _request_timeout=self._silence_seconds, _preload_content=False
            )
            if response.status != 200:
                raise ApiException(status=response.status, body=response.data)
            # the package's own models refuse a slice without endpoints
            listed = msgspec.json.decode(response.data, type=_List)
            items = [msgspec.convert(item, self._kind) for item in listed.items]
            self._known = {item.metadata.name: item for item in items}
            self._version = listed.metadata.resource_version
            yield
        began, self._watch = time.monotonic(), Watch(return_type="object")
        for event in self._watch.stream(
            list_objects,
            namespace,
            **self._selected.selector,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=self._watch_seconds,
            _request_timeout=(self._silence_seconds, self._watch_seconds + self._silence_seconds),
        ):
            if event is None:
                raise ValueError("an event of the watch is not JSON")
            changed = msgspec.convert(event["raw_object"], self._kind)
            self._version = changed.metadata.resource_version
            if event["type"] == "DELETED":
                self._known.pop(changed.metadata.name, None)
            elif event["type"] != "BOOKMARK":
                self._known[changed.metadata.name] = changed
            yield
        if time.monotonic() - began > 1:  # a regular end without events is no failure
            yield


class _Secret(Resource, frozen=True):
    data: dict[str, str] | None = None


class WatchedSecret:
    """The newest content of one key of a Secret, as the API tells it."""

    def __init__(self, name: str, key: str, access: Callable[[], Access] = lambda: find_access(os.environ)) -> None:
        self.name = name
        self._key = key
        self._content: bytes | None = None  # b"": there is none any more
        self._seen = 0.0
        # an account that may read one Secret alone may list with this selector
        only = {"field_selector": f"metadata.name={name}"}
        selected = Selected(f"Secret {name}", lambda client: CoreV1Api(client).list_namespaced_secret, only)
        self._watcher = Watcher(selected, _Secret, self._take, access=access)

    def start(self) -> None:
        """Follow the Secret in a thread."""
        self._watcher.start()

    def stop(self) -> None:
        """End the thread, without waiting."""
        self._watcher.stop()

    def content(self) -> bytes | None:
        """The newest content, the same object until it changes; empty once the Secret is deleted; None before it was first read,
        and while the API has not answered for :data:`FORGET_SECONDS`."""
        return self._content if time.monotonic() - self._seen < FORGET_SECONDS else None

    def _take(self, secrets: Collection[_Secret]) -> None:
        data = next(((secret.data or {}).get(self._key, "") for secret in secrets), "")
        content = b64decode(data)
        if content != self._content and (content or self._content is not None):
            self._content = content
        self._seen = time.monotonic()


def _reason(error: ApiException) -> str:
    """Return status and message of an answer, or why there is none."""
    if not error.status:
        return str(error.reason).strip()
    try:
        message = msgspec.json.decode(error.body or b"{}", type=_Status).message
    except msgspec.MsgspecError:
        message = str(error.reason)
    return f"{error.status}: {message}"
