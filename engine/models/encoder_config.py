"""Configurations of encoders: families as data, and what is read of ``config.json``.

An encoder's tokens all attend to each other. To add a family that differs by these flags and names only, add an entry to
:data:`BODIES`. Sources: the classes of Hugging Face transformers; for NomicBERT, GTE and jina-embeddings-v3 the configurations and
tensor names that are published with the weights (``nomic-ai/nomic-embed-text-v1.5``, ``nomic-embed-text-v2-moe``,
``Alibaba-NLP/gte-multilingual-base``, ``jinaai/xlm-roberta-flash-implementation``), which came before these classes and have other
names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from yardstick_llm.engine.models.config import MAX_LAYERS, MULTI_LABEL, REGRESSION, BaseConfig, ExpertConfig, class_names
from yardstick_llm.engine.models.files import Keys, ModelError, is_gguf, read_json
from yardstick_llm.engine.models.gguf.config import configuration, is_encoder_file
from yardstick_llm.engine.models.pooling import (
    HF_COLBERT,
    MODULES_FILE,
    ROUTER,
    ROUTER_FILE,
    SPLADE,
    SPLADE_LOGS,
    STATIC,
    TASKS_KEY,
    Pooling,
    check_inside,
    load_pooling,
    max_seq_length,
    read_config,
    read_modules,
    root_of,
    scores_pairs,
)
from yardstick_llm.engine.models.rope import NtkRope, Rope
from yardstick_llm.kernels.attention_spec import PLAIN, AttentionSpec

Head = Literal["classes", "sparse", "none"]
HEADS: dict[str, Head] = {"ForSequenceClassification": "classes", "ForMaskedLM": "sparse", "Model": "none"}
"""Second part of an architecture's name, and what its head is for."""
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
    "tanh": "tanh",
}
"""Activations by their names in configurations. ``gelu_tanh`` is GELU, approximated by tanh."""
MAX_CONTEXT = 1 << 20
QUERY_TABLES = "SparseStaticEmbedding", "IDF"
"""Modules that weigh a query's tokens by a table; the second is an earlier name of the first."""
SPARSE_HEAD, TOKEN_HEAD = "sparse_linear.pt", "colbert_linear.pt"
"""Heads of bge-m3: weights of tokens, and vectors of tokens."""


@dataclass(frozen=True)
class HeadNames:
    """Tensors of a head, and its function: ``out(norm(activation(dense(hidden))))``."""

    dense: str
    out: str
    norm: str = ""
    """Empty: no norm."""
    activation: str = ""
    """Empty: that of the model's layers."""
    bias: str = ""
    """Name of the bias of ``out``; empty for ``out.bias``."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of a model that has LoRA matrices for each of them (jina-embeddings-v3). A text's first token names its task."""

    names: tuple[str, ...]
    """The token of a task has the id of its place here behind the vocabulary."""
    rank: int
    scale: float
    first_token: int
    """The token that a text begins with, which the token of a task stands for."""


@dataclass(frozen=True)
class EncoderFamily:
    """Flags and names of a kind of encoder."""

    model_type: str
    prefixes: tuple[str, ...]
    """Before the names of tensors outside heads, except in weights that a class without a head has saved."""
    outer: Mapping[str, str]
    """Our names of tensors outside the layers, and those of checkpoints."""
    layer: str
    """Beginning of the names of a layer's tensors, with its number for ``{}``; without that, all layers have the same weights."""
    inner: dict[str, tuple[str, ...]]
    """Our names of a layer's tensors, and those of the parts of which checkpoints make them up."""
    class_head: HeadNames
    masked_head: HeadNames | None = None
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names of keys of ``config.json``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that the configuration leaves out."""
    relative: bool = False
    """Scores have products with queries and keys of distances (DeBERTa)."""
    offset_positions: bool = False
    """The first position is that of the padding token, plus 1."""
    rotary: bool = False
    alibi: bool = False
    """Scores fall with the distance of two tokens, in each head at its own rate."""
    gated: bool = False
    gate_second: bool = False
    """The gate is behind what it multiplies."""
    qk_norm: bool = False
    """Queries and keys are normalised over all heads, and attention's output is normalised twice."""
    norms: Literal["before", "after"] = "after"
    """Place of a layer's norms: before attention and MLP, or after the sum with the residual."""
    biases: tuple[str, ...] = ("qkv", "out", "up", "down")
    """Projections that have a bias, if no key of the configuration says otherwise."""


