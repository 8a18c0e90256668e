"""The Rank panel."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.gateway.answers import printed_by
from tests.gateway.console.conftest import Open
from tests.gateway.console.scripted import MODEL, Connection, ScriptedServer
from tests.gateway.console.test_page import check_accessibility
from tests.parts import need

RELEVANT = {"crimson jogging sneakers", "scarlet running trainers", "red shoes for running on trails"}


def rank(page: Page) -> list[tuple[str, float]]:
    """Press Rank; what is listed then, from top to bottom."""
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("scored")
    texts, scores = (page.locator(f"#rank-list .{name}").all_text_contents() for name in ("bar-text", "bar-score"))
    return [(text, float(score)) for text, score in zip(texts, scores, strict=True)]


def shown_code(page: Page, panel: str, language: str) -> str:
    page.locator(f"#{panel}-code").get_by_role("button", name=language, exact=True).click()
    return page.locator(f"#{panel}-code code").inner_text()


def run_in_shell(command: str) -> str:
    need("curl")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30).stdout


def test_the_example_needs_one_press(page: Page) -> None:
    rows = rank(page)
    assert len(rows) == 8
    assert {text for text, _ in rows[:3]} == RELEVANT
    assert [score for _, score in rows] == sorted((score for _, score in rows), reverse=True)
    best, worst = page.locator(".bar-fill").first.bounding_box(), page.locator(".bar-fill").last.bounding_box()
    assert best["width"] > 20 * worst["width"]
    assert re.fullmatch(r"8 documents scored · 122 tokens, \d+ of them from the cache · \d.*s\.", page.inner_text("#rank-summary"))
    note = page.locator(".bar-note").first.text_content()
    assert re.fullmatch(r"Place 1 · document \d · 1\d tokens, (\d+ computed|from the cache) · after \d.*s", note)
    rank(page)
    expect(page.locator("#rank-summary")).to_contain_text("122 tokens, 122 of them from the cache")
    assert all("from the cache" in text for text in page.locator(".bar-note").all_text_contents())


@pytest.mark.slow
def test_the_code_repeats_the_request(page: Page, server: str) -> None:
    rows = rank(page)
    assert run_in_shell(shown_code(page, "rank", "curl")).endswith("data: [DONE]\n\n")
    told = printed_by(shown_code(page, "rank", "Python"))
    assert [line.partition(" ")[2] for line in told.splitlines()] == [text for text, _ in rows]


@pytest.mark.slow
def test_own_labels(page: Page, server: str) -> None:
    page.check("input[value=labels]")
    page.fill("#rank-labels", " No, Yes")
    expect(page.locator("#rank-chips code")).to_have_text(["␣No", "␣Yes"])
    rows = rank(page)
    body = {
        "query": "Query: red running shoes\nItem: ",
        "items": [f"{text}\nRelevant:" for text, _ in rows],
        "labels": [" No", " Yes"],
    }
    answer = httpx.post(f"{server}/v1/score", json=body | {"apply_softmax": True}).raise_for_status().json()
    assert [score for _, score in rows] == pytest.approx([scores[0] for scores in answer["scores"]], abs=1e-4)
    assert {text for text, _ in rows[-3:]} == RELEVANT
    expect(page.locator("#rank-code code")).to_contain_text("/v1/score")


@pytest.mark.slow
def test_documents_from_files(page: Page, tmp_path: Path) -> None:
    """An error removes the results, which were those of other documents."""
    lines, rows = tmp_path / "lines.txt", tmp_path / "rows.jsonl"
    lines.write_text("blue tent\r\n\r\nred shoes\r\n")
    rows.write_text('"a plain text"\n{"text": "two\\nlines", "id": 1}\nnot json\n')
    page.set_input_files("#rank-file", lines)
    expect(page.locator("#rank-count")).to_have_text("2 documents")
    page.set_input_files("#rank-file", rows)
    expect(page.locator("#rank-documents")).to_have_value("a plain text\ntwo lines\nnot json")
    texts = ['crimson "jogging" sneakers, new', "blue table"]
    table = tmp_path / "items.CSV"
    table.write_bytes(b'\xef\xbb\xbfid,Text,"""b"", c"\r\n1,"crimson ""jogging""\nsneakers, new",x\r\n\r\n2,blue table,\r\n')
    page.set_input_files("#rank-file", table)
    expect(page.locator("#rank-column option")).to_have_text(["id", "Text", '"b", c'])
    expect(page.locator("#rank-documents")).to_have_value("\n".join(texts))
    ranked = rank(page)
    for kind in ("json", "csv"):
        with page.expect_download() as saved:
            page.click(f"#rank-{kind}")
        content = Path(saved.value.path()).read_text(encoding="utf-8")
        found = json.loads(content) if kind == "json" else list(csv.DictReader(io.StringIO(content)))
        assert [row["text"] for row in found] == [text for text, _ in ranked]
        assert [float(row["score"]) for row in found] == pytest.approx([score for _, score in ranked], abs=1e-4)
        assert [texts[int(row["index"])] for row in found] == [text for text, _ in ranked]
    page.select_option("#rank-column", "id")
    expect(page.locator("#rank-documents")).to_have_value("1\n2")
    page.fill("#rank-documents", "")
    page.click("#rank-start")
    expect(page.locator("#rank-error")).to_contain_text("at least one")
    expect(page.locator("#rank-list li")).to_have_count(0)
    expect(page.locator("#rank-export")).to_be_hidden()


