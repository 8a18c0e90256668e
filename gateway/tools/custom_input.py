"""Reads the text for a custom tool out of the arguments with which models call it: ``{"input": "…"}``."""

from __future__ import annotations

import json
import re

from gateway.schemas.tools import CUSTOM_INPUT

_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_MOST_BEGIN = 64
"""Characters within which the text begins. Arguments of another form are passed on as they are."""
_STOP = re.compile(r'["\\]')
_HIGH = re.compile(r"\\u[dD][89abAB]")


class CustomInput:
    """Decodes the text while the arguments arrive."""

    def __init__(self) -> None:
        self._read = ""
        self._begun = False
        self._ended = False
        self._verbatim = False
        """Whether the arguments have another form."""

    def push(self, arguments: str) -> str:
        """Take the next characters of the arguments and return the text that is certain now."""
        if self._verbatim:
            return arguments
        if self._ended:
            return ""
        self._read += arguments
        if not self._begun:
            found = _BEGIN.match(self._read)
            if found is None:
                self._verbatim = len(self._read) > _MOST_BEGIN or not _may_begin(self._read)
                return self._read if self._verbatim else ""
            self._begun, self._read = True, self._read[found.end() :]
        return self._decoded()

    def _decoded(self) -> str:
        """Return the text up to an escape that is not complete, or to the closing quote."""
        at, decoded = 0, []
        while (found := _STOP.search(self._read, at)) is not None:
            decoded.append(self._read[at : found.start()])
            at = found.start()
            if found[0] == '"':
                self._ended, self._read = True, ""
                return "".join(decoded)
            end = _escape_end(self._read, at)
            if end is None:
                break
            decoded.append(_unescaped(self._read[at:end]))
            at = end
        else:
            decoded.append(self._read[at:])
            at = len(self._read)
        self._read = self._read[at:]
        return "".join(decoded)


def _may_begin(read: str) -> bool:
    """Whether ``read`` may become the beginning of the expected arguments."""
    return f'{{"{CUSTOM_INPUT}":"'.startswith("".join(read.split()))


def _escape_end(text: str, at: int) -> int | None:
    """Return the end of the escape sequence at ``at``; None if it is not complete. A pair of surrogates is one sequence."""
    if text.startswith("\\u", at):
        pair = _HIGH.match(text, at) is not None
        if pair and len(text) > at + 6 and text[at + 6] != "\\":
            pair = False
        if pair and len(text) > at + 7 and text[at + 7] != "u":
            pair = False
        end = at + (12 if pair else 6)
    else:
        end = at + 2
    return end if len(text) >= end else None


def _unescaped(sequence: str) -> str:
    try:
        text = json.loads(f'"{sequence}"')
    except ValueError:
        return sequence
    assert isinstance(text, str)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
