"""Jinja's sandbox with a meter: what each operation of a chat template costs.

``metered_syntax.py`` inserts a step at the beginning of every body of statements, whose cost is the number of operations up to the
next step. Here every operation whose time depends on a size costs as much as it reads and makes. So no operation takes more than
some microseconds for each unit, and the allowance bounds the time. Values that are not metered (objects within lists that a
template builds, formats, other functions) are not accepted at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from types import BuiltinFunctionType, CodeType
from typing import Any, NoReturn, cast

from jinja2 import pass_environment
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

from gateway.text.bounds import NeedsWorker
from gateway.text.chat_template import Environment
from gateway.text.metered_syntax import CONCAT, SLICE, STEP, metered

ALLOWANCE = 3000
"""Cost of the longest run, which takes at most some 1.5 ms. Ten messages cost 1,300 in Qwen3's template."""
_TEXT_SHIFT = 4
"""Binary logarithm of the characters that one unit of cost reads or makes."""
_MOST_DIGITS = 64
_MOST_FORMAT, _FORMAT_COST = 256, 50
"""Longest argument of a function, such as a format of dates, and the cost of a call."""
_MOST_INTEGER = 1 << 31

_SCALARS = frozenset({int, float, bool, type(None), Undefined})
_PLAIN = _SCALARS | {str}
_HELD = _PLAIN | {list, dict}
_TEXT_METHODS = frozenset({
    *("strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower", "capitalize", "title", "find", "count"),
    *("split", "rsplit", "splitlines", "removeprefix", "removesuffix", "isdigit", "isspace"),
})  # fmt: skip
_FUNCTIONS = ("range", "raise_exception", "strftime_now")
_MAPPING_METHODS = frozenset({"items", "keys", "values", "get"})
_TEXT_FILTERS = ("trim", "upper", "lower", "capitalize", "string", "int")
_FREE_FILTERS = ("default", "d", "length", "count", "first", "last", "items")
_LIST_FILTERS = ("list", "selectattr", "rejectattr", "map")
_FREE_TESTS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float", "boolean")
_NUMBER_TESTS = ("true", "false", "odd", "even", "divisibleby")
_COMPARISONS = {
    **dict.fromkeys(("eq", "==", "equalto"), operator.eq),
    **dict.fromkeys(("ne", "!="), operator.ne),
    **dict.fromkeys(("gt", ">", "greaterthan"), operator.gt),
    **dict.fromkeys(("lt", "<", "lessthan"), operator.lt),
    **dict.fromkeys(("ge", ">="), operator.ge),
    **dict.fromkeys(("le", "<="), operator.le),
}


