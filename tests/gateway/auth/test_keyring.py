"""The key file while it changes: which keys are valid, and what operators are told."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.errors import KeysUnavailable
from gateway.http import auth as keyring
from gateway.http.auth import HANG_SECONDS, LOOKS_TO_REVOKE, MAX_FILE_BYTES, KeyRing
from gateway.keys import ApiKey, parse_keys
from gateway.ops.collectors import key_file
from gateway.ops.metrics import Telemetry
from gateway.settings import SettingsError
from tests.fakes import FakeEngine
from tests.gateway.admission.test_key_limits import ask, entry, replace, write
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until

STALE = 60.0


class Clock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Followed:
    """A ring whose looks the test decides on."""

    def __init__(self, path: Path) -> None:
        self.clock, self.telemetry = Clock(), Telemetry()
        self.ring = KeyRing(path, stale_seconds=STALE, clock=self.clock)
        self.telemetry.watch(lambda: key_file(self.ring.sample()))

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += 1
            self.ring.look(self.telemetry)

    def valid(self, *names: str) -> list[str]:
        return [name for name in names if self.ring.find(name)]

    def count(self, result: str) -> int:
        lines = b"".join(self.telemetry.exposition()).decode().splitlines()
        name = f'yardstick_key_reloads_total{{result="{result}"}} '
        return next((int(float(line.removeprefix(name))) for line in lines if line.startswith(name)), 0)

    def gauge(self, name: str) -> float:
        lines = b"".join(self.telemetry.exposition()).decode().splitlines()
        return next(float(line.partition(" ")[2]) for line in lines if line.startswith(f"{name} "))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.json", entry("a"), entry("b"))


@pytest.fixture
def followed(file: Path) -> Followed:
    return Followed(file)


def test_a_changed_file_counts_at_the_next_look(followed: Followed, file: Path) -> None:
    write(file, entry("b"), entry("c"))
    assert followed.valid("a", "b", "c") == ["a", "b"]
    followed.look()
    assert followed.valid("a", "b", "c") == ["b", "c"]
    followed.look(3)
    assert followed.count("loaded") == 1, "an unchanged file is not read again"


def test_an_empty_list_revokes_all_keys_at_once(followed: Followed, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    replace(file, '{"keys": []}')
    followed.look()
    assert followed.valid("a", "b") == []
    assert followed.count("revoked") == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "all keys are revoked" in caplog.text
    assert followed.gauge("yardstick_api_keys") == 0
    assert followed.gauge("yardstick_key_file_stale") == 0
    write(file, entry("c"))
    followed.look()
    assert followed.valid("a", "c") == ["c"]


@pytest.mark.parametrize("gone", ["deleted", "empty", "blank"])
def test_a_missing_file_revokes_all_keys_at_the_second_look(
    followed: Followed, file: Path, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    file.unlink() if gone == "deleted" else file.write_text("" if gone == "empty" else " \n")
    followed.look(LOOKS_TO_REVOKE - 1)
    assert followed.valid("a", "b") == ["a", "b"]
    followed.look()
    assert followed.valid("a", "b") == []
    followed.look(100)
    assert followed.valid("a", "b") == []
    assert followed.count("revoked") == 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert followed.gauge("yardstick_key_file_age_seconds") == 0
    write(file, entry("a"))
    followed.look()
    assert followed.valid("a", "b") == ["a"]


@pytest.mark.parametrize("gone", ["deleted", "empty"])
def test_a_file_that_is_away_for_one_look_revokes_nothing(followed: Followed, file: Path, gone: str) -> None:
    content = file.read_text()
    for _ in range(5):
        file.unlink() if gone == "deleted" else file.write_text("")
        followed.look()
        file.write_text(content)
        followed.look()
        assert followed.valid("a", "b") == ["a", "b"]
    assert followed.count("revoked") == 0


def unreadable(file: Path) -> None:
    file.unlink()
    file.mkdir()


def broken(file: Path) -> None:
    replace(file, '{"keys": [')


def duplicate(file: Path) -> None:
    write(file, entry("a"), entry("a"))


def endless(file: Path) -> None:
    replace(file, " " * (MAX_FILE_BYTES + 1))


def pipe(file: Path) -> None:
    """To open one would wait for ever."""
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("harm", [unreadable, broken, duplicate, endless, pipe])
def test_an_unusable_file_keeps_the_last_good_version_for_a_stated_time(
    followed: Followed, file: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    harm(file)
    followed.look()
    assert followed.valid("a", "b") == ["a", "b"]
    assert followed.count("broken") == 1
    assert followed.gauge("yardstick_key_file_stale") == 1
    followed.look(int(STALE) - 2)
    assert followed.valid("a", "b") == ["a", "b"]
    assert followed.gauge("yardstick_key_file_age_seconds") == STALE - 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1, "told once, not every second"
    followed.look(2)
    with pytest.raises(KeysUnavailable):
        followed.ring.find("a")
    with pytest.raises(KeysUnavailable):
        followed.ring.find("unknown")
    followed.look(10)
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert "503" in errors[1]
    file.rmdir() if file.is_dir() else file.unlink()
    write(file, entry("b"))
    followed.look()
    assert followed.valid("a", "b") == ["b"]
    assert followed.gauge("yardstick_key_file_stale") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_permissions_that_are_taken_away_are_noticed(followed: Followed, file: Path) -> None:
    file.chmod(0)
    followed.look()
    assert followed.gauge("yardstick_key_file_stale") == 1
    file.chmod(0o600)
    followed.look()
    assert followed.gauge("yardstick_key_file_stale") == 0


def test_a_look_that_hangs_is_a_file_that_cannot_be_read(followed: Followed) -> None:
    """As on a network file system: the thread never comes back."""
    followed.clock.now += HANG_SECONDS + 1
    assert followed.gauge("yardstick_key_file_stale") == 1
    assert followed.valid("a") == ["a"]
    followed.clock.now += STALE
    with pytest.raises(KeysUnavailable):
        followed.ring.find("a")


def test_a_file_is_read_again_if_it_changed_while_it_was_read(
    followed: Followed, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat = os.fstat

    def and_a_write(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        if file.read_text().count("sha256") == 1:
            write(file, entry("b"), entry("c"), entry("d"))
        return status

    write(file, entry("b"))
    with monkeypatch.context() as patch:
        patch.setattr("gateway.http.auth.os.fstat", and_a_write)
        followed.look()
    followed.look()
    assert followed.valid("b", "c", "d") == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([entry("a"), entry("b"), entry("a")], "two keys are named 'a'"),
        ([entry("a"), {**entry("a"), "name": "z"}], "'a' and 'z' have the same `sha256`"),
        ([entry("a"), {**entry("a"), "name": "z", "sha256": entry("a")["sha256"].upper()}], "have the same `sha256`"),
        ([{**entry(""), "name": "unset"}], "'unset' is the hash of an empty key"),
        ([entry("a"), entry("b", weight=0)], "keys[1]: Expected `float` >= 0.1 - at `$.weight`"),
        ([entry("a", priority_min=5, priority_max=4)], "`priority_min` 5 is greater than `priority_max` 4"),
        ([entry("a", group="")], "length >= 1 - at `$.group`"),
        ([entry("a", grup="x")], "unknown field `grup`"),
    ],
)
def test_entries_that_cannot_be_meant_are_named(tmp_path: Path, keys: list[dict[str, Any]], words: str) -> None:
    file = write(tmp_path / "keys.json", *keys)
    with pytest.raises(SettingsError) as error:
        KeyRing(file)
    assert words in str(error.value)
    assert all(key["sha256"] not in str(error.value) for key in keys)


def test_a_file_without_keys_may_be_started_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "keys.json")
    assert Followed(file).valid("a", "") == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for content in ("", " "):
        replace(file, content)
        with pytest.raises(SettingsError, match="the file is empty"):
            KeyRing(file)


def test_a_file_that_others_can_write_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.chmod(0o644)
    KeyRing(file)
    assert not caplog.records
    file.chmod(0o666)
    KeyRing(file)
    assert "can be written by every user" in caplog.text


def test_reading_a_large_file_leaves_the_interpreter_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest stretch between two pauses, in CPU time of the thread, which a busy machine does not lengthen much."""
    digests = (hashlib.sha256(str(place).encode()).hexdigest() for place in range(15_000))
    content = json.dumps({"keys": [{"name": f"k{place}", "sha256": digest} for place, digest in enumerate(digests)]}).encode()
    assert MAX_FILE_BYTES / 2 < len(content) < MAX_FILE_BYTES
    paused: list[float] = []
    monkeypatch.setattr("gateway.keys.time", SimpleNamespace(sleep=lambda _: paused.append(time.thread_time())))
    attempts = []
    for _ in range(3):
        paused[:] = [time.thread_time()]
        assert len(parse_keys(content)) == 15_000
        attempts.append(max(after - before for before, after in pairwise(paused)))
    assert min(attempts) < 0.01


