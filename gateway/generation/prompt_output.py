"""Token ids and log-probabilities of a prompt, as an answer shows them in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine import wire
from gateway.errors import InvalidRequest
from gateway.generation.generation import Generation
from gateway.generation.sequence import Token
from gateway.process.time_slices import TimeSlice
from gateway.schemas.generation import GenerationRequest, PromptLogprob

TOKENS_AT_ONCE = 32
"""Tokens whose log-probabilities are encoded at a time; with twenty for each token, this takes less than a millisecond."""

MAX_ENTRIES = 1 << 20
"""Most log-probabilities of prompts in one answer, about 70 MB."""

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class PromptOutput:
    """Fields of an answer; UNSET if they were not requested."""

    token_ids: list[int] | msgspec.UnsetType
    logprobs: Any
    """A list as JSON (``msgspec.Raw``)."""


class _TokenIds(Mapping[int, str]):
    """Shows each token as ``token_id:ID``."""

    def __getitem__(self, id: int) -> str:
        return f"token_id:{id}"

    def __iter__(self) -> Any:
        raise TypeError("every id has an entry")

    def __len__(self) -> int:
        raise TypeError("every id has an entry")


TOKEN_IDS: Mapping[int, str] = _TokenIds()
"""Takes the place of a vocabulary's texts with ``return_tokens_as_token_ids``."""


def prompt_ids(generation: Generation, fields: GenerationRequest) -> list[int] | None:
    """Return the token ids of the prompt if they were requested."""
    if not fields.return_token_ids:
        return None
    prompt, vision = generation.request.prompt, generation.model.info.vision
    if vision is None or not generation.request.images:
        return prompt
    return [vision.image_token if id >= wire.IMAGE_TOKENS else id for id in prompt]


def check_size(fields: GenerationRequest, tokens: int) -> None:
    """Raise :class:`InvalidRequest` if the log-probabilities of ``tokens`` prompt tokens would make the answer too large."""
    if fields.prompt_logprobs is not None and tokens * (fields.prompt_logprobs + 1) > MAX_ENTRIES:
        most = f"at most {MAX_ENTRIES} log-probabilities of prompts are returned at once"
        message = f"`prompt_logprobs` is too large for {tokens} prompt tokens: {most}; ask for fewer, or send less text."
        raise InvalidRequest(message, param="prompt_logprobs")


async def prompt_output(generation: Generation, fields: GenerationRequest) -> PromptOutput:
    """Return what ``fields`` request of the prompt. Log-probabilities are encoded in parts, to not block the event loop."""
    ids = prompt_ids(generation, fields)
    shown = msgspec.UNSET if ids is None else ids
    if fields.prompt_logprobs is None:
        return PromptOutput(shown, msgspec.UNSET)
    texts, top = generation.model.tokenizer.texts, fields.prompt_logprobs
    time_slice, parts, tokens = TimeSlice(), [], generation.prompt_tokens
    for begin in range(0, len(tokens), TOKENS_AT_ONCE):
        parts.append(_encoder.encode([_entry(texts, token, top) for token in tokens[begin : begin + TOKENS_AT_ONCE]])[1:-1])
        if time_slice.over:
            await time_slice.yield_to_loop()
    return PromptOutput(shown, msgspec.Raw(b"[%b]" % b",".join(parts)))


def _entry(texts: Mapping[int, str], token: Token, top: int) -> dict[str, PromptLogprob] | None:
    """Return the token and the ``top`` most probable ones at its position, by id."""
    if token.logprob is None:
        return None
    ranked = {id: (rank, logprob) for rank, (id, logprob) in enumerate(token.top[:top], start=1)}
    own = {} if token.id in ranked else {token.id: (None, token.logprob)}
    return {
        str(id): PromptLogprob(logprob=logprob, rank=rank, decoded_token=texts[id])
        for id, (rank, logprob) in (own | ranked).items()
    }
