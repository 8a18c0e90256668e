"""Ids of requests."""

from __future__ import annotations

import os
import random

from gateway.ids import new_id


def test_nobody_who_seeds_the_generator_of_the_program_repeats_ids() -> None:
    state = random.getstate()
    try:
        found = set()
        for _ in range(2):
            random.seed(1)
            found.add(new_id())
    finally:
        random.setstate(state)
    assert len(found) == 2


def test_processes_that_are_forked_have_other_ids() -> None:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writable, new_id().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(readable, 100).decode() != new_id()
    os.close(readable)
    os.close(writable)