@pytest.mark.slow
def test_too_much_is_not_sent(page: Page, tmp_path: Path) -> None:
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    for text, words in (
        ("''", "at least one"),
        ("'a\\n'.repeat(1001)", "at most 1,000 documents"),
        ("'a'.repeat(1048577)", "1,048,576 characters"),
    ):
        page.evaluate(f"document.querySelector('#rank-documents').value = {text}")
        page.click("#rank-start")
        expect(page.locator("#rank-error")).to_contain_text(words)
    large = tmp_path / "large.txt"
    large.write_bytes(b"a" * (4 << 20) + b"a")
    page.set_input_files("#rank-file", large)
    expect(page.locator("#rank-error")).to_contain_text("opens files of up to")
    assert sent == []


@pytest.mark.slow
def test_documents_that_fail_or_are_cut_and_errors_of_the_request_are_shown(page: Page) -> None:
    page.fill("#rank-documents", "red shoes\n" + "red " * 2000)
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("1 document scored · 1 failed")
    expect(page.locator("#rank-list .failed .error")).to_contain_text("1024")
    page.check("#rank-cut")
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("2 documents scored · 1 cut to fit")
    assert sorted("cut to fit" in note for note in page.locator(".bar-note").all_text_contents()) == [False, True]
    expect(page.locator("#rank-code code")).to_contain_text('"truncate": true')
    page.check("input[value=labels]")
    page.fill("#rank-labels", "not a token, Yes")
    page.click("#rank-start")
    expect(page.locator("#rank-error")).to_contain_text("HTTP 400")
    expect(page.locator("#rank-start")).to_be_enabled()


@pytest.mark.slow
def test_the_best_and_those_with_a_text_are_listed_and_saved(page: Page) -> None:
    rows = rank(page)
    expect(page.locator("#rank-shown")).to_be_empty()
    page.fill("#rank-words", "RUNNING")
    page.fill("#rank-top", "2")
    expect(page.locator("#rank-shown")).to_have_text("2 of 8 documents shown")
    wanted = [text for text, _ in rows if "running" in text][:2]
    assert page.locator("#rank-list .bar-text").all_text_contents() == wanted
    with page.expect_download() as saved:
        page.click("#rank-json")
    assert [row["text"] for row in json.loads(Path(saved.value.path()).read_text())] == wanted
    page.fill("#rank-words", "<b>")
    expect(page.locator("#rank-list li")).to_have_count(0)
    page.fill("#rank-words", "")
    page.fill("#rank-top", "-3")
    expect(page.locator("#rank-list li")).to_have_count(8)


