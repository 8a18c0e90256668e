"""Variables of the loop process."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.server.loop_client import HUGE_PAGES, IDLE_THREADS, MALLOC, PRODUCTS, with_defaults


def test_idle_threads_sleep() -> None:
    assert with_defaults({"HOME": "/"}) == {"HOME": "/"} | MALLOC | HUGE_PAGES | PRODUCTS | IDLE_THREADS


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_says_is_kept(name: str) -> None:
    assert with_defaults({name: "5"}) == MALLOC | HUGE_PAGES | PRODUCTS | {name: "5"}
    assert with_defaults({name: "5", "MALLOC_TRIM_THRESHOLD_": "1"})["MALLOC_TRIM_THRESHOLD_"] == "1"
    assert with_defaults({"LRU_CACHE_CAPACITY": "9"})["LRU_CACHE_CAPACITY"] == "9"
    assert with_defaults({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"


TOUCH = """
import torch

weight, packed = torch.ones(8 << 20), torch.ops.mkldnn._reorder_linear_weight(torch.ones(2048, 4096), 256)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""
"""Prints the KiB of huge pages of a process with 64 MiB of weights."""
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not TRANSPARENT.exists() or "[madvise]" not in TRANSPARENT.read_text(), reason="programs cannot ask")
@pytest.mark.skipif(platform.machine() != "x86_64" or platform.libc_ver() < ("glibc", "2.35"), reason="needs glibc 2.35")
def test_weights_are_in_huge_pages() -> None:
    command = [sys.executable, "-c", TOUCH]
    variables = [with_defaults(os.environ), with_defaults({**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})]
    large, small = (
        int(subprocess.run(command, env=each, capture_output=True, text=True, timeout=100, check=True).stdout) for each in variables
    )
    assert small == 0
    assert large > 60 << 10


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
