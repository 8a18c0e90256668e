"""Requests succeed while parts of the cluster fail."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.chart.apiserver import ApiServer
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, kubectl, wait_for
from tests.cluster.chart.load import Load

ENGINES = "statefulset/yardstick-engine"
KILL = "import os; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
"""Ends all processes of a pod but the first, which then ends as well."""
NEW_ENGINE_SECONDS = 5
"""From the moment a new engine is ready to the moment it works."""


@contextmanager
def undisturbed(ingress: IngressProxy, release: Release, *, repeat: bool = False) -> Iterator[Load]:
    """Load during the block, and for a moment before and after it; no request of it may fail."""
    with Load(ingress.url, release.key, host=ingress.host, repeat=repeat) as load:
        wait_for(lambda: load.answered > 5, 30, "requests are answered before anything happens")
        yield load
        after = load.answered
        wait_for(lambda: load.answered > after + 5, 30, "requests are answered afterwards")
    assert not load.failures, load.failures


def test_an_engine_pod_is_deleted(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.kubectl("delete", "pod", "yardstick-engine-0", "--wait=false")
        time.sleep(5)
        release.rolled_out(ENGINES)


def test_an_engine_pod_is_evicted_as_a_drained_node_does(ingress: IngressProxy, release: Release):
    eviction = {
        "apiVersion": "policy/v1beta1",
        "kind": "Eviction",
        "metadata": {"name": "yardstick-engine-1", "namespace": release.namespace},
    }
    with undisturbed(ingress, release):
        path = f"/api/v1/namespaces/{release.namespace}/pods/yardstick-engine-1/eviction"
        kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))
        refused = eviction | {"metadata": {"name": "yardstick-engine-0", "namespace": release.namespace}}
        time.sleep(3)
        second = kubectl("create", "--raw", path.replace("-1/", "-0/"), "-f", "-", input=json.dumps(refused), check=False)
        assert second == "", "the budget lets only one go at a time"
        release.rolled_out(ENGINES)


def test_an_engine_is_killed(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.kubectl("exec", "yardstick-engine-0", "--", "python", "-c", KILL)
        time.sleep(5)
        release.rolled_out(ENGINES)


def test_an_engine_pod_is_torn_away(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.kubectl("delete", "pod", "yardstick-engine-1", "--grace-period=0", "--force")
        time.sleep(5)
        release.rolled_out(ENGINES)


def test_more_engines_are_used_and_fewer_lose_nothing(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.kubectl("scale", ENGINES, "--replicas=3")
        release.kubectl("wait", "pod/yardstick-engine-2", "--for=condition=Ready", "--timeout=120s")
        works = "yardstick_engine_computed_tokens_total"
        took = wait_for(lambda: release.engine_metric("yardstick-engine-2", works) > 0, 30, "the new engine computes")
        assert took < NEW_ENGINE_SECONDS
        release.kubectl("scale", ENGINES, "--replicas=2")
        wait_for(lambda: len(release.pods("engine")) == 2, 60, "one engine leaves")
        time.sleep(3)


def test_the_gateways_are_rolled_out(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.kubectl("rollout", "restart", "deployment/yardstick")
        release.rolled_out("deployment/yardstick")
        time.sleep(5)


def test_redis_is_deleted(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release, repeat=True) as load:
        wait_for(lambda: load.hits == load.items, 20, "the cache answers")
        (old,) = release.pods("redis")
        assert results_in(release, old) >= load.items
        release.kubectl("delete", "pod", old, "--wait=false")
        wait_for(lambda: len(set(release.pods("redis")) - {old}) == 1, 30, "another Redis")
        (new,) = set(release.pods("redis")) - {old}
        wait_for(lambda: results_in(release, new) >= load.items, 60, "the new Redis, which began empty, is written to")
        load.hits = 0
        wait_for(lambda: load.hits == load.items, 20, "the cache answers again")


def results_in(release: Release, pod: str) -> int:
    """Scores that a Redis pod holds; 0 while it does not run."""
    count = "REDISCLI_AUTH=$(cat /etc/redis/password) redis-cli --scan --pattern '*:score:*' | wc -l"
    told = release.kubectl("exec", pod, "--", "sh", "-c", count, check=False).split()
    return int(told[-1]) if told else 0


def test_the_apiserver_is_killed(ingress: IngressProxy, release: Release, apiserver: ApiServer):
    with undisturbed(ingress, release) as load:
        apiserver.kill()
        time.sleep(2)
        before = load.answered
        wait_for(lambda: load.answered > before + 20, 30, "requests are answered without the apiserver")
        apiserver.start_again()
    with undisturbed(ingress, release):
        release.kubectl("delete", "pod", "yardstick-engine-0", "--wait=false")
        time.sleep(5)
        release.rolled_out(ENGINES)
