"""What ``yardstick serve`` prints once it is ready: a list scored by the demo model, and calls that the model can answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
from rich.console import Console

from engine import wire
from gateway.commands.errors import CommandError
from gateway.commands.results import Results, as_table
from gateway.commands.score import ScoreJob, score_items
from gateway.presets.preset import PresetError, choose, parse_preset

QUERY = "red running shoes"
ITEMS = ("blue running shoes", "crimson jogging sneakers", "red wool scarf", "scarlet running trainers", "green canvas tent")
LABELS = (" Yes", " No")
PROMPT, SUFFIX = f"Query: {QUERY}\nItem: ", "\nRelevant:"
KEY_VARIABLE = "YARDSTICK_API_KEY"

SDK = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
"""
SDK_POST = "print(client.post({path!r}, cast_to=object, body={body}))\n"
SDK_CHAT = """\
chat = client.chat.completions.create(model={model!r}, messages=[{{"role": "user", "content": "Describe: {query}"}}])
print(chat.choices[0].message.content)
"""
SDK_COMPLETION = """\
completion = client.completions.create(model={model!r}, prompt="Describe: {query}", max_tokens=30)
print(completion.choices[0].text)
"""
SDK_GUIDED = """
short = client.chat.completions.create(
    model={model!r},
    messages=[{{"role": "user", "content": "Describe: {query}"}}],
    extra_body={{"length_guidance": {{"target_length": 30}}}},
)
print(short.usage.completion_tokens, short.choices[0].message.content)
"""
SDK_OF = {"generate": SDK_COMPLETION, "chat": SDK_CHAT, "length_guidance": SDK_GUIDED}
"""Code for each ability that is not the task of a preset."""


def show_example(console: Console, url: str, model: str) -> None:
    """Score the example on the demo model and print it, best first. Raises :class:`CommandError`."""
    results = score_example(url, model)
    console.print(f'\nHow well does each item answer "{QUERY}"? POST {url}/v1/score returns:', soft_wrap=True)
    console.print(as_table(results.by_first_label()))


def score_example(url: str, model: str) -> Results:
    """Return the example's scores."""
    job = ScoreJob(PROMPT, LABELS, url, None, model, apply_softmax=True, item_first=False, batch=len(ITEMS), suffix=SUFFIX)
    return score_items(job, list(ITEMS))


def abilities_of(engine: str, presets: Mapping[str, str]) -> set[str]:
    """Return what the model of the engine at this URL can do: its capabilities, the task of its preset, and ``chat`` if it has a
    chat template. ``presets``: the setting. Raises :class:`CommandError`."""
    try:
        with httpx.Client(base_url=engine, trust_env=False, timeout=60) as client:
            info = msgspec.msgpack.decode(client.get("/info").raise_for_status().content, type=wire.Info)
            files = msgspec.msgpack.decode(client.get("/tokenizer").raise_for_status().content, type=wire.TokenizerFiles)
        preset = choose(
            info.model, files.architecture, info.capabilities, classes=len(info.classes), beside=files.preset, chosen=presets
        )
    except (httpx.HTTPError, msgspec.MsgspecError, PresetError) as error:
        raise CommandError(f"the engine does not say what its model can do: {error}") from None
    abilities = set(info.capabilities) | ({parse_preset(preset.encode()).task} if preset else set())
    return abilities | ({"chat"} if "generate" in abilities and files.chat_template else set())


def show_calls(console: Console, url: str, model: str, abilities: set[str], *, with_key: bool) -> None:
    """Print a curl command and code for the OpenAI SDK, ready to be pasted, that use what the model can do.

    ``abilities``: see :func:`abilities_of`.
    """
    key = f'os.environ["{KEY_VARIABLE}"]' if with_key else '"none"'
    sdk = ("import os\n" if with_key else "") + SDK.format(url=url, key=key)
    path, body = _first_call(model, abilities)
    if path not in ("/chat/completions", "/completions"):
        sdk += SDK_POST.format(path=path, body=body)
    for ability, lines in SDK_OF.items():
        needed = {"generate"} if ability == "generate" else {"chat", ability}
        if needed <= abilities and not (ability == "generate" and "chat" in abilities):
            sdk += lines.format(model=model, query=QUERY)
    authorization = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if with_key else ""
    curl = f"curl {url}/v1{path} -H 'content-type: application/json'{authorization} -d {shlex.quote(json.dumps(body))}"
    for title, text in (("With curl:", curl), ("With the OpenAI SDK:", sdk.rstrip())):
        console.print(f"\n{title}\n", style="bold")
        console.print(text, markup=False, soft_wrap=True)


def _first_call(model: str, abilities: set[str]) -> tuple[str, dict[str, Any]]:
    """Return the path below ``/v1`` and the body of the call that shows best what the model is for."""
    if "classify" in abilities and "rerank" not in abilities:
        return "/classify", {"model": model, "input": list(ITEMS)}
    if "embed" in abilities:
        return "/embeddings", {"model": model, "input": list(ITEMS)}
    if "score" in abilities:
        return "/score", example_body(model)
    if "rerank" in abilities:
        return "/rerank", {"model": model, "query": QUERY, "documents": list(ITEMS)}
    if "chat" in abilities:
        return "/chat/completions", {"model": model, "messages": [{"role": "user", "content": f"Describe: {QUERY}"}]}
    return "/completions", {"model": model, "prompt": f"Describe: {QUERY}", "max_tokens": 30}


def example_body(model: str) -> dict[str, Any]:
    """Return the example's request body; docs/demo-models.md documents the format of its prompts."""
    items = [item + SUFFIX for item in ITEMS]
    return {"model": model, "query": PROMPT, "items": items, "labels": list(LABELS), "apply_softmax": True}
