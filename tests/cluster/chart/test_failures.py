"""Requests succeed while parts of the cluster fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kubernetes.client.exceptions import ApiException

from tests.cluster.chart.apiserver import ApiServer
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.load import Load

ENGINES = "yardstick-engine"
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


def test_an_engine_pod_is_evicted_as_a_drained_node_does(ingress: IngressProxy, release: Release):
    def evict(pod: str) -> None:
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": release.namespace}}
        release.core.create_namespaced_pod_eviction(pod, release.namespace, body)

    with undisturbed(ingress, release):
        evict("yardstick-engine-1")
        time.sleep(3)
        with pytest.raises(ApiException) as refused:
            evict("yardstick-engine-0")
        assert refused.value.status == 429, "the budget lets only one go at a time"
        release.rolled_out(ENGINES)


def test_an_engine_is_killed(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.run_in("yardstick-engine-0", "python", "-c", KILL)
        time.sleep(5)
        release.rolled_out(ENGINES)


def test_more_engines_are_used_and_fewer_lose_nothing(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.scale(ENGINES, 3)
        wait_for(lambda: release.ready("yardstick-engine-2"), 120, "the new engine is ready")
        works = "yardstick_engine_computed_tokens_total"
        took = wait_for(lambda: release.engine_metric("yardstick-engine-2", works) > 0, 30, "the new engine computes")
        assert took < NEW_ENGINE_SECONDS
        release.scale(ENGINES, 2)
        wait_for(lambda: len(release.pods("engine")) == 2, 60, "one engine leaves")
        time.sleep(3)


def test_the_gateways_are_rolled_out(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.restart("yardstick")
        release.deployed("yardstick")
        time.sleep(5)


@pytest.mark.slow
def test_the_engines_are_rolled_out(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release):
        release.restart(ENGINES, "stateful_set")
        release.rolled_out(ENGINES)


def test_redis_is_deleted(ingress: IngressProxy, release: Release):
    with undisturbed(ingress, release, repeat=True) as load:
        wait_for(lambda: load.hits == load.items, 20, "the cache answers")
        (old,) = release.pods("redis")
        assert results_in(release, old) >= load.items
        release.delete_pod(old)
        wait_for(lambda: len(set(release.pods("redis")) - {old}) == 1, 30, "another Redis")
        (new,) = set(release.pods("redis")) - {old}
        wait_for(lambda: results_in(release, new) >= load.items, 60, "the new Redis, which began empty, is written to")
        load.hits = 0
        wait_for(lambda: load.hits == load.items, 20, "the cache answers again")


def results_in(release: Release, pod: str) -> int:
    """Scores that a Redis pod holds; 0 while it does not run."""
    count = "REDISCLI_AUTH=$(cat /etc/redis/password) redis-cli --scan --pattern '*:score:*' | wc -l"
    *_, told = release.run_in(pod, "sh", "-c", count).split() or [""]
    return int(told) if told.isdigit() else 0


def test_the_apiserver_is_killed(ingress: IngressProxy, release: Release, apiserver: ApiServer):
    with undisturbed(ingress, release) as load:
        apiserver.kill()
        time.sleep(2)
        before = load.answered
        wait_for(lambda: load.answered > before + 20, 30, "requests are answered without the apiserver")
        apiserver.start_again()
    with undisturbed(ingress, release):
        release.delete_pod("yardstick-engine-0")
        time.sleep(5)
        release.rolled_out(ENGINES)
