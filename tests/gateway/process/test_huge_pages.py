"""The gateway's memory in transparent huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

from gateway.metrics.telemetry import Telemetry
from gateway.process.huge_pages import (
    GROWTH_BYTES,
    MOST_BYTES,
    MOST_REFUSALS,
    MOST_SECONDS,
    HugePages,
    Linux,
    aligned_parts,
)
from tests.fakes import FakeEngine, served
from tests.processes import Program, wait_until
from tests.warm import as_in_production

MIB = 1 << 20
PART = 2 * MIB
PAGE = mmap.PAGESIZE
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MADV_NOHUGEPAGE, MADV_COLLAPSE = 15, 25
PR_SET_THP_DISABLE = 41


def memory(parts: int, *advice: int) -> tuple[mmap.mmap, int]:
    """Return private memory that has ``parts`` aligned parts, and the address of the first one."""
    found = mmap.mmap(-1, (parts + 1) * PART, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for each in advice:
        found.madvise(each)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(found))
    return found, -(-begin // PART) * PART


@cache
def missing() -> str | None:
    """Return what this system lacks for huge pages, as its kernel says; None if nothing."""
    if platform.system() != "Linux" or not SETTINGS.exists():
        return "no transparent huge pages"
    if "[never]" in (SETTINGS / "enabled").read_text() or int((SETTINGS / "hpage_pmd_size").read_text()) != PART:
        return "transparent huge pages are disabled, or have another size than 2 MiB"
    if not os.access("/proc/self/pagemap", os.R_OK):
        return "no access to /proc/self/pagemap"
    block, part = memory(1)
    ctypes.memset(part, 1, PART)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(part), ctypes.c_size_t(PART), MADV_COLLAPSE):
        return f"MADV_COLLAPSE: {os.strerror(ctypes.get_errno())}"
    del block
    return None


@pytest.fixture
def supported() -> None:
    if reason := missing():
        pytest.skip(reason)


class FakeKernel:
    """Memory of full parts, and a clock that each copy moves on."""

    part_bytes = PART

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.fills: dict[int, float] = {}
        self.refuses = False
        self.problem: OSError | None = None
        self.copy_seconds = 0.003
        self.now = 0.0
        self.tried: list[int] = []
        self.telemetry = Telemetry()

    def pages(self) -> HugePages:
        return HugePages(self.telemetry, kernel=lambda: self, clock=lambda: self.now)

    def maps(self) -> Iterable[str]:
        if self.problem:
            raise self.problem
        return [f"0-{self.parts * PART:x} rw-p 00000000 00:00 0 "]

    def fill(self, address: int) -> float:
        return self.fills.get(address, 1.0)

    def collapse(self, address: int) -> bool:
        if address not in self.tried or self.refuses:
            self.now += self.copy_seconds
        self.tried.append(address)
        return not self.refuses

    def resident_bytes(self) -> int:
        return self.parts * PART

    @property
    def collapsed(self) -> int:
        return 0 if self.refuses else len(set(self.tried))


def test_the_memory_of_the_start_is_collapsed_at_once():
    kernel = FakeKernel(20)
    kernel.pages().start()
    assert kernel.tried == list(range(0, 20 * PART, PART))


def test_parts_that_are_not_full_are_left_alone():
    kernel = FakeKernel(3)
    kernel.fills = {0: 0.0, PART: 0.9}
    kernel.pages().start()
    assert kernel.tried == [2 * PART]


def test_memory_that_comes_later_is_collapsed_between_requests():
    kernel = FakeKernel(4)
    pages = kernel.pages()
    pages.start()
    kernel.parts += GROWTH_BYTES // PART + 1
    kernel.telemetry.in_flight = 1
    for _ in range(3):
        pages.tick()
    assert kernel.collapsed == 4
    kernel.telemetry.in_flight = 0
    pages.tick()  # searches
    for copies in (5, 6):
        pages.tick()
        assert kernel.collapsed == copies
    pages.tick()
    tried = len(kernel.tried)
    for _ in range(3):
        pages.tick()
    assert len(kernel.tried) == tried, "the memory has not grown since"


def test_memory_is_bounded():
    kernel = FakeKernel(2 * MOST_BYTES // PART)
    kernel.copy_seconds = 0.0
    pages = kernel.pages()
    pages.start()
    assert kernel.collapsed * PART == MOST_BYTES
    kernel.parts *= 2
    for _ in range(300):
        pages.tick()
    assert kernel.collapsed * PART == MOST_BYTES


def test_time_is_bounded():
    kernel = FakeKernel(100)
    kernel.copy_seconds = 0.06
    pages = kernel.pages()
    pages.start()
    assert MOST_SECONDS <= kernel.now < MOST_SECONDS + kernel.copy_seconds + 1e-6
    kernel.parts *= 2
    tried = len(kernel.tried)
    for _ in range(10):
        pages.tick()
    assert len(kernel.tried) == tried


def test_copies_between_requests_count():
    kernel = FakeKernel(1)
    kernel.copy_seconds = 0.06
    pages = kernel.pages()
    pages.start()
    kernel.parts = 100
    for _ in range(100):
        pages.tick()
    assert MOST_SECONDS <= kernel.now < MOST_SECONDS + kernel.copy_seconds + 1e-6


def test_a_kernel_that_refuses_is_asked_no_more():
    kernel = FakeKernel(20)
    kernel.refuses = True
    pages = kernel.pages()
    pages.start()
    kernel.parts *= 2
    for _ in range(40):
        pages.tick()
    assert len(kernel.tried) == MOST_REFUSALS


def test_a_system_that_does_not_tell_is_asked_no_more():
    kernel = FakeKernel(4)
    kernel.problem = PermissionError(13, "Permission denied")
    pages = kernel.pages()
    pages.start()
    kernel.problem = None
    kernel.parts = 40
    for _ in range(4):
        pages.tick()
    assert not kernel.tried


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"enabled": "always madvise [never]\n", "hpage_pmd_size": "2097152\n"},
        {"enabled": "always [madvise] never\n"},
        {"enabled": "always [madvise] never\n", "hpage_pmd_size": "\n"},
    ],
    ids=["no huge pages", "never", "no size", "empty size"],
)
def test_systems_without_huge_pages(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("gateway.process.huge_pages._SETTINGS", tmp_path)
    with pytest.raises((OSError, ValueError)):
        Linux()
    pages = HugePages(Telemetry())
    pages.start()
    pages.tick()


def test_only_whole_parts_of_private_anonymous_memory():
    maps = """\
