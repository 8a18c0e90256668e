"""Alerts and the dashboard, checked by Prometheus's own ``promtool``; alerts are evaluated on made-up series."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, ROOT, Values, manifests, one
from tests.parts import need

OBJECTIVES = {"a": {"availability": 0.999, "latency": 0.99, "seconds": 1}}
RULES: Values = {"monitoring": {"rules": {"enabled": True, "extraLabels": {"team": "search"}, "objectives": OBJECTIVES}}}
OWN = {"namespace": "apps", "release": "yardstick", "team": "search"}
"""Labels of every alert."""
MINUTES = 12
"""Duration of the made-up series, with a sample each minute: longer than the rate's window and the alert's delay together."""
GATEWAYS = 'namespace="apps",service="yardstick"'
OF_ENGINES = ("requests_waiting", "slots", "last_step", "grammar")
Series = dict[str, str]


def promtool(folder: Path, groups: list[dict[str, Any]], tests: list[dict[str, Any]], interval: str = "1m") -> None:
    """Check groups of rules, and try ``tests`` on them."""
    rules, file = folder / "rules.yaml", folder / "tests.yaml"
    rules.write_text(yaml.safe_dump({"groups": groups}))
    file.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": interval, "tests": tests}))
    for arguments in (["check", "rules", rules], ["test", "rules", file]):
        done = subprocess.run([need("promtool"), *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def requests(per_minute: int, status: int, model: str = "a", route: str = "/v1/score", start: int = 0) -> Series:
    labels = f'{GATEWAYS},route="{route}",status="{status}",model="{model}"'
    return {"series": f"yardstick_requests_total{{{labels}}}", "values": f"{start}+{per_minute}x{MINUTES}"}


def counted(metric: str, per_minute: int, model: str = "a", pod: str = "one", **labels: str) -> Series:
    service = "yardstick-engine" if metric.startswith(tuple(f"yardstick_engine_{part}" for part in OF_ENGINES)) else "yardstick"
    own = {"namespace": "apps", "service": service, "model": model, "pod": pod}
    told = ",".join(f'{name}="{value}"' for name, value in (own | labels).items())
    return {"series": f"{metric}{{{told}}}", "values": f"0+{per_minute}x{MINUTES}"}


def broken(per_minute: int) -> Series:
    return counted("yardstick_broken_streams_total", per_minute, code="engine_lost")


def failed(per_minute: int, model: str, code: str = "engine_lost", pod: str = "one") -> Series:
    return counted("yardstick_engine_errors_total", per_minute, model, pod, code=code)


def silent(per_minute: int, model: str, pod: str = "one") -> Series:
    return counted("yardstick_engine_silences_total", per_minute, model, pod)


def waiting(requests: int, pool: str, pod: str) -> Series:
    return counted("yardstick_engine_requests_waiting", 0, "a", pod, pool=pool) | {"values": f"{requests}x{MINUTES}"}


def times(metric: str, seconds: float, **labels: str) -> list[Series]:
    """A histogram of 60 answers a minute, which all take longer than ``seconds`` and less than its next bound."""
    bounds = {"0.5": 0.5, "1": 1, "5": 5, "10": 10, "60": 60, "300": 300, "+Inf": 1000}
    return [counted(f"{metric}_bucket", 60 if bound > seconds else 0, le=le, **labels) for le, bound in bounds.items()]


def of_models(alert: str, severity: str, summary: str, cases: dict[str, tuple[list[Series], list[str]]]) -> list[dict[str, Any]]:
    """Tests of an alert with one label, the model. A case has series, and the models for which it fires ("": no model)."""
    return [
        case(
            f"{alert}: {name}",
            alert,
            series,
            [
                fired(severity, summary.format(f" of the model {model}" if model else ""), **({"model": model} if model else {}))
                for model in firing
            ],
        )
        for name, (series, firing) in cases.items()
    ]


def case(name: str, alert: str, series: list[Series], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """A test of promtool: ``alert`` fires at the end of ``series`` as ``expected``."""
    test = {"eval_time": f"{MINUTES}m", "alertname": alert, "exp_alerts": expected}
    return {"name": name, "interval": "1m", "input_series": series, "alert_rule_test": [test]}


def fired(severity: str, summary: str, **labels: str) -> dict[str, Any]:
    return {"exp_labels": {"severity": severity} | labels | OWN, "exp_annotations": {"summary": summary}}


PROBES = requests(60, 503, "", "/readyz")
SCRAPES = requests(4, 200, "", "/metrics")
SECONDS, FIRST = "yardstick_request_seconds", "yardstick_first_byte_seconds"
CHATS = "/v1/chat/completions"


def slow(name: str, series: list[Series], *routes: str) -> dict[str, Any]:
    summary = "One request in a hundred to {} of the model a takes too long."
    return case(name, "YardstickSlow", series, [fired("warning", summary.format(at), model="a", route=at) for at in routes])


def late(name: str, series: list[Series], *routes: str) -> dict[str, Any]:
    summary = "One stream in a hundred of {} of the model a begins after more than 5 s."
    return case(name, "YardstickStreamsSlow", series, [fired("warning", summary.format(at), model="a", route=at) for at in routes])


def signal(alert: str, summary: str, quiet: list[Series], loud: list[Series], **labels: str) -> list[dict[str, Any]]:
    told = [fired("warning", summary, **labels)]
    return [case(f"{alert}: quiet", alert, quiet, []), case(f"{alert}: fires", alert, loud, told)]


def redis_errors(kind: str) -> Series:
    return {"series": f'yardstick_redis_errors_total{{{GATEWAYS},kind="{kind}"}}', "values": f"0+1x{MINUTES}"}


TESTS = [
    *of_models(
        "YardstickErrors",
        "critical",
        "More than 1 % of the requests{} fail, including broken streams.",
        {
            "no series": ([], []),
            "only probes, which answer 503": ([PROBES, SCRAPES], []),
            "failures of an earlier day": ([PROBES, requests(0, 200), requests(0, 500, start=7)], []),
            "refusals": ([requests(60, 200), requests(60, 429)], []),
            "half a percent": ([requests(995, 200), requests(5, 500)], []),
            "five percent": ([requests(95, 200), requests(5, 500)], ["a"]),
            "no engine": ([requests(0, 200), requests(5, 503)], ["a"]),
            "broken streams alone": ([requests(95, 200), broken(5)], ["a"]),
            "a small model beside another": ([requests(99_000, 200, "b"), requests(95, 200), requests(5, 500)], ["a"]),
            "two of three models": ([requests(9, 502), requests(9, 504, "b"), requests(99, 200, "c")], ["a", "b"]),
            "before any model is known": ([requests(1, 503, "", CHATS)], [""]),
            "few failures before the model is known": ([requests(990, 200), requests(1, 500, "")], []),
            "many failures before the model is known": ([requests(90, 200), requests(9, 503, "")], [""]),
        },
    ),
    *of_models(
        "YardstickRefusals",
        "warning",
        "More than 5 % of the requests{} are refused with 429.",
        {
            "a model whose engines are full": ([requests(90, 200), requests(10, 429), requests(90, 200, "b")], ["a"]),
            "a gateway that is full": ([requests(90, 200), requests(10, 429, "")], [""]),
            "one percent": ([requests(990, 200), requests(10, 429, "")], []),
        },
    ),
    *of_models(
        "YardstickEngineErrors",
        "warning",
        "Calls of engines{} fail more than once a second.",
        {
            "two models, each with less than one a second": ([failed(50, "a"), failed(50, "b")], []),
            "codes of one model together": ([failed(40, "a"), failed(40, "a", "overloaded"), failed(40, "b")], ["a"]),
            "gateways together": ([failed(40, "a"), failed(40, "a", pod="two")], ["a"]),
            "a model that is not known": ([failed(90, "")], [""]),
        },
    ),
    *of_models(
        "YardstickEnginesSilent",
        "warning",
        "Engines{} repeatedly do not answer probes.",
        {
            "never": ([silent(0, "a")], []),
            "two gateways, two models": ([silent(1, "a"), silent(1, "a", "two"), silent(1, "b"), silent(0, "c")], ["a", "b"]),
        },
    ),
    *of_models(
        "YardstickNoEngine",
        "critical",
        "A gateway has no ready engine{}.",
        {
            "one of two": (
                [
                    counted("yardstick_model_engines_ready", 0) | {"values": f"2x{MINUTES}"},
                    counted("yardstick_model_engines_ready", 0, "b"),
                ],
                ["b"],
            )
        },
    ),
    *signal(
        "YardstickRedisFull",
        "Redis has no memory left, or cannot save to its disk, so nothing more is stored in it.",
        [redis_errors("timeout")],
        [redis_errors("full"), redis_errors("disk")],
    ),
    *signal(
        "YardstickQueue",
        "More than 100 requests wait in the queue of each engine of the pool blue.",
        [],
        [waiting(150, "blue", "one"), waiting(60, "blue", "two"), waiting(190, "green", "three"), waiting(10, "green", "four")],
        model="a",
        pool="blue",
    ),
    slow("quick scores", times(SECONDS, 1, route="/v1/score")),
    slow(
        "slow scores, embeddings and texts",
        [*times(SECONDS, 5, route="/v1/score"), *times(SECONDS, 5, route="/v1/embeddings"), *times(SECONDS, 10, route="/tokenize")],
        "/tokenize",
        "/v1/embeddings",
        "/v1/score",
    ),
    slow("loads and probes", times(SECONDS, 60, route="/v1/load_lora_adapter") + times(SECONDS, 60, route="/metrics")),
    slow("long chats", times(FIRST, 10, route=CHATS, stream="false")),
    slow("responses of minutes", times(FIRST, 60, route="/v1/responses", stream="false"), "/v1/responses"),
    slow("streams of minutes", times(SECONDS, 60, route="/v1/responses")),
    late("streams that begin soon", times(FIRST, 1, route="/v1/responses", stream="true")),
    late("no streams", times(FIRST, 10, route="/v1/responses", stream="false")),
    late(
        "late streams",
        [series for route in (CHATS, "/v1/completions", "/v1/responses") for series in times(FIRST, 5, route=route, stream="true")],
        CHATS,
        "/v1/completions",
        "/v1/responses",
    ),
    *signal(
        "YardstickTextWorkersBusy",
        "One request in a hundred waits for a text worker for more than 0.5 s.",
        times("yardstick_text_wait_seconds", 0),
        times("yardstick_text_wait_seconds", 0.5),
    ),
    *signal(
        "YardstickResponsesDropped",
        "Responses that clients asked to store were not stored.",
        [counted("yardstick_stored_responses_total", 5, result="stored")],
        [counted("yardstick_stored_responses_total", 1, result="dropped")],
    ),
    *signal(
        "YardstickSettlementsLost",
        "Ended requests of keys with limits were not settled in Redis, and stay charged their expected cost.",
        [counted("yardstick_settlements_lost_total", 0)],
        [counted("yardstick_settlements_lost_total", 2)],
    ),
    case(
        "bad keys",
        "YardstickKeyEntries",
        [counted("yardstick_key_file_problems", 0) | {"values": f"2x{MINUTES}"}],
        [fired("critical", "The key file has entries that do not count, so their keys are refused.")],
    ),
    case("good keys", "YardstickKeyEntries", [counted("yardstick_key_file_problems", 0)], []),
    *signal(
        "YardstickEventLoopBlocked",
        "A gateway blocks its event loop for more than 50 ms at a time.",
        [counted("yardstick_event_loop_blocked_seconds_bucket", 9, le="0.05")],
        [
            counted("yardstick_event_loop_blocked_seconds_bucket", 9, le="0.05"),
            counted("yardstick_event_loop_blocked_seconds_count", 12),
        ],
    ),
    *signal(
        "YardstickGrammarsSlow",
        "An engine of the pool blue compiles grammars for more than half of the time.",
        [counted("yardstick_engine_grammar_compile_seconds_total", 24, "a", pool="blue")],
        [counted("yardstick_engine_grammar_compile_seconds_total", 36, "a", pool="blue")],
        model="a",
        service="yardstick-engine",
        pod="one",
        pool="blue",
    ),
]

HOURS = 7
"""Duration of the series for error budgets, whose longest window has six hours."""


def budget(name: str, alert: str, series: list[Series], **firing: float) -> dict[str, Any]:
    """A case after ``HOURS``. ``firing``: burn rate by severity."""
    what = "Requests to the model a fail" if alert == "YardstickErrorBudget" else "Answers of the model a take more than 1 s"
    hours = {14.4: "1h", 6: "6h"}
    expected = [
        fired(severity, f"{what} {rate} times as often as its objective allows, over {hours[rate]}.", model="a")
        for severity, rate in firing.items()
    ]
    test = {"eval_time": f"{HOURS}h", "alertname": alert, "exp_alerts": expected}
    return {"name": f"{alert}: {name}", "interval": "1m", "input_series": series, "alert_rule_test": [test]}


def over(series: Series, *phases: tuple[int, int]) -> Series:
    """``series`` as a counter that grows by so much a minute for so many minutes, phase by phase."""
    total, parts = 0, []
    for growth, minutes in phases:
        parts.append(f"{total}+{growth}x{minutes - 1}")
        total += growth * minutes
    return series | {"values": " ".join(parts)}


GOOD, BAD = requests(0, 200), requests(0, 503)
ALL = 60 * HOURS + 1
QUICK, ANY = (counted(f"{FIRST}_{part}", 0, route="/v1/score", **le) for part, le in (("bucket", {"le": "1.0"}), ("count", {})))
BUDGETS = [
    budget("within it", "YardstickErrorBudget", [over(GOOD, (10_000, ALL)), over(BAD, (50, ALL))]),
    budget("slowly", "YardstickErrorBudget", [over(GOOD, (10_000, ALL)), over(BAD, (70, ALL))], warning=6),
    budget("fast", "YardstickErrorBudget", [over(GOOD, (10_000, ALL)), over(BAD, (0, ALL - 60), (200, 60))], critical=14.4),
    budget(
        "a fault that is over", "YardstickErrorBudget", [over(GOOD, (10_000, ALL)), over(BAD, (0, ALL - 90), (900, 59), (0, 31))]
    ),
    budget("a moment", "YardstickErrorBudget", [over(GOOD, (10_000, ALL)), over(BAD, (0, ALL - 4), (900, 4))]),
    budget("another model", "YardstickErrorBudget", [over(GOOD, (10_000, ALL)), over(requests(0, 503, "b"), (900, ALL))]),
    budget("no requests", "YardstickErrorBudget", [over(GOOD, (0, ALL))]),
    budget("quick", "YardstickLatencyBudget", [over(QUICK, (950, ALL)), over(ANY, (1000, ALL))]),
    budget("slowly", "YardstickLatencyBudget", [over(QUICK, (930, ALL)), over(ANY, (1000, ALL))], warning=6),
    budget("fast", "YardstickLatencyBudget", [over(QUICK, (800, ALL)), over(ANY, (1000, ALL))], critical=14.4, warning=6),
    budget(
        "long chats",
        "YardstickLatencyBudget",
        [
            over(counted(f"{FIRST}_bucket", 0, route=CHATS, stream="false", le="1.0"), (0, ALL)),
            over(counted(f"{FIRST}_count", 0, route=CHATS, stream="false"), (9, ALL)),
        ],
    ),
]
"""Each series grows by its numbers a minute, so the objectives allow 10 errors, or 10 slow answers, of 10,000 and 1,000."""


def elsewhere(test: dict[str, Any]) -> dict[str, Any]:
    """``test`` with series of another release in the same namespace, of which no alert of this one tells."""
    text = json.dumps(test["input_series"]).replace('service=\\"yardstick', 'service=\\"other-yardstick')
    (alert,) = test["alert_rule_test"]
    return test | {
        "name": f"{test['name']}, elsewhere",
        "input_series": json.loads(text),
        "alert_rule_test": [alert | {"exp_alerts": []}],
    }


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """All series in one run of promtool, which names those whose alerts differ."""
    told = [(test, test["alert_rule_test"][0]) for test in TESTS]
    firing = {alert["alertname"]: test for test, alert in told if alert["exp_alerts"]}
    promtool(tmp_path, groups_of_alerts(budgets=False), [*TESTS, *map(elsewhere, firing.values())])


def test_error_budgets(tmp_path: Path) -> None:
    promtool(tmp_path, groups_of_alerts(budgets=True), BUDGETS, f"{HOURS}h")


def groups_of_alerts(*, budgets: bool) -> list[dict[str, Any]]:
    """The rules of budgets, or all others: promtool evaluates each rule in every case."""
    (group,) = one(manifests(RULES), "PrometheusRule", "yardstick")["spec"]["groups"]
    return [group | {"rules": [rule for rule in group["rules"] if rule["alert"].endswith("Budget") == budgets]}]


def test_alerts_of_two_releases_differ() -> None:
    for name in ("yardstick", "other"):
        found = manifests(RULES, name=name)
        (rules,) = [manifest for manifest in found if manifest["kind"] == "PrometheusRule"]
        alerts = rules["spec"]["groups"][0]["rules"]
        assert all((OWN | {"release": name}).items() <= alert["labels"].items() for alert in alerts)


def test_the_dashboard_is_valid_and_shows_the_chosen_models(tmp_path: Path) -> None:
    dashboard = json.loads((CHART / "dashboards" / "yardstick.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in asked:
        by_model = re.search(r"by \([^)]*\bmodel\b", expression)
        assert not by_model or 'model=~"$model"' in expression, expression
    assert {variable["name"] for variable in dashboard["templating"]["list"]} >= set(re.findall(r"\$([a-z]\w*)", " ".join(asked)))
    recorded = [{"record": f"panel:{i}", "expr": re.sub(r"\$__\w+", "5m", text)} for i, text in enumerate(asked)]
    promtool(tmp_path, [{"name": "dashboard", "rules": recorded}], [])


@pytest.mark.parametrize("honors", [True, False], ids=["own labels", "exported labels"])
def test_gpus_of_engines_are_shown_by_pod(tmp_path: Path, honors: bool) -> None:
    """The pod in dcgm-exporter's series is `exported_pod` without `honorLabels`; GPUs of other pods are left out."""
    panels = json.loads((CHART / "dashboards" / "yardstick.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"] if "DCGM" in target["expr"]]
    assert len(asked) == 2

    def gpu(metric: str, pod: str, number: int, value: int) -> dict[str, str]:
        names = ("namespace", "pod") if honors else ("exported_namespace", "exported_pod")
        away = "" if honors else ',namespace="gpu-operator",pod="dcgm-exporter-x"'
        return gauge(metric, f'gpu="{number}",{names[0]}="apps",{names[1]}="{pod}"{away}', value)

    tests = []
    for expression, metric in zip(asked, ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"), strict=True):
        slots = gauge("yardstick_engine_slots", 'namespace="apps",pod="one",pool="b",model="m",instance="x"', 0)
        samples = [{"labels": f'{{pool="b",pod="one",gpu="{number}"}}', "value": value} for number, value in ((0, 40), (1, 0))]
        tests.append(
            {
                "interval": "1m",
                "input_series": [slots, gpu(metric, "one", 0, 40), gpu(metric, "one", 1, 0), gpu(metric, "other", 2, 9)],
                "promql_expr_test": [{"expr": re.sub(r"\$[a-z]+", ".*", expression), "eval_time": "2m", "exp_samples": samples}],
            }
        )
    promtool(tmp_path, [], tests)


def test_the_recorded_use_of_keys_adds_up(tmp_path: Path) -> None:
    """The example of docs/operations.md, with two gateways, one of which restarts, and a key that is used later."""
    values = {"gateway": {"settings": {"usage_keys": 10}}, **RULES}
    (rules,) = [group for group in one(manifests(values), "PrometheusRule", "yardstick")["spec"]["groups"] if "interval" in group]
    tokens = "yardstick_key_tokens_total"
    series = [
        counted(tokens, 0, key="search", kind="prompt") | {"values": "0+60x170 10200x9"},
        counted(tokens, 0, pod="two", key="search", kind="prompt") | {"values": "0+60x60 0+60x109 6540x9"},
        counted(tokens, 0, key="chat", kind="prompt") | {"values": "0x60 0+30x109 3270x9"},
        counted(tokens, 0, key="chat", kind="prompt_cached") | {"values": "0x60 0+10x109 1090x9"},
        counted(tokens, 0, key="chat", kind="completion") | {"values": "0x60 0+30x109 3270x9"},
    ]
    (asked,) = re.findall(r"```promql\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), flags=re.S)
    asked = f"round({asked.replace('30d', '3h')}, 100)"
    samples = [{"labels": f'{{key="{key}"}}', "value": value} for key, value in (("chat", 15_300), ("search", 20_300))]
    cases = [{"expr": asked, "eval_time": "3h", "exp_samples": samples}]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": cases}
    promtool(tmp_path, [rules], [test])


def query(minReplicas: int) -> str:
    autoscaling = {"enabled": True, "minReplicas": minReplicas}
    found = one(manifests({"engine": {"autoscaling": autoscaling}}), "ScaledObject", "yardstick-engine")
    return str(found["spec"]["triggers"][0]["metadata"]["query"])


def gauge(name: str, labels: str, value: int) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": f"{value}x80"}


def missed(values: str) -> dict[str, str]:
    """The counter of requests without an engine, read every 15 seconds."""
    return {"series": f'yardstick_model_requests_without_engine_total{{{GATEWAYS},model="yardstick-demo"}}', "values": values}


GATEWAY = [
    gauge("yardstick_engines_ready", GATEWAYS, 0),
    gauge("yardstick_model_engines_ready", f'{GATEWAYS},model="yardstick-demo"', 0),
]
IDLE = gauge("yardstick_model_requests_waiting", f'{GATEWAYS},model="yardstick-demo"', 0)
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
            {"1m": None},
            id="engines without gateways",
        ),
        pytest.param(1, [IDLE], {"1m": None}, id="gateways without engines"),
        pytest.param(1, [], {"1m": None}, id="no series is no idle pool"),
        pytest.param(
            1,
            [IDLE, gauge("yardstick_engine_requests_running", ENGINE, 30), gauge("yardstick_engine_requests_waiting", ENGINE, 12)],
            {"1m": 42},
            id="requests of engines",
        ),
    ],
)
def test_a_request_without_an_engine_wakes_its_pool(
    tmp_path: Path, fewest: int, series: list[dict[str, str]], expected: dict[str, int | None]
) -> None:
    """What KEDA asks of Prometheus. It starts a pod where the answer is above 0, and another for each 32."""
    asked = query(fewest)
    samples = {time: [] if value is None else [{"value": value}] for time, value in expected.items()}
    cases = [{"expr": f"ceil({asked})", "eval_time": time, "exp_samples": found} for time, found in samples.items()]
    promtool(tmp_path, [], [{"interval": "15s", "input_series": series, "promql_expr_test": cases}])
