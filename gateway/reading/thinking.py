"""Turns ``enable_thinking`` and ``reasoning_effort`` into variables of the model's chat template."""

from __future__ import annotations

from typing import Any

from gateway.errors import InvalidRequest
from gateway.reading.answer_format import thinking_format
from gateway.reading.endpoint import Model
from gateway.schemas.chat import ChatRequest

SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates read whether the model thinks: Qwen3 and most others; DeepSeek-V3.1."""


def template_variables(request: ChatRequest, model: Model) -> dict[str, Any]:
    """Return ``chat_template_kwargs`` with the variables for the request's other fields, which they override.

    Raises :class:`InvalidRequest` for a field that the model's template does not read and that asks for something else than what
    the model does anyway.
    """
    variables: dict[str, Any] = {}
    template = model.texts.template
    switch = next((name for name in SWITCHES if template.reads(name)), None)
    effort, enabled = request.reasoning_effort, request.enable_thinking
    if effort is not None:
        if template.reads("reasoning_effort") and not (effort == "none" and switch):
            variables["reasoning_effort"] = effort
        elif switch:
            variables[switch] = effort != "none"
        elif effort != "none" or thinking_format(model) is not None:
            raise _not_read("reasoning_effort", model)
    if enabled is not None:
        if switch:
            variables[switch] = enabled
        elif enabled or thinking_format(model) is not None:
            raise _not_read("enable_thinking", model)
    return variables | (request.chat_template_kwargs or {})


def _not_read(name: str, model: Model) -> InvalidRequest:
    message = f"`{name}`: the chat template of {model.facts.name!r} does not read it, so it would have no effect; leave it out."
    return InvalidRequest(message, param=name)
