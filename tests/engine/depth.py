"""How many random cases tests of the engine have."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest


def seeds(*, quick: int = 0, slow: int, deep: int) -> list[Any]:
    """Parameters of a test: seeds from 0. Those below ``quick`` are not marked, those below ``slow`` are marked slow, and the rest
    need ``--hypothesis-profile=deep``."""
    end = deep if hypothesis.settings.get_current_profile_name() == "deep" else slow
    return [seed if seed < quick else pytest.param(seed, marks=pytest.mark.slow) for seed in range(end)]
