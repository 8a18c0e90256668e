"""Structural tags of xgrammar, as vLLM and SGLang accept them: text in which tags with constrained content begin at triggers.

The forms are those of xgrammar's documentation; each object becomes an expression of a Lark grammar. A form that is not known, or
that llguidance could not follow exactly, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from gateway.structure.grammar import GrammarTextError, of_ebnf, of_json_schema, of_regex_text
from gateway.structure.lark import Lark, TokenOf

MAX_PARTS = 2048
"""Most rules of a grammar. Each of several ends of a tag repeats its content, so nested tags could become any number."""
T = TypeVar("T", bound=msgspec.Struct)


class Tag(msgspec.Struct, tag_field="type", tag="tag", forbid_unknown_fields=True):
    """``begin``, content and ``end``."""

    begin: str
    content: dict[str, Any]
    end: str | list[str]


class TriggeredTags(msgspec.Struct, forbid_unknown_fields=True):
    """Text, in which each of ``triggers`` must be the beginning of one of ``tags``."""

    triggers: Annotated[list[str], msgspec.Meta(max_length=128)]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class SeparatedTags(msgspec.Struct, forbid_unknown_fields=True):
    """Tags with a separator between them."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


def of_structural_tag(given: dict[str, Any], token_of: TokenOf) -> str:
    """Return the grammar of ``{"format": …}``, or of the older form with ``structures`` and ``triggers``.

    Raises :class:`GrammarTextError`.
    """
    lark = Lark(token_of)
    format = given.get("format") or _of_structures(given)
    return lark.build(lark.rule("tags", _Formats(lark).expression(format, "format", None)))


