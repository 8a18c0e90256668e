"""Engine pods of a pool: image, device, names, inherited values, volumes and updates; and pools that cannot work."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.helm.chart import GROUPS, ROOT, Manifest, Values, helm, manifests, one, render

LONG = "yardstick-of-a-team-with-a-long-release-name"
GPUS: Values = {"limits": {"nvidia.com/gpu": 2}}


def engine_of(found: list[Manifest], name: str = "yardstick-engine") -> dict[str, Any]:
    return one(found, "StatefulSet", name)["spec"]["template"]["spec"]


def container_of(values: Values, name: str = "yardstick-engine") -> dict[str, Any]:
    (container,) = engine_of(manifests(values), name)["containers"]
    return container


GATEWAY, CPU, CUDA = (f"sha256:{digit * 64}" for digit in "123")
DIGESTS = {"gateway": GATEWAY, "engine-cpu": CPU, "engine-cuda": CUDA}


@pytest.mark.parametrize(
    ("image", "engine", "images"),
    [
        ({}, {}, ["gateway:0.2.0", "engine:0.2.0"]),
        ({"tag": "0.2.1"}, {"device": "cuda", "runtimeClassName": "nvidia"}, ["gateway:0.2.1", "engine:0.2.1-cuda"]),
        ({"tag": "0.2.1"}, {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, ["gateway:0.2.1", "engine:0.2.1-cuda"]),
        ({"tag": "0.2.1"}, {"variant": "cuda"}, ["gateway:0.2.1", "engine:0.2.1-cuda"]),
        ({"tag": "0.2.1"}, {"tag": "mine", "variant": "cuda"}, ["gateway:0.2.1", "engine:mine"]),
        ({"digests": DIGESTS}, {}, [f"gateway:0.2.0@{GATEWAY}", f"engine:0.2.0@{CPU}"]),
        (
            {"digests": DIGESTS},
            {"resources": GPUS, "tensorParallel": 2},
            [f"gateway:0.2.0@{GATEWAY}", f"engine:0.2.0-cuda@{CUDA}"],
        ),
        ({"digests": DIGESTS, "tag": "0.2.1"}, {}, ["gateway:0.2.1", "engine:0.2.1"]),
        ({"digests": DIGESTS}, {"tag": "mine"}, [f"gateway:0.2.0@{GATEWAY}", "engine:mine"]),
        ({"digests": DIGESTS}, {"tag": "mine", "digest": CUDA}, [f"gateway:0.2.0@{GATEWAY}", f"engine:mine@{CUDA}"]),
    ],
)
def test_a_tag_keeps_the_variant_and_digests_of_a_release_hold_for_its_tags(image: Values, engine: Values, images: list[str]):
    found = manifests({"image": image, "engine": engine})
    (gateway,) = one(found, "Deployment", "yardstick")["spec"]["template"]["spec"]["containers"]
    (container,) = engine_of(found)["containers"]
    assert [gateway["image"], container["image"]] == [f"localhost/yardstick-{each}" for each in images]


@pytest.mark.parametrize(
    ("engine", "memory"),
    [
        ({}, "2Gi"),
        ({"resources": {"limits": {"memory": "4Gi"}}}, "4Gi"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, None),
        ({"model": "org/ranker"}, None),
    ],
)
def test_only_the_demo_model_has_a_memory_limit_by_default(engine: Values, memory: str | None):
    values: Values = {"engine": engine}
    assert container_of(values)["resources"]["limits"].get("memory") == memory
    notes = " ".join(render(values)["NOTES.txt"].split())
    assert ("Set engine.resources.limits.memory;" in notes) == (memory is None)


def test_spread_constraints_replace_the_default_ones():
    zone = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = zone | {"labelSelector": {"matchLabels": {"app": "other"}}}
    values: Values = {"engine": {"topologySpreadConstraints": [zone, own]}, "gateway": {"topologySpreadConstraints": [zone]}}
    for kind, name, expected in (("StatefulSet", "yardstick-engine", [zone, own]), ("Deployment", "yardstick", [zone])):
        spec = one(manifests(values), kind, name)["spec"]
        pods = {"labelSelector": {"matchLabels": spec["selector"]["matchLabels"]}}
        assert spec["template"]["spec"]["topologySpreadConstraints"] == [pods | constraint for constraint in expected]


def test_the_example_of_a_mixed_pool():
    found = manifests(yaml.safe_load((ROOT / "examples" / "kubernetes" / "mixed-pool.yaml").read_text()), "v1.37.0")
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    pools = {name: engine_of(found, f"yardstick-engine{name}") for name in ("", "-older", "-cpu")}
    resources = {name: pod["containers"][0]["resources"] for name, pod in pools.items()}
    (claim,) = [manifest["metadata"]["name"] for manifest in found if manifest["kind"] == "ResourceClaimTemplate"]
    assert pools[""]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": claim}]
    assert resources[""]["claims"] == [{"name": "gpu"}]
    assert resources["-older"]["limits"]["nvidia.com/gpu"] == 1
    assert all("resourceClaims" not in pools[name] and not resources[name].get("claims") for name in ("-older", "-cpu"))
    assert [pod["containers"][0]["image"].endswith("-cuda") for pod in pools.values()] == [True, True, False]
    assert [len(pod.get("tolerations", [])) for pod in pools.values()] == [1, 1, 0]
    assert all("memory" in each["limits"] for each in resources.values())


def test_a_cpu_pool_beside_a_gpu_default():
    own = {
        "model": "org/small",
        "resources": {"limits": {}},
        "nodeSelector": {},
        "podLabels": {},
        "tensorParallel": 1,
        "modelCache": {"persistent": False},
        "spread": False,
    }
    gpu = {
        "resources": {"limits": {"nvidia.com/gpu": 2}},
        "nodeSelector": {"gpu": "h200"},
        "podLabels": {"cost": "gpu"},
        "tensorParallel": 2,
        "modelCache": {"persistent": True, "size": "200Gi"},
    }
    found = manifests({"engine": gpu, "pools": {"cpu": own}})
    spec = engine_of(found, "yardstick-engine-cpu")
    (container,) = spec["containers"]
    assert container["image"].endswith(":0.2.0")
    assert container["resources"] == {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {}}
    assert not [argument for argument in container["args"] if argument.startswith("--device")]
    assert "nodeSelector" not in spec
    assert "topologySpreadConstraints" not in spec
    pool = one(found, "StatefulSet", "yardstick-engine-cpu")["spec"]
    assert "cost" not in pool["template"]["metadata"]["labels"]
    assert "volumeClaimTemplates" not in pool
    assert one(found, "StatefulSet", "yardstick-engine")["spec"]["volumeClaimTemplates"]


@pytest.mark.parametrize("pool", ["default", "a", "a-pool-of-20-letters"])
def test_names_leave_room_for_the_labels_of_revisions(pool: str):
    values: Values = {} if pool == "default" else {"engine": {"enabled": False}, "pools": {pool: {}, pool[:-1] + "b": {}}}
    sets = [m for m in manifests(values, name=LONG) if m["kind"] == "StatefulSet"]
    names = [m["metadata"]["name"] for m in sets]
    assert all(len(name) + len("-0123456789") <= 63 for name in names)
    assert len(set(names)) == len(names)
    assert [m["spec"]["serviceName"] for m in sets] == names
    assert [m["metadata"]["name"] for m in manifests({"pools": {"b": {}}}) if m["kind"] == "StatefulSet"] == [
        "yardstick-engine-b",
        "yardstick-engine",
    ], "short names stay as they were"


def test_the_user_of_pods_can_be_left_to_the_cluster():
    """As OpenShift wants it, which gives each namespace its own range of users."""
    found = manifests({"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}})
    for manifest in found:
        if manifest["kind"] in ("StatefulSet", "Deployment"):
            security = manifest["spec"]["template"]["spec"]["securityContext"]
            assert security == {
                "runAsNonRoot": True,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            }


@pytest.mark.parametrize(
    ("own", "flags"),
    [
        ({"maxLoras": 8}, ["--lora=sql=org/sql-lora", "--lora-directory=/adapters", "--max-loras=8"]),
        ({}, ["--lora=sql=org/sql-lora", "--lora-directory=/adapters", "--max-loras=4"]),
        ({"adapters": {"own": "org/own"}}, ["--lora=own=org/own", "--lora-directory=/adapters", "--max-loras=4"]),
        ({"adapters": {}, "existingClaim": ""}, ["--max-loras=4"]),
    ],
)
def test_pools_override_single_values_of_adapters(own: Values, flags: list[str]):
    """The directory is watched exactly where the claim is mounted."""
    lora = {"existingClaim": "tuned", "adapters": {"sql": "org/sql-lora"}, "maxLoras": 4}
    pod = engine_of(manifests({"engine": {"lora": lora}, "pools": {"b": {"lora": own}}}), "yardstick-engine-b")
    (container,) = pod["containers"]
    assert [argument for argument in container["args"] if "lora" in argument] == flags
    mounted = "adapters" in {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == ("adapters" in {volume["name"] for volume in pod["volumes"]}) == ("--lora-directory=/adapters" in flags)


def test_a_pool_with_another_model_inherits_nothing_of_the_first_model():
    engine = {
        "model": "org/ranker",
        "revision": "1f0c4a2",
        "lenvmModel": "org/lengths",
        "lenvmRevision": "v1",
        "servedName": "ranker",
        "quantize": "int8",
        "lora": {"existingClaim": "tuned", "adapters": {"sql": "org/sql-lora"}, "root": "/adapters", "maxLoras": 4},
    }
    found = manifests({"engine": engine, "pools": {"other": {"model": "org/other"}, "same": {"model": "org/ranker"}, "again": {}}})
    flags = {
        name: set(engine_of(found, f"yardstick-engine-{name}")["containers"][0]["args"]) for name in ("other", "same", "again")
    }
    assert flags["same"] == flags["again"] == set(engine_of(found)["containers"][0]["args"])
    dropped = {
        "--model=org/ranker",
        "--revision=1f0c4a2",
        "--lenvm-model=org/lengths",
        "--lenvm-revision=v1",
        "--name=ranker",
        "--lora=sql=org/sql-lora",
        "--lora-directory=/adapters",
        "--lora-root=/adapters",
    }
    assert flags["same"] - flags["other"] == dropped
    assert flags["other"] - flags["same"] == {"--model=org/other"}
    assert one(found, "Service", "yardstick-engine-other")["metadata"]["annotations"]["yardstick/model"] == "other"
    own = {"model": "org/other", "servedName": "ranker", "revision": "v2"}
    kept = container_of({"engine": engine, "pools": {"other": own}}, "yardstick-engine-other")["args"]
    assert {"--name=ranker", "--revision=v2"} <= set(kept)


LWS: Values = {"tensorParallel": 2, "groupSize": 2, "device": "cpu", "groupKind": "LeaderWorkerSet"}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def run_with_a_python_that_prints(container: dict[str, Any], folder: Path, **environment: str) -> list[str]:
    program = folder / "python"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    command = [*container["command"], *container["args"]]
    variables = {"PATH": f"{folder}:{os.environ['PATH']}"} | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_group_is_one_engine_to_gateways_and_updates(tmp_path: Path) -> None:
    """Of each rank one StatefulSet, in which a pod has the number of its group; and a LeaderWorkerSet."""
    found = manifests(GROUPS)
    sets = [one(found, "StatefulSet", f"yardstick-engine-rank-{rank}")["spec"] for rank in range(2)]
    ranks = one(found, "Service", "yardstick-engine-ranks")["spec"]
    served = one(found, "Service", "yardstick-engine")["spec"]["selector"]
    disruption = one(found, "PodDisruptionBudget", "yardstick-engine")["spec"]
    budget = disruption["selector"]["matchLabels"]
    policy = one(found, "NetworkPolicy", "yardstick-engine-ranks")["spec"]
    assert ranks["publishNotReadyAddresses"] is True, "rank 0 is not ready before the others have found it"
    for rank, each in enumerate(sets):
        labels = each["template"]["metadata"]["labels"]
        assert [selects(other["selector"]["matchLabels"], labels) for other in sets] == [rank == 0, rank == 1]
        assert selects(served, labels) == (rank == 0)
        for selector in (budget, ranks["selector"], policy["podSelector"]["matchLabels"]):
            assert selects(selector, labels)
        assert (each["serviceName"], each["replicas"], each["podManagementPolicy"]) == ("yardstick-engine-ranks", 2, "Parallel")
        container, *_ = each["template"]["spec"]["containers"]
        given = run_with_a_python_that_prints(container, tmp_path, HOSTNAME=f"yardstick-engine-rank-{rank}-13")
        address = "--dist-init-addr=yardstick-engine-rank-0-13.yardstick-engine-ranks:8102"
        assert given == ["-m", "yardstick_llm.engine", *container["args"], address]
        assert {"--tensor-parallel=16", "--nnodes=2", f"--node-rank={rank}"} <= set(given)
    assert disruption["maxUnavailable"] == 1, "of the pods of all ranks together, so that all evicted pods are of one group"
    assert disruption["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "of this group, the other pods may go too"
    among = [{"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}]
    assert (policy["ingress"], policy["egress"]) == ([{"from": among}], [{"to": among}])
    group = one(found, "LeaderWorkerSet", "yardstick-engine-lws-group")["spec"]["leaderWorkerTemplate"]
    served = one(found, "Service", "yardstick-engine-lws")["spec"]["selector"]
    leader, worker = (group[f"{name}Template"]["metadata"]["labels"] for name in ("leader", "worker"))
    assert (selects(served, leader), selects(served, worker), group["size"]) == (True, False, 4)
    target = one(found, "ScaledObject", "yardstick-engine-lws")["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "yardstick-engine-lws-group"}


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
        ({"device": "cuda", "resources": GPUS}, "2 GPUs and `tensorParallel` is 1"),
        (CLAIMED, "`resourceClaims`.*set `device` to cuda or to cpu"),
        ({"tensorParallel": 2, "expertParallel": 4, "resources": GPUS}, "`expertParallel` is 4, and must be 1 or .* which is 2"),
        ({"modelCache": {"readOnly": True, "persistent": True}}, "set `modelCache.existingClaim`"),
        ({"autoscaling": {"enabled": True, "minReplicas": 5}}, "`autoscaling.minReplicas` is 5 and `maxReplicas` is 4; raise"),
        ({"tensorParallel": 2, "resources": GPUS, "lora": {"existingClaim": "a"}}, "`tensorParallel`; set it to 1"),
        ({"tensorParallel": 2, "device": "cpu", "lora": {"adapters": {"a": "/a"}}}, "`tensorParallel`; set it to 1"),
        ({"tensorParallel": 3, "groupSize": 2, "device": "cpu"}, "`groupSize` is 2 and `tensorParallel` is 3; set"),
        (
            {"tensorParallel": 2, "groupSize": 2, "resources": GPUS},
            "2 GPUs and `tensorParallel` is 2 in groups of 2 pods;.* divided by",
        ),
        ({"tensorParallel": 2, "groupSize": 2, "device": "cpu", "autoscaling": {"enabled": True}}, "install LeaderWorkerSet"),
        (LWS | {"modelCache": {"persistent": True}}, "neither claims of its pods nor OnDelete; set"),
        (LWS | {"podDisruptionBudget": {"maxUnavailable": "50%"}}, "share of pods.* set the number of groups"),
        ({"kvDtype": "fp8", "lora": {"root": "/adapters"}}, "`kvDtype: fp8`; set it to auto"),
    ],
)
def test_pools_that_cannot_work_are_refused(engine: Values, words: str) -> None:
    refused({"engine": engine}, f"the pool default.*{words}")
    refused({"pools": {"other": engine}}, f"the pool other.*{words}")


@pytest.mark.parametrize("both", [True, False])
def test_series_are_read_once(both: bool) -> None:
    values: Values = {"monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": both}}}
    if both:
        refused(values, "count it twice; enable one of them")
    else:
        render(values)


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
