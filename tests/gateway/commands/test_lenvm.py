"""``yardstick lenvm sample`` and the served part of ``evaluate``: complete data sets after kills, failures and other servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fakes import served
from tests.gateway.commands.conftest import Done, Reply, Yardstick, error, lines, read_json, send_json, the_one_line, write
from yardstick_llm.gateway.commands.client import Server
from yardstick_llm.gateway.commands.lenvm import PROBES
from yardstick_llm.gateway.commands.lenvm_served import serve_targets

END = 2
BEFORE, AFTER = [1, 11, 12], [END, 13, 1]
"""What the template puts around a user's message."""


@dataclass
class Writer:
    """An ASGI server that returns token ids as vLLM does. An answer is a function of prompt and seed; ``before`` may answer
    instead, or wait."""

    before: Callable[[Writer, dict[str, Any]], Awaitable[Reply | None]] | None = None
    ids: bool = True
    fingerprint: str = "fp_1"
    longest: int = 12
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests for answers."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send_json(send, *await self._answer(scope["path"], await read_json(receive)))

    async def _answer(self, path: str, asked: dict[str, Any]) -> Reply:
        if path == "/v1/models":
            return 200, {}, {"data": [{"id": "m"}]}
        if path == "/v1/score":
            return 200, {}, {"data": [{"logprob": -0.5 * len(item)} for item in asked["items"]]}
        is_probe = "seed" not in asked
        if not is_probe:
            self.asked.append(asked)
            if self.before and (instead := await self.before(self, asked)):
                return instead
        chat = path == "/v1/chat/completions"
        prompts = [self.chat(asked["messages"])] if chat else asked["prompt"]
        prompts = [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else prompts
        choices = [self._choice(asked, spelled(prompt)) for prompt in prompts]
        answer: dict[str, Any] = {"choices": choices, "system_fingerprint": self.fingerprint}
        if chat:
            answer["prompt_token_ids"] = choices[0].pop("prompt_token_ids", None)
        return 200, {}, answer

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return BEFORE + spelled(messages[-1]["content"]) + AFTER

    def _choice(self, asked: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        """The seed is the length; tokens count on from the prompt."""
        length = Random(asked.get("seed", 0)).randrange(self.longest)
        most, target = asked["max_tokens"], asked.get("length_guidance", {}).get("target_length")
        length = length if target is None else target
        output = [1000 + len(prompt) + place for place in range(length)][:most]
        finish = "length"
        if length < most:
            output, finish = [*output, END], "stop"
        if asked.get("stop_token_ids"):
            words = ("write a poem for", "Write a poem, for!", "tell me some facts", "too short")
            text = words[asked["seed"] % 4] + (" us" if asked["seed"] % 3 else " me") * (asked["seed"] % 4 < 3)
            return {"index": 0, "text": text, "finish_reason": "stop", "token_ids": output, "prompt_token_ids": prompt}
        top = [{f"token_id:{token}": -1.0 for token in (output[place], END, 7, 8, 9)} for place in range(len(output))]
        choice = {"index": 0, "text": "", "finish_reason": finish, "logprobs": {"top_logprobs": top}}
        return choice | ({"token_ids": output, "prompt_token_ids": prompt} if self.ids else {})


RULES = ("guided", "guided, about", "end token", "guided, end 0.001", "guided, about, end 0.001")


def spelled(content: str | list[int]) -> list[int]:
    return [100 + ord(letter) for letter in content] if isinstance(content, str) else content


def prompts_in(path: Path, count: int) -> Path:
    path.write_text("".join(f"prompt {number}\n" for number in range(count)) + "prompt 1\n")
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    given = [sys.executable, "-m", "yardstick_llm.gateway.cli", "lenvm", *map(str, arguments)]
    return subprocess.Popen(given, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "300"})


def answers(out: Path) -> list[dict[str, Any]]:
    return sorted(lines(out / "answers.jsonl"), key=lambda row: (row["sample"], row["prompt_id"]))


@pytest.mark.slow
@pytest.mark.parametrize("stray", [0, 0.2])
def test_a_data_set_is_complete_and_can_be_repeated(yardstick: Yardstick, tmp_path: Path, stray: float) -> None:
    server, given = Writer(longest=40), ("--prompts", prompts_in(tmp_path / "prompts.txt", 20), "--samples", 3, "--max-tokens", 30)
    with served(server) as url:
        for out in ("one", "two"):
            done = yardstick("lenvm", "sample", "--base-url", f"{url}/v1", "--out", tmp_path / out, *given, "--stray", stray)
            assert done.status == 0, done.err
    rows = answers(tmp_path / "one")
    assert rows == answers(tmp_path / "two")
    assert len({(row["prompt_id"], row["sample"]) for row in rows}) == len(rows) == 60
    assert len({row["prompt_id"]: row["split"] for row in rows}) == 20
    assert all(len({row["split"] for row in rows if row["prompt_id"] == prompt}) == 1 for prompt in {r["prompt_id"] for r in rows})
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        ended = row["finish_reason"] == "stop"
        assert (row["output_ids"][-1] == END) == ended, row
        assert len(row["output_ids"]) == 30 or ended
        assert row["prompt_ids"][:3] == BEFORE
        assert row["stray_positions"] == [at for at, token in enumerate(row["output_ids"]) if token in (7, 8, 9)]
        assert not row["stray_positions"] or row["sample"] > 0
    assert any(row["stray_positions"] for row in rows) == (stray > 0)
    seeds = Counter(asked["seed"] for asked in server.asked if "messages" in asked and asked["max_tokens"] == 30)
    assert max(seeds.values()) == 2, "once for each data set"
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert manifest["template"] == {"before": BEFORE, "after": AFTER}
    assert (manifest["complete"], manifest["answers"], manifest["end_tokens"]) == (True, 60, [END])
    assert [probe["text"] for probe in manifest["tokenizer"]] == [*PROBES]
    assert manifest["cut"] == sum(row["finish_reason"] == "length" for row in rows) / 60


async def end_if_allowed(_: Writer, asked: dict[str, Any]) -> Reply | None:
    """One token is an end token, of which no log-probabilities are told, unless the end is to be ignored."""
    if asked["max_tokens"] > 1 or asked.get("ignore_eos") or "logprobs" not in asked:
        return None
    choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": [END], "prompt_token_ids": asked["prompt"]}
    return 200, {}, {"choices": [choice | {"logprobs": {"top_logprobs": []}}], "system_fingerprint": "fp_1"}


@pytest.mark.slow
def test_branches_leave_the_first_answer_at_one_state(yardstick: Yardstick, tmp_path: Path) -> None:
    given = ("--prompts", prompts_in(tmp_path / "prompts.txt", 24), "--samples", 1, "--max-tokens", 30, "--branch", 3)
    with served(Writer(end_if_allowed, longest=25)) as url:
        for out, more in (("one", ()), ("two", ()), ("one", ("--branch", 4))):
            done = yardstick("lenvm", "sample", "--base-url", url, "--out", tmp_path / out, *given, *more)
            assert done.status == 0, done.err
    rows = {(row["prompt_id"], row["sample"]): row["output_ids"] for row in answers(tmp_path / "one")}
    again = {(row["prompt_id"], row["sample"]): row["output_ids"] for row in answers(tmp_path / "two")}
    assert (len(rows), rows.items() >= again.items()) == (120, True)
    places = []
    for prompt in {prompt for prompt, _ in rows}:
        first, *branches = (rows[prompt, number] for number in (0, -1, -2, -3, -4))
        place = min(at for at, tokens in enumerate(zip(*branches, strict=False)) if len(set(tokens)) > 1)
        assert {tuple(branch[:place]) for branch in branches} == {tuple(first[:place])}
        assert len({branch[place] for branch in branches}) == 4, (place, first, branches)
        places.append(place)
    assert len(set(places)) > 5


def test_answers_come_breadth_first(yardstick: Yardstick, tmp_path: Path) -> None:
    server = Writer()
    with served(server) as url:
        given = ("--prompts", prompts_in(tmp_path / "prompts.txt", 8), "--samples", 3, "--concurrency", 1, "--system", "Be brief.")
        assert yardstick("lenvm", "sample", "--base-url", url, "--out", tmp_path / "out", *given).status == 0
        assert {tuple(message["role"] for message in asked["messages"]) for asked in server.asked} == {("system", "user")}
        changed = yardstick("lenvm", "sample", "--base-url", url, "--out", tmp_path / "out", *given[:-1], "Be long.")
        assert "made with --system Be brief., not Be long." in the_one_line(changed)
    assert [row["sample"] for row in lines(tmp_path / "out/answers.jsonl")] == [0] * 8 + [1] * 8 + [2] * 8


@pytest.mark.slow
def test_kills_at_any_moment_lose_and_repeat_nothing(tmp_path: Path) -> None:
    async def slow(_: Writer, asked: dict[str, Any]) -> None:
        await asyncio.sleep(Random(asked["seed"]).uniform(0, 0.05))

    server, prompts = Writer(slow), prompts_in(tmp_path / "prompts.txt", 80)
    given = ("--prompts", prompts, "--samples", 4, "--concurrency", 8)
    with served(server) as url:
        with start("sample", "--base-url", url, "--out", tmp_path / "whole", *given) as process:
            assert process.wait(100) == 0
        kept: list[dict[str, Any]] = []
        kills, path = 0, tmp_path / "out" / "answers.jsonl"
        while True:
            with start("sample", "--base-url", url, "--out", tmp_path / "out", *given) as process:
                try:
                    status = process.wait(random.uniform(0.3, 0.6) if kills < 3 else 100)
                    break
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
            if path.exists():
                content = path.read_text()
                found = [json.loads(line) for line in content[: content.rfind("\n") + 1].splitlines()]
                assert found[: len(kept)] == kept, "lines that were written stay"
                kept = found
                with path.open("a") as stream:
                    stream.write('{"prompt_id":"ab')  # as a kill during a write leaves it
    assert (status, kills > 1) == (0, True)
    assert answers(tmp_path / "out") == answers(tmp_path / "whole")


def test_failures_are_recorded_and_tried_again(yardstick: Yardstick, tmp_path: Path) -> None:
    """Also in the same run; a request that the server never answers stays missing, and the exit status says so."""
    times: Counter[str] = Counter()

    async def some_fail(_: Writer, asked: dict[str, Any]) -> Reply | None:
        text = asked["messages"][0]["content"]
        times[text] += 1
        return error(400, "too sad") if text == "prompt 3" or (text == "prompt 5" and times[text] == 1) else None

    server = Writer(some_fail)
    given = ("--prompts", prompts_in(tmp_path / "prompts.txt", 30), "--samples", 1, "--out", tmp_path / "out")
    with served(server) as url:
        done = yardstick("lenvm", "sample", "--base-url", url, *given)
        assert (done.status, "1 are missing (too sad)" in done.err) == (1, True)
        rows = lines(tmp_path / "out/answers.jsonl")
        assert Counter(row["error"] for row in rows) == {None: 29, "too sad": 3}
        assert times["prompt 5"] == 2
        server.before = None
        assert yardstick("lenvm", "sample", "--base-url", url, *given).status == 0
    assert len(lines(tmp_path / "out/answers.jsonl")) == 33
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"]


def run_with(yardstick: Yardstick, tmp_path: Path, server: Writer, *more: object) -> Done:
    with served(server) as url:
        given = ("--prompts", prompts_in(tmp_path / "prompts.txt", 40), "--samples", 2, "--out", tmp_path / "out")
        return yardstick("lenvm", "sample", "--base-url", url, *given, *more)


CUTS = {
    "some": (40, (), 0, "warning: --max-tokens 24 cut"),
    "most": (90, (), 1, "add --allow-censored"),
    "most, allowed": (90, ("--allow-censored",), 0, "warning: --max-tokens 24 cut"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CUTS)
def test_answers_that_are_cut(yardstick: Yardstick, tmp_path: Path, case: str) -> None:
    longest, more, status, named = CUTS[case]
    done = run_with(yardstick, tmp_path, Writer(longest=longest), "--max-tokens", 24, *more)
    assert done.status == status, done.err
    assert named in done.err


@pytest.mark.slow
def test_a_data_set_has_one_model_and_one_way(yardstick: Yardstick, tmp_path: Path) -> None:
    assert run_with(yardstick, tmp_path, Writer()).status == 0
    before = (tmp_path / "out/answers.jsonl").read_bytes()
    for writer, more, named in (
        (Writer(fingerprint="fp_2"), (), "another model (its fingerprint differs)"),
        (Writer(), ("--seed", 1), "made with --seed 0, not 1"),
        (Writer(), ("--max-tokens", 99), "made with --max-tokens 2048, not 99"),
        (Writer(), ("--model", "n"), "its model differs"),
    ):
        done = run_with(yardstick, tmp_path, writer, *more)
        assert (done.status, named in the_one_line(done)) == (2, True), done.err
    assert (tmp_path / "out/answers.jsonl").read_bytes() == before


@pytest.mark.slow
def test_servers_and_lines_that_cannot_be_used(yardstick: Yardstick, tmp_path: Path) -> None:
    assert "returns no token ids" in the_one_line(run_with(yardstick, tmp_path, Writer(ids=False)))
    assert run_with(yardstick, tmp_path, Writer()).status == 0
    path = tmp_path / "out/answers.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*whole[:4], whole[4][:30] + "\n", *whole[5:]]))
    done = run_with(yardstick, tmp_path, Writer())
    assert (done.status, "line 5, is damaged" in the_one_line(done)) == (2, True)
    assert len(path.read_text().splitlines()) == len(whole), "nothing is removed"
    path.write_text("".join(whole[:4] + whole[5:]))
    assert run_with(yardstick, tmp_path, Writer()).status == 0
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(whole)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("p.txt", "\n\n", "has no prompts"),
        ("p.jsonl", '{"question": "x"}\n', "none of the columns messages, prompt and text; it has question"),
        ("p.jsonl", '{"prompt": "x"}\n{"prompt": 3}\n', "row 2 has no text in 'prompt'"),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}\n', "row 1 has no message of a user"),
        ("p.jsonl", '{"messages": "x"}\n', "row 1 has no list of messages"),
        ("p.md", "x", "does not end in"),
    ],
)
def test_files_of_prompts_that_cannot_be_used(yardstick: Yardstick, tmp_path: Path, name: str, content: str, named: str) -> None:
    (tmp_path / name).write_text(content)
    done = yardstick("lenvm", "sample", "--prompts", tmp_path / name, "--out", tmp_path / "out")
    assert (done.status, named in the_one_line(done)) == (2, True), done.err


