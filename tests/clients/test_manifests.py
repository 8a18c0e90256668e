"""The chart's manifests for other controllers, validated by published models of their resource definitions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.clients.environments import run_client
from tests.helm.chart import EVERYTHING, GITOPS, ROOT, Manifest, Values, manifests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = {"HTTPRoute", "ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject"}
OLDER: Values = {"gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "timeout": ""}}}


def errors(found: list[Manifest], folder: Path) -> list[str]:
    file = folder / "manifests.json"
    file.write_text(json.dumps(found))
    told: list[str] = run_client("manifests_validate.mjs", str(file))
    return told


def beside_a_pool() -> Values:
    (text,) = re.findall(r"```yaml\n(# values of the chart\n.*?)```", (ROOT / "docs" / "operations.md").read_text(), flags=re.S)
    values: Values = yaml.safe_load(text)
    return values


def test_other_controllers_take_the_charts_manifests(tmp_path: Path) -> None:
    rendered = [manifest for values in (EVERYTHING, GITOPS, OLDER, beside_a_pool()) for manifest in manifests(values)]
    found = [manifest for manifest in rendered if manifest["kind"] in KINDS]
    assert {manifest["kind"] for manifest in found} == KINDS
    assert errors(found, tmp_path) == []
