"""The warning where a processor emulates bfloat16."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.runner.machine import warn_of_slow_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("found", "dtype", "warned"),
    [
        ({"architecture": "x86_64", "avx2": True}, torch.bfloat16, True),
        ({"architecture": "x86_64", "avx512_bf16": True}, torch.bfloat16, False),
        ({"architecture": "x86_64", "amx_bf16": True}, torch.bfloat16, False),
        ({"architecture": "x86_64", "avx2": True}, torch.float32, False),
        ({"architecture": "aarch64"}, torch.bfloat16, False),
    ],
)
def test_bfloat16_without_instructions_for_it(
    found: dict[str, object], dtype: torch.dtype, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    with caplog.at_level(logging.WARNING):
        warn_of_slow_dtype(CPU, dtype)
        warn_of_slow_dtype(torch.device("cuda", 0), dtype)
    assert len(caplog.records) == warned
    assert not warned or "use --dtype float32" in caplog.text
