"""Plain batched sampling, for training data and evaluation. Serving uses the engine instead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.demo_models.forward import LockstepCache
from yardstick_llm.engine.models.decoder import Decoder

COMPACT_EVERY = 16
"""Number of steps after which ended rows are dropped."""


STRAYS = 5
"""Number of most probable tokens that a stray token is drawn from: the usual number of candidates of guidance."""


@dataclass(frozen=True)
class Draw:
    """Draws tokens."""

    noise: torch.Generator
    stray: float

    def __call__(self, logits: Tensor) -> list[int]:
        """Draw from logits: [rows, vocab]; return one token for each row."""
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.noise)
        if self.stray:
            rank = torch.randint(STRAYS, drawn.shape, generator=self.noise)
            strays = logits.topk(STRAYS).indices.gather(1, rank)
            drawn = torch.where(torch.rand(drawn.shape, generator=self.noise) < self.stray, strays, drawn)
        return drawn.squeeze(1).tolist()


@torch.inference_mode()
def generate(
    decoder: Decoder, prompts: list[list[int]], *, seed: int, limit: int, stray: float = 0.0, rows: int = 512
) -> list[list[int]]:
    """Sample a continuation of each prompt at temperature 1, at most ``limit`` tokens; the end token is included.

    ``stray``: share of the tokens drawn uniformly from the :data:`STRAYS` most probable ones. ``rows``: prompts at a time.
    """
    draw = Draw(torch.Generator().manual_seed(seed), stray)
    outputs: list[list[int]] = []
    for start in range(0, len(prompts), rows):
        outputs += _generate_together(decoder, prompts[start : start + rows], limit, draw)
    return outputs


def _generate_together(decoder: Decoder, prompts: list[list[int]], limit: int, draw: Draw) -> list[list[int]]:
    """Process all rows in step: a row reads its next prompt token, or after its prompt the token drawn last."""
    texts = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + limit for prompt in prompts]
    active = list(range(len(prompts)))
    cache = LockstepCache(decoder, len(prompts), max(ends))
    for position in range(max(ends)):
        if position % COMPACT_EVERY == 0:
            kept = [row for row, i in enumerate(active) if not _is_over(decoder, texts[i], prompts[i], ends[i])]
            if not kept:
                break
            active = [active[row] for row in kept]
            cache.keep(torch.tensor(kept))
        tokens = torch.tensor([texts[i][min(position, len(texts[i]) - 1)] for i in active])
        hidden = decoder(tokens, torch.full((len(active),), position), cache.attend_at(position))
        for i, token in zip(active, draw(decoder.logits(hidden)), strict=True):
            if len(texts[i]) == position + 1 and not _is_over(decoder, texts[i], prompts[i], ends[i]):
                texts[i].append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _is_over(decoder: Decoder, text: list[int], prompt: list[int], end: int) -> bool:
    return len(text) == end or (len(text) > len(prompt) and text[-1] in decoder.config.eos_token_ids)
