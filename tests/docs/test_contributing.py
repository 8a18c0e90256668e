"""The exercise of CONTRIBUTING.md works as it stands there: a new endpoint is one file, one line and a test."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.gateway.conftest import gateways
from yardstick_llm.gateway import app

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_the_endpoint_of_the_exercise(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, test = re.findall(r"```python\n(.*?)```", PAGE.partition("### Exercise: an endpoint\n")[2], flags=re.S)
    module = ModuleType("yardstick_llm.gateway.api.toy")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # annotations are looked up there
    exec(endpoint, module.__dict__)
    usual = app._v1

    def with_toy(settings: Any, telemetry: Any, workers: Any, stores: Any, pool: Any, *others: Any) -> list[Any]:
        return [*usual(settings, telemetry, workers, stores, pool, *others), module.toy_route(pool)]

    monkeypatch.setattr(app, "_v1", with_toy)
    names: dict[str, Any] = {}
    exec(test, names)
    with gateways() as start:
        names["test_ready_engines_are_counted"](start)