55d0c0300000-55d0c0a00000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000400000 r--p 00000000 00:00 0
7f0001000000-7f0001400000 ---p 00000000 00:00 0
7f0002000000-7f0002400000 rw-s 00000000 00:01 1024                       /memfd:tokeniser (deleted)
7f0003000000-7f0003400000 rw-p 00012000 fe:00 77                         /usr/lib/a library.so
7f0004000000-7f00041ff000 rw-p 00000000 00:00 0
7f0004300000-7f00046ff000 rw-p 00000000 00:00 0
7f0005000000-7f0005200000 rw-p 00000000 00:00 0                          [anon:arena]
7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0                          [stack]
""".splitlines()
    assert list(aligned_parts(maps, PART)) == [0x55D0C0400000, 0x55D0C0600000, 0x55D0C0800000, 0x7F0004400000, 0x7F0005000000]


@pytest.mark.usefixtures("supported")
def test_pages_that_the_process_does_not_have():
    block, part = memory(1, MADV_NOHUGEPAGE)  # the kernel would give a huge page at once where it is set to `always`
    kernel = Linux()
    assert kernel.fill(part) == 0
    ctypes.memset(part, 1, PART // 2)
    assert kernel.fill(part) == 0.5
    ctypes.string_at(part, PART)
    assert kernel.fill(part) == 0.5, "pages of zeros take no memory"
    assert not kernel.collapse(part), "the kernel was told not to"
    del block


@pytest.mark.usefixtures("supported")
def test_pages_that_a_fork_shares():
    block, part = memory(1, MADV_NOHUGEPAGE)
    ctypes.memset(part, 1, PART)
    kernel = Linux()
    assert kernel.fill(part) == 1
    read, write = os.pipe()
    if not (child := os.fork()):
        with suppress(BaseException):
            os.close(write)
            os.read(read, 1)
        os._exit(0)
    try:
        assert kernel.fill(part) == 0
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)
    assert kernel.fill(part) == 1
    del block


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Start programs for which the kernel refuses huge pages."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def rollup(gateway: Program, name: str) -> float:
    """A figure of the process's memory in MiB."""
    lines = Path(f"/proc/{gateway.process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def children(gateway: Program) -> list[int]:
    """Processes that the gateway has started."""
    return list(map(int, Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()))


@pytest.fixture
def start() -> Iterator[Callable[[], Program]]:
    programs: list[Program] = []
    with served(FakeEngine()) as url, as_in_production():

        def start_gateway() -> Program:
            programs.append(Program("gateway", "--engine", url))
            return programs[-1].wait_ready()

        yield start_gateway
        for program in programs:
            program.close()


@pytest.mark.skipif(platform.system() != "Linux", reason="Linux only")
def test_a_gateway_takes_huge_pages_and_no_more_memory(start: Callable[[], Program]):
    with without_huge_pages():
        refused = start()
    body = {"model": "fake", "prompt": "red shoes", "max_tokens": 4}
    assert refused.client.post("/v1/completions", json=body).status_code == 200
    assert rollup(refused, "AnonHugePages") == 0
    if reason := missing():
        pytest.skip(f"the gateway that is refused huge pages serves; the other one cannot have them: {reason}")
    gateway = start()
    wait_until(lambda: rollup(gateway, "AnonHugePages") >= 16)
    assert gateway.client.post("/v1/completions", json=body).status_code == 200
    assert rollup(gateway, "Rss") < rollup(refused, "Rss") + 4
    huge, first = rollup(gateway, "AnonHugePages"), children(gateway)
    os.kill(first[0], signal.SIGKILL)  # the fork server
    wait_until(lambda: children(gateway) not in ([], first))
    assert rollup(gateway, "AnonHugePages") >= huge, "a new fork server starts without a copy of the gateway's memory"
