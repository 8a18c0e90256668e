"""``adapter_config.json`` of PEFT, read strictly: what would change the numbers and is not supported is refused by name.

``rank_pattern`` and ``alpha_pattern`` come with an adapter, and a regular expression can take exponential time in :mod:`re`, which
keeps all threads of the engine's loop from running. RE2 takes linear time and bounded memory. It matches all patterns of a key at
once, without the interpreter's lock.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import re2

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.files import Keys, ModelError
from yardstick_llm.engine.models.lora.slots import FUSED, PROJECTIONS, WHOLE


class AdapterError(Exception):
    """An adapter is absent, unsupported or damaged, or there is no room for it.

    The message is one or two plain sentences for the person who loads it: which key or tensor is wrong and what to do about it. It
    names no path.
    """

    def __init__(self, message: str, code: wire.ErrorCode = "invalid", *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code: wire.ErrorCode = code
        self.retryable = retryable


def check_name(name: str, model: str) -> None:
    """Raise :class:`AdapterError` unless ``name`` may be the name of an adapter of ``model``."""
    if not wire.ADAPTER_NAME.fullmatch(name) or name in {".", ".."}:
        raise AdapterError("The name of an adapter has 1 to 128 letters, digits, dots, underscores and hyphens.")
    if name == model:
        raise AdapterError(f"{name} is the name of the base model; give the adapter another name.")


MAX_CHARACTERS_OF_ONE = 512
MAX_PATTERN_BYTES = 1 << 17
"""Most memory of RE2 for one pattern: about 2,000 instructions."""
MAX_SET_BYTES = 1 << 23
"""Most memory of RE2 for all patterns of a key."""
_READ_OTHERWISE = re.compile(r"\{,|\[:|\\[1-9pPQC]")
"""Syntax that RE2 reads in another way than :mod:`re`, or that :mod:`re` refuses: ``{,3}``, ``[[:alpha:]]``, ``\\10``, ``\\pL`` and
others. RE2 also needs long to compile sets such as ``\\pL``."""


class PatternError(ValueError):
    """Patterns are not supported. The text goes on after the name of their key."""


class Patterns:
    """Numbers by patterns of the last parts of a module's name, as PEFT's ``get_pattern_key`` matches them. The first pattern that
    matches counts."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        """Raises :class:`PatternError`."""
        self._numbers = [*numbers.values()]
        self._set = re2.Set.SearchSet(_options(MAX_SET_BYTES))
        for pattern in numbers:
            if problem := _problem(pattern):
                raise PatternError(f"has {pattern!r:.80}, which {problem}")
            self._set.Add(rf"(?:^|\.)(?:{pattern})$".encode())
        self._set.Add(b"")  # matches each name, so no match at all means that memory is lacking
        try:
            self._set.Compile()
        except re2.error:
            raise PatternError("has patterns that are too large together; use fewer or simpler ones") from None

    def number_of(self, module: str, default: float) -> float:
        """Return the number of a module, or ``default`` if no pattern matches its name. Raises :class:`AdapterError`."""
        found: list[int] | None = self._set.Match(module)
        if not found:
            raise AdapterError("rank_pattern or alpha_pattern takes too much memory; use fewer or simpler patterns.")
        return [*self._numbers, default][min(found)]


def _problem(pattern: str) -> str:
    """Return why a pattern is not supported; empty if it is."""
    if not 0 < len(pattern) <= MAX_CHARACTERS_OF_ONE:
        return f"has {len(pattern)} characters, not 1 to {MAX_CHARACTERS_OF_ONE}"
    if not pattern.isascii():
        return "has characters that are not ASCII; no module's name has any"
    if other := _READ_OTHERWISE.search(pattern):
        return f"contains {other[0]}, and that is not supported"
    alone = re2.Set.FullMatchSet(_options(MAX_PATTERN_BYTES))
    try:
        alone.Add(pattern.encode())
    except re2.error:
        return f"RE2 cannot read ({_reason(pattern)}); it has no look-around and no back references"
    try:
        alone.Compile()
    except re2.error:
        return "is too large; use smaller counts of repetition"
    return ""


def _reason(pattern: str) -> str:
    """Return what RE2 says of a pattern that it cannot read. Its sets do not say it."""
    try:
        re2.compile(pattern.encode(), _options(MAX_PATTERN_BYTES))
    except re2.error as error:
        return f"{error.args[0].decode():.80}"
    return "without a reason"


def _options(max_bytes: int) -> re2.Options:
    options = re2.Options()
    options.max_mem, options.log_errors = max_bytes, False
    options.encoding = re2.Options.Encoding.LATIN1  # smaller programs than UTF-8; names and patterns are ASCII
    return options


CONFIG_FILE = "adapter_config.json"
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
    """Those of :data:`~engine.models.lora.slots.WHOLE` that are in ``modules_to_save``."""
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
    """Read the contents of :data:`CONFIG_FILE`. ``modules``: those of :data:`~engine.models.lora.slots.WHOLE` that adapters may
    have. Raises
    :class:`AdapterError`."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise AdapterError(f"{CONFIG_FILE} is not JSON; copy the adapter again.") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object; copy the adapter again.")
    try:
        return _parse(raw, Keys(raw, CONFIG_FILE), modules)
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
