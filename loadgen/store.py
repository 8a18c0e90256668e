"""Copies the files of a run to an S3-compatible store, with the package ``obstore`` (``pip install 'yardstick-llm[s3]'``).

The environment has the credentials and the place of the store, as for other clients of S3: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_REGION`` and, for another store than that of AWS, ``AWS_ENDPOINT_URL``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.errors import LoadError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

NAMES = ("records.jsonl", "report.txt", "report.html", "summary.json", "search.html", "search.json")
"""Files that runs and searches leave. Other files of the folder are not copied."""
TRIES = 3
CONNECT_SECONDS = 10
REQUEST_SECONDS = 300
"""Longest time of one request; large files are sent in parts."""
RETRY_SECONDS = 60
"""No request is tried again after this time."""
METADATA = "169.254.169.254"
"""Server of a cloud that gives credentials to its machines; asked if the environment has none."""
_PART = r"[\w.=-]*[\w=-][\w.=-]*"  # not only dots
_ADDRESS = re.compile(rf"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?:/(?P<prefix>{_PART}(?:/{_PART})*))?/?", re.ASCII)
_DEFAULT_REGION = "us-east-1"


class Address(NamedTuple):
    """A place in a store."""

    bucket: str
    prefix: str
    """Without slashes at its ends; may be empty."""

    def __str__(self) -> str:
        return "/".join(["s3:/", self.bucket, *([self.prefix] if self.prefix else [])])


def parse(text: str) -> Address:
    """Read ``s3://BUCKET/PREFIX`` and check that files can be sent at all. Raises :class:`LoadError`."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise LoadError(f"{text!r} names no place in a store; write it as s3://BUCKET/PREFIX")
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise LoadError("s3:// needs the package obstore; install it: pip install 'yardstick-llm[s3]'") from None
    return Address(found["bucket"], found["prefix"] or "")


def upload(folder: Path, address: Address) -> list[str]:
    """Copy the files of the runs in ``folder`` to ``address`` and return their keys. Existing keys are replaced. The files stay.
    Raises :class:`LoadError`."""
    import obstore
    from obstore.exceptions import BaseError

    store = _open(address)
    sent: list[str] = []
    for file in _files(folder):
        key = "/".join(part for part in (address.prefix, file.relative_to(folder).as_posix()) if part)
        try:
            obstore.put(store, key, file)
        except (BaseError, OSError) as error:
            again = f"the files stay in {folder}; send them with `yardstick load upload {folder} {address}`"
            raise LoadError(f"cannot write s3://{address.bucket}/{key}: {_reason(error)}; {again}") from None
        sent.append(key)
    if not sent:
        raise LoadError(f"{folder} has no files of a run; name a folder that `yardstick load` has left")
    return sent


def _open(address: Address) -> S3Store:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    endpoint = os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None and not re.fullmatch(r"https?://[\w.:\[\]-]+/?", endpoint, re.ASCII):
        raise LoadError("AWS_ENDPOINT_URL is no URL of a store; write it like https://s3.example.com")
    options: ClientConfig = {
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
    }
    try:
        return S3Store(
            address.bucket,
            endpoint=endpoint,
            region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION,
            client_options=options,
            retry_config={"max_retries": TRIES - 1, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except BaseError as error:
        raise LoadError(f"cannot use the store of {address}: {_reason(error)}; check the variables AWS_…") from None


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a run or a search, and of the search's runs; never what a link points to."""
    for place in (folder, *sorted(folder.glob("run-*"))):
        if place == folder or not place.is_symlink():
            yield from (file for name in NAMES if (file := place / name).is_file() and not file.is_symlink())


def _reason(error: Exception) -> str:
    """Return the cause in a line. Bodies of answers are left out, because they may have the access key."""
    text = str(error)
    found = [re.search(pattern, text) for pattern in (r"status code: (\d{3}[\w ]*)", r"<Code>(\w+)</Code>")]
    if not any(found):
        found = [re.search(pattern, text) for pattern in (r'(?:message|error): "([^"]+)"', r"HTTP error: (.*)")]
    words = ", ".join(one[1].strip() for one in found if one) or type(error).__name__
    return f"{words}, from {METADATA}: there are no credentials in the environment" if METADATA in text else words
