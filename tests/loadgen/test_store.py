"""Results in an S3-compatible store."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen import store
from loadgen.cli import main
from loadgen.errors import LoadError
from tests.loadgen.s3 import Store, running_store
from tests.loadgen.servers import serving
from tests.loadgen.test_client import good
from tests.loadgen.test_command import yardstick
from tests.processes import free_port

ADDRESS = "s3://runs/nightly/1"
FILES = {"records.jsonl", "report.html", "report.txt", "summary.json"}


@pytest.mark.parametrize(
    "text",
    ["runs", "s3://", "s3://a", "s3://Runs/x", "s3://runs//x", "s3://runs/../x", "s3://runs/a b", "https://runs.example.com/x"],
)
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(LoadError, match="write it as s3://BUCKET/PREFIX"):
        store.parse(text)


def test_prefixes_have_no_slashes_at_their_ends() -> None:
    assert store.parse("s3://runs/nightly/1/") == store.Address("runs", "nightly/1")
    assert [str(store.parse(text)) for text in ("s3://runs", "s3://runs/", ADDRESS)] == ["s3://runs", "s3://runs", ADDRESS]


def test_nothing_is_sent_before_address_and_folder_are_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, words in (([ADDRESS], "copies the files of --out"), (["runs", "--out", "x"], "names no place in a store")):
        monkeypatch.setattr(sys, "argv", ["load", "run", "--upload", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_only_files_of_runs_are_sent(tmp_path: Path) -> None:
    for path in ("search.json", "run-01/records.jsonl", "run-02/summary.json", "run-01/.env", "id_rsa", "other/records.jsonl"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "summary.json").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "run-03").symlink_to(tmp_path / "other")
    found = [file.relative_to(tmp_path).as_posix() for file in store._files(tmp_path)]
    assert found == ["search.json", "run-01/records.jsonl", "run-02/summary.json"]


@pytest.mark.parametrize(
    ("endpoint", "words"), [("http://127.0.0.1:{port}", "Connection refused"), ("s3.example.com", "AWS_ENDPOINT_URL is no URL")]
)
def test_a_store_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, words: str) -> None:
    (tmp_path / "summary.json").write_text("{}")
    variables = {
        "AWS_ENDPOINT_URL": endpoint.format(port=free_port()),
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LoadError, match=words):
        store.upload(tmp_path, store.parse(ADDRESS))
    assert (tmp_path / "summary.json").read_text() == "{}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running_store(tmp_path_factory.mktemp("moto") / "log") as store:
        yield store


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with serving(good) as url:
        yield url


@pytest.mark.slow
def test_a_run_is_copied(server: Store, target: str, tmp_path: Path) -> None:
    options = ["--rate", "10", "--duration", "1", "--out", str(tmp_path), "--upload", ADDRESS]
    done = yardstick("run", "--url", target, *options, **server.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.files("nightly/1") == {name: (tmp_path / name).read_bytes() for name in FILES}
    assert f"wrote {ADDRESS}/summary.json\n" in done.stderr
    told = (done.stdout + done.stderr).encode() + b"".join(server.files("nightly/1").values())
    assert server.secret.encode() not in told
    assert server.key.encode() not in told


@pytest.mark.slow
def test_a_search_is_copied_with_its_runs(server: Store, target: str, tmp_path: Path) -> None:
    options = ["--objective", "failures == 0", "--start", "10", "--most", "10", "--duration", "1", "--out", str(tmp_path)]
    done = yardstick("search", "--url", target, *options, "--upload", "s3://runs/search", **server.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(server.files("search")) == {"search.html", "search.json", *(f"run-01/{name}" for name in FILES)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "address", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, "s3://runs/refused", "403 Forbidden, SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "AKIAUNKNOWN"}, "s3://runs/refused", "403 Forbidden, InvalidAccessKeyId"),
        ({}, "s3://no-such-bucket/refused", "404 Not Found, NoSuchBucket"),
    ],
)
def test_a_refused_upload_keeps_the_files(
    server: Store, target: str, tmp_path: Path, changes: dict[str, str], address: str, words: str
) -> None:
    options = ["--rate", "10", "--duration", "1", "--out", str(tmp_path), "--upload", address]
    done = yardstick("run", "--url", target, *options, **server.environment | changes)
    assert done.returncode == 2
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("yardstick load: ")]
    assert words in message
    assert all(value not in done.stdout + done.stderr for value in (server.environment | changes).values() if "http" not in value)
    assert '"passed":true' in done.stdout, "the report is not lost"
    assert {file.name for file in tmp_path.iterdir()} == FILES

    if address.startswith("s3://runs/"):
        command = re.search(r"`yardstick load (upload [^`]+)`", message)
        assert command
        assert yardstick(*command[1].split(), **server.environment).returncode == 0
        assert set(server.files("refused")) == FILES