class MeteredEnvironment(Environment):
    """The sandbox with a meter. All that is not named here is refused. Not safe to use from several threads."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(finalize=_finalize, optimized=False)
        self.left = ALLOWANCE
        """Units that the current run may still cost."""
        filters = self.filters
        self._known = {name: self._reading(filters[name]) for name in _TEXT_FILTERS} | {
            **{name: self._free(filters[name]) for name in _FREE_FILTERS},
            **{name: self._for_each(filters[name]) for name in _LIST_FILTERS},
            "join": self._joining(filters["join"]),
            "replace": self._replacing(filters["replace"]),
            "tojson": self._writing(filters["tojson"]),
        }
        self.filters = self._known | {STEP: self._step, CONCAT: self._concat, SLICE: self._slice}
        tests = cast("dict[str, Any]", self.tests)
        self.tests = {
            **{name: self._free(tests[name]) for name in _FREE_TESTS},
            **{name: self._reading(tests[name]) for name in _NUMBER_TESTS},
            **{name: self._comparing(compare) for name, compare in _COMPARISONS.items()},
            "in": self._contains,
        }
        self._functions: list[Any] = [self.globals[name] for name in _FUNCTIONS]
        self.globals = {name: self.globals[name] for name in _FUNCTIONS} | {"namespace": _Namespace}

    def compile_metered(self, source: str) -> CodeType:
        """Compile a template with the meter in it. Raises :class:`UnmeteredError`, :class:`NeedsWorker` and Jinja's errors."""
        return self.compile(metered(self.parse(source), self._known.keys(), self.tests.keys()))

    def take(self, cost: int) -> None:
        """Count ``cost``. Raises :class:`NeedsWorker`."""
        self.left -= cost
        if self.left < 0:
            raise NeedsWorker

    def handle_exception(self, source: str | None = None) -> NoReturn:  # noqa: ARG002 - Jinja's signature
        """Raise the template's error as it is: a worker meets it again, and rewriting its traceback takes a millisecond."""
        raise

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002 - Jinja's signature
        """Compute a metered operation."""
        if operator == "+" and type(left) is str:
            self.take(1 + (len(left) + len(right) >> _TEXT_SHIFT) if type(right) is str else 1)
            return left + right  # an error for other types
        self.take(1)
        if operator == "**" or not (_is_small(left) and _is_small(right)):
            raise NeedsWorker
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, or one of the methods and functions that are metered."""
        kwargs.pop("_loop_vars", None)  # of Jinja's own
        kwargs.pop("_block_vars", None)
        kind, values = type(__obj), (*args, *kwargs.values())
        if kind is Macro:
            __self.take(8 + len(values))
            return super().call(__context, __obj, *args, **kwargs)
        if __obj is _Namespace:
            __self.take(1 + len(values))
            return _Namespace(*args, **kwargs)
        __self._read(values)
        if kind is BuiltinFunctionType:
            owner = __obj.__self__
            methods = _TEXT_METHODS if type(owner) is str else _MAPPING_METHODS if type(owner) is dict else ()
            if __obj.__name__ in methods:
                __self.take(1 + (len(owner) >> _TEXT_SHIFT))
                result = __obj(*args, **kwargs)
                __self.take(len(result) if type(result) is list else 1)
                return result
            if __obj.__name__ == "replace" and type(owner) is str:
                return __self._replaced(owner, __obj, *args, **kwargs)
        elif __obj in __self._functions and all(len(str(value)) <= _MOST_FORMAT for value in values):
            __self.take(_FORMAT_COST)
            return __obj(*args, **kwargs)
        raise NeedsWorker

    def _read(self, values: Any) -> None:
        """Count the reading of plain values."""
        cost = 1
        for value in values:
            kind = type(value)
            if kind is str:
                cost += len(value) >> _TEXT_SHIFT
            elif kind not in _SCALARS:
                raise NeedsWorker
        self.take(cost)

    def _replaced(self, text: str, replace: Callable[..., str], old: Any, new: Any, *count: Any, **named: Any) -> str:
        self._read((text, old, new, *count, *named.values()))
        self.take((len(text) + 1) * (1 + len(str(new))) >> _TEXT_SHIFT)
        return replace(old, new, *count, **named)

    def _step(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise NeedsWorker

    def _concat(self, *values: Any) -> str:
        self._read(values)
        return "".join(map(str, values))

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        self.take(1 + (len(value) >> _TEXT_SHIFT if type(value) is str else len(value) if type(value) is list else 0))
        return value[start:stop:step]

    def _contains(self, value: Any, within: Any) -> bool:
        kind = type(within)
        if type(value) not in _PLAIN:
            raise NeedsWorker
        if kind is str:
            self.take(1 + (len(within) * min(len(str(value)), 16) >> 2 * _TEXT_SHIFT))
        elif kind in (list, tuple):
            self.take(1 + len(within))
        elif kind is dict or kind is Undefined:
            self.take(1)
        else:
            raise NeedsWorker
        return value in within

    def _free(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Meter a function that takes constant time."""

        @wraps(function)
        def counted(*values: Any, **named: Any) -> Any:
            self.take(1)
            return function(*values, **named)

        return counted

    def _reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Meter a function that reads plain values. A number that is read from text is short."""
        numbers = function.__name__ == "do_int"

        @wraps(function)
        def counted(*values: Any, **named: Any) -> Any:
            self._read((*values, *named.values()))
            if numbers and type(values[0]) is str and len(values[0]) > _MOST_DIGITS:
                raise NeedsWorker
            return function(*values, **named)

        return counted

    def _comparing(self, compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Meter a comparison. One of both values is plain, because whole lists may be long."""

        def counted(left: Any, right: Any) -> Any:
            if type(left) not in _PLAIN and type(right) not in _PLAIN:
                raise NeedsWorker
            self.take(1 + (min(len(left), len(right)) >> _TEXT_SHIFT) if type(left) is str and type(right) is str else 1)
            return compare(left, right)

        return counted

    def _for_each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Meter a filter that does something cheap, or metered, for each item of a list."""
        given, copies = int(hasattr(function, "jinja_pass_arg")), function is self.filters["list"]

        @wraps(function)
        def counted(*values: Any, **named: Any) -> Any:
            items = values[given]
            self._read((*values[given + 1 :], *named.values()))
            if hasattr(items, "__len__"):
                self.take(1 + 4 * len(items))
            elif not copies:  # a generator, whose items have been counted once
                raise NeedsWorker
            return function(*values, **named)

        return counted

    def _joining(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(context: Any, items: Any, *values: Any, **named: Any) -> Any:
            if type(items) is not list or named or len(values) > 1:
                raise NeedsWorker
            self._read(items)
            self._read(values)
            self.take(len(items) * (1 + sum(len(str(value)) for value in values) >> _TEXT_SHIFT))
            return function(context, items, *values)

        return counted

    def _replacing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(context: Any, text: Any, old: Any, new: Any) -> Any:
            self._read((text,))
            return self._replaced(str(text), lambda old, new: str(function(context, text, old, new)), old, new)

        return counted

    def _writing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Meter ``tojson``. With an indent, which Python's slow encoder writes, it is left to workers."""

        def counted(value: Any) -> str:
            if type(value) not in _HELD:
                raise NeedsWorker
            text: str = function(value)
            self.take(1 + (len(text) >> 2))
            return text

        counted.metered = True  # type: ignore[attr-defined]
        return counted


class _Namespace(Namespace):
    """A namespace without other namespaces in it, so that no value contains another one twice."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        if len(args) > 1 or any(type(value) not in _HELD for value in kwargs.values()):
            raise NeedsWorker
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        if type(value) not in _HELD:
            raise NeedsWorker
        super().__setitem__(name, value)


@pass_environment
def _finalize(environment: MeteredEnvironment, value: Any) -> Any:
    """Count a value that is written."""
    environment._read((value,))
    return value


def _is_small(value: Any) -> bool:
    """Whether arithmetic with a value takes constant time: a number, or one of the values for which it is an error."""
    return type(value) in _SCALARS and (type(value) is not int or abs(value) < _MOST_INTEGER)
