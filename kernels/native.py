"""Loops on a CPU, which LLVM compiles for its processor: attention, norms and rotations, and products of codes or in float32.

Attention can also multiply in bfloat16. PyTorch computes a chain of operations one by one, and each reads and writes memory; a
loop here reads a row once. Numba compiles the loops when this module is imported, in 23 s (EPYC, Zen 4), and keeps the result for
the next process. All loops are in one file, because Numba compiles again only what stands in a file that has changed. Arrays are
flat. Offsets are unsigned: a signed one could count from the end of an array, and LLVM does not vectorise a loop that has to
check for it.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from yardstick_llm.kernels.int8 import GATE_SECOND, MIN_PEAK, UNGATED

Function = TypeVar("Function", bound=Callable[..., Any])
F32: Any = np.float32
I32: Any = np.int32
I64: Any = np.int64
U64: Any = np.uintp
FAST = {"contract", "reassoc", "arcp", "nsz"}
"""Changes that LLVM may make to floating-point arithmetic. It must not assume that all numbers are finite."""

llvm.initialize_native_asmparser()
_features = llvm.get_host_cpu_features()
LANES, VECTORS = (16, 4) if _features.get("avx512f") else (8, 2) if _features.get("avx2") else (4, 4)
"""Numbers in a register, and registers in a row of a tile of products."""
DOT = {16: "avx512vnni", 8: "avxvnni", 4: ""}[LANES]
"""LLVM's name of the instructions that add products of bytes to integers of as many lanes."""
HAS_DOT = bool(_features.get(DOT))
HAS_PAIRS = LANES == 16 and bool(_features.get("avx512bf16"))
"""Whether an instruction adds two products of bfloat16 to each lane."""
ROWS = 6
"""Rows of a tile of products, which the registers hold."""
REST_ROWS = 2
"""Rows of a tile of the rows that are left behind whole ones."""
WIDE = VECTORS * LANES
KEYS = 512
"""Keys that a block of queries attends to at a time. Copies of their keys and values stay in a core's cache."""
ROW_BYTES = 384 << 10
"""Codes of rows that are multiplied with a part of a weight after another; they stay in a core's second cache."""
APART, TURNED = KEYS + 2 * LANES, KEYS + LANES
"""Numbers from row to row of scores by distance, and of the same scores by key. With a power of two, all rows would share a few
places of a cache."""
FEW = 4
"""Most rows of queries for which keys and values are read where they are, without copies."""
BLOCK = 16 * ROWS
"""Rows that :func:`finish_layer` computes at a time: what is between its products stays in a core's second cache."""
WEIGHT = "Tuple((u1[::1], i2[::1], i4, f4[::1], f4[::1], f4[::1]))"
"""Type of a weight: codes in panels, their scales, the code of zero and factors; or numbers in panels; and the bias."""
NO_PEAK = F32(-3e38)
POLYNOMIAL = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
"""``exp(r) = 1 + r + r² · p(r)``, highest power first. Source: Moshier's Cephes, ``expf``."""
LOG2E = 1.44269504088896341
POWERS = 1.3276472e-3, 9.6755413e-3, 5.5507133e-2, 2.4022120e-1, 6.9314697e-1, 1.0
POWERS_OF_PAIRS = 5.5171669e-2, 2.4261112e-1, 6.9326099e-1, 9.9992807e-1
"""Polynomials of ``2^r`` from -0.5 to 0.5 with the least relative error, 8e-8, and 8e-5 where it is rounded to bfloat16."""
GELU, GELU_TANH, RELU, SILU, TANH = range(5)
SLOT = 8
"""Integers of a thread in a barrier, so that each thread writes its own cache line."""
SPINS = 50_000
"""Iterations, of some 20 ns, for which a thread waits before it yields its core in each further one."""
PAUSE = {"x86_64": "pause", "aarch64": "yield"}.get(platform.machine(), "")


