"""``python -m tests.docs.generate``: writes the parts of docs/api.md, settings.md and operations.md that are made from the code.

A part stands between ``<!-- NAME: made by python -m tests.docs.generate -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.docs.conformance import table
from yardstick_llm.engine.models.config import parse_config
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.runner.graphs import BUCKETS
from yardstick_llm.engine.runner.machine import GPU_FIXED_BYTES, GPU_MEMORY_SHARE, slot_bytes, step_bytes
from yardstick_llm.engine.server.options import Option, options_of
from yardstick_llm.engine.settings import GPU_BATCHED_TOKENS, EngineSettings, ServerSettings
from yardstick_llm.gateway.api.openapi import attribute_docstrings
from yardstick_llm.gateway.ops.access_log import AccessLine
from yardstick_llm.gateway.schemas.parameters import ALL, IGNORED, REFUSED, EndpointName, Refused
from yardstick_llm.gateway.settings import FLAGS, PREFIX, Settings

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
PAGES = [PAGE, PAGE.with_name("settings.md"), PAGE.with_name("operations.md")]
_PART = re.compile(r"(<!-- (?P<name>[\w ]+): made by python -m tests\.docs\.generate -->\n).*?(?=<!-- end -->)", flags=re.DOTALL)


def settings() -> str:
    notes = attribute_docstrings(Settings)
    rows = []
    for field in msgspec.structs.fields(Settings):
        flag = f", `{FLAGS[field.name]}`" if field.name in FLAGS else ""
        default = "required" if field.required else _default(field.default)
        rows.append((f"`{PREFIX}{field.name.upper()}`{flag}", default, _prose(notes[field.name])))
    return _table(("variable, option", "default", "meaning"), rows)


def refused() -> str:
    """Parameters that are refused, those of one remedy together."""
    rows: dict[tuple[str, tuple[EndpointName, ...]], list[Refused]] = {}
    for row in REFUSED:
        rows.setdefault((row.remedy, row.endpoints), []).append(row)
    return _table(
        ("parameter", "endpoints", "why, or what to use instead"),
        [(", ".join(map(_name, group)), ", ".join(endpoints), remedy) for (remedy, endpoints), group in rows.items()],
    )


def ignored() -> str:
    rows: dict[tuple[EndpointName, ...], list[str]] = {}
    for row in IGNORED:
        rows.setdefault(row.endpoints, []).append(f"`{row.name}`")
    return _table(("endpoints", "parameters"), [(", ".join(endpoints), ", ".join(names)) for endpoints, names in rows.items()])


def access_log() -> str:
    notes = attribute_docstrings(AccessLine)
    return _table(("field", "meaning"), [(f"`{name}`", _prose(notes[name])) for name in AccessLine.__struct_fields__])


def engine_settings() -> str:
    options = [option for settings in (EngineSettings, ServerSettings) for option in options_of(settings)]
    rows = [(f"`{option.flag}`", _prose(option.default_text), _engine_meaning(option)) for option in options]
    return _table(("option", "default", "meaning"), rows)


def _engine_meaning(option: Option) -> str:
    choices = ", ".join(f"`{choice}`" for choice in option.choices)
    return (f"{choices}: " if choices else "") + _prose(option.description)


def conformance() -> str:
    rows = [(f"`{name}`", *(cells.get(endpoint, "–") for endpoint in ALL)) for name, cells in sorted(table().items())]
    return _table(("parameter", *ALL), rows)


CARDS = {"L4": 23_034, "L40S": 46_068, "H100": 81_559, "H200": 143_771}
"""Memory of one card in MiB, as nvidia-smi shows it."""
CONTEXT_MIB = 512
"""Memory that CUDA itself takes: an estimate."""
MODELS = {
    "Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen3-4B": (2560, 36, 32, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 12288, False),
    "Qwen3-14B": (5120, 40, 40, 17408, False),
    "Qwen3-32B": (5120, 64, 64, 25600, False),
}
"""Hidden size, layers, heads, intermediate size, and whether head and embedding are one; of the models' config.json."""
WEIGHT_BYTES = {"bfloat16": 2.0, "FP8": 1.0, "4 bits": 0.5 + 2 * 2 / 128}
"""Bytes of one weight of a layer. With 4 bits, each group of 128 weights also has a scale and a shift of two bytes each."""


def cards() -> str:
    """Tokens of keys and values that fit beside a model."""
    rows = []
    for name, (hidden, layers, heads, inner, tied) in MODELS.items():
        raw = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": hidden}
        raw |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
        raw |= {"intermediate_size": inner, "tie_word_embeddings": tied, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6}
        with torch.device("meta"):
            decoder = Decoder(parse_config(raw), torch.bfloat16)
        ours = sum(weight.numel() for weight in decoder.parameters())
        inside = sum(weight.numel() for weight in decoder.layers.parameters())
        slot, step = slot_bytes(decoder, torch.bfloat16), step_bytes(decoder, GPU_BATCHED_TOKENS + BUCKETS[-1])
        for kind, size in WEIGHT_BYTES.items():
            weights = inside * size + (ours - inside) * 2
            free = {card: (total - CONTEXT_MIB) * 2**20 - weights for card, total in CARDS.items()}
            room = {card: min(left * GPU_MEMORY_SHARE, left - GPU_FIXED_BYTES - step) / slot for card, left in free.items()}
            cells = [f"{tokens / 1000:,.0f}" if tokens > SHORTEST else "–" for tokens in room.values()]
            rows.append((name, kind, f"{weights / 1e9:.1f}", *cells))
    return _table(("model", "weights", "GB", *(f"{card}, {total / 1024:.1f} GiB" for card, total in CARDS.items())), rows)


SHORTEST = 8192
"""Tokens below which a model counts as too large for a card."""

PARTS: dict[str, Callable[[], str]] = {
    "cards": cards,
    "conformance": conformance,
    "settings": settings,
    "engine settings": engine_settings,
    "refused parameters": refused,
    "ignored parameters": ignored,
    "access log": access_log,
}


def page(text: str) -> str:
    """``text`` with every part as the code says it. Raises KeyError for a part that nothing makes."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found['name']]()}\n", text)


def parts_of(text: str) -> list[str]:
    return [found["name"] for found in _PART.finditer(text)]


def _name(row: Refused) -> str:
    """The parameter, and the values that are accepted."""
    accepted = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in row.accepts)
    return f"`{row.name}` (except {accepted})" if accepted else f"`{row.name}`"


def _default(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _prose(docstring: str) -> str:
    return re.sub(r"\s+", " ", docstring).replace("``", "`").replace("|", "\\|").removesuffix(".")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
