"""Chat templates that the event loop may run, because their work is metered: a template that exceeds its allowance is stopped, and
a worker process renders the prompt instead.

The text is that of :class:`ChatTemplate`: the same Jinja with the same functions, and whatever is refused here, a worker decides.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec
from jinja2 import pass_context
from jinja2.runtime import Context

from gateway.text.bounds import NeedsWorker
from gateway.text.chat_template import ChatTemplate, Environment, Message, undeclared
from gateway.text.metered_environment import ALLOWANCE, MeteredEnvironment

MAX_SOURCE = 1 << 15
"""Longest template in characters."""
RUN_COST = 60
"""Units that a prompt costs besides the template's own operations."""


class CompiledTemplate(msgspec.Struct, frozen=True):
    """A chat template with the meter in it, compiled by the fork server: compiling a long one takes a tenth of a second."""

    code: bytes
    """Python's code, as :mod:`marshal` writes it."""
    variables: list[str]
    """Names of the variables that the template does not set itself."""


def compile_metered(source: str | None) -> CompiledTemplate | None:
    """Return a chat template with the meter in it; None for one that only workers can render."""
    if source is None or len(source) > MAX_SOURCE:
        return None
    environment = MeteredEnvironment()
    try:
        code = environment.compile_metered(source)
        Environment(optimized=False, finalize=_as_it_is).from_string(source)  # fails for a template that the meter would mend
        variables = sorted(undeclared(source))
    except (Exception, NeedsWorker):  # a template is untrusted and may fail in any way; a worker reports it
        return None
    return CompiledTemplate(marshal.dumps(code), variables)


@pass_context
def _as_it_is(_: Context, value: Any) -> Any:
    """Return a value that is written. As it takes the context, no constant part of a template is computed by the compiler."""
    return value


class MeteredTemplate(ChatTemplate):
    """A chat template whose work is bounded. ``render`` may raise :class:`NeedsWorker`. Not safe to use from several threads."""

    bounded = True

    def __init__(self, source: str, special_tokens: Mapping[str, str], compiled: CompiledTemplate) -> None:
        super().__init__(source, special_tokens)
        self._metered = MeteredEnvironment()
        code = marshal.loads(compiled.code)  # noqa: S302 - from the fork server
        self._template = jinja2.Template.from_code(self._metered, code, dict(self._metered.globals))
        self._variables = set(compiled.variables)
        self._takes_parts = self._settled("_understands_parts")
        self._takes_calls = self._settled("_takes_argument_objects")
        self.begin()

    def begin(self) -> None:
        """Begin a request, all of whose prompts share one allowance."""
        self._metered.left = ALLOWANCE

    def check_room(self, prompts: int) -> None:
        """Raise :class:`NeedsWorker` if ``prompts`` more prompts exceed the allowance. Each is taken to cost as much as the request
        so far."""
        if (ALLOWANCE - self._metered.left) * prompts > self._metered.left:
            raise NeedsWorker

    def _settled(self, probe: str) -> bool:
        """Return whether a probe of the template can tell its property; if not, messages that depend on it are not rendered."""
        self._metered.left = 2 * ALLOWANCE  # each probe renders two prompts
        try:
            getattr(self, probe)
        except NeedsWorker:
            self.__dict__[probe] = True  # of no effect on other messages
            return False
        return True

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the prompt, as :meth:`ChatTemplate.render` does. Raises :class:`NeedsWorker` too."""
        for message in messages:
            known = self._takes_parts or type(message.get("content")) is str
            if not known or (message.get("tool_calls") and not self._takes_calls):
                raise NeedsWorker
        return super().render(messages, **options)

    def _run(self, messages: Any, variables: Mapping[str, Any]) -> str:
        self._metered.take(RUN_COST)
        return super()._run(messages, variables)
