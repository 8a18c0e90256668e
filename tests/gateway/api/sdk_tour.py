"""Every endpoint through the OpenAI SDK, whichever version the interpreter has: ``python sdk_tour.py BASE_URL MODEL [API_KEY]``.

Prints one JSON object: what each call gave. It runs in a process of its own, so that other versions of the SDK than the installed
one can be tried (``PYTHONPATH=DIR_WITH_OPENAI_2 python sdk_tour.py …``), against a gateway before any engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

PROMPT = "The quick brown fox"
MESSAGES: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
]
DRAW: dict[str, Any] = {"max_tokens": 12, "seed": 7, "temperature": 1.0}
EXTRA = {"top_k": 50, "min_p": 0.01, "ignore_eos": True}


def completions(client: openai.OpenAI, model: str) -> dict[str, Any]:
    whole = client.completions.create(model=model, prompt=PROMPT, n=2, logprobs=2, extra_body=EXTRA, **DRAW)
    stream = client.completions.create(
        model=model, prompt=PROMPT, n=2, stream=True, stream_options={"include_usage": True}, extra_body=EXTRA, **DRAW
    )
    streamed, usage = {0: "", 1: ""}, None
    for chunk in stream:
        assert chunk.system_fingerprint == whole.system_fingerprint
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    likelihood = client.completions.create(model=model, prompt=[PROMPT, "Yes"], echo=True, logprobs=1, max_tokens=0)
    return {
        "texts": [choice.text for choice in whole.choices],
        "streamed": [streamed[0], streamed[1]],
        "usage": whole.usage.model_dump(exclude_none=True),
        "streamed_usage": usage.model_dump(exclude_none=True),
        "logprobs": [choice.logprobs.token_logprobs for choice in whole.choices],
        "prompt_logprobs": [choice.logprobs.token_logprobs for choice in likelihood.choices],
        "prompt_tokens": [choice.logprobs.tokens for choice in likelihood.choices],
        "prompt_texts": [choice.text for choice in likelihood.choices],
        "fingerprint": whole.system_fingerprint,
    }


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    draw = {**DRAW, "max_completion_tokens": DRAW["max_tokens"]}
    del draw["max_tokens"]
    whole = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, response_format={"type": "text"}, extra_body=EXTRA, **draw
    )
    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXTRA,
        **draw,
    )
    chunks = list(stream)
    parts = [choice for chunk in chunks for choice in chunk.choices]
    entries = whole.choices[0].logprobs.content
    return {
        "text": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "streamed": "".join(part.delta.content or "" for part in parts),
        "first_role": parts[0].delta.role,
        "streamed_finish": parts[-1].finish_reason,
        "logprobs": [entry.logprob for entry in entries],
        "streamed_logprobs": [entry.logprob for part in parts if part.logprobs for entry in part.logprobs.content],
        "bytes": [entry.bytes for entry in entries],
        "top": [len(entry.top_logprobs) for entry in entries],
        "usage": chunks[-1].usage.model_dump(exclude_none=True),
        "fingerprints": sorted({whole.system_fingerprint, *(chunk.system_fingerprint for chunk in chunks)}),
        "service_tier": whole.service_tier,
    }


def responses(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Create, stream, continue, retrieve, list and delete; the answers are those of a chat with the same messages."""
    draw: dict[str, Any] = {"max_output_tokens": 12, "temperature": 1.0, "extra_body": {"seed": 7} | EXTRA}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]
    logged: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = client.responses.create(model=model, instructions="Be brief.", input=asked, store=True, **logged, **draw)
    text = whole.output[0].content[0]
    events = list(client.responses.create(model=model, instructions="Be brief.", input=asked, stream=True, **draw))
    with client.responses.stream(model=model, instructions="Be brief.", input=PROMPT, **draw) as stream:
        helped = list(stream)
    snapshot = [event.snapshot for event in helped if event.type == "response.output_text.delta"][-1]
    following = client.responses.create(model=model, input="And?", previous_response_id=whole.id, **draw)
    kept = client.responses.retrieve(whole.id)
    items = client.responses.input_items.list(whole.id)
    client.responses.delete(whole.id)
    try:
        client.responses.retrieve(whole.id)
        gone = ""
    except openai.NotFoundError as error:
        gone = error.code
    return {
        "text": whole.output_text,
        "status": whole.status,
        "reason": whole.incomplete_details.reason,
        "logprobs": [entry.logprob for entry in text.logprobs],
        "top": [len(entry.top_logprobs) for entry in text.logprobs],
        "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "numbers": [event.sequence_number for event in events] == list(range(len(events))),
        "last": events[-1].response.output_text,
        "snapshot": snapshot,
        "final": helped[-1].response.output_text,
        "output_tokens": whole.usage.output_tokens,
        "kept": kept.output_text,
        "items": [part.text for item in items for part in item.content],
        "more_tokens": following.usage.input_tokens - whole.usage.input_tokens,
        "gone": gone,
    }


