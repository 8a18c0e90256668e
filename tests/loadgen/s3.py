"""An S3-compatible store for tests: moto's server, which checks signatures and rights."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.clients.environments import python_environment
from tests.processes import free_port, wait_until

obstore = pytest.importorskip("obstore", reason="the extra s3 is not installed")
S3Store = pytest.importorskip("obstore.store").S3Store
BUCKET = "runs"
POLICY = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'


class Store(NamedTuple):
    """A running store with the bucket ``runs``."""

    url: str
    key: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a user who may write to it."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}

    def files(self, prefix: str) -> dict[str, bytes]:
        """Contents of the objects under ``prefix``, by the rest of their keys."""
        credentials = {"access_key_id": self.key, "secret_access_key": self.secret, "region": "us-east-1"}
        bucket = S3Store(BUCKET, endpoint=self.url, client_options={"allow_http": True}, **credentials)
        keys = [entry["path"] for batch in obstore.list(bucket, prefix) for entry in batch]
        return {key.removeprefix(f"{prefix}/"): obstore.get(bucket, key).bytes().to_bytes() for key in keys}


@contextmanager
def running_store(log: Path, address: str = "127.0.0.1") -> Iterator[Store]:
    """A store that listens on ``address`` and writes its log to the file ``log``. It refuses all but its one user."""
    port, python = free_port(), python_environment("moto") / "bin" / "python"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AWS_"))}
    command = [str(python), "-m", "moto.server", "--host", address, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables | {"INITIAL_NO_AUTH_ACTION_COUNT": "1000"}, stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://{address}:{port}") as client:
            wait_until(lambda: _answers(client), 30)
            yield Store(str(client.base_url).rstrip("/"), *_user_of(client))
    finally:
        process.kill()
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/moto-api/data.json").is_success
    except httpx.TransportError:
        return False


def _user_of(client: httpx.Client) -> tuple[str, str]:
    """Make the bucket and a user; returns the id and the secret of its key."""
    signed = {"authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/iam/aws4_request, SignedHeaders=host, Signature=x"}

    def ask(action: str, **parameters: str) -> str:
        form = {"Action": action, "Version": "2010-05-08", "UserName": "load"} | parameters
        return client.post("/", data=form, headers=signed).raise_for_status().text

    client.put(f"/{BUCKET}").raise_for_status()
    ask("CreateUser")
    ask("PutUserPolicy", PolicyName="write", PolicyDocument=POLICY)
    made = ask("CreateAccessKey")
    client.post("/moto-api/reset-auth", content=b"0").raise_for_status()
    id, secret = (re.search(f"<{name}>(.*)</{name}>", made) for name in ("AccessKeyId", "SecretAccessKey"))
    assert id
    assert secret
    return id[1], secret[1]
