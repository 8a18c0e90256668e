"""Engines are restarted, hang and are replaced by another version while clients send requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.chart.drills import ENGINES, undisturbed
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, wait_for
from tests.cluster.chart.load import LABELS, Load

STOP_LOOP = "import os, signal; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), signal.SIGSTOP)"


@pytest.fixture
def only_engine(release: Release) -> Iterator[str]:
    release.scale(ENGINES, 1)
    wait_for(lambda: release.pods("engine") == ["yardstick-engine-0"], 60, "one engine is left")
    try:
        yield "yardstick-engine-0"
    finally:
        release.scale(ENGINES, 2)
        release.rolled_out(ENGINES)


def test_the_only_engine_is_restarted(ingress: IngressProxy, release: Release, only_engine: str) -> None:
    """Gateways stay in the Service: cached answers continue, other requests wait and get a 503 in words at most."""
    with (
        Load(ingress.url, release.key, host=ingress.host, repeat=True) as cached,
        Load(ingress.url, release.key, host=ingress.host, callers=2) as fresh,
    ):
        wait_for(lambda: cached.hits == cached.items and fresh.answered > 5, 30, "requests are answered before anything happens")
        before = cached.answered
        release.delete_pod(only_engine)
        time.sleep(5)
        addresses = release.core.read_namespaced_endpoints(release.name, release.namespace).subsets[0].addresses
        assert len(addresses) == 2, "both gateways are ready without an engine"
        release.rolled_out(ENGINES)
        after = fresh.answered
        wait_for(lambda: fresh.answered > after + 5, 30, "requests are answered afterwards")
        assert cached.answered > before + 20
    assert not cached.failures, cached.failures
    assert all(failure.startswith("503: ") for failure in fresh.failures), fresh.failures


def test_an_engine_whose_loop_stands_still_is_restarted(ingress: IngressProxy, release: Release) -> None:
    def restarts() -> int:
        status = release.core.read_namespaced_pod_status("yardstick-engine-0", release.namespace).status
        return int(status.container_statuses[0].restart_count)

    before = restarts()
    with undisturbed(ingress, release):
        release.run_in("yardstick-engine-0", "python", "-c", STOP_LOOP)
        wait_for(lambda: restarts() > before, 120, "the liveness probe restarts the container")
        release.rolled_out(ENGINES)


Scores = list[float]
BODY = {"query": "Query: red shoes\nItem: ", "items": [f"shoe {i}\nRelevant:" for i in range(6)], "labels": LABELS}


class Answers:
    """The scores of one request, asked for again and again."""

    def __init__(self, ingress: IngressProxy, release: Release) -> None:
        headers = {"host": ingress.host, "authorization": f"Bearer {release.key}"}
        self._client = httpx.Client(base_url=ingress.url, headers=headers, timeout=60)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seen: list[Scores | str] = []
        """Answers, and the errors of requests that failed."""

    def ask(self, **headers: str) -> Scores:
        answer = self._client.post("/v1/score", json=BODY, headers=headers).raise_for_status().json()
        return [score for scores in answer["scores"] for score in scores]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.seen.append(self.ask())
            except httpx.HTTPError as error:
                self.seen.append(str(error))

    def __enter__(self) -> Answers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._client.close()


def equal(answer: Scores | str, other: Scores) -> int:
    """How many scores are equal but for rounding in float32."""
    assert not isinstance(answer, str), answer
    return sum(abs(one - two) < 1e-5 for one, two in zip(answer, other, strict=True))


@pytest.mark.slow
def test_a_version_is_replaced_by_another_pool(ingress: IngressProxy, release: Release) -> None:
    """The recipe of docs/operations.md. Another number format stands for another version: it has another fingerprint.

    Its scores depend a little on what else a step computes, and are never those of float32."""
    green = {"replicas": 2, "dtype": "bfloat16"}
    try:
        with undisturbed(ingress, release), Answers(ingress, release) as answers:
            blue = answers.ask(**{"cache-control": "no-cache"})
            release.upgrade({"pools": {"green": green}})
            release.rolled_out("yardstick-engine-green")
            release.upgrade({"engine": {"enabled": False}})
            wait_for(lambda: not [pod for pod in release.pods("engine") if "green" not in pod], 60, "the old pool is gone")
            new = answers.ask(**{"cache-control": "no-cache"})
            wait_for(lambda: answers.seen[-1] == new, 30, "the cache has the new version's results")
        assert {equal(answer, blue) for answer in [*answers.seen, new]} == {0, len(blue)}, "each answer is of one version"
    finally:
        old = {f"Pod/{ENGINES}-{place}" for place in range(2)}  # a new StatefulSet cannot have their names while they terminate
        if not release.objects(("apps/v1", "StatefulSet")) & {f"StatefulSet/{ENGINES}"}:
            wait_for(lambda: not release.objects(("v1", "Pod")) & old, 90, "the pods of the old pool are deleted")
        release.upgrade({"engine": {"enabled": True}})
        release.rolled_out(ENGINES)
        release.upgrade({"pools": {"green": {"enabled": False}}})
