"""Rerank the rows of a data set on a Ray cluster: Ray Data reads and writes Parquet files, and each batch is one request.

    python examples/recipes/ray_data.py INPUT OUTPUT URL MODEL [REQUESTS]

INPUT has the columns ``query`` and ``document``; OUTPUT has them and ``score``. At most REQUESTS (16) requests are in progress.
YARDSTICK_API_KEY is the key of the gateway. Needs ``pip install 'ray[data]' httpx`` on the cluster.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

ROWS_A_REQUEST = 32
RETRY_SECONDS = 600.0


class Rerank:
    """Adds the scores of a batch of rows. Each of Ray's actors has one, and one request in flight."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=RETRY_SECONDS)
        self._model = model

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return ``batch`` with a column of scores. Waits while the server is busy. Raises :class:`httpx.HTTPStatusError`."""
        body = {"model": self._model, "queries": list(batch["query"]), "documents": list(batch["document"]), "truncate": True}
        started = time.monotonic()
        while True:
            response = self.client.post("/v1/score", json=body)
            if response.status_code not in (429, 503) or time.monotonic() - started > RETRY_SECONDS:
                break
            time.sleep(float(response.headers.get("retry-after", 1)))
        results = sorted(response.raise_for_status().json()["data"], key=lambda result: int(result["index"]))
        return {**batch, "score": [result["score"] for result in results]}


def main(source: str, output: str, url: str, model: str, requests: str = "16") -> None:
    """Rerank all rows of ``source``."""
    import ray

    rows = ray.data.read_parquet(source, columns=["query", "document"])
    given = (url, model, os.environ.get("YARDSTICK_API_KEY"))
    actors = ray.data.ActorPoolStrategy(min_size=1, max_size=int(requests))
    # Actors wait for the gateway and reserve no CPU: with one CPU each, they would leave none for reading on a small machine.
    scored = rows.map_batches(Rerank, fn_constructor_args=given, batch_size=ROWS_A_REQUEST, compute=actors, num_cpus=0)
    scored.write_parquet(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
