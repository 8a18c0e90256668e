"""Structs derived from the schemas for decoding: strict about unknown fields, with fields for unsupported parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec


@cache
def variant(kind: type[msgspec.Struct], extras: tuple[str, ...] = (), *, strict: bool) -> type[msgspec.Struct]:
    """Return a subclass of ``kind`` to decode into.

    Each name in ``extras`` becomes a field with the raw JSON of the value, or ``UNSET``. ``strict``: unknown fields are errors, in
    nested structs too. Pickling an instance gives an instance of ``kind``.
    """
    if kind.__struct_config__.forbid_unknown_fields:
        return kind
    fields: list[Any] = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in extras]
    if strict:
        fields += _strict_fields(kind)
    names = tuple(field.name for field in msgspec.structs.fields(kind))

    def reduce(instance: msgspec.Struct) -> tuple[Any, ...]:
        return _rebuilt, (kind, [(name, getattr(instance, name)) for name in names])

    return msgspec.defstruct(
        kind.__name__,
        fields,
        bases=(kind,),
        module=kind.__module__,
        namespace={"__reduce__": reduce},
        kw_only=True,
        forbid_unknown_fields=strict,
    )


def _rebuilt(kind: type[msgspec.Struct], fields: Iterable[tuple[str, Any]]) -> msgspec.Struct:
    return kind(**dict(fields))


def _strict_fields(kind: type[msgspec.Struct]) -> list[Any]:
    """Return the fields of ``kind`` that hold structs, with strict variants of those structs."""
    found: list[Any] = []
    for field in msgspec.structs.fields(kind):
        annotation = _strict(field.type)
        if annotation == field.type:
            continue
        if field.required:
            found.append((field.name, annotation))
        else:
            assert field.default is not msgspec.NODEFAULT, "a field that holds structs has a plain default"
            found.append((field.name, annotation, field.default))
    return found


def _strict(annotation: Any) -> Any:
    """Return ``annotation`` with each struct replaced by its strict variant."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and origin is None:
        return variant(annotation, strict=True) if issubclass(annotation, msgspec.Struct) else annotation
    if origin is None or origin is Literal:
        return annotation
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        return Annotated[(_strict(inner), *notes)]
    parts = tuple(map(_strict, get_args(annotation)))
    return Union[parts] if origin in (Union, UnionType) else origin[parts]  # noqa: UP007 - the parts are not known before
