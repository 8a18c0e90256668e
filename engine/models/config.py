"""Configuration of a decoder, read from and written to a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from yardstick_llm.engine.models import checkpoint
from yardstick_llm.engine.models.files import Keys, ModelError, is_gguf, read_json
from yardstick_llm.engine.models.gguf.config import configuration
from yardstick_llm.engine.models.pooling import MODULES_FILE, Pooling, load_pooling, max_seq_length, read_config, scores_pairs
from yardstick_llm.engine.models.registry import Family, Norms, family_of
from yardstick_llm.engine.models.rope import LongRope, Rope, longest_context, parse_ropes, parse_sections, rope_scaling, rotary_dim
from yardstick_llm.engine.models.vision.config import VisionConfig, flat, load_preprocessing, parse_vision
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec
from yardstick_llm.kernels.soft_cap import NO_CAP

SHARED_SIZE = "shared_expert_intermediate_size"
_SWITCHED = ("late", "switched", "early")
"""Values of :data:`~engine.models.registry.Windows` that ``use_sliding_window`` switches on."""


@dataclass(frozen=True)
class ExpertConfig:
    """Shape of a mixture of experts."""

    count: int
    chosen: int
    """Experts of each token."""
    size: int
    """Intermediate size of an expert."""
    renormalise: bool
    """The weights of a token's experts are divided by their sum."""
    layers: tuple[int, ...]
    """Layers that have experts; the others have a feed-forward layer."""
    held: range | None = None
    """Experts that a process has, if several share them (``--expert-parallel``); None: all."""
    shared_size: int = 0
    """Intermediate size of the shared expert; 0 without one."""


def windows(keys: Keys, family: Family, layers: int) -> tuple[int | None, ...]:
    """Read the window of each layer; return nothing if no layer has one."""
    on = family.windows not in _SWITCHED or keys.flag("use_sliding_window", False)
    window = keys.count("sliding_window") if on and keys.present("sliding_window") else None
    if keys.present("layer_types"):
        kinds = keys.strings("layer_types")
        if len(kinds) != layers:
            raise keys.error("layer_types", f"has {len(kinds)} entries, and num_hidden_layers is {layers}; correct the file")
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise keys.error("layer_types", f"asks for {unknown.pop()}, which is not supported; use another model")
        local = [kind == "sliding_attention" for kind in kinds]
        if window is None and any(local):
            raise keys.error("sliding_window", "is missing, and layer_types asks for it; correct the file")
    else:
        local = [_is_local(keys, family, layer, layers) for layer in range(layers)] if window is not None else []
    return tuple(window if is_local else None for is_local in local) if any(local) else ()


def _is_local(keys: Keys, family: Family, layer: int, layers: int) -> bool:
    """Whether ``layer`` has a window in a configuration without ``layer_types``."""
    if family.windows == "late":
        if "no_rope_layer_interval" in family.defaults:
            return layer in unrotated(keys, family, layers)
        return layer >= keys.count("max_window_layers", layers)
    if family.windows == "early":
        return layer % 2 == 0 and layer < keys.count("max_window_layers")
    if family.windows in ("all", "switched"):
        return True
    interval = 2 if family.windows == "alternate" else keys.count("sliding_window_pattern")
    return (layer + 1) % interval != 0


def unrotated(keys: Keys, family: Family, layers: int) -> tuple[int, ...]:
    """Read the layers without a rotation."""
    if family.unrotated_global:
        found = windows(keys, family, layers) or (None,) * layers
        return tuple(layer for layer in range(layers) if found[layer] is None) if keys.present("sliding_window") else ()
    if "no_rope_layer_interval" not in family.defaults:
        return ()
    rotated = keys.flags("no_rope_layers")  # which names the layers that have one
    if rotated and len(rotated) != layers:
        raise keys.error("no_rope_layers", f"has {len(rotated)} entries, and num_hidden_layers is {layers}; correct the file")
    interval = keys.count("no_rope_layer_interval")
    return tuple(layer for layer in range(layers) if not (rotated[layer] if rotated else (layer + 1) % interval))


