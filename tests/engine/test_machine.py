"""What an engine takes of its machine: device, number format, cores, threads, memory, and variables of its process."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.encoders import make_encoder
from tests.engine.lenvm.plain import GAMMA, make_lenvm_checkpoint
from tests.engine.lenvm.writing import guidance, guided
from tests.engine.test_loop import run, tokens_of
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop, set_threads
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.config import ModelConfig, load_config
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.encoder import Encoder
from yardstick_llm.engine.models.encoder_config import load_encoder_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.modules import PROJECTIONS
from yardstick_llm.engine.models.rope import Rope
from yardstick_llm.engine.runner import machine as cgroup
from yardstick_llm.engine.runner import machine as module
from yardstick_llm.engine.runner import machine as placement
from yardstick_llm.engine.runner.graphs import BUCKETS
from yardstick_llm.engine.runner.machine import (
    GPU_FIXED_BYTES,
    MOST_PRODUCTS,
    StepThreads,
    default_running_requests,
    default_slots,
    device_of,
    slot_bytes,
    step_bytes,
    step_threads,
    warn_of_slow_dtype,
)
from yardstick_llm.engine.server.loop_client import HUGE_PAGES, MALLOC, PRODUCTS, with_defaults
from yardstick_llm.engine.settings import GPU_BATCHED_TOKENS, EngineSettings

GIB = 1 << 30
LLAMA_70B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_context=131_072,
    rope=Rope(500_000.0),
)


def decoder(config: ModelConfig) -> Any:
    return SimpleNamespace(
        config=config, embed=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16))
    )


def slots(config: ModelConfig, free: int, monkeypatch: pytest.MonkeyPatch, decoders: Sequence[Any] = ()) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    decoders = decoders or [decoder(config)]
    return default_slots(decoders, [torch.bfloat16] * len(decoders), 1)


def test_the_largest_step_and_the_largest_graph_have_room_beside_weights_that_nearly_fill_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of Llama 70B takes 66 GiB of 79."""
    half = replace(LLAMA_70B, intermediate_size=14_336, num_heads=32, num_kv_heads=4)
    needed = GPU_FIXED_BYTES + step_bytes(decoder(half), GPU_BATCHED_TOKENS + BUCKETS[-1])
    assert 2 * GIB < needed < 3 * GIB
    size = slot_bytes(decoder(half), torch.bfloat16)
    assert slots(half, 10 * GIB, monkeypatch) * size <= 10 * GIB - needed
    assert slots(half, 20 * GIB, monkeypatch) * size > 15 * GIB
    assert slots(half, 2 * GIB, monkeypatch) == 1024
    both = [decoder(replace(half, num_layers=2)), decoder(half)]
    assert slots(half, 10 * GIB, monkeypatch, both) < slots(half, 10 * GIB, monkeypatch), "of two models, the one that needs more"


@pytest.mark.parametrize(
    ("slots", "left", "expected"),
    [
        (100_000, 40, 256),
        (350_000, 12, 341),
        (2_000_000, 12, 1024),
        (2_000_000, 1, 256),
    ],
    ids=["few slots", "slots", "most", "no memory for logits"],
)
def test_as_many_requests_run_as_fill_the_slots_of_a_gpu(
    slots: int, left: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``left``: GiB that the slots leave."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left * GIB, 80 * GIB))
    small = replace(LLAMA_70B, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32)
    assert default_running_requests([decoder(small)], slots, GPU_BATCHED_TOKENS) == expected


def test_a_length_model_and_logits_take_memory_of_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(replace(LLAMA_70B, hidden_size=1024, intermediate_size=3072, num_layers=2, num_heads=16))
    needed = GPU_FIXED_BYTES + step_bytes(model, GPU_BATCHED_TOKENS + BUCKETS[-1])
    rows = 100 * 16 * model.config.vocab_size
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed + rows, 80 * GIB))
    assert default_running_requests([model], 1_000_000, GPU_BATCHED_TOKENS) == 356
    assert default_running_requests([model, model], 1_000_000, GPU_BATCHED_TOKENS) == 256


