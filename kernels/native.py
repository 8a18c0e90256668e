"""Loops over float32 numbers on a CPU, which LLVM compiles for its processor: attention, norms, rotations and 8-bit codes.

PyTorch computes a chain of operations one by one, and each reads and writes memory; a loop here reads a row once. Numba compiles a
loop when it is first called, in a second or a few, and keeps the result for the next process. All loops are in this file, because
Numba compiles again what stands in a file that has changed, and knows no other reason. Arrays are flat. Offsets are unsigned: a
signed one could count from the end of an array, and LLVM does not vectorise a loop that has to check for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from yardstick_llm.kernels.int8 import GATE_SECOND, UNGATED
from yardstick_llm.kernels.quantize import MIN_PEAK

Function = TypeVar("Function", bound=Callable[..., Any])
F, I, U = np.float32, np.int32, np.uintp
FAST = {"contract", "reassoc", "arcp", "nsz"}
"""What LLVM may do to arithmetic. It may not assume that all numbers are finite."""

_features = llvm.get_host_cpu_features()
LANES, VECTORS = (16, 4) if _features.get("avx512f") else (8, 2) if _features.get("avx2") else (4, 4)
"""Numbers in a register, and registers in a row of a tile of products."""
ROWS = 6
"""Rows of a tile of products, which the registers hold."""
WIDE = VECTORS * LANES
KEYS = 512
"""Keys that a block of queries attends to at a time. Copies of their keys and values stay in a core's cache."""
FEW = 4
"""Most rows of queries for which keys and values are read where they are, without copies."""
NO_PEAK = F(-3e38)
GELU, GELU_TANH, RELU, SILU, TANH = range(5)


def compiled(function: Function) -> Function:
    """Compile ``function`` when it is called. Without a folder to keep the result in, every process compiles it."""
    options: dict[str, Any] = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


def _tile(vectors: int, *, adds: bool) -> Any:
    """Return ``product(a, a_at, a_step, b, b_at, b_step, b_next, c, c_at, c_step, depth)``: a tile of :data:`ROWS` by ``vectors`` ·
    :data:`LANES` of a matrix product, ``c = a · b``, or ``c += a · b`` if it ``adds``.

    ``_at``: place of the first number in a flat array; ``_step``: from row to row; ``b_next``: from one vector of a row of b to the
    next. LLVM keeps the sums in registers, and so reaches the processor's rate of multiplications (a core of an AMD EPYC, Zen 5:
    131 billion a second, oneDNN 120, and MKL, which torch's attention multiplies with, 52).
    """

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def product(_: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, b_next: Any, c: Any, c_at: Any, c_step: Any, depth: Any) -> Any:  # fmt: skip  # noqa: ARG001, E501
        n = types.uintp
        signature = types.void(a, n, n, b, n, n, n, c, n, n, n)

        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            vector = ir.VectorType(ir.FloatType(), LANES)
            undefined, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.IntType(32), 0)
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            _, a_at, a_step, _, b_at, b_step, b_next, _, c_at, c_step, depth = given

            def start(place: int, at: Any) -> Any:
                array = cgutils.create_struct_proxy(signature.args[place])(context, builder, value=given[place])
                return builder.gep(array.data, [at])

            def times(number: int, step: Any) -> Any:
                return builder.mul(ir.Constant(ir.IntType(64), number), step)

            def cell(pointer: Any, at: Any) -> Any:
                return builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer())

            a, b, c = start(0, a_at), start(3, b_at), start(7, c_at)
            sums = []
            for row in range(ROWS):
                for place in range(vectors):
                    into = cell(c, builder.add(times(row, c_step), ir.Constant(ir.IntType(64), place * LANES)))
                    sums.append((into, cgutils.alloca_once(builder, vector)))
            for into, total in sums:
                builder.store(builder.load(into, align=4) if adds else ir.Constant(vector, [0.0] * LANES), total)
            with cgutils.for_range(builder, depth) as loop:
                line = builder.gep(b, [builder.mul(loop.index, b_step)])
                columns = [builder.load(cell(line, times(place, b_next)), align=4) for place in range(vectors)]
                for row in range(ROWS):
                    number = builder.load(builder.gep(a, [builder.add(times(row, a_step), loop.index)]), align=4)
                    factor = builder.shuffle_vector(builder.insert_element(undefined, number, first), undefined, everywhere)
                    for (_, total), column in zip(sums[row * vectors :], columns, strict=False):
                        more = builder.fmul(factor, column, flags=["contract"])
                        builder.store(builder.fadd(more, builder.load(total), flags=["contract"]), total)
            for into, total in sums:
                builder.store(builder.load(total), into, align=4)
            return context.get_dummy_value()

        return signature, build

    return product


