"""The key file while it changes: which keys are valid, and what operators are told."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, metric
from tests.gateway.keys import ask, entry, replace, write
from tests.processes import wait_until
from yardstick_llm.gateway.app import create_app
from yardstick_llm.gateway.errors import KeysUnavailable
from yardstick_llm.gateway.http.auth import HANG_SECONDS, MAX_FILE_BYTES, KeyRing
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.settings import Settings, SettingsError

URL = "http://127.0.0.1:1"
LOOK_SECONDS = 0.03


@dataclass
class Followed:
    """A key file with the keys ``a`` and ``b``, of which a test says when it is looked at."""

    file: Path
    now: float = 1000.0
    telemetry: Telemetry = field(default_factory=Telemetry)

    def __post_init__(self) -> None:
        write(self.file, entry("a"), entry("b"))
        self.ring = KeyRing(self.file, stale_seconds=60, clock=lambda: self.now)

    def look(self, times: int = 1) -> str:
        """Look at the file, and return which of the keys ``a`` to ``d`` are valid."""
        for _ in range(times):
            self.ring.look(self.telemetry)
        return "".join(name for name in "abcd" if self.ring.find(name))

    def reloads(self) -> dict[str, float]:
        """Number of reloads by their result."""
        lines = b"".join(self.telemetry.exposition()).decode().splitlines()
        return {line.split('"')[1]: float(line.split()[1]) for line in lines if line.startswith("yardstick_key_reloads_total{")}


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "keys.json")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_a_changed_file_counts_and_an_unchanged_one_is_not_read_again(followed: Followed) -> None:
    write(followed.file, entry("b"), entry("c"))
    assert followed.look(3) == "bc"
    assert followed.reloads() == {"loaded": 1}


REVOKING: dict[str, Callable[[Path], object]] = {
    "no keys": lambda file: replace(file, '{"keys": []}'),
    "deleted": Path.unlink,
    "empty": lambda file: file.write_text(""),
    "blank": lambda file: file.write_text(" \n"),
}


@pytest.mark.parametrize("change", REVOKING)
def test_a_file_without_keys_revokes_all(followed: Followed, caplog: pytest.LogCaptureFixture, change: str) -> None:
    REVOKING[change](followed.file)
    assert followed.look(3) == ""
    assert followed.reloads() == {"revoked": 1}
    (error,) = errors(caplog)
    assert "all keys are revoked" in error or "all API keys are revoked" in error
    assert not followed.ring.sample().stale
    write(followed.file, entry("c"))
    assert followed.look() == "c"


HARM: dict[str, Callable[[Path], object]] = {
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "broken": lambda file: replace(file, '{"keys": ['),
    "deep": lambda file: replace(file, '{"keys": ' + "[" * 100_000),
    "no valid entry": lambda file: write(file, entry("a"), entry("z") | {"sha256": entry("a")["sha256"]}, entry("b", weight=0)),
    "endless": lambda file: replace(file, " " * (MAX_FILE_BYTES + 1)),
    "a pipe, which would be waited for": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_unusable_file_keeps_the_last_good_version_for_a_stated_time(
    followed: Followed, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    HARM[harm](followed.file)
    followed.now += 59
    assert followed.look(2) == "ab"
    assert followed.ring.sample().stale
    followed.now += 2
    followed.ring.look(followed.telemetry)
    with pytest.raises(KeysUnavailable):
        followed.look()
    assert followed.reloads() == {"broken": 1}
    assert ["503" in error for error in errors(caplog)] == [False, True], "each problem is logged once"
    followed.file.rmdir() if followed.file.is_dir() else followed.file.unlink()
    write(followed.file, entry("b"))
    assert followed.look() == "b"
    assert not followed.ring.sample().stale


def test_a_gateway_whose_file_is_unusable_answers_503(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick_llm.gateway.http.auth.LOOK_SECONDS", LOOK_SECONDS)
    file = write(tmp_path / "keys.json", entry("a"))
    client = start(FakeEngine(), api_keys_file=file, api_keys_stale_seconds=0.3)
    replace(file, "{")
    wait_until(lambda: ask(client, "a").status_code == 503)
    refused = ask(client, "unknown")
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, "keys_unavailable", "5")
    assert str(tmp_path) not in refused.text
    assert client.get("/readyz").json()["error"]["code"] == "keys_unavailable"
    assert client.get("/livez").status_code == 200
    assert metric(client, "yardstick_key_file_stale") == 1
    write(file, entry("a"), entry("b", weight=0))
    wait_until(lambda: ask(client, "a").status_code == 200)
    assert metric(client, "yardstick_key_file_problems") == 1
    assert metric(client, "yardstick_api_keys") == 1


def test_the_server_follows_links_as_kubernetes_changes_them(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory behind two links is replaced."""
    monkeypatch.setattr("yardstick_llm.gateway.http.auth.LOOK_SECONDS", LOOK_SECONDS)
    caplog.set_level(logging.INFO)
    for version, name in enumerate("ab"):
        (tmp_path / str(version)).mkdir()
        write(tmp_path / str(version) / "keys.json", entry(name))
    data, file = tmp_path / "..data", tmp_path / "keys.json"
    data.symlink_to("0")
    file.symlink_to("..data/keys.json")
    client = start(FakeEngine(), api_keys_file=file)
    assert (ask(client, "a").status_code, ask(client, "b").status_code) == (200, 401)
    (tmp_path / "new").symlink_to("1")
    (tmp_path / "new").rename(data)
    wait_until(lambda: ask(client, "b").status_code == 200)
    assert ask(client, "a").status_code == 401


