"""Metrics of API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway.metrics.base import Metrics

if TYPE_CHECKING:
    from gateway.logs.account import Account

OTHER_KEYS = ":other"
"""Stands for all keys beyond the most that have series of their own."""


class KeyMetrics(Metrics):
    """Counts the requests, items and tokens of API keys, with the numbers of the access log."""

    def __init__(self, registry: CollectorRegistry, most: int) -> None:
        """``most``: keys with series of their own; 0: nothing is counted."""
        super().__init__(registry)
        self._most = most
        self._names: set[str] = set()
        self._requests = self._counter("key_requests", "Requests of an API key that were answered.", "key")
        self._items = self._counter("key_items", "Items that an API key had scored.", "key")
        self._tokens = self._counter(
            "key_tokens", "Tokens of an API key: of prompts, cached ones of these, of completions.", "key", "kind"
        )

    def used(self, key: str, account: Account) -> None:
        """Count a finished request of the key called ``key``."""
        if not self._most:
            return
        if key not in self._names and len(self._names) >= self._most:
            key = OTHER_KEYS
        else:
            self._names.add(key)
        self._requests.labels(key).inc()
        if account.items:
            self._items.labels(key).inc(account.items)
        for kind, tokens in (
            ("prompt", account.prompt_tokens),
            ("prompt_cached", account.cached_tokens),
            ("completion", account.completion_tokens),
        ):
            if tokens:
                self._tokens.labels(key, kind).inc(tokens)