_set_most, _set_two, _set_one = (_tile(vectors, adds=False) for vectors in (VECTORS, 2, 1))
_add_most, _add_two, _add_one = (_tile(vectors, adds=True) for vectors in (VECTORS, 2, 1))


@compiled
def _exp(x: Any) -> Any:
    """Within two units of the last place from -87 to 88; beyond, the value there. Source of the polynomial: Moshier, Cephes, expf."""
    x = x if x > F(-87.0) else F(-87.0)
    x = x if x < F(88.0) else F(88.0)
    n = np.floor(x * F(1.44269504088896341) + F(0.5))
    r = x - n * F(0.693359375) + n * F(2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    return (p * r * r + r + F(1.0)) * I((I(n) + I(127)) << I(23)).view(F)


@compiled
def _tanh(x: Any) -> Any:
    e = _exp(F(-2.0) * abs(x))
    size = (F(1.0) - e) / (F(1.0) + e)
    return size if x >= F(0.0) else -size


@compiled
def _erf(x: Any) -> Any:
    """Within 2e-7. Source: Abramowitz and Stegun 1964, 7.1.26."""
    size = abs(x)
    t = F(1.0) / (F(1.0) + F(0.3275911) * size)
    p = F(1.061405429)
    p = p * t - F(1.453152027)
    p = p * t + F(1.421413741)
    p = p * t - F(0.284496736)
    p = p * t + F(0.254829592)
    found = F(1.0) - p * t * _exp(-size * size)
    return found if x >= F(0.0) else -found


@compiled
def _fill(cells: Any, at: Any, end: Any, value: Any) -> None:
    for j in range(end - at):
        cells[at + U(j)] = value


@compiled
def _multiply(cells: Any, at: Any, count: Any, factor: Any) -> None:
    for j in range(count):
        cells[at + U(j)] *= factor


@compiled
def _softmax(cells: Any, at: Any, count: Any, peak: Any) -> tuple[Any, Any]:
    """Replace scores by exponentials of their differences to the largest of them and of ``peak``. -> it, and their sum, which is no
    number if a score is not finite. Integers find the largest, because LLVM does not vectorise that for numbers that may be NaN."""
    bits = cells.view(np.int32)
    most, total = I(-0x7F800000), F(0)
    for j in range(count):
        ordered = I(bits[at + U(j)] ^ ((bits[at + U(j)] >> I(31)) & I(0x7FFFFFFF)))
        most = max(most, ordered)
        total += cells[at + U(j)] * F(0)
    top = max(I(most ^ ((most >> I(31)) & I(0x7FFFFFFF))).view(F), peak)
    for j in range(count):
        found = _exp(cells[at + U(j)] - top)
        cells[at + U(j)] = found
        total += found
    return top, total


@compiled
def attend(
    q: Any, q_step: int, k: Any, k_step: int, v: Any, v_step: int, index: Any, tasks: Any, left: int, right: int, scale: Any,
    cap: Any, heads: int, fold: int, size: int, out: Any,
) -> None:  # fmt: skip
    """Attention in tiles of keys, with a running softmax (Dao et al. 2022, arXiv 2205.14135).

    q: queries, ``q_step`` numbers from token to token, heads of ``size`` numbers one after another; out: the same, with a step of
    heads · size. k, v: rows of keys and values, with ``fold`` query heads for each of their heads. index: int64, the rows of
    contexts. tasks: [tasks, 6] int64; each has ``count`` queries from token ``start`` on, of one key head, ``head``, and a context:
    ``width`` rows from place ``at`` of the index, of which ``before`` come before the first query's own. A query sees the keys from
    ``left`` before its own to ``right`` after it. ``cap``: soft cap of the scaled scores; 0 for none.
    """
    size, fold = U(size), U(fold)
    wide = (size + U(LANES - 1)) // U(LANES) * U(LANES)
    most = U(1)
    for task in range(len(tasks)):
        most = max(most, U(tasks[task, 1]))
    room = (most * fold + U(ROWS - 1)) // U(ROWS) * U(ROWS)
    asked = np.empty(room * size, np.float32)
    found = np.empty(room * wide, np.float32)
    peaks = np.empty(room, np.float32)
    totals = np.empty(room, np.float32)
    scores = np.empty(ROWS * KEYS, np.float32)
    panel = np.empty(U(KEYS) * size, np.float32)  # keys, transposed, LANES of them after another
    beside = np.zeros(U(KEYS) * wide, np.float32)  # values
    for task in range(len(tasks)):
        start, count, at, width, before, head = tasks[task]
        rows = U(count) * fold
        padded = (rows + U(ROWS - 1)) // U(ROWS) * U(ROWS)
        few = rows <= U(FEW)
        for r in range(rows):
            base = (U(start) + r // fold) * U(q_step) + (U(head) * fold + r % fold) * size
            for d in range(size):
                asked[r * size + d] = q[base + d] * scale
        _fill(asked, rows * size, padded * size, F(0))
        _fill(found, U(0), padded * wide, F(0))
        _fill(peaks, U(0), padded, NO_PEAK)
        _fill(totals, U(0), padded, F(0))
        for first in range(max(0, before - left), width, KEYS):
            keys = min(KEYS, width - first)
            finite = F(0)
            if not few:
                for j in range(U(keys)):
                    row = U(index[U(at + first) + j])
                    base = row * U(k_step) + U(head) * size
                    to = j // U(LANES) * (U(LANES) * size) + j % U(LANES)
                    for d in range(size):
                        panel[to + d * U(LANES)] = k[base + d]
                    base = row * U(v_step) + U(head) * size
                    for d in range(size):
                        beside[j * wide + d] = v[base + d]
                        finite += v[base + d] * F(0)
            apart = few or not finite == F(0)  # 0 · NaN is NaN, so a hidden value that is no number must not be multiplied
            for r0 in range(U(0), rows, U(ROWS)):
                last = min(r0 + U(ROWS), rows) - U(1)
                begin_all = max(0, before + I(r0 // fold) - left - first) // LANES * LANES
                end_all = min(keys, before + I(last // fold) + right + 1 - first)
                if begin_all >= end_all:
                    continue
                low, high = U(begin_all), U(end_all)
                if few:
                    for j in range(low, high):
                        base = U(index[U(at + first) + j]) * U(k_step) + U(head) * size
                        for r in range(rows):
                            total = F(0)
                            for d in range(size):
                                total += asked[r * size + d] * k[base + d]
                            scores[r * U(KEYS) + j] = total
                else:
                    j, depth = low, U(LANES) * size
                    while j + U(WIDE - LANES) < high:
                        _set_most(asked, r0 * size, size, panel, j * size, U(LANES), depth, scores, j, U(KEYS), size)
                        j += U(WIDE)
                    while j + U(LANES) < high:
                        _set_two(asked, r0 * size, size, panel, j * size, U(LANES), depth, scores, j, U(KEYS), size)
                        j += U(2 * LANES)
                    if j < high:
                        _set_one(asked, r0 * size, size, panel, j * size, U(LANES), depth, scores, j, U(KEYS), size)
                for r in range(r0, last + U(1)):
                    line = (r - r0) * U(KEYS)
                    place = before + I(r // fold) - first
                    begin, end = max(begin_all, place - left), min(end_all, place + right + 1)
                    if begin >= end:
                        _fill(scores, line + low, line + high, F(0))
                        continue
                    if cap > F(0):
                        for j in range(U(begin), U(end)):
                            scores[line + j] = cap * _tanh(scores[line + j] / cap)
                    top, total = _softmax(scores, line + U(begin), end - begin, peaks[r])
                    _fill(scores, line + low, line + U(begin), F(0))
                    _fill(scores, line + U(end), line + high, F(0))
                    if top > peaks[r] and totals[r] > F(0):
                        factor = _exp(peaks[r] - top)
                        totals[r] *= factor
                        _multiply(found, r * wide, wide, factor)
                    totals[r] += total
                    peaks[r] = top
                    if apart:
                        for j in range(U(begin), U(end)):
                            weight = scores[line + j]
                            base = U(index[U(at + first) + j]) * U(v_step) + U(head) * size
                            for d in range(size):
                                found[r * wide + d] += weight * v[base + d]
                if apart:
                    continue
                column, of_values, of_found, depth = U(0), low * wide, r0 * wide, high - low
                while column + U(WIDE) <= wide:
                    _add_most(scores, low, U(KEYS), beside, of_values + column, wide, U(LANES), found, of_found + column, wide, depth)
                    column += U(WIDE)
                while column + U(2 * LANES) <= wide:
                    _add_two(scores, low, U(KEYS), beside, of_values + column, wide, U(LANES), found, of_found + column, wide, depth)
                    column += U(2 * LANES)
                if column < wide:
                    _add_one(scores, low, U(KEYS), beside, of_values + column, wide, U(LANES), found, of_found + column, wide, depth)
        for r in range(rows):
            base = ((U(start) + r // fold) * U(heads) + U(head) * fold + r % fold) * size
            factor = F(0) if totals[r] == F(0) else F(1) / totals[r]  # 0: it sees no key
            for d in range(size):
                out[base + d] = found[r * wide + d] * factor


@compiled
def _codes_of(row: Any, at: Any, size: Any, unit: Any, rounded: bool, codes: Any, to: Any) -> Any:
    """Write the codes of a row of numbers, which are in units of ``unit``, and return their scale. ``rounded``: to bfloat16."""
    bits = row.view(np.int32)
    most = I(0)
    for c in range(size):
        most = max(most, I(bits[at + U(c)] & I(0x7FFFFFFF)))
    peak = I(most).view(F)
    peak = F(MIN_PEAK) if peak < F(MIN_PEAK) else peak
    scale, inverse = peak * unit * F(1 / 127), F(127) / peak
    if rounded:  # a rounded scale makes codes of up to 127.25, which are still 127
        pattern = F(scale).view(I)
        scale = I((pattern + I(0x7FFF) + ((pattern >> I(16)) & I(1))) & I(-0x10000)).view(F)
        inverse = unit / scale
    for c in range(size):
        codes[to + U(c)] = np.uint8(I(np.rint(row[at + U(c)] * inverse)) + I(128))
    return scale


@compiled
def quantize(x: Any, size: int, rounded: bool, codes: Any, scales: Any, begin: int, end: int) -> None:
    """Rows ``begin`` to ``end`` of x, [rows, size] -> codes, [rows, size] uint8, and scales, [rows]."""
    for r in range(U(begin), U(end)):
        scales[r] = _codes_of(x, r * U(size), U(size), F(1), rounded, codes, r * U(size))


@compiled
def activate(
    product: Any, scales: Any, bias: Any, function: int, gated: int, rounded: bool, size: int, codes: Any, out_scales: Any,
    begin: int, end: int,
) -> None:  # fmt: skip
    """The activation between two products in 8-bit codes, rows ``begin`` to ``end``.

    product: [rows, width] in units of scales, [rows]; bias: [width] or empty; width: ``size``, or twice that if ``gated``. -> codes,
    [rows, size] uint8, and out_scales, [rows].
    """
    size = U(size)
    width = size if gated == UNGATED else U(2) * size
    row, inner = np.empty(width, np.float32), np.empty(size, np.float32)
    gate, other = (size, U(0)) if gated == GATE_SECOND else (U(0), size)
    for r in range(U(begin), U(end)):
        for c in range(width):
            row[c] = product[r * width + c] * scales[r]
        if len(bias) > 0:
            for c in range(width):
                row[c] += bias[c]
        if function == SILU:
            for c in range(size):
                inner[c] = row[gate + c] / (F(1) + _exp(-row[gate + c]))
        elif function == GELU_TANH:
            for c in range(size):
                x = row[gate + c]
                inner[c] = x / (F(1) + _exp(F(-1.5957691216057308) * (x + F(0.044715) * x * x * x)))
        elif function == GELU:
            for c in range(size):
                x = row[gate + c]
                inner[c] = F(0.5) * x * (F(1) + _erf(x * F(0.7071067811865476)))
        elif function == TANH:
            for c in range(size):
                inner[c] = _tanh(row[gate + c])
        else:
            for c in range(size):
                inner[c] = row[gate + c] if row[gate + c] > F(0) else row[gate + c] * F(0)
        if gated != UNGATED:
            for c in range(size):
                inner[c] *= row[other + c]
        out_scales[r] = _codes_of(inner, U(0), size, F(1), rounded, codes, r * size)


@compiled
def add_norm(
    x: Any, residual: Any, weight: Any, eps: float, size: int, normed: Any, total: Any, begin: int, end: int
) -> None:
    """Rows ``begin`` to ``end``: ``total = x + residual``, and ``normed``, its root-mean-square normalisation. Without a residual,
    both of size 0, it normalises x. All: [rows, size]."""
    size = U(size)
    adds = len(residual) > 0
    for r in range(U(begin), U(end)):
        at = r * size
        squares = F(0)
        if adds:
            for c in range(size):
                each = x[at + c] + residual[at + c]
                total[at + c] = each
                squares += each * each
        else:
            for c in range(size):
                squares += x[at + c] * x[at + c]
        factor = F(1) / np.sqrt(squares / F(size) + F(eps))
        if adds:
            for c in range(size):
                normed[at + c] = total[at + c] * factor * weight[c]
        else:
            for c in range(size):
                normed[at + c] = x[at + c] * factor * weight[c]


@compiled
def norm_rotate_write(
    qkv: Any, q_weight: Any, k_weight: Any, eps: float, cos: Any, sin: Any, half: int, heads: int, kv_heads: int, size: int,
    slots: Any, keys: Any, values: Any, out: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """:func:`kernels.qk_norm_rope.qk_norm_rope_write` of tokens ``begin`` to ``end``. Weights of size 0: no norm. ``half``: angles of
    a token."""
    size, half, heads, kv_heads = U(size), U(half), U(heads), U(kv_heads)
    head = np.empty(size, np.float32)
    for token in range(U(begin), U(end)):
        slot = U(slots[token])
        base = token * (heads + U(2) * kv_heads) * size
        angles = token * half
        for h in range(heads + kv_heads):
            at = base + h * size
            for d in range(size):
                head[d] = qkv[at + d]
            weight = q_weight if h < heads else k_weight
            if len(weight) > 0:
                squares = F(0)
                for d in range(size):
                    squares += head[d] * head[d]
                factor = F(1) / np.sqrt(squares / F(size) + F(eps))
                for d in range(size):
                    head[d] *= factor * weight[d]
            into, to = (out, (token * heads + h) * size) if h < heads else (keys, (slot * kv_heads + h - heads) * size)
            for d in range(half):
                into[to + d] = head[d] * cos[angles + d] - head[half + d] * sin[angles + d]
            for d in range(half):
                into[to + half + d] = head[half + d] * cos[angles + d] + head[d] * sin[angles + d]
            for d in range(U(2) * half, size):
                into[to + d] = head[d]
        at = base + (heads + kv_heads) * size
        for d in range(kv_heads * size):
            values[slot * kv_heads * size + d] = qkv[at + d]
