"""Numbers that PEFT's ``rank_pattern`` and ``alpha_pattern`` give to modules, by patterns of their names.

A pattern comes with an adapter, and a regular expression can take exponential time in :mod:`re`, which keeps all threads of the
engine's loop from running. RE2 takes linear time and bounded memory. It matches all patterns of a key at once, without the
interpreter's lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import re2

from engine.lora.errors import AdapterError

MAX_CHARACTERS = 512
MAX_BYTES_OF_ONE = 1 << 17
"""Most memory of RE2 for one pattern: about 2,000 instructions."""
MAX_BYTES = 1 << 23
"""Most memory of RE2 for all patterns of a key."""
_READ_OTHERWISE = re.compile(r"\{,|\[:|\\[1-9pPQC]")
"""Syntax that RE2 reads in another way than :mod:`re`, or that :mod:`re` refuses: ``{,3}``, ``[[:alpha:]]``, ``\\10``, ``\\pL`` and
others. RE2 also needs long to compile sets such as ``\\pL``."""


class PatternError(ValueError):
    """Patterns are not supported. The text goes on after the name of their key."""


class Patterns:
    """Numbers by patterns of the last parts of a module's name, as PEFT's ``get_pattern_key`` matches them. The first pattern that
    matches counts."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        """Raises :class:`PatternError`."""
        self._numbers = [*numbers.values()]
        self._set = re2.Set.SearchSet(_options(MAX_BYTES))
        for pattern in numbers:
            if problem := _problem(pattern):
                raise PatternError(f"has {pattern!r:.80}, which {problem}")
            self._set.Add(rf"(?:^|\.)(?:{pattern})$".encode())
        self._set.Add(b"")  # matches each name, so no match at all means that memory is lacking
        try:
            self._set.Compile()
        except re2.error:
            raise PatternError("has patterns that are too large together; use fewer or simpler ones") from None

    def number_of(self, module: str, default: float) -> float:
        """Return the number of a module, or ``default`` if no pattern matches its name. Raises :class:`AdapterError`."""
        found: list[int] | None = self._set.Match(module)
        if not found:
            raise AdapterError("rank_pattern or alpha_pattern takes too much memory; use fewer or simpler patterns.")
        return [*self._numbers, default][min(found)]


def _problem(pattern: str) -> str:
    """Return why a pattern is not supported; empty if it is."""
    if not 0 < len(pattern) <= MAX_CHARACTERS:
        return f"has {len(pattern)} characters, not 1 to {MAX_CHARACTERS}"
    if not pattern.isascii():
        return "has characters that are not ASCII; no module's name has any"
    if other := _READ_OTHERWISE.search(pattern):
        return f"contains {other[0]}, and that is not supported"
    alone = re2.Set.FullMatchSet(_options(MAX_BYTES_OF_ONE))
    try:
        alone.Add(pattern.encode())
    except re2.error:
        return f"RE2 cannot read ({_reason(pattern)}); it has no look-around and no back references"
    try:
        alone.Compile()
    except re2.error:
        return "is too large; use smaller counts of repetition"
    return ""


def _reason(pattern: str) -> str:
    """Return what RE2 says of a pattern that it cannot read. Its sets do not say it."""
    try:
        re2.compile(pattern.encode(), _options(MAX_BYTES_OF_ONE))
    except re2.error as error:
        return f"{error.args[0].decode():.80}"
    return "without a reason"


def _options(max_bytes: int) -> re2.Options:
    options = re2.Options()
    options.max_mem, options.log_errors = max_bytes, False
    options.encoding = re2.Options.Encoding.LATIN1  # smaller programs than UTF-8; names and patterns are ASCII
    return options
