"""A release of the chart 0.1.0 with running pods becomes one of this chart while clients send requests."""

from __future__ import annotations

import uuid
from pathlib import Path

from tests.cluster.chart.conftest import VALUES
from tests.cluster.chart.ingress import IngressProxy
from tests.cluster.chart.kube import Release, first_chart
from tests.cluster.chart.test_failures import ENGINES, undisturbed
from tests.helm.chart import CHART, Values

SECRETS = [("yardstick-first-key", "key"), ("yardstick-engine-token", "token"), ("yardstick-api-keys", "keys.json")]
VERSION = next(line.split()[1] for line in (CHART / "Chart.yaml").read_text().splitlines() if line.startswith("version: "))
ENGINE = {key: value for key, value in VALUES["engine"].items() if key != "maxTotalTokens"}
FIRST: Values = VALUES | {
    "image": {"tag": VERSION},
    "engine": ENGINE | {"extraArgs": ["--max-total-tokens=16384"]},
}
"""Values that both charts have, with today's images: gateways and engines of 0.1.0 exchange other messages."""


def test_the_chart_of_version_0_1_0_is_upgraded_under_load(cluster: None, tmp_path: Path) -> None:
    release = Release(f"yardstick-test-{uuid.uuid4().hex[:6]}")
    try:
        release.install(FIRST, source=first_chart(tmp_path))
        before = [release.secret(*which) for which in [*SECRETS, ("yardstick-redis", "password")]]
        pods = {component: set(release.pods(component)) for component in ("gateway", "engine")}
        with IngressProxy(release) as ingress, undisturbed(ingress, release):
            release.upgrade({})
            release.deployed("yardstick")
            release.rolled_out(ENGINES)
        assert [release.secret(*which) for which in [*SECRETS, ("yardstick-redis", "password")]] == before
        assert not pods["gateway"] & set(release.pods("gateway")), "gateways have the new chart's manifest"
        assert set(release.pods("engine")) == pods["engine"]
        assert "yardstick-demo: scores and generates" in release.test()
    finally:
        release.delete_namespace()
