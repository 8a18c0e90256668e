"""``adapter_config.json`` of PEFT, read strictly: what would change the numbers and is not supported is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.lora.errors import AdapterError
from engine.lora.layout import FUSED, PROJECTIONS, WHOLE
from engine.lora.patterns import PatternError, Patterns
from engine.models.errors import ModelError
from engine.models.keys import Keys

FILE = "adapter_config.json"
MODEL_FILE = "config.json"
"""The model's configuration, which may lie beside an adapter and names its classes."""
MAX_BYTES = 1 << 20
MAX_PATTERNS = 1000
MAX_PATTERN_CHARACTERS = 1 << 16
"""Most characters of all patterns of a key."""
TASKS = (None, "CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION")
HEADS = ("score", "classifier")
"""``modules_to_save`` of classification models; PEFT names both, and the model has one of them."""
INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` after which the base model has its own weights."""
IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("runtime_config", "target_modules", "task_type"),
}
"""Keys that decide nothing beside the tensors that are stored."""
_READ = {
    *("alpha_pattern", "bias", "ensure_weight_tying", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "modules_to_save"),
    *("peft_type", "r", "rank_pattern", "use_rslora"),
}


@dataclass(frozen=True)
class AdapterConfig:
    """The part of an adapter's configuration that its numbers depend on."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Patterns
    alphas: Patterns
    task: str | None
    targets: tuple[str, ...]
    """Last parts of the names in ``target_modules``; empty where that is an expression."""
    modules: tuple[str, ...]
    """Those of :data:`~engine.lora.layout.WHOLE` that are in ``modules_to_save``."""
    tied: bool
    """Whether a head that is tied to the embedding stays so; such an adapter has both."""

    def rank_of(self, module: str) -> int:
        """``module``: the name in the model that was trained, such as ``model.layers.0.self_attn.q_proj``."""
        return int(self.ranks.number_of(module, self.rank))

    def scale_of(self, module: str) -> float:
        """Factor of the product of B and A."""
        rank = self.rank_of(module)
        return self.alphas.number_of(module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def parse(data: bytes, modules: Sequence[str] = ()) -> AdapterConfig:
    """Read the contents of :data:`FILE`. ``modules``: those of :data:`~engine.lora.layout.WHOLE` that adapters may have. Raises
    :class:`AdapterError`."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise AdapterError(f"{FILE} is not JSON; copy the adapter again.") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{FILE} is not a JSON object; copy the adapter again.")
    try:
        return _parse(raw, Keys(raw, FILE), modules)
    except ModelError as error:
        raise AdapterError(str(error)) from None


def _parse(raw: dict[str, Any], keys: Keys, modules: Sequence[str]) -> AdapterConfig:
    kind = keys.text("peft_type", "")
    if kind.upper() != "LORA":
        raise keys.error("peft_type", f"is {kind!r:.80}; only LORA is supported")
    _refuse(raw, keys)
    saved = _whole_modules(raw, keys, modules)
    return AdapterConfig(
        rank=keys.count("r"),
        alpha=keys.number("lora_alpha"),
        rslora=keys.flag("use_rslora", False),
        ranks=_patterns(raw, keys, "rank_pattern", whole=True),
        alphas=_patterns(raw, keys, "alpha_pattern"),
        task=raw.get("task_type"),
        targets=_targets(raw, keys),
        modules=saved,
        tied=bool(saved) and keys.flag("ensure_weight_tying", False),
    )


def _refuse(raw: dict[str, Any], keys: Keys) -> None:
    """Raise for options that are not supported. Null, false and empty values ask for nothing."""
    if raw.get("task_type") not in TASKS:
        supported = ", ".join(str(task) for task in TASKS[1:])
        raise keys.error("task_type", f"is {raw['task_type']!r:.80}; supported are {supported}")
    if raw.get("use_dora"):
        raise keys.error("use_dora", "asks for DoRA, which is not supported; train without it, or merge the adapter into the model")
    if raw.get("bias", "none") != "none" or raw.get("lora_bias"):
        raise keys.error("bias", "asks for trained biases, which are not supported; merge the adapter into the model")
    if raw.get("fan_in_fan_out"):
        raise keys.error("fan_in_fan_out", "is true, and the supported models have no such layers")
    if raw.get("init_lora_weights", True) not in INITIALISATIONS:
        how = raw["init_lora_weights"]
        raise keys.error("init_lora_weights", f"is {how!r:.80}, which changes the base model; convert the adapter to plain LoRA")
    for key, value in raw.items():
        if key not in IGNORED and key not in _READ and value not in (None, False, "", [], {}):
            raise keys.error(key[:80], "is set, which is not supported; merge the adapter into the model")


def _whole_modules(raw: dict[str, Any], keys: Keys, taken: Sequence[str]) -> tuple[str, ...]:
    names = {name.rpartition(".")[2] if name.endswith(WHOLE) else name for name in _names(raw, keys, "modules_to_save")}
    for name in sorted(names.difference(HEADS, taken)):
        if name in WHOLE:
            value = "lm_head" if name == "lm_head" else "all"
            raise keys.error("modules_to_save", f"has {name!r}, which an engine takes that is started with --lora-modules {value}")
        raise keys.error("modules_to_save", f"has {name!r:.80}; supported are score, {', '.join(WHOLE)}")
    return tuple(name for name in WHOLE if name in names)


def _targets(raw: dict[str, Any], keys: Keys) -> tuple[str, ...]:
    if isinstance(raw.get("target_modules"), str):
        return ()
    names = [name.rpartition(".")[2] for name in _names(raw, keys, "target_modules")]
    for name in names:
        if name not in (*PROJECTIONS, *FUSED):
            raise keys.error("target_modules", f"has {name!r:.80}; supported are {', '.join(PROJECTIONS)}")
    return tuple(dict.fromkeys(names))


def _names(raw: dict[str, Any], keys: Keys, key: str) -> list[str]:
    return keys.strings(key) if raw.get(key) else []


def _patterns(raw: dict[str, Any], keys: Keys, key: str, *, whole: bool = False) -> Patterns:
    """``whole``: the numbers are whole numbers."""
    found = raw.get(key) or {}
    if not isinstance(found, dict) or len(found) > MAX_PATTERNS:
        raise keys.error(key, f"must be an object of at most {MAX_PATTERNS:,} patterns; correct the file")
    if sum(map(len, found)) > MAX_PATTERN_CHARACTERS:
        raise keys.error(key, f"has patterns of more than {MAX_PATTERN_CHARACTERS:,} characters together; use fewer")
    for pattern, value in found.items():
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise keys.error(key, f"gives {value!r:.80} for {pattern!r:.80}, which is no number greater than 0; correct the file")
    try:
        return Patterns(found)
    except PatternError as error:
        raise keys.error(key, str(error)) from None
