"""The page before servers that answer slowly, wrongly or not at all. It always says what happened and can be used again."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.console.conftest import Open, ready
from tests.gateway.console.scripted import MODEL, Connection, ScriptedServer

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def results(*scores: Any) -> dict[str, Any]:
    return {"object": "rerank.chunk", "results": [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]}


def token(text: str, **more: Any) -> dict[str, Any]:
    entry = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": [{"token": text, "logprob": -0.5}]}
    return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": [entry | more]}}]}


def streamed(*events: Any, done: bool = False) -> Any:
    """An answer of these events, which ends with or without ``[DONE]``."""

    def answer(connection: Connection) -> None:
        connection.begin()
        for event in [*events, *(["[DONE]"] if done else [])]:
            connection.event(event)

    return answer


WRONG_ANSWERS = {
    "a page": (lambda c: c.send(200, "text/html", b"<h1>Sign in</h1>"), "not a stream"),
    "a redirect": (lambda c: c.send(302, "text/plain", b"", location="http://127.0.0.1:9/"), "cannot be reached"),
    "an error in the stream": (streamed({"error": {"message": "lost it", "code": "engine_lost"}}), "lost it (engine_lost)"),
    "no JSON": (streamed("{oops"), "not JSON"),
    "null": (streamed("null"), "not JSON"),
    "an end too early": (streamed(results(0.5)), "ended too early"),
    "a line without end": (streamed("x" * (5 << 20)), "more than this page reads"),
    "an error without a body": (lambda c: c.send(500, "text/plain", b""), "gave no reason. (HTTP 500)"),
    "an error with a page": (lambda c: c.send(502, "text/html", b"<h1>Bad gateway</h1>"), "gave no reason. (HTTP 502)"),
    "nothing": (lambda c: c.connection.close(), "cannot be reached"),
}


@pytest.mark.slow
def test_wrong_answers(visit: Open, scripted: ScriptedServer) -> None:
    """Both panels read streams by the same code, so the second one gets a few of them."""
    page = ready(visit(scripted.answer()))
    for number, (name, (answer, words)) in enumerate(WRONG_ANSWERS.items()):
        scripted.answer(rerank=answer, chat=answer)
        for panel, error in (("rank", "#rank-error"), ("write", ".run .error"))[: 2 if number < 3 else 1]:
            page.click(f"#tab-{panel}")
            page.click(f"#{panel}-start")
            expect(page.locator(error).first, name).to_contain_text(words)
            expect(page.locator(f"#{panel}-start"), name).to_be_enabled()


@pytest.mark.slow
def test_a_flood_of_results_and_tokens_is_bounded(visit: Open, scripted: ScriptedServer) -> None:
    rows = [{"index": index, "relevance_score": index} for index in range(20_000)]
    tokens = {"choices": [{"logprobs": {"content": [{"token": "a"}] * 5001}}]}
    page = ready(visit(scripted.answer(rerank=streamed({"results": rows}, done=True), chat=streamed(tokens, done=True))))
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("8 documents scored")
    page.click("#tab-write")
    page.click("#write-start")
    expect(page.locator(".run .error").first).to_contain_text("more tokens than were asked for")


@pytest.mark.slow
def test_a_gateway_without_models_and_wrong_lists_of_them(visit: Open, scripted: ScriptedServer) -> None:
    page = visit(scripted.answer(models={"data": "none"}))
    for models in ([], "text", {"data": [{"id": 5}, None]}, {"data": []}):
        expect(page.locator("#notice-text")).to_contain_text("model")
        expect(page.locator("#rank-start")).to_be_disabled()
        scripted.answer(models=models)
        with page.expect_response("**/v1/models"):
            page.click("#notice-retry")
    expect(page.locator("#notice-text")).to_contain_text("No model is ready yet")
    adapter = {"id": "support", "parent": "yardstick-demo", "capabilities": ["score"]}
    scripted.answer(models={"data": [MODEL, adapter, {"id": "odd", "parent": 7}]})
    expect(page.locator("#notice")).to_be_hidden()  # the page asks again by itself
    expect(page.locator("#rank-start")).to_be_enabled()
    page.click("#tab-status")
    for row in ("support (adapter of yardstick-demo)", "odd"):
        expect(page.locator("#status-models td").filter(has_text=row).first).to_have_text(row)


def test_markup_stays_text(visit: Open, scripted: ScriptedServer) -> None:
    """In documents, in text of the model, in errors, and in names of models."""
    failed = {"results": [], "errors": [{"index": 1, "message": EVIL}]}
    alternatives = [{"token": EVIL, "logprob": -1}]
    model = {"id": EVIL, "capabilities": ["generate", EVIL], "preset": {"name": EVIL, "task": "rerank"}}
    chat = streamed(token(EVIL, top_logprobs=alternatives), {"error": {"message": EVIL, "code": EVIL}})
    escaped = EVIL.replace('"', '\\"')
    metrics = f'yardstick_engines_ready 1\nyardstick_engine_requests_in_flight{{engine="{escaped}"}} 1\n'
    page = visit(
        scripted.answer(
            models={"data": [model]},
            rerank=streamed(results(0.5), failed, done=True),
            chat=chat,
            metrics=lambda c: c.send(200, "text/plain", metrics.encode()),
        )
    )
    expect(page.locator("#model")).to_have_value(EVIL)
    page.fill("#rank-documents", f"{EVIL}\n{EVIL}")
    page.click("#rank-start")
    expect(page.locator("#rank-list .bar-text").first).to_have_text(EVIL)
    expect(page.locator("#rank-list .failed .error")).to_have_text(EVIL)
    expect(page.locator("#rank-code code")).to_contain_text("<img src=x")
    page.click("#tab-write")
    page.fill("#write-text", EVIL)
    page.click("#write-start")
    expect(page.locator(".run .error").first).to_contain_text(EVIL)
    page.locator(".token").first.click()
    expect(page.locator(".alternatives").first).to_contain_text(EVIL.replace(" ", "␣"))
    page.click("#tab-status")
    expect(page.locator("#status-engines td").first).to_have_text(EVIL)
    expect(page.locator("#status-models")).to_contain_text(EVIL)
    assert page.title() == "Status – Yardstick console"
    assert page.locator("img").count() == 1, "the page's own"
    assert page.locator("script").count() == 2


def test_the_browser_refuses_markup_from_text(browser: Any, server: str) -> None:
    """The policy forbids it, should the page's own code ever try."""
    page = browser.new_page()
    page.goto(server)
    for attempt in ("document.body.innerHTML = '<b>x</b>'", "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')"):
        refused = page.evaluate(f"() => {{ try {{ {attempt}; return false }} catch (error) {{ return true }} }}")
        assert refused, attempt
    leak = "fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => 'refused')"
    with page.expect_console_message(lambda message: "Security Policy" in message.text):
        assert page.evaluate(leak) == "refused"
    page.close()