def _of_structures(given: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GrammarTextError("it needs `format`, or `structures` and `triggers`")
    tags = []
    for place, each in enumerate(structures):
        if not isinstance(each, dict) or not {"begin", "end"} <= each.keys():
            raise GrammarTextError(f"structures[{place}] needs `begin`, `schema` and `end`")
        content = {"type": "json_schema", "json_schema": each.get("schema", {})}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Formats:
    """Makes expressions. ``end`` is the text that follows a format and ends it: None at the end of the output, empty where
    something else follows."""

    def __init__(self, lark: Lark) -> None:
        self._lark = lark
        self._names = 0
        self._kinds: dict[str, Callable[[dict[str, Any], str, str | None], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated_tags,
        }

    def expression(self, format: Any, path: str, end: str | None) -> str:
        """Return an expression for ``format`` and the text ``end`` behind it. ``path``: of ``format`` in the request."""
        kind = format.get("type") if isinstance(format, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise GrammarTextError(f"{path}.type is one of {', '.join(self._kinds)}")
        return self._lark.rule(self._name("format"), self._kinds[kind](format, path, end))

    def _name(self, prefix: str) -> str:
        self._names += 1
        if self._names > MAX_PARTS:
            raise GrammarTextError(f"it needs more than {MAX_PARTS} rules; send fewer tags")
        return f"{prefix}_{self._names}"

    def _end(self, end: str | None) -> str:
        return self._lark.spelled(end) if end else ""

    def _const_string(self, format: dict[str, Any], path: str, end: str | None) -> str:
        return f"{self._lark.spelled(_text(format, 'value', path))} {self._end(end)}"

    def _json_schema(self, format: dict[str, Any], path: str, end: str | None) -> str:
        if format.get("style", "json") != "json":
            raise GrammarTextError(f"{path}.style is not supported, except json")
        schema = format.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise GrammarTextError(f"{path}.json_schema is not a schema")
        return f"{self._lark.embedded(self._name('schema'), of_json_schema(schema))} {self._end(end)}"

    def _regex(self, format: dict[str, Any], path: str, end: str | None) -> str:
        """A text that ends it is the first one."""
        pattern = of_regex_text(_text(format, "pattern", path))
        if end:
            return self._lark.text_until(self._name("pattern"), end, begin=pattern)
        return self._lark.rule(self._name("PATTERN"), pattern)

    def _grammar(self, format: dict[str, Any], path: str, end: str | None) -> str:
        grammar = of_ebnf(_text(format, "grammar", path))
        return f"{self._lark.embedded(self._name('grammar'), grammar)} {self._end(end)}"

    def _any_text(self, format: dict[str, Any], path: str, end: str | None) -> str:
        without = _texts(format, "excludes", path) if format.get("excludes") else []
        return self._text(path, end, without)

    def _text(self, path: str, end: str | None, without: Sequence[str]) -> str:
        if end == "":
            raise GrammarTextError(f"{path} has any text, so it must be the last of a sequence or have a tag with an end around it")
        textual = [text for text in without if not self._lark.has_control(text)]  # control tokens are no text
        if end is None:
            return self._lark.text_without(self._name("rest"), textual)
        return self._lark.text_until(self._name("rest"), end, textual)

    def _sequence(self, format: dict[str, Any], path: str, end: str | None) -> str:
        elements = _list(format, "elements", path)
        ends = [*[""] * (len(elements) - 1), end]
        return " ".join(self.expression(each, f"{path}.elements[{at}]", ends[at]) for at, each in enumerate(elements))

    def _or(self, format: dict[str, Any], path: str, end: str | None) -> str:
        elements = _list(format, "elements", path)
        return " | ".join(self.expression(each, f"{path}.elements[{at}]", end) for at, each in enumerate(elements))

    def _repeated(self, format: dict[str, Any], path: str, end: str | None) -> str:
        sign = {"optional": "?", "star": "*", "plus": "+"}[format["type"]]
        return f"({self.expression(format.get('content'), f'{path}.content', '')}){sign} {self._end(end)}"

    def _tag(self, format: dict[str, Any], path: str, end: str | None) -> str:
        return self._tag_behind("", _read(format, Tag, path), path, end)

    def _tag_behind(self, trigger: str, tag: Tag, path: str, end: str | None) -> str:
        """Match ``tag`` without ``trigger``, with which it begins and which was matched."""
        begin = self._lark.spelled(tag.begin[len(trigger) :])
        ends = tag.end if isinstance(tag.end, list) else [tag.end]
        inner = [
            self.expression(tag.content, f"{path}.content", each or end) + (f" {self._end(end)}" if each else "") for each in ends
        ]
        if not inner:
            raise GrammarTextError(f"{path}.end is empty")
        return f"{begin} ({' | '.join(inner)})"

    def _separated_tags(self, format: dict[str, Any], path: str, end: str | None) -> str:
        given = _read({name: value for name, value in format.items() if name != "type"}, SeparatedTags, path)
        tags = [self._tag_behind("", tag, f"{path}.tags[{at}]", "") for at, tag in enumerate(given.tags)]
        tag = self._lark.rule(self._name("tag"), " | ".join(tags) or _missing(path))
        more = "" if given.stop_after_first else f"({self._lark.spelled(given.separator)} {tag})*"
        return f"({tag} {more}){'' if given.at_least_one else '?'} {self._end(end)}"

    def _triggered_tags(self, format: dict[str, Any], path: str, end: str | None) -> str:
        given = _read({name: value for name, value in format.items() if name != "type"}, TriggeredTags, path)
        triggers = _triggers(given, path)
        stops = [*triggers, *([end] if end else [])]
        found = []
        for trigger in triggers:
            if self._lark.has_control(trigger) and self._lark.spelled(trigger).startswith('"'):
                raise GrammarTextError(f"{path}.triggers: text before a control token is not possible")
            before = self._text(path, trigger, [stop for stop in stops if stop != trigger])
            tags = [
                self._tag_behind(trigger, tag, f"{path}.tags[{at}]", "")
                for at, tag in enumerate(given.tags)
                if _trigger_of(tag, triggers) == trigger
            ]
            found.append(f"{before} ({' | '.join(tags)})")
        tag = self._lark.rule(self._name("tag"), " | ".join(found))
        if given.stop_after_first:
            first = f"{tag} {self._end(end)}"
            return first if given.at_least_one else f"{first} | {self._text(path, end, triggers)}"
        return f"{tag}{'+' if given.at_least_one else '*'} {self._text(path, end, triggers)}"


def _triggers(given: TriggeredTags, path: str) -> list[str]:
    """Return the triggers that can be met: not those that begin with another one. Raises :class:`GrammarTextError`."""
    if not given.tags or not given.triggers or not all(given.triggers):
        raise GrammarTextError(f"{path} needs `tags`, and `triggers` that are not empty")
    met = [each for each in dict.fromkeys(given.triggers) if not any(each != o and each.startswith(o) for o in given.triggers)]
    for at, tag in enumerate(given.tags):
        if _trigger_of(tag, met) is None:
            raise GrammarTextError(f"{path}.tags[{at}].begin begins with none of the triggers")
    for trigger in met:
        if all(_trigger_of(tag, met) != trigger for tag in given.tags):
            raise GrammarTextError(f"{path}: no tag begins with the trigger {trigger[:64]!r}")
    return met


def _trigger_of(tag: Tag, triggers: Sequence[str]) -> str | None:
    return next((trigger for trigger in triggers if tag.begin.startswith(trigger)), None)


def _read(format: dict[str, Any], kind: type[T], path: str) -> T:
    try:
        return msgspec.convert(format, kind)
    except msgspec.ValidationError as error:
        raise GrammarTextError(f"{path}: {error}") from None


def _text(format: dict[str, Any], name: str, path: str) -> str:
    value = format.get(name)
    if not isinstance(value, str):
        raise GrammarTextError(f"{path}.{name} is not a text")
    return value


def _list(format: dict[str, Any], name: str, path: str) -> list[Any]:
    value = format.get(name)
    return value if isinstance(value, list) and value else _missing(f"{path}.{name}")


def _texts(format: dict[str, Any], name: str, path: str) -> list[str]:
    value = _list(format, name, path)
    if not all(isinstance(each, str) and each for each in value):
        raise GrammarTextError(f"{path}.{name} is not a list of texts")
    return value


def _missing(path: str) -> Any:
    raise GrammarTextError(f"{path} is not a list with elements")
