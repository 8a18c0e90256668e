"""Variables of the loop process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from engine.serving.environment import IDLE_THREADS, MALLOC, PRODUCTS, with_defaults


def test_idle_threads_sleep() -> None:
    assert with_defaults({"HOME": "/"}) == {"HOME": "/"} | MALLOC | PRODUCTS | IDLE_THREADS


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_says_is_kept(name: str) -> None:
    assert with_defaults({name: "5"}) == MALLOC | PRODUCTS | {name: "5"}
    assert with_defaults({name: "5", "MALLOC_TRIM_THRESHOLD_": "1"})["MALLOC_TRIM_THRESHOLD_"] == "1"
    assert with_defaults({"LRU_CACHE_CAPACITY": "9"})["LRU_CACHE_CAPACITY"] == "9"


IN_USE = """
import ctypes
import torch
from kernels.linear import ONEDNN, pack, packed_linear

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
torch.set_num_threads(1)
weight = pack(torch.zeros(192, 64), ONEDNN)
sizes = []
for rows in range(1, 901):
    packed_linear(torch.zeros(rows, 64), weight)
    if rows in (300, 900):
        info = libc.mallinfo2()
        sizes.append(info.uordblks + info.hblkhd)
print((sizes[1] - sizes[0]) / 2**20)
"""
"""Prints the MiB of allocated memory that 600 further numbers of rows need."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_products_of_other_shapes_take_no_more_memory() -> None:
    command = [sys.executable, "-c", IN_USE]
    found = subprocess.run(command, env=with_defaults(os.environ), capture_output=True, text=True, timeout=100, check=True)
    assert float(found.stdout) < 32, found.stdout
