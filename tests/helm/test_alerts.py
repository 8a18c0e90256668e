"""Alerts and the dashboard, checked by Prometheus's own ``promtool``; alerts about requests are evaluated on made-up series."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from engine import wire
from engine.serving import metrics
from gateway.ops.collectors import KeySample, dropped_lines, dropped_spans, fleet, key_file
from gateway.ops.metrics import Telemetry
from tests.helm.chart import CHART, Values, manifests, one
from tests.parts import need

RULES: Values = {"monitoring": {"rules": {"enabled": True}}}
MINUTES = 12
"""Duration of the made-up series, with a sample each minute: longer than the rate's window and the alert's delay together."""


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of rules."""
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    file.write_text(yaml.safe_dump(one(manifests(RULES), "PrometheusRule", "yardstick")["spec"]))
    return file


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([need("promtool"), *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def requests(per_minute: int, status: int, model: str = "a", route: str = "/v1/score", start: int = 0) -> dict[str, str]:
    labels = f'namespace="apps",route="{route}",status="{status}",model="{model}"'
    return {"series": f"yardstick_requests_total{{{labels}}}", "values": f"{start}+{per_minute}x{MINUTES}"}


def broken(per_minute: int, model: str = "a") -> dict[str, str]:
    labels = f'namespace="apps",code="engine_lost",model="{model}"'
    return {"series": f"yardstick_broken_streams_total{{{labels}}}", "values": f"0+{per_minute}x{MINUTES}"}


def check(rules: Path, alert: str, series: list[dict[str, str]], expected: list[dict[str, Any]]) -> None:
    """Fail unless ``alert`` fires at the end of ``series`` as ``expected``."""
    case = {"eval_time": f"{MINUTES}m", "alertname": alert, "exp_alerts": expected}
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": [case]}]
    file = rules.with_name("tests.yaml")
    file.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


def errors(*models: str) -> list[dict[str, Any]]:
    """The alert for these models; an empty name stands for no model."""
    summary = "More than 1 % of the requests{} fail, including broken streams."
    return [alarm("critical", model, summary) for model in models]


def refusals(*models: str) -> list[dict[str, Any]]:
    return [alarm("warning", model, "More than 5 % of the requests{} are refused with 429.") for model in models]


def alarm(severity: str, model: str, summary: str) -> dict[str, Any]:
    labels = {"severity": severity} | ({"model": model} if model else {})
    of_model = f" of the model {model}" if model else ""
    return {"exp_labels": labels, "exp_annotations": {"summary": summary.format(of_model)}}


def test_promtool_accepts_all_rules(rules: Path) -> None:
    promtool("check", "rules", rules)


def test_the_dashboard_is_valid_and_shows_the_chosen_models(tmp_path: Path) -> None:
    dashboard = json.loads((CHART / "dashboards" / "yardstick.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in asked:
        by_model = re.search(r"by \([^)]*\bmodel\b", expression)
        assert not by_model or 'model=~"$model"' in expression, expression
    assert {variable["name"] for variable in dashboard["templating"]["list"]} >= set(re.findall(r"\$([a-z]\w*)", " ".join(asked)))
    recorded = [{"record": f"panel:{i}", "expr": text.replace("$__rate_interval", "5m")} for i, text in enumerate(asked)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", file)


PROBES = requests(60, 503, "", "/readyz")
SCRAPES = requests(4, 200, "", "/metrics")


@pytest.mark.parametrize(
    ("series", "firing"),
    [
        pytest.param([], [], id="no series"),
        pytest.param([PROBES, SCRAPES], [], id="only probes, which answer 503"),
        pytest.param([PROBES, requests(0, 200)], [], id="a model without traffic"),
        pytest.param([PROBES, requests(0, 200), requests(0, 500, start=7)], [], id="failures of an earlier day"),
        pytest.param([PROBES, requests(60, 200)], [], id="probes answer 503, requests succeed"),
        pytest.param([requests(60, 200), requests(60, 429)], [], id="refusals"),
        pytest.param([requests(995, 200), requests(5, 500)], [], id="half a percent"),
        pytest.param([requests(95, 200), requests(5, 500)], ["a"], id="five percent"),
        pytest.param([requests(0, 200), requests(5, 503)], ["a"], id="no engine"),
        pytest.param([requests(95, 200), broken(5)], ["a"], id="broken streams alone"),
        pytest.param([requests(99_000, 200, "b"), requests(95, 200), requests(5, 500)], ["a"], id="a small model beside another"),
        pytest.param([requests(9, 502), requests(9, 504, "b"), requests(99, 200, "c")], ["a", "b"], id="two of three models"),
        pytest.param([requests(1, 503, "", "/v1/chat/completions")], [""], id="before any model is known"),
        pytest.param([requests(990, 200), requests(1, 500, "")], [], id="few failures before the model is known"),
        pytest.param([requests(90, 200), requests(9, 503, "")], [""], id="many failures before the model is known"),
    ],
)
def test_errors_are_a_share_of_each_models_requests(rules: Path, series: list[dict[str, str]], firing: list[str]) -> None:
    check(rules, "YardstickErrors", series, errors(*firing))


@pytest.mark.parametrize(
    ("series", "firing"),
    [
        pytest.param([requests(90, 200), requests(10, 429), requests(90, 200, "b")], ["a"], id="a model whose engines are full"),
        pytest.param([requests(90, 200), requests(10, 429, "")], [""], id="a gateway that is full"),
        pytest.param([requests(990, 200), requests(10, 429, "")], [], id="one percent"),
        pytest.param([PROBES], [], id="probes"),
    ],
)
def test_refusals_are_a_share_of_each_models_requests(rules: Path, series: list[dict[str, str]], firing: list[str]) -> None:
    check(rules, "YardstickRefusals", series, refusals(*firing))


def counted(metric: str, per_minute: int, model: str = "a", pod: str = "one", **labels: str) -> dict[str, str]:
    told = ",".join(f'{name}="{value}"' for name, value in {"namespace": "apps", "model": model, "pod": pod, **labels}.items())
    return {"series": f"{metric}{{{told}}}", "values": f"0+{per_minute}x{MINUTES}"}


def failed(per_minute: int, model: str, code: str = "engine_lost", pod: str = "one") -> dict[str, str]:
    return counted("yardstick_engine_errors_total", per_minute, model, pod, code=code)


@pytest.mark.parametrize(
    ("series", "firing"),
    [
        pytest.param([], [], id="no series"),
        pytest.param([failed(50, "a"), failed(50, "b")], [], id="two models, each with less than one a second"),
        pytest.param([failed(90, "a"), failed(6, "b")], ["a"], id="one of two models"),
        pytest.param([failed(40, "a"), failed(40, "a", "overloaded"), failed(40, "b")], ["a"], id="codes of one model together"),
        pytest.param([failed(40, "a"), failed(40, "a", pod="two")], ["a"], id="gateways together"),
        pytest.param([failed(90, "")], [""], id="a model that is not known"),
    ],
)
def test_calls_of_each_models_engines_fail(rules: Path, series: list[dict[str, str]], firing: list[str]) -> None:
    summary = "Calls of engines{} fail more than once a second."
    check(rules, "YardstickEngineErrors", series, [alarm("warning", model, summary) for model in firing])


def silent(per_minute: int, model: str, pod: str = "one") -> dict[str, str]:
    return counted("yardstick_engine_silences_total", per_minute, model, pod)


@pytest.mark.parametrize(
    ("series", "firing"),
    [
        pytest.param([silent(0, "a")], [], id="never"),
        pytest.param([silent(1, "a"), silent(0, "b")], ["a"], id="one of two models"),
        pytest.param([silent(1, "a"), silent(1, "a", "two"), silent(1, "b")], ["a", "b"], id="two gateways, two models"),
    ],
)
def test_each_models_silent_engines(rules: Path, series: list[dict[str, str]], firing: list[str]) -> None:
    summary = "Engines{} repeatedly do not answer probes."
    check(rules, "YardstickEnginesSilent", series, [alarm("warning", model, summary) for model in firing])


def waiting(requests: int, model: str, pool: str, pod: str) -> dict[str, str]:
    labels = f'namespace="apps",model="{model}",pool="{pool}",pod="{pod}"'
    return {"series": f"yardstick_engine_requests_waiting{{{labels}}}", "values": f"{requests}x{MINUTES}"}


@pytest.mark.parametrize(("kind", "fires"), [("full", True), ("disk", True), ("timeout", False)])
def test_a_redis_that_takes_no_writes_is_told(rules: Path, kind: str, fires: bool) -> None:
    series = {"series": f'yardstick_redis_errors_total{{namespace="apps",kind="{kind}"}}', "values": f"0+1x{MINUTES}"}
    told = {
        "exp_labels": {"severity": "warning"},
        "exp_annotations": {"summary": "Redis has no memory left, or cannot save to its disk, so nothing more is stored in it."},
    }
    check(rules, "YardstickRedisFull", [series], [told] if fires else [])


def test_a_queue_is_one_of_a_pool(rules: Path) -> None:
    series = [waiting(150, "a", "blue", "one"), waiting(60, "a", "blue", "two"), waiting(190, "a", "green", "three")]
    series.append(waiting(10, "a", "green", "four"))
    summary = "More than 100 requests wait in the queue of each engine of the pool blue."
    labels = {"severity": "warning", "model": "a", "pool": "blue"}
    check(rules, "YardstickQueue", series, [{"exp_labels": labels, "exp_annotations": {"summary": summary}}])


def test_a_model_without_engines_is_named(rules: Path) -> None:
    ready = {model: counted("yardstick_model_engines_ready", 0, model) for model in ("a", "b")}
    ready["a"]["values"] = f"2x{MINUTES}"
    check(rules, "YardstickNoEngine", list(ready.values()), [alarm("critical", "b", "A gateway has no ready engine{}.")])


def times(metric: str, seconds: float, **labels: str) -> list[dict[str, str]]:
    """A histogram of 60 answers a minute, which all take longer than ``seconds`` and less than its next bound."""
    bounds = {"0.5": 0.5, "1": 1, "5": 5, "10": 10, "60": 60, "300": 300, "+Inf": 1000}
    return [counted(f"{metric}_bucket", 60 if bound > seconds else 0, le=le, **labels) for le, bound in bounds.items()]


SECONDS, FIRST = "yardstick_request_seconds", "yardstick_first_byte_seconds"


@pytest.mark.parametrize(
    ("alert", "series", "routes"),
    [
        pytest.param("YardstickSlow", times(SECONDS, 1, route="/v1/score"), [], id="quick scores"),
        pytest.param("YardstickSlow", times(SECONDS, 5, route="/v1/score"), ["/v1/score"], id="slow scores"),
        pytest.param(
            "YardstickSlow",
            times(SECONDS, 5, route="/v1/embeddings") + times(SECONDS, 10, route="/tokenize"),
            ["/tokenize", "/v1/embeddings"],
            id="slow embeddings, slow texts",
        ),
        pytest.param(
            "YardstickSlow",
            times(SECONDS, 60, route="/v1/load_lora_adapter") + times(SECONDS, 60, route="/metrics"),
            [],
            id="loads and probes",
        ),
        pytest.param("YardstickSlow", times(SECONDS, 60, route="/v1/catalogues/{name}/warm"), [], id="warm-ups"),
        pytest.param("YardstickSlow", times(FIRST, 10, route="/v1/chat/completions", stream="false"), [], id="long chats"),
        pytest.param(
            "YardstickSlow", times(FIRST, 60, route="/v1/responses", stream="false"), ["/v1/responses"], id="responses of minutes"
        ),
        pytest.param("YardstickSlow", times(SECONDS, 60, route="/v1/responses"), [], id="streams of minutes"),
        pytest.param(
            "YardstickStreamsSlow", times(FIRST, 1, route="/v1/responses", stream="true"), [], id="streams that begin soon"
        ),
        pytest.param("YardstickStreamsSlow", times(FIRST, 10, route="/v1/responses", stream="false"), [], id="no streams"),
        *(
            pytest.param(
                "YardstickStreamsSlow", times(FIRST, 5, route=route, stream="true"), [route], id=f"late streams of {route}"
            )
            for route in ("/v1/responses", "/v1/completions", "/v1/chat/completions")
        ),
    ],
)
def test_every_endpoint_may_be_slow(rules: Path, alert: str, series: list[dict[str, str]], routes: list[str]) -> None:
    words = {
        "YardstickSlow": "One request in a hundred to {} of the model a takes too long.",
        "YardstickStreamsSlow": "One stream in a hundred of {} of the model a begins after more than 5 s.",
    }[alert]
    expected = [
        {"exp_labels": {"severity": "warning", "model": "a", "route": route}, "exp_annotations": {"summary": words.format(route)}}
        for route in routes
    ]
    check(rules, alert, series, expected)


SIGNALS = {
    "YardstickTextWorkersBusy": "One request in a hundred waits for a text worker for more than 0.5 s.",
    "YardstickResponsesDropped": "Responses that clients asked to store were not stored.",
    "YardstickSettlementsLost": (
        "Ended requests of keys with limits were not settled in Redis, and stay charged their expected cost."
    ),
    "YardstickEventLoopBlocked": "A gateway blocks its event loop for more than 50 ms at a time.",
}


@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        ("YardstickTextWorkersBusy", times("yardstick_text_wait_seconds", 0), False),
        ("YardstickTextWorkersBusy", times("yardstick_text_wait_seconds", 0.5), True),
        ("YardstickResponsesDropped", [counted("yardstick_stored_responses_total", 5, result="stored")], False),
        ("YardstickResponsesDropped", [counted("yardstick_stored_responses_total", 1, result="dropped")], True),
        ("YardstickSettlementsLost", [counted("yardstick_settlements_lost_total", 0)], False),
        ("YardstickSettlementsLost", [counted("yardstick_settlements_lost_total", 2)], True),
        ("YardstickEventLoopBlocked", [counted("yardstick_event_loop_blocked_seconds_bucket", 9, le="0.05")], False),
        (
            "YardstickEventLoopBlocked",
            [
                counted("yardstick_event_loop_blocked_seconds_bucket", 9, le="0.05"),
                counted("yardstick_event_loop_blocked_seconds_count", 12),
            ],
            True,
        ),
    ],
)
def test_signals_of_a_gateway(rules: Path, alert: str, series: list[dict[str, str]], fires: bool) -> None:
    told = {"exp_labels": {"severity": "warning"}, "exp_annotations": {"summary": SIGNALS[alert]}}
    check(rules, alert, series, [told] if fires else [])


@pytest.mark.parametrize(("per_minute", "fires"), [(24, False), (36, True)])
def test_an_engine_that_compiles_grammars_all_the_time(rules: Path, per_minute: int, fires: bool) -> None:
    series = counted("yardstick_engine_grammar_compile_seconds_total", per_minute, "a", pool="blue")
    told = {
        "exp_labels": {"severity": "warning", "model": "a", "namespace": "apps", "pod": "one", "pool": "blue"},
        "exp_annotations": {"summary": "An engine of the pool blue compiles grammars for more than half of the time."},
    }
    check(rules, "YardstickGrammarsSlow", [series], [told] if fires else [])


def test_dashboard_and_alerts_read_metrics_that_exist(rules: Path) -> None:
    telemetry = Telemetry(usage_keys=1)
    telemetry.watch(lambda: dropped_lines(0))
    telemetry.watch(lambda: dropped_spans(0))
    telemetry.watch(lambda: key_file(KeySample(0, 0.0, False)))
    telemetry.watch(lambda: fleet([], [], telemetry.begin))
    stats = wire.Stats(*([0] * len(wire.Stats.__struct_fields__)))
    pages = b"".join(telemetry.exposition()).decode() + metrics.render(stats, 0.0, 0)
    known = set(re.findall(r"^# TYPE (\w+)", pages, re.M))
    text = (CHART / "dashboards" / "yardstick.json").read_text() + rules.read_text()
    asked = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"yardstick_\w+", text)}
    assert len(asked) > 50
    assert asked <= known


NAMED = 'namespace="apps",service="yardstick"'


def query(minReplicas: int) -> str:
    autoscaling = {"enabled": True, "minReplicas": minReplicas}
    found = one(manifests({"engine": {"autoscaling": autoscaling}}), "ScaledObject", "yardstick-engine")
    return str(found["spec"]["triggers"][0]["metadata"]["query"])


def gauge(name: str, labels: str, value: int) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": f"{value}x80"}


def missed(values: str) -> dict[str, str]:
    """The counter of requests without an engine, read every 15 seconds."""
    return {"series": f'yardstick_model_requests_without_engine_total{{{NAMED},model="yardstick-demo"}}', "values": values}


GATEWAY = [gauge("yardstick_engines_ready", NAMED, 0), gauge("yardstick_model_engines_ready", f'{NAMED},model="yardstick-demo"', 0)]
IDLE = gauge("yardstick_model_requests_waiting", f'{NAMED},model="yardstick-demo"', 0)
ENGINE = 'namespace="apps",service="yardstick-engine",pod="one"'


@pytest.mark.parametrize(
    ("fewest", "series", "expected"),
    [
        pytest.param(0, [*GATEWAY, IDLE, missed("7x80")], {"1m": 0, "5m": 0, "10m": 0}, id="no request"),
        pytest.param(
            0, [*GATEWAY, IDLE, missed("7x20 8x60")], {"5m": 0, "5m15s": 1, "6m": 1, "7m": 1, "9m": 0}, id="one, gone before a read"
        ),
        pytest.param(0, [*GATEWAY, IDLE, missed("0x20 500x60")], {"5m30s": 1, "9m": 0}, id="a burst starts one pod"),
        pytest.param(0, [GATEWAY[0]], {"1m": 1}, id="a gateway that does not know the model"),
        pytest.param(0, [], {"1m": 0}, id="nothing is known"),
        pytest.param(
            1,
            [gauge("yardstick_engine_requests_running", ENGINE, 30), gauge("yardstick_engine_requests_waiting", ENGINE, 12)],
            {"1m": 42},
            id="requests of engines",
        ),
    ],
)
def test_a_request_without_an_engine_wakes_its_pool(
    tmp_path: Path, fewest: int, series: list[dict[str, str]], expected: dict[str, int]
) -> None:
    """What KEDA asks of Prometheus. It starts a pod where the answer is above 0, and another for each 32."""
    asked = query(fewest)
    cases = [{"expr": f"ceil({asked})", "eval_time": time, "exp_samples": [{"value": value}]} for time, value in expected.items()]
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": cases}]}))
    promtool("test", "rules", file)


def test_the_dashboard_filters_each_series_that_has_a_model_or_a_pool() -> None:
    """Series of the gateway by their labels; engines' series get theirs from Prometheus (`yardstick.relabelings`)."""
    of_models = ("yardstick_engines", "yardstick_model_", "yardstick_engine_")  # and those of the collectors
    counters = {collector for collector in Telemetry()._registry._collector_to_names if isinstance(collector, MetricWrapperBase)}
    labelled = {collector._name for collector in counters if "model" in collector._labelnames}
    assert labelled >= {"yardstick_cache_lookups", "yardstick_engine_errors", "yardstick_requests"}
    stats = wire.Stats(*([0] * len(wire.Stats.__struct_fields__)))
    page = text_string_to_metric_families(metrics.render(stats, 0.0, 0))
    of_engines = {sample.name for family in page for sample in family.samples}
    dashboard = json.loads((CHART / "dashboards" / "yardstick.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found = [pair for expression in asked for pair in re.findall(r"(yardstick_\w+)\{([^}]*)\}", expression)]
    assert len(found) > 40
    for name, selector in found:
        has_model = re.sub(r"_(total|bucket|sum|count)$", "", name) in labelled or name.startswith(of_models)
        assert ('model=~"$model"' in selector) == has_model, name
        assert ('pool=~"$pool"' in selector) == (name in of_engines), name
