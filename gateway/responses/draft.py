"""The body of a response while it is made."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.ids import new_id
from gateway.pool.replica import ServedModel
from gateway.schemas.response_body import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseBody,
    ResponseError,
    ResponseUsage,
)
from gateway.schemas.responses import Reasoning, ResponseRequest, TextConfig, TextFormat
from gateway.schemas.usage import Usage


class Draft:
    """Builds the body from the request, of which it repeats the parameters."""

    def __init__(self, fields: ResponseRequest, model: ServedModel, fingerprint: str, instructions: bytes) -> None:
        """``instructions``: as JSON."""
        self.id = f"resp_{new_id()}"
        text = fields.text or TextConfig()
        encoded: Any = msgspec.Raw(instructions)
        self._body = ResponseBody(
            id=self.id,
            created_at=int(time.time()),
            status="in_progress",
            instructions=encoded,
            max_output_tokens=fields.max_output_tokens,
            model=model.name,
            output=[],
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            previous_response_id=fields.previous_response_id,
            reasoning=fields.reasoning or Reasoning(),
            store=bool(fields.store),
            temperature=1.0 if fields.temperature is None else fields.temperature,
            text=TextConfig(text.format or TextFormat(), text.verbosity or "medium"),
            tool_choice=fields.tool_choice or "auto",
            tools=fields.tools or [],
            top_logprobs=fields.top_logprobs or 0,
            top_p=1.0 if fields.top_p is None else fields.top_p,
            truncation=fields.truncation or "disabled",
            user=fields.user,
            metadata=fields.metadata or {},
            system_fingerprint=fingerprint,
        )

    def begun(self) -> ResponseBody:
        """Return the body without output."""
        return self._body

    def ended(self, output: list[OutputItem], usage: Usage, *, whole: bool) -> ResponseBody:
        """Return the body of a response. ``whole``: it ended by itself, and not at a limit."""
        return msgspec.structs.replace(
            self._body,
            status="completed" if whole else "incomplete",
            completed_at=int(time.time()) if whole else None,
            incomplete_details=None if whole else IncompleteDetails(),
            output=output,
            usage=usage_of_response(usage),
        )

    def failed(self, error: GatewayError, output: list[OutputItem], usage: Usage) -> ResponseBody:
        """Return the body of a response that broke off after its stream had begun. It is not stored."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return msgspec.structs.replace(
            self._body,
            status="failed",
            error=ResponseError(code, error.message),
            output=output,
            usage=usage_of_response(usage),
            store=False,
        )


def usage_of_response(usage: Usage) -> ResponseUsage:
    """Convert token counts."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    reasoning = usage.completion_tokens_details.reasoning_tokens if usage.completion_tokens_details else 0
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached),
        output_tokens=usage.completion_tokens or 0,
        output_tokens_details=OutputTokensDetails(reasoning),
        total_tokens=usage.total_tokens,
    )