def errors(client: openai.OpenAI, model: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, call in {
        "unknown_model": lambda: client.completions.create(model="no-such-model", prompt="x"),
        "tools": lambda: client.chat.completions.create(
            model=model, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        ),
        "temperature": lambda: client.completions.create(model=model, prompt="x", temperature=-1),
    }.items():
        try:
            call()
        except openai.APIStatusError as error:
            told[name] = {"class": type(error).__name__, "status": error.status_code, "code": error.code, "param": error.param}
    return told


def length(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Guided generations and the values of texts; only for models that have a length model."""
    if "length_guidance" not in (client.models.retrieve(model).model_extra or {})["capabilities"]:
        return {}
    guide = {"length_guidance": {"scale": 20, "return_values": True}, "ignore_eos": True}
    said = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, extra_body=guide, max_completion_tokens=8, seed=7
    )
    written = client.completions.create(model=model, prompt=PROMPT, logprobs=3, extra_body=guide, max_tokens=8, seed=7)
    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=3,
        extra_body=guide,
        max_completion_tokens=8,
        seed=7,
        stream=True,
    )
    parts = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs]
    aimed = client.completions.create(model=model, prompt=PROMPT, extra_body={"length_guidance": {"target_length": 20}}, seed=7)
    valued: Any = client.post("/length", body={"model": model, "prompt": PROMPT, "partial": ["", " jumps"]}, cast_to=object)
    return {
        "values": [[top.value for top in entry.top_logprobs] for entry in said.choices[0].logprobs.content],
        "streamed_values": [[top.value for top in entry.top_logprobs] for part in parts for entry in part.content],
        "remaining_tokens": [entry.top_logprobs[0].remaining_tokens for entry in said.choices[0].logprobs.content],
        "written_values": [len(row) for row in written.choices[0].logprobs.top_values],
        "aimed_tokens": aimed.usage.completion_tokens,
        "texts": [entry["value"] for entry in valued["data"]],
    }


def score(client: openai.OpenAI, model: str) -> dict[str, Any]:
    body = {"model": model, "query": "Is it relevant? ", "items": ["red shoes", "blue table"], "labels": [" Yes", " No"]}
    answer: Any = client.post("/score", body=body, cast_to=object)
    return {"object": answer["object"], "scores": answer["scores"]}


async def asynchronous(base_url: str, model: str, key: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        whole = await client.completions.create(model=model, prompt=PROMPT, extra_body=EXTRA, **DRAW)
        text = ""
        async for chunk in await client.completions.create(model=model, prompt=PROMPT, stream=True, extra_body=EXTRA, **DRAW):
            text += "".join(choice.text for choice in chunk.choices)
        async with client.chat.completions.stream(model=model, messages=MESSAGES, extra_body=EXTRA, **DRAW) as stream:
            helped = "".join([event.delta async for event in stream if event.type == "content.delta"])
        return {"text": whole.choices[0].text, "streamed": text, "helped": helped}


def main(base_url: str, model: str, key: str = "none") -> None:
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    told = {
        "version": openai.__version__,
        "models": [entry.id for entry in client.models.list()],
        "model": client.models.retrieve(model).id,
        "completions": completions(client, model),
        "chat": chat(client, model),
        "responses": responses(client, model),
        "errors": errors(client, model),
        "score": score(client, model),
        "length": length(client, model),
        "async": asyncio.run(asynchronous(base_url, model, key)),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
