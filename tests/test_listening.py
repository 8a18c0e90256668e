"""Servers that listen on all addresses, of clusters with IPv4, IPv6 or both."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.processes import free_port
from yardstick_llm.engine.server.process import _listen
from yardstick_llm.gateway.server import bind


def engine_listener(host: str, port: int) -> socket.socket:
    listener = _listen(host, port, "--port")
    listener.listen()
    return listener


BOTH = pytest.mark.parametrize("listen", [bind, engine_listener], ids=["gateway", "engine"])


@BOTH
def test_a_star_is_every_address(listen: Callable[[str, int], socket.socket]):
    port = free_port()
    with listen("*", port):
        for address in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            socket.create_connection((address, port), timeout=5).close()


@BOTH
def test_a_machine_may_have_no_ipv6(listen: Callable[[str, int], socket.socket], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    port = free_port()
    with listen("*", port) as listener:
        assert listener.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
