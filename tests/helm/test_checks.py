"""Values that contradict each other: the chart refuses them, and the message names the value to change."""

from __future__ import annotations

import pytest

from tests.helm.chart import Manifest, Values, helm, manifests, render

GPUS: Values = {"limits": {"nvidia.com/gpu": 2}}
CLAIM: Values = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}]}
CLAIMED: Values = CLAIM | {"resources": {"claims": [{"name": "gpu"}]}}


def refused(values: Values, words: str, name: str = "yardstick") -> None:
    with pytest.raises(helm().HelmError, match=words):
        render(values, name=name)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"device": "cuda"}, "0 GPUs and `device` is cuda.*nvidia.com/gpu"),
        ({"device": "cuda"} | CLAIM, "0 GPUs and `device` is cuda.*resources.claims"),
        ({"device": "cuda", "tensorParallel": 2}, "0 GPUs and `device` is cuda"),
        ({"device": "cuda", "tensorParallel": 4, "resources": GPUS}, "2 GPUs and `tensorParallel` is 4"),
        ({"device": "cuda", "resources": GPUS}, "2 GPUs and `tensorParallel` is 1"),
        (CLAIMED, "`resourceClaims`.*set `device` to cuda or to cpu"),
        ({"tensorParallel": 2, "expertParallel": 4, "resources": GPUS}, "`expertParallel` is 4, and must be 1 or .* which is 2"),
        ({"expertParallel": 2}, "`expertParallel` is 2"),
        ({"modelCache": {"readOnly": True}}, "set `modelCache.existingClaim`"),
        ({"modelCache": {"readOnly": True, "persistent": True}}, "set `modelCache.existingClaim`"),
        ({"autoscaling": {"enabled": True, "minReplicas": 5}}, "`autoscaling.minReplicas` is 5 and `maxReplicas` is 4; raise"),
        ({"tensorParallel": 2, "resources": GPUS, "lora": {"existingClaim": "a"}}, "`tensorParallel`; set it to 1"),
        ({"tensorParallel": 2, "device": "cpu", "lora": {"adapters": {"a": "/a"}}}, "`tensorParallel`; set it to 1"),
        ({"kvDtype": "fp8", "lora": {"root": "/adapters"}}, "`kvDtype: fp8`; set it to auto"),
    ],
)
def test_pools_that_cannot_work_are_refused(engine: Values, words: str) -> None:
    refused({"engine": engine}, f"the pool default.*{words}")
    refused({"pools": {"other": engine}}, f"the pool other.*{words}")


@pytest.mark.parametrize(
    "engine",
    [
        {"device": "cuda"} | CLAIMED,
        {"device": "cuda", "tensorParallel": 4} | CLAIMED,
        {"device": "cpu"} | CLAIMED,
        {"device": "cuda", "runtimeClassName": "nvidia"},
        {"device": "cuda", "resources": {"limits": {"vendor.example.com/gpu-memory": 8}}},
        {"device": "cpu", "tensorParallel": 2},
        {"device": "cuda", "tensorParallel": 2, "expertParallel": 2, "resources": GPUS},
    ],
)
def test_devices_that_the_chart_cannot_count_are_left_to_the_user(engine: Values) -> None:
    render({"engine": engine})


@pytest.mark.parametrize("both", [True, False])
def test_series_are_read_once(both: bool) -> None:
    values: Values = {"monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": both}}}
    if both:
        refused(values, "count it twice; enable one of them")
    else:
        render(values)


def test_gateways_have_a_range_of_pods() -> None:
    refused({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 20}}}, "`gateway.autoscaling.minReplicas` is 20.*raise")


@pytest.mark.parametrize("name", ["1st", "team.search"])
def test_names_are_names_of_services(name: str) -> None:
    refused({}, f"named {name}-yardstick.*set `fullnameOverride`", name=name)
    found = manifests({"fullnameOverride": "ranking"}, name=name)
    assert [m["metadata"]["name"] for m in found if m["kind"] == "Deployment"] == ["ranking", "ranking-redis"]
    with pytest.raises(helm().HelmValuesError):
        render({"fullnameOverride": name})


def test_long_names_stay_apart() -> None:
    """Two releases whose names begin with the same 40 characters."""

    def names(release: str) -> set[tuple[str, str]]:
        return {identity(manifest) for manifest in manifests({}, name=release)}

    long = "ranking-of-products-for-the-shop-in-country-"
    assert not names(f"{long}a") & names(f"{long}b")
    assert all(len(name) <= 63 for _, name in names(f"{long}a"))
    assert ("Deployment", "short-yardstick") in names("short")


def identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.mark.parametrize(
    "others",
    [{"auth": {"existingSecret": "keys"}}, {"auth": {"generateFirstKey": False, "keys": [{"name": "ci", "sha256": "ab" * 32}]}}],
)
def test_a_load_test_without_a_key_is_refused(others: Values) -> None:
    refused({"loadTest": {"enabled": True}} | others, "set `loadTest.keySecret`")
    for given in ({"keySecret": "mine"}, {"url": "https://elsewhere.example.com"}):
        render({"loadTest": {"enabled": True} | given} | others)
