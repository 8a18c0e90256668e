"""Formats of published files, by ``quant_method`` of ``quantization_config`` in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from yardstick_llm.engine.models import checkpoint
from yardstick_llm.engine.models.checkpoint import Stored
from yardstick_llm.engine.models.files import Keys, is_gguf, read_json
from yardstick_llm.engine.models.formats.bitsandbytes import bitsandbytes
from yardstick_llm.engine.models.formats.compressed_tensors import compressed_tensors
from yardstick_llm.engine.models.formats.fp8_files import fp8_files
from yardstick_llm.engine.models.formats.gptq import awq, gptq
from yardstick_llm.engine.models.gguf.config import has_codes, stored_tensors

METHODS: dict[str, Callable[[Mapping[str, Stored], Keys], dict[str, Stored]]] = {
    "compressed-tensors": compressed_tensors,
    "fp8": fp8_files,
    "fbgemm_fp8": fp8_files,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
}
KEYS = "quantization_config", "compression_config"
"""Keys of config.json that describe the format; the first one found is read. compressed-tensors wrote the second until 2024."""


def method_of(directory: Path) -> str | None:
    """``quant_method`` of a model directory; None where its weights are dense. Raises :class:`ModelError`."""
    if is_gguf(directory):
        return "gguf" if has_codes(directory) else None
    section = _section(directory)
    return None if section is None else section[0]


def read_stored(directory: Path) -> dict[str, Stored]:
    """:func:`engine.models.checkpoint.read_headers`, with a weight in place of the tensors that make it. Raises
    :class:`ModelError`."""
    if is_gguf(directory):
        return stored_tensors(directory)
    stored, section = checkpoint.read_headers(directory), _section(directory)
    return stored if section is None else METHODS[section[0]](stored, section[1])


def _section(directory: Path) -> tuple[str, Keys] | None:
    """The method and its options, which models of text and images may have in ``text_config``."""
    raw = read_json(directory / "config.json")
    keys = Keys(raw, "config.json")
    inner = keys.section("text_config")
    section = next((found for each in (keys, inner) if each is not None for key in KEYS if (found := each.section(key))), None)
    if section is None:
        return None
    method = section.text("quant_method", "")
    if method not in METHODS:
        problem = f"is {method!r:.40}, which is not supported"
        raise section.error(
            "quant_method", f"{problem}; use a checkpoint in one of {', '.join(METHODS)}, or in float16 or bfloat16"
        )
    return method, section
