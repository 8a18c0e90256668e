"""The files of the web console as a client without a browser sees them."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.gateway.conftest import Start
from tests.gateway.keys import entry, write

ROOT = Path(__file__).parents[3]
FILES = {path.name for path in (ROOT / "gateway" / "console").iterdir() if path.suffix != ".py" and path.is_file()}
ASSETS = sorted(FILES - {"index.html"})
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MAX_BYTES = 150_000


def test_the_page_and_all_that_it_loads(shared: httpx.Client) -> None:
    page = shared.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    loaded, size = set(re.findall(r'(?:src|href)="console/([^"]+)"', page.text)), len(page.content)
    for name in ASSETS:
        answer = shared.get(f"/console/{name}").raise_for_status()
        assert answer.headers["content-type"].startswith(KINDS[Path(name).suffix])
        loaded |= set(re.findall(r'from "\./([^"]+)"', answer.text))
        size += len(answer.content)
    assert loaded == set(ASSETS), "every file is used, and none is missing"
    assert size <= MAX_BYTES
    head = shared.head("/")
    assert (head.status_code, head.content, int(head.headers["content-length"])) == (200, b"", len(page.content))


def test_the_policy_of_the_page(shared: httpx.Client) -> None:
    for path in ("/", "/console/app.js", "/console/base.css"):
        headers = shared.get(path).headers
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        directives = dict(directive.split(" ", 1) for directive in headers["content-security-policy"].split("; "))
        assert directives["default-src"] == "'none'"
        assert set(directives.values()) == {"'none'", "'self'", "'script'"}, "nothing inline, nothing from elsewhere"
    page = shared.get("/").text
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)|https?://", page)


def test_browsers_keep_files_until_they_change(shared: httpx.Client) -> None:
    for path in ("/", "/console/app.js"):
        first = shared.get(path)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = shared.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert shared.get(path, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/console/index.html", "/console/none.js", "/console/__init__.py", "/console/..%2fapp.py", "/console/%2e%2e/cli.py"]
)
def test_other_files_are_not_served(shared: httpx.Client, path: str) -> None:
    answer = shared.get(path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


def test_only_reading(shared: httpx.Client) -> None:
    assert shared.post("/console/app.js", json={}).status_code == 405


def test_off_by_setting(start: Start) -> None:
    client = start(FakeEngine(), console=False)
    assert client.get("/").status_code == 405, "only POST, of Text Embeddings Inference"
    answer = client.get("/console/app.js")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert client.get("/v1/models").status_code == 200


def test_the_page_needs_no_key_and_its_calls_do(start: Start, tmp_path: Path) -> None:
    client = start(FakeEngine(), wait=False, api_keys_file=write(tmp_path / "keys.json", entry("me")))
    assert [client.get(path).status_code for path in ("/", "/console/app.js", "/v1/models")] == [200, 200, 401]


def test_pages_of_other_sites_cannot_use_it_without_keys(shared: httpx.Client) -> None:
    assert shared.get("/", headers={"host": "evil.example"}).status_code == 421
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}
    assert shared.get("/console/app.js", headers=embedded).status_code == 403
    assert shared.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status_code == 200


def test_the_package_has_all_files() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "yardstick_llm.gateway.console"
    ]
    assert [name for name in FILES if not any(fnmatch(name, pattern) for pattern in patterns)] == []
