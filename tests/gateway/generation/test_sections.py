"""Length guidance of one section: the tokens that tell it apart."""

from __future__ import annotations

import msgspec
import pytest

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.generation.length import default_min_p, thinking_limit, with_section
from yardstick_llm.gateway.output.answer import AnswerFormat, Thinking


@pytest.mark.parametrize("applies_to", ["thinking", "answer"])
def test_the_tokens_of_a_section(applies_to) -> None:
    guidance = wire.LengthGuidance(scale=1.0, applies_to=applies_to)
    opens = AnswerFormat(thinking=Thinking("think", False, 7, 8))
    opened = AnswerFormat(thinking=Thinking("think", True, 7, 8))
    assert with_section(guidance, opens).thinking == wire.Thinking(8, 7)
    assert with_section(guidance, opened).thinking == wire.Thinking(8)
    for unclear in (Thinking("think", False, None, 8), Thinking("think", True, 7, None)):
        with pytest.raises(InvalidRequest, match="no tokens"):
            with_section(guidance, AnswerFormat(thinking=unclear))


@pytest.mark.parametrize(("opened", "open_id"), [(True, None), (False, 7)])
def test_the_tokens_of_a_limit(opened: bool, open_id: int | None) -> None:
    format = AnswerFormat(thinking=Thinking("think", opened, 7, 8))
    assert thinking_limit(5, format) == wire.ThinkingLimit(wire.Thinking(8, open_id), 5)
    assert thinking_limit(None, format) is thinking_limit(5, AnswerFormat()) is thinking_limit(5, None) is None
    with pytest.raises(InvalidRequest, match=r"`thinking_token_budget`: .* no tokens"):
        thinking_limit(5, AnswerFormat(thinking=Thinking("think", opened, None, None)))


def test_targets_of_thinking_have_a_larger_min_p() -> None:
    target = wire.LengthGuidance(constraint="eq", target_length=9)
    assert default_min_p(target) == 0.01
    assert default_min_p(msgspec.structs.replace(target, applies_to="thinking")) == 0.1
    assert default_min_p(wire.LengthGuidance(scale=2.0, applies_to="thinking")) is default_min_p(None) is None


def test_guidance_of_all_needs_no_tokens() -> None:
    guidance = wire.LengthGuidance(scale=1.0)
    assert with_section(guidance, None) is guidance
    assert with_section(None, None) is None
