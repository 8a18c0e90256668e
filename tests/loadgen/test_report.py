"""Numbers against plain definitions, objectives, merging, logs and comparisons."""

from __future__ import annotations

import json
from fractions import Fraction
from random import Random
from typing import Any

import pytest

from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.records import Record, Run, RunInfo, encode, from_log, merge, parse, to_log
from yardstick_llm.loadgen.report import as_json, as_text
from yardstick_llm.loadgen.scenario import Objective, as_settings, load
from yardstick_llm.loadgen.statistics import evaluate, percentile


def info(*settings: str, started: float = 1000.0, share: Share | None = None) -> RunInfo:
    scenario = as_settings(load(None, settings))
    return RunInfo(scenario=scenario, started=started, command="yardstick load run", machine={"host": "h"}, share=share or Share())


def run_of(records: list[Record], *settings: str, interrupted: bool = False) -> Run:
    return Run([info(*settings)], records, interrupted)


def ok(scheduled: float, latency: float, **more: Any) -> Record:
    return Record("score", scheduled, scheduled + 0.001, scheduled + latency, status=200, items=10, prompt_tokens=100, **more)


def failed(scheduled: float, failure: Any = "timeout", **more: Any) -> Record:
    return Record("score", scheduled, scheduled, scheduled + 5, failure=failure, items=10, **more)


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float) -> None:
    for count in (1, 2, 3, 99, 100, 101):
        values = sorted(Random(count).random() for _ in range(count))
        share = Fraction(str(percent)) / 100
        expected = next(value for value in values if Fraction(sum(other <= value for other in values), count) >= share)
        assert percentile(values, percent) == expected


def test_sums_and_rates() -> None:
    records = [ok(place, 0.1 + place / 100, cache="3/10") for place in range(10)]
    records += [failed(10), failed(11, "status", status=429, retry_after=2.0), failed(12, "status", status=429)]
    results = evaluate(run_of(records, "duration_s=20", 'objectives=["p50 <= 151ms", "failures == 0"]'))
    values = results.total.values
    seconds = 9 + 0.19
    assert results.total.seconds == pytest.approx(seconds)
    assert (values["requests"], values["failures"], values["failure_rate"]) == (13, 3, pytest.approx(3 / 13))
    assert values["requests_per_s"] == pytest.approx(10 / seconds)
    assert values["items_per_s"] == pytest.approx(100 / seconds)
    assert values["tokens_per_s"] == pytest.approx(1000 / seconds)
    assert values["goodput"] == pytest.approx(6 / seconds), "requests within 151 ms"
    assert values["latency_p50"] == pytest.approx(0.14)
    assert values["latency_max"] == pytest.approx(0.19)
    assert values["cache_hit_rate"] == pytest.approx(0.3)
    assert results.total.failures == {"status 429": 2, "timeout": 1}
    assert results.retry_after == 1
    assert [verdict.met for verdict in results.verdicts] == [True, False]
    assert not results.passed


def test_stages() -> None:
    settings = ("arrivals.kind=stages", "arrivals.stages=[{rate=2, seconds=4}, {rate=5, seconds=2}]", "warmup_s=1")
    records = [ok(0.5, 5), *(ok(1 + place / 2, 0.1) for place in range(6)), failed(3.9), ok(4.0, 0.3), ok(5.9, 2.1), ok(7.0, 0.5)]
    results = evaluate(run_of(records, *settings, 'objectives=["p99 <= 1s"]'))
    first, second = results.stages
    assert (first.title, second.title) == ("1: 2/s for 4 s", "2: 5/s for 2 s")
    assert (first.requests, first.succeeded, second.requests) == (7, 6, 3), "without the warm-up; a late turn is of the last stage"
    assert first.values["requests_per_s"] == pytest.approx(6 / (3.6 - 1))
    assert second.values["goodput"] == pytest.approx(2 / 4)
    assert second.values["latency_max"] == pytest.approx(2.1)
    told = json.loads(as_json(results))
    assert told["stages"]["2: 5/s for 2 s"]["latency_max_ms"] == pytest.approx(2100)
    assert "2: 5/s for 2 s" in as_text(results)
    assert "(2/s for 4 s, 5/s for 2 s) for 6 s" in as_text(results).splitlines()[0]


