"""Engine pods of a pool: image, device, names, inherited values, volumes and updates."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import BARE, GITOPS, GPU, Manifest, Values, helm, manifests, one, render

LONG = "yardstick-of-a-team-with-a-long-release-name"
GPUS: Values = {"limits": {"nvidia.com/gpu": 2}}


def engine_of(found: list[Manifest], name: str = "yardstick-engine") -> dict[str, Any]:
    """The pod of a pool."""
    return one(found, "StatefulSet", name)["spec"]["template"]["spec"]


def container_of(values: Values, name: str = "yardstick-engine") -> dict[str, Any]:
    (container,) = engine_of(manifests(values), name)["containers"]
    return container


@pytest.mark.parametrize(
    ("image", "engine", "tag"),
    [
        ({}, {}, "0.2.0"),
        ({"tag": "0.2.1"}, {}, "0.2.1"),
        ({"tag": "0.2.1"}, {"device": "cuda", "runtimeClassName": "nvidia"}, "0.2.1-cuda"),
        ({"tag": "0.2.1"}, {"resources": GPUS, "tensorParallel": 2}, "0.2.1-cuda"),
        ({"tag": "0.2.1"}, {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, "0.2.1-cuda"),
        ({"tag": "0.2.1"}, {"variant": "cuda"}, "0.2.1-cuda"),
        ({"tag": "0.2.1"}, {"tag": "mine", "variant": "cuda"}, "mine"),
    ],
)
def test_a_tag_keeps_the_variant(image: Values, engine: Values, tag: str):
    assert container_of({"image": image, "engine": engine})["image"] == f"localhost/yardstick-engine:{tag}"


@pytest.mark.parametrize(("engine", "flags"), [({}, []), (GPU["engine"], ["--device=cuda"]), ({"device": "cpu"}, ["--device=cpu"])])
def test_a_gpu_in_the_limits_is_demanded(engine: Values, flags: list[str]):
    """Without the flag an engine that finds no GPU would serve on the CPU."""
    assert [argument for argument in container_of({"engine": engine})["args"] if argument.startswith("--device")] == flags


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


@pytest.mark.parametrize(
    "engine",
    [
        {"tensorParallel": 2},
        {"tensorParallel": 2, "resources": {"limits": {"nvidia.com/gpu": 1}}},
        {"resources": GPUS},
        {"resources": GPUS, "tensorParallel": 2, "device": "cpu"},
    ],
)
def test_gpus_that_do_not_fit_are_refused(engine: Values):
    with pytest.raises(helm().HelmError, match=r"the pool default has \d? ?GPUs.*set"):
        render({"engine": engine})


def test_processes_of_a_model_share_memory():
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    for engine in ({"tensorParallel": 2, "resources": GPUS}, {"tensorParallel": 2, "device": "cpu"}):
        spec = engine_of(manifests({"engine": engine}))
        assert shared in spec["volumes"]
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]
    assert shared not in engine_of(manifests({}))["volumes"]


def test_caches_are_not_on_the_volume_of_the_models():
    """The volume may be a shared claim that is mounted read-only."""
    for values, read_only in (({}, False), (BARE, False), (GITOPS, True)):
        spec = engine_of(manifests(values))
        (container,) = spec["containers"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert mounts["/models"].get("readOnly", False) == read_only
        assert {"name": "cache", "emptyDir": {}} in spec["volumes"]
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        for name in ("HF_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
            assert variables[name].startswith("/cache")
        assert variables["HF_HUB_CACHE"] == "/models/huggingface/hub"
        assert ("HF_HUB_OFFLINE" in variables) == read_only
        claims = [volume["persistentVolumeClaim"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
        assert all(claim.get("readOnly", False) == read_only for claim in claims)


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


def test_a_pool_can_be_updated_in_part():
    engine = {"updateStrategy": {"partition": 3}}
    found = manifests({"engine": engine, "pools": {"hand": {"updateStrategy": {"type": "OnDelete"}}}})
    strategies = [one(found, "StatefulSet", f"yardstick-engine{name}")["spec"]["updateStrategy"] for name in ("", "-hand")]
    assert strategies == [{"type": "RollingUpdate", "rollingUpdate": {"partition": 3}}, {"type": "OnDelete"}]


def test_a_hung_loop_is_restarted_within_a_minute():
    """/livez reports a loop that has stood still for 30 s (engine/server/loop_client.py)."""
    probe = container_of({})["livenessProbe"]
    assert probe["httpGet"] == {"path": "/livez", "port": "health"}
    assert probe["periodSeconds"] * probe["failureThreshold"] <= 30


def test_gateways_wait_for_the_slowest_pool():
    found = manifests({"pools": {"slow": {"startupSeconds": 7200}}})
    assert one(found, "Deployment", "yardstick")["spec"]["progressDeadlineSeconds"] > 7200


def test_servers_listen_on_ipv4_and_ipv6():
    found = manifests({})
    assert "--host=*" in engine_of(found)["containers"][0]["args"]
    (gateway,) = one(found, "Deployment", "yardstick")["spec"]["template"]["spec"]["containers"]
    assert {"name": "YARDSTICK_HOST", "value": "*"} in gateway["env"]


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


def test_adapters_are_off_by_default():
    container = container_of({})
    assert not [argument for argument in container["args"] if "lora" in argument]
    assert "adapters" not in {mount["name"] for mount in container["volumeMounts"]}


def test_adapters_come_from_a_claim_and_by_name():
    lora = {
        "adapters": {"support": "/models/support", "sql": "org/sql-lora"},
        "existingClaim": "tuned",
        "root": "/adapters",
        "maxLoras": 32,
        "maxLorasDevice": 8,
        "maxLoraRank": 128,
        "modules": "lm_head",
    }
    pod = engine_of(manifests({"engine": {"lora": lora}}))
    (container,) = pod["containers"]
    assert [argument for argument in container["args"] if "lora" in argument] == [
        "--lora=sql=org/sql-lora",
        "--lora=support=/models/support",
        "--lora-directory=/adapters",
        "--lora-root=/adapters",
        "--max-loras=32",
        "--max-loras-device=8",
        "--max-lora-rank=128",
        "--lora-modules=lm_head",
    ]
    assert {"name": "adapters", "mountPath": "/adapters", "readOnly": True} in container["volumeMounts"]
    assert {"name": "adapters", "persistentVolumeClaim": {"claimName": "tuned", "readOnly": True}} in pod["volumes"]
    own = container_of({"engine": {"lora": lora}, "pools": {"b": {"lora": {"directory": "/models/tuned"}}}}, "yardstick-engine-b")
    assert "--lora-directory=/models/tuned" in own["args"]


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


def test_removed_values_of_adapters_leave_them_off():
    """Helm removes a value that is null, and a pool may have an empty group."""
    lora = {"existingClaim": None, "directory": None}
    assert not [argument for argument in container_of({"engine": {"lora": lora}})["args"] if "lora" in argument]
    found = container_of({"pools": {"b": {"lora": {}}}}, "yardstick-engine-b")
    assert not [argument for argument in found["args"] if "lora" in argument]


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


@pytest.mark.parametrize(
    "lora", [{"adapters": {"a:b": "/x"}}, {"directory": "x"}, {"maxLoraRank": 129}, {"modules": "norm"}, {"loras": 1}]
)
def test_wrong_values_of_adapters_are_errors(lora: Values):
    with pytest.raises(helm().HelmValuesError):
        render({"engine": {"lora": lora}})