def factors(keys: Keys, family: Family, hidden_size: int) -> dict[str, Any]:
    """Read scales, soft caps and divisors, by their names in :class:`~engine.models.config.ModelConfig`."""
    factors: dict[str, Any] = {}
    if family.scaled_embeddings:
        factors["embedding_scale"] = math.sqrt(hidden_size)
    if "query_pre_attn_scalar" in family.defaults:
        factors["attention_scale"] = keys.number("query_pre_attn_scalar") ** -0.5
        for key, name in (("attn_logit_softcapping", "attention_cap"), ("final_logit_softcapping", "logit_cap")):
            if keys.present(key):
                factors[name] = keys.number(key)
    if family.multipliers:
        factors["embedding_scale"] = keys.number("embedding_multiplier")
        factors["attention_scale"] = keys.number("attention_multiplier")
        factors["residual_scale"] = keys.number("residual_multiplier")
        factors["logit_divisor"] = keys.number("logits_scaling")
    return factors


def experts(keys: Keys, family: Family, layers: int) -> ExpertConfig | None:
    """Read the shape of the experts; None for a dense model."""
    if family.experts is None:
        return None
    count = keys.count("num_local_experts" if keys.present("num_local_experts") else "num_experts")
    chosen = keys.count("num_experts_per_tok")
    if chosen > count:
        raise keys.error("num_experts_per_tok", f"is {chosen}, and there are {count} experts; correct the file")
    if family.experts != "qwen":
        return ExpertConfig(count, chosen, keys.count("intermediate_size"), renormalise=True, layers=tuple(range(layers)))
    dense, interval = keys.ids("mlp_only_layers"), keys.count("decoder_sparse_step", 1)
    return ExpertConfig(
        count,
        chosen,
        keys.count("moe_intermediate_size"),
        renormalise=keys.flag("norm_topk_prob", False),
        layers=tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % interval == 0),
        shared_size=keys.count(SHARED_SIZE) if SHARED_SIZE in family.defaults else 0,
    )


CAUSAL_KEYS = (("is_causal", True), ("use_bidirectional_attention", False))
"""Keys of attention to later tokens, and their values without it."""
GELU = "gelu_pytorch_tanh"
"""GELU, approximated by tanh."""
OLD_GELU = "gelu"
"""Name of that GELU in ``hidden_act`` of early configurations of Gemma. In ``hidden_activation`` it names another function."""
MAX_LAYERS, MAX_CLASSES = 1024, 1 << 20
DEFAULT_CLASSES = 2
"""Default of Hugging Face transformers for ``num_labels``."""
MULTI_LABEL, REGRESSION = "multi_label_classification", "regression"
"""``problem_type`` of classes that do not exclude each other, and of numbers that are no classes."""


HeadPooling = Literal["cls", "last", "mean", "late"]
"""The input of a classification head: the hidden state of the first token (``cls``) or of the last one, or the mean of all. With
``late``, the inner layer computes each token, and the mean is taken of its results."""


@dataclass(frozen=True)
class BaseConfig:
    """Fields that the configurations of decoders and of encoders share."""

    architecture: str
    """A key of the table of families, ``FAMILIES``."""
    vocab_size: int
    """Rows of embedding and head."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    _: KW_ONLY
    local_rope: Rope | None = None
    """Rotation in layers with a window; None: that of the others."""
    windows: tuple[int | None, ...] = ()
    """Window of each layer, in tokens; None for attention to all tokens. Empty if no layer has one."""
    pooling: Pooling | None = None
    """None where the model does not embed."""
    classes: tuple[str, ...] = ()
    """Names of the classes of a classification head, in order; one for a reward model. Empty without such a head."""
    multi_label: bool = False
    """Whether classes do not exclude each other."""
    regression: bool = False
    """Whether the head's outputs are numbers and no classes."""
    head_pooling: HeadPooling = "last"
    experts: ExpertConfig | None = None
    """None for a dense model."""