def test_streams_and_workloads() -> None:
    def chat(scheduled: float, ttft: float, gap: float) -> Record:
        first = scheduled + ttft
        times = {"first_token": first, "last_token": first + 2 * gap, "gaps": [gap, gap]}
        return Record("chat", scheduled, scheduled, first + 2 * gap, completion_tokens=3, prompt_tokens=9, **times)

    settings = ("workloads[1].kind=chat", 'objectives=["ttft_p50 <= 200ms", "tpot_p90 < 50ms", "itl_p99.9 <= 1s"]')
    results = evaluate(run_of([chat(0, 0.1, 0.02), chat(1, 0.2, 0.04), chat(2, 0.3, 0.06), ok(3, 1)], *settings))
    assert [summary.title for summary in results.workloads] == ["score", "chat"]
    values = results.total.values
    assert [values[f"ttft_{what}"] for what in ("p50", "max")] == [pytest.approx(0.2), pytest.approx(0.3)]
    assert [values[f"tpot_{what}"] for what in ("p50", "max")] == [pytest.approx(0.04), pytest.approx(0.06)]
    assert values["itl_p99.9"] == pytest.approx(0.06)
    assert [verdict.met for verdict in results.verdicts] == [True, False, True]
    assert values["goodput"] * results.total.seconds == pytest.approx(3), (
        "a score has no tokens and is within; the third chat is not"
    )
    assert values["tokens_per_s"] * results.total.seconds == pytest.approx(3 * 3 + 100)
    assert "ttft_p50" not in results.workloads[0].values


@pytest.mark.parametrize(
    ("text", "value", "met"),
    [
        ("p99 <= 500ms", 0.5, True),
        ("p99<=0.5s", 0.501, False),
        ("latency_p99.9 < 1s", 0.99, True),
        ("failures == 0", 0.0, True),
        ("failure_rate <= 1%", 0.02, False),
        ("items_per_s >= 1000", 1000.0, True),
        ("goodput > 5", 5.0, False),
        ("ttft_max <= 1s", None, False),
    ],
)
def test_objectives(text: str, value: float | None, met: bool) -> None:
    assert Objective.parse(text).met(value) is met


def test_a_generator_that_lags_says_so() -> None:
    quick = evaluate(run_of([ok(0, 0.1)]))
    assert quick.lagging is None
    late = evaluate(run_of([Record("score", 0, 0.02, 0.1)]))
    assert late.lagging == pytest.approx(0.02)
    assert "lagged its schedule by 20.0 ms" in as_text(late)
    assert json.loads(as_json(late))["lagging"] is True


def test_workers_are_merged_on_one_clock() -> None:
    first = Run([info(started=1000.0, share=Share(0, 2))], [ok(0.5, 0.1), ok(2.0, 0.1)], False)
    second = Run([info(started=1000.5, share=Share(1, 2))], [ok(0.25, 0.1, first_byte=0.3)], False)
    merged = merge([second, first])
    assert [record.scheduled for record in merged.records] == [0.5, 0.75, 2.0]
    assert merged.records[1].first_byte == pytest.approx(0.8)
    assert [record.latency for record in merged.records] == [pytest.approx(0.1)] * 3
    assert not merged.interrupted
    assert json.loads(as_json(evaluate(merged)))["workers"] == 2


def test_what_does_not_belong_together_is_not_merged() -> None:
    part = Run([info(share=Share(0, 2))], [], False)
    with pytest.raises(LoadError, match=r"records of workers \[0\], of 2"):
        merge([part])
    with pytest.raises(LoadError, match=r"workers \[0, 0\]"):
        merge([part, part])
    with pytest.raises(LoadError, match="different scenarios"):
        merge([part, Run([info("seed=1", share=Share(1, 2))], [], False)])
    with pytest.raises(LoadError, match="no records"):
        merge([])


def runs_of_two() -> list[Run]:
    rng = Random(0)
    records = [ok(place / 100, rng.random(), cache="1/10") for place in range(5000)]
    return [Run([info(share=Share(index, 2))], records[index::2], False) for index in range(2)]


def test_files_and_logs_give_back_what_was_put_in() -> None:
    runs = runs_of_two()
    assert list(parse([line for run in runs for line in encode(run).splitlines()], "test")) == runs
    logs = [[f"[pod/load-{index}] {line}\n" for line in to_log(run)] for index, run in enumerate(runs)]
    assert all(len(log) > 3 for log in logs)
    noise = ["making requests\n", "5 s of 60 · 3 sent\n", '{"name":"load"}\n']
    assert from_log([*noise, *logs[1], *reversed(logs[0]), *noise]) == runs
    with pytest.raises(LoadError, match=r"has \d+ of the \d+ lines of worker 0; read it from its start"):
        from_log([*logs[0][1:], *logs[1]])
    with pytest.raises(LoadError, match="--log-records"):
        from_log(noise)
