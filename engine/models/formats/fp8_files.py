"""FP8 (e4m3) as Qwen3 and DeepSeek publish it: blocks of the weight have a scale (``weight_scale_inv``, which multiplies in spite
of its name); and with one scale for a tensor or for each output (``weight_scale``).

Activations are quantised with scales of their own, for groups of as many columns as a block has, or for rows; constants for them
(``input_scale``) are not needed. Source: DeepSeek-V3, ``inference/kernel.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from yardstick_llm.engine.models.checkpoint import Stored
from yardstick_llm.engine.models.files import Keys
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.formats.compressed_tensors import UNREAD, scaled
from yardstick_llm.engine.models.formats.parts import Parts, with_weights


def fp8_files(stored: Mapping[str, Stored], keys: Keys) -> dict[str, Stored]:
    """``stored`` with weights in place of their parts. Raises :class:`ModelError`."""
    block = keys.ids("weight_block_size")
    if len(block) not in (0, 2) or 0 in block:
        raise keys.error("weight_block_size", "must be two numbers of at least 1; correct the file")
    for part in ("weight_scale_inv", "weight_scale"):

        def load(parts: Parts, part: str = part) -> CodedWeight:
            return scaled(parts, part, block[:1], block[1:], quantizes_input=True)

        stored = with_weights(stored, "weight", (part,), lambda parts: parts["weight"].shape, load, beside=part, dropped=UNREAD)
    return dict(stored)