def test_the_server_follows_links_as_kubernetes_changes_them(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory behind two links is replaced; later its file breaks, recovers and is deleted."""
    monkeypatch.setattr(keyring, "LOOK_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    for version, name in enumerate("ab"):
        (tmp_path / str(version)).mkdir()
        write(tmp_path / str(version) / "keys.json", entry(name))
    data, file = tmp_path / "..data", tmp_path / "keys.json"
    data.symlink_to("0")
    file.symlink_to("..data/keys.json")
    client = start(FakeEngine(), api_keys_file=file, api_keys_stale_seconds=0.5)
    assert (ask(client, "a").status_code, ask(client, "b").status_code) == (200, 401)
    (tmp_path / "new").symlink_to("1")
    (tmp_path / "new").rename(data)
    wait_until(lambda: ask(client, "b").status_code == 200)
    assert ask(client, "a").status_code == 401
    replace(tmp_path / "1" / "keys.json", '{"keys": [')
    wait_until(lambda: metric(client, "yardstick_key_file_stale") == 1)
    wait_until(lambda: ask(client, "b").status_code == 503)
    refused = ask(client, "b")
    assert refused.json()["error"]["code"] == "keys_unavailable"
    assert refused.headers["retry-after"] == "5"
    assert str(tmp_path) not in refused.text
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").json()["error"]["code"] == "keys_unavailable"
    assert metric(client, 'yardstick_key_reloads_total{result="broken"}') == 1
    write(tmp_path / "1" / "keys.json", entry("c"))
    wait_until(lambda: ask(client, "c").status_code == 200)
    assert client.get("/readyz").status_code == 200
    file.unlink()
    wait_until(lambda: ask(client, "c").status_code == 401)
    assert metric(client, 'yardstick_key_reloads_total{result="revoked"}') == 1
    assert metric(client, "yardstick_api_keys") == 0


def test_a_header_of_any_length_costs_one_comparison(start: Start, file: Path) -> None:
    client = start(FakeEngine(), api_keys_file=file)
    answer = client.get("/v1/models", headers={"authorization": "Bearer " + "a" * 2000})
    assert answer.status_code == 401
    assert "longer than 1024 bytes" in answer.json()["error"]["message"]


def test_isolation_by_key_group_or_not_at_all(tmp_path: Path) -> None:
    file = write(
        tmp_path / "keys.json", entry("a"), entry("b"), entry("c", group="g"), entry("d", group="g"), entry("e", group="h")
    )

    def salts(**options: Any) -> dict[str, str]:
        ring = KeyRing(file, **options)
        found: dict[str, ApiKey | None] = {name: ring.find(name) for name in "abcde"}
        return {name: key.cache_salt for name, key in found.items() if key}

    own = salts()
    assert own["c"] == own["d"]
    assert len(set(own.values())) == 4
    assert all(len(salt) == 32 for salt in own.values())
    assert set(salts(isolation="none").values()) == {""}
