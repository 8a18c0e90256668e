"""Score requests, one after another from several callers, while something happens to the cluster."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections import Counter
from types import TracebackType
from typing import Any, Self

import aiohttp

LABELS = [" Yes", " No"]
PAUSE = 0.05
"""Seconds between an answer and its caller's next request, which leave the machine time for what happens to the cluster."""


class Load:
    """Between entering and leaving, ``callers`` score new items again and again; each answer is checked for being whole."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        host: str,
        callers: int = 4,
        items: int = 6,
        repeat: bool = False,
        model: str = "yardstick-demo",
    ) -> None:
        """``repeat``: always the same request, which the cache can answer."""
        self._url, self._callers, self.items, self._repeat, self._model = f"{url}/v1/score", callers, items, repeat, model
        self._headers = {"authorization": f"Bearer {key}", "host": host}
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]  # nothing that another load has asked is in the cache
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.answered = 0
        self.failures: Counter[str] = Counter()
        self.hits = 0
        """Items of the last answer that came from the cache."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a request did not end"

    async def _run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            await asyncio.gather(*(self._call(session) for _ in range(self._callers)))

    async def _call(self, session: aiohttp.ClientSession) -> None:
        while not self._stop.is_set():
            number = 0 if self._repeat else next(self._numbers)
            body = {
                "model": self._model,
                "query": f"Query: shoes {self._name} {number}\nItem: ",
                "items": [f"shoe {i}\nRelevant:" for i in range(self.items)],
            }
            try:
                async with session.post(self._url, json=body | {"labels": LABELS}, headers=self._headers) as response:
                    self._judge(response, await response.json())
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.failures[f"{type(error).__name__}: {error}"] += 1
            await asyncio.sleep(PAUSE)

    def _judge(self, response: aiohttp.ClientResponse, answer: Any) -> None:
        if response.status != 200:
            self.failures[f"{response.status}: {answer['error']['message']}"] += 1
        elif [len(scores) for scores in answer["scores"]] != [len(LABELS)] * self.items:
            self.failures["an answer with holes in it"] += 1
        else:
            self.answered += 1
            self.hits = int(response.headers.get("x-yardstick-cache", "0/0").partition("/")[0])
