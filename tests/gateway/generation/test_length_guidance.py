"""``length_guidance`` and ``custom_params``: the message to the engine, and the answers to clients."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes import FakeEngine, guided, ids, library
from tests.gateway.answers import check_refused, told
from tests.gateway.api.test_completions_api import chat, complete
from tests.gateway.api.test_streaming import events
from tests.gateway.conftest import Start, metric
from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.generation.length import default_min_p, remaining_tokens, thinking_limit, with_section
from yardstick_llm.gateway.output.answer import AnswerFormat, Thinking

GUIDES = ("length_guidance", "custom_params")


def asked(client: httpx.Client, engine: FakeEngine, **body: Any) -> wire.Generate:
    """Return the message that the engine received."""
    complete(client, **body)
    return engine.generates[-1]


def guidance(client: httpx.Client, engine: FakeEngine, **body: Any) -> wire.LengthGuidance | None:
    return asked(client, engine, **body).length_guidance


def test_the_engine_gets_every_field(client: httpx.Client, engine: FakeEngine) -> None:
    fields = {"mode": "length_mul", "scale": 1.5, "gamma": 0.9, "top_k": 7, "entropy_threshold": 0.2, "value_min": 0.1}
    fields["end_min_p"] = 0.001
    assert guidance(client, engine, length_guidance=fields) == wire.LengthGuidance(**fields)
    target = {"target_length": 30, "target_length_mode": "remaining", "constraint": "eq_soft", "return_values": True}
    assert guidance(client, engine, length_guidance=target, logprobs=2) == wire.LengthGuidance(**target)
    value = {"target_value": 0.5, "constraint": "ge"}
    assert guidance(client, engine, length_guidance=value) == wire.LengthGuidance(**value)
    about = {"target_length": 30, "constraint": "about"}
    assert guidance(client, engine, length_guidance=about) == wire.LengthGuidance(**about, end_min_p=0.0001)
    about["end_min_p"] = 0.1
    assert guidance(client, engine, length_guidance=about) == wire.LengthGuidance(**about)
    assert guidance(client, engine) is None
    assert guidance(client, engine, length_guidance=None, custom_params={"thinking_budget": 3}) is None


@pytest.mark.parametrize("mode", wire.GuidanceMode.__args__)
@pytest.mark.parametrize("key", GUIDES)
def test_modes_change_nothing_without_a_scale(client: httpx.Client, engine: FakeEngine, mode: str, key: str) -> None:
    neutral = 0.0 if mode in ("centered_exp", "value_bias") else 1.0
    assert guidance(client, engine, **{key: {"mode": mode}}) == wire.LengthGuidance(mode=mode, scale=neutral)


def test_short_forms(client: httpx.Client, engine: FakeEngine) -> None:
    request = asked(client, engine, length_guidance={"target_length": 80})
    assert request.length_guidance == wire.LengthGuidance(constraint="eq", target_length=80)
    assert request.sampling.min_p == 0.01
    assert request.sampling.max_tokens == 16 + 2 * 80
    assert asked(client, engine, length_guidance={"target_length": 80}, max_tokens=9).sampling.max_tokens == 9
    assert asked(client, engine, length_guidance={"target_length": 80}, min_p=0).sampling.min_p == 0
    words = asked(client, engine, length_guidance={"target_length": 80, "unit": "words"})
    assert words.length_guidance == wire.LengthGuidance(constraint="eq", target_length=80, unit="words")
    assert words.sampling.max_tokens == 16 + 4 * 80
    scaled = asked(client, engine, length_guidance={"scale": -10})
    assert scaled.length_guidance == wire.LengthGuidance(mode="centered_exp", scale=-10)
    assert (scaled.sampling.min_p, scaled.sampling.max_tokens) == (0, 16)
    chat(client, length_guidance={"target_length": 1000})
    assert engine.generates[-1].sampling.max_tokens > 1900


def test_the_published_clients_keys(client: httpx.Client, engine: FakeEngine) -> None:
    long = {"value_scale": 0.5, "value_mode": "exp", "gamma": 0.9, "value_min": 0.1, "value_entropy_threshold": 0.2}
    short = {"scale": 0.5, "mode": "exp", "length_gamma": 0.9, "value_min": 0.1, "entropy_threshold": 0.2}
    expected = wire.LengthGuidance("exp", 0.5, gamma=0.9, value_min=0.1, entropy_threshold=0.2)
    assert guidance(client, engine, custom_params=long) == guidance(client, engine, custom_params=short) == expected
    assert guidance(client, engine, custom_params={"scale": 0.5}) == wire.LengthGuidance("mul", 0.5)
    assert guidance(client, engine, custom_params={"scale": 0.5}, top_k=20) == wire.LengthGuidance("mul", 0.5, top_k=20)
    for key in ("target_length_mode", "length_mode"):
        guide = guidance(client, engine, custom_params={"target_length": 8, key: "remaining", "scale": 0.5})
        assert guide == wire.LengthGuidance("mul", 0.5, constraint="eq", target_length=8, target_length_mode="remaining")


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("eq", ["eq", "=", "==", "equal"]),
        ("ge", ["ge", ">", ">=", "gte"]),
        ("le", ["le", "<", "<=", "lte"]),
        ("eq_soft", ["eq_soft", "soft"]),
    ],
)
def test_the_published_clients_constraints(client: httpx.Client, engine: FakeEngine, constraint: Any, words: list[str]) -> None:
    for word in words:
        for key in ("value_constraint", "constraint", "cmp", "op"):
            guide = guidance(client, engine, custom_params={key: word, "target_value": 0.5})
            assert guide == wire.LengthGuidance("mul", 1.0, constraint=constraint, target_value=0.5)


def test_what_custom_params_are_not_known(client: httpx.Client) -> None:
    body = {"prompt": "a", "custom_params": {"scale": 0.5, "thinking_budget": 3}, "stream_options": None, "beam": 1}
    answer = client.post("/v1/completions", json=body)
    assert answer.headers["x-yardstick-ignored"] == "beam, custom_params.thinking_budget"


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("length_guidance", {"scales": 1}, "scales", "has no field `scales`"),
    ("length_guidance", {"mode": "loud"}, "mode", "'loud'; it is one of 'centered_exp', 'exp'"),
    ("length_guidance", {"scale": 1e7}, "scale", "<= 1000000"),
    ("length_guidance", {"gamma": 0}, "gamma", "> 0"),
    ("length_guidance", {"gamma": 1}, "gamma", "< 1"),
    ("length_guidance", {"target_length": -1}, "target_length", ">= 0"),
    ("length_guidance", {"target_length": 1.5}, "target_length", "got `float`"),
    ("length_guidance", {"target_value": 1.5}, "target_value", "<= 1"),
    ("length_guidance", {"target_length": 5, "target_value": 0.5}, "target_value", "two targets"),
    ("length_guidance", {"target_length": 5, "constraint": "ne"}, "constraint", "'ne'"),
    ("length_guidance", {"constraint": "le"}, "constraint", "needs a target"),
    ("length_guidance", {"target_value": 0.5, "constraint": "about"}, "constraint", "of the whole text"),
    ("length_guidance", {"target_length": 5, "target_length_mode": "remaining", "constraint": "about"}, "constraint", "no `"),
    ("length_guidance", {"target_length": 5, "scale": 2}, "scale", "with a target"),
    ("length_guidance", {"target_length": 5, "mode": "mul"}, "mode", "with a target"),
    ("length_guidance", {"target_length": 5, "target_length_mode": "half"}, "target_length_mode", "'half'"),
    ("length_guidance", {"target_length_mode": "total"}, "target_length_mode", "needs `target_length`"),
    ("length_guidance", {"unit": "words"}, "unit", "send one of them"),
    ("length_guidance", {"unit": "pages", "target_length": 5}, "unit", "'pages'"),
    (
        "length_guidance",
        {"unit": "words", "target_length": 5, "target_length_mode": "remaining"},
        "unit",
        "in tokens, not in words",
    ),
    ("length_guidance", {"unit": "words", "target_length": 5, "applies_to": "answer"}, "unit", "in tokens, not in words"),
    ("length_guidance", {"top_k": 0}, "top_k", ">= 1"),
    ("length_guidance", {"top_k": 65}, "top_k", "at most 64"),
    ("length_guidance", {"entropy_threshold": -1}, "entropy_threshold", ">= 0"),
    ("length_guidance", {"end_min_p": 1.5}, "end_min_p", "<= 1"),
    ("length_guidance", {"value_min": 2}, "value_min", "<= 1"),
    ("length_guidance", {"return_values": True}, "return_values", "needs log-probabilities"),
    ("custom_params", {"value_scale": "x"}, "value_scale", "got `str`"),
    ("custom_params", {"op": "!="}, "op", "'!='"),
    ("custom_params", {"op": "<"}, "op", "needs a target"),
    ("custom_params", {"op": "<", "cmp": "<", "target_length": 5}, "op", "two names of one"),
    ("custom_params", {"scale": 1, "value_scale": 2}, "scale", "two names of one"),
]


@pytest.mark.parametrize(("object_", "fields", "key", "words"), WRONG)
def test_wrong_guidance(shared: httpx.Client, object_: str, fields: dict[str, Any], key: str, words: str) -> None:
    check_refused(shared.post("/v1/completions", json={"prompt": "a", object_: fields}), f"{object_}.{key}", words)


def test_more_that_is_wrong(shared: httpx.Client) -> None:
    both = {"prompt": "a", "length_guidance": {}, "custom_params": {"scale": 1}}
    check_refused(shared.post("/v1/completions", json=both), "custom_params")
    check_refused(shared.post("/v1/completions", json={"prompt": "a", "top_k": 100, "custom_params": {"scale": 1}}), "top_k")
    mere = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "length_guidance": {"return_values": True}}
    assert "top_logprobs" in told(shared.post("/v1/chat/completions", json=mere))["message"]
    useless = {"length_guidance": {"scale": -5}, "temperature": 0}
    for path, prompt in (("chat/completions", {"messages": mere["messages"]}), ("responses", {"input": "a"})):
        check_refused(shared.post(f"/v1/{path}", json=prompt | useless), "length_guidance.scale")
    for number, param in (("NaN", "scale"), ("-Infinity", "scale"), ("1e999", "length_guidance.scale")):
        content = f'{{"prompt": "a", "length_guidance": {{"scale": {number}}}}}'
        check_refused(shared.post("/v1/completions", content=content), param)


CALIBRATION = wire.Calibration([0.5], {"0.05": [-1.0, -0.5], "0.25": [-0.5, -0.2], "0.75": [0.2, 0.5], "0.95": [1.0, 0.7]}, 90)


def test_a_length_that_is_kept_with_a_probability(start: Start) -> None:
    engine = FakeEngine(lenvm_calibration=CALIBRATION)
    client = start(engine)
    request = asked(client, engine, length_guidance={"max_length": {"at_most": 120}})
    assert request.length_guidance == wire.LengthGuidance(constraint="within", target_length=120, confidence=0.95)
    assert (request.sampling.min_p, request.sampling.max_tokens) == (0.01, 16 + 2 * 120)
    wrong = [
        ({"max_length": {"at_most": 120, "confidence": 0.99}}, "max_length.confidence", "at most 0.95"),
        ({"max_length": {"at_most": 120, "confidence": 0.2}}, "max_length.confidence", ">= 0.5"),
        ({"max_length": {"at_most": 120}, "target_length": 80}, "target_length", "send one"),
        ({"max_length": {"at_most": 120}, "gamma": 0.9}, "gamma", "send one"),
        ({"max_length": {"at_most": 120}, "scale": 2}, "scale", "with a target"),
    ]
    for guide, key, words in wrong:
        check_refused(
            client.post("/v1/completions", json={"prompt": "a", "length_guidance": guide}), f"length_guidance.{key}", words
        )
    entry, own = (client.post("/v1/length", json=body).json()["data"][0] for body in ({"input": "a", "gamma": 0.9}, {"input": "a"}))
    assert entry["intervals"] is None
    place, tokens = int(own["value"] >= 0.5), max(1.0, own["remaining_tokens"])
    for name, levels in {"0.5": ("0.25", "0.75"), "0.9": ("0.05", "0.95")}.items():
        bounds = [max(1.0, tokens * math.exp(CALIBRATION.log_ratio[level][place])) for level in levels]
        assert own["intervals"][name] == pytest.approx(bounds)


def test_a_probability_needs_a_calibration(shared: httpx.Client) -> None:
    answer = shared.post("/v1/completions", json={"prompt": "a", "length_guidance": {"max_length": {"at_most": 9}}})
    check_refused(answer, "length_guidance.max_length", "no calibration")


def test_targets_choose_at_temperature_0(client: httpx.Client, engine: FakeEngine) -> None:
    for constraint in ("eq", "ge", "le"):
        guide = guidance(client, engine, temperature=0, length_guidance={"target_length": 9, "constraint": constraint})
        assert guide == wire.LengthGuidance(constraint=constraint, target_length=9)
    assert guidance(client, engine, temperature=0, custom_params={"target_length": 9, "op": "<"}) is not None
    assert guidance(client, engine, temperature=0, length_guidance={}) == wire.LengthGuidance()
    body = {"temperature": 0, "length_guidance": {"target_value": 0.5}, "max_tokens": 9}
    texts = {complete(client, **body, seed=seed)["choices"][0]["text"] for seed in range(4)}
    assert len(texts) == 1
    assert texts != {complete(client, temperature=0, max_tokens=9)["choices"][0]["text"]}


WITHOUT_EFFECT: list[tuple[dict[str, Any], str, str]] = [
    ({"length_guidance": {"scale": -5}, "temperature": 0}, "length_guidance.scale", "at temperature 0"),
    (
        {"length_guidance": {"target_length": 9, "constraint": "eq_soft"}, "temperature": 0},
        "length_guidance.constraint",
        "at temperature 0",
    ),
    ({"custom_params": {"value_scale": 2}, "temperature": 0}, "custom_params.value_scale", "at temperature 0"),
    ({"length_guidance": {"scale": -5, "top_k": 1}}, "length_guidance.top_k", "one candidate"),
    ({"length_guidance": {"target_length": 9}, "top_k": 1}, "top_k", "one candidate"),
    ({"custom_params": {"scale": 2}, "top_k": 1}, "top_k", "one candidate"),
    ({"length_guidance": {"scale": -5}, "temperature": 0.01}, "temperature", "at least 0.05"),
    ({"length_guidance": {"scale": -5}, "top_p": 0.01}, "top_p", "at least 0.05"),
    ({"custom_params": {"scale": 2}, "min_p": 1}, "min_p", "at most 0.95"),
    ({"length_guidance": {"scale": 1e-9}}, "length_guidance.scale", "so near to 0"),
    ({"custom_params": {"value_scale": 1.0000001}}, "custom_params.value_scale", "so near to 1"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WITHOUT_EFFECT)
def test_guidance_without_effect_is_refused(shared: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    check_refused(shared.post("/v1/completions", json={"prompt": "a", **fields}), param, words)


@pytest.mark.parametrize("key", GUIDES)
def test_a_model_without_a_length_model(start: Start, key: str) -> None:
    client = start(FakeEngine(capabilities=("score", "generate")))
    check_refused(client.post("/v1/completions", json={"prompt": "a", key: {"scale": 1}}), key, "no length model")
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["lenvm_gamma"], model["lenvm_calibration"]) == (None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_drawn_from(client: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    guide = {"scale": 30.0, "return_values": True}
    body = {"messages": [{"role": "user", "content": "x"}], "seed": 1, "max_tokens": 6, "logprobs": True, "top_logprobs": 9}
    body |= {"length_guidance": guide, "ignore_eos": True}
    if stream:
        parts = [choice for event in events(client, "chat/completions", **body) for choice in event["choices"]]
        content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    else:
        content = chat(client, **body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    before = engine.generates[-1].prompt
    for entry in content:
        judged = guided(engine, wire.LengthGuidance(**guide), before)
        assert [top["logprob"] for top in entry["top_logprobs"]] == [logprob for logprob, _ in judged.values()]
        assert [top["value"] for top in entry["top_logprobs"]] == [value for _, value in judged.values()]
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) == pytest.approx(1)
        for top in (entry, *entry["top_logprobs"]):
            assert 0.985 ** top["remaining_tokens"] == pytest.approx(1 - top["value"])
        (chosen,) = (id for id in judged if library().id_to_token(id) and judged[id] == (entry["logprob"], entry["value"]))
        before = [*before, chosen]


def test_values_in_completions(client: httpx.Client, engine: FakeEngine) -> None:
    guide = {"scale": -5.0, "return_values": True, "gamma": 0.9, "top_k": 3}
    body = {"prompt": "Red shoes", "logprobs": 4, "max_tokens": 4, "seed": 2, "length_guidance": guide, "ignore_eos": True}
    logprobs = complete(client, **body)["choices"][0]["logprobs"]
    for told_values, tokens, tops in zip(
        logprobs["top_values"], logprobs["top_remaining_tokens"], logprobs["top_logprobs"], strict=True
    ):
        assert told_values.keys() == tokens.keys() == tops.keys()
        assert tokens == {text: remaining_tokens(value, 0.9) for text, value in told_values.items()}
    first = guided(engine, wire.LengthGuidance(**guide), ids("Red shoes"))
    assert sorted(logprobs["top_values"][0].values()) == sorted(value for _, value in first.values())
    pieces = [piece["logprobs"] for event in events(client, "completions", **body) for piece in event["choices"]]
    for name, whole in logprobs.items():
        assert [value for piece in pieces for value in piece[name]] == whole
    echoed = complete(client, **body, echo=True)["choices"][0]["logprobs"]
    assert echoed["top_values"] == [None] * len(ids("Red shoes")) + logprobs["top_values"]


def test_without_return_values_answers_look_as_ever(client: httpx.Client) -> None:
    plain = complete(client, logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    assert set(plain) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    (entry,) = chat(client, logprobs=True, top_logprobs=1, max_tokens=1, ignore_eos=True)["choices"][0]["logprobs"]["content"]
    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}


@pytest.mark.parametrize("valued", [False, True])
def test_ruled_out_candidates_are_told_with_their_values(client: httpx.Client, valued: bool) -> None:
    guide = {"target_value": 0.5, "return_values": valued}
    body = {"max_tokens": 3, "length_guidance": guide, "ignore_eos": True}
    written = complete(client, **body, logprobs=5)["choices"][0]["logprobs"]
    assert written["token_logprobs"] == [0.0] * 3
    said = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}
    answer = client.post("/v1/chat/completions", json={**said, **body})
    read = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
    tops = [entry["top_logprobs"] for entry in read["choices"][0]["logprobs"]["content"]]
    numbers = [-9999.0] * (4 if valued else 0) + [0.0]
    assert all(sorted(entry["logprob"] for entry in top) == numbers for top in tops)
    assert all(set(top.values()) == set(numbers) for top in written["top_logprobs"])  # some have one text
    if valued:
        assert all(len({entry["value"] for entry in top}) == 5 for top in tops)
        assert [values.keys() for values in written["top_values"]] == [top.keys() for top in written["top_logprobs"]]


def test_guided_prompts_are_counted(start: Start) -> None:
    client = start(FakeEngine())
    complete(client, prompt=["a", "b"], length_guidance={"scale": 2})
    complete(client, length_guidance={"target_length": 3})
    complete(client)
    assert metric(client, 'yardstick_length_guided_prompts_total{mode="centered_exp",model="fake"}') == 2
    assert metric(client, 'yardstick_length_guided_prompts_total{mode="eq",model="fake"}') == 1


@pytest.mark.parametrize("applies_to", ["thinking", "answer"])
def test_the_tokens_of_a_section(applies_to) -> None:
    guidance = wire.LengthGuidance(scale=1.0, applies_to=applies_to)
    opens = AnswerFormat(thinking=Thinking("think", False, 7, 8))
    opened = AnswerFormat(thinking=Thinking("think", True, 7, 8))
    assert with_section(guidance, opens).thinking == wire.Thinking(8, 7)
    assert with_section(guidance, opened).thinking == wire.Thinking(8)
    for unclear in (Thinking("think", False, None, 8), Thinking("think", True, 7, None)):
        with pytest.raises(InvalidRequest, match="no tokens"):
            with_section(guidance, AnswerFormat(thinking=unclear))


@pytest.mark.parametrize(("opened", "open_id"), [(True, None), (False, 7)])
def test_the_tokens_of_a_limit(opened: bool, open_id: int | None) -> None:
    format = AnswerFormat(thinking=Thinking("think", opened, 7, 8))
    assert thinking_limit(5, format) == wire.ThinkingLimit(wire.Thinking(8, open_id), 5)
    assert thinking_limit(None, format) is thinking_limit(5, AnswerFormat()) is thinking_limit(5, None) is None
    with pytest.raises(InvalidRequest, match=r"`thinking_token_budget`: .* no tokens"):
        thinking_limit(5, AnswerFormat(thinking=Thinking("think", opened, None, None)))


def test_targets_of_thinking_have_a_larger_min_p() -> None:
    target = wire.LengthGuidance(constraint="eq", target_length=9)
    assert default_min_p(target) == 0.01
    assert default_min_p(msgspec.structs.replace(target, applies_to="thinking")) == 0.1
    assert default_min_p(wire.LengthGuidance(scale=2.0, applies_to="thinking")) is default_min_p(None) is None
