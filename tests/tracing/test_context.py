"""The headers of W3C Trace Context, and which requests are traced."""

from __future__ import annotations

import logging

import pytest

from yardstick_llm.tracing.context import MAX_TRACESTATE, TraceContext, new_trace_id, read_context
from yardstick_llm.tracing.sampling import Sampler, sampler_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_context_is_read_and_passed_on() -> None:
    context = read_context(VALID, "vendor=1, t@v=x y")
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled=True, state="vendor=1,t@v=x y")
    assert context.headers == {"traceparent": VALID, "tracestate": "vendor=1,t@v=x y"}
    assert read_context(**context.headers) == context


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
def test_the_sampled_flag(flags: str, sampled: bool) -> None:
    context = read_context(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert context.sampled is sampled
    assert context.headers == {"traceparent": f"00-{TRACE}-{SPAN}-{'01' if sampled else '00'}"}


def test_later_versions_may_have_more_fields() -> None:
    assert read_context(f"01-{TRACE}-{SPAN}-01-what-ever") == read_context(VALID)
    assert read_context(f"cc-{TRACE}-{SPAN}-01") == read_context(VALID)


@pytest.mark.parametrize(
    "value",
    [
        "",
        VALID.upper(),
        f" {VALID}",
        f"{VALID}\n",
        f"{VALID}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01.more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{'٣' * 32}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-" + "a" * 10_000,
    ],
)
def test_malformed_contexts_are_ignored(value: str) -> None:
    assert read_context(value, "a=1") is None


@pytest.mark.parametrize(
    "state",
    ["", "a", "=1", "A=1", "a=1\r\nx: y", "a=é", "a=1=2", ",".join(f"k{i}=1" for i in range(33)), f"a={'1' * MAX_TRACESTATE}"],
)
def test_a_malformed_state_is_left_out(state: str) -> None:
    context = read_context(VALID, state)
    assert context is not None
    assert context.state == ""
    assert "tracestate" not in context.headers


SAMPLED, NOT_SAMPLED = TraceContext(1, 1, sampled=True), TraceContext(1, 1, sampled=False)


def test_a_ratio_samples_that_part_of_the_traces() -> None:
    sampler = Sampler(0.25)
    chosen = sum(sampler.samples(new_trace_id(), None) for _ in range(20_000))
    assert 4700 < chosen < 5300  # 5000 ± 5 standard deviations
    assert not any(Sampler(0.0).samples(new_trace_id(), None) for _ in range(1000))
    assert all(Sampler(1.0).samples(new_trace_id(), None) for _ in range(1000))


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
    assert sampler_of(variables) == expected


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
        assert sampler_of(variables) == Sampler(1.0)
    assert list(variables)[-1] in caplog.text
