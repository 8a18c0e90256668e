"""The key file while it changes: which keys are valid, and what operators are told."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start, gateways, metric
from tests.gateway.keys import ask, by, entry, replace, write
from tests.processes import wait_until
from yardstick_llm.gateway.app import create_app
from yardstick_llm.gateway.errors import KeysUnavailable
from yardstick_llm.gateway.http.auth import HANG_SECONDS, MAX_FILE_BYTES, KeyRing
from yardstick_llm.gateway.ops.metrics import Telemetry
from yardstick_llm.gateway.settings import Settings, SettingsError

URL = "http://127.0.0.1:1"
LOOK_SECONDS, STALE = 0.03, 0.3


class Followed(NamedTuple):
    """A key file and two gateways that follow it: one keeps the keys of an unusable file for long, the other for a moment."""

    file: Path
    patient: httpx.Client
    hasty: httpx.Client

    def valid(self, names: str) -> str:
        """Those of ``names`` that open the patient gateway."""
        return "".join(name for name in names if self.patient.get("/v1/models", headers=by(name)).status_code == 200)

    def wait_valid(self, names: str) -> None:
        """Wait until ``names`` are all that is valid, for both gateways."""
        wait_until(lambda: self.valid("abcd") == names)
        wait_until(lambda: metric(self.hasty, "yardstick_api_keys") == len(names))

    def reloads(self, result: str) -> float:
        return metric(self.patient, f'yardstick_key_reloads_total{{result="{result}"}}')


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    file = write(tmp_path_factory.mktemp("keys") / "keys.json", entry("a"), entry("b"))
    with pytest.MonkeyPatch.context() as patch, gateways() as start:
        patch.setattr("yardstick_llm.gateway.http.auth.LOOK_SECONDS", LOOK_SECONDS)
        engine = FakeEngine()
        patient = start(engine, api_keys_file=file)
        hasty = start(api_keys_file=file, api_keys_stale_seconds=STALE, engines=(engine.url,))
        wait_until(lambda: hasty.get("/readyz").is_success, 60)
        yield Followed(file, patient, hasty)


@pytest.fixture
def followed(both: Followed, caplog: pytest.LogCaptureFixture) -> Iterator[Followed]:
    """With the keys ``a`` and ``b``; what was logged before is not recorded."""
    both.file.rmdir() if both.file.is_dir() else both.file.unlink(missing_ok=True)
    write(both.file, entry("a"), entry("b"))
    both.wait_valid("ab")
    wait_until(lambda: metric(both.patient, "yardstick_key_file_stale") == metric(both.hasty, "yardstick_key_file_stale") == 0)
    caplog.clear()
    return both


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_a_changed_file_counts_soon(followed: Followed) -> None:
    loaded = followed.reloads("loaded")
    write(followed.file, entry("b"), entry("c"))
    followed.wait_valid("bc")
    assert followed.reloads("loaded") == loaded + 1, "an unchanged file is not read again"


REVOKING: dict[str, Callable[[Path], object]] = {
    "no keys": lambda file: replace(file, '{"keys": []}'),
    "deleted": Path.unlink,
    "empty": lambda file: file.write_text(""),
    "blank": lambda file: file.write_text(" \n"),
}


@pytest.mark.parametrize("change", REVOKING)
def test_a_file_without_keys_revokes_all(followed: Followed, caplog: pytest.LogCaptureFixture, change: str) -> None:
    revoked = followed.reloads("revoked")
    REVOKING[change](followed.file)
    followed.wait_valid("")
    assert ask(followed.patient, "a").status_code == 401
    assert followed.reloads("revoked") == revoked + 1
    assert len(errors(caplog)) == 2, "one of each gateway"
    assert "all keys are revoked" in caplog.text or "all API keys are revoked" in caplog.text
    assert metric(followed.patient, "yardstick_key_file_stale") == 0
    write(followed.file, entry("c"))
    followed.wait_valid("c")


HARM: dict[str, Callable[[Path], object]] = {
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "broken": lambda file: replace(file, '{"keys": ['),
    "no valid entry": lambda file: write(file, entry("a"), entry("z") | {"sha256": entry("a")["sha256"]}, entry("b", weight=0)),
    "endless": lambda file: replace(file, " " * (MAX_FILE_BYTES + 1)),
    "a pipe, which would be waited for": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARM)
def test_an_unusable_file_keeps_the_last_good_version_for_a_stated_time(
    followed: Followed, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    before = followed.reloads("broken")
    HARM[harm](followed.file)
    wait_until(lambda: metric(followed.patient, "yardstick_key_file_stale") == 1)
    assert followed.valid("abc") == "ab"
    wait_until(lambda: ask(followed.hasty, "a").status_code == 503)
    refused = ask(followed.hasty, "unknown")
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, "keys_unavailable", "5")
    assert str(followed.file.parent) not in refused.text
    assert followed.hasty.get("/readyz").json()["error"]["code"] == "keys_unavailable"
    assert followed.hasty.get("/livez").status_code == 200
    assert followed.valid("abc") == "ab"
    assert followed.reloads("broken") == before + 1
    wait_until(lambda: len(errors(caplog)) == 3)
    assert sum("503" in error for error in errors(caplog)) == 1, "each is told once, not at every look"
    followed.file.rmdir() if followed.file.is_dir() else followed.file.unlink()
    write(followed.file, entry("b"))
    followed.wait_valid("b")
    assert ask(followed.hasty, "b").status_code == 200


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


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "valid", "words"), BAD)
def test_a_bad_entry_harms_no_other_key(
    followed: Followed, caplog: pytest.LogCaptureFixture, entries: list[dict[str, Any]], valid: str, words: str
) -> None:
    before = followed.reloads("partial")
    write(followed.file, entry("c"), entry("d"), *entries)
    followed.wait_valid(f"{valid}cd")
    wait_until(lambda: len(errors(caplog)) == 2)
    assert words in errors(caplog)[0]
    assert entry("a")["sha256"] not in caplog.text
    assert metric(followed.patient, "yardstick_key_file_problems") >= 1
    assert metric(followed.patient, "yardstick_key_file_stale") == 0
    assert followed.reloads("partial") == before + 1
    created(followed.file)
    write(followed.file, entry("c"), entry("d"))
    wait_until(lambda: metric(followed.patient, "yardstick_key_file_problems") == 0)


def test_a_gateway_with_a_bad_entry_stays_ready(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    """Also after the time for which an unusable file is forgiven, and whatever happens to the file's metadata."""
    write(followed.file, entry("a"), entry("a") | {"name": "first"}, entry("b"))
    followed.wait_valid("b")
    wait_until(lambda: len(errors(caplog)) == 2)
    before = followed.reloads("partial")
    for mode in (0o640, 0o600, 0o640):  # as kubelets do for pods with an `fsGroup`
        followed.file.chmod(mode)
        time.sleep(STALE / 2)
    assert followed.hasty.get("/readyz").status_code == 200
    assert ask(followed.hasty, "b").status_code == 200
    assert (len(errors(caplog)), followed.reloads("partial")) == (2, before), "unchanged keys are no news"


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


def test_keys_open_v1_and_nothing_else_needs_one(followed: Followed) -> None:
    client = followed.patient
    for path in ("/livez", "/readyz", "/health", "/ping", "/version", "/metrics"):
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


# Rules of single looks, which no client can time.


@pytest.mark.parametrize("gone", ["deleted", "empty"])
def test_a_file_that_is_away_for_one_look_revokes_nothing(tmp_path: Path, gone: str) -> None:
    file, telemetry = write(tmp_path / "keys.json", entry("a")), Telemetry()
    ring, content = KeyRing(file), file.read_text()
    for _ in range(5):
        file.unlink() if gone == "deleted" else file.write_text("")
        ring.look(telemetry)
        file.write_text(content)
        ring.look(telemetry)
        assert ring.find("a")


def test_a_look_that_hangs_is_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """As on a network file system: the thread never comes back."""
    now = 1000.0
    ring = KeyRing(write(tmp_path / "keys.json", entry("a")), stale_seconds=60, clock=lambda: now)
    now += HANG_SECONDS + 1
    assert ring.sample().stale
    assert ring.find("a")
    now += 60
    with pytest.raises(KeysUnavailable):
        ring.find("a")


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
