"""The messages of sub-batches, each with only the images that its prompts name."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from engine import wire
from gateway.ids import new_id
from gateway.pool.prompts import Prompts, SubBatch
from gateway.text.prepared import Ids, ImageIds, as_list

MESSAGE_IMAGE_TOKENS = 1 << 12
"""Most image tokens of a message with several branches: with 2352 bytes each, encoding them takes the event loop some 4 ms."""


def message_of(prompts: Prompts, branches: list[Ids], adapter: str) -> wire.Score | wire.ScoreItems:
    """Return the message that computes ``branches``."""
    id, readout, priority = new_id(), prompts.readout, prompts.priority
    (prefix, suffix, *rows), images = _renumbered([prompts.prefix, prompts.suffix, *branches], prompts.images)
    if not prompts.suffix:
        return wire.Score(
            id, as_list(prefix), [*map(as_list, rows)], readout, priority, caller=prompts.caller, adapter=adapter, images=images
        )
    items, lengths = b"".join(map(wire.pack_ids, rows)), wire.pack_ids([len(item) for item in rows])
    return wire.ScoreItems(
        id,
        items,
        lengths,
        as_list(suffix),
        readout,
        priority,
        caller=prompts.caller,
        pin_seconds=prompts.pin_seconds,
        adapter=adapter,
        images=images,
    )


def without_keeping(request: wire.Score | wire.ScoreItems) -> wire.Score | wire.ScoreItems:
    """Return a message whose items the replica does not keep in its prefix cache. The prefix of a :class:`wire.Score` is kept."""
    if isinstance(request, wire.Score):
        return request
    caller = msgspec.structs.replace(request.caller, keep_prefix=False)
    return msgspec.structs.replace(request, caller=caller, pin_seconds=None)


def divided_by_images(
    sub_batches: list[SubBatch], prompts: Prompts, branches: Sequence[Ids], vision: wire.VisionInfo | None
) -> list[SubBatch]:
    """Divide sub-batches further, so that none has more images than an engine takes in one message, and none with several branches
    more than :data:`MESSAGE_IMAGE_TOKENS`."""
    if vision is None or not prompts.images:
        return sub_batches
    tokens = [vision.tokens_of(image) for image in prompts.images]
    most = min(MESSAGE_IMAGE_TOKENS, vision.max_tokens or MESSAGE_IMAGE_TOKENS)
    shared = {*_places(prompts.prefix), *_places(prompts.suffix)}
    divided = []
    for sub_batch in sub_batches:
        few: list[int] = []
        used = set(shared)
        for index, place in enumerate(sub_batch.indices):
            wanted = used | {*_places(branches[place])}
            if few and (len(wanted) > vision.max_images or sum(tokens[image] for image in wanted) > most):
                divided.append(_with_branches(sub_batch, few))
                few, wanted = [], shared | {*_places(branches[place])}
            few.append(index)
            used = wanted
        divided.append(_with_branches(sub_batch, few))
    return divided


def _with_branches(sub_batch: SubBatch, indices: list[int]) -> SubBatch:
    """Return a sub-batch with those branches of ``sub_batch`` that stand at ``indices`` in it."""
    return sub_batch._replace(indices=[sub_batch.indices[index] for index in indices])


def _places(ids: Ids) -> Iterable[int]:
    return (span.place for span in ids.spans) if isinstance(ids, ImageIds) else ()


def _renumbered(parts: list[Ids], images: Sequence[wire.Image]) -> tuple[list[Ids], list[wire.Image]]:
    """Return ``parts`` with image tokens numbered by their first occurrence, and the images in this order."""
    if not images:
        return parts, []
    numbers: dict[int, int] = {}
    for ids in parts:
        for place in _places(ids):
            numbers.setdefault(place, len(numbers))
    return [_with_numbers(ids, numbers) for ids in parts], [images[place] for place in numbers]


def _with_numbers(ids: Ids, numbers: dict[int, int]) -> Ids:
    if not isinstance(ids, ImageIds) or all(numbers[span.place] == span.place for span in ids.spans):
        return ids
    row = array("I", ids)
    for begin, end, place in ids.spans:
        row[begin:end] = array("I", [wire.IMAGE_TOKENS + numbers[place]]) * (end - begin)
    return row