class Slow:
    """An answer that begins and does not end; ``left`` is set when the client has left."""

    def __init__(self, *events: Any) -> None:
        self.events = events
        self.left = threading.Event()

    def __call__(self, connection: Connection) -> None:
        streamed(*self.events)(connection)
        if connection.wait_for_client_to_leave():
            self.left.set()


@pytest.mark.slow
def test_results_are_shown_as_they_arrive_until_a_stop_or_the_end_of_the_page(visit: Open, scripted: ScriptedServer) -> None:
    rerank, chat, left = Slow(results(0.1, 0.9)), Slow(token("some"), token(" words")), Slow(results(0.5))
    page = ready(visit(scripted.answer(rerank=rerank, chat=chat)))
    page.click("#rank-start")
    expect(page.locator("#rank-list li")).to_have_count(2)
    expect(page.locator("#rank-start")).to_be_disabled()
    page.click("#rank-stop")
    expect(page.locator("#rank-summary")).to_have_text("Stopped after 2 of 8 documents.")
    assert rerank.left.wait(10)
    page.click("#tab-write")
    page.check("#write-two")
    page.click("#write-start")
    expect(page.locator(".tokens").nth(1)).to_have_text("some words")
    page.click("#write-stop")
    expect(page.locator(".run").nth(1).locator(".figures")).to_contain_text("stopped")
    expect(page.locator("#write-start")).to_be_enabled()
    assert chat.left.wait(10)
    scripted.answer(rerank=left)
    page.click("#tab-rank")
    page.click("#rank-start")
    expect(page.locator("#rank-list li")).to_have_count(1)
    page.goto("about:blank")
    assert left.left.wait(10), "leaving the page ends the stream"


@pytest.mark.slow
def test_events_at_every_boundary_of_chunks(page: Page) -> None:
    text = ': comment\r\n\r\ndata: {"text": "é€😀"}\n\ndata:{"n":1}\r\n\r\nevent: x\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    text += 'data: {"n": 3}\n\n'
    read = """async (text) => {
      const { readEvents } = await import("/console/sse.js");
      const bytes = new TextEncoder().encode(text), told = [];
      for (let cut = 0; cut <= bytes.length; cut += 1) {
        const body = new ReadableStream({ start(controller) {
          for (const part of [bytes.slice(0, cut), bytes.slice(cut)]) controller.enqueue(part);
          controller.close();
        } });
        const events = [];
        for await (const event of readEvents(body)) events.push(event);
        told.push(JSON.stringify(events));
      }
      return told;
    }"""
    told = page.evaluate(read, text)
    assert len(told) == len(text.encode()) + 1
    assert {json.dumps(json.loads(each), ensure_ascii=False) for each in told} == {'[{"text": "é€😀"}, {"n": 1}, {"n": 2}]'}