def test_conversations_are_sent_up_to_the_last_message_of_a_user(yardstick: Yardstick, tmp_path: Path) -> None:
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "why"), ("assistant", "because")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path, server = write(tmp_path / "p.jsonl", [{"messages": messages}]), Writer()
    with served(server) as url:
        assert yardstick("lenvm", "sample", "--base-url", url, "--prompts", path, "--out", tmp_path / "out").status == 0
    assert [asked["messages"] for asked in server.asked] == [messages[:4]] * 4


@pytest.mark.slow
def test_the_model_writes_prompts_itself(yardstick: Yardstick, tmp_path: Path) -> None:
    """Short turns and repeated ones are left out; a model that writes too few distinct ones is refused."""
    server = Writer()
    with served(server) as url:
        given = ("lenvm", "sample", "--base-url", url, "--samples", 1, "--out", tmp_path / "out")
        assert yardstick(*given, "--magpie", 3).status == 0
        turns = [asked for asked in server.asked if "stop_token_ids" in asked]
        assert all((asked["prompt"], asked["stop_token_ids"]) == (BEFORE, [END]) for asked in turns)
        texts = [asked["messages"][0]["content"] for asked in server.asked if "messages" in asked]
        assert len({text.lower().replace(",", "").replace("!", "") for text in texts}) == len(texts) == 3
        count = len(server.asked)
        assert yardstick(*given, "--magpie", 3).status == 0
        assert len(server.asked) == count, "all of it is there"
        done = yardstick(*given[:-1], tmp_path / "more", "--magpie", 9)
    assert (done.status, "usable turns of users in" in done.err) == (1, True), done.err