_BERT_OUTER = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
_BERT_INNER = {
    "attention.qkv_proj": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.o_proj": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "mlp.gate_up_proj": ("intermediate.dense",),
    "mlp.down_proj": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
_POOLER_HEAD = HeadNames("pooler.dense", "classifier", activation="tanh")
_SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_BERT = EncoderFamily(
    "bert",
    ("bert.",),
    _BERT_OUTER,
    "encoder.layer.{}.",
    _BERT_INNER,
    _POOLER_HEAD,
    HeadNames(
        "cls.predictions.transform.dense",
        "cls.predictions.decoder",
        "cls.predictions.transform.LayerNorm",
        bias="cls.predictions.bias",
    ),
    defaults=_SHAPE | {"vocab_size": 30522},
)
_JINA = dataclasses.replace(
    _BERT,
    model_type="jina",
    outer={name: stored for name, stored in _BERT_OUTER.items() if name != "positions"},
    inner=_BERT_INNER | {"mlp.gate_up_proj": ("mlp.gated_layers",), "mlp.down_proj": ("mlp.wo",), "mlp_norm": ("mlp.layernorm",)},
    masked_head=None,
    defaults=_SHAPE | {"vocab_size": 30528, "max_position_embeddings": 8192, "feed_forward_type": "geglu"},
    alibi=True,
    gated=True,
    biases=("qkv", "out", "down"),
)
"""Names of ``jinaai/jina-bert-implementation``, which are those of jina-embeddings-v2 and jina-reranker-v1."""
_JINA_CODE = dataclasses.replace(
    _JINA,
    inner=_BERT_INNER
    | {
        "attention.q_norm": ("attention.self.layer_norm_q",),
        "attention.k_norm": ("attention.self.layer_norm_k",),
        "second_norm": ("layer_norm_1",),
        "mlp.gate_up_proj": ("mlp.up_gated_layer",),
        "mlp.down_proj": ("mlp.down_layer",),
        "mlp_norm": ("layer_norm_2",),
    },
    gate_second=True,
    qk_norm=True,
)
"""Names of ``jinaai/jina-bert-v2-qk-post-norm``, which are those of jina-embeddings-v2-base-code. Source of its formulas:
``jina_code.rs`` of Text Embeddings Inference."""
_ROBERTA = dataclasses.replace(
    _BERT,
    model_type="roberta",
    prefixes=("roberta.",),
    class_head=HeadNames("classifier.dense", "classifier.out_proj", activation="tanh"),
    masked_head=HeadNames("lm_head.dense", "lm_head.decoder", "lm_head.layer_norm", "gelu", "lm_head.bias"),
    defaults=_SHAPE | {"vocab_size": 50265, "pad_token_id": 1},
    offset_positions=True,
)
_ROBERTA_FLASH = dataclasses.replace(
    _ROBERTA,
    outer=_BERT_OUTER | {"embedding_norm": "emb_ln"},
    layer="encoder.layers.{}.",
    inner={
        "attention.qkv_proj": ("mixer.Wqkv",),
        "attention.o_proj": ("mixer.out_proj",),
        "attention_norm": ("norm1",),
        "mlp.gate_up_proj": ("mlp.fc1",),
        "mlp.down_proj": ("mlp.fc2",),
        "mlp_norm": ("norm2",),
    },
)
"""Names of ``jinaai/xlm-roberta-flash-implementation``."""
_ROBERTA_ROTARY = dataclasses.replace(
    _ROBERTA_FLASH,
    outer={name: stored for name, stored in _ROBERTA_FLASH.outer.items() if name != "positions"},
    keys={"rope_theta": ("rotary_emb_base",)},
    defaults={**_ROBERTA.defaults, "rope_theta": 1e4},
    offset_positions=False,
    rotary=True,
)
"""jina-embeddings-v3 and jina-colbert-v2, with the same names."""
_MPNET = dataclasses.replace(
    _ROBERTA,
    model_type="mpnet",
    prefixes=("mpnet.",),
    outer={name: stored for name, stored in _BERT_OUTER.items() if name != "types"}
    | {"distances": "encoder.relative_attention_bias"},
    inner=_BERT_INNER
    | {
        "attention.qkv_proj": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention.o_proj": ("attention.attn.o",),
        "attention_norm": ("attention.LayerNorm",),
    },
    defaults=_SHAPE | {"vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32},
)
_ELECTRA = dataclasses.replace(
    _BERT,
    model_type="electra",
    prefixes=("electra.",),
    outer=_BERT_OUTER | {"embedding_projection": "embeddings_project"},
    class_head=HeadNames("classifier.dense", "classifier.out_proj", activation="gelu"),
    masked_head=None,
    defaults=_SHAPE | {"vocab_size": 30522, "embedding_size": 128},
)
_ALBERT = dataclasses.replace(
    _BERT,
    model_type="albert",
    prefixes=("albert.",),
    outer=_BERT_OUTER | {"embedding_projection": "encoder.embedding_hidden_mapping_in"},
    layer="encoder.albert_layer_groups.0.albert_layers.0.",
    inner={
        "attention.qkv_proj": ("attention.query", "attention.key", "attention.value"),
        "attention.o_proj": ("attention.dense",),
        "attention_norm": ("attention.LayerNorm",),
        "mlp.gate_up_proj": ("ffn",),
        "mlp.down_proj": ("ffn_output",),
        "mlp_norm": ("full_layer_layer_norm",),
    },
    class_head=HeadNames("pooler", "classifier", activation="tanh"),
    masked_head=None,
    defaults=_SHAPE
    | {
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
    },
)
_ERNIE = dataclasses.replace(
    _BERT,
    model_type="ernie",
    prefixes=("ernie.",),
    outer=_BERT_OUTER | {"task_types": "embeddings.task_type_embeddings"},
    defaults=_SHAPE | {"vocab_size": 30522, "task_type_vocab_size": 3},
)
_DEBERTA = dataclasses.replace(
    _BERT,
    model_type="deberta-v2",
    prefixes=("deberta.",),
    outer={name: stored for name, stored in _BERT_OUTER.items() if name != "positions"}
    | {"relative": "encoder.rel_embeddings", "relative_norm": "encoder.LayerNorm"},
    inner=_BERT_INNER
    | {"attention.qkv_proj": ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")},
    class_head=HeadNames("pooler.dense", "classifier", activation="gelu"),
    masked_head=None,
    defaults=_SHAPE
    | {
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
    },
    relative=True,
)
_DISTILBERT = EncoderFamily(
    "distilbert",
    ("distilbert.",),
    {name: stored for name, stored in _BERT_OUTER.items() if name != "types"},
    "transformer.layer.{}.",
    {
        "attention.qkv_proj": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.o_proj": ("attention.out_lin",),
        "attention_norm": ("sa_layer_norm",),
        "mlp.gate_up_proj": ("ffn.lin1",),
        "mlp.down_proj": ("ffn.lin2",),
        "mlp_norm": ("output_layer_norm",),
    },
    HeadNames("pre_classifier", "classifier", activation="relu"),
    HeadNames("vocab_transform", "vocab_projector", "vocab_layer_norm"),
    keys={
        "hidden_size": ("dim",),
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "intermediate_size": ("hidden_dim",),
        "hidden_act": ("activation",),
    },
    defaults=_SHAPE | {"vocab_size": 30522, "num_hidden_layers": 6, "type_vocab_size": 0},
)
_MODERNBERT = EncoderFamily(
    "modernbert",
    ("model.",),
    {"embed": "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm", "final_norm": "final_norm"},
    "layers.{}.",
    {
        "attention_norm": ("attn_norm",),
        "attention.qkv_proj": ("attn.Wqkv",),
        "attention.o_proj": ("attn.Wo",),
        "mlp_norm": ("mlp_norm",),
        "mlp.gate_up_proj": ("mlp.Wi",),
        "mlp.down_proj": ("mlp.Wo",),
    },
    HeadNames("head.dense", "classifier", "head.norm"),
    HeadNames("head.dense", "decoder", "head.norm"),
    keys={"hidden_act": ("hidden_activation",), "layer_norm_eps": ("norm_eps",)},
    defaults=_SHAPE
    | {
        "vocab_size": 50368,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "type_vocab_size": 0,
    },
    rotary=True,
    gated=True,
    norms="before",
    biases=(),
)
_NOMIC = EncoderFamily(
    "nomic_bert",
    ("nomic_bert.", "bert."),
    {"embed": "embeddings.word_embeddings", "types": "embeddings.token_type_embeddings", "embedding_norm": "emb_ln"},
    "encoder.layers.{}.",
    {
        "attention.qkv_proj": ("attn.Wqkv",),
        "attention.o_proj": ("attn.out_proj",),
        "attention_norm": ("norm1",),
        "mlp.gate_up_proj": ("mlp.fc12", "mlp.fc11"),
        "mlp.down_proj": ("mlp.fc2",),
        "mlp_norm": ("norm2",),
    },
    _POOLER_HEAD,
    keys={
        "hidden_size": ("n_embd",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "intermediate_size": ("n_inner",),
        "max_position_embeddings": ("n_positions",),
        "hidden_act": ("activation_function",),
        "layer_norm_eps": ("layer_norm_epsilon",),
        "rope_theta": ("rotary_emb_base",),
    },
    defaults=_SHAPE | {"vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 1e3},
    rotary=True,
    gated=True,
    biases=(),
)
_NOMIC_PLAIN = dataclasses.replace(
    _NOMIC, inner=_NOMIC.inner | {"mlp.gate_up_proj": ("mlp.fc1",)}, defaults={**_NOMIC.defaults, "num_experts": 0}, gated=False
)
"""With an activation that is no gate, and experts in some layers (nomic-embed-text-v2-moe)."""
_GTE = EncoderFamily(
    "gte",
    ("new.", "gte."),
    {name: stored for name, stored in _BERT_OUTER.items() if name != "positions"},
    "encoder.layer.{}.",
    {
        "attention.qkv_proj": ("attention.qkv_proj",),
        "attention.o_proj": ("attention.o_proj",),
        "attention_norm": ("attn_ln",),
        "mlp.gate_up_proj": ("mlp.up_gate_proj",),
        "mlp.down_proj": ("mlp.down_proj",),
        "mlp_norm": ("mlp_ln",),
    },
    _POOLER_HEAD,
    HeadNames("lm_head.dense", "lm_head.decoder", "lm_head.norm", "gelu"),
    defaults=_SHAPE
    | {"vocab_size": 250048, "max_position_embeddings": 8192, "type_vocab_size": 1, "rope_theta": 1.6e5, "pad_token_id": 1},
    rotary=True,
    gated=True,
    gate_second=True,
    biases=("qkv", "out", "down"),
)
_TABLE = EncoderFamily(
    "static",
    (),
    {"embed": "embedding"},
    "",
    {},
    _POOLER_HEAD,
    defaults=_SHAPE | {"num_attention_heads": 1, "num_hidden_layers": 0, "max_position_embeddings": 1 << 20},
)
"""A table alone, without layers. Nothing cuts its texts."""

BODIES: dict[str, EncoderFamily] = {
    "Bert": _BERT,
    "JinaBert": _JINA,
    "JinaBertCode": _JINA_CODE,
    "Roberta": _ROBERTA,
    "XLMRoberta": dataclasses.replace(_ROBERTA, model_type="xlm-roberta", defaults={**_ROBERTA.defaults, "vocab_size": 30522}),
    "XLMRobertaFlash": _ROBERTA_FLASH,
    "XLMRobertaRotary": _ROBERTA_ROTARY,
    "Camembert": dataclasses.replace(_ROBERTA, model_type="camembert", defaults={**_ROBERTA.defaults, "vocab_size": 30522}),
    "MPNet": _MPNET,
    "Electra": _ELECTRA,
    "Albert": _ALBERT,
    "Ernie": _ERNIE,
    "DebertaV2": _DEBERTA,
    "DistilBert": _DISTILBERT,
    "ModernBert": _MODERNBERT,
    "NomicBert": _NOMIC,
    "NomicBertPlain": _NOMIC_PLAIN,
    "Gte": _GTE,
    "New": _GTE,
}
"""First part of an architecture's name. XLMRobertaFlash and XLMRobertaRotary are XLMRoberta in ``config.json``, JinaBertCode is
JinaBert and NomicBertPlain is NomicBert; their tensors have other names."""
FAMILIES: dict[str, tuple[EncoderFamily, Head]] = {
    body + suffix: (family, head) for body, family in BODIES.items() for suffix, head in HEADS.items()
} | {HF_COLBERT: (_BERT, "none"), f"{HF_COLBERT}Rotary": (_ROBERTA_ROTARY, "none"), STATIC: (_TABLE, "none")}
"""All supported architectures, by their names in ``config.json``, and those of bodies that have none there."""
_UNNAMED = "XLMRobertaFlash", "XLMRobertaRotary", "JinaBertCode", "NomicBertPlain", f"{HF_COLBERT}Rotary", STATIC
NAMED = tuple(name for name in FAMILIES if not name.startswith(_UNNAMED))
"""Those that files name."""
UNREAD = ("pooler.", "predictions.", "cls.", "lm_head.", "head.", "decoder.", "vocab_", "classifier.", "pre_classifier.")
"""Beginnings of the names of heads that may be stored and are not read."""


@dataclass(frozen=True)
class EncoderConfig(BaseConfig):
    """Shape, flags and limits of an encoder. Half of a window is on each side of a token."""

    eos_token_ids: ClassVar[tuple[int, ...]] = ()
    vision: ClassVar[None] = None
    lm_head: ClassVar[bool] = False
    """Whether the model predicts the next token."""
    max_context: int
    """Tokens of a sequence, of both texts where it is a pair."""
    norm_eps: float
    activation: str
    """A value of :data:`ACTIVATIONS`."""
    positions: int = 0
    """Rows of the table of positions; 0 without a table."""
    first_position: int = 0
    """Row of the first token."""
    type_count: int = 0
    """Rows of the table of token types; 0 without a table."""
    task_types: int = 0
    """Rows of a table whose first row is added to each token (ERNIE); 0 without one."""
    embedding_size: int = 0
    """Width of the tables, if a projection makes the hidden size of it; else 0."""
    distance_buckets: int = 0
    """Rows of the table of biases by distance; 0 without one."""
    distance_span: int = 0
    """Half of the rows of the table of distances; 0 without one."""
    distance_limit: int = 0
    """Largest distance, where distances share the rows of that table; 0 where each distance has one."""
    distance_norm: bool = False
    """Whether the rows of that table are normalised."""
    rope: Rope | None = None
    biases: frozenset[str] = frozenset()
    """See :attr:`EncoderFamily.biases`; and ``norms``."""
    head_activation: str = "tanh"
    head_bias: bool = True
    class_modules: Pooling | None = None
    """Modules of sentence-transformers that make the scores of a cross-encoder without a head of its own; None for other models."""
    sparse: Literal["vocabulary", "tokens", "none"] = "none"
    """Weights of vocabulary entries: the largest of a masked language model's logits over all tokens, as log(1 + relu) (SPLADE); or
    that of a head with one number for each token (bge-m3)."""
    sparse_logs: int = 1
    """How often SPLADE takes log(1 + x): twice for ``log1p_relu``."""
    query_folder: str = ""
    """Folder of the table with the weights of a query's tokens; empty for models without one."""
    token_vectors: int = 0
    """Length of the vector of each token; 0 where the model makes none."""
    token_head: bool = False
    """Whether a projection of its own makes the vectors of tokens (bge-m3). Without one, modules that pool nothing do (ColBERT), or
    they are the hidden states."""
    ignored: tuple[int, ...] = ()
    """Tokens without a weight in ``sparse`` of ``tokens``, and in queries with a table of weights."""
    tied: bool = True
    """The head over the vocabulary, where there is one, is the embedding."""
    tasks: Tasks | None = None

    @property
    def family(self) -> EncoderFamily:
        return FAMILIES[self.architecture][0]

    @property
    def modules(self) -> Pooling | None:
        """Pooling and projections, of vectors or of scores."""
        return self.class_modules or self.pooling

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def typed(self) -> bool:
        """Whether the second text of a pair has a token type of its own. Tokenisers of the RoBERTa family give none."""
        return self.type_count > 1 and not self.family.offset_positions

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """How the queries of each layer attend."""
        if self.distance_span:
            return [AttentionSpec((3 * self.head_dim) ** -0.5)] * self.num_layers  # three sums of products
        return [PLAIN if window is None else AttentionSpec(None, window) for window in self.windows] or [PLAIN] * self.num_layers

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation in ``layer``."""
        local = self.local_rope is not None and bool(self.windows) and self.windows[layer] is not None
        return self.local_rope if local else self.rope


def is_encoder(directory: Path) -> bool:
    """Whether the architecture of the model in ``directory`` is an encoder's. Raises :class:`ModelError`."""
    if is_gguf(directory):
        return is_encoder_file(directory)
    keys = Keys(read_config(directory), "config.json")
    # Where there is none, that of a model of text and images is in another place.
    return keys.present("architectures") and keys.strings("architectures")[0] in FAMILIES


def load_encoder_config(directory: Path, max_context: int | None = None) -> EncoderConfig:
    """Read ``config.json`` and the files of :mod:`engine.models.pooling`, or a GGUF file. Raises :class:`ModelError`.

    ``max_context``: see :attr:`~engine.settings.EngineSettings.max_context`.
    """
    config = parse_encoder_config(configuration(directory) if is_gguf(directory) else read_config(directory))
    head, root = FAMILIES[config.architecture][1], root_of(directory)
    logs = 0 if head != "sparse" else _splade_logs(root) if (root / MODULES_FILE).is_file() else 1
    pooling = None if head == "classes" or logs else load_pooling(directory, config.hidden_size)
    longest = config.max_context
    if pooling is None or pooling.mode is not None:  # else queries and documents have limits of their own
        longest = min(longest, max_seq_length(directory) or longest)
    if max_context is not None and max_context > longest:
        raise ModelError(f"--max-context is {max_context}, and the model has a context of {longest}; lower it.")
    config = dataclasses.replace(config, max_context=max_context or longest)
    if head == "classes":
        return config
    if logs:
        if config.family.masked_head is None:
            raise ModelError(f"The head of a {config.architecture} is not supported; use a model with a Pooling module.")
        config = dataclasses.replace(config, sparse="vocabulary", sparse_logs=logs, query_folder=_query_folder(root))
        return dataclasses.replace(config, ignored=_special_tokens(directory)) if config.query_folder else config
    if pooling is None and is_gguf(directory):
        raise ModelError(f"{directory.name} says no pooling_type; use a file of an embedding model or a cross-encoder.")
    if pooling is None:
        modules = [name for name, _ in read_modules(root / MODULES_FILE)] if (root / MODULES_FILE).is_file() else []
        found = f"the modules in {MODULES_FILE} ({', '.join(modules):.200}) have none" if modules else f"there is no {MODULES_FILE}"
        raise ModelError(
            f"The architecture {config.architecture} in config.json has no head that is read, and {found} with a Pooling or Dense "
            "module; add the model's sentence-transformers files, or use another model."
        )
    if scores_pairs(directory):
        return _scored_by_modules(config, pooling)
    vectors = pooling.size(config.hidden_size) if pooling.mode is None else config.hidden_size
    own = pooling.mode is not None and (directory / TOKEN_HEAD).is_file()
    config = dataclasses.replace(config, pooling=pooling, token_vectors=vectors, token_head=own)
    if not (directory / SPARSE_HEAD).is_file():
        return config
    return dataclasses.replace(config, sparse="tokens", ignored=_special_tokens(directory))


def _scored_by_modules(config: EncoderConfig, pooling: Pooling) -> EncoderConfig:
    """Return the configuration of a cross-encoder that is saved as Transformer, Pooling and Dense. The last Dense makes scores."""
    if pooling.mode not in ("cls", "mean") or pooling.more or not pooling.projections:
        raise ModelError(f"{MODULES_FILE} of a cross-encoder must have Pooling of cls or mean, and Dense; use another model.")
    count = pooling.size(config.hidden_size)
    names = tuple(f"LABEL_{index}" for index in range(count))
    return dataclasses.replace(config, class_modules=pooling, classes=names, head_pooling=pooling.mode)


def _splade_logs(directory: Path) -> int:
    """How often the logarithm of SPLADE's weights is taken; 0 where the model's modules make none. Of a ``Router``, the route of
    documents is read: its queries have weights from a table. Raises :class:`ModelError` for weights that are not SPLADE's usual."""
    modules = dict(read_modules(directory / MODULES_FILE))
    if modules == {ROUTER: ""}:
        route = _route(directory, "document")
        modules = {name: folder for folder, name in route.items()} if next(iter(route), None) == "" else {}
    if SPLADE not in modules:
        return 0
    file = f"{modules[SPLADE]}/config.json"
    keys = Keys(read_json(directory / file) if (directory / file).is_file() else {}, file)
    activation = keys.text("activation_function", "relu")
    if activation not in SPLADE_LOGS:
        raise keys.error("activation_function", f"is {activation:.80}; only {' and '.join(SPLADE_LOGS)} are supported")
    if keys.text("pooling_strategy", "max") != "max":
        raise keys.error("pooling_strategy", f"is {keys.text('pooling_strategy', 'max'):.80}; only max is supported")
    return SPLADE_LOGS[activation]


def _query_folder(directory: Path) -> str:
    """Folder of the table for queries of a ``Router``; empty without one. Raises :class:`ModelError` for another route."""
    if not (directory / MODULES_FILE).is_file() or dict(read_modules(directory / MODULES_FILE)) != {ROUTER: ""}:
        return ""
    kinds = _route(directory, "query")
    folder = next(iter(kinds), "")
    if len(kinds) != 1 or kinds[folder] not in QUERY_TABLES:
        found = ", ".join(kinds.values()) or "no module"
        raise ModelError(f"{ROUTER_FILE} has {found} for queries, which is not supported; only {QUERY_TABLES[0]} is.")
    return folder


def _route(directory: Path, kind: str) -> dict[str, str]:
    """Folder and name of the class of each module that reads texts of a ``kind``; empty where the file has no such route. Raises
    :class:`ModelError`."""
    raw = read_json(directory / ROUTER_FILE) if (directory / ROUTER_FILE).is_file() else {}
    try:
        found = {str(folder): str(raw["types"][folder]).rpartition(".")[2] for folder in raw["structure"][kind]}
    except (KeyError, TypeError):
        return {}
    check_inside(found, ROUTER_FILE)
    return found


def _special_tokens(directory: Path) -> tuple[int, ...]:
    """Ids of the tokeniser's special tokens."""
    tokens = read_json(directory / "tokenizer.json").get("added_tokens") or []
    if not isinstance(tokens, list):
        raise ModelError("added_tokens in tokenizer.json is not a list; download the model again.")
    found = (token.get("id") for token in tokens if isinstance(token, dict) and token.get("special"))
    return tuple(sorted(token for token in found if isinstance(token, int)))


def parse_encoder_config(raw: dict[str, Any]) -> EncoderConfig:
    """A parsed ``config.json`` of an encoder. Raises :class:`ModelError`."""
    architecture = _architecture(raw)
    family, head = FAMILIES[architecture]
    renamed = {ours: raw[name] for ours, names in family.keys.items() for name in names if raw.get(name) is not None}
    if family.relative:
        raw = _without_absent(raw)
    keys = Keys({**family.defaults, **raw, **renamed}, "config.json")
    activation = _activation(keys, "hidden_act")
    rotary = family.rotary or keys.text("position_embedding_type", "absolute") == "rope"
    _refuse_unsupported(keys, family)
    relative = _distances(keys) if family.relative else (0, 0, False)
    hidden_size, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    layers = keys.count("num_hidden_layers") if family.inner else 0
    if layers > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"is {layers}; at most {MAX_LAYERS} are supported")
    if hidden_size % heads or (rotary and hidden_size // heads % 2):
        raise keys.error("hidden_size", f"({hidden_size}) is not {heads} heads of an even size; correct the file")
    width = keys.count("embedding_size", hidden_size)
    if width != hidden_size and "embedding_projection" not in family.outer:
        raise keys.error("embedding_size", f"is not hidden_size ({hidden_size}), which is not supported; use another model")
    written = keys.count("max_position_embeddings")
    if written > MAX_CONTEXT:
        raise keys.error("max_position_embeddings", f"is {written}; at most {MAX_CONTEXT} are supported")
    first = (keys.pad_token_id or 0) + 1 if family.offset_positions else 0
    if first >= written:
        raise keys.error("max_position_embeddings", f"is {written}, and positions begin at {first}; correct the file")
    types = keys.whole("type_vocab_size") if "types" in family.outer else 0
    rope, local_rope = _ropes(keys, family) if rotary else (None, None)
    tasks = _tasks(keys)
    return EncoderConfig(
        architecture=architecture,
        vocab_size=keys.count("vocab_size") + (0 if tasks is None else len(tasks.names)),
        hidden_size=hidden_size,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        max_context=written - first,
        norm_eps=keys.number("layer_norm_eps"),
        activation=activation,
        positions=written if "positions" in family.outer else 0,
        first_position=first,
        type_count=types,
        task_types=keys.count("task_type_vocab_size") if "task_types" in family.outer and keys.flag("use_task_id", False) else 0,
        embedding_size=width if width != hidden_size or family.model_type == "albert" else 0,
        distance_buckets=keys.count("relative_attention_num_buckets") if "distances" in family.outer else 0,
        distance_span=relative[0],
        distance_limit=relative[1],
        distance_norm=relative[2],
        rope=rope,
        local_rope=local_rope,
        windows=_windows(keys, layers) if family.model_type == "modernbert" else (),
        biases=_biases(keys, family),
        classes=class_names(keys) if head == "classes" else (),
        multi_label=head == "classes" and keys.text("problem_type", "") == MULTI_LABEL,
        regression=head == "classes" and keys.text("problem_type", "") == REGRESSION,
        head_pooling="mean" if keys.text("classifier_pooling", "cls") == "mean" else "cls",
        head_activation=_head_activation(keys, family, head, activation),
        head_bias=family.model_type != "modernbert" or keys.flag("classifier_bias", False),
        tied=keys.flag("tie_word_embeddings", True),
        tasks=tasks,
        experts=_experts(keys, raw, layers),
    )


def _experts(keys: Keys, raw: dict[str, Any], layers: int) -> ExpertConfig | None:
    """Each ``moe_every_n_layers``-th layer from the second one has them."""
    if not (keys.present("num_experts") and keys.whole("num_experts")):
        return None
    for key in ("expert_choice_router", "moe_normalize_expert_weights", "num_shared_experts"):
        if raw.get(key):
            raise keys.error(key, "is set, which is not supported; use another model")
    count, chosen, interval = keys.count("num_experts"), keys.count("moe_top_k", 1), keys.count("moe_every_n_layers")
    if chosen > count:
        raise keys.error("moe_top_k", f"is {chosen}, and there are {count} experts; correct the file")
    places = tuple(layer for layer in range(layers) if layer % interval == 1)
    return ExpertConfig(count, chosen, keys.count("intermediate_size"), renormalise=False, layers=places)


def _architecture(raw: dict[str, Any]) -> str:
    """A key of :data:`FAMILIES`."""
    name = Keys(raw, "config.json").strings("architectures")[0]
    if raw.get("position_embedding_type") == "rotary":
        name = name.replace("XLMRoberta", "XLMRobertaRotary").replace(HF_COLBERT, f"{HF_COLBERT}Rotary")
    if raw.get("activation_function") in ("gelu", "gelu_new", "relu"):
        name = name.replace("NomicBert", "NomicBertPlain")
    return name


def _tasks(keys: Keys) -> Tasks | None:
    if not keys.present(TASKS_KEY):
        return None
    names, rank = tuple(keys.strings(TASKS_KEY)), keys.count("lora_rank", 4)
    return Tasks(names, rank, keys.number("lora_alpha", 1.0) / rank, next(iter(keys.ids("bos_token_id")), 0))


def _activation(keys: Keys, key: str) -> str:
    name = keys.text(key, "gelu")
    if name not in ACTIVATIONS:
        raise keys.error(key, f"is {name:.80}; only {', '.join(ACTIVATIONS)} are supported")
    return ACTIVATIONS[name]


def _head_activation(keys: Keys, family: EncoderFamily, head: Head, activation: str) -> str:
    names = family.masked_head if head == "sparse" else family.class_head
    if family.model_type == "modernbert":
        return _activation(keys, "classifier_activation")
    return (names.activation if names is not None else "") or activation


def _refuse_unsupported(keys: Keys, family: EncoderFamily) -> None:
    usual = "rope" if family.rotary else "alibi" if family.alibi else "absolute"
    kind = keys.text("position_embedding_type", usual)
    kind = "rope" if kind == "rotary" else kind
    if kind != usual and family.model_type != "modernbert":  # whose files name a kind that no code reads
        raise keys.error("position_embedding_type", f"is {kind:.80}, which is not supported; use another model")
    for key, only in (
        ("is_decoder", False),
        ("sinusoidal_pos_embds", False),
        ("prenorm", False),
        ("parallel_block", False),
        ("causal", False),
        ("use_rms_norm", False),
        ("rotary_emb_interleaved", False),
        ("logn_attention_scale", False),
    ):
        if keys.flag(key, only) is not only:
            raise keys.error(key, f"is {str(not only).lower()}, which is not supported; use another model")
    for key in ("num_hidden_groups", "inner_group_num"):
        if keys.present(key) and keys.whole(key) != 1:
            raise keys.error(key, "is not 1, which is not supported; use another model")
    for key in ("quantization_config", "compression_config", "rotary_scaling_factor", "num_experts", "rotary_emb_scale_base"):
        if keys.present(key) and key not in family.defaults:
            raise keys.error(key, "is set, which is not supported; use another model")
    if keys.text("feed_forward_type", "geglu") != "geglu":
        raise keys.error("feed_forward_type", "is not supported; only geglu is")
    if keys.text("layer_norm_type", "layer_norm") != "layer_norm":
        raise keys.error("layer_norm_type", "is not supported; only layer_norm is")
    if keys.present("rotary_emb_fraction") and keys.number("rotary_emb_fraction") != 1.0:
        raise keys.error("rotary_emb_fraction", "is not 1, and rotating a part of each head is not supported; use another model")


def _without_absent(raw: dict[str, Any]) -> dict[str, Any]:
    """DeBERTa's ``config.json`` without numbers of -1, which stand for none, and with a list of kinds of attention."""
    kinds = raw.get("pos_att_type")
    own = {"pos_att_type": [each.strip() for each in kinds.lower().split("|")]} if isinstance(kinds, str) else {}
    return {key: value for key, value in raw.items() if value != -1} | own


def _distances(keys: Keys) -> tuple[int, int, bool]:
    """Span and limit of DeBERTa's distances, and whether their rows are normalised."""
    for key, wanted in (("relative_attention", True), ("share_att_key", True), ("position_biased_input", False)):
        if keys.flag(key, not wanted) is not wanted:
            raise keys.error(key, f"must be {str(wanted).lower()}, as in DeBERTa-v3; others are not supported")
    if keys.present("conv_kernel_size") and keys.whole("conv_kernel_size"):
        raise keys.error("conv_kernel_size", "is set, and convolutions are not supported; use a DeBERTa-v3")
    if set(keys.strings("pos_att_type")) != {"c2p", "p2c"}:
        raise keys.error("pos_att_type", "must be c2p and p2c, as in DeBERTa-v3; others are not supported")
    longest = keys.count("max_relative_positions", keys.count("max_position_embeddings"))
    buckets = keys.count("position_buckets") if keys.present("position_buckets") else 0
    if buckets and not 4 <= buckets < longest:
        raise keys.error("position_buckets", f"is {buckets}, and must be from 4 to below {longest}; correct the file")
    normalised = "layer_norm" in [each.strip() for each in keys.text("norm_rel_ebd", "none").lower().split("|")]
    return (buckets, longest, normalised) if buckets else (longest, 0, normalised)


def _biases(keys: Keys, family: EncoderFamily) -> frozenset[str]:
    if family.model_type == "modernbert":
        attention, mlp = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
        named = {"qkv": attention, "out": attention, "up": mlp, "down": mlp, "norms": keys.flag("norm_bias", False)}
        return frozenset(name for name, is_there in named.items() if is_there)
    found = {"norms", *family.biases}
    if family.model_type == "nomic_bert":
        written = (("qkv_proj_bias", ("qkv", "out")), ("mlp_fc1_bias", ("up",)), ("mlp_fc2_bias", ("down",)))
        found |= {name for key, names in written if keys.flag(key, False) for name in names}
    return frozenset(found)


def _windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """ModernBERT: each ``global_attn_every_n_layers``-th layer from the first has none."""
    window, interval = keys.count("local_attention", 128), keys.count("global_attn_every_n_layers", 3)
    kinds = ["sliding_attention" if layer % interval else "full_attention" for layer in range(layers)]
    if keys.present("layer_types"):
        kinds = keys.strings("layer_types")
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise keys.error("layer_types", "must name full_attention or sliding_attention for each layer; correct the file")
    found = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return found if any(found) else ()


def _ropes(keys: Keys, family: EncoderFamily) -> tuple[Rope, Rope | None]:
    """The rotation of all layers, and that of layers with a window, if they have one of their own."""
    inner = keys.section("rope_parameters")
    if family.model_type == "modernbert":
        found = []
        for kind, key, theta in (("full_attention", "global_rope_theta", 1.6e5), ("sliding_attention", "local_rope_theta", 1e4)):
            own = inner.section(kind) if inner is not None else None
            _only_default(own)
            given = keys.number(key, theta)
            found.append(Rope(given if own is None else own.number("rope_theta", given)))
        return found[0], found[1]
    scaling = keys.section("rope_scaling")
    theta = keys.number("rope_theta")
    if inner is not None:
        theta = inner.number("rope_theta", theta)
    for section in (inner, scaling):
        if section is not None and section.text("rope_type", section.text("type", "default")) == "ntk":
            return NtkRope(theta, section.number("factor")), None
        _only_default(section)
    return Rope(theta), None


def _only_default(section: Keys | None) -> None:
    if section is not None and section.text("rope_type", section.text("type", "default")) != "default":
        raise section.error("rope_type", "is not supported for encoders; only default and, for GTE, ntk are")
