"""Length guidance of one section: the tokens that tell it apart."""

from __future__ import annotations

import pytest

from engine import wire
from gateway.errors import InvalidRequest
from gateway.lenvm.length_guidance import with_section
from gateway.tools.answer import AnswerFormat, Thinking


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


def test_guidance_of_all_needs_no_tokens() -> None:
    guidance = wire.LengthGuidance(scale=1.0)
    assert with_section(guidance, None) is guidance
    assert with_section(None, None) is None
