"""Fields of prompt lookup, and its counts in the usage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine import wire
from gateway.generation.plan import _prompt_lookup
from gateway.handling.generator import _completion_details
from gateway.schemas.chat import ChatRequest


def request(**lookup: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_lookup": lookup}
    return msgspec.convert(body, ChatRequest)


def test_the_field_reaches_the_engine() -> None:
    assert _prompt_lookup(request()) == wire.DraftOptions(8, 3)
    assert _prompt_lookup(request(max_tokens=0, ngram=2)) == wire.DraftOptions(0, 2)
    assert _prompt_lookup(msgspec.structs.replace(request(), prompt_lookup=None)) is None


@pytest.mark.parametrize("wrong", [{"max_tokens": 33}, {"max_tokens": -1}, {"ngram": 0}, {"ngram": 9}, {"tokens": 4}])
def test_wrong_fields_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError, match="prompt_lookup"):
        request(**wrong)


def test_usage_counts_drafted_tokens_of_all_sequences() -> None:
    def generation(reasoning: int | None, *counts: tuple[int, int]) -> Any:
        sequences = [SimpleNamespace(draft_tokens=drafted, accepted_draft_tokens=accepted) for drafted, accepted in counts]
        return cast("Any", SimpleNamespace(reasoning_tokens=reasoning, sequences=sequences))

    def told(*generations: Any) -> Any:
        return msgspec.to_builtins(_completion_details(list(generations)))

    assert told(generation(None, (0, 0))) is None
    assert told(generation(5, (0, 0))) == {"reasoning_tokens": 5}
    counts = {"reasoning_tokens": 0, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 5}
    assert told(generation(None, (8, 5), (0, 0)), generation(None, (3, 1))) == counts