@pytest.mark.slow
def test_served_answers_and_their_controls(tmp_path: Path, yardstick: Yardstick) -> None:
    assert run_with(yardstick, tmp_path, Writer(), "--test-share", 0.4).status == 0
    data, out = tmp_path / "out", tmp_path / "report"
    server = Writer()
    with served(server) as url:
        given = {"model": None, "split": "test", "end_min_p": 0.001, "targets": [20, 40], "most_prompts": 5, "samples": 2}
        serve_targets(Server(url, None), data, out, **given, concurrency=4)
        rows, count = lines(out / "served.jsonl"), len(server.asked)
        serve_targets(Server(url, None), data, out, **given, concurrency=4)
        assert len(server.asked) == count == len(rows)
    wanted = {(rule, target) for target in (20, 40) for rule in RULES} | {("unguided", None)}
    assert Counter((row["rule"], row["target"]) for row in rows) == dict.fromkeys(wanted, 10)
    tests = {row["prompt_id"] for row in lines(data / "answers.jsonl") if row["split"] == "test"}
    assert {row["prompt_id"] for row in rows} <= tests
    for row in rows:
        assert row["mean_logprob"] == -0.5
        assert row["tokens"] == row["target"] or not row["rule"].startswith("guided")
    guided = [asked for asked in server.asked if "length_guidance" in asked]
    ways = ({}, {"constraint": "about"}, {"end_min_p": 0.001}, {"constraint": "about", "end_min_p": 0.001})
    wished = [{"target_length": target, "top_k": 5} | way for target in (20, 40) for way in ways]
    assert Counter(map(str, (asked["length_guidance"] for asked in guided))) == dict.fromkeys(map(str, wished), 10)
    ruled = [asked for asked in server.asked if "min_tokens" in asked]
    assert all(asked["logit_bias"] == {str(END): 5.0} for asked in ruled)
    assert len(ruled) == 20
    assert len({asked["seed"] for asked in ruled}) == 10


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_commands_that_need_the_engine_say_so(
    yardstick: Yardstick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    given = ("--data", tmp_path, "--out", tmp_path, "--lenvm" if command == "evaluate" else "--init", tmp_path)
    done = yardstick("lenvm", command, *given)
    assert (done.status, "pip install 'yardstick-llm[engine]'" in the_one_line(done)) == (1, True)
