"""An engine and a gateway that run as long as the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gateway.commands.launch import program_environment, require_engine
from gateway.commands.offline.sender import Server
from gateway.commands.serve import ServeOptions, children, gateway_settings, models_of


class Running(NamedTuple):
    """A server, and a check that raises :class:`CommandError` if it has ended."""

    server: Server
    check: Callable[[], None]


@contextmanager
def own_server(model: str | None, api_key: str | None) -> Iterator[Running]:
    """Start both on free ports of this machine, and stop them at the end. ``model`` None: the demo model.

    Raises :class:`CommandError`.
    """
    require_engine()
    options = ServeOptions(model=model, host="127.0.0.1", port=0)
    settings = gateway_settings(options, program_environment())
    with children(options, settings, models_of(options)) as supervisor:
        supervisor.wait_until_ready(options.title, talkative=False)
        yield Running(Server(supervisor.url, api_key, trust_env=False), supervisor.check_running)
