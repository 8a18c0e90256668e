"""``yardstick score --items`` and ``rerank --documents`` on a gateway before a fake engine."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.commands.conftest import Served, Yardstick, full_disk, the_one_line
from yardstick_llm.gateway.commands import CommandError
from yardstick_llm.gateway.commands.lists import Results, write

ITEMS = [f" shoes {number}" for number in range(7)]
SCORE = ("score", "--query", "the red", "--labels", " Yes, No", "--items", "-", "--batch", 3)


def direct(served: Served, path: str, **body: Any) -> Any:
    return httpx.post(served.url + path, json=body).raise_for_status().json()


def test_scores_come_as_json_in_the_order_of_the_items(reranker: Served, yardstick: Yardstick) -> None:
    document = json.loads(yardstick(*SCORE, "--url", reranker.url, "--format", "json", text="\n".join(ITEMS) + "\n\n").out)
    assert (document["model"], document["labels"]) == ("fake", [" Yes", " No"])
    assert [row["item"] for row in document["results"]] == ITEMS
    answer = direct(reranker, "/v1/score", query="the red", items=ITEMS, labels=[" Yes", " No"])
    assert [[*row["scores"].values()] for row in document["results"]] == answer["scores"]
    assert document["total_tokens"] == answer["usage"]["total_tokens"]


def test_scores_come_as_csv_into_a_file(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    items, output = tmp_path / "items.txt", tmp_path / "scores.csv"
    items.write_text('red, "quoted"\r\n東京\r\n', encoding="utf-8", newline="")
    given = ("score", "--query", "the ", "--labels", "Yes,No", "--items", items, "--url", reranker.url)
    assert yardstick(*given, "--format", "csv", "--output", output).status == 0
    rows = list(csv.reader(io.StringIO(output.read_text(encoding="utf-8"))))
    assert [row[0] for row in rows] == ["item", 'red, "quoted"', "東京"]
    assert all(0 < float(score) < 1 for row in rows[1:] for score in row[1:])


def test_the_table_can_be_sorted(reranker: Served, yardstick: Yardstick) -> None:
    done = yardstick(*SCORE, "--url", reranker.url, "--sort", text="\n".join(ITEMS))
    rows = re.findall(r"shoes (\d) +│ +(\d\.\d+)", done.out)
    assert len(rows) == len(ITEMS)
    best_first = [score for _, score in rows]
    assert best_first == sorted(best_first, reverse=True)


def test_a_list_of_documents_is_ranked(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    documents = [f"{item} {number}" for number in range(3) for item in ("red wool scarf", "a fox", "the lazy dog", "oak table")]
    results = direct(reranker, "/v1/rerank", query="red shoes", documents=documents)["results"]
    best = [(documents[result["index"]], result["relevance_score"]) for result in results]
    file = tmp_path / "documents.txt"
    file.write_text("\n".join([*documents, ""]), encoding="utf-8")
    command = ("rerank", "--query", "red shoes", "--url", reranker.url)
    done = yardstick(*command, "--documents", file, "--top-n", 4, "--batch", 5, "--format", "json")
    rows = json.loads(done.out)["results"]
    assert [(row["item"], row["scores"]["relevance"]) for row in rows] == [(text, pytest.approx(score)) for text, score in best[:4]]
    shown = yardstick(*command, "--documents", "-", text="\n".join(documents))
    assert [text for text, _ in best] == re.findall(r"^│ ([a-z ]+\d) +│ +\d\.\d+ │$", shown.out, flags=re.M)
    for arguments, message in (
        ([], "give either --documents"),
        (["--documents", file, "--input", "rows.jsonl"], "give either --documents"),
        (["--documents", file, "--keep", "id"], "--keep works only with --input"),
        (["--input", "rows.jsonl", "--top-n", "3"], "--query works only with --documents"),
    ):
        failed = yardstick(*command, *arguments)
        assert (failed.status, message in the_one_line(failed)) == (2, True)


def test_softmax_suffix_and_item_first_reach_the_server(reranker: Served, yardstick: Yardstick) -> None:
    plain, softmax, first, suffixed = (
        json.loads(yardstick(*SCORE, *flags, "--url", reranker.url, "--format", "json", text=" shoes").out)["results"][0]["scores"]
        for flags in ([], ["--apply-softmax"], ["--item-first"], ["--suffix", "?"])
    )
    assert sum(softmax.values()) == pytest.approx(1)
    assert sum(plain.values()) < 0.9
    assert len({tuple(scores.values()) for scores in (plain, first, suffixed)}) == 3


def test_errors_are_one_line(reranker: Served, yardstick: Yardstick, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9\n")
    served = ("--url", reranker.url)
    for arguments, text, words in (
        ((*SCORE, *served, "--labels", "shoebox"), "a", "the server refused: .*shoebox"),
        ((*SCORE, *served, "--model", "other"), "a", "other"),
        ((*SCORE, *served), "\n\n", "no items"),
        ((*SCORE, *served, "--items", bad), "", "not UTF-8"),
        ((*SCORE, "--url", "http://127.0.0.1:9"), "a", "no answer from http://127.0.0.1:9"),
        ((*SCORE, "--url", "127.0.0.1:8000"), "a", "--url"),
        ((*SCORE, "--url", "http://[bad"), "a", "--url"),
        ((*SCORE, *served, "--api-key", "ключ"), "a", "--api-key"),
    ):
        done = yardstick(*arguments, text=text)
        assert done.status in (1, 2)
        assert re.search(words, the_one_line(done))


def test_a_full_disk_keeps_earlier_results(tmp_path: Path) -> None:
    output, found = tmp_path / "scores.json", Results("m", ["Yes"], ["a", "b"], [[0.25], [0.5]], 4)
    write(found, "json", output)
    before = output.read_bytes()
    with full_disk(), pytest.raises(CommandError, match="cannot write"):
        write(found, "json", output)
    assert [each.name for each in tmp_path.iterdir()] == ["scores.json"]
    assert output.read_bytes() == before
    link = tmp_path / "link"
    link.symlink_to(output)
    write(found, "csv", link)
    assert output.read_text() == "item,Yes\na,0.25\nb,0.5\n"
    assert link.is_symlink()
