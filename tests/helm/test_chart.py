"""The chart without a cluster: what it renders, for several sets of values, on several versions of Kubernetes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.helm.chart import (
    BARE,
    CHART,
    EVERYTHING,
    EXTERNAL,
    GOLDEN,
    ROOT,
    SETS,
    Manifest,
    Values,
    golden,
    helm,
    manifests,
    one,
    render,
)
from tests.helm.readme import readme
from tests.helm.schema import OTHER_VALUES, schema
from yardstick_llm.engine import wire
from yardstick_llm.engine.server import metrics
from yardstick_llm.engine.server.options import options_of, parser
from yardstick_llm.engine.settings import EngineSettings, ServerSettings
from yardstick_llm.gateway.ops.metrics import KeySample, Telemetry, dropped_lines, dropped_spans, key_file
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.settings import PREFIX, Settings
from yardstick_llm.gateway.workers.queue import Capacity
from yardstick_llm.gateway.workers.workers import Workers

VERSIONS = ("v1.25.0", "v1.37.0")
OTHERS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "LeaderWorkerSet"}
"""Kinds that are not Kubernetes's own; ``tests/clients/test_manifests.py`` validates them."""
POD_KINDS = ("StatefulSet", "Deployment", "Pod", "Job")
ADDED = {"prepare", "sidecar"}
"""Containers that users add in the sets of values."""


def pods(found: list[Manifest]) -> list[dict[str, Any]]:
    templates = [m if m["kind"] == "Pod" else m["spec"]["template"] for m in found if m["kind"] in POD_KINDS]
    groups = [m["spec"]["leaderWorkerTemplate"] for m in found if m["kind"] == "LeaderWorkerSet"]
    templates += [group[template] for group in groups for template in ("leaderTemplate", "workerTemplate")]
    return [template["spec"] for template in templates]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}


def test_helm_has_nothing_to_say_about_it():
    report = helm().lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_kubernetes_takes_it(values: Values, version: str):
    for manifest in manifests(values, version):
        if manifest["kind"] not in OTHERS:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", SETS)
def test_it_renders_what_it_rendered(name: str):
    assert golden(SETS[name]) == (GOLDEN / f"{name}.yaml").read_text(), "if this is meant: make chart"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"engine": {"modle": "x"}}, "additional properties 'modle' not allowed"),
        ({"gateway": {"replicas": "two"}}, "got string, want integer"),
        ({"engine": {"topologySpreadConstraints": [{"topologyKey": "zone"}]}}, "missing properties 'maxSkew'"),
        ({"engine": {"dtype": "int8"}}, "value must be one of"),
        ({"engine": {"resources": {"limits": {"cpu": "lots"}}}}, "does not match pattern"),
        ({"pools": {"default": {}}}, "'not' failed"),
        ({"pools": {"Big": {}}}, "does not match pattern"),
        ({"gateway": {"settings": {"engines": "http://a"}}}, "additional properties 'engines' not allowed"),
        ({"gateway": {"settings": {"max_in_flight": 0}}}, "minimum"),
        ({"gateway": {"settings": {"access_log": False}}}, "value must be one of 'json', 'off'"),
        ({"gateway": {"settings": {"cors_origins": ["https://a"]}}}, "got array, want string"),
        ({"auth": {"keys": [{"name": "a", "sha256": "ys-notahash"}]}}, "does not match pattern"),
        ({"redis": {"url": "http://a"}}, "does not match pattern"),
    ],
)
def test_the_schema_refuses(values: Values, words: str):
    with pytest.raises(helm().HelmValuesError, match=re.escape(words)):
        render(values)


def test_values_may_be_removed_as_helm_allows():
    """``--set auth.keys=null`` leaves a value out."""
    rules = {"enabled": True, "extraLabels": None, "objectives": None}
    scaling = {"enabled": True, "fallback": None, "authenticationRef": None, "extraTriggers": None, "advanced": None}
    removed: Values = {
        "image": {"digests": None},
        "auth": {"keys": None},
        "gateway": {"settings": None},
        "monitoring": {"rules": rules},
    }
    assert manifests(removed | {"engine": {"autoscaling": scaling}})


