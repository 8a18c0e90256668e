"""Describes a served model and its limits to gateways, as :class:`engine.wire.Info`."""

from __future__ import annotations

from engine import wire
from engine.models.config import ModelConfig
from engine.models.lenvm import LenVM
from engine.settings import EngineSettings
from kernels.largest import MOST


def describe(
    config: ModelConfig,
    settings: EngineSettings,
    slots: int,
    digest: str,
    lenvm: LenVM | None = None,
    gamma: float | None = None,
    *,
    grammar: bool = False,
) -> wire.Info:
    """Return the description of the model and its limits for the gateway. ``gamma``: of the length model, if there is one.
    Head rows that only one of two models has are padding."""
    vocab_size = config.vocab_size if lenvm is None else min(config.vocab_size, lenvm.config.vocab_size)
    return wire.Info(
        model=settings.name,
        fingerprint=digest,
        vocab_size=vocab_size,
        max_context=config.max_context,
        eos_token_ids=list(config.eos_token_ids),
        capabilities=capabilities(config, lenvm, grammar=grammar),
        limits=wire.Limits(
            max_branches=10_000,
            max_slots=slots,
            max_logprobs=20,
            max_labels=1000,
            max_sequences=128,
            max_candidates=min(MOST, 1 << vocab_size.bit_length() - 1),
        ),
        lenvm_gamma=gamma,
        classes=list(config.classes),
        multi_label=config.multi_label,
        regression=config.regression,
        embedding_size=0 if config.pooling is None else config.hidden_size,
    )


def capabilities(config: ModelConfig, lenvm: LenVM | None, *, grammar: bool = False) -> list[str]:
    """:attr:`engine.wire.Info.capabilities`."""
    able = {
        "score": config.lm_head,
        "generate": config.lm_head,
        "classify": bool(config.classes),
        "embed": config.pooling is not None,
        "length_guidance": lenvm is not None,
        "grammar": grammar,
        "vision": config.vision is not None,
    }
    return [name for name, is_able in able.items() if is_able]