def compiled(*signature: str) -> Callable[[Function], Function]:
    """Compile a function at once for the types of its ``signature``, or else for those that it is called with. Without a folder to
    keep the result in, every process compiles it."""
    options: dict[str, Any] = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}

    def compile_it(function: Function) -> Function:
        try:
            compiled_one: Function = numba.njit(*signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            compiled_one = numba.njit(*signature, **options)(function)
        return compiled_one

    return compile_it


def _tile(vectors: int, rows: int = ROWS, *, adds: bool) -> Any:
    """Return ``product(a, a_at, a_step, b, b_at, b_step, b_next, c, c_at, c_step, depth)``: a tile of ``rows`` by ``vectors`` ·
    :data:`LANES` of a matrix product, ``c = a · b``, or ``c += a · b`` if it ``adds``.

    ``_at``: place of the first number in a flat array; ``_step``: from row to row; ``b_next``: from one vector of a row of b to the
    next. LLVM keeps the sums in registers, which a loop in Python cannot ask for. If a and b are int32, each element is a pair of
    bfloat16 numbers, and a sum has two products of each.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def product(_: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, b_next: Any, c: Any, c_at: Any, c_step: Any, depth: Any) -> Any:  # fmt: skip  # noqa: ARG001, E501
        n, paired = types.uintp, a.dtype == types.int32
        signature = types.void(a, n, n, b, n, n, n, c, n, n, n)

        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            if paired and not HAS_PAIRS:  # it is compiled, and never called
                return context.get_dummy_value()
            vector, pairs = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
            kind = pairs if paired else vector
            undefined, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.IntType(32), 0)
            # As assembly, because what LLVM calls it takes other types in each of its versions.
            dot = ir.InlineAsm(ir.FunctionType(vector, [pairs, pairs, vector]), "vdpbf16ps $2, $1, $0", "=v,v,v,0")
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            _, a_at, a_step, _, b_at, b_step, b_next, _, c_at, c_step, depth = given

            def start(place: int, at: Any) -> Any:
                array = cgutils.create_struct_proxy(signature.args[place])(context, builder, value=given[place])
                return builder.gep(array.data, [at])

            def times(number: int, step: Any) -> Any:
                return builder.mul(ir.Constant(ir.IntType(64), number), step)

            def cell(pointer: Any, at: Any, kind: Any = vector) -> Any:
                return builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer())

            a, b, c = start(0, a_at), start(3, b_at), start(7, c_at)
            sums = []
            for row in range(rows):
                for place in range(vectors):
                    into = cell(c, builder.add(times(row, c_step), ir.Constant(ir.IntType(64), place * LANES)))
                    sums.append((into, cgutils.alloca_once(builder, vector)))
            for into, total in sums:
                builder.store(builder.load(into, align=4) if adds else ir.Constant(vector, [0.0] * LANES), total)
            with cgutils.for_range(builder, depth) as loop:
                line = builder.gep(b, [builder.mul(loop.index, b_step)])
                columns = [builder.load(cell(line, times(place, b_next), kind), align=4) for place in range(vectors)]
                for row in range(rows):
                    number = builder.load(builder.gep(a, [builder.add(times(row, a_step), loop.index)]), align=4)
                    factor = builder.shuffle_vector(builder.insert_element(undefined, number, first), undefined, everywhere)
                    for (_, total), column in zip(sums[row * vectors :], columns, strict=False):
                        if paired:
                            builder.store(builder.call(dot, [factor, column, builder.load(total)]), total)
                            continue
                        more = builder.fmul(factor, column, flags=["contract"])
                        builder.store(builder.fadd(more, builder.load(total), flags=["contract"]), total)
            for into, total in sums:
                builder.store(builder.load(total), into, align=4)
            return context.get_dummy_value()

        return signature, build

    return product


_set_most, _set_two, _set_one = (_tile(vectors, adds=False) for vectors in (VECTORS, 2, 1))
_add_most, _add_two, _add_one = (_tile(vectors, adds=True) for vectors in (VECTORS, 2, 1))
_add_most_few, _add_one_few = (_tile(vectors, REST_ROWS, adds=True) for vectors in (VECTORS, 1))


def _dots(rows: int, *, halved: bool, shifted: bool) -> Any:
    """Return ``dots(x, x_at, x_step, w, w_at, w_step, scales, sums, s_at, s_step, w_scales, v_at, v_step, zero, factors, bias,
    f_at, c, c_at, c_step, groups, quads)``: ``rows`` rows and two panels of :func:`multiply_codes`.

    ``_at``: place of the first element in a flat array; ``_step``: from row to row, or from panel to panel. Elements of x are four
    codes, of which a group has ``quads``. Sums of products of codes are integers, and the rest is computed in the same order for
    all numbers of rows, so that a row's result does not depend on the rows beside it.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def dots(_: Any, x: Any, x_at: Any, x_step: Any, w: Any, w_at: Any, w_step: Any, scales: Any, sums: Any, s_at: Any, s_step: Any, w_scales: Any, v_at: Any, v_step: Any, zero: Any, factors: Any, bias: Any, f_at: Any, c: Any, c_at: Any, c_step: Any, groups: Any, quads: Any) -> Any:  # fmt: skip  # noqa: ARG001, E501
        n = types.uintp
        signature = types.void(x, n, n, w, n, n, scales, sums, n, n, w_scales, n, n, types.int32, factors, bias, n, c, n, n, n, n)

        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
            quad, number, half = (ir.VectorType(kind, LANES) for kind in (i32, f32, ir.HalfType()))
            byte = ir.VectorType(ir.IntType(8), 4 * LANES)
            none, nothing, one = ir.Constant(quad, [0] * LANES), ir.Constant(number, [0.0] * LANES), ir.Constant(i64, 1)
            x, w, scales, sums, w_scales, factors, bias, c = (
                cgutils.create_struct_proxy(signature.args[place])(context, builder, value=given[place]).data
                for place in (0, 3, 6, 7, 10, 14, 15, 17)
            )
            _, x_at, x_step, _, w_at, w_step, _, _, s_at, s_step, _, v_at, v_step, zero = given[:14]
            f_at, _, c_at, c_step, groups, quads = given[16:]

            def place(start: Any, *more: tuple[int, Any]) -> Any:
                """``start``, and ``count · step`` for each of the others."""
                for count, step in more:
                    start = builder.add(start, builder.mul(ir.Constant(i64, count), step))
                return start

            def load(pointer: Any, at: Any, kind: Any) -> Any:
                return builder.load(builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer()), align=1)

            def spread(value: Any, kind: Any) -> Any:
                empty = ir.Constant(kind, ir.Undefined)
                return builder.shuffle_vector(builder.insert_element(empty, value, ir.Constant(i32, 0)), empty, none)

            def known(name: str, kind: Any, *three: Any) -> Any:
                function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
                return builder.call(function, three)

            def fma(left: Any, right: Any, more: Any) -> Any:
                return known(f"llvm.fma.v{LANES}f32", number, left, right, more)

            def dot(total: Any, column: Any, codes: Any) -> Any:
                """``total``, and four products of unsigned and signed bytes in each lane."""
                if HAS_DOT:
                    return known(f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", quad, total, column, codes)
                for bits in range(0, 32, 8):
                    down, low, up, last = (ir.Constant(quad, [each] * LANES) for each in (bits, 255, 24 - bits, 24))
                    left = builder.and_(builder.lshr(column, down), low)
                    total = builder.add(total, builder.mul(left, builder.ashr(builder.shl(codes, up), last)))
                return total

            both, step = range(2), 2 if halved else 1  # panels, and quads at a time
            found = [[cgutils.alloca_once(builder, number) for _ in both] for _ in range(rows)]
            counted = [[cgutils.alloca_once(builder, quad) for _ in both] for _ in range(rows)]
            for total in itertools.chain(*found):
                builder.store(nothing, total)
            with cgutils.for_range(builder, groups) as group:
                of_row = [place(s_at, (row, s_step), (1, group.index)) for row in range(rows)]
                summed = [builder.load(builder.gep(sums, [at])) for at in of_row]
                for row in range(rows):
                    start = none if shifted else spread(builder.neg(builder.mul(zero, summed[row])), quad)
                    for total in counted[row]:
                        builder.store(start, total)
                with cgutils.for_range(builder, builder.udiv(quads, ir.Constant(i64, step))) as turn:
                    first = builder.add(builder.mul(group.index, quads), builder.mul(ir.Constant(i64, step), turn.index))
                    columns = []
                    for panel in both:
                        at = place(w_at, (panel, w_step), (4 * LANES // step, first))
                        codes = load(w, at, byte)
                        parts = [codes]
                        if halved:
                            low, four = (ir.Constant(byte, [each] * 4 * LANES) for each in (15, 4))
                            parts = [builder.and_(codes, low), builder.lshr(codes, four)]
                        columns.append([builder.bitcast(part, quad) for part in parts])
                    for part in range(step):
                        for row in range(rows):
                            at = place(x_at, (row, x_step), (1, first), (part, one))
                            codes = spread(builder.load(builder.gep(x, [at])), quad)
                            for total, column in zip(counted[row], columns, strict=True):
                                builder.store(dot(builder.load(total), column[part], codes), total)
                of_group: list[list[Any]] = [[], []]  # scales and offsets of both panels
                width = 2 if shifted else 1
                for panel, kind in itertools.product(both, range(width)):
                    at = place(v_at, (panel, v_step), (width * LANES, group.index), (kind * LANES, one))
                    of_group[kind].append(builder.fpext(load(w_scales, at, half), number))
                for row in range(rows):
                    scale = builder.load(builder.gep(scales, [of_row[row]]))
                    shift = spread(builder.fmul(scale, builder.sitofp(summed[row], f32)), number)
                    scale = spread(scale, number)
                    for panel in both:
                        product = builder.fmul(builder.sitofp(builder.load(counted[row][panel]), number), scale)
                        total = fma(product, of_group[0][panel], builder.load(found[row][panel]))
                        builder.store(fma(shift, of_group[1][panel], total) if shifted else total, found[row][panel])
            for panel in both:
                at = place(f_at, (panel * LANES, one))
                factor, more = load(factors, at, number), load(bias, at, number)
                for row in range(rows):
                    into = builder.gep(c, [place(c_at, (row, c_step), (panel * LANES, one))])
                    total = fma(builder.load(found[row][panel]), factor, more)
                    builder.store(total, builder.bitcast(into, number.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, build

    return dots


_dots_one, _dots_one_shifted, _dots_one_halved, _dots_one_both = (
    _dots(1, halved=halved, shifted=shifted) for halved in (False, True) for shifted in (False, True)
)
_dots_few, _dots_few_shifted, _dots_few_halved, _dots_few_both = (
    _dots(REST_ROWS, halved=halved, shifted=shifted) for halved in (False, True) for shifted in (False, True)
)
_dots_many, _dots_many_shifted, _dots_many_halved, _dots_many_both = (
    _dots(ROWS, halved=halved, shifted=shifted) for halved in (False, True) for shifted in (False, True)
)


@intrinsic  # type: ignore[untyped-decorator]
def _exponentials(_: Any, cells: Any, at: Any, vectors: Any, peak: Any, pairs: Any, to: Any) -> Any:  # noqa: ARG001
    """Replace scores, whole vectors of them, by exponentials of their differences to the largest of them and of ``peak``.

    They are those of :func:`_exp`, and 0 below its range. If ``pairs`` is of int32, they are also written there, rounded to
    bfloat16. -> the largest, and the sum of the exponentials, which is no number if a score is not finite.
    """
    signature = types.UniTuple(types.float32, 2)(cells, types.uintp, types.uintp, types.float32, pairs, types.uintp)

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
        number, whole, half = ir.VectorType(f32, LANES), ir.VectorType(i32, LANES), ir.VectorType(i32, LANES // 2)
        _, at, vectors, peak, _, to = given
        cells, pairs = (
            cgutils.create_struct_proxy(signature.args[place])(context, builder, value=given[place]).data for place in (0, 4)
        )
        paired = signature.args[4].dtype == types.int32
        narrow = ir.InlineAsm(ir.FunctionType(half, [number]), "vcvtneps2bf16 $1, $0", "=v,v")
        factors = POWERS_OF_PAIRS if paired else POWERS

        def all_of(value: float) -> Any:
            return ir.Constant(number, [float(F32(value))] * LANES)

        def spread(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(number, ir.Undefined), value, ir.Constant(i32, 0))
            return builder.shuffle_vector(one, ir.Constant(number, ir.Undefined), ir.Constant(whole, [0] * LANES))

        def known(name: str, *values: Any) -> Any:
            kind = ir.FunctionType(number, [number] * len(values))
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), values)

        def larger(left: Any, right: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", left, right), left, right)

        def folded(value: Any, join: Callable[[Any, Any], Any]) -> Any:
            count = LANES
            while count > 1:
                count //= 2
                order = [(lane + count) % LANES for lane in range(LANES)]
                value = join(value, builder.shuffle_vector(value, value, ir.Constant(whole, order)))
            return value

        def vector(index: Any) -> Any:
            place = builder.add(at, builder.mul(index, ir.Constant(i64, LANES)))
            return builder.bitcast(builder.gep(cells, [place]), number.as_pointer())

        def scaled(value: Any, n: Any, taken: Any) -> Any:
            """``value · 2^n`` in the lanes that are ``taken``, and 0 in the others."""
            if LANES == 16:
                lanes, rounding = ir.IntType(16), ir.Constant(i32, 4)
                kind = ir.FunctionType(number, [number] * 3 + [lanes, i32])
                function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
                return builder.call(function, [value, n, all_of(0), builder.bitcast(taken, lanes), rounding])
            power = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [127] * LANES))
            power = builder.bitcast(builder.shl(power, ir.Constant(whole, [23] * LANES)), number)
            return builder.select(taken, builder.fmul(value, power), all_of(0))

        most, total = cgutils.alloca_once(builder, number), cgutils.alloca_once(builder, number)
        builder.store(spread(peak), most)
        with cgutils.for_range(builder, vectors) as loop:
            builder.store(larger(builder.load(vector(loop.index), align=4), builder.load(most)), most)
        top = folded(builder.load(most), larger)
        builder.store(all_of(0), total)
        with cgutils.for_range(builder, vectors) as loop:
            into = vector(loop.index)
            score = builder.load(into, align=4)
            x = builder.fmul(builder.fsub(score, top), all_of(LOG2E))
            n = known("nearbyint", x)
            r = builder.fsub(x, n)
            p = all_of(factors[0])
            for factor in factors[1:]:
                p = known("fma", p, r, all_of(factor))
            found = scaled(p, n, builder.fcmp_unordered(">=", x, all_of(-126)))
            builder.store(found, into, align=4)
            if paired and HAS_PAIRS:
                to_pairs = builder.gep(pairs, [builder.add(to, builder.mul(loop.index, ir.Constant(i64, LANES // 2)))])
                builder.store(builder.call(narrow, [found]), builder.bitcast(to_pairs, half.as_pointer()), align=4)
            # fused, because LLVM would add all scores before it multiplies them, and the sum of hidden ones is not finite
            found = known("fma", score, all_of(0), found)
            builder.store(builder.fadd(builder.load(total), found), total)
        both = [builder.extract_element(each, ir.Constant(i32, 0)) for each in (top, folded(builder.load(total), builder.fadd))]
        return context.make_tuple(builder, signature.return_type, both)

    return signature, build


@compiled()
def _exp(x: Any) -> Any:
    """From -87 to 88 within 2e-7 of it; beyond, the value there. Source of the polynomial: Moshier's Cephes, ``expf``."""
    x = x if x > F32(-87.0) else F32(-87.0)
    x = x if x < F32(88.0) else F32(88.0)
    n = np.floor(x * F32(LOG2E) + F32(0.5))
    r = x - n * F32(0.693359375) + n * F32(2.12194440e-4)
    p = F32(POLYNOMIAL[0])
    p = p * r + F32(POLYNOMIAL[1])
    p = p * r + F32(POLYNOMIAL[2])
    p = p * r + F32(POLYNOMIAL[3])
    p = p * r + F32(POLYNOMIAL[4])
    p = p * r + F32(POLYNOMIAL[5])
    return (p * r * r + r + F32(1.0)) * I32((I32(n) + I32(127)) << I32(23)).view(F32)


@compiled()
def _tanh(x: Any) -> Any:
    e = _exp(F32(-2.0) * abs(x))
    size = (F32(1.0) - e) / (F32(1.0) + e)
    return size if x >= F32(0.0) else -size


@compiled()
def _erf(x: Any) -> Any:
    """Within 3e-7: a rational function that was fitted to it from -4 to 4, without an exponential."""
    x = x if x > F32(-4.0) else F32(-4.0)
    x = x if x < F32(4.0) else F32(4.0)
    s = x * x
    p = F32(1.92168162e-8)
    p = p * s - F32(1.99029064e-6)
    p = p * s + F32(1.55535073e-4)
    p = p * s + F32(4.29303262e-3)
    p = p * s + F32(5.24334621e-2)
    p = p * s + F32(2.13944609e-1)
    p = p * s + F32(1.12837868)
    q = F32(1.09802862e-3)
    q = q * s + F32(1.55510742e-2)
    q = q * s + F32(1.20799586e-1)
    q = q * s + F32(5.2293113e-1)
    q = q * s + F32(1.0)
    return x * p / q


@compiled()
def _fill(cells: Any, at: Any, end: Any, value: Any) -> None:
    for j in range(end - at):
        cells[at + U64(j)] = value


@compiled()
def _multiply(cells: Any, at: Any, count: Any, factor: Any) -> None:
    for j in range(count):
        cells[at + U64(j)] *= factor


@compiled()
def _pair(low: Any, high: Any) -> Any:
    """The bits of two float32 numbers, each rounded to bfloat16."""
    low = (low + I32(0x7FFF) + ((low >> I32(16)) & I32(1))) >> I32(16)
    high = high + I32(0x7FFF) + ((high >> I32(16)) & I32(1))
    return I32((high & I32(-0x10000)) | (low & I32(0xFFFF)))


def _rounding(*, mixed: bool) -> Any:
    """Return ``pair(cells, low, high, pairs, to)``: :data:`LANES` numbers from ``low`` on and as many from ``high`` on, rounded to
    bfloat16, as :data:`LANES` pairs: one number from each, if ``mixed``, or else two that follow one another."""

    @intrinsic  # type: ignore[untyped-decorator]
    def pair(_: Any, cells: Any, low: Any, high: Any, pairs: Any, to: Any) -> Any:  # noqa: ARG001
        signature = types.void(cells, types.uintp, types.uintp, pairs, types.uintp)

        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            if HAS_PAIRS:  # or else it is compiled, and never called
                into = _vector_at(context, builder, signature.args[3], given[3], given[4])
                two = [_vector_at(context, builder, signature.args[0], given[0], at) for at in given[1:3]]
                builder.store(_rounded(builder, *two, mixed=mixed), into, align=4)
            return context.get_dummy_value()

        return signature, build

    return pair


def _vector_at(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Pointer to :data:`LANES` elements of 32 bits of an array, in an intrinsic."""
    element = ir.FloatType() if kind.dtype == types.float32 else ir.IntType(32)
    start = cgutils.create_struct_proxy(kind)(context, builder, value=array).data
    return builder.bitcast(builder.gep(start, [at]), ir.VectorType(element, LANES).as_pointer())


def _rounded(builder: Any, low: Any, high: Any, *, mixed: bool = False) -> Any:
    """Pairs of the numbers that two pointers lead to, see :func:`_rounding`, in an intrinsic."""
    number, pair, single = (ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES), ir.IntType(16))
    both = ir.InlineAsm(ir.FunctionType(pair, [number] * 2), "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")
    found = builder.call(both, [builder.load(each, align=4) for each in (low, high)])
    if not mixed:
        return found
    numbers = ir.VectorType(single, 2 * LANES)
    order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [half + lane for lane in range(LANES) for half in (0, LANES)])
    found = builder.bitcast(found, numbers)
    return builder.bitcast(builder.shuffle_vector(found, ir.Constant(numbers, ir.Undefined), order), pair)


_pair_next, _pair_beside = _rounding(mixed=False), _rounding(mixed=True)


def _turning(*, paired: bool) -> Any:
    """Return ``turn(cells, places, offset, panel, to)``: transpose :data:`LANES` elements of as many rows. Those of row i, from
    ``places[i] + offset`` on, become lane i of vectors of ``panel``. If ``paired``, an element is two numbers, as bfloat16."""

    @intrinsic  # type: ignore[untyped-decorator]
    def turn(_: Any, cells: Any, places: Any, offset: Any, panel: Any, to: Any) -> Any:  # noqa: ARG001
        signature = types.void(cells, places, types.uintp, panel, types.uintp)

        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            if paired and not HAS_PAIRS:  # it is compiled, and never called
                return context.get_dummy_value()
            start = cgutils.create_struct_proxy(signature.args[1])(context, builder, value=given[1]).data
            kind, rows = ir.VectorType(ir.IntType(32), LANES), []
            for lane in range(LANES):
                at = builder.add(builder.load(builder.gep(start, [ir.Constant(ir.IntType(64), lane)])), given[2])
                first = _vector_at(context, builder, signature.args[0], given[0], at)
                if paired:
                    rows.append(_rounded(builder, first, builder.gep(first, [ir.Constant(ir.IntType(64), 1)])))
                else:
                    rows.append(builder.bitcast(builder.load(first, align=4), kind))
            half = LANES // 2
            orders = [ir.Constant(kind, [start + lane // 2 + lane % 2 * LANES for lane in range(LANES)]) for start in (0, half)]
            for _ in range(LANES.bit_length() - 1):
                rows = [builder.shuffle_vector(rows[row], rows[row + half], order) for row in range(half) for order in orders]
            for place, row in enumerate(rows):
                at = builder.add(given[4], ir.Constant(ir.IntType(64), place * LANES))
                builder.store(row, _vector_at(context, builder, signature.args[3], given[3], at), align=4)
            return context.get_dummy_value()

        return signature, build

    return turn


_turn_numbers, _turn_pairs = _turning(paired=False), _turning(paired=True)


@compiled()
def _pair_all(cells: Any, pairs: Any, count: Any) -> None:
    """Write ``count`` pairs of numbers that follow one another."""
    whole, bits = U64(count) // U64(LANES) * U64(LANES), cells.view(np.int32)
    for i in range(U64(0), whole, U64(LANES)):
        place = U64(2) * i
        _pair_next(cells, place, place + U64(LANES), pairs, i)
    for i in range(whole, U64(count)):
        pairs[i] = _pair(bits[U64(2) * i], bits[U64(2) * i + U64(1)])


@compiled()
def _turn_keys(k: Any, k_step: Any, index: Any, keys: Any, offset: Any, size: Any, narrow: Any, places: Any, panel: Any) -> None:
    """Transpose keys into panels of :data:`LANES`, as numbers, or if ``narrow`` as pairs of bfloat16.

    index: rows of ``keys`` keys; ``offset``: of their first number in a row; ``size``: numbers or pairs of a key; places: room for
    :data:`LANES`; panel: int32. A last panel that is not full has the last key in the places that are left.
    """
    bits, each, whole = k.view(np.int32), U64(2) if narrow else U64(1), size // U64(LANES) * U64(LANES)
    for j0 in range(U64(0), U64(keys), U64(LANES)):
        for lane in range(U64(LANES)):
            places[lane] = U64(index[min(j0 + lane, U64(keys) - U64(1))]) * U64(k_step) + offset
        for d in range(U64(0), whole, U64(LANES)):
            if narrow:
                _turn_pairs(k, places, each * d, panel, j0 * size + d * U64(LANES))
            else:
                _turn_numbers(k, places, d, panel, j0 * size + d * U64(LANES))
        for d in range(whole, size):
            for lane in range(U64(LANES)):
                place = places[lane] + each * d
                element = _pair(bits[place], bits[place + U64(1)]) if narrow else bits[place]
                panel[j0 * size + d * U64(LANES) + lane] = element


@compiled()
def _score(asked: Any, at: Any, size: Any, panel: Any, scores: Any, to: Any, step: Any, low: Any, high: Any) -> None:
    """Scores of a tile of queries with the keys from ``low`` to ``high``; ``size``: elements of a row; ``to``: place of the first
    query's score with key 0; ``step``: from query to query."""
    j, depth = low, U64(LANES) * size
    while j + U64(WIDE - LANES) < high:
        _set_most(asked, at, size, panel, j * size, U64(LANES), depth, scores, to + j, step, size)
        j += U64(WIDE)
    while j + U64(LANES) < high:
        _set_two(asked, at, size, panel, j * size, U64(LANES), depth, scores, to + j, step, size)
        j += U64(2 * LANES)
    if j < high:
        _set_one(asked, at, size, panel, j * size, U64(LANES), depth, scores, to + j, step, size)


@compiled()
def _score_distances(
    k: Any, k_step: Any, index: Any, keys: Any, panel: Any, size: Any, place: Any, rows: Any, tile: Any, apart: Any, turned: Any,
) -> None:  # fmt: skip
    """Multiply each key with the vector of its distance from each query (``relative`` of :func:`attend`).

    index: rows of ``keys`` keys; panel: the vectors of all distances; rows: queries; ``place``: distance of the first key from the
    first query, in the panel. Room: tile, [ROWS, size], and apart, [ROWS, APART]. -> turned: [rows, TURNED]
    """
    for j0 in range(U64(0), U64(keys), U64(ROWS)):
        count = min(U64(keys) - j0, U64(ROWS))
        for j in range(count):
            base = U64(index[j0 + j]) * U64(k_step)
            for d in range(size):
                tile[j * size + d] = k[base + d]
        _fill(tile, count * size, U64(ROWS) * size, F32(0))
        first = U64(place) + j0 - rows + U64(1)  # distance of the first key from the last query
        low = first // U64(LANES) * U64(LANES)
        _score(tile, U64(0), size, panel, apart, U64(0) - low, U64(APART), low, first + rows + count - U64(1))
        for r in range(rows):
            for j in range(count):
                turned[r * U64(TURNED) + j0 + j] = apart[j * U64(APART) + first + rows - U64(1) - r + j - low]


@compiled()
def _add_rest(a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, wide: Any, c: Any, c_at: Any, c_step: Any, depth: Any) -> None:
    """:func:`_add_tile` of :data:`REST_ROWS` rows and at most :data:`WIDE` columns."""
    if wide == U64(WIDE):
        _add_most_few(a, a_at, a_step, b, b_at, wide, U64(LANES), c, c_at, c_step, depth)
        return
    for column in range(U64(0), wide, U64(LANES)):
        _add_one_few(a, a_at, a_step, b, b_at + column, wide, U64(LANES), c, c_at + column, c_step, depth)


@compiled()
def _add_tile(a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, wide: Any, c: Any, c_at: Any, c_step: Any, depth: Any) -> None:
    """Add the products of a tile of rows of a with all ``wide`` columns of b."""
    column = U64(0)
    while column + U64(WIDE) <= wide:
        _add_most(a, a_at, a_step, b, b_at + column, wide, U64(LANES), c, c_at + column, c_step, depth)
        column += U64(WIDE)
    while column + U64(2 * LANES) <= wide:
        _add_two(a, a_at, a_step, b, b_at + column, wide, U64(LANES), c, c_at + column, c_step, depth)
        column += U64(2 * LANES)
    if column < wide:
        _add_one(a, a_at, a_step, b, b_at + column, wide, U64(LANES), c, c_at + column, c_step, depth)


@compiled(
    "void(f4[::1], i8, f4[::1], i8, f4[::1], i8, i8[::1], i8[:, ::1], i8, i8, f4, f4, f4[:, ::1], f4[:, :, ::1], i8, i8, i8, b1,"
    " f4[::1])"
)
def attend(
    q: Any, q_step: int, k: Any, k_step: int, v: Any, v_step: int, index: Any, tasks: Any, left: int, right: int, scale: Any,
    cap: Any, distances: Any, relative: Any, heads: Any, fold: Any, size: Any, narrow: bool, out: Any,
) -> None:  # fmt: skip
    """Attention in tiles of keys, with a running softmax (Dao et al. 2022, arXiv 2205.14135).

    q: queries, ``q_step`` numbers from token to token, heads of ``size`` numbers one after another; out: the same, with a step of
    heads · size. k, v: rows of keys and values, with ``fold`` query heads for each of their heads. index: int64, the rows of
    contexts. tasks: [tasks, 6] int64; each has ``count`` queries from token ``start`` on, of one key head, ``head``, and a context:
    ``width`` rows from place ``at`` of the index, of which ``before`` come before the first query's own. A query sees the keys from
    ``left`` before its own to ``right`` after it. ``cap``: soft cap of the scaled scores; 0 for none. ``distances``: what is added
    to scores, [heads, 2 · most + 1], for keys from ``most`` places before a query to ``most`` after it; no heads for nothing.
    ``relative``: [2, heads, size · 2 · most], vectors of distances from ``-most`` on, in panels of :data:`LANES`; empty for none.
    The product of a query with the first vector of a key's distance, and of the key with the second one, are added to the score.
    It takes a ``fold`` of 1.
    ``narrow``: factors of products are rounded to bfloat16, which takes :data:`HAS_PAIRS` and an even ``size``.
    """
    size, fold, related = U64(size), U64(fold), len(relative) > 0
    most_apart = relative.shape[2] // (2 * I32(size)) if related else distances.shape[1] // 2
    wide = (size + U64(LANES - 1)) // U64(LANES) * U64(LANES)
    most = U64(1)
    for task in range(len(tasks)):
        most = max(most, U64(tasks[task, 1]))
    room = (most * fold + U64(ROWS - 1)) // U64(ROWS) * U64(ROWS)
    asked = np.empty(room * size, np.float32)
    found = np.empty(room * wide, np.float32)
    peaks = np.empty(room, np.float32)
    totals = np.empty(room, np.float32)
    scores = np.empty(ROWS * KEYS, np.float32)
    panel = np.empty(U64(KEYS) * size, np.float32)  # keys, transposed, LANES of them after another
    beside = np.zeros(U64(KEYS) * wide, np.float32)  # values
    half, whole, places = size // U64(2), size // U64(LANES) * U64(LANES), np.empty(LANES, np.uintp)
    asked_pairs, weights = np.empty(room * half, np.int32), np.empty(ROWS * KEYS // 2, np.int32)
    tile, apart_scores = np.empty(ROWS * size, np.float32), np.empty(ROWS * APART if related else 0, np.float32)
    turned = np.empty(room * U64(TURNED) if related else U64(0), np.float32)
    panel_pairs, beside_pairs = panel.view(np.int32), beside.view(np.int32)
    v_bits = v.view(np.int32)
    for task in range(len(tasks)):
        start, count, at, width, before, head = tasks[task]
        rows = U64(count) * fold
        padded = (rows + U64(ROWS - 1)) // U64(ROWS) * U64(ROWS)
        few = rows <= U64(FEW) and not narrow
        for token in range(U64(count)):
            for one in range(fold):
                base = (U64(start) + token) * U64(q_step) + (U64(head) * fold + one) * size
                for d in range(size):
                    asked[(token * fold + one) * size + d] = q[base + d] * scale
        _fill(asked, rows * size, padded * size, F32(0))
        if narrow:
            _pair_all(asked, asked_pairs, padded * half)
        _fill(found, U64(0), padded * wide, F32(0))
        _fill(peaks, U64(0), padded, NO_PEAK)
        _fill(totals, U64(0), padded, F32(0))
        seen = min(width, before + count + right)
        for first in range(max(0, before - left), seen, KEYS):
            keys = min(KEYS, seen - first)
            finite = F32(0)
            if narrow:
                _turn_keys(k, k_step, index[at + first :], keys, U64(head) * size, half, True, places, panel_pairs)
                for j in range(U64(0), U64(keys), U64(2)):
                    base = U64(index[U64(at + first) + j]) * U64(v_step) + U64(head) * size
                    last_one = j + U64(1) == U64(keys)
                    other = base if last_one else U64(index[U64(at + first) + j + U64(1)]) * U64(v_step) + U64(head) * size
                    to = j // U64(2) * wide
                    for d in range(U64(0), whole, U64(LANES)):
                        _pair_beside(v, base + d, other + d, beside_pairs, to + d)
                    for d in range(whole, size):
                        beside_pairs[to + d] = _pair(v_bits[base + d], v_bits[other + d])
                    for d in range(size):
                        finite += v[base + d] * F32(0) + v[other + d] * F32(0)
            elif not few:
                _turn_keys(k, k_step, index[at + first :], keys, U64(head) * size, size, False, places, panel_pairs)
                for j in range(U64(keys)):
                    base = U64(index[U64(at + first) + j]) * U64(v_step) + U64(head) * size
                    for d in range(size):
                        beside[j * wide + d] = v[base + d]
                        finite += v[base + d] * F32(0)
            if related:
                _score_distances(
                    k[U64(head) * size :], k_step, index[at + first :], keys, relative[1, head], size, first - before + most_apart,
                    rows, tile, apart_scores, turned,
                )  # fmt: skip
            apart = few or finite != F32(0)  # 0 · NaN is NaN, so a hidden value that is no number must not be multiplied
            for r0 in range(U64(0), rows, U64(ROWS)):
                last = min(r0 + U64(ROWS), rows) - U64(1)
                begin_all = max(0, before + I32(r0 // fold) - left - first) // LANES * LANES
                end_all = min(keys, before + I32(last // fold) + right + 1 - first)
                if begin_all >= end_all:
                    continue
                low, high = U64(begin_all), U64(end_all)
                if few:
                    for j in range(low, high):
                        base = U64(index[U64(at + first) + j]) * U64(k_step) + U64(head) * size
                        for r in range(rows):
                            total = F32(0)
                            for d in range(size):
                                total += asked[r * size + d] * k[base + d]
                            scores[r * U64(KEYS) + j] = total
                elif narrow:
                    _score(asked_pairs, r0 * half, half, panel_pairs, scores, U64(0), U64(KEYS), low, high)
                else:
                    _score(asked, r0 * size, size, panel, scores, U64(0), U64(KEYS), low, high)
                place_low = U64(0)
                if related:
                    from_last = U64(first - before + most_apart) + low - last
                    place_low = from_last // U64(LANES) * U64(LANES)
                    _score(
                        asked, r0 * size, size, relative[0, head], apart_scores, U64(0) - place_low, U64(APART), place_low,
                        from_last + (last - r0) + (high - low),
                    )  # fmt: skip
                for r in range(r0, last + U64(1)):
                    line = (r - r0) * U64(KEYS)
                    place = before + I32(r // fold) - first
                    begin, end = max(begin_all, place - left), min(end_all, place + right + 1)
                    of_weights = (r - r0) * U64(KEYS // 2)
                    if begin >= end:
                        _fill(scores, line + low, line + high, F32(0))
                        _fill(weights, of_weights, of_weights + (high - low + U64(1)) // U64(2), I32(0))
                        continue
                    if cap > F32(0):
                        for j in range(U64(begin), U64(end)):
                            scores[line + j] = cap * _tanh(scores[line + j] / cap)
                    if len(distances) > 0:
                        of_head, shift = distances[U64(head) * fold + r % fold], U64(most_apart - place)
                        for j in range(U64(begin), U64(end)):
                            scores[line + j] += of_head[shift + j]
                    if related:
                        shift = (r - r0) * U64(APART) + U64(most_apart - place) - place_low
                        for j in range(U64(begin), U64(end)):
                            scores[line + j] += apart_scores[shift + j] + scale * turned[r * U64(TURNED) + j]
                    vectors = (high - low + U64(LANES - 1)) // U64(LANES)
                    _fill(scores, line + low, line + U64(begin), NO_PEAK)
                    _fill(scores, line + U64(end), line + low + vectors * U64(LANES), NO_PEAK)
                    if narrow:
                        top, total = _exponentials(scores, line + low, vectors, peaks[r], weights, of_weights)
                    else:
                        top, total = _exponentials(scores, line + low, vectors, peaks[r], scores, U64(0))
                    if top > peaks[r] and totals[r] > F32(0):
                        factor = _exp(peaks[r] - top)
                        totals[r] *= factor
                        _multiply(found, r * wide, wide, factor)
                    totals[r] += total
                    peaks[r] = top
                    if apart:
                        for j in range(U64(begin), U64(end)):
                            weight = scores[line + j]
                            base = U64(index[U64(at + first) + j]) * U64(v_step) + U64(head) * size
                            for d in range(size):
                                found[r * wide + d] += weight * v[base + d]
                if apart:
                    continue
                if narrow:
                    half_step, depth = U64(KEYS // 2), (high - low + U64(1)) // U64(2)
                    _add_tile(weights, U64(0), half_step, beside_pairs, low // U64(2) * wide, wide, found, r0 * wide, wide, depth)
                else:
                    _add_tile(scores, low, U64(KEYS), beside, low * wide, wide, found, r0 * wide, wide, high - low)
        for token in range(U64(count)):
            for one in range(fold):
                r = token * fold + one
                base = ((U64(start) + token) * U64(heads) + U64(head) * fold + one) * size
                factor = F32(0) if totals[r] == F32(0) else F32(1) / totals[r]  # 0: it sees no key
                for d in range(size):
                    out[base + d] = found[r * wide + d] * factor


@compiled()
def _codes_of(row: Any, at: Any, size: Any, rounded: bool, zero: Any, codes: Any, to: Any) -> tuple[Any, Any]:
    """Write the codes of numbers; ``zero`` is that of 0. -> their scale, and their sum, less zeros. ``rounded``: to bfloat16."""
    bits = row.view(np.int32)
    most, total = I32(0), I32(0)
    for c in range(size):
        most = max(most, I32(bits[at + U64(c)] & I32(0x7FFFFFFF)))
    peak = I32(most).view(F32)
    peak = F32(MIN_PEAK) if peak < F32(MIN_PEAK) else peak
    scale, inverse = peak * F32(1 / 127), F32(127) / peak
    if rounded:  # a rounded scale makes codes of up to 127.25, which are still 127
        pattern = F32(scale).view(I32)
        scale = I32((pattern + I32(0x7FFF) + ((pattern >> I32(16)) & I32(1))) & I32(-0x10000)).view(F32)
        inverse = F32(1) / scale
    for c in range(size):
        code = I32(np.rint(row[at + U64(c)] * inverse))
        total = I32(total + code)  # Numba adds in 64 bits, and LLVM would compute all in lanes of these
        codes[to + U64(c)] = np.uint8(I32(code + I32(zero)))
    return scale, total


@compiled("void(f4[::1], i8, i8, b1, i8, u1[::1], f4[::1], i4[::1], i8, i8)")
def quantize(
    x: Any, size: Any, group: Any, rounded: bool, zero: int, codes: Any, scales: Any, sums: Any, begin: int, end: int
) -> None:  # fmt: skip
    """Rows ``begin`` to ``end`` of x, [rows, size] -> codes, [rows, size] uint8, and scales and sums, [rows, size / group]."""
    size, group = U64(size), U64(group)
    for place in range(U64(begin) * (size // group), U64(end) * (size // group)):
        scales[place], sums[place] = _codes_of(x, place * group, group, rounded, zero, codes, place * group)


@compiled()
def _activate_row(row: Any, function: Any, gated: Any, size: Any, inner: Any) -> None:
    """row: [size], or twice that if ``gated`` -> inner: [size]"""
    gate, other = (size, U64(0)) if gated == GATE_SECOND else (U64(0), size)
    if function == SILU:
        for c in range(size):
            inner[c] = row[gate + c] / (F32(1) + _exp(-row[gate + c]))
    elif function == GELU_TANH:
        for c in range(size):
            x = row[gate + c]
            inner[c] = x / (F32(1) + _exp(F32(-1.5957691216057308) * (x + F32(0.044715) * x * x * x)))
    elif function == GELU:
        for c in range(size):
            x = row[gate + c]
            inner[c] = F32(0.5) * x * (F32(1) + _erf(x * F32(0.7071067811865476)))
    elif function == TANH:
        for c in range(size):
            inner[c] = _tanh(row[gate + c])
    else:
        for c in range(size):
            inner[c] = row[gate + c] if row[gate + c] > F32(0) else row[gate + c] * F32(0)
    if gated != UNGATED:
        for c in range(size):
            inner[c] *= row[other + c]


@compiled("void(f4[::1], f4[::1], f4[::1], i8, i8, i8, i8, b1, i8, u1[::1], f4[::1], i4[::1], i8, i8)")
def activate(
    product: Any, scales: Any, bias: Any, function: int, gated: int, size: Any, group: Any, rounded: bool, zero: int, codes: Any,
    out_scales: Any, sums: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """The activation between two products in 8-bit codes, rows ``begin`` to ``end``.

    product: [rows, width], in units of scales, [rows], unless these are empty; bias: [width] or empty; width: ``size``, or twice
    that if ``gated``. -> codes, [rows, size] uint8, and out_scales and sums, [rows, size / group].
    """
    size, group = U64(size), U64(group)
    width = size if gated == UNGATED else U64(2) * size
    row, inner = np.empty(width, np.float32), np.empty(size, np.float32)
    for r in range(U64(begin), U64(end)):
        given = product[r * width : (r + U64(1)) * width]
        if len(scales) > 0:
            for c in range(width):
                row[c] = given[c] * scales[r]
            given = row
        if len(bias) > 0:
            for c in range(width):
                row[c] = given[c] + bias[c]
            given = row
        _activate_row(given, function, gated, size, inner)
        for g in range(size // group):
            place = r * (size // group) + g
            out_scales[place], sums[place] = _codes_of(inner, g * group, group, rounded, zero, codes, place * group)


@compiled("void(i4[::1], f4[::1], i4[::1], u1[::1], i2[::1], i4, f4[::1], f4[::1], f4[::1], i8, i8, i8, i8, b1, b1, i8, i8)")
def multiply_codes(
    x: Any, scales: Any, sums: Any, w: Any, w_scales: Any, zero: Any, factors: Any, bias: Any, out: Any, rows: Any, columns: Any,
    groups: Any, group: Any, halved: bool, shifted: bool, begin: int, end: int,
) -> None:  # fmt: skip
    """Products of rows of codes with the pairs of panels from ``begin`` to ``end``; see :class:`kernels.int8.Panels`.

    x: [rows, groups · group / 4]; scales, sums: [rows, groups], of the codes; bias: [columns]. -> out: [rows, columns].
    """
    rows, columns, groups, group, zero = U64(rows), U64(columns), U64(groups), U64(group), I32(zero)
    quads = group // U64(4)
    line = groups * quads
    stored = line * U64((2 if halved else 4) * LANES)
    scaled = groups * U64((2 if shifted else 1) * LANES)
    block = max(U64(1), U64(ROW_BYTES) // (line * U64(4) * U64(ROWS))) * U64(ROWS)
    for start in range(U64(0), rows, block):
        stop = min(rows, start + block)
        for pair in range(U64(begin), U64(end)):
            w_at, v_at, column = pair * U64(2) * stored, pair * U64(2) * scaled, pair * U64(2 * LANES)
            r = start
            while r < stop:
                taken = U64(ROWS) if stop - r >= U64(ROWS) else min(stop - r, U64(REST_ROWS))
                given = (
                    x, r * line, line, w, w_at, stored, scales, sums, r * groups, groups, w_scales, v_at, scaled, zero, factors,
                    bias, column, out, r * columns + column, columns, groups, quads,
                )  # fmt: skip
                if taken == U64(ROWS):
                    if halved and shifted:
                        _dots_many_both(*given)
                    elif halved:
                        _dots_many_halved(*given)
                    elif shifted:
                        _dots_many_shifted(*given)
                    else:
                        _dots_many(*given)
                elif taken == U64(REST_ROWS):
                    if halved and shifted:
                        _dots_few_both(*given)
                    elif halved:
                        _dots_few_halved(*given)
                    elif shifted:
                        _dots_few_shifted(*given)
                    else:
                        _dots_few(*given)
                elif halved and shifted:
                    _dots_one_both(*given)
                elif halved:
                    _dots_one_halved(*given)
                elif shifted:
                    _dots_one_shifted(*given)
                else:
                    _dots_one(*given)
                r += taken


@compiled("void(f4[::1], f4[::1], f4[::1], f4[::1], b1, f8, i8, f4[::1], f4[::1], i8, i8)")
def add_norm(
    x: Any, residual: Any, weight: Any, bias: Any, centred: bool, eps: float, size: Any, normed: Any, total: Any, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Rows ``begin`` to ``end``: ``total = x + residual``, and ``normed``, its root-mean-square normalisation, or, if ``centred``,
    layer normalisation. Without a residual, of size 0, it normalises x. All: [rows, size]; bias: [size] or empty."""
    size = U64(size)
    adds = len(residual) > 0
    source = total if adds else x
    for r in range(U64(begin), U64(end)):
        at = r * size
        if adds:
            for c in range(size):
                total[at + c] = x[at + c] + residual[at + c]
        mean, squares = F32(0), F32(0)
        if centred:
            for c in range(size):
                mean += source[at + c]
            mean /= F32(size)
        for c in range(size):
            squares += (source[at + c] - mean) * (source[at + c] - mean)
        factor = F32(1) / np.sqrt(squares / F32(size) + F32(eps))
        if len(bias) > 0:
            for c in range(size):
                normed[at + c] = (source[at + c] - mean) * factor * weight[c] + bias[c]
        else:
            for c in range(size):
                normed[at + c] = (source[at + c] - mean) * factor * weight[c]


@compiled("void(i8[::1], i8[::1], i8, i4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f8, i8, f4[::1])")
def embed(
    tokens: Any, positions: Any, first_position: int, types: Any, words: Any, places: Any, kinds: Any, norm: Any, norm_bias: Any,
    eps: float, size: Any, x: Any,
) -> None:  # fmt: skip
    """See :func:`kernels.encoder_layers.embed`. ``places``, ``kinds``: empty for a model without."""
    size = U64(size)
    for r in range(U64(len(tokens))):
        at, word = r * size, U64(tokens[r]) * size
        for c in range(size):
            x[at + c] = words[word + c]
        if len(places) > 0:
            place = U64(positions[r] + first_position) * size
            for c in range(size):
                x[at + c] += places[place + c]
        if len(kinds) > 0:
            kind = U64(types[r]) * size if len(types) > 0 else U64(0)
            for c in range(size):
                x[at + c] += kinds[kind + c]
    add_norm(x, x[:0], norm, norm_bias, True, eps, size, x, x, 0, len(tokens))


@compiled("void(f4[::1], u1[::1], i2[::1], i4, f4[::1], f4[::1], f4[::1], i8, i8, i8, b1, b1)")
def multiply_few(
    x: Any, w: Any, w_scales: Any, zero: Any, factors: Any, bias: Any, out: Any, rows: int, groups: int, group: int, halved: bool,
    shifted: bool,
) -> None:  # fmt: skip
    """:func:`quantize` and :func:`multiply_codes` in one call. x: [rows, size] -> out: [rows, columns]"""
    size, columns = groups * group, len(factors)
    codes = np.empty(rows * size, np.uint8)
    scales, sums = np.empty(rows * groups, np.float32), np.empty(rows * groups, np.int32)
    quantize(x, size, group, False, 0, codes, scales, sums, 0, rows)
    multiply_codes(
        codes.view(np.int32), scales, sums, w, w_scales, zero, factors, bias, out, rows, columns, groups, group, halved, shifted,
        0, columns // (2 * LANES),
    )  # fmt: skip


@compiled()
def _bias_tile(bias: Any, column: Any, width: Any, out: Any, to: Any, step: Any) -> None:
    for row in range(U64(ROWS)):
        for c in range(width):
            out[to + row * step + c] = bias[column + c]


@compiled("void(f4[::1], f4[::1], f4[::1], f4[::1], i8, i8, i8, i8)")
def multiply(x: Any, numbers: Any, bias: Any, out: Any, rows: Any, size: Any, begin: int, end: int) -> None:
    """Products of rows with the panels from ``begin`` to ``end`` of a weight in float32, see :class:`kernels.panels.FloatPanels`.

    x: [rows, size]; bias: [columns] -> out: [rows, columns]. The products of a number are added in the order of its columns, so
    that a row's result does not depend on the rows beside it.
    """
    rows, size, columns = U64(rows), U64(size), U64(len(bias))
    whole = rows // U64(ROWS) * U64(ROWS)
    rest, of_rest = np.zeros(U64(ROWS) * size, np.float32), np.empty(ROWS * WIDE, np.float32)
    for c in range((rows - whole) * size):
        rest[c] = x[whole * size + c]
    block = max(U64(1), U64(ROW_BYTES) // (size * U64(4) * U64(ROWS))) * U64(ROWS)
    for start in range(U64(0), rows, block):
        stop = min(rows, start + block)
        for panel in range(U64(begin), U64(end)):
            column = panel * U64(WIDE)
            width = min(U64(WIDE), columns - column)
            at = column * size
            for r in range(start, stop, U64(ROWS)):
                if r < whole:
                    _bias_tile(bias, column, width, out, r * columns + column, columns)
                    _add_tile(x, r * size, size, numbers, at, width, out, r * columns + column, columns, size)
                    continue
                _bias_tile(bias, column, width, of_rest, U64(0), U64(WIDE))
                for row in range(U64(0), rows - whole, U64(REST_ROWS)):
                    _add_rest(rest, row * size, size, numbers, at, width, of_rest, row * U64(WIDE), U64(WIDE), size)
                for row in range(rows - whole):
                    for c in range(width):
                        out[(whole + row) * columns + column + c] = of_rest[row * U64(WIDE) + c]


@compiled()
def _add(x: Any, more: Any, out: Any, begin: Any, end: Any) -> None:
    for c in range(U64(begin), U64(end)):
        out[c] = x[c] + more[c]


@compiled()
def _panels(weight: Any) -> Any:
    """Parts of a weight that threads can share: panels of numbers, or pairs of panels of codes."""
    columns = len(weight[5])
    return (columns + WIDE - 1) // WIDE if len(weight[4]) > 0 else columns // (2 * LANES)


@compiled()
def _quantize_for(weight: Any, x: Any, size: Any, codes: Any, scales: Any, sums: Any, begin: Any, end: Any) -> None:
    """The codes of rows from ``begin`` to ``end``, if the weight has codes."""
    if len(weight[4]) == 0:
        quantize(x, size, size, False, 0, codes, scales, sums, begin, end)


@compiled()
def _product(x: Any, rows: Any, size: Any, codes: Any, scales: Any, sums: Any, weight: Any, out: Any, begin: Any, end: Any) -> None:
    """Products of rows, or of their codes, with a part of a weight of one group."""
    panels, of_outputs, zero, factors, numbers, bias = weight
    if len(numbers) > 0:
        multiply(x, numbers, bias, out, rows, size, begin, end)
        return
    multiply_codes(
        codes.view(np.int32), scales, sums, panels, of_outputs, zero, factors, bias, out, rows, len(bias), 1, size, False, False,
        begin, end,
    )  # fmt: skip


@compiled()
def _activated(
    product: Any, weight: Any, function: Any, gated: Any, inner: Any, hidden: Any, codes: Any, scales: Any, sums: Any, begin: Any,
    end: Any,
) -> None:  # fmt: skip
    """The activation before a product with ``weight``, of rows from ``begin`` to ``end``: codes, or numbers in ``hidden``."""
    if len(weight[4]) == 0:
        none = np.empty(0, np.float32)
        activate(product, none, none, function, gated, inner, inner, False, 0, codes, scales, sums, begin, end)
        return
    width = inner if gated == UNGATED else 2 * inner
    for r in range(begin, end):
        row = product[r * width : (r + 1) * width]
        _activate_row(row, function, gated, U64(inner), hidden[r * inner : (r + 1) * inner])


@compiled(
    f"void(f4[::1], f4[::1], {WEIGHT}, f4[::1], f4[::1], {WEIGHT}, i8, i8, i8, {WEIGHT}, f4[::1], f4[::1], b1, f8, f4[::1], i8, i8)"
)
def finish_layer(
    attended: Any, x: Any, o: Any, norm: Any, norm_bias: Any, up: Any, function: int, gated: int, inner: int, down: Any,
    last_norm: Any, last_bias: Any, before: bool, eps: float, out: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Output projection, feed-forward layer and norms of an encoder layer, rows ``begin`` to ``end``; see
    :func:`kernels.encoder_layers.finish_layer`. attended, x, out: [rows, size]. ``before``: there is no last norm."""
    size, wide = len(norm), len(up[5])
    codes = np.empty(BLOCK * max(size, inner), np.uint8)
    scales, sums = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32)
    first, normed = np.empty(BLOCK * size, np.float32), np.empty(BLOCK * size, np.float32)
    product, hidden = np.empty(BLOCK * wide, np.float32), np.empty(BLOCK * inner, np.float32)
    total = np.empty(BLOCK * size, np.float32) if before else first
    for start in range(begin, end, BLOCK):
        rows = min(BLOCK, end - start)
        here = slice(start * size, (start + rows) * size)
        _quantize_for(o, attended[here], size, codes, scales, sums, 0, rows)
        _product(attended[here], rows, size, codes, scales, sums, o, first, 0, _panels(o))
        add_norm(first, x[here], norm, norm_bias, True, eps, size, normed, total, 0, rows)
        _quantize_for(up, normed, size, codes, scales, sums, 0, rows)
        _product(normed, rows, size, codes, scales, sums, up, product, 0, _panels(up))
        _activated(product, down, function, gated, inner, hidden, codes, scales, sums, 0, rows)
        _product(hidden, rows, inner, codes, scales, sums, down, first, 0, _panels(down))
        if before:
            _add(first, total, out[here], 0, rows * size)
        else:
            add_norm(first, normed, last_norm, last_bias, True, eps, size, out[here], first, 0, rows)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, address: Any) -> Any:  # noqa: ARG001
    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _store(_: Any, cells: Any, at: Any, value: Any) -> Any:  # noqa: ARG001
    """Store a number so that whoever reads it also sees what this thread wrote before."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=given[0]).data
        builder.store_atomic(given[2], builder.gep(data, [given[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(cells, types.int64, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _load(_: Any, cells: Any, at: Any) -> Any:  # noqa: ARG001
    """Read the number that another thread stored last, and with it all that this thread wrote before."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=given[0]).data
        return builder.load_atomic(builder.gep(data, [given[1]]), "acquire", 8)

    return types.int64(cells, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_: Any) -> Any:
    """Tell the processor that a loop waits."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:  # noqa: ARG001
        if PAUSE:
            builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), PAUSE, "", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), build


_yield_core = types.ExternalFunction("sched_yield", types.int32())


@compiled("void(i8[::1], i8, i8)")
def spin(slots: Any, thread: int, phase: int) -> None:
    """Wait until all threads have reached ``phase``, a number that grows. slots: [threads · :data:`SLOT`], zeros at first: the
    phase of each thread, and how often it waited for more than :data:`SPINS`."""
    _store(slots, thread * SLOT, phase)
    for other in range(0, len(slots), SLOT):
        spins = 0
        while _load(slots, other) < phase:
            spins += 1
            if spins < SPINS:
                _pause()
                continue
            if spins == SPINS:
                slots[thread * SLOT + 1] += 1
            _yield_core()


@compiled()
def _weight(row: Any, at: Any) -> Any:
    """The weight that a table of addresses has from field ``at`` on."""
    panels, of_panels, scales, of_scales, zero, factors, of_factors, numbers, of_numbers, bias, columns = row[at : at + 11]
    return (
        numba.carray(_pointer(panels), of_panels, np.uint8),
        numba.carray(_pointer(scales), of_scales, np.int16),
        I32(zero),
        numba.carray(_pointer(factors), of_factors, np.float32),
        numba.carray(_pointer(numbers), of_numbers, np.float32),
        numba.carray(_pointer(bias), columns, np.float32),
    )


@compiled()
def _vector(row: Any, at: Any) -> Any:
    return numba.carray(_pointer(row[at]), row[at + 1], np.float32)


@compiled()
def _rotate(qkv: Any, step: Any, heads: Any, size: Any, cos: Any, sin: Any, half: Any, begin: Any, end: Any) -> None:
    """Rotate queries and keys of rows ``begin`` to ``end``, see :func:`kernels.rope.rope`. qkv: rows of ``step`` numbers; cos, sin:
    [rows, half]; size: of a head."""
    size, half = U64(size), U64(half)
    for r in range(U64(begin), U64(end)):
        for head in range(U64(2) * U64(heads)):
            at, angles = r * U64(step) + head * size, r * half
            for d in range(half):
                first, second = qkv[at + d], qkv[at + half + d]
                qkv[at + d] = first * cos[angles + d] - second * sin[angles + d]
                qkv[at + half + d] = second * cos[angles + d] + first * sin[angles + d]


@compiled()
def _multiply_part(slots: Any, thread: Any, phase: Any, weight: Any, x: Any, rows: Any, size: Any, room: Any, out: Any) -> Any:
    """Wait until all threads have reached ``phase``; multiply all rows with this thread's part of a weight. -> the next phase"""
    threads, parts, (codes, scales, sums) = len(slots) // SLOT, _panels(weight), room
    spin(slots, thread, phase)
    _product(x, rows, size, codes, scales, sums, weight, out, parts * thread // threads, parts * (thread + 1) // threads)
    return phase + 1


@compiled(
    "void(i8[:, ::1], i8, i8, i8, i8, b1, f8, f4, f4[:, ::1], b1, f4[:, ::1], f4[:, ::1], f4[::1], f4[::1], f4[::1], f4[::1],"
    " u1[::1], f4[::1], i4[::1], i8[::1], i8[:, ::1], i8[:, ::1], i8, i8[::1], i8, i8, i8, b1, b1)"
)
def encode(
    table: Any, heads: Any, function: int, gated: int, inner: int, before: bool, eps: float, scale: Any, distances: Any,
    narrow: bool, cos: Any, sin: Any, x: Any, attended: Any, qkv: Any, between: Any, codes: Any, scales: Any, sums: Any, index: Any,
    tasks: Any, bounds: Any, first_query: int, slots: Any, thread: int, begin: int, end: int, by_outputs: bool, whole: bool,
) -> None:  # fmt: skip
    """Compute one thread's part of the layers of an encoder; see :class:`kernels.encoder_layers.EncoderLayers`.

    x: embeddings, [rows, size] -> ``attended``, the output of the last layer's attention, and in x its input; if ``whole``, the
    output of the last layer. ``before``: norms are before attention and the feed-forward layer, else behind them. ``begin``,
    ``end``: rows of this thread, for products too unless ``by_outputs``; then there are queries and heads in ``tasks`` that no
    other thread has. ``bounds``: [pieces, 2], where the rows and tasks of each piece end. A piece is projected, then it attends,
    then the next one begins; there is one piece where threads share a sequence. ``between``: room for rows of what is between the
    projections. cos, sin: [rotations, angles of all rows], see :func:`_rotate`. ``distances``: see :func:`attend`.
    """
    rows, phase, room = len(scales), 1, (codes, scales, sums)
    angles = cos.shape[1] // rows
    for layer in range(len(table)):
        line = table[layer]
        of_qkv, o, up, down = _weight(line, 0), _weight(line, 11), _weight(line, 22), _weight(line, 33)
        norm, norm_bias, last_norm, last_bias = _vector(line, 44), _vector(line, 46), _vector(line, 48), _vector(line, 50)
        reach, rotation, first_norm, first_bias = line[52], line[53], _vector(line, 54), _vector(line, 56)
        relative = numba.carray(_pointer(line[58]), (min(2, line[59]), heads, line[59] // (2 * heads)), np.float32)
        size, wide = len(norm), len(up[5])
        step = 3 * size
        base = layer % 2 * (len(qkv) - rows * step)  # another thread may still attend to keys of the layer before
        normed, first = between[: rows * size], between[rows * size : 2 * rows * size]
        given = x
        if len(first_norm) > 0:
            add_norm(x, first[:0], first_norm, first_bias, True, eps, size, normed, x, begin, end)
            given = normed
        _quantize_for(of_qkv, given, size, codes, scales, sums, begin, end)
        first_row, first_task = begin, I64(0)
        for place in range(len(bounds)):
            last_row, last_task = bounds[place]
            last_row = min(end, begin + (last_row - begin + ROWS - 1) // ROWS * ROWS)
            if by_outputs:
                phase = _multiply_part(slots, thread, phase, of_qkv, given, rows, size, room, qkv[base:])
                if rotation >= 0:
                    spin(slots, thread, phase)
                    phase += 1
            else:
                _product(
                    given[first_row * size :], last_row - first_row, size, codes[first_row * size :], scales[first_row:],
                    sums[first_row:], of_qkv, qkv[base + first_row * step :], 0, _panels(of_qkv),
                )  # fmt: skip
            if rotation >= 0:
                _rotate(qkv[base:], step, heads, size // heads, cos[rotation], sin[rotation], angles, first_row, last_row)
            spin(slots, thread, phase)
            attend(
                qkv[base + first_query * step :], step, qkv[base + size :], step, qkv[base + 2 * size :], step, index,
                tasks[first_task:last_task], reach, reach, scale, F32(0), distances, relative, heads, 1, size // heads, narrow,
                attended[first_query * size :],
            )  # fmt: skip
            phase += 1
            first_row, first_task = last_row, last_task
        if by_outputs:
            spin(slots, thread, phase)
            phase += 1
        if layer == len(table) - 1 and not whole:
            return
        if not by_outputs:
            finish_layer(
                attended, x, o, norm, norm_bias, up, function, gated, inner, down, last_norm, last_bias, before, eps, x, begin, end
            )  # fmt: skip
            continue
        product, hidden = between[2 * rows * size :], between[rows * (2 * size + wide) :]
        _quantize_for(o, attended, size, codes, scales, sums, begin, end)
        phase = _multiply_part(slots, thread, phase, o, attended, rows, size, room, first)
        spin(slots, thread, phase)
        add_norm(first, x, norm, norm_bias, True, eps, size, normed, x if before else first, begin, end)
        _quantize_for(up, normed, size, codes, scales, sums, begin, end)
        phase = _multiply_part(slots, thread, phase + 1, up, normed, rows, size, room, product)
        spin(slots, thread, phase)
        _activated(product, down, function, gated, inner, hidden, codes, scales, sums, begin, end)
        phase = _multiply_part(slots, thread, phase + 1, down, hidden, rows, inner, room, first)
        spin(slots, thread, phase)
        if before:
            _add(first, x, x, begin * size, end * size)
        else:
            add_norm(first, normed, last_norm, last_bias, True, eps, size, x, first, begin, end)
        phase += 1
    spin(slots, thread, phase)


@compiled("void(f4[::1], f4[::1], f4[::1], f8, f4[::1], f4[::1], i8, i8, i8, i8, i8[::1], f4[::1], f4[::1], f4[::1], i8, i8)")
def norm_rotate_write(
    qkv: Any, q_weight: Any, k_weight: Any, eps: float, cos: Any, sin: Any, half: Any, heads: Any, kv_heads: Any, size: Any,
    slots: Any, keys: Any, values: Any, out: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """:func:`kernels.qk_norm_rope.qk_norm_rope_write` of tokens ``begin`` to ``end``. Weights of size 0: no norm. ``half``: angles
    of a token."""
    size, half, heads, kv_heads = U64(size), U64(half), U64(heads), U64(kv_heads)
    head = np.empty(size, np.float32)
    for token in range(U64(begin), U64(end)):
        slot = U64(slots[token])
        base = token * (heads + U64(2) * kv_heads) * size
        angles = token * half
        for h in range(heads + kv_heads):
            at = base + h * size
            for d in range(size):
                head[d] = qkv[at + d]
            weight = q_weight if h < heads else k_weight
            if len(weight) > 0:
                squares = F32(0)
                for d in range(size):
                    squares += head[d] * head[d]
                factor = F32(1) / np.sqrt(squares / F32(size) + F32(eps))
                for d in range(size):
                    head[d] *= factor * weight[d]
            into, to = (out, (token * heads + h) * size) if h < heads else (keys, (slot * kv_heads + h - heads) * size)
            for d in range(half):
                into[to + d] = head[d] * cos[angles + d] - head[half + d] * sin[angles + d]
            for d in range(half):
                into[to + half + d] = head[half + d] * cos[angles + d] + head[d] * sin[angles + d]
            for d in range(U64(2) * half, size):
                into[to + d] = head[d]
        at = base + (heads + kv_heads) * size
        for d in range(kv_heads * size):
            values[slot * kv_heads * size + d] = qkv[at + d]
