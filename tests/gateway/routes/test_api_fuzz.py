"""No request gets a 5xx response, and every error has OpenAI's format."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.integers(-3, 400)
    | st.floats()
    | st.floats(0, 2)
    | st.text(max_size=12)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
texts = st.text(max_size=20) | st.sampled_from([" Yes", "🦊", "\0", "<|im_end|>", "\u202e", "e\u0301"])
token_ids = st.lists(st.integers(-1, 340), max_size=12)
few = st.integers(0, 6)

modes = st.sampled_from(["centered_exp", "value_bias", "mul", "linear", "exp", "length_mul", "loud"])
targets = {"target_length": st.integers(-1, 60), "target_value": st.floats(-0.1, 1.1)}
common = {"mode": modes, "scale": st.floats(-60, 60), "gamma": st.floats(-0.1, 1.1), "value_min": st.floats(0, 1), **targets}
guides = {
    "length_guidance": st.fixed_dictionaries(
        {},
        optional={
            **common,
            "target_length_mode": st.sampled_from(["total", "remaining"]),
            "constraint": st.sampled_from(["eq", "ge", "le", "eq_soft", "ne"]),
            "top_k": st.integers(-1, 70),
            "entropy_threshold": st.floats(-0.1, 2),
            "return_values": st.booleans(),
        },
    ),
    "prompt_lookup": st.fixed_dictionaries({}, optional={"max_tokens": st.integers(-1, 33), "ngram": st.integers(0, 9)}),
    "custom_params": st.fixed_dictionaries(
        {},
        optional={
            **common,
            "value_scale": st.floats(-3, 3),
            "value_mode": modes,
            "length_gamma": st.floats(0, 1),
            "length_mode": st.sampled_from(["total", "remaining"]),
            "op": st.sampled_from(["=", "<", ">", "soft", "!="]),
            "cmp": st.sampled_from(["eq", "lte"]),
        },
    ),
}
documents = st.lists(texts | st.fixed_dictionaries({"text": texts}) | st.none(), max_size=5)
truncation = {
    "truncate": st.booleans(),
    "truncate_prompt_tokens": st.integers(-2, 40),
    "max_tokens_per_doc": st.integers(-1, 9),
    "max_tokens_per_query": st.integers(0, 9),
    "truncation_direction": st.sampled_from(["left", "Right", "middle", "up"]),
}
several_texts = texts | st.lists(texts, max_size=4) | token_ids | st.lists(token_ids, max_size=4)
stream_options = {"include_usage": st.booleans() | st.none(), "continuous_usage_stats": st.booleans() | st.none()}

schemas = st.sampled_from([{}, {"type": "integer"}, {"not": {}}, True]) | st.dictionaries(st.text(max_size=8), anything, max_size=2)
patterns = st.sampled_from(["[ab]+", "(a", "a{3}", ""]) | texts
structures = {
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "xml"])},
        optional={"json_schema": st.fixed_dictionaries({}, optional={"schema": schemas, "name": texts, "strict": st.booleans()})},
    ),
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={
            "json": schemas | texts,
            "regex": patterns,
            "choice": st.lists(texts, max_size=3),
            "json_object": st.booleans(),
        },
    ),
    "guided_json": schemas | texts,
    "guided_regex": patterns,
    "guided_choice": st.lists(texts, max_size=3),
    "guided_grammar": st.sampled_from(['start: "a"', 'root ::= "a"', "start: start"]) | texts,
    "allowed_token_ids": token_ids,
    "bad_words": st.lists(texts, max_size=3),
}

generation = {
    **guides,
    **structures,
    "model": st.sampled_from(["fake", "other", None]),
    "n": st.integers(0, 4),
    "stop": texts | st.lists(texts, max_size=4),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional=stream_options) | st.none(),
    "seed": st.integers(-(2**70), 2**70),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.1, 1.1),
    "top_k": st.integers(-2, 400),
    "min_p": st.floats(-0.1, 1.1),
    "logit_bias": st.dictionaries(st.integers(-1, 340).map(str), st.floats(-110, 110), max_size=3),
    "min_tokens": few,
    "stop_token_ids": token_ids,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "max_tokens": few,
}
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": texts | st.none()}
)
part = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"]), "text": texts})
item = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "item_reference"]
        ),
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": texts | st.lists(part, max_size=3) | st.none(),
        "id": texts,
        "call_id": texts,
        "name": texts,
        "arguments": texts | st.just('{"a": 1}'),
        "input": texts,
        "output": texts | st.lists(part, max_size=2),
        "summary": st.lists(part, max_size=2),
    },
)
input_format = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "grammar"])},
    optional={"syntax": st.sampled_from(["lark", "regex", "x"]), "definition": patterns | st.just('start: "a"')},
)
named = st.fixed_dictionaries({"type": st.sampled_from(["function", "custom"]), "name": st.sampled_from(["f", "g"])})
tool = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "web_search"]), "name": st.sampled_from(["f", "g", "no name"])},
    optional={
        "format": input_format,
        "parameters": st.just({"type": "object"}) | anything,
        "strict": st.booleans(),
        "description": texts,
    },
)
raw = {
    "prompt_logprobs": st.integers(-1, 21),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "add_special_tokens": st.booleans(),
}
plausible = {
    "/v1/length": (
        {},
        {
            "input": several_texts,
            "prompt": several_texts,
            "partial": several_texts,
            "messages": st.lists(message, max_size=3),
            "gamma": st.floats(-0.1, 1.1),
            "model": st.sampled_from(["fake", "other"]),
            "chat_template_kwargs": st.dictionaries(st.text(max_size=5), anything, max_size=2),
        },
    ),
    "/rerank": (
        {"query": texts},
        {
            "documents": documents,
            "texts": documents,
            "top_n": st.integers(-1, 5),
            "return_documents": st.booleans(),
            "raw_scores": st.booleans(),
            "instruction": texts,
            **truncation,
        },
    ),
    "/v1/classify": ({"input": several_texts}, truncation),
    "/v1/embeddings": (
        {"input": several_texts},
        {
            "encoding_format": st.sampled_from(["float", "base64", "hex"]),
            "dimensions": st.integers(-1, 30),
            "input_type": st.sampled_from(["query", "document", "other"]),
            **truncation,
        },
    ),
    "/score": (
        {"text_1": texts | st.lists(texts, max_size=3), "text_2": texts | st.lists(texts, max_size=3)},
        {"queries": texts, "documents": texts, "query": texts, "items": texts, "labels": st.just([" Yes"]), **truncation},
    ),
    "/tokenize": (
        {},
        {
            "prompt": texts,
            "messages": st.lists(message, max_size=3),
            "add_special_tokens": st.booleans(),
            "return_token_strs": st.booleans(),
            "add_generation_prompt": st.booleans(),
            "parse_special_tokens": st.booleans(),
            "model": st.sampled_from(["fake", "other"]),
            "chat_template_kwargs": st.dictionaries(st.text(max_size=5), anything, max_size=2),
        },
    ),
    "/v1/detokenize": ({"tokens": token_ids}, {"model": st.sampled_from(["fake", "other"])}),
    "/v1/score": (
        {"query": texts | token_ids, "items": texts | st.lists(texts, max_size=6) | st.lists(token_ids, max_size=6)},
        {
            "labels": st.lists(st.sampled_from([" Yes", " No", "a", "zz"]), max_size=3),
            "label_token_ids": token_ids,
            "apply_softmax": st.booleans(),
            "item_first": st.booleans(),
            "model": st.sampled_from(["fake", "other"]),
        },
    ),
    "/v1/completions": (
        {"prompt": texts | st.lists(texts, max_size=3) | token_ids | st.lists(token_ids, max_size=3)},
        {**generation, "echo": st.booleans(), "logprobs": few, "best_of": few, "suffix": texts, **raw},
    ),
    "/v1/chat/completions": (
        {"messages": st.lists(message, max_size=4)},
        {
            **generation,
            "logprobs": st.booleans(),
            "top_logprobs": few,
            "max_completion_tokens": few,
            "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])}),
            "chat_template_kwargs": st.dictionaries(st.text(max_size=5), anything, max_size=2),
            "add_generation_prompt": st.booleans(),
            "continue_final_message": st.booleans(),
            **raw,
        },
    ),
    "/v1/responses": (
        {"input": texts | st.lists(item, max_size=6)},
        {
            **generation,
            "instructions": texts,
            "max_output_tokens": few,
            "include": st.lists(st.sampled_from(["message.output_text.logprobs", "reasoning.encrypted_content", "x"]), max_size=2),
            "top_logprobs": few,
            "truncation": st.sampled_from(["auto", "disabled", "cut"]),
            "tools": st.lists(tool, max_size=3),
            "tool_choice": st.sampled_from(["none", "auto", "required", "any"])
            | named
            | st.fixed_dictionaries(
                {"type": st.just("allowed_tools"), "mode": st.sampled_from(["auto", "required", "x"]), "tools": st.lists(named)}
            ),
            "parallel_tool_calls": st.booleans(),
            "reasoning": st.fixed_dictionaries({}, optional={"effort": st.sampled_from(["none", "low", "x"])}),
            "text": st.fixed_dictionaries(
                {"format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "x"])})}
            ),
            "store": st.booleans(),
            "previous_response_id": st.sampled_from(["resp_" + "0" * 32, "resp_1", ""]),
            "metadata": st.dictionaries(st.text(max_size=70), st.text(max_size=5), max_size=17),
        },
    ),
    "/v1/load_lora_adapter": (
        {"lora_name": st.sampled_from(["a", "a:b", "fake"]) | st.text(max_size=5), "lora_path": st.text(max_size=5)},
        {"load_inplace": st.booleans(), "model": st.sampled_from(["fake", "fake:a", "x"])},
    ),
    "/v1/unload_lora_adapter": ({"lora_name": st.text(max_size=5)}, {"model": st.sampled_from(["fake", "x"])}),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: nearly right, with some field replaced or added, or plain bytes."""
    path = draw(st.sampled_from(sorted(plausible)))
    needed, optional = plausible[path]
    body: dict[str, Any] = draw(st.fixed_dictionaries(needed, optional=optional))
    if draw(st.integers(0, 2)) == 0:
        body[draw(st.sampled_from([*needed, *optional]) | st.text(max_size=8))] = draw(anything)
    encoded = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(encoded)))
        encoded = encoded[:place] + draw(st.binary(max_size=4)) + encoded[place + draw(st.integers(0, 3)) :]
    return path, encoded


@settings(max_examples=3 * settings().max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_no_request_breaks_the_server(shared: httpx.Client, request_: tuple[str, bytes]) -> None:
    path, body = request_
    answer = shared.post(path, content=body)
    assert answer.status_code in (200, 400, 404), (answer.status_code, body, answer.text)
    assert answer.headers["x-request-id"]
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2]
        ends = ("data: [DONE]", "event: response.completed\n", "event: response.incomplete\n")
        assert last.startswith(ends), answer.text
    else:
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
