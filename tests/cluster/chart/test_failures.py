"""Requests succeed while parts of the cluster fail: the drills of drills.py, and what needs another load."""

from __future__ import annotations

import time

import pytest

from tests.cluster.chart.apiserver import ApiServer
from tests.cluster.chart.drills import ENGINES, LONG, QUICK, Drill, undisturbed
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, wait_for


@pytest.mark.parametrize("drill", [*QUICK, *(pytest.param(drill, marks=pytest.mark.slow) for drill in LONG)])
def test_a_drill_fails_no_request(ingress: IngressProxy, release: Release, drill: Drill) -> None:
    with undisturbed(ingress, release):
        drill(release)


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
