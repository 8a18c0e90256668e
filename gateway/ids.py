"""Random ids of requests, responses and their parts."""

from __future__ import annotations

import os
import random

_random = random.Random()  # its own, so that a program that seeds the module's generator repeats no ids
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """Return 128 random bits in hexadecimal. Ids protect nothing, so they need no randomness from the operating system."""
    return f"{_random.getrandbits(128):032x}"
