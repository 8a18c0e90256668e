"""The Write panel."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect
from tokenizers import Tokenizer

from tests.gateway.answers import printed_by
from tests.gateway.console.conftest import DEMO, Open, ended, ready, write
from tests.gateway.console.scripted import Connection, ScriptedServer
from tests.gateway.console.test_rank import run_in_shell, shown_code
from tests.test_tools_end_to_end import WEATHER

QUESTION = "Describe: red running shoes"


@pytest.fixture
def panel(page: Page) -> Page:
    page.click("#tab-write")
    page.fill("#write-seed", "3")
    return page


def written(page: Page, run: int = 0) -> str:
    return page.locator(".run .tokens").nth(run).inner_text()


def figure(page: Page, name: str, run: int = 0) -> str:
    return page.locator(".run").nth(run).locator(f".figures div:has(dt:text-is('{name}')) dd").inner_text()


def test_the_text_is_the_answer_with_its_probabilities(panel: Page, server: str) -> None:
    write(panel)
    body = {"messages": [{"role": "user", "content": QUESTION}], "seed": 3, "temperature": 1, "logprobs": True, "max_tokens": 200}
    choice = httpx.post(f"{server}/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    assert written(panel) == choice["message"]["content"]
    probable = [entry["logprob"] > -0.1054 for entry in choice["logprobs"]["content"]]  # more than 90 %
    classes = panel.locator(".token > span").evaluate_all("spans => spans.map((span) => span.className)")
    assert [name == "p5" for name in classes] == probable[: len(classes)]
    assert 0 < sum(probable) < len(probable)
    assert figure(panel, "Ended by") == "end of text"
    assert figure(panel, "Tokens") == str(len(classes))


@pytest.mark.slow
def test_continue_from_an_alternative(panel: Page, server: str) -> None:
    write(panel)
    before = written(panel)
    assert before.startswith("A list of four points.")
    sent = []
    panel.on("request", lambda request: sent.append(request) if "completions" in request.url else None)
    for word in ("three", "two"):  # the second time from a text that was continued
        panel.locator(".token").nth(3).click()
        panel.get_by_role("button", name=f"Continue with ␣{word}").click()
        ended(panel)
        assert written(panel).startswith(f"A list of {word} points.")
    tokenizer = Tokenizer.from_file(str(DEMO / "base" / "tokenizer.json"))
    messages = {"messages": [{"role": "user", "content": QUESTION}]}
    prompt = httpx.post(f"{server}/tokenize", json=messages).json()["tokens"]
    for request, word in zip(sent, ("three", "two"), strict=True):
        ids = json.loads(request.post_data)["prompt"]
        assert ids == prompt + [tokenizer.token_to_id(spelled) for spelled in ("A", "Ġlist", "Ġof", f"Ġ{word}")]
    assert panel.locator(".chosen").count() == 1
    assert panel.locator(".token").first.inner_text() == "A"
    assert "Note" not in panel.locator(".figures").first.inner_text(), "the tokens are exact"
    write(panel)
    assert written(panel) == before, "the button begins anew"


@pytest.mark.slow
def test_tokens_by_keyboard(panel: Page) -> None:
    write(panel)
    panel.locator(".token").first.focus()
    for key in ("End", "Home", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        panel.keyboard.press(key)
    expect(panel.locator(".alternatives h4").first).to_have_text("Token 4: ␣four")
    assert panel.evaluate("document.activeElement.getAttribute('aria-label')") == "Continue with ␣three"
    panel.keyboard.press("Escape")
    expect(panel.locator(".alternatives").first).to_be_hidden()
    assert panel.evaluate("document.activeElement.textContent") == " four"
    panel.keyboard.press("Tab")
    assert not panel.evaluate("document.activeElement.classList.contains('token')"), "the tokens are one stop"
    panel.keyboard.press("Shift+Tab")
    assert panel.evaluate("document.activeElement.textContent") == " four"


@pytest.mark.slow
def test_two_runs_and_length_guidance(panel: Page) -> None:
    panel.check("#write-two")
    panel.locator(".run").nth(1).locator(".guide-mode").select_option("scale")
    slider = panel.locator(".run").nth(1).locator("input[type=range]")
    slider.fill("-10")
    expect(panel.locator(".run").nth(1).locator(".guide-value")).to_have_text("shorter (−10)")
    expect(panel.locator("#write-code h3")).to_have_text("This request as code: Run B")
    expect(panel.locator("#write-code code")).to_contain_text('"scale": -10')
    write(panel)
    plain, short = (int(figure(panel, "Tokens", run)) for run in (0, 1))
    assert short < plain
    expect(panel.locator(".run").nth(0).locator("figure")).to_be_hidden()
    expect(panel.locator(".run").nth(1).locator("figcaption")).to_contain_text("Predicted tokens to come")
    panel.locator(".run").nth(1).locator(".guide-mode").select_option("target")
    slider.fill("100")
    write(panel)
    assert 60 < int(figure(panel, "Tokens", 1)) < 160
    assert figure(panel, "Tokens", 0) == str(plain), "the seed repeats the other run"
    panel.uncheck("#write-two")
    panel.locator(".guide-mode").first.select_option("target")
    write(panel)
    panel.locator(".token").nth(3).click()
    panel.locator(".alternatives li button:enabled").first.click()
    ended(panel)
    code = panel.locator("#write-code code")
    expect(code).to_contain_text('"target_length": 36')
    expect(code).to_contain_text('"max_tokens": 196')
    panel.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "plain", "capabilities": ["generate"]}]}))
    panel.reload()
    expect(panel.locator("#model")).to_have_value("plain")
    expect(panel.locator(".guidance").first, "a model without a length model has no slider").to_be_hidden()


@pytest.mark.slow
def test_the_code_repeats_the_request(panel: Page) -> None:
    panel.locator(".guide-mode").first.select_option("scale")
    write(panel)
    stream = run_in_shell(shown_code(panel, "write", "curl"))
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == written(panel)
    assert printed_by(shown_code(panel, "write", "Python")) == written(panel)


@pytest.mark.slow
def test_the_spelling_of_every_token_is_read(page: Page, server: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "base" / "tokenizer.json"))
    spelled = [tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())]
    read = "async (spelled) => { const { textOf } = await import('/console/continuation.js'); return spelled.map(textOf); }"
    texts = page.evaluate(read, spelled)
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert texts == [spelled[id] if id in special else tokenizer.decode([id]) for id in range(len(spelled))]
    assert page.evaluate(read, ["▁red", "<0x0A>", "re▁d"]) == [" red", "\n", "re d"]


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_a_system_message_and_a_schema(panel: Page) -> None:
    panel.click("#write-more summary")
    panel.fill("#write-system", "Be brief.")
    for text, words in (("{oops", "it is not JSON"), ("[1]", "it is of another type")):
        panel.fill("#write-schema", text)
        panel.click("#write-start")
        expect(panel.locator(".run .error").first).to_contain_text(f"The JSON Schema must be an object; {words}")
    panel.fill("#write-schema", json.dumps(SCHEMA))
    expect(panel.locator("#write-more-title")).to_have_text("System message, JSON Schema, tools (2 set)")
    for kind, field in (("chat", "response_format"), ("text", "structured_outputs")):
        panel.select_option("#write-kind", kind)
        write(panel)
        expect(panel.locator(".run .error").first).to_be_hidden()
        assert json.loads(written(panel).replace("↵", ""))["colour"] in ("red", "blue")
        expect(panel.locator("#write-code code")).to_contain_text(f'"{field}"')
        assert ("Be brief." in panel.locator("#write-code code").inner_text()) == (kind == "chat")
    expect(panel.locator("#write-system")).to_be_hidden()
    panel.locator(".token").first.click()
    panel.locator(".alternatives li button:enabled").first.click()
    ended(panel)
    assert "Continued as plain text, without schema and tools." in figure(panel, "Note")


def calls(*told: dict[str, Any]) -> dict[str, Any]:
    entry = {"token": "{", "logprob": -0.5, "bytes": [123], "top_logprobs": []}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [*told]}, "logprobs": {"content": [entry]}}]}


@pytest.mark.slow
def test_calls_of_tools(visit: Open, scripted: ScriptedServer) -> None:
    asked = []

    def answer(connection: Connection) -> None:
        asked.append(connection.body)
        connection.begin()
        connection.event(calls({"index": 0, "id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}))
        for part in ('{"city":', ' "Z\u00fcrich"}'):
            connection.event(calls({"index": 0, "function": {"arguments": part}}))
        connection.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        connection.event("[DONE]")

    page = ready(visit(f"{scripted.answer(chat=answer)}/#write"))
    page.click("#write-more summary")
    page.fill("#write-tools", json.dumps([WEATHER]))
    page.select_option("#write-choice", "required")
    write(page)
    expect(page.locator(".run .error").first).to_be_hidden()
    assert (asked[0]["tools"], asked[0]["tool_choice"]) == ([WEATHER], "required")
    expect(page.locator(".calls h4").first).to_have_text("Calls get_weather")
    assert json.loads(page.locator(".calls pre").first.inner_text()) == {"city": "Z\u00fcrich"}
    assert figure(page, "Ended by") == "call of a tool"
    expect(page.locator("#write-history .bar-text")).to_contain_text("get_weather({")


STORED = {
    "at": 1,
    "run": "Run A",
    "text": "<b>old</b>",
    "tokens": 3,
    "finish": "end of text",
    "fields": {"write-text": "<i>asked</i>"},
}
BROKEN = [None, 7, STORED | {"at": "1"}, STORED | {"at": 1e300}, STORED | {"text": 7}, STORED | {"fields": None}]


@pytest.mark.slow
def test_earlier_runs_are_kept_and_used_again(panel: Page) -> None:
    """The storage may be anybody's; what is no run is left out, and twenty runs are kept."""
    expect(panel.locator("#write-history")).to_be_hidden()
    keep = "(runs) => localStorage.setItem('yardstick.console.runs', JSON.stringify({runs}))"
    panel.evaluate(keep, [*BROKEN, *[STORED] * 10, STORED | {"text": "x" * 500_000}, *[STORED] * 20])
    panel.reload()
    panel.click("#write-history summary")
    entries = panel.locator("#write-history li")
    expect(entries).to_have_count(14)
    expect(entries.first).to_contain_text("<b>old</b>")
    assert (
        panel.locator("#write-history .bar-text").evaluate_all("all => Math.max(...all.map((each) => each.textContent.length))")
        == 2000
    )
    panel.fill("#write-max", "3")
    for _ in range(7):
        write(panel)
    expect(entries).to_have_count(20)
    expect(entries.first).to_contain_text("3 tokens · token limit")
    assert panel.evaluate("localStorage.getItem('yardstick.console.runs').length") < 20_000
    panel.fill("#write-text", "another text")
    panel.fill("#write-max", "50")
    panel.reload()
    panel.click("#write-history summary")
    panel.get_by_role("button", name="Use the fields of the run").first.click()
    expect(panel.locator("#write-text")).to_have_value(QUESTION)
    expect(panel.locator("#write-max")).to_have_value("3")
    panel.get_by_role("button", name="Use the fields of the run").last.click()
    expect(panel.locator("#write-text")).to_have_value("<i>asked</i>")
    panel.get_by_role("button", name="Forget these runs").click()
    expect(panel.locator("#write-history")).to_be_hidden()
    panel.reload()
    expect(panel.locator("#write-history")).to_be_hidden()
