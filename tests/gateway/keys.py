"""Key files of tests, and requests by their keys. The secret of a key is its name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx

SCORE = {"query": [1], "items": [[2], [3]], "label_token_ids": [1]}
COMPLETION = {"prompt": [1, 2, 3, 4], "max_tokens": 16}


def entry(name: str, **limits: Any) -> dict[str, Any]:
    """A key whose secret is its name."""
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **limits}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    return replace(path, json.dumps({"keys": list(entries)}))


def replace(path: Path, text: str) -> Path:
    """In one step: the gateway may look at any time."""
    path.with_suffix(".draft").write_text(text)
    return path.with_suffix(".draft").replace(path)


def by(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def ask(client: httpx.Client, name: str, path: str = "score", **body: Any) -> httpx.Response:
    return client.post(f"/v1/{path}", json={**(SCORE if path == "score" else COMPLETION), **body}, headers=by(name))
