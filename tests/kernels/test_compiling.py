"""Every kernel compiles for Hopper with the shapes of real models, within its registers and shared memory.

The interpreter accepts more than the compiler. It takes a process in which Triton and the kernels believe in a GPU, and a launch
only compiles (``python -m tests.kernels.test_compiling``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

SHARED_MEMORY = 232_448
"""Bytes that a program may have of a Hopper multiprocessor."""
CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
WIDE, NARROW = r"wgmma\.mma_async", r"mma\.sync"
"""Instructions of the tensor cores, for blocks of at least 64 rows and for smaller ones."""
LOADS = r"ld\.global[.\w]*\.v4\.b32"
"""Loads of 16 bytes."""
STORES = r"st\.global[.\w]*\.v4\.b32"
EXACT = r"div\.rn\.f32"
"""Scales are those of the reference."""
CODES = r"cvt\.rn\.f16x2\.e4m3x2"
"""Codes are converted two at a time by the instruction for it."""
DESCRIPTORS = r"cp\.async\.bulk\.tensor\."
ASYNC = r"cp\.async\.c[ag]\.shared\.global"


def believe() -> list[Any]:
    """Make this process one with a GPU, before it imports a kernel. Returns a list that will have every launched kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    launched: list[Any] = []
    torch.cuda.is_available = lambda: True

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    def launch(self: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **named: launched.append(self.run(*arguments, grid=grid, warmup=True, **named))

    triton.runtime.driver.set_active(Driver())
    JITFunction.__getitem__ = launch
    import yardstick_llm.kernels.runtime

    yardstick_llm.kernels.runtime.INTERPRETED = True  # tensors of the CPU pass
    return launched


LAUNCHED = believe() if __name__ == "__main__" else []


class Launch(NamedTuple):
    """What compiles, patterns of its PTX, and the bytes of registers that a thread may spill."""

    run: Callable[[], Any]
    ptx: tuple[str, ...] = ()
    spilled: int = 0


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def longs(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def elementwise() -> dict[str, Launch]:
    from tests.kernels.test_qk_norm_rope import inputs, qk_norm_rope_write_triton
    from yardstick_llm.kernels import gelu_mul, quantize, rms_norm, silu_mul

    def rope(heads: int, kv_heads: int, head_dim: int, rotated: int, *, normed: bool, coded: bool = False) -> Any:
        given = inputs(4, heads, kv_heads, head_dim, BF16, CPU, normed)
        given = given._replace(cos=torch.empty(4, rotated // 2), sin=torch.empty(4, rotated // 2))
        if not coded:
            return qk_norm_rope_write_triton(*given)
        return qk_norm_rope_write_triton(
            *given._replace(keys=given.keys.to(FP8), values=given.values.to(FP8)), torch.ones(2, kv_heads)
        )

    return {
        "norm of heads": Launch(lambda: rms_norm.rms_norm_triton(bf16(4, 16, 128), bf16(128), 1e-6), (LOADS,)),
        "norm with weights in float32": Launch(lambda: rms_norm.rms_norm_triton(bf16(4, 2304), torch.empty(2304), 1e-6), (LOADS,)),
        "sum and norm": Launch(lambda: rms_norm.add_rms_norm_triton(bf16(4, 1024), bf16(4, 1024), bf16(1024), 1e-6), (LOADS,)),
        "sum and norm in FP8": Launch(
            lambda: rms_norm.add_rms_norm_quantized_triton(bf16(4, 8192), bf16(4, 8192), bf16(8192), 1e-6), (LOADS, EXACT)
        ),
        "SiLU": Launch(lambda: silu_mul.silu_mul_triton(bf16(4, 6144)), (LOADS,)),
        "SiLU in FP8": Launch(lambda: silu_mul.silu_mul_quantized_triton(bf16(4, 2 * 18944)), (LOADS, EXACT)),
        "GELU": Launch(lambda: gelu_mul.gelu_mul_triton(bf16(4, 2 * 9216)), (LOADS,)),
        "codes of rows": Launch(lambda: quantize.quantize_rows_triton(bf16(4, 2048)), (LOADS, EXACT)),
        "rope with norm": Launch(lambda: rope(16, 8, 128, 128, normed=True), (LOADS,)),
        "rope of a part": Launch(lambda: rope(24, 8, 128, 96, normed=False), (LOADS,)),
        "rope to codes": Launch(
            lambda: rope(16, 8, 128, 128, normed=True, coded=True), (r"cvt\.rn\.satfinite\.e4m3x2\.f32", EXACT)
        ),
    }


def attention() -> dict[str, Launch]:
    """Groups of 2 heads with codes and of 7 heads, which are padded to 8; Gemma 2's windows; float32 without tensor cores, because
    they round."""
    from tests.kernels import test_branch_attention as branch
    from tests.kernels import test_paged_attention as paged
    from tests.kernels import test_whole_attention as whole
    from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec

    def sequences(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, spec: AttentionSpec = PLAIN) -> None:
        q, k, v = whole.heads([200, 30], heads, kv_heads, head_dim, dtype)
        whole.whole_attention_triton(q, k, v, whole.Layout([], whole.cut(whole.runs_of([200, 30]))), spec)

    def step(
        group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, spec: AttentionSpec = PLAIN, coded: bool = False
    ) -> None:
        shapes = [(1, 900), (200, 300)]  # items of every kind
        q, keys, values = paged.tensors(shapes, CPU, dtype, group, kv_heads, head_dim)
        scales = torch.ones(kv_heads) if coded else None
        keys, values = (each.to(FP8) if coded else each for each in (keys, values))
        paged.paged_attention_triton(q, keys, values, paged.layout_of(shapes, q, keys), scales, spec=spec)

    def branches(prefix: int, group: int, count: int, packed: bool) -> None:
        given = branch.arguments([prefix], [count], CPU, BF16, count, group, head_dim=128)
        branch.branch_attention_triton(*given, starts=longs(1) if packed else None)

    gemma2 = AttentionSpec(256**-0.5, 4096, 50.0)
    return {
        "attention, groups of 7": Launch(lambda: step(7, 2, 64, torch.float16), (NARROW, WIDE)),
        "attention, windows and caps": Launch(lambda: step(2, 4, 256, BF16, gemma2), (NARROW,)),
        "attention in float32": Launch(lambda: step(2, 8, 64, torch.float32), (r"(?s)\A(?!.*mma)",), 256),
        "attention of codes": Launch(lambda: step(2, 8, 128, BF16, coded=True), (NARROW, WIDE, CODES)),
        "whole sequences": Launch(lambda: sequences(12, 12, 64, BF16), (WIDE,)),
        "whole sequences, windows": Launch(lambda: sequences(3, 1, 256, BF16, AttentionSpec(256**-0.5, 512)), (WIDE,)),
        "whole sequences in float32": Launch(lambda: sequences(12, 12, 32, torch.float32), (r"(?s)\A(?!.*mma)",), 256),
        "branches, few": Launch(lambda: branches(9, 6, 5, False), (NARROW,)),
        "branches, most, packed, long prefix": Launch(lambda: branches(900, 8, 16, True), (WIDE,)),
    }


def label_logprobs() -> dict[str, Launch]:
    from yardstick_llm.kernels.label_logprobs import label_logprobs_triton

    def step(rows: int, dtype: torch.dtype, cap: float = 0.0) -> Any:
        hidden, head = torch.empty((rows, 1024), dtype=dtype), torch.empty((4096, 1024), dtype=dtype)
        return label_logprobs_triton(hidden, head, longs(rows, 2), cap)

    return {
        "labels of 1000 rows": Launch(lambda: step(1000, BF16, 30.0), (WIDE,)),
        "labels in float32": Launch(lambda: step(1000, torch.float32)),
        "labels of a row": Launch(lambda: step(1, torch.float16), (NARROW,)),
    }


def sampling() -> dict[str, Launch]:
    """For a large vocabulary. Thresholds find as many of the largest logits as candidates ever do."""
    from yardstick_llm.kernels.candidates import candidates_triton
    from yardstick_llm.kernels.keep_thresholds import keep_thresholds_triton
    from yardstick_llm.kernels.largest import token_logprobs_triton
    from yardstick_llm.kernels.length_tilt import Tilts, length_tilt_triton
    from yardstick_llm.kernels.seeded_sampling import seeded_choice_triton, seeded_draw_triton
    from yardstick_llm.kernels.token_bits import exclude_triton_

    logits, numbers, rows = torch.empty(4, 151936), torch.empty(4), longs(4)

    def tilted() -> Tensor:
        p, column = torch.empty(16, 8), torch.empty(16, dtype=torch.float64)
        return length_tilt_triton(p, p, p > 0, column > 0, Tilts(longs(16), *[column] * 6))

    return {
        "candidates": Launch(lambda: candidates_triton(logits, numbers, rows, numbers, numbers, 8), (LOADS,)),
        "log-probabilities": Launch(lambda: token_logprobs_triton(logits, rows, 5), (LOADS,)),
        "thresholds": Launch(lambda: keep_thresholds_triton(logits, numbers, rows, numbers, numbers), (LOADS,)),
        "draws": Launch(lambda: seeded_draw_triton(logits, numbers, rows, None), (LOADS,)),
        "draws within thresholds": Launch(lambda: seeded_draw_triton(logits, numbers, rows, numbers), (LOADS,)),
        "choices": Launch(lambda: seeded_choice_triton(torch.empty(4, 8), longs(4, 8), rows)),
        "exclusion": Launch(lambda: exclude_triton_(logits, rows, torch.empty((4, 4748), dtype=torch.int32))),
        "length guidance": Launch(tilted, ("f64",)),
    }


def products() -> dict[str, Launch]:
    """The fused ones load through tensor descriptors. With norm and rope, those that read or write codes spill some registers
    once a tile."""
    from yardstick_llm.kernels.block_scaled import block_scaled_linear_triton
    from yardstick_llm.kernels.counted_linear import counted_linear_triton
    from yardstick_llm.kernels.grouped_experts import grouped_linear_triton, grouped_scaled_linear_triton
    from yardstick_llm.kernels.linear_qk_norm_rope import linear_qk_norm_rope_triton
    from yardstick_llm.kernels.linear_silu_mul import linear_silu_mul_triton
    from yardstick_llm.kernels.weight_only import Codes, grouped_weight_only_linear_triton, weight_only_linear_triton

    def experts(rows: int, *, coded: bool = False) -> Tensor:
        x, weight, chosen = bf16(rows, 2048), bf16(128, 1536, 2048), torch.arange(rows * 8).view(-1, 8) % 128
        if not coded:
            return grouped_linear_triton(x, weight, chosen)
        operands = (x.to(FP8), torch.empty(rows, 1)), (weight.to(FP8), torch.empty(128, 1536, 1))
        return grouped_scaled_linear_triton(*operands, chosen, BF16)

    def rope(heads: int, kv_heads: int, head_dim: int, *, normed: bool, coded: bool = False, kept: torch.dtype = BF16) -> Tensor:
        columns = (heads + 2 * kv_heads) * head_dim
        x, weight = (bf16(rows, 1024).to(FP8 if coded else BF16) for rows in (2048, columns))
        norm = bf16(head_dim) if normed else None
        angles, bias = torch.empty(2048, head_dim // 2), None if normed else bf16(columns)
        cache = bf16(4096, kv_heads, head_dim).to(kept)
        scales = {"x_scales": torch.empty(2048, 1), "weight_scales": torch.empty(columns, 1)} if coded else {}
        scales |= {"scales": torch.empty(2, kv_heads)} if kept == FP8 else {}
        return linear_qk_norm_rope_triton(x, weight, bias, norm, norm, 1e-6, angles, angles, cache, cache, longs(2048), **scales)

    def gated(rows: int) -> Tensor:
        x, weight = bf16(rows, 1024).to(FP8), bf16(2 * 3072, 1024).to(FP8)
        return linear_silu_mul_triton(x, weight, None, torch.empty(rows, 1), torch.empty(len(weight), 1))

    def coded(rows: int, bits: int, experts: int = 0) -> Tensor:
        codes, shift = torch.zeros((6144, 2048 if bits == 4 else 4096), dtype=torch.uint8), bf16(6144, 32)
        weight = Codes(codes, shift, shift, None, 64 if bits == 4 else 0)
        if experts:
            chosen = torch.arange(rows * 8).view(-1, 8) % experts
            return grouped_weight_only_linear_triton(bf16(rows, 4096), weight, chosen, experts)
        return weight_only_linear_triton(bf16(rows, 4096), weight)

    def blocks(rows: int) -> Tensor:
        x, scales = (bf16(rows, 4096).to(FP8), torch.empty(rows, 32)), torch.empty(48, 32)
        return block_scaled_linear_triton(x, bf16(6144, 4096).to(FP8), scales, (128, 128), None, BF16)

    fused = WIDE, DESCRIPTORS, STORES
    return {
        "counted product": Launch(
            lambda: counted_linear_triton(bf16(1280, 1536), bf16(2048, 1536), bf16(2048), longs(1)), (WIDE, ASYNC)
        ),
        "experts of 1000 rows": Launch(lambda: experts(1000), (WIDE,)),
        "experts of 4 rows in FP8": Launch(lambda: experts(4, coded=True), (NARROW + r"\S*f16",)),
        "experts of 1000 rows in FP8": Launch(lambda: experts(1000, coded=True), (WIDE + r"\S*e4m3",)),
        "4 bits, 1000 rows": Launch(lambda: coded(1000, 4), ("mma",)),
        "8 bits, 8 rows": Launch(lambda: coded(8, 8), ("mma",)),
        "experts of 1000 rows in 4 bits": Launch(lambda: coded(1000, 4, 16), ("mma",)),
        "blocks in FP8, 8 rows": Launch(lambda: blocks(8), ("mma",)),
        "blocks in FP8, 1000 rows": Launch(lambda: blocks(1000), (WIDE + r"\S*e4m3",)),
        "product and GELU": Launch(
            lambda: linear_silu_mul_triton(bf16(2048, 3584), bf16(2 * 18944, 3584), bf16(2 * 18944), gelu=True), fused
        ),
        "product of codes and SiLU": Launch(lambda: gated(2048), fused),
        "product, norm and rope": Launch(lambda: rope(16, 8, 128, normed=True), fused),
        "product and rope of 64": Launch(lambda: rope(14, 2, 64, normed=False), fused),
        "product of codes, norm and rope": Launch(lambda: rope(16, 8, 128, normed=True, coded=True), fused, 128),
        "product, norm and rope to codes": Launch(lambda: rope(16, 8, 128, normed=True, kept=FP8), fused, 256),
        "product of codes, norm and rope to codes": Launch(lambda: rope(16, 8, 128, normed=True, coded=True, kept=FP8), fused, 320),
    }


def adapters() -> dict[str, Launch]:
    """With shapes of Qwen3, Gemma 2 and 3, Qwen2.5 and Phi-4-mini."""
    from tests.kernels.lora import Case, product, rows_of
    from tests.kernels.test_qk_norm_rope import inputs
    from yardstick_llm.kernels.lora import expand_lora_triton, shrink_lora_triton
    from yardstick_llm.kernels.lora_gate import lora_gate_triton
    from yardstick_llm.kernels.lora_layout import LoraDelta
    from yardstick_llm.kernels.lora_rope import lora_rope_write_triton

    def shrunk(rows: int, size: int, parts: tuple[int, ...], dtype: torch.dtype, *, coded: bool = False) -> LoraDelta:
        case, x = Case((16,), (0, rows), size, parts), torch.empty((rows, size), dtype=dtype)
        scales = torch.empty(rows, 1) if coded else None
        delta = shrink_lora_triton(x.to(FP8) if coded else x, product(case, CPU, dtype), rows_of(case, CPU), scales)
        assert delta is not None
        return delta

    def add(rows: int, size: int, parts: tuple[int, ...], dtype: torch.dtype = BF16, *, coded: bool = False) -> Any:
        return expand_lora_triton(torch.empty((rows, sum(parts)), dtype=dtype), shrunk(rows, size, parts, dtype, coded=coded))

    def gate(rows: int, size: int, columns: int, *, gelu: bool = False) -> Any:
        return lora_gate_triton(bf16(rows, 2 * columns), shrunk(rows, size, (columns, columns), BF16), gelu=gelu)

    def rope(rows: int, size: int, heads: int, kv_heads: int, head_dim: int, rotated: int) -> Any:
        given = inputs(rows, heads, kv_heads, head_dim, BF16, CPU, normed=heads != 24)
        angles = torch.empty(rows, rotated // 2)
        delta = shrunk(rows, size, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), BF16)
        return lora_rope_write_triton(given.qkv, delta, *given._replace(cos=angles, sin=angles)[1:])

    qkv, wide, f32 = (4096, 1024, 1024), (WIDE, LOADS, ASYNC), torch.float32
    return {
        "adapter, 4 rows": Launch(lambda: add(4, 4096, qkv), ("mma", LOADS)),
        "adapter of the gates in FP8": Launch(lambda: add(1000, 4096, (12288, 12288), coded=True), ("mma", LOADS)),
        "adapter in float32": Launch(lambda: add(1000, 4096, qkv, f32), (LOADS,)),
        "adapter and SiLU, 4 rows": Launch(lambda: gate(4, 1024, 3072), ("mma", LOADS)),
        "adapter and GELU": Launch(lambda: gate(1000, 2304, 9216, gelu=True), wide),
        "adapter and rope, 4 rows": Launch(lambda: rope(4, 1024, 16, 8, 128, 128), ("mma", LOADS)),
        "adapter and rope of 256": Launch(lambda: rope(1000, 2560, 8, 4, 256, 256), wide),
        "adapter and rope of a part": Launch(lambda: rope(1000, 3072, 24, 8, 128, 96), wide),
    }


LAUNCHES = elementwise() | attention() | label_logprobs() | sampling() | products() | adapters()
Compile = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compile_launch() -> Iterator[Compile]:
    """Returns the kernels of a launch: name, shared (bytes of shared memory), local (bytes a thread of what its registers do not
    hold), ptx."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile() as said:
        variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.kernels.test_compiling"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        with subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes) as process:

            def ask(name: str) -> list[dict[str, Any]]:
                print(name, file=process.stdin, flush=True)
                found = json.loads(process.stdout.readline() or '"The compiler has ended."')
                if isinstance(found, str):
                    said.seek(0)
                    pytest.fail(found + said.read().decode(errors="replace"))
                return found

            yield ask
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_it_compiles_for_hopper(name: str, compile_launch: Compile) -> None:
    launch, found = LAUNCHES[name], compile_launch(name)
    assert found
    for kernel in found:
        assert kernel["local"] <= launch.spilled, kernel["name"]
        assert kernel["shared"] <= SHARED_MEMORY, kernel["name"]
    ptx = "\n".join(kernel["ptx"] for kernel in found)
    assert [pattern for pattern in launch.ptx if not re.search(pattern, ptx)] == []


def main() -> None:
    """Answer each name on standard input with its kernels, or with the text of its error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        LAUNCHED.clear()
        try:
            LAUNCHES[line.strip()].run()
            answer: Any = [described(kernel) for kernel in LAUNCHED]
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


def described(kernel: Any) -> dict[str, Any]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":") for field in usage.split() if field.startswith(("STACK:", "LOCAL:")))
    local = int(fields["STACK"]) + int(fields["LOCAL"])
    return {"name": kernel.metadata.name, "shared": kernel.metadata.shared, "local": local, "ptx": kernel.asm["ptx"]}


if __name__ == "__main__":
    main()