def created(file: Path) -> None:
    create_app(Settings(engines=(URL,), api_keys_file=file))


BAD: list[tuple[list[dict[str, Any]], str, str]] = [
    # entries beside those of `c` and `d`, which of the keys `a` and `b` are valid, and what the log says
    ([entry("a"), entry("b") | {"name": "a", "admin": True}], "a", "two keys are named 'a'; the first one counts"),
    ([entry("a"), entry("a") | {"name": "z", "admin": True}], "", "'a' and 'z' have the same `sha256`; neither counts"),
    ([entry("a"), entry("a") | {"name": "z", "sha256": entry("a")["sha256"].upper()}], "", "have the same `sha256`"),
    ([entry("a"), entry("a"), entry("b") | {"name": "a"}], "b", "'a' and 'a' have the same `sha256`"),
    ([entry("a"), entry("") | {"name": "unset"}], "a", "'unset' is the hash of an empty key"),
    ([entry("a"), entry("b", weight=0)], "a", "keys[3]: Expected `float` >= 0.1 - at `$.weight`"),
    ([entry("a", priority_min=5, priority_max=4), entry("b")], "b", "`priority_min` 5 is greater than `priority_max` 4"),
    ([entry("a", group="")], "", "length >= 1 - at `$.group`"),
    ([entry("a", grup="x")], "", "unknown field `grup`"),
    ([entry("a") | {"sha256": "12"}, 3], "", "; keys[3]: Expected `object`"),  # type: ignore[list-item]
    ([entry("a")] + 9 * [entry("b", weight=0)], "a", "; and 4 more"),
]


@pytest.mark.parametrize(("entries", "valid", "words"), BAD)
def test_a_bad_entry_harms_no_other_key(
    followed: Followed, caplog: pytest.LogCaptureFixture, entries: list[dict[str, Any]], valid: str, words: str
) -> None:
    """Whatever happens to the file's metadata, as kubelets change it for pods with an ``fsGroup``."""
    write(followed.file, entry("c"), entry("d"), *entries)
    for mode in (0o640, 0o600, 0o640):
        followed.file.chmod(mode)
        assert followed.look() == f"{valid}cd"
    (error,) = errors(caplog)
    assert words in error
    assert entry("a")["sha256"] not in caplog.text
    assert followed.ring.sample().problems >= 1
    assert not followed.ring.sample().stale
    assert followed.reloads() == {"partial": 1}, "unchanged keys are no news"
    created(followed.file)
    write(followed.file, entry("c"), entry("d"))
    assert followed.look() == "cd"
    assert followed.ring.sample().problems == 0


def test_a_gateway_starts_with_a_file_of_keys_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(SettingsError, match="No such file"):
        created(file)
    for content, words in (
        ("", "the file is empty"),
        (" ", "the file is empty"),
        ("[]", r"keys\.json: not a file of API keys"),
        ('{"keys": [{}]}', "missing required"),
    ):
        with pytest.raises(SettingsError, match=words):
            created(replace(file, content))
    assert not caplog.records
    created(write(file))
    assert "lists no API key" in caplog.text
    write(file, entry("a")).chmod(0o666)
    created(file)
    assert "can be written by every user" in caplog.text


