"""Loops that LLVM compiles: their functions, the tiles of products, and where they are kept."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numba.core.caching import UserProvidedCacheLocator

from yardstick_llm.kernels import native
from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.encoder_layers import SpinBarrier
from yardstick_llm.kernels.native_attention import MOST_QUERIES, UNBOUNDED, Piece, native_attention, plan
from yardstick_llm.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, layer_norm, rms_norm, rms_norm_reference

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("function", "exact", "tolerance"),
    [(native._exp, torch.exp, 0.0), (native._tanh, torch.tanh, 2e-7), (native._erf, torch.erf, 3e-7)],
)
def test_functions(function: Callable[..., float], exact: Callable[[torch.Tensor], torch.Tensor], tolerance: float) -> None:
    @numba.njit
    def of(numbers, found):  # type: ignore[no-untyped-def]
        for place in range(len(numbers)):
            found[place] = function(numbers[place])

    numbers = np.concatenate([np.linspace(-86, 86, 5001), np.linspace(-3, 3, 5001), [0.0]]).astype(np.float32)
    found = np.empty_like(numbers)
    of(numbers, found)
    expected = exact(torch.from_numpy(numbers).double()).numpy()
    np.testing.assert_allclose(found, expected, rtol=3e-7 if tolerance == 0 else 1e-5, atol=tolerance)


def test_many_hidden_scores_are_no_problem() -> None:
    """A sum of them is not finite. LLVM optimises a function again in each that calls it, and so the order of additions changes."""

    @numba.njit(fastmath=native.FAST, error_model="numpy")
    def inner(scores, vectors, pairs):  # type: ignore[no-untyped-def]
        return native._exponentials(scores, np.uintp(0), np.uintp(vectors), native.NO_PEAK, pairs, np.uintp(0))

    @numba.njit(fastmath=native.FAST, error_model="numpy")
    def outer(scores, vectors, pairs):  # type: ignore[no-untyped-def]
        return inner(scores, vectors, pairs)

    for exponentials in (inner, outer):
        scores = np.full(8 * native.LANES, native.NO_PEAK, np.float32)
        scores[3] = 1.5
        assert exponentials(scores, 8, np.empty(0, np.float32)) == (1.5, 1.0)
        assert np.count_nonzero(scores) == 1
        for wrong in (np.nan, np.inf, -np.inf):
            scores[:] = 1.0
            scores[3] = wrong
            assert np.isnan(exponentials(scores, 8, np.empty(0, np.float32))[1])


@pytest.mark.parametrize("depth", [1, 7, 64])
@pytest.mark.parametrize(("vectors", "name"), [(native.VECTORS, "most"), (2, "two"), (1, "one")])
def test_tiles_of_products(vectors: int, name: str, depth: int) -> None:
    sets, adds = getattr(native, f"_set_{name}"), getattr(native, f"_add_{name}")

    @numba.njit
    def both(a, b, first, second, depth, step):  # type: ignore[no-untyped-def]
        sets(a, 0, depth, b, 0, step, native.LANES, first, 0, step, depth)
        adds(a, 0, depth, b, 0, step, native.LANES, second, 0, step, depth)

    random, columns = np.random.default_rng(depth), vectors * native.LANES
    a = random.standard_normal((native.ROWS, depth)).astype(np.float32)
    b, before = (random.standard_normal((rows, columns + 3)).astype(np.float32) for rows in (depth, native.ROWS))
    first, second = before.copy(), before.copy()
    both(a.ravel(), b.ravel(), first.reshape(-1), second.reshape(-1), depth, columns + 3)
    np.testing.assert_allclose(first[:, :columns], (a @ b)[:, :columns], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(second[:, :columns], (before + a @ b)[:, :columns], rtol=1e-4, atol=1e-5)
    assert np.array_equal(first[:, columns:], before[:, columns:])
    assert np.array_equal(second[:, columns:], before[:, columns:])


def test_a_score_does_not_depend_on_the_pieces_beside_it() -> None:
    q, k, v = torch.randn(400, 4, 32), torch.randn(900, 2, 32), torch.randn(900, 2, 32)
    rows = np.random.default_rng(0).permutation(900)
    pieces = [Piece(0, 300, rows[:700], 400), Piece(300, 1, rows[:50], 49), Piece(301, 99, rows[100:300], 101)]
    attend = lambda pieces: native_attention(q, k, v, plan(pieces, 4, 2, 32, causal=True), UNBOUNDED, 0, AttentionSpec())  # noqa: E731
    whole = attend(pieces)
    for piece in pieces:
        span = slice(piece.start, piece.start + piece.queries)
        assert torch.equal(attend([piece])[span], whole[span])


def test_long_pieces_are_cut_and_work_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    work = plan([Piece(5, 600, np.arange(1000), 400), Piece(605, 2, np.arange(30), 28)], 4, 2, 64, causal=True)
    heads = work.tasks[::2, :5].tolist()
    assert [(start, count, width, before) for start, count, _, width, before in heads] == [
        (261, MOST_QUERIES, 912, 656),
        (5, MOST_QUERIES, 656, 400),
        (517, 88, 1000, 912),
        (605, 2, 30, 28),
    ]
    assert [task for share in work.shares for task in range(*share.indices(len(work.tasks)))] == [*range(8)]
    assert len(work.shares) > 2


@pytest.mark.parametrize("shape", [(3, 40), (1, 576), (5, 4, 64), (0, 8)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-6), add_rms_norm_reference(x, residual, weight, 1e-6))
    for bias in (None, torch.randn(shape[-1])):
        expected = torch.nn.functional.layer_norm(x + residual + 9, weight.shape, weight, bias, 1e-6)
        torch.testing.assert_close(layer_norm(x + residual + 9, None, weight, bias, 1e-6), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(layer_norm(x + 9, residual, weight, bias, 1e-6), expected, atol=2e-5, rtol=1e-5)


OTHER = """
import sys
import llvmlite.binding as llvm
import numba
compile_it = numba.njit
numba.njit = lambda *_, **options: compile_it(**options)  # loops are compiled when they are called, and most are not
llvm.get_host_cpu_features = lambda: {"avx2": True, "avxvnni": "avxvnni" in sys.argv}
import torch
from yardstick_llm.kernels import int8
from yardstick_llm.kernels import native
from yardstick_llm.kernels.attention_spec import AttentionSpec
from yardstick_llm.kernels.native_attention import Piece, native_attention, plan
from yardstick_llm.kernels.weight_only import dense
q, k, v = (torch.randn(200, heads, 80) for heads in (4, 2, 2))
work = plan([Piece(0, 150, torch.arange(150).numpy(), 0), Piece(150, 50, torch.arange(200).numpy(), 150)], 4, 2, 80, causal=True)
found = native_attention(q, k, v, work, 90, 0, AttentionSpec())
apart = torch.arange(200)[:, None] - torch.arange(200)
heads = [each.transpose(0, 1) for each in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
mask = (apart >= 0) & (apart <= 90)
expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(0, 1)
torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
for bits in (4, 8):
    codes, scales, offsets = torch.randint(0, 1 << bits, (50, 64), dtype=torch.uint8), torch.rand(50, 2), torch.rand(50, 2)
    x, weight = torch.randn(8, 64), int8.pack_panels(codes, scales, None, offsets, bits)
    expected = x @ dense(codes, scales, None, offsets).t()
    assert (int8.int8_linear(x, weight) - expected).norm() < 0.02 * expected.norm()
print(native.LANES, native.VECTORS, native.HAS_DOT)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor is of x86-64")
@pytest.mark.parametrize(("processor", "feature"), [("haswell", "none"), ("alderlake", "avxvnni")])
def test_a_processor_with_smaller_registers(tmp_path: Path, processor: str, feature: str) -> None:
    if feature == "avxvnni" and not torch.cpu.get_capabilities().get("avx_vnni"):
        pytest.skip("the processor has no AVX-VNNI")
    environment = {"PYTHONPATH": "src", "HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    environment |= {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-c", OTHER, feature]
    found = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout == f"8 2 {feature == 'avxvnni'}\n"


@pytest.mark.slow
def test_an_image_brings_its_loops_along(tmp_path: Path) -> None:
    """Processes copy the loops of an image to a folder of their own, and compile none again."""
    given, kept = tmp_path / "given", tmp_path / "kept"
    source = REPOSITORY / "src" / "yardstick_llm" / "kernels" / "native.py"
    of_source = given / UserProvidedCacheLocator.get_suitable_cache_subpath(str(source))
    shutil.copytree(native.attend.stats.cache_path, of_source, ignore=shutil.ignore_patterns("*.pyc"))
    command = [sys.executable, "-c", "from yardstick_llm.engine.server.image_check import check_loops; print(check_loops())"]
    environment = {"PYTHONPATH": str(REPOSITORY / "src"), "HOME": str(tmp_path)}
    environment |= {"NUMBA_CACHE_DIR": str(kept), "YARDSTICK_LOOPS": str(given)}
    for _ in range(2):
        found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert int(found.stdout) > 5
    assert {file.name for file in kept.rglob("*.nbc")} == {file.name for file in given.rglob("*.nbc")} != set()


def test_a_barrier() -> None:
    """No thread goes on before all have arrived. A long wait is recorded. After an abort no thread waits."""
    threads, order = 3, list[tuple[int, int]]()
    barrier = SpinBarrier(threads)

    def work(thread: int) -> None:
        for phase in range(1, 40):
            order.append((phase, thread))
            barrier.wait(thread, phase)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert [phase for phase, _ in order] == sorted(phase for phase, _ in order)
    barrier = SpinBarrier(2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(barrier.wait, 1, 1)
        time.sleep(0.1)
        assert not other.done()
        barrier.wait(0, 1)
        other.result(10)
        assert barrier.waited
        late = pool.submit(barrier.wait, 1, 2)
        barrier.abort()
        late.result(10)
