"""Faster versions of functions of Triton's interpreter, with the same results.

Triton 3.7 replaces some 150 attributes of ``triton.language`` at each launch, and again at each call of one kernel function by
another, which takes 2 ms each time. It reduces by XOR element by element in Python, and ``tl.topk`` does so dozens of times. It
computes whether an operation of integers overflows, in eight more operations, and then drops the result unless it is debugging.
It describes the shape of each value anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Permanent:
    """The scope of replaced attributes that stay replaced; the process interprets all its kernels."""

    def restore(self) -> None: ...


def speed_up() -> None:
    """Replace the slow functions in this process."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _xor_in_numpy(interpreter.ReduceOps.generic_reduce)
    check = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = _where_debugging(check)
    tl.block_type.__init__ = _by_element_and_shape(tl.block_type.__init__)
    tl.tensor.__init__ = _set_up_tensor


def _once(replace: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], _Permanent]:
    """``replace`` for the first kernel function of each module: what it replaces depends on the module's globals alone."""
    modules = set[str]()

    def once(function: Callable[..., Any]) -> _Permanent:
        if function.__module__ not in modules:
            replace(function)
            modules.add(function.__module__)
        return _Permanent()

    return once


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``find`` with a cache by the type's name, because types of blocks have no hash."""
    found: dict[str, Any] = {}

    def cached(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    return cached


def _where_debugging(check: Callable[..., None]) -> Callable[..., None]:
    """``check`` where a failed assertion would be reported."""

    def checked(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
        if self.builder.options.debug:
            check(self, left, right, operation)

    return checked


def _by_element_and_shape(set_up: Callable[..., None]) -> Callable[..., None]:
    """``block_type.__init__`` with a cache of the attributes, none of which is ever changed."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def set_up_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (type(element_ty), element_ty.name, tuple(shape))
        if key not in known:
            set_up(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return set_up_block


def _set_up_tensor(self: Any, handle: Any, type: Any) -> None:
    """``tensor.__init__`` with a cache of the shape in Triton's constants."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_and_size(type.shape if type.is_block() else ())


@cache
def _shape_and_size(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(each) for each in shape]), tl.constexpr(math.prod(shape))


def _xor_in_numpy(reduce: Callable[[Any, Any], list[Any]]) -> Callable[[Any, Any], list[Any]]:
    def reduced(self: Any, operands: Any) -> list[Any]:
        if self.combine_fn != tl.standard._xor_combine:
            return reduce(self, operands)
        (operand,) = operands
        found = np.bitwise_xor.reduce(operand.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(found, operand.dtype)]

    return reduced