def test_keys_open_v1_and_nothing_else_needs_one(start: Start, tmp_path: Path) -> None:
    client = start(FakeEngine(), api_keys_file=write(tmp_path / "keys.json", entry("a"), entry("b")))
    for path in ("/livez", "/readyz", "/health", "/ping", "/version", "/v1/cluster/auth", "/metrics"):
        assert client.get(path).status_code == 200
    for header in (None, "Bearer c", "Bearer", "a", "Basic a", "Bearer a b", "Bearer ä"):
        headers = {"authorization": header.encode()} if header else {}
        for answer in (client.get("/v1/models", headers=headers), client.post("/v1/score", json={}, headers=headers)):
            assert answer.status_code == 401, header
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    for header in ("Bearer a", "bearer b", "Bearer  b"):
        assert client.get("/v1/models", headers={"authorization": header}).status_code == 200
    long = client.get("/v1/models", headers={"authorization": "Bearer " + "a" * 2000})
    assert (long.status_code, "longer than 1024 bytes" in long.json()["error"]["message"]) == (401, True)


@pytest.mark.parametrize("gone", ["deleted", "empty"])
def test_a_file_that_is_away_for_one_look_revokes_nothing(followed: Followed, gone: str) -> None:
    content = followed.file.read_text()
    for _ in range(5):
        followed.file.unlink() if gone == "deleted" else followed.file.write_text("")
        followed.look()
        followed.file.write_text(content)
        assert followed.look() == "ab"


def test_a_look_that_hangs_is_a_file_that_cannot_be_read(followed: Followed) -> None:
    """As on a network file system: the thread never comes back."""
    followed.now += HANG_SECONDS + 1
    assert followed.ring.sample().stale
    assert followed.ring.find("a")
    followed.now += 60
    with pytest.raises(KeysUnavailable):
        followed.ring.find("a")


def test_a_file_is_read_again_if_it_changed_while_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, telemetry, fstat = write(tmp_path / "keys.json", entry("a")), Telemetry(), os.fstat
    ring = KeyRing(file)

    def and_a_write(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        write(file, entry("b"), entry("c"))
        return status

    write(file, entry("b"))
    with monkeypatch.context() as patch:
        patch.setattr("yardstick_llm.gateway.http.auth.os.fstat", and_a_write)
        ring.look(telemetry)
    ring.look(telemetry)
    assert [name for name in "abc" if ring.find(name)] == ["b", "c"]


class ToldSecret:
    """A Secret as the API tells it."""

    name = "keys"
    told: bytes | None = None

    def start(self) -> None:
        raise AssertionError("no thread follows it here")

    stop = start

    def content(self) -> bytes | None:
        return self.told


def content(*names: str) -> bytes:
    return json.dumps({"keys": [entry(name) for name in names]}).encode()


def test_a_watched_secret_counts_and_no_older_file_comes_back(tmp_path: Path) -> None:
    file, telemetry, secret = write(tmp_path / "keys.json", entry("a"), entry("b")), Telemetry(), ToldSecret()
    ring = KeyRing(file, secret=secret)

    def valid(told: bytes | None) -> str:
        secret.told = told
        ring.look(telemetry)
        return "".join(name for name in "abcd" if ring.find(name))

    assert valid(None) == "ab", "not seen yet: the file counts"
    write(file, entry("a"))
    assert valid(None) == "a"
    newest = content("c")
    assert valid(newest) == "c"
    write(file, entry("a"), entry("b"))  # the kubelet is late
    assert (valid(newest), valid(newest)) == ("c", "c")
    assert (valid(None), valid(None)) == ("c", "c"), "the API is away, and the file may be older than what it told"
    write(file, entry("d"))
    assert valid(None) == "d"
    assert valid(b"{") == "d", "kept as that of an unusable file"
    assert ring.sample().stale
    assert valid(content("a", "b")) == "ab"
    assert (valid(b""), valid(b"")) == ("ab", ""), "deleted, at two looks in turn"
    assert valid(content("a")) == "a"
