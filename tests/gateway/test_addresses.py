"""Entries of the setting ``engines``."""

from __future__ import annotations

import pytest

from gateway.settings import Address, DnsAddress, ServiceAddress, StaticAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:8100", StaticAddress("http://127.0.0.1:8100")),
        ("https://engines.example/", StaticAddress("https://engines.example")),
        ("dns://engines.default.svc:8100", DnsAddress("engines.default.svc", 8100)),
        ("kubernetes://engines:http", ServiceAddress("engines", "http")),
        ("kubernetes://models/engines:8100", ServiceAddress("engines", 8100, "models")),
    ],
)
def test_entries(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "engines:8100",
        "http://",
        "http://x:port",
        "dns://engines",
        "dns://x:1/y",
        "kubernetes://engines",
        "kubernetes://a/b/c:1",
        "kubernetes://Engines:1",
        "kubernetes://engines:70000",
        "ftp://x",
        "",
    ],
)
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it like|a port is"):
        parse_address(text)
