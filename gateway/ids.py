"""Random ids of requests, responses and their parts."""

from __future__ import annotations

import random


def new_id() -> str:
    """Return 128 random bits in hexadecimal. Ids protect nothing, so they need no randomness from the operating system."""
    return f"{random.getrandbits(128):032x}"
