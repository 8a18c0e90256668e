"""Faster versions of functions of Triton's interpreter, with the same results.

Triton 3.7 replaces some 150 attributes of ``triton.language`` at each launch, and again at each call of one kernel function by
another, which takes 2 ms each time. It reduces by XOR element by element in Python, and ``tl.topk`` does so dozens of times. It
computes whether an operation of integers overflows, in eight more operations, and then drops the result unless it is debugging.
It describes the shape of each value anew. It compares shapes and unwraps constants with several type checks for each number,
and passes the arguments of each operation through three functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Permanent:
    """The scope of replaced attributes that stay replaced; the process interprets all its kernels."""

    def restore(self) -> None: ...


def speed_up() -> None:
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _xor_in_numpy(interpreter.ReduceOps.generic_reduce)
    check = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = _where_debugging(check)
    tl.block_type.__init__ = _by_element_and_shape(tl.block_type.__init__)
    tl.tensor.__init__ = _set_up_tensor
    TritonSemantic.broadcast_impl_value = _where_shapes_differ(TritonSemantic.broadcast_impl_value)
    tl.core._unwrap_if_constexpr = _by_type(tl.core._unwrap_if_constexpr)
    tl.dtype.__eq__ = _of_others(tl.dtype.__eq__)
    interpreter._patch_attr = _call_directly


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
            self.of_tensors = tl.tuple([tl.constexpr(each) for each in self.shape]), tl.constexpr(math.prod(self.shape))
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return set_up_block


def _set_up_tensor(self: Any, handle: Any, type: Any) -> None:
    """``tensor.__init__`` with the shape in Triton's constants that :func:`_by_element_and_shape` adds to types."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _SCALAR


_SCALAR = tl.tuple([]), tl.constexpr(1)


def _where_shapes_differ(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast`` for what is not two blocks of the same rank, which are compared as lists of integers."""

    def broadcast_both(self: Any, left: Any, right: Any) -> Any:
        if not (left.type.is_block() and right.type.is_block()):
            return broadcast(self, left, right)
        ours, theirs = left.type.shape.values, right.type.shape.values
        if ours == theirs:
            return left, right
        if len(ours) != len(theirs) or any(1 not in pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]):
            return broadcast(self, left, right)
        shape = [max(pair) for pair in zip(ours, theirs, strict=True)]
        return tuple(
            each
            if each.type.shape.values == shape
            else self.tensor(self.builder.create_broadcast(each.handle, shape), tl.block_type(each.type.scalar, shape))
            for each in (left, right)
        )

    return broadcast_both


def _by_type(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``unwrap`` for constants and what may hold some; values of all other types are returned as they are."""
    plain = set[type]()

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        if not isinstance(value, tl.constexpr | list | tuple | tl.tuple):
            plain.add(kind)
        return unwrap(value)

    return unwrapped


def _of_others(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda one, other: one is other or equal(one, other)


_CHECKED = tl.core.builtin(lambda: None).__code__
"""Code of the function with which :func:`triton.language.core.builtin` wraps another: it checks the argument ``_semantic``."""


def _call_directly(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Stands for ``_patch_attr``: replace an operation by one that fills in ``_semantic``."""
    function = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKED else member

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **named)

    scope.set_attr(owner, name, call)


def _xor_in_numpy(reduce: Callable[[Any, Any], list[Any]]) -> Callable[[Any, Any], list[Any]]:
    def reduced(self: Any, operands: Any) -> list[Any]:
        if self.combine_fn != tl.standard._xor_combine:
            return reduce(self, operands)
        (operand,) = operands
        found = np.bitwise_xor.reduce(operand.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(found, operand.dtype)]

    return reduced