def test_every_part_of_the_schema_is_strict():
    def objects(schema: Any) -> list[dict[str, Any]]:
        if isinstance(schema, list):
            return [found for part in schema for found in objects(part)]
        if not isinstance(schema, dict):
            return []
        own = [schema] if isinstance(schema.get("properties"), dict) else []
        return own + [found for part in schema.values() for found in objects(part)]

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert len(objects(schema)) > 15
    assert all(found.get("additionalProperties") is False for found in objects(schema))


def test_the_schema_knows_exactly_the_values():
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(values: Any, known: dict[str, Any], path: str) -> None:
        known = schema["definitions"][known["$ref"].rpartition("/")[2]] if "$ref" in known else known
        if not isinstance(values, dict) or "properties" not in known:
            return
        assert set(values) == set(known["properties"]) - {"global"}, path
        for key, value in values.items():
            check(value, known["properties"][key], f"{path}.{key}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["engine"]["resources"] = {"requests": {}, "limits": {}, "claims": []}
    values["engine"]["autoscaling"]["authenticationRef"] = {"name": "", "kind": ""}
    values["image"]["digests"] = {"gateway": "", "engine-cpu": "", "engine-cuda": ""}
    values["gateway"]["settings"] = dict.fromkeys(set(Settings.__struct_fields__) - set(OTHER_VALUES))
    check(values, schema, "")


def test_readme_and_schema_are_up_to_date():
    assert (CHART / "README.md").read_text() == readme(), "make chart"
    assert (CHART / "values.schema.json").read_text() == schema(), "make chart"


def test_gateways_may_read_endpoint_slices_and_nothing_else_but_their_keys():
    verbs = ["get", "list", "watch"]
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs}
    keys = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["yardstick-api-keys"], "verbs": verbs}
    fixed: Values = {"gateway": {"engines": ["http://10.0.0.1:8100"]}, "auth": {"watch": True}}
    for values, rules in ((SETS["default"], [slices]), (EVERYTHING, [slices, keys]), (fixed, [keys])):
        found = manifests(values)
        assert one(found, "Role", "yardstick")["rules"] == rules
        assert [m["metadata"]["name"] for m in found if "Cluster" in m["kind"]] == []
        binding = one(found, "RoleBinding", "yardstick")
        assert binding["roleRef"]["name"] == "yardstick"
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "yardstick", "namespace": "apps"}]
        assert one(found, "Deployment", "yardstick")["spec"]["template"]["spec"]["serviceAccountName"] == "yardstick"


def test_gateways_may_read_endpoint_slices_of_the_namespaces_that_they_are_given():
    engines = [
        "kubernetes://models/engines:8100",
        "kubernetes://models/others:8100",
        "kubernetes://engines:8100",
        "http://10.0.0.1",
    ]
    found = manifests({"gateway": {"engines": engines}})
    roles = {(m["metadata"].get("namespace"), m["metadata"]["name"]) for m in found if m["kind"] == "Role"}
    assert roles == {(None, "yardstick"), ("models", "apps-yardstick")}
    assert roles == {(m["metadata"].get("namespace"), m["roleRef"]["name"]) for m in found if m["kind"] == "RoleBinding"}
    for manifest in found:
        if manifest["kind"] == "Role":
            assert manifest["rules"] == one(found, "Role", "yardstick")["rules"]
        if manifest["kind"] == "RoleBinding":
            assert manifest["subjects"] == [{"kind": "ServiceAccount", "name": "yardstick", "namespace": "apps"}]
    elsewhere = manifests({"gateway": {"engines": engines[:1]}})
    assert [m["metadata"]["namespace"] for m in elsewhere if m["kind"] == "Role"] == ["models"]
    own = manifests({"gateway": {"engines": engines, "serviceAccount": {"name": "mine"}}})
    assert not {"Role", "RoleBinding", "ServiceAccount"} & {m["kind"] for m in own}


