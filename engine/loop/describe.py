"""The description of a served model for the gateway."""

from __future__ import annotations

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import ModelConfig
from yardstick_llm.engine.models.encoder_config import EncoderConfig
from yardstick_llm.engine.models.lenvm import LenVM
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels.largest import MOST


def describe(
    config: ModelConfig | EncoderConfig,
    settings: EngineSettings,
    slots: int,
    digest: str,
    lenvm: LenVM | None = None,
    gamma: float | None = None,
    *,
    calibration: wire.Calibration | None = None,
    grammar: bool = False,
) -> wire.Info:
    """Return the description of the model and its limits for the gateway. ``gamma``, ``calibration``: of the length model.
    Head rows that only one of two models has are padding."""
    vocab_size = config.vocab_size if lenvm is None else min(config.vocab_size, lenvm.config.vocab_size)
    able = {
        "score": config.lm_head,
        "generate": config.lm_head,
        "classify": bool(config.classes),
        "embed": config.pooling is not None and config.pooling.mode is not None,
        "token_vectors": config.token_vectors > 0,
        "sparse": config.sparse != "none",
        "length_guidance": lenvm is not None,
        "grammar": grammar,
        "vision": config.vision is not None,
    }
    return wire.Info(
        model=settings.name,
        fingerprint=digest,
        vocab_size=vocab_size,
        max_context=config.max_context,
        eos_token_ids=list(config.eos_token_ids),
        capabilities=[name for name, is_able in able.items() if is_able],
        limits=wire.Limits(
            max_branches=10_000,
            max_slots=slots,
            max_logprobs=20,
            max_labels=1000,
            max_sequences=128,
            max_candidates=min(MOST, 1 << vocab_size.bit_length() - 1),
        ),
        lenvm_gamma=gamma,
        lenvm_calibration=calibration,
        classes=list(config.classes),
        multi_label=config.multi_label,
        regression=config.regression,
        embedding_size=0 if config.pooling is None or config.pooling.mode is None else config.pooling.size(config.hidden_size),
        pooling="" if config.pooling is None else "+".join(config.pooling.modes),
        token_vector_size=config.token_vectors,
    )
