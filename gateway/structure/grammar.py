"""Converts each form of a constraint to a grammar of llguidance. These functions convert; ``compile.py`` checks the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from gateway.structure.schema import InexactNumber, for_llguidance

WHITESPACE = r"[ ]?|\r?\n[ \t]{0,20}"
"""Whitespace between the tokens of JSON, unless the schema's ``x-guidance`` says otherwise: one space, or a line break and an
indent. Without a bound, a model may write whitespace until its tokens run out."""


REGEX_START = "start: "
"""Beginning of the grammar of a regular expression, before the expression."""


class GrammarTextError(ValueError):
    """The text of a grammar cannot be read. The message is a clause for the client."""


def of_json_schema(schema: dict[str, Any] | bool) -> str:
    """A grammar for JSON that a schema describes. Raises :class:`GrammarTextError` for numbers that cannot be enforced exactly."""
    whole: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {"allOf": [schema]}
    options = whole.get("x-guidance", {})
    if isinstance(options, dict) and options.get("whitespace_flexible", True):
        whole["x-guidance"] = {"whitespace_pattern": WHITESPACE, **options}
    try:
        return msgspec.json.encode({"grammars": [{"json_schema": for_llguidance(whole)}]}).decode()
    except InexactNumber as error:
        raise GrammarTextError(str(error)) from None
    except (OverflowError, msgspec.MsgspecError, RecursionError) as error:
        raise GrammarTextError(str(error)) from None


def of_json_object() -> str:
    """A grammar for any JSON object."""
    return of_json_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """A grammar for texts that ``pattern``, in the syntax of Rust's regex crate, matches as a whole. ``\\d``, ``\\w`` and
    ``\\s`` are ASCII characters."""
    return of_lark(f"{REGEX_START}/{regex_to_lark(pattern, use_ascii='dws')}/")


def of_choice(choices: Sequence[str]) -> str:
    """A grammar for one of several texts."""
    return of_lark("start: " + "\n    | ".join(json.dumps(choice) for choice in choices))


def of_lark(text: str) -> str:
    """A grammar in llguidance's Lark dialect. ``<|im_end|>`` and ``<[1234]>`` name control tokens, ``%json {...}`` embeds a
    schema."""
    return text


def of_ebnf(text: str) -> str:
    """A grammar in Lark, or in GBNF (llama.cpp's and xgrammar's EBNF, with ``::=``). Raises :class:`GrammarTextError`."""
    try:
        return of_lark(any_to_lark(text))
    except RecursionError:
        raise GrammarTextError("it is nested too deeply") from None
    except Exception as error:  # the library raises bare Exception
        raise GrammarTextError(str(error)) from None
