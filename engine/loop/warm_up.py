"""Requests that are computed before the engine is ready, so that no kernel is compiled while a client waits.

Triton compiles a kernel for each combination of its constants and of the types and alignment of its arguments. The kernels take
what changes from step to step as run-time values, so few combinations are left, and the requests here reach all of them. A device
error, such as a kernel that does not compile or a step that needs too much memory, ends the start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lora.reader import BLANK
from yardstick_llm.engine.runner.graphs import BUCKETS, Compilations
from yardstick_llm.engine.scheduling.scheduler import Budget
from yardstick_llm.kernels.label_logprobs import ROW_TILES
from yardstick_llm.kernels.lora_layout import FEW_ROWS

logger = logging.getLogger(__name__)

PROMPT = 600
"""Tokens of the long prompt: attention cuts longer contexts into chunks and merges their results."""
WINDOWS_SIDE = 5
"""Side of the image, in merged patches: one more than the side of a window."""
REPORT_SECONDS = 5.0
"""Time between two lines of progress."""

Messages = list[wire.Score | wire.Generate]


def warm_up(loop: Loop, budget: Budget, compilations: Compilations, *, adapted: bool = False) -> None:
    """Compute :func:`requests` in ``loop``. ``adapted``: also with its blank adapter. Raises :class:`ModelError` if one fails."""
    start = reported = time.monotonic()
    work = list(requests(loop.info, budget))
    if adapted:
        work += with_adapter([*work, *_few_and_many(loop.info, budget)])
    for done, messages in enumerate(work):
        if time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            logger.info("warming up: %d of %d steps, %d kernels, %.0f s", done, len(work), compilations.early, reported - start)
        _compute(loop, messages)
    logger.info("warmed up: %d kernels compiled or loaded, %.1f s", compilations.early, time.monotonic() - start)


def _compute(loop: Loop, messages: Messages) -> None:
    for message in messages:
        loop.submit(message)
    while not loop.idle:
        for reply in loop.step():
            if isinstance(reply, wire.Failed):
                raise ModelError(f"The engine cannot compute {reply.id} when it starts: {reply.message} The log says why.")


def requests(info: wire.Info, budget: Budget) -> Iterator[Messages]:
    """Requests of each kind that the engine serves, in groups that are computed together; the id says what they are."""
    able = set(info.capabilities)
    most = _most(info, budget)
    if "score" in able:
        for items in sorted({min(rows, most) for rows in (*ROW_TILES, 2 * ROW_TILES[-1])}):
            yield [_score(f"{items} items", wire.Labels([0]), items)]
        yield [_score("several labels", wire.Labels([0, 1]))]
        yield [_score("label logits", wire.Labels([0, 1], raw=True))]
        yield [_score("likelihoods", wire.Likelihood())]
    if "classify" in able:
        yield [wire.Score("classes", [0], [[0], _prompt(info)], wire.Classes())]
    if "embed" in able:
        yield [wire.Score("embeddings", [], [[0], _prompt(info)], wire.Embedding())]
    for capability, readout in (("token_vectors", wire.TokenVectors()), ("sparse", wire.Sparse())):
        if capability in able:
            yield [wire.Score(capability, [], [[0], _prompt(info)], readout)]
    if "generate" in able:
        for generation in _generations(_prompt(info), info.limits.max_logprobs):
            yield [generation]
    if "length_guidance" in able:
        yield [_score("length values", wire.LengthValue())]
        yield from _guided(info)
    if info.vision is not None:
        yield from _seeing(info, info.vision)
    yield [_large(info, budget)]


def with_adapter(work: Sequence[Messages]) -> list[Messages]:
    """Return copies of ``work`` that use the blank adapter. Small steps replay CUDA graphs, as those without an adapter do."""
    return [
        [msgspec.structs.replace(message, id=f"{message.id} with an adapter", adapter=BLANK) for message in messages]
        for messages in work
    ]


def _few_and_many(info: wire.Info, budget: Budget) -> Iterator[Messages]:
    """Steps in which few and many rows have an adapter."""
    for count in (1, min(FEW_ROWS + 1, _most(info, budget))):
        yield [_any_score(f"{count} of one token", info, [[0]] * count)]


def _large(info: wire.Info, budget: Budget) -> wire.Score:
    """A step larger than those that are captured whole, if steps may have as many tokens. The attention backend that was chosen
    computes it, whose kernels no smaller step has launched."""
    prompt, tokens = _prompt(info), min(budget.max_batched_tokens, BUCKETS[-1] + 1)
    count = max(1, min(-(-tokens // len(prompt)), (info.limits.max_slots - 1) // len(prompt)))
    return _any_score("a large step", info, [prompt] * count)


def _any_score(name: str, info: wire.Info, branches: list[list[int]]) -> wire.Score:
    """A score that the model can compute."""
    of: dict[str, wire.ScoreReadout] = {
        "score": wire.Labels([0]),
        "classify": wire.Classes(),
        "embed": wire.Embedding(),
        "token_vectors": wire.TokenVectors(),
        "sparse": wire.Sparse(),
    }
    readout = next(of[capability] for capability in of if capability in info.capabilities)
    return wire.Score(name, [0] if isinstance(readout, wire.Labels | wire.Classes) else [], branches, readout)


def _most(info: wire.Info, budget: Budget) -> int:
    """Items of one token that fit into a step."""
    return min(budget.max_batched_tokens, info.limits.max_branches, info.limits.max_slots - 1)


def _score(name: str, readout: wire.ScoreReadout, items: int = 2) -> wire.Score:
    return wire.Score(name, [0], [[item % 2] for item in range(items)], readout)


def _prompt(info: wire.Info) -> list[int]:
    length = max(1, min(PROMPT, info.max_context - 8, info.limits.max_slots - 8))
    return [token % info.vocab_size for token in range(length)]


def _generations(prompt: Sequence[int], max_logprobs: int) -> Iterator[wire.Generate]:
    ways = {
        "the largest logit": wire.Sampling(temperature=0),
        "a draw": wire.Sampling(),
        "a filtered draw": wire.Sampling(top_k=2, top_p=0.9, min_p=0.01),
        "penalties": wire.Sampling(repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0}, bad_words=((1,),)),
        "allowed tokens": wire.Sampling(allowed_token_ids=(0, 1)),
    }
    for name, way in ways.items():
        sampling = msgspec.structs.replace(way, max_tokens=3, ignore_eos=True)
        yield wire.Generate(name, list(prompt), sampling, logprobs=1, prompt_logprobs=1)
    yield wire.Generate("log-probabilities", list(prompt), sampling, logprobs=max_logprobs)


def _seeing(info: wire.Info, vision: wire.VisionInfo) -> Iterator[Messages]:
    """Prompts with an image whose windows have all sizes, on each model that reads it."""
    side = WINDOWS_SIDE * vision.merge_size
    while side > vision.merge_size and (side * vision.patch_size) ** 2 > vision.max_pixels:
        side -= vision.merge_size
    pixels = bytes(3 * (side * vision.patch_size) ** 2)
    image = wire.Image(wire.image_digest(side, side, pixels), side, side, pixels)
    prompt = [0, *[wire.IMAGE_TOKENS] * vision.tokens_of(image), 0]
    if len(prompt) + 3 > min(info.max_context, info.limits.max_slots) or vision.tokens_of(image) > vision.max_tokens:
        return
    sampling = wire.Sampling(max_tokens=3, ignore_eos=True)
    yield [wire.Generate("an image", prompt, sampling, logprobs=1, images=[image])]
    if "length_guidance" in info.capabilities:
        guidance = wire.LengthGuidance(scale=1.0, top_k=min(5, info.limits.max_candidates))
        yield [wire.Generate("candidates about an image", prompt, sampling, length_guidance=guidance, images=[image])]


def _guided(info: wire.Info) -> Iterator[Messages]:
    """Draws among few and many candidates, on short and long texts."""
    sampling, long = wire.Sampling(max_tokens=3, ignore_eos=True), _prompt(info)
    for top_k in sorted({min(5, info.limits.max_candidates), info.limits.max_candidates}):
        for prompt in (long[:1], long):
            guidance = wire.LengthGuidance(scale=1.0, top_k=top_k)
            yield [wire.Generate(f"{top_k} candidates", prompt, sampling, logprobs=1, length_guidance=guidance)]
        # In odd vocabularies, the logits of guided rows behind others begin at any multiple of 4 bytes.
        beside = wire.Generate("a draw beside", long[:1], sampling)
        yield [beside, wire.Generate("candidates beside", long[:1], sampling, length_guidance=guidance)]
