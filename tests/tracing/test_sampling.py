"""Which requests are traced."""

from __future__ import annotations

import logging

import pytest

from tracing.context import TraceContext, new_trace_id
from tracing.sampling import Sampler, sampler_of

SAMPLED, NOT_SAMPLED = TraceContext(1, 1, sampled=True), TraceContext(1, 1, sampled=False)


def test_a_ratio_samples_that_part_of_the_traces() -> None:
    sampler = sampler_of(0.25, {"OTEL_TRACES_SAMPLER": "always_off"})
    chosen = sum(sampler.samples(new_trace_id(), None) for _ in range(20_000))
    assert 4700 < chosen < 5300  # 5000 ± 5 standard deviations
    assert not any(sampler_of(0.0, {}).samples(new_trace_id(), None) for _ in range(1000))
    assert all(sampler_of(1.0, {}).samples(new_trace_id(), None) for _ in range(1000))


def test_servers_with_one_ratio_choose_the_same_traces() -> None:
    ids = [new_trace_id() for _ in range(1000)]
    few, more = Sampler(0.1), Sampler(0.5)
    assert all(more.samples(each, None) for each in ids if few.samples(each, None))


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.0)])
def test_the_sender_of_a_context_decides(sampler: Sampler) -> None:
    assert sampler.samples(1, SAMPLED)
    assert not sampler.samples(1, NOT_SAMPLED)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Sampler(1.0)),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, Sampler(0.0, follows_parent=False)),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, Sampler(1.0, follows_parent=False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, Sampler(0.0)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.2"}, Sampler(0.2, follows_parent=False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.2"}, Sampler(0.2)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, Sampler(1.0)),
    ],
)
def test_the_variables_of_opentelemetry(variables: dict[str, str], expected: Sampler) -> None:
    assert sampler_of(None, variables) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_SAMPLER": "jaeger_remote"},
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.5"},
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"},
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "some"},
    ],
)
def test_unknown_values_are_named_in_the_log(variables: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert sampler_of(None, variables) == Sampler(1.0)
    assert list(variables)[-1] in caplog.text