@pytest.mark.parametrize("values", [BARE, EXTERNAL], ids=["bare", "external"])
def test_who_does_not_ask_the_api_has_no_account(values: Values):
    found = manifests(values)
    assert not {"Role", "RoleBinding", "ServiceAccount"} & {m["kind"] for m in found}
    assert all(spec["automountServiceAccountToken"] is False for spec in pods(found))


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_every_pod_is_locked_down(values: Values):
    specifications = pods(manifests(values))
    assert specifications
    for spec in specifications:
        assert spec["enableServiceLinks"] is False, "YARDSTICK_* of a Service would be taken for settings"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            if container["name"] in ADDED:
                continue
            security = container["securityContext"]
            assert security == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_no_secret_is_in_a_manifest_that_is_not_a_secret(values: Values):
    found = manifests(values)
    secrets = [value for m in found if m["kind"] == "Secret" for value in m["data"].values()]
    others = json.dumps([m for m in found if m["kind"] != "Secret"])
    assert not [value for value in secrets if value in others]
    for container in [container for spec in pods(found) for container in spec["containers"]]:
        assert not {"YARDSTICK_REDIS_PASSWORD", "PASSWORD", "TOKEN"} & set(environment(container))


def test_only_the_first_key_is_stored_as_it_is():
    found = manifests({"auth": {"keys": [{"name": "ci", "sha256": "ab" * 32}]}})
    first = base64.b64decode(one(found, "Secret", "yardstick-first-key")["data"]["key"])
    assert re.fullmatch(rb"ys-\w{40}", first)
    keys = json.loads(base64.b64decode(one(found, "Secret", "yardstick-api-keys")["data"]["keys.json"]))
    assert keys == {"keys": [{"name": "first", "sha256": hashlib.sha256(first).hexdigest()}, {"name": "ci", "sha256": "ab" * 32}]}
    assert "Secret" not in {m["kind"] for m in manifests(EXTERNAL)}


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_the_grace_of_a_pod_covers_its_drain(values: Values):
    found = manifests(values)
    for name, port in [("yardstick", 8000), ("yardstick-engine", 8100)]:
        for manifest in [m for m in found if m["kind"] in POD_KINDS and m["metadata"]["name"] == name]:
            spec = manifest["spec"]["template"]["spec"]
            container, *_ = spec["containers"]
            if port == 8000:
                told = float(environment(container)["YARDSTICK_GRACE_SECONDS"])
            else:
                (grace,) = [a.partition("=")[2] for a in container["args"] if a.startswith("--grace-seconds=")]
                told = float(grace) + float(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert spec["terminationGracePeriodSeconds"] >= told + 5


@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_the_gateway_knows_every_setting_that_it_is_given(values: Values):
    container, *_ = one(manifests(values), "Deployment", "yardstick")["spec"]["template"]["spec"]["containers"]
    ours = {name.removeprefix(PREFIX).lower() for name in environment(container) if name.startswith(PREFIX)}
    assert ours <= set(Settings.__struct_fields__)


@pytest.mark.parametrize("shown", [True, False])
def test_the_console_and_the_ingress_to_it(shown: bool):
    found = manifests({"gateway": {"console": shown, "ingress": {"enabled": True, "console": shown}}})
    (container,) = one(found, "Deployment", "yardstick")["spec"]["template"]["spec"]["containers"]
    assert environment(container)["YARDSTICK_CONSOLE"] == str(shown).lower()
    paths = one(found, "Ingress", "yardstick")["spec"]["rules"][0]["http"]["paths"]
    admitted = {path["path"]: path["pathType"] for path in paths}
    assert ({"/": "Exact", "/console": "Prefix"}.items() <= admitted.items()) == shown
    assert ("/" in admitted, "/metrics" in admitted) == (shown, False)


def test_the_engine_knows_every_flag_that_it_is_given():
    for values in SETS.values():
        for m in manifests(values):
            if m["kind"] == "StatefulSet":
                parser().parse_args(m["spec"]["template"]["spec"]["containers"][0]["args"])
            elif m["kind"] == "LeaderWorkerSet":
                for pod in pods([m]):
                    given = {"$(LWS_GROUP_SIZE)": "4", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "large-0.large"}
                    text = "\n".join(pod["containers"][0]["args"])
                    for variable, value in given.items():
                        text = text.replace(variable, value)
                    parser().parse_args(text.split("\n"))


def test_the_values_of_the_engine_are_its_settings():
    """Names, choices, bounds and defaults. A setting without a constant default is empty in the chart."""
    schema = json.loads((CHART / "values.schema.json").read_text())["definitions"]["engine"]["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())["engine"]
    checked = set()
    for option in [*options_of(EngineSettings), *options_of(ServerSettings)]:
        head, *rest = option.name.split("_")
        key = head + "".join(part.title() for part in rest)
        if key not in schema or key in ("model", "lenvmModel", "lora"):  # `lora` has values of its own form
            continue
        checked.add(key)
        if option.choices:
            assert set(schema[key]["enum"]) - {""} == set(option.choices)
        if key in OF_THE_CHART:
            continue
        bounds = {"ge": "minimum", "gt": "exclusiveMinimum"}
        found = {name: schema[key][bound] for name, bound in bounds.items() if bound in schema[key]}
        assert found == {name: bound for name, bound in option.bounds.items() if name in bounds}, key
        if option.unset is not None:
            assert values[key] in ("", None), key
        elif values[key] is not None:
            assert values[key] == option.default, key
    assert {"dtype", "maxTotalTokens", "maxBatchedTokens", "maxRunningRequests", "maxWaiting", "stallSeconds"} <= checked


OF_THE_CHART = ("threads", "graceSeconds")
"""Values whose defaults or bounds in a cluster are not those of the command line."""


def test_policies_deny_by_default_and_open_what_is_needed():
    found = [m for m in manifests({}) if m["kind"] == "NetworkPolicy"]
    deny = one(found, "NetworkPolicy", "yardstick-default-deny")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert set(deny) == {"podSelector", "policyTypes"}
    engine = one(found, "NetworkPolicy", "yardstick-engine")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in engine] == ["wire", "health"]
    assert engine[0]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    (redis,) = one(found, "NetworkPolicy", "yardstick-redis")["spec"]["ingress"]
    assert redis["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


def metric_names() -> set[str]:
    telemetry = Telemetry()
    workers = Workers(Capacity(1, 1, 1, 1), telemetry)
    Pool({}, lambda *_: pytest.fail("no engine"), telemetry, workers, probe_seconds=1, silence_seconds=1, startup_seconds=1)
    telemetry.begin("model")
    telemetry.watch(lambda: key_file(KeySample(1, 0.0, False, 0)))
    telemetry.watch(lambda: dropped_lines(0))
    telemetry.watch(lambda: dropped_spans(0))
    stats = wire.Stats(*([0] * len(wire.Stats.__struct_fields__)))
    group = EngineSettings(model="m", name="m", nnodes=2)
    text = b"".join(telemetry.exposition()).decode() + metrics.render(stats, 0.0, 0, group)
    families = [(family.name, family.type) for family in text_string_to_metric_families(text)]
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return {name + suffix for name, kind in families for suffix in suffixes[kind]}


def expressions() -> list[str]:
    dashboard = json.loads((CHART / "dashboards" / "yardstick.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found = manifests(EVERYTHING)
    groups = one(found, "PrometheusRule", "yardstick")["spec"]["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    queries = [m["spec"]["triggers"][0]["metadata"]["query"] for m in found if m["kind"] == "ScaledObject"]
    scaler = one(found, "HorizontalPodAutoscaler", "yardstick-engine-small")
    adapters = [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]]
    assert panels
    assert rules
    assert queries
    assert adapters
    return [*panels, *rules, *queries, *adapters]


def test_dashboards_rules_and_scaling_ask_for_metrics_that_exist():
    known = metric_names()
    for expression in expressions():
        asked = set(re.findall(r"\byardstick_\w+", expression))
        assert asked, expression
        assert asked <= known, expression


def test_the_operations_guide_names_metrics_that_exist():
    text = (ROOT / "docs" / "operations.md").read_text()
    known = metric_names() | {re.sub(r"_(bucket|sum|count)$", "", name) for name in metric_names()}
    asked = set(re.findall(r"\byardstick_\w+", text)) - {"yardstick_llm"}
    assert len(asked) > 10
    assert asked <= known


def test_every_alert_has_a_runbook():
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "operations.md").read_text(), flags=re.M)
    anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    for rule in one(manifests(EVERYTHING), "PrometheusRule", "yardstick")["spec"]["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://docs.example.com/operations"
        assert anchor == rule["alert"].lower()
        assert anchor in anchors
