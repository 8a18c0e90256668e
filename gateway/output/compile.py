"""Compiles grammars in text workers, to refuse those that engines could not follow.

A worker compiles a grammar as an engine will, and computes what may come first. Whatever takes longer than
:data:`COMPILE_SECONDS` is refused. llguidance cannot be interrupted and may overflow its stack, so each new grammar is compiled in
a child process: the kernel ends it at twice that time, and the worker lives on and remembers the grammar.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.wire import GRAMMAR_BOUNDS, GRAMMAR_LIMITS, GrammarVocabulary
from gateway.errors import InvalidRequest
from gateway.process.parent import ending_with

COMPILE_SECONDS = GRAMMAR_BOUNDS.seconds / 2
"""Most CPU time that one grammar takes. Engines allow twice as much, so that they refuse none that passed."""
NICE = 5
"""Compiling processes leave the processors to other requests."""

STACK_BYTES = 1 << 20
"""Stack of the compiling process. Threads of engines have more."""
MAX_PROBLEM_BYTES = 1 << 15
"""Longest problem that is reported; a pipe holds it."""
_SLOW = f"compiling takes longer than {COMPILE_SECONDS:g} s; send a simpler one"
_CRASHED = "it cannot be compiled; send a simpler one"
_ENDED: dict[int, str] = {
    signal.SIGPROF: _SLOW,
    signal.SIGSEGV: "it is nested too deeply; send a simpler one",
    signal.SIGABRT: "compiling takes too much memory; send a simpler one",
}
"""Problems of grammars by the signal that ended the compiling process."""

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
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        """The problem of each grammar, empty if there is none, by the digest of the grammar."""

    def check(self, grammar: str, param: str) -> None:
        """Raise :class:`InvalidRequest` if engines cannot follow ``grammar``. ``param``: the field that it was made from."""
        digest = hashlib.sha256(grammar.encode()).digest()
        problem = self._problems.get(digest)
        if problem is None:
            problem = self._problem_of(grammar)
            self._problems[digest] = problem
            if len(self._problems) > GRAMMAR_BOUNDS.kept:
                self._problems.popitem(last=False)
        self._problems.move_to_end(digest)
        if problem:
            raise _refusal(problem, grammar, param)

    def _problem_of(self, grammar: str) -> str:
        """Return the problem of ``grammar``, which a child process finds or is ended by."""
        ours, theirs = os.pipe()
        arm = ending_with(os.getpid(), signal.SIGKILL, 1)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                if arm is not None:
                    arm()
                os.nice(NICE)
                signal.setitimer(signal.ITIMER_PROF, 2 * COMPILE_SECONDS)
                resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
                os.write(theirs, self._compiled(grammar).encode()[:MAX_PROBLEM_BYTES])
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            problem = pipe.read().decode(errors="ignore")
        _, status = os.waitpid(pid, 0)
        return _ENDED.get(os.WTERMSIG(status), _CRASHED) if status else problem

    def _compiled(self, grammar: str) -> str:
        """Compile ``grammar`` and return its problem, empty if there is none."""
        began = time.process_time()
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error().strip() or _CRASHED
        return _SLOW if time.process_time() - began > COMPILE_SECONDS else ""


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
