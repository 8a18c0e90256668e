"""The label ``model`` of metrics has a bounded number of values."""

from __future__ import annotations

from gateway.metrics.collectors import ModelSample
from gateway.metrics.model_labels import MOST_MODELS, OTHER, ModelLabels
from gateway.metrics.telemetry import Telemetry


def series(telemetry: Telemetry) -> set[str]:
    lines = b"".join(telemetry.exposition()).decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def test_the_first_models_have_labels_and_later_ones_share_one() -> None:
    label = ModelLabels(2)
    assert [label(name) for name in ("a", None, "", "b", "c", "a", "d")] == ["a", "", "", "b", OTHER, "a", OTHER]


def test_models_that_come_and_go_leave_a_bounded_number_of_series() -> None:
    telemetry = Telemetry()
    sizes = []
    for number in range(2 * MOST_MODELS):
        model = f"model-{number}"
        telemetry.answered("/v1/score", model, 200, 0.1, 0.2)
        telemetry.broke(model, "engine_lost")
        telemetry.engines.failed(model, "engine_lost")
        telemetry.engines.retried(model, "engine_lost")
        telemetry.engines.ejected(model)
        telemetry.engines.silent(model)
        telemetry.engines.resumed(model)
        telemetry.looked_up(model, 1, 1, 0.1)
        telemetry.fell_back(model, f"other-{number}")
        telemetry.engines.hedge_sent(model, 1)
        telemetry.engines.hedge_ended(model, "won")
        telemetry.engines.hedge_denied(model, "budget")
        telemetry.guided(model, "centered_exp", 1)
        telemetry.structured(model, 1)
        if number in (MOST_MODELS, 2 * MOST_MODELS - 1):
            sizes.append(len(series(telemetry)))
    assert sizes[0] == sizes[1]
    assert f'yardstick_engine_errors_total{{code="engine_lost",model="{OTHER}"}}' in series(telemetry)


def test_what_alerts_count_begins_with_zero() -> None:
    """Prometheus sees no increase where a series begins with its first event."""
    telemetry = Telemetry()
    telemetry.watch_replicas(list, lambda: [ModelSample("a", 1, 0)])
    series(telemetry)
    assert {
        'yardstick_engine_silences_total{model="a"}',
        'yardstick_engine_ejections_total{model="a"}',
        'yardstick_resumed_sequences_total{model="a"}',
        'yardstick_cache_lookups_total{model="a",result="hit"}',
        'yardstick_cache_lookups_total{model="a",result="miss"}',
    } <= series(telemetry)
