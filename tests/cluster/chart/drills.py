"""Drills: upgrades, kills, evictions and mistakes, one after another under load. They count failed requests; none may fail.

``python -m tests.cluster.chart.drills [NAME ...]`` (``make drills``) installs a release on the cluster that KUBECONFIG names, runs
the drills and deletes it. Each prints a line of JSON; the exit status is 1 if a request failed or a drill did not end as it should.
"""

from __future__ import annotations

import base64
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from kubernetes.client.exceptions import ApiException

from tests.cluster.chart.apiserver import ApiServer
from tests.cluster.chart.conftest import VALUES
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.load import Load
from tests.gateway.keys import entry

ENGINES = "yardstick-engine"
KILL = "import os; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
"""Ends all processes of a pod but the first, which then ends as well."""
NEW_ENGINE_SECONDS = 5
"""From the moment a new engine is ready to the moment it works."""
API_AWAY_SECONDS = 55
Drill = Callable[[Release], None]


@contextmanager
def undisturbed(ingress: IngressProxy, release: Release, *, repeat: bool = False, model: str = "yardstick-demo") -> Iterator[Load]:
    """Load during the block, and for a moment before and after it; no request of it may fail."""
    with Load(ingress.url, release.key, host=ingress.host, repeat=repeat, model=model) as load:
        wait_for(lambda: load.answered > 5, 30, "requests are answered before anything happens")
        yield load
        after = load.answered
        wait_for(lambda: load.answered > after + 5, 30, "requests are answered afterwards")
    assert not load.failures, load.failures


def eviction(release: Release) -> None:
    """An engine is evicted, as when its node is drained; the budget refuses a second one meanwhile."""
    assert release.evict("yardstick-engine-1")
    time.sleep(3)
    assert not release.evict("yardstick-engine-0"), "the budget lets only one go at a time"
    release.rolled_out(ENGINES)


def kill(release: Release) -> None:
    """All processes of an engine are killed."""
    release.run_in("yardstick-engine-0", "python", "-c", KILL)
    time.sleep(5)
    release.rolled_out(ENGINES)


def scaling(release: Release) -> None:
    """A third engine comes, is used, and goes."""
    release.scale(ENGINES, 3)
    wait_for(lambda: release.ready("yardstick-engine-2"), 120, "the new engine is ready")
    works = "yardstick_engine_computed_tokens_total"
    took = wait_for(lambda: release.engine_metric("yardstick-engine-2", works) > 0, 30, "the new engine computes")
    assert took < NEW_ENGINE_SECONDS, took
    release.scale(ENGINES, 2)
    wait_for(lambda: len(release.pods("engine")) == 2, 60, "one engine leaves")
    time.sleep(3)


def gateway_upgrade(release: Release) -> None:
    """An upgrade replaces the gateways."""
    release.upgrade({"gateway": {"podAnnotations": {"drill": uuid.uuid4().hex}}}, wait=False)
    release.deployed(release.name)
    time.sleep(5)


def engine_upgrade(release: Release) -> None:
    """An upgrade replaces the engines."""
    release.upgrade({"engine": {"podAnnotations": {"drill": uuid.uuid4().hex}}}, wait=False)
    release.rolled_out(ENGINES)


def wrong_tag(release: Release) -> None:
    """An upgrade to a tag that does not exist starts nothing and takes one engine at most; a rollback mends it."""
    before = release.revision()
    release.upgrade({"image": {"tag": "no-such-tag"}}, wait=False)
    for component in ("engine", "gateway"):
        wait_for(lambda component=component: release.waits_for_image(component), 120, f"a new {component} has no image")
    time.sleep(10)
    release.rollback(before)
    for pod in release.pods("engine"):  # https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#forced-rollback
        if not release.ready(pod):
            release.delete_pod(pod)
    release.rolled_out(ENGINES)
    release.deployed(release.name)


def api_away(release: Release) -> None:
    """The API server is killed, stays away, and comes back; then an engine is replaced."""
    server = ApiServer()
    server.kill()
    time.sleep(API_AWAY_SECONDS)
    server.start_again()
    release.delete_pod("yardstick-engine-0")
    time.sleep(5)
    release.rolled_out(ENGINES)


def key_mistakes(release: Release) -> None:
    """The key file gets two keys of one name, then a text that is no JSON, then what it had."""
    before = release.secret("yardstick-api-keys", "keys.json")
    twice = json.dumps({"keys": [*json.loads(before)["keys"], entry("second"), entry("second") | {"sha256": "ab" * 32}]})
    try:
        for file, metric in ((twice, "yardstick_key_file_problems"), ("{", "yardstick_key_file_stale")):
            replace_keys(release, file)
            pods = release.pods("gateway")

            def seen(pods: Sequence[str] = pods, metric: str = metric) -> bool:
                return all(release.gateway_metric(pod, metric) == 1 for pod in pods)

            wait_for(seen, 60, "every gateway has read the file")
            time.sleep(10)
            assert all(release.ready(pod) for pod in pods), "gateways stay in the Service"
    finally:
        replace_keys(release, before)


def replace_keys(release: Release, file: str) -> None:
    """Change the key file, with the command of docs/operations.md that makes kubelets write it at once."""
    secret = {"data": {"keys.json": base64.b64encode(file.encode()).decode()}}
    release.core.patch_namespaced_secret("yardstick-api-keys", release.namespace, secret)
    for pod in release.pods("gateway"):
        change = {"metadata": {"annotations": {"yardstick/keys": str(time.time())}}}
        release.core.patch_namespaced_pod(pod, release.namespace, change)


QUICK = [eviction, kill, scaling, gateway_upgrade]
LONG = [engine_upgrade, wrong_tag, key_mistakes]
DRILLS: dict[str, Drill] = {drill.__name__: drill for drill in (*QUICK, *LONG, api_away)}


def main(names: Sequence[str]) -> int:
    """Run the drills, all by default; returns the exit status."""
    if unknown := set(names) - set(DRILLS):
        print(f"no drill {', '.join(sorted(unknown))}; there are {', '.join(DRILLS)}", file=sys.stderr)
        return 2
    release = Release(f"yardstick-drills-{uuid.uuid4().hex[:6]}")
    failed = 0
    try:
        release.install(VALUES)
        with IngressProxy(release) as ingress:
            for name in names or DRILLS:
                began = time.monotonic()
                problem = ""
                with Load(ingress.url, release.key, host=ingress.host) as load:
                    try:
                        wait_for(lambda load=load: load.answered > 5, 30, "requests are answered before")
                        DRILLS[name](release)
                        after = load.answered
                        wait_for(lambda load=load, after=after: load.answered > after + 5, 30, "requests are answered after")
                    except (AssertionError, pytest.fail.Exception, ApiException, OSError) as error:
                        problem = str(error) or repr(error)
                failed += bool(load.failures or problem)
                told = {"drill": name, "seconds": round(time.monotonic() - began, 1), "answered": load.answered}
                print(
                    json.dumps(told | {"failed": load.failures.total(), "failures": load.failures, "problem": problem}), flush=True
                )
    finally:
        release.delete_namespace()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
