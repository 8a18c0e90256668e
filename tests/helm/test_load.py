"""The load test as a Job of the release; ``tests/cluster`` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.helm.chart import Manifest, Values, helm, manifests, one, render
from yardstick_llm.loadgen.cli import app
from yardstick_llm.loadgen.scenario import load


def made(load_test: Values, others: Values | None = None) -> tuple[Manifest, list[Manifest]]:
    """The Job, and all objects of the release."""
    found = manifests({"loadTest": {"enabled": True} | load_test} | (others or {}))
    (job,) = [m for m in found if m["kind"] == "Job"]
    return job, found


def pod_of(job: Manifest) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]


def options(job: Manifest) -> dict[str, Any]:
    """The options of `yardstick load run`, as the program understands them."""
    (container,) = pod_of(job)["containers"]
    *python, command = container["command"][:-1]
    assert python == ["python", "-m", "yardstick_llm.loadgen"]
    run = get_command(app).commands[command]
    return run.make_context("run", [container["command"][-1], *container["args"]]).params


def test_the_scenario_is_one(tmp_path: Path) -> None:
    job, found = made({})
    (volume,) = [volume for volume in pod_of(job)["volumes"] if volume["name"] == "scenario"]
    file = tmp_path / "scenario.toml"
    file.write_text(one(found, "ConfigMap", volume["configMap"]["name"])["data"]["scenario.toml"])
    assert load(file).objectives == ("failures == 0",)


def test_workers_share_a_claim_and_start_together() -> None:
    job, _ = made({"workers": 3, "results": {"existingClaim": "results"}})
    name, given = job["metadata"]["name"], options(job)
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 3, 3)
    assert (given["worker"], str(given["together"])) == ("$(JOB_COMPLETION_INDEX)/3", f"/results/{name}/ready")
    assert str(given["out"]) == f"/results/{name}/$(JOB_COMPLETION_INDEX)"
    assert not given["log_records"]
    with pytest.raises(helm().HelmError, match="start together by a claim"):
        render({"loadTest": {"enabled": True, "workers": 3}})


def test_the_key_is_the_first_or_a_given_one() -> None:
    def key(load_test: Values, others: Values | None = None) -> Any:
        env = pod_of(made(load_test, others)[0])["containers"][0]["env"]
        return next((entry["valueFrom"]["secretKeyRef"] for entry in env if entry["name"] == "YARDSTICK_LOAD_KEY"), None)

    assert key({}) == {"name": "yardstick-first-key", "key": "key"}
    assert key({"keySecret": "mine", "keySecretKey": "k"}) == {"name": "mine", "key": "k"}
    assert key({"url": "https://elsewhere.example.com"}, {"auth": {"existingSecret": "keys"}}) is None


@pytest.mark.parametrize(
    ("load_test", "others"),
    [
        ({"run": "2"}, {}),
        ({"scenario": "name = 'other'"}, {}),
        ({"workers": 1, "deadlineSeconds": 60}, {}),
        ({"podLabels": {"a": "b"}}, {}),
        ({}, {"commonLabels": {"a": "b"}}),
        ({}, {"image": {"tag": "0.3.0"}}),
    ],
)
def test_a_change_makes_another_job(load_test: Values, others: Values) -> None:
    """Kubernetes refuses to change a Job."""
    assert made({})[0]["metadata"]["name"] == made({})[0]["metadata"]["name"] != made(load_test, others)[0]["metadata"]["name"]


@pytest.mark.parametrize("url", ["", "https://elsewhere.example.com"])
def test_it_may_read_metrics_of_gateways_and_engines(url: str) -> None:
    job, found = made({"url": url, "keySecret": "mine"})
    load = job["spec"]["template"]["metadata"]["labels"]
    egress = one(found, "NetworkPolicy", "yardstick-load")["spec"]["egress"]
    reached = {
        (rule["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"], rule["ports"][0]["port"])
        for rule in egress
        if "podSelector" in rule.get("to", [{}])[0]
    }
    assert reached == {("gateway", "http"), ("engine", "health")}
    admitted = [rule for rule in one(found, "NetworkPolicy", "yardstick-engine")["spec"]["ingress"] if admits(rule, load)]
    assert [rule["ports"] for rule in admitted] == [[{"port": "health", "protocol": "TCP"}]]
    off = one(manifests({}), "NetworkPolicy", "yardstick-engine")["spec"]["ingress"]
    assert not [rule for rule in off if admits(rule, load)]


def admits(rule: dict[str, Any], labels: dict[str, str]) -> bool:
    selectors = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
    return any(selector.items() <= labels.items() for selector in selectors)