SCORES = {"one": [0.9, 0.5, 0.7, None], "two <b>": [0.9, 0.7, 0.5, 0.8]}


def scores_of(connection: Connection) -> None:
    rows = enumerate(SCORES[connection.body["model"]])
    connection.begin()
    connection.event({"results": [{"index": index, "relevance_score": score} for index, score in rows if score is not None]})
    connection.event({"results": [], "errors": [{"index": 3, "message": "too long"}]})
    connection.event("[DONE]")


@pytest.mark.slow
def test_two_models_side_by_side(visit: Open, scripted: ScriptedServer) -> None:
    models = [MODEL | {"id": name} for name in SCORES]
    page = visit(scripted.answer(models={"data": models}, rerank=scores_of), viewport={"width": 1100, "height": 800})
    expect(page.locator("#model")).to_have_value("one")
    page.fill("#rank-documents", "a\nb\nc\nd")
    page.select_option("#rank-other", "two <b>")
    page.click("#rank-start")
    expect(page.locator(".ranking h3")).to_have_text(["one", "two <b>"])
    expect(page.locator("#rank-list .bar-text")).to_have_text(["a", "c", "b", "d"])
    expect(page.locator("#rank-other-list .bar-text")).to_have_text(["a", "d", "b", "c"])
    expect(page.locator("#rank-summary")).to_contain_text("3 documents scored · 1 failed")
    moves = ["Place 1 (the same)", "Place 2 · document 4", "Place 3 (the same)", "Place 4 (▼ down 2 from 2)"]
    notes = page.locator("#rank-other-list .bar-note").all_text_contents()
    assert [note.startswith(move) for note, move in zip(notes, moves, strict=True)] == [True] * 4
    drawing = page.locator("#rank-moves svg")
    label = "From the left list to the right one, 0 documents rise, 1 fall, 2 keep their place"
    expect(drawing).to_have_attribute("aria-label", label)
    # at once, because the page may still scroll to the results
    line, left, right = page.evaluate(
        """["#rank-moves polyline.down", "#rank-list li:nth-child(2)", "#rank-other-list li:nth-child(4)"]
            .map((one) => document.querySelector(one).getBoundingClientRect().toJSON())"""
    )
    assert line["y"] == pytest.approx(left["y"] + left["height"] / 2, abs=3), "a line ends beside the middles of its rows"
    assert line["y"] + line["height"] == pytest.approx(right["y"] + right["height"] / 2, abs=3)
    with page.expect_download() as saved:
        page.click("#rank-json")
    second = json.loads(Path(saved.value.path()).read_text())[1]
    expected = {"index": 2, "score": 0.7, "text": "c", "error": "", "place": 2}
    assert second == expected | {"other_model": "two <b>", "other_score": 0.5, "other_place": 4}
    check_accessibility(page, "two models")
    page.fill("#rank-top", "2")
    expect(drawing.locator("polyline")).to_have_count(1)
    page.set_viewport_size({"width": 375, "height": 700})
    page.evaluate("scrollTo(0, 0)")
    page.click("#rank-start")
    expect(page.locator("#rank-other-list li")).to_have_count(2)
    expect(page.locator("#rank-results h2")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    scripted.answer(models={"data": models}, rerank=lambda c: scores_of(c) if c.body["model"] == "one" else c.send(500, "", b""))
    page.click("#rank-start")
    expect(page.locator("#rank-other-error")).to_contain_text("HTTP 500")
    expect(page.locator("#rank-list li")).to_have_count(2)
    expect(page.locator("#rank-other-list li")).to_have_count(0)
    page.select_option("#rank-other", "")
    page.click("#rank-start")
    expect(page.locator("#rank-other-error")).to_be_hidden()
    expect(page.locator(".ranking h3").first).to_be_hidden()
