"""The command line of ``python -m yardstick_llm.engine``, derived from :mod:`engine.settings`."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta

from yardstick_llm.engine import wire
from yardstick_llm.engine.settings import EngineSettings, ServerSettings

NOT_OPTIONS = ("overlap", "fused_products", "dist_token_file")
"""Settings that only programs set."""

T = TypeVar("T", bound=msgspec.Struct)


class Option(NamedTuple):
    """One setting as an option."""

    name: str
    """Name of the setting."""
    kind: type
    """str, int or float."""
    required: bool
    default: Any
    choices: tuple[str, ...]
    unset: str | None
    """The default in words, where it is no constant."""
    repeated: bool
    """Whether it may be given several times; the values are a list."""
    bounds: dict[str, float]
    """By the names of :class:`msgspec.Meta`: ge, gt, le, lt."""
    description: str
    """The docstring, as one line."""

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default, for a person."""
        if self.required:
            return "required"
        if self.unset is not None:
            return self.unset
        if self.repeated:
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def summary(self) -> str:
        """First sentence of the description."""
        return self.description.partition(". ")[0].removesuffix(".")


@cache
def options_of(settings: type[msgspec.Struct]) -> tuple[Option, ...]:
    """All settings of a struct that are options, in order."""
    notes, hints = attribute_docstrings(settings), get_type_hints(settings, include_extras=True)
    fields = [field for field in msgspec.structs.fields(settings) if field.name not in NOT_OPTIONS]
    return tuple(_option(field, hints[field.name], notes[field.name]) for field in fields)


class _Parser(argparse.ArgumentParser):
    """Prints an error as all errors at the start are printed: one line that begins with the program's name."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"engine: {message}; see `yardstick engine --help`\n")


def add_options(parser: argparse._ActionsContainer, settings: type[msgspec.Struct]) -> None:
    """Add the options of a struct of settings."""
    for option in options_of(settings):
        parser.add_argument(
            option.flag,
            action="append" if option.repeated else "store",
            type=_reader(option),
            choices=option.choices or None,
            required=option.required and option.unset is None,
            help=f"{option.summary} ({option.default_text})".replace("``", "").replace("%", "%%"),
        )


def parser() -> argparse.ArgumentParser:
    """The parser of ``python -m yardstick_llm.engine``."""
    parser = _Parser("python -m yardstick_llm.engine", description="Serve one model to Yardstick gateways.")
    for settings in (EngineSettings, ServerSettings):
        add_options(parser.add_argument_group((settings.__doc__ or "").removesuffix(".")), settings)
    return parser


def parse(arguments: Sequence[str] | None = None) -> tuple[EngineSettings, ServerSettings]:
    """Settings from the command line. Exits with status 2 and a line that names the option where it is wrong."""
    given = {name: value for name, value in vars(parser().parse_args(arguments)).items() if value is not None}
    given.setdefault("name", wire.served_name(given["model"]))
    return made(EngineSettings, given), made(ServerSettings, given)


@cache
def attribute_docstrings(settings: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring under each attribute, as one line; the source alone has them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, note in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(note, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(note.value).split())
    return found


def made(settings: type[T], given: dict[str, Any]) -> T:
    """Return settings from the values of their options."""
    return settings(**{name: given[name] for name in settings.__struct_fields__ if name in given})


def _option(field: msgspec.structs.FieldInfo, hint: Any, description: str) -> Option:
    kind, metas = _unpack(hint)
    extra: dict[str, Any] = {}
    bounds: dict[str, float] = {}
    for meta in metas:
        extra |= meta.extra or {}
        bounds |= {name: value for name in ("ge", "gt", "le", "lt") if (value := getattr(meta, name)) is not None}
    return Option(
        name=field.name,
        kind=kind,
        repeated=get_origin(_plain(hint)) is list,
        required=field.required and extra.get("unset") is None,
        default=None if field.default is NODEFAULT else field.default,
        choices=tuple(extra.get("choices", ())),
        unset=extra.get("unset"),
        bounds=bounds,
        description=description,
    )


def _unpack(hint: Any) -> tuple[type, list[Meta]]:
    """The plain type of an annotation, and all its metadata."""
    if get_origin(hint) is Annotated:
        kind, metas = _unpack(get_args(hint)[0])
        return kind, metas + [meta for meta in hint.__metadata__ if isinstance(meta, Meta)]
    if get_origin(hint) is list:
        return _unpack(get_args(hint)[0])
    if get_origin(hint) in (types.UnionType, Union):
        return _unpack(next(part for part in get_args(hint) if part is not type(None)))
    return hint, []


def _plain(hint: Any) -> Any:
    """The type of an annotation without metadata."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _reader(option: Option) -> Callable[[str], Any]:
    """Reads a value of the option from its text."""

    def read(text: str) -> Any:
        value = option.kind(text)
        if problem := _problem(value, option.bounds):
            raise argparse.ArgumentTypeError(problem)
        return value

    read.__name__ = option.kind.__name__  # argparse shows this name if the text is not a number
    return read


_CHECKS: dict[str, tuple[Callable[[Any, float], bool], str]] = {
    "ge": (lambda value, bound: value >= bound, "at least"),
    "gt": (lambda value, bound: value > bound, "greater than"),
    "le": (lambda value, bound: value <= bound, "at most"),
    "lt": (lambda value, bound: value < bound, "less than"),
}


def _problem(value: Any, bounds: dict[str, float]) -> str | None:
    """Which bounds ``value`` must keep, where it does not."""
    if all(_CHECKS[name][0](value, bound) for name, bound in bounds.items()):
        return None
    return "must be " + " and ".join(f"{_CHECKS[name][1]} {bound:g}" for name, bound in bounds.items())