@dataclass(frozen=True)
class ModelConfig(BaseConfig):
    """Shape, flags and limits of a decoder."""

    num_kv_heads: int
    """Divides ``num_heads``."""
    head_dim: int
    max_context: int
    """Tokens of prompt and output together."""
    rope: Rope
    norm_eps: float = 1e-6
    tied: bool = False
    """The language-model head, where there is one, is the embedding."""
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a generation."""
    lm_head: bool = True
    """Whether the model predicts tokens."""
    pad_token_id: int | None = None
    """A classification head reads the last token that is not this one."""
    qk_norm_over_heads: bool = False
    norms: Norms = "before"
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    gelu: bool = False
    fused_projections: bool = False
    fused_mlp: bool = False
    interleaved: bool = False
    """See :attr:`~engine.models.registry.Family.interleaved`. Weights are reordered as they are loaded."""
    rotary_dim: int | None = None
    """Elements of a head that are rotated, the first ones; None: all."""
    unrotated: tuple[int, ...] = ()
    """Layers without a rotation."""
    attention_scale: float | None = None
    """None: ``1 / sqrt(head_dim)``."""
    attention_cap: float = NO_CAP
    """Soft cap of attention's logits."""
    logit_cap: float = NO_CAP
    """Soft cap of the logits of tokens."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual."""
    logit_divisor: float = 1.0
    vision: VisionConfig | None = None
    """None where the model reads no images."""
    bidirectional: bool = False
    """Whether all tokens attend to each other, those of a layer with a window to tokens up to half of it away."""
    class_divisor: float = 1.0
    """The logits of classes are divided by it."""
    class_inner: bool = False
    """Whether the classification head has an inner layer, with GELU (EuroBERT)."""
    rope_sections: tuple[int, ...] = ()
    """Frequencies that turn by the time, the row and the column of a token, in this order; only of a model with :attr:`vision`."""
    sparse: ClassVar[str] = "none"
    """See :class:`~engine.models.encoder_config.EncoderConfig`."""

    @property
    def token_vectors(self) -> int:
        """Length of the vector of each token; 0 where the model makes none."""
        return self.pooling.size(self.hidden_size) if self.pooling is not None and self.pooling.mode is None else 0

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """How the queries of each layer attend. A window that no context exceeds is none, so that kernels without windows serve."""
        windows = (None if window is None or window >= self.max_context else window for window in self.windows)
        return [
            AttentionSpec(self.attention_scale, window, self.attention_cap) for window in tuple(windows) or [None] * self.num_layers
        ]

    @property
    def attends_plainly(self) -> bool:
        """Whether all layers attend to all tokens, with the usual scale and without a soft cap."""
        return all(spec == PLAIN for spec in self.attention_specs)

    @property
    def has_long_factors(self) -> bool:
        """Whether the rotation has LongRoPE's factors for contexts beyond the original one."""
        return isinstance(self.rope, LongRope) and self.rope.is_long

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation in ``layer``."""
        if layer in self.unrotated:
            return None
        local = self.local_rope is not None and bool(self.windows) and self.windows[layer] is not None
        return self.local_rope if local else self.rope

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_heads}) in config.json is not a multiple of num_key_value_heads "
                f"({self.num_kv_heads}); correct config.json."
            )
        if self.head_dim % 2:
            raise ModelError(
                f"head_dim ({self.head_dim}) in config.json is odd, but rotary embedding rotates pairs; correct config.json."
            )


def load_config(directory: Path, max_context: int | None = None) -> ModelConfig:
    """Read ``config.json`` and, where they exist, ``generation_config.json`` and the files of :mod:`engine.models.config`.

    ``max_context``: see :attr:`~engine.settings.EngineSettings.max_context`. Raises :class:`ModelError`.
    """
    raw, generation = _read_configuration(directory)
    config = parse_config(raw, generation, max_context)
    if config.vision is not None:
        vision = dataclasses.replace(config.vision, preprocessing=load_preprocessing(directory, config.vision))
        config = dataclasses.replace(config, vision=vision)
    pooling = load_pooling(directory, config.hidden_size)
    if pooling is None and not (config.lm_head or config.classes):
        raise ModelError(
            f"The architecture {config.architecture} in config.json has no head, and there is no {MODULES_FILE} with a Pooling "
            "module; add the model's sentence-transformers files."
        )
    if pooling is None:
        return config
    if scores_pairs(directory):
        raise ModelError(f"{MODULES_FILE} makes scores of a decoder's pooled vectors, which is not supported; use another model.")
    own = Keys(raw, "config.json").section("auto_map")
    says = family_of(config.architecture).bidirectional or any(Keys(raw, "config.json").present(key) for key, _ in CAUSAL_KEYS)
    if own is not None and own.present("AutoModel") and not says:
        raise ModelError(
            "auto_map in config.json names the model's own code, which decides whether tokens attend to later ones (those of "
            "gte-Qwen2-7B-instruct do); add is_causal to config.json: false if they do, true if they do not."
        )
    if not config.bidirectional and (pooling.modes not in (("last",), ("mean",)) or not pooling.include_prompt):
        how = f"by {' and '.join(pooling.modes) or 'token'}" if pooling.include_prompt else "without the prompt"
        raise ModelError(f"Pooling {how} is not supported where tokens attend to earlier ones only; use a model with last or mean.")
    if config.bidirectional and max_context is None:
        config = dataclasses.replace(config, max_context=min(config.max_context, max_seq_length(directory) or config.max_context))
    lm_head = config.lm_head and not checkpoint.saved_without_head(checkpoint.read_headers(directory))
    return dataclasses.replace(config, pooling=pooling, lm_head=lm_head)


def _read_configuration(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``generation_config.json``; of a GGUF file, what its metadata stand for."""
    if is_gguf(directory):
        return configuration(directory), {}
    generation = directory / "generation_config.json"
    return read_config(directory), read_json(generation) if generation.exists() else {}


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None, max_context: int | None = None) -> ModelConfig:
    """A parsed ``config.json`` and ``generation_config.json`` as a :class:`ModelConfig`, with at most ``max_context`` tokens.

    Raises :class:`ModelError`.
    """
    architecture = _architecture(raw)
    family = family_of(architecture)
    written, generation = flat(raw) if family.nested else raw, generation or {}
    written = _without_mixtures(written, family) if "shared_intermediate_size" in family.defaults else written
    keys = Keys(family.defaults | written, "config.json")
    _refuse_unsupported(keys, family)
    all_biased = keys.flag("use_bias", False)  # of ERNIE 4.5
    attention_bias = keys.flag("attention_bias", all_biased)
    hidden_size, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    vocab_size = keys.count("vocab_size")
    head_dim, rotated = keys.count("head_dim", hidden_size // heads), rotary_dim(keys, family)
    rope, local_rope = parse_ropes(keys, family, max_context)
    layers = keys.count("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"is {layers}; at most {MAX_LAYERS} are supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=head_dim,
        max_context=longest_context(keys.count("max_position_embeddings"), rope, max_context),
        rope=rope,
        rotary_dim=None if rotated == head_dim else rotated,
        norm_eps=keys.number("rms_norm_eps"),
        tied=keys.flag("tie_word_embeddings", False),
        qk_norm=family.qk_norm,
        qk_norm_over_heads=family.qk_norm_over_heads,
        norms=family.norms,
        norm_offset=1.0 if family.norms_add_one else 0.0,
        gelu=family.gelu,
        fused_projections=family.fused_projections,
        fused_mlp=family.fused_mlp,
        interleaved=family.interleaved,
        windows=windows(keys, family, layers),
        local_rope=local_rope,
        unrotated=unrotated(keys, family, layers),
        **factors(keys, family, hidden_size),
        experts=experts(keys, family, layers),
        qkv_bias=keys.flag("qkv_bias", True) if family.qkv_bias_only else attention_bias,
        o_bias=keys.flag("attention_out_bias", attention_bias and not family.qkv_bias_only),
        mlp_bias=keys.flag("mlp_bias", all_biased),
        eos_token_ids=_eos_token_ids(
            vocab_size, Keys(generation, "generation_config.json"), Keys(written, "config.json"), Keys(family.defaults, "")
        ),
        lm_head=family.head == "lm",
        classes=class_names(keys) if family.head == "classes" else (),
        multi_label=family.head == "classes" and keys.text("problem_type", "") == MULTI_LABEL,
        regression=family.head == "classes" and keys.text("problem_type", "") == REGRESSION,
        pad_token_id=keys.pad_token_id,
        bidirectional=family.bidirectional or any(keys.flag(key, causal) is not causal for key, causal in CAUSAL_KEYS),
        head_pooling=_head_pooling(keys, family),
        class_divisor=keys.number("temperature", 1.0) if family.bidirectional else 1.0,
        class_inner=family.class_inner and family.head == "classes",
        vision=parse_vision(keys, hidden_size, vocab_size) if family.vision else None,
        rope_sections=parse_sections(keys, head_dim) if family.vision else (),
    )


def _without_mixtures(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """``config.json`` of a dense Granite 4, whose class also has experts and Mamba, as that of a Granite 3. Raises
    :class:`ModelError`."""
    keys = Keys(family.defaults | raw, "config.json")
    if keys.whole("num_local_experts"):
        raise keys.error("num_local_experts", "is not 0, and experts of Granite 4 are not supported; use a dense model")
    kinds = keys.strings("layer_types") if keys.present("layer_types") else ["mamba"]
    if unknown := set(kinds) - {"attention", "full_attention"}:
        raise keys.error("layer_types", f"asks for {unknown.pop()}, which is not supported; use a model without -h in its name")
    if keys.text("position_embedding_type", "nope") != "rope":
        raise keys.error("position_embedding_type", "is not supported; only rope is")
    return raw | {"intermediate_size": keys.count("shared_intermediate_size"), "layer_types": None}


def architecture_of(directory: Path) -> str:
    """Return the architecture of the model in ``directory``. Raises :class:`ModelError`."""
    raw = _read_configuration(directory)[0]
    try:
        return _architecture(raw)
    except ModelError:
        return Keys(raw, "config.json").strings("architectures")[0]


def _architecture(raw: dict[str, Any]) -> str:
    """The first of ``architectures``, which release 4.57 of transformers writes into ``text_config`` of Qwen2.5-VL."""
    keys = Keys(raw, "config.json")
    inner = keys.section("text_config")
    if inner is not None and inner.present("architectures") and not keys.present("architectures"):
        architecture = inner.strings("architectures")[0]
        if family_of(architecture).nested:
            return architecture
    return keys.strings("architectures")[0]


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` that :func:`parse_config` reads back as ``config``; Hugging Face transformers reads it too.

    Raises :class:`ModelError` for configurations that it cannot express: of families that are served, and not trained here.
    """
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family_of(config.architecture).model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "tie_word_embeddings": config.tied,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
    }
    raw["eos_token_id"] = list(config.eos_token_ids) or None
    raw["pad_token_id"] = config.pad_token_id
    if config.classes:
        raw["id2label"] = {str(number): name for number, name in enumerate(config.classes)}
        raw["label2id"] = {name: number for number, name in enumerate(config.classes)}
    if config.multi_label:
        raw["problem_type"] = MULTI_LABEL
    if config.regression:
        raw["problem_type"] = REGRESSION
    try:
        written = parse_config(raw)
    except ModelError:  # about a value of ``raw``, which is not the model's
        written = None
    if written != dataclasses.replace(config, pooling=None, lm_head=family_of(config.architecture).head == "lm"):
        raise ModelError(
            f"The configuration of this {config.architecture} cannot be written, because only those of Llama, Qwen2 and Qwen3 "
            "without sliding windows can; train or convert a model of these families."
        )
    return raw


def _refuse_unsupported(keys: Keys, family: Family) -> None:
    known = GELU if family.gelu else "silu"
    for key in ("hidden_act", "hidden_activation"):
        old = family.gelu and key == "hidden_act" and keys.text(key, known) == OLD_GELU
        if keys.text(key, known) != known and not old:
            raise keys.error(key, f"is not supported; only {known} is")
    for key, causal in CAUSAL_KEYS:
        if keys.flag(key, causal) is not causal and family.head == "lm":
            raise keys.error(
                key, "asks for attention to later tokens, which a model that writes text cannot have; use another model"
            )
    if family.bidirectional and keys.text("pooling", "avg") != "avg":
        raise keys.error("pooling", "is not supported; only avg is")


def _head_pooling(keys: Keys, family: Family) -> HeadPooling:
    if not family.class_inner:
        return "mean" if family.bidirectional else "last"
    kinds: dict[str, HeadPooling] = {"bos": "cls", "mean": "mean", "late": "late"}
    key = "classifier_pooling" if keys.present("classifier_pooling") else "clf_pooling"  # before transformers had the class
    if (kind := keys.text(key, "late")) not in kinds:
        raise keys.error(key, f"is {kind:.80}; only {', '.join(kinds)} are supported")
    return kinds[kind]


def class_names(keys: Keys) -> tuple[str, ...]:
    """Names from ``id2label``, or those that Hugging Face transformers gives ``num_labels`` classes without names."""
    names = keys.numbered("id2label")
    count = keys.count("num_labels", len(names) or DEFAULT_CLASSES)
    if count > MAX_CLASSES:
        raise keys.error("num_labels", f"is {count}; at most {MAX_CLASSES} are supported")
    if names and len(names) != count:
        raise keys.error("num_labels", f"is {count}, but id2label has {len(names)} names; correct the file")
    return tuple(names) or tuple(f"LABEL_{number}" for number in range(count))


def _eos_token_ids(vocab_size: int, generation: Keys, config: Keys, defaults: Keys) -> tuple[int, ...]:
    """Ids of both files, each once, or the default where neither names any. Ids beyond the vocabulary can never be drawn and are
    left out."""
    ids = generation.ids("eos_token_id") + config.ids("eos_token_id")
    if not ids and not config.is_null("eos_token_id"):
        ids = defaults.ids("eos_token_id")
    return tuple(dict.fromkeys(token for token in ids if token < vocab_size))
