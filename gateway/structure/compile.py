"""Compiles grammars in text workers, to refuse those that engines could not follow.

A worker compiles a grammar as an engine will, and computes what may come first. Whatever takes longer than
:data:`COMPILE_SECONDS` is refused. llguidance cannot be interrupted, so the kernel ends the worker at twice that time.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.wire import GRAMMAR_LIMITS, GrammarVocabulary
from gateway.errors import InvalidRequest
from gateway.process.deadline import killed_after

COMPILE_SECONDS = 1.0
"""Most CPU time that one grammar takes."""
KEPT_GRAMMARS = 1024
"""Grammars whose result a worker remembers."""

_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords whose values have names of the schema's author as keys."""
_KEYWORDS = re.compile(r'Unimplemented keys: \["([^"\\]+)"')
_REWORDED = (
    (re.compile("NoExtensionBias"), "no text matches it, for example because a `$ref` leads only to itself"),
    (
        re.compile("Resource '(.*)' is not present in a registry.*"),
        r"the `$ref` to '\1' leads out of the schema; put that schema into `$defs`",
    ),
)
"""Errors of the library that do not say what is wrong, and the words for them."""


class GrammarCompiler:
    """Checks grammars for one tokeniser."""

    def __init__(self, tokens: list[bytes], control_ids: list[int], encode: Callable[[str], list[int]]) -> None:
        """``tokens``: bytes of every token; ``control_ids``: tokens that only a name in a grammar matches; ``encode``: text to
        token ids, without control tokens. Raises ValueError if the library cannot use the vocabulary."""
        end = len(tokens)  # an end-of-sequence token behind all others
        vocabulary = GrammarVocabulary(
            [*tokens, b"<end>"], [*control_ids, end], end, lambda text: encode(text.decode(errors="replace"))
        )
        try:
            self._vocabulary = LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        except BaseException as error:  # the library's panics are no Exception
            raise ValueError(str(error)) from error
        self._limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS._asdict())
        self._problems: OrderedDict[str, str] = OrderedDict()
        """The problem of each grammar, empty if there is none."""

    def check(self, grammar: str, param: str) -> None:
        """Raise :class:`InvalidRequest` if engines cannot follow ``grammar``. ``param``: the field that it was made from."""
        problem = self._problems.get(grammar)
        if problem is None:
            problem = self._problem_of(grammar)
            self._problems[grammar] = problem
            if len(self._problems) > KEPT_GRAMMARS:
                self._problems.popitem(last=False)
        self._problems.move_to_end(grammar)
        if problem:
            raise _refusal(problem, grammar, param)

    def _problem_of(self, grammar: str) -> str:
        began = time.process_time()
        with killed_after(2 * COMPILE_SECONDS):
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error().strip()
        if time.process_time() - began > COMPILE_SECONDS:
            return f"compiling takes longer than {COMPILE_SECONDS:g} s; send a simpler one"
        return ""


def _refusal(problem: str, grammar: str, param: str) -> InvalidRequest:
    """Name the problem, and the place of a keyword of a schema that is not supported."""
    reason = " ".join(problem.replace("<non-verbose/>", "").split()).rstrip(".")
    for expression, words in _REWORDED:
        reason = expression.sub(words, reason)
    found = _KEYWORDS.match(problem)
    if found is None or not grammar.startswith("{"):
        return InvalidRequest(f"`{param}` cannot be followed: {reason}.", param=param)
    schemas = [each["json_schema"] for each in msgspec.json.decode(grammar)["grammars"] if "json_schema" in each]
    place = next((path for schema in schemas for path in _places(schema, found[1], param)), param)
    if len(schemas) > 1:
        place = param
    return InvalidRequest(f"`{place}`: the keyword `{found[1]}` is not supported.", param=place)


def _places(schema: dict[str, Any], keyword: str, path: str) -> Iterator[str]:
    """Paths of the objects in ``schema`` that have ``keyword``. The schema's nesting is bounded."""
    level: list[tuple[str, Any]] = [(path, schema)]
    while level:
        for place, value in level:
            if isinstance(value, dict) and keyword in value and place.rpartition(".")[2] not in _NAMED:
                yield place
        level = [(f"{place}.{key}", part) for place, value in level if isinstance(value, dict) for key, part in value.items()] + [
            (f"{place}[{index}]", part) for place, value in level if isinstance(value, list) for index, part in enumerate(value)
        ]
