"""The label ``model`` of metrics has a bounded number of values."""

from __future__ import annotations

from gateway.ops.collectors import ModelSample, fleet
from gateway.ops.metrics import MOST_LABELS, OTHER, ModelLabels, Telemetry


def series(telemetry: Telemetry) -> set[str]:
    lines = b"".join(telemetry.exposition()).decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def test_the_first_models_have_labels_and_later_ones_share_one() -> None:
    label = ModelLabels(2)
    assert [label(name) for name in ("a", None, "", "b", "c", "a", "d")] == ["a", "", "", "b", OTHER, "a", OTHER]


def test_models_that_come_and_go_leave_a_bounded_number_of_series() -> None:
    telemetry = Telemetry()
    sizes = []
    for number in range(2 * MOST_LABELS):
        model = f"model-{number}"
        telemetry.answered("/v1/score", model, 200, 0.1, 0.2)
        telemetry.broken.labels(model, "engine_lost").inc()
        telemetry.engines.errors.labels(model, "engine_lost").inc()
        telemetry.engines.retries.labels(model, "engine_lost").inc()
        telemetry.engines.ejections.labels(model).inc()
        telemetry.engines.silences.labels(model).inc()
        telemetry.engines.resumptions.labels(model).inc()
        telemetry.looked_up(model, 1, 1, 0.1)
        telemetry.fell_back(model, f"other-{number}")
        telemetry.engines.hedge_tokens.labels(model).inc(1)
        telemetry.engines.hedges.labels(model, "won").inc()
        telemetry.engines.hedges_denied.labels(model, "budget").inc()
        telemetry.guided.labels(model, "centered_exp").inc(1)
        telemetry.structured.labels(model).inc(1)
        if number in (MOST_LABELS, 2 * MOST_LABELS - 1):
            sizes.append(len(series(telemetry)))
    assert sizes[0] == sizes[1]
    assert f'yardstick_engine_errors_total{{code="engine_lost",model="{OTHER}"}}' in series(telemetry)


def test_what_alerts_count_begins_with_zero() -> None:
    """Prometheus sees no increase where a series begins with its first event."""
    telemetry = Telemetry()
    telemetry.watch(lambda: fleet([], [ModelSample("a", 1, 0)], telemetry.begin))
    series(telemetry)
    assert {
        'yardstick_engine_silences_total{model="a"}',
        'yardstick_engine_ejections_total{model="a"}',
        'yardstick_resumed_sequences_total{model="a"}',
        'yardstick_cache_lookups_total{model="a",result="hit"}',
        'yardstick_cache_lookups_total{model="a",result="miss"}',
    } <= series(telemetry)
