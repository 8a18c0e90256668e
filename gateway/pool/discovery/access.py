"""Access to the Kubernetes API with the pod's ServiceAccount or a kubeconfig, including its credential plugins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from kubernetes import config
from kubernetes.client import ApiClient, Configuration

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


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
            settings.proxy = None  # the API is beside the pod, whatever proxy the pod has for others
            return Access(ApiClient(settings), NAMESPACE_FILE.read_text().strip())
    except Exception as error:  # the package raises what its parsers raise, of many kinds
        raise AccessError(f"the credentials for Kubernetes cannot be read: {error}") from None
    raise AccessError(
        "this process does not run in a Kubernetes pod (KUBERNETES_SERVICE_HOST is not set), and KUBECONFIG names no file"
    )