MIB = 1 << 20


def test_the_slots_of_all_engines_take_the_memory_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "tiny", "qwen3"))
    monkeypatch.setattr(cgroup, "available_memory", lambda: float(64 * MIB))

    def slots(**settings: int) -> int:
        return build_loop(EngineSettings(model=checkpoint, name="t", **settings)).info.limits.max_slots

    alone = slots()
    assert 4096 < alone < 131_072, "memory decides, and not the most or the fewest slots"
    assert [slots(machine_engines=count) for count in (2, 4)] == [alone // 2, alone // 4]
    assert slots(machine_engines=2, max_total_tokens=5000) == 5000


VERSION_2 = {"cpu.max": "150000 100000\n", "memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n"}
VERSION_2_STAT = {"memory.stat": f"anon 5\ninactive_file {GIB}\nfile 7\n"}
VERSION_1 = {
    "cpu/{}cpu.cfs_quota_us": "150000\n",
    "cpu/{}cpu.cfs_period_us": "100000\n",
    "memory/{}memory.limit_in_bytes": f"{4 * GIB}\n",
    "memory/{}memory.usage_in_bytes": f"{3 * GIB}\n",
    "memory/{}memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def of_self(tmp_path: Path) -> Path:
    return tmp_path / "self"


LAYOUTS = {
    "version 2, in a group": ("0::/kube/pod\n", {f"kube/pod/{name}": text for name, text in (VERSION_2 | VERSION_2_STAT).items()}),
    "version 2, in a container": ("0::/\n", VERSION_2 | VERSION_2_STAT),
    "version 2, a path from outside the container": ("0::/../other\n", VERSION_2 | VERSION_2_STAT),
    "version 1, in a group": (
        "4:memory:/kube/pod\n2:cpu,cpuacct:/kube/pod\n",
        {name.format("kube/pod/"): text for name, text in VERSION_1.items()},
    ),
    "version 1, in a container": (
        "4:memory:/kube/pod\n1:cpu:/kube/pod\n0::/\n",
        {name.format(""): text for name, text in VERSION_1.items()},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_limits_are_found(layout: str, tmp_path: Path, of_self: Path) -> None:
    groups, files = LAYOUTS[layout]
    of_self.write_text(groups)
    write(tmp_path / "cgroup", files)
    assert cgroup.cores(tmp_path / "cgroup", of_self) == 1.5
    assert cgroup.free_memory(tmp_path / "cgroup", of_self) == 2 * GIB


UNLIMITED = {
    "version 2": {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"},
    "version 1": {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
}


@pytest.mark.parametrize("files", UNLIMITED)
def test_where_there_is_no_limit(files: str, tmp_path: Path, of_self: Path) -> None:
    of_self.write_text("0::/\n")
    write(tmp_path / "cgroup", UNLIMITED[files])
    assert cgroup.cores(tmp_path / "cgroup", of_self) == math.inf
    assert cgroup.free_memory(tmp_path / "cgroup", of_self) == math.inf


@pytest.mark.parametrize(
    ("cores", "settings", "threads"),
    [
        (1.5, {}, 2),
        (1.5, {"threads": 3}, 3),
        (2, {"tensor_parallel": 2}, 1),
        (4, {"machine_engines": 2, "tensor_parallel": 2}, 1),
        (4, {"machine_engines": 2, "threads": 3}, 3),
    ],
)
def test_threads_are_as_many_as_may_run(
    monkeypatch: pytest.MonkeyPatch, cores: float, settings: dict[str, int], threads: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cgroup, "cores", lambda: cores)
    try:
        torch.set_num_threads(4)
        set_threads(EngineSettings(model="x", name="x", **settings))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def settings(**given: object) -> EngineSettings:
    return EngineSettings(model="m", name="m", **given)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A build of torch for GPUs, on a machine with two that work."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(placement.torch, "zeros", lambda *shape, device: None)
    return monkeypatch


def refusal(**given: object) -> str:
    with pytest.raises(ModelError) as error:
        device_of(settings(**given))
    return str(error.value)


def test_a_gpu_is_taken_where_there_is_one(cuda: pytest.MonkeyPatch) -> None:
    assert device_of(settings()) == torch.device("cuda", 0)
    assert device_of(settings(tensor_parallel=2), 1) == torch.device("cuda", 1)
    assert device_of(settings(device="cpu")) == torch.device("cpu")


def test_without_one_the_cpu_serves_unless_a_gpu_is_asked_for(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of(settings()) == torch.device("cpu")
    assert "torch finds no GPU; check that nvidia-smi lists one here" in refusal(device="cuda")


def test_what_is_wrong_is_said(cuda: pytest.MonkeyPatch) -> None:
    def broken(*shape: int, device: torch.device) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nPlease update")

    assert "4 are needed and 2 found; lower --tensor-parallel" in refusal(tensor_parallel=4)
    cuda.setattr(placement.torch, "zeros", broken)
    assert refusal(device="cuda") == (
        "The engine cannot compute on the GPU: cuda:0 does not work: The NVIDIA driver on your system is too old; "
        "check the driver with nvidia-smi, or take --device cpu."
    )
    assert "cuda:0 does not work" in refusal()
    cuda.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "is built without CUDA; install a build with CUDA" in refusal(device="cuda")


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("found", "dtype", "warned"),
    [
        ({"architecture": "x86_64", "avx2": True}, torch.bfloat16, True),
        ({"architecture": "x86_64", "avx512_bf16": True}, torch.bfloat16, False),
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


THREADS = 2
SCORE = wire.Score("s", list(range(3, 40)), [[7, 8], [9]], wire.Labels([1, 2]))
GREEDY = wire.Generate("g", [5, 6, 7], wire.Sampling(max_tokens=4, temperature=0, ignore_eos=True))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, int]]:
    """Tokens of each pass of the decoder, whether it is on the calling thread, and the threads of its operations."""
    computed, forward, caller = [], Decoder.forward, threading.get_ident()

    def watched(self, tokens, *others):
        computed.append((len(tokens), threading.get_ident() == caller, torch.get_num_threads()))
        return forward(self, tokens, *others)

    monkeypatch.setattr(Decoder, "forward", watched)
    return computed


def build(qwen3: Path, threads: int = THREADS, **settings: Any) -> Loop:
    return build_loop(EngineSettings(model=str(qwen3), name="t", threads=threads, max_total_tokens=512, **settings))


@pytest.fixture
def small_and_large(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of up to 30 tokens are small."""
    config = load_config(qwen3)
    monkeypatch.setattr(module, "MOST_PRODUCTS", 30 * config.hidden_size * config.vocab_size)  # the head is larger than a layer


@pytest.mark.usefixtures("small_and_large")
def test_small_steps_use_one_thread(qwen3: Path, computed: list[tuple[int, bool, int]]) -> None:
    loop = build(qwen3)
    computed.clear()
    found = run(loop, SCORE), tokens_of(run(loop, GREEDY), "g")
    assert computed == [(40, False, THREADS), (3, True, 1), *[(1, True, 1)] * 3]
    alone = build(qwen3, threads=1)
    (scored,), (expected,) = found[0], run(alone, SCORE)
    torch.testing.assert_close(torch.tensor(scored.rows), torch.tensor(expected.rows))
    assert found[1] == tokens_of(run(alone, GREEDY), "g")


def test_a_length_model_that_is_larger_than_the_model(
    tmp_path: Path, qwen3: Path, computed: list[tuple[int, bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is small only if the length model could compute all its tokens on one thread."""
    length = make_lenvm_checkpoint(tmp_path, "qwen3", intermediate_size=2048, num_hidden_layers=1)
    config = load_config(length)
    monkeypatch.setattr(module, "MOST_PRODUCTS", 30 * config.hidden_size * 4 * config.intermediate_size)
    loop = build(qwen3, lenvm_model=str(length), lenvm_gamma=GAMMA)
    computed.clear()
    run(loop, GREEDY)
    assert computed == [(3, True, 1), *[(1, True, 1)] * 3]
    computed.clear()
    run(loop, SCORE)
    assert computed == [(40, False, THREADS)]
    computed.clear()
    run(loop, guided("v", list(range(3, 60)), guidance(scale=3.0), max_tokens=1))
    assert {threads for _, _, threads in computed} == {THREADS}
    monkeypatch.setattr(module, "MOST_PRODUCTS", config.hidden_size * config.intermediate_size)
    torch.set_num_threads(THREADS)
    build(qwen3, lenvm_model=str(length), lenvm_gamma=GAMMA)
    assert torch.get_num_threads() == THREADS, "even one token of the length model is a large step"


def test_models_of_which_all_steps_are_shared(qwen3: Path) -> None:
    config = load_config(qwen3)
    large = replace(config, vocab_size=MOST_PRODUCTS // config.hidden_size + 1)
    assert step_threads(large, CPU) is None
    assert step_threads(replace(config, intermediate_size=MOST_PRODUCTS), CPU) is None
    assert step_threads(config, torch.device("cuda")) is None
    assert torch.get_num_threads() == THREADS
    assert isinstance(step_threads(replace(large, lm_head=False), CPU), StepThreads)
    assert torch.get_num_threads() == 1
    assert step_threads(config, CPU) is None


def test_small_steps_are_larger_in_int8(qwen3: Path) -> None:
    config = replace(load_config(qwen3), vocab_size=MOST_PRODUCTS // load_config(qwen3).hidden_size + 1)
    assert step_threads(config, CPU) is None
    assert isinstance(step_threads(config, CPU, quantize="int8"), StepThreads)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_products_of_a_layer_of_an_encoder(family: str, tmp_path: Path) -> None:
    config = load_encoder_config(make_encoder(tmp_path, family))
    layer = Encoder(config).layers[1]
    assert module._layer(config) == sum(layer.get_submodule(name).weight.numel() for name in PROJECTIONS)


def test_what_the_user_says_is_kept() -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert with_defaults({name: "5"}) == MALLOC | HUGE_PAGES | PRODUCTS | {name: "5"}
    assert with_defaults({"MALLOC_TRIM_THRESHOLD_": "1"})["MALLOC_TRIM_THRESHOLD_"] == "1"
    assert with_defaults({"LRU_CACHE_CAPACITY": "9"})["LRU_CACHE_CAPACITY"] == "9"
    assert with_defaults({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"


TOUCH = """
import torch

weight, packed = torch.ones(8 << 20), torch.ops.mkldnn._reorder_linear_weight(torch.ones(2048, 4096), 256)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""
"""Prints the KiB of huge pages of a process with 64 MiB of weights."""
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.slow
@pytest.mark.skipif(not TRANSPARENT.exists() or "[madvise]" not in TRANSPARENT.read_text(), reason="programs cannot ask")
@pytest.mark.skipif(platform.machine() != "x86_64" or platform.libc_ver() < ("glibc", "2.35"), reason="needs glibc 2.35")
def test_weights_are_in_huge_pages() -> None:
    command = [sys.executable, "-c", TOUCH]
    found = subprocess.run(command, env=with_defaults(os.environ), capture_output=True, text=True, timeout=100, check=True)
    assert int(found.stdout) > 60 << 10


IN_USE = """
import ctypes
import torch
from yardstick_llm.kernels.linear import ONEDNN, pack, packed_linear

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


@pytest.mark.parametrize(("quota", "affinity", "expected"), [(math.inf, {0, 3, 5}, 3), (1.5, {0, 3, 5}, 2), (0.2, {0}, 1)])
def test_usable_cores(quota: float, affinity: set[int], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: quota)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: affinity, raising=False)
    assert module.usable_cores() == expected
