"""Checks that a chat template uses only constructs whose work can be metered, and inserts the meter into it.

A template is a syntax tree. Between two places of the meter it runs straight through statements whose number is known, and each of
their operations either takes constant time or is metered where it happens (``metered_template.py``). Any construct that is not
listed here is refused, so the proof does not depend on what Jinja may add.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, cast

from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.visitor import NodeTransformer

STEP, CONCAT, SLICE = " step", " concat", " slice"
"""Names of the meter's own filters. No template can spell them."""
MAX_DEPTH = 64
"""Deepest nesting of a syntax tree, which compiling and running follow recursively."""
_DATA_CHARACTERS = 64
"""Characters of plain text that count as one step."""

_STATEMENTS = (nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Assign, nodes.AssignBlock, nodes.Macro)
_LOOP_CONTROLS = (nodes.Break, nodes.Continue)
_VALUES = (nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)
_ACCESS = (nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Keyword, nodes.Filter, nodes.Test)
_OPERATORS = (
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos),
    *(nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Concat, nodes.Compare, nodes.Operand),
)
_KNOWN = frozenset((*_STATEMENTS, *_LOOP_CONTROLS, *_VALUES, *_ACCESS, *_OPERATORS))
_RESERVED = {"self", "super", "caller", "varargs", "kwargs", *(DEFAULT_NAMESPACE.keys() - {"range", "namespace"})}
_TESTS = {"eq": "eq", "ne": "ne", "gt": "gt", "gteq": "ge", "lt": "lt", "lteq": "le", "in": "in", "notin": "in"}
"""The test that has the meaning of each operator."""


class UnmeteredError(ValueError):
    """A template has a construct that is not metered. The message names it."""


def metered(template: nodes.Template, filters: Set[str], tests: Set[str]) -> nodes.Template:
    """Return ``template`` with the meter in it. ``filters`` and ``tests``: names of those that are metered. Raises
    :class:`UnmeteredError`."""
    _check(template, filters, tests, MAX_DEPTH)
    changed = cast(nodes.Template, _Meter().visit(template))
    assert template.environment is not None
    changed.set_environment(template.environment)
    return changed


def _check(node: nodes.Node, filters: Set[str], tests: Set[str], depth: int) -> None:
    kind = type(node)
    if kind not in _KNOWN or not depth:
        raise UnmeteredError(f"line {node.lineno}: {kind.__name__}")
    if isinstance(node, nodes.Filter | nodes.Test) and node.name not in (filters if isinstance(node, nodes.Filter) else tests):
        raise UnmeteredError(f"line {node.lineno}: {kind.__name__} {node.name}")
    if _is_unmetered(node):
        raise UnmeteredError(f"line {node.lineno}: this form of {kind.__name__}")
    for child in node.iter_child_nodes():
        _check(child, filters, tests, depth - 1)


def _is_unmetered(node: nodes.Node) -> bool:
    """Whether a node of a known kind has a form that is not metered."""
    match node:
        case nodes.For():
            return node.recursive
        case nodes.AssignBlock():
            return node.filter is not None
        case nodes.Name():
            return node.name in _RESERVED or node.name.startswith("_")
        case nodes.Getattr():
            return node.attr.startswith("_")
        case nodes.Keyword():
            return node.key.startswith("_")
        case nodes.Filter() | nodes.Test() | nodes.Call():
            return (
                node.dyn_args is not None or node.dyn_kwargs is not None or (isinstance(node, nodes.Filter) and node.node is None)
            )
        case nodes.Compare():
            return len(node.ops) != 1
        case nodes.Macro():
            return not all(isinstance(default, nodes.Const) for default in node.defaults)
        case nodes.List():  # lists within lists would share their parts, and become long when they are written
            return not all(isinstance(item, nodes.Const) for item in node.items)
        case nodes.Dict():
            return not all(isinstance(pair.value, nodes.Const) for pair in node.items)
        case nodes.Tuple():
            return node.ctx == "load" and not all(isinstance(item, nodes.Const) for item in node.items)
    return False


class _Meter(NodeTransformer):
    """Inserts steps, and replaces the operators that Jinja's environment does not intercept by filters and tests."""

    def visit_Template(self, node: nodes.Template) -> nodes.Node:
        return self._stepping(node, "body")

    visit_Macro = visit_AssignBlock = visit_Template

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            step = nodes.Filter(nodes.Const(_steps(node.test)), STEP, [], [], None, None)
            node.test = nodes.And(nodes.Not(step), node.test)
        return self._stepping(node, "body", "else_")

    def visit_If(self, node: nodes.If) -> nodes.Node:
        return self._stepping(node, "body", "else_")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node.nodes[0], CONCAT, node.nodes[1:], [], None, None)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return nodes.Filter(node.node, SLICE, ends, [], None, None)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        (operand,) = node.ops
        test = nodes.Test(node.expr, _TESTS[operand.op], [operand.expr], [], None, None)
        return nodes.Not(test) if operand.op == "notin" else test

    def _stepping(self, node: Any, *bodies: str) -> nodes.Node:
        """Insert a step at the beginning of each body, also of an empty loop."""
        steps = [(name, 1 + sum(map(_steps, getattr(node, name)))) for name in bodies]
        self.generic_visit(node)
        for name, count in steps:
            if name == "body" or node.else_:
                step = nodes.Filter(nodes.Const(count), STEP, [], [], None, None)
                getattr(node, name).insert(0, nodes.ExprStmt(step))
        return cast(nodes.Node, node)


def _steps(node: nodes.Node) -> int:
    """Return the number of steps of a statement or expression, without bodies that have steps of their own."""
    bodies = isinstance(node, nodes.For | nodes.If | nodes.Macro | nodes.AssignBlock)
    count = 1 + (len(node.data) // _DATA_CHARACTERS if isinstance(node, nodes.TemplateData) else 0)
    return count + sum(_steps(child) for child in node.iter_child_nodes(exclude=("body", "else_") if bodies else ()))
