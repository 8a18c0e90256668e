"""One bidirectional encoder for every supported architecture, and the heads that read its hidden states.

What differs between families is data in :class:`~engine.models.encoder_config.EncoderConfig`: tables of positions and token types,
rotations, places of norms, gates, biases and windows. The encoder sees a flat run of tokens; the caller's ``attend`` decides which
keys each query sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from yardstick_llm.engine.ints import Ints
from yardstick_llm.engine.models.decoder import Decoder, DecoderLayer, PlainAttend
from yardstick_llm.engine.models.encoder_config import EncoderConfig, HeadNames, Tasks
from yardstick_llm.engine.models.modules import Embedding, Experts, GroupedLinear, Linear, Projected
from yardstick_llm.kernels.encoder_layers import Activation, EncoderLayers, LayerParts, SpinBarrier, embed, finish_layer, takes
from yardstick_llm.kernels.int8 import GATE_FIRST, GATE_SECOND, UNGATED
from yardstick_llm.kernels.linear import linear
from yardstick_llm.kernels.rms_norm import layer_norm
from yardstick_llm.kernels.rope import rope
from yardstick_llm.kernels.row_chunks import share
from yardstick_llm.kernels.runtime import compiles
from yardstick_llm.kernels.whole_attention import Layout

MOST_DISTANCE = 128
"""Distance from which on all have one bias, in MPNet."""
MOST_RELATED, RELATED_STEP = 512, 16
"""DeBERTa: the longest context for which a table holds the vectors of all distances, 6 MiB for a layer of size 768; and the number
of which its distances in each direction are a multiple, because loops take up to 16 at a time."""
LOGIT_ROWS = 128
"""Rows whose logits over the vocabulary exist at a time: 16 MiB for 30,522 entries."""


def _gelu_tanh(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
}
"""By the values of :data:`~engine.models.encoder_config.ACTIVATIONS`."""


@dataclass(slots=True)
class StepTasks:
    """The tasks of a step's tokens, which all parts of a model read."""

    factors: Tensor = field(default_factory=lambda: torch.empty(0))
    """[tokens, tasks · rank]: the scale at the places of a token's task, else 0."""

    def begin(self, tokens: Tensor, positions: Tensor, tasks: Tasks, vocabulary: int) -> Tensor:
        """Find the task of each token. tokens, positions: [tokens], of the step. -> the tokens, with the one that texts begin with
        in place of those of tasks."""
        starts = torch.arange(len(tokens), device=tokens.device).where(positions == 0, 0).cummax(0).values
        task = tokens[starts] - vocabulary
        chosen = task[:, None] == torch.arange(len(tasks.names), device=tokens.device)
        self.factors = (chosen * tasks.scale).repeat_interleave(tasks.rank, 1)
        return tokens.where(tokens < vocabulary, tasks.first_token)


class TaskDelta(nn.Module):
    """Adds ``scale · B · A · x`` to a projection, with the matrices of each token's task. Two thin products compute it for all
    tasks, and factors of 0 leave out the other tasks of a token."""

    def __init__(self, tasks: Tasks, step: StepTasks, size: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.step = step
        self.lora_A = nn.Parameter(torch.empty(len(tasks.names), tasks.rank, size, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(len(tasks.names), columns, tasks.rank, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add to y, [tokens, out], in place. x: [tokens, in], the projection's input."""
        inner = x @ self.lora_A.flatten(0, 1).T
        return y.addmm_(inner.mul_(self.step.factors), self.lora_B.transpose(1, 2).flatten(0, 1))


class EmbeddingTaskDelta(nn.Module):
    """Adds the same to the rows of an embedding, where ``A`` has a row for each token."""

    def __init__(self, tasks: Tasks, step: StepTasks, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.step = step
        self.lora_A = nn.Parameter(torch.empty(len(tasks.names), rows, tasks.rank, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(len(tasks.names), tasks.rank, size, dtype=dtype))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """Add to x, [tokens, size], in place. ids: [tokens], rows of the embedding."""
        inner = self.lora_A[:, ids].transpose(0, 1).flatten(1)
        return x.addmm_(inner.mul_(self.step.factors), self.lora_B.flatten(0, 1))


class LayerNorm(nn.Module):
    """A layer normalisation, whose weights are allocated and not initialised."""

    def __init__(self, size: int, config: EncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype)) if "norms" in config.biases else None
        self.eps = config.norm_eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[rows, size] -> [rows, size], of ``x + residual``, which takes the place of x."""
        return layer_norm(x, residual, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Projections and rotation of one layer's queries, keys and values; attending itself is the caller's."""

    def __init__(self, config: EncoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_heads
        size = config.hidden_size
        self.qkv_proj = Linear(size, 3 * size, bias="qkv" in config.biases, dtype=dtype)
        self.o_proj = Linear(size, size, bias="out" in config.biases, dtype=dtype)
        self.q_norm = LayerNorm(size, config, dtype) if config.family.qk_norm else None
        self.k_norm = LayerNorm(size, config, dtype) if config.family.qk_norm else None
        self.qkv_tasks: TaskDelta | None = None
        self.o_tasks: TaskDelta | None = None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, attend: PlainAttend) -> Tensor:
        """Without the output projection. x: [tokens, hidden]; rotation: cos and sin, [tokens, head_dim / 2]. -> [tokens, hidden]"""
        qkv = self.qkv_proj(x)
        if self.qkv_tasks is not None:
            qkv = self.qkv_tasks(x, qkv)
        q, k, v = qkv.view(len(x), 3, self.heads, -1).unbind(1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (norm(each.flatten(1)).view_as(each) for norm, each in ((self.q_norm, q), (self.k_norm, k)))
        if rotation is not None:
            q, k = rope(q, *rotation), rope(k, *rotation)
        return attend(self.layer, q, k, v).flatten(1)

    def projected(self, attended: Tensor) -> Tensor:
        """The output projection: [tokens, hidden] -> [tokens, hidden]"""
        y: Tensor = self.o_proj(attended)
        return y if self.o_tasks is None else self.o_tasks(attended, y)


class FeedForward(nn.Module):
    """Two layers with an activation between them, which is a gate in some families."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = config.activation
        self.activation = FUNCTIONS[config.activation]
        self.compute: Callable[[FeedForward, Tensor], Tensor] | None = None
        """Takes the place of :meth:`forward` where a number format has a faster order of operations."""
        self.gated, self.gate_first = config.family.gated, not config.family.gate_second
        self.kind = Activation(self.function, UNGATED if not self.gated else GATE_FIRST if self.gate_first else GATE_SECOND)
        size, inner = config.hidden_size, config.intermediate_size
        self.inner = inner
        self.gate_up_proj = Linear(size, (1 + self.gated) * inner, bias="up" in config.biases, dtype=dtype)
        """Gate ‖ up, or up ‖ gate, or up alone."""
        self.down_proj = Linear(inner, size, bias="down" in config.biases, dtype=dtype)
        self.up_tasks: TaskDelta | None = None
        self.down_tasks: TaskDelta | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        if self.up_tasks is not None and self.down_tasks is not None:
            inner = self.activated(self.up_tasks(x, self.gate_up_proj(x)))
            return self.down_tasks(inner, self.down_proj(inner))  # type: ignore[no-any-return]
        if self.compute is not None:
            return self.compute(self, x)
        return self.down_proj(self.activated(self.gate_up_proj(x)))  # type: ignore[no-any-return]

    def activated(self, x: Tensor) -> Tensor:
        """The activation between the projections: [tokens, inner or 2 · inner] -> [tokens, inner]"""
        if not self.gated:
            return self.activation(x)
        first, second = x.chunk(2, 1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.activation(gate).mul_(up)


class EncoderExperts(Experts):
    """Feed-forward layers without gates, of which a router chooses a few for each token, and a bias that all tokens get."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        super().__init__(config, None, dtype)
        assert config.experts is not None
        count, size, inner = config.experts.count, config.hidden_size, config.experts.size
        self.gate_up, self.gate = GroupedLinear(count, size, inner, dtype), FUNCTIONS[config.activation]
        self.down = GroupedLinear(count, size, inner, dtype)  # as checkpoints have it, until it is folded
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return super().forward(x) + self.bias

    def views(self) -> dict[str, Tensor]:
        """Names in checkpoints and the parts of parameters that they fill."""
        stacked = {"w1": self.gate_up.weight.flatten(0, 1), "w2": self.down.weight.flatten(0, 1)}
        views = {f"experts.mlp.{name}": view for name, view in stacked.items()}
        return views | {"router.layer.weight": self.router.weight, "experts.bias": self.bias}

    @torch.no_grad()
    def fold(self) -> None:
        """Bring what a checkpoint has filled into the layout of products."""
        self.down.weight = nn.Parameter(self.down.weight.transpose(1, 2).contiguous())


class EncoderLayer(nn.Module):
    """One layer."""

    def __init__(self, config: EncoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.before = config.family.norms == "before"
        self.attention = Attention(config, layer, dtype)
        chosen = config.experts is not None and layer in config.experts.layers
        self.mlp: FeedForward | EncoderExperts = EncoderExperts(config, dtype) if chosen else FeedForward(config, dtype)
        # Embeddings are normalised, so the first layer of ModernBERT has no norm of its own.
        self.attention_norm = None if self.before and layer == 0 else LayerNorm(config.hidden_size, config, dtype)
        self.second_norm = LayerNorm(config.hidden_size, config, dtype) if config.family.qk_norm else None
        """Normalises the sum of the output of ``attention_norm`` and the layer's input."""
        self.mlp_norm = LayerNorm(config.hidden_size, config, dtype)

    @property
    def parts(self) -> LayerParts:
        """Its modules. Not of a layer with experts."""
        attention, mlp = self.attention, self.mlp
        assert isinstance(mlp, FeedForward)
        first, norm, last = (
            (self.attention_norm, self.mlp_norm, None) if self.before else (None, self.attention_norm, self.mlp_norm)
        )
        assert norm is not None
        return LayerParts(first, attention.qkv_proj, attention.o_proj, norm, mlp.gate_up_proj, mlp.down_proj, last, mlp.kind)

    def task_deltas(self) -> dict[str, TaskDelta]:
        """By the name of the projection that each is added to."""
        attention, mlp = self.attention, self.mlp
        found = {"attention.qkv_proj": attention.qkv_tasks, "attention.o_proj": attention.o_tasks}
        if isinstance(mlp, FeedForward):
            found |= {"mlp.gate_up_proj": mlp.up_tasks, "mlp.down_proj": mlp.down_tasks}
        return {name: delta for name, delta in found.items() if delta is not None}

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, attend: PlainAttend) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.after_attention(self.attended(x, rotation, attend), x)

    def attended(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, attend: PlainAttend) -> Tensor:
        """Attention without its output projection: [tokens, hidden] -> [tokens, hidden]"""
        normed = x if not self.before or self.attention_norm is None else self.attention_norm(x)
        return self.attention(normed, rotation, attend)  # type: ignore[no-any-return]

    def after_attention(self, attended: Tensor, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """The rest of the layer. x: [tokens, hidden], the layer's input; rows: the only rows to compute; None for all. ->
        [tokens or rows, hidden]"""
        if rows is not None:
            attended, x = attended.index_select(0, rows), x.index_select(0, rows)
        whole = self.attention.o_tasks is None and isinstance(self.mlp, FeedForward) and self.second_norm is None
        if whole and (finished := finish_layer(attended, x, self.parts)) is not None:
            return finished
        if self.before:
            x = self.attention.projected(attended).add_(x)
            return self.mlp(self.mlp_norm(x)).add_(x)  # type: ignore[no-any-return]
        assert self.attention_norm is not None
        given, x = x, self.attention_norm(self.attention.projected(attended), x)
        x = x if self.second_norm is None else self.second_norm(x, given)
        return self.mlp_norm(self.mlp(x), x)  # type: ignore[no-any-return]


class Head(nn.Module):
    """``out(norm(activation(dense(hidden))))``: classes, or logits over the vocabulary."""

    def __init__(self, config: EncoderConfig, names: HeadNames, outputs: int, dtype: torch.dtype, *, dense_bias: bool) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=dense_bias, dtype=dtype)
        self.activation = FUNCTIONS[config.head_activation]
        self.norm = LayerNorm(config.hidden_size, config, dtype) if names.norm else None
        self.out = Linear(config.hidden_size, outputs, dtype=dtype)

    def inner(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the input of ``out``, the same shape, in float32."""
        x = self.activation(linear(hidden.float(), self.dense.weight.float(), _float(self.dense.bias)))
        if self.norm is None:
            return x
        return nn.functional.layer_norm(x, self.norm.weight.shape, self.norm.weight.float(), _float(self.norm.bias), self.norm.eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, outputs], float32, as are the products."""
        return linear(self.inner(hidden), self.out.weight.float(), _float(self.out.bias))


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


@dataclass(frozen=True, slots=True)
class Packed:
    """The sequences of a step, one after another."""

    attend: PlainAttend
    types: Tensor | None
    """[tokens] int32, the type of each token; None: all are 0."""
    layout: Layout
    """Sequences of the step, or of the part of it that one thread computes alone."""
    parts: Sequence[Part] = ()
    """Parts of the step, each of which one thread computes. Empty: the step is computed as a whole."""
    spans: Sequence[slice] = ()
    """Tokens that each thread computes where layers are one call and sequences are cut. Empty: one thread computes all."""
    threads: int | None = None
    """That compute the parts; None: all of torch's."""
    barrier: SpinBarrier | None = None
    """Where the threads of a step wait for each other, if its sequences are cut."""
    narrow: bool = False
    """See :func:`~kernels.whole_attention.whole_attention`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :data:`~engine.models.decoder.PlainAttend`."""
        return self.attend(layer, q, k, v)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a step, which one thread computes from their embeddings to their hidden rows."""

    tokens: slice
    step: Packed


class Encoder(nn.Module):
    """The whole model. Weights are uninitialised until a loader fills them."""

    inverse_frequencies: Tensor

    def __init__(self, config: EncoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        size, family, width = config.hidden_size, config.family, config.embedding_size or config.hidden_size
        self.embed = Embedding(config.vocab_size - (0 if config.tasks is None else len(config.tasks.names)), width, dtype=dtype)
        self.positions = Embedding(config.positions, width, dtype=dtype) if config.positions else None
        self.types = Embedding(config.type_count, width, dtype=dtype) if config.type_count else None
        self.task_types = Embedding(config.task_types, width, dtype=dtype) if config.task_types else None
        """Until it is folded."""
        self.distances = Embedding(config.distance_buckets, config.num_heads, dtype=dtype) if config.distance_buckets else None
        self.relative = Embedding(2 * config.distance_span, size, dtype=dtype) if config.distance_span else None
        """DeBERTa: what queries and keys of distances are made of."""
        self.relative_norm = LayerNorm(size, config, dtype) if config.distance_norm else None
        self._relative_heads: dict[int, tuple[Tensor, Tensor]] = {}
        self.embedding_norm = LayerNorm(width, config, dtype) if "embedding_norm" in family.outer else None
        self.embedding_projection = Linear(width, size, dtype=dtype) if config.embedding_size else None
        own = config.num_layers if "{}" in family.layer else min(1, config.num_layers)
        layers = [EncoderLayer(config, layer, dtype) for layer in range(own)]
        self.layers = nn.ModuleList(layers[min(layer, own - 1)] for layer in range(config.num_layers))
        """Where all layers have the same weights, the list repeats one module."""
        self.final_norm = LayerNorm(size, config, dtype) if family.norms == "before" else None
        self._step_tasks = StepTasks()
        self.embed_tasks: EmbeddingTaskDelta | None = None
        self.types_tasks: EmbeddingTaskDelta | None = None
        if config.tasks is not None:
            self._add_tasks(config.tasks)
        self.class_head: Head | None = None
        self.masked_head: Head | None = None
        if config.classes and config.class_modules is None:
            self.class_head = Head(config, family.class_head, len(config.classes), dtype, dense_bias=config.head_bias)
        if config.sparse == "vocabulary" and family.masked_head is not None:
            self.masked_head = Head(config, family.masked_head, config.vocab_size, dtype, dense_bias=config.head_bias)
            if config.tied:
                self.masked_head.out.weight = self.embed.weight
        self.projected = Projected(() if config.modules is None else config.modules.projections)
        self.token_weight = Linear(size, 1) if config.sparse == "tokens" else None
        """bge-m3: the weight of each token."""
        self.query_weights: Tensor | None = None
        """[vocab] float32 on the CPU: the weight of each token of a query, where a table has them."""
        self.token_projection = Linear(size, config.token_vectors) if config.token_head else None
        """bge-m3: the vector of each token."""
        ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        self._ropes = [each for each in dict.fromkeys(ropes) if each is not None]
        self._rope_of = [None if each is None else self._ropes.index(each) for each in ropes]
        frequencies = [each.inverse_frequencies(config.head_dim) for each in self._ropes]
        self.register_buffer(
            "inverse_frequencies", torch.stack(frequencies) if frequencies else torch.empty(0, 0), persistent=False
        )

    def _add_tasks(self, tasks: Tasks) -> None:
        step, dtype, size = self._step_tasks, self.embed.weight.dtype, self.config.hidden_size
        self.embed_tasks = EmbeddingTaskDelta(tasks, step, len(self.embed.weight), size, dtype)
        if self.types is not None:
            self.types_tasks = EmbeddingTaskDelta(tasks, step, len(self.types.weight), size, dtype)
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            assert isinstance(layer.mlp, FeedForward)
            for part, name, tasked in (
                (layer.attention, "qkv_proj", "qkv_tasks"),
                (layer.attention, "o_proj", "o_tasks"),
                (layer.mlp, "gate_up_proj", "up_tasks"),
                (layer.mlp, "down_proj", "down_tasks"),
            ):
                columns, size = part.get_parameter(f"{name}.weight").shape
                setattr(part, tasked, TaskDelta(tasks, step, size, columns, dtype))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Packed, rows: Tensor | None = None) -> Tensor:
        """tokens, positions: [tokens] int64, each sequence's from 0. rows: [rows] int64, the tokens whose hidden rows are wanted;
        None for all. -> hidden rows, [tokens or rows, hidden].

        Threads compute a part each. If they shared each operation, each would wait for the others to wake, some hundred times.
        """
        if rows is not None and not len(rows):  # all are queries whose weights are in a table
            return self.embed.weight.new_empty(0, self.config.hidden_size)
        parts = attend.parts
        if not parts:
            return self._compute(tokens, positions, attend, rows)
        wanted = torch.arange(len(tokens)) if rows is None else rows
        hidden = torch.empty(len(wanted), self.config.hidden_size, dtype=self.embed.weight.dtype)

        def compute(which: slice) -> None:
            for part in parts[which]:
                span, step = part.tokens, part.step
                places = torch.nonzero((wanted >= span.start) & (wanted < span.stop)).squeeze(1)
                try:
                    hidden[places] = self._compute(tokens[span], positions[span], step, wanted[places] - span.start)
                except BaseException:
                    if step.barrier is not None:
                        step.barrier.abort()
                    raise

        share(compute, [slice(place, place + 1) for place in range(len(parts))], attend.threads)
        return hidden

    def _compute(self, tokens: Tensor, positions: Tensor, attend: Packed, rows: Tensor | None) -> Tensor:
        """:meth:`forward` of a step or a part of one, in one call for each thread where that can be."""
        if not self.layers:
            return self._embedded(tokens if rows is None else tokens[rows], positions, attend.types)
        if self.config.tasks is not None:
            tokens = self._step_tasks.begin(tokens, positions, self.config.tasks, len(self.embed.weight))
            hidden = self.from_last_attention(*self.to_last_attention(tokens, positions, attend))  # factors are of all tokens
            return hidden if rows is None else hidden.index_select(0, rows)
        if self.native_layers is None:
            attended, x = self.to_last_attention(tokens, positions, attend)
        else:
            spans = attend.spans or [slice(0, len(tokens))]
            whole = rows is None or 2 * len(rows) > len(tokens)
            x, runs = self._embedded(tokens, positions, attend.types), tuple(attend.layout.runs)
            attended, x = self.native_layers(x, self._rotations(positions), runs, spans, whole=whole, narrow=attend.narrow)
            if whole:
                return self._normed(x if rows is None else x.index_select(0, rows))
        return self.from_last_attention(attended, x, rows) if rows is None or len(rows) else x[:0]

    def to_last_attention(self, tokens: Tensor, positions: Tensor, attend: Packed) -> tuple[Tensor, Tensor]:
        """Compute :meth:`forward` up to the last layer's attention. -> its output, and the layer's input, [tokens, hidden] each."""
        x = self._embedded(tokens, positions, attend.types)
        cos, sin = self._rotations(positions)
        rotation_of = [None if at is None else (cos[at], sin[at]) for at in self._rope_of]
        for layer, rotation in zip(self.layers, rotation_of[:-1], strict=False):
            x = layer(x, rotation, attend)
        return self._last_layer.attended(x, rotation_of[-1], attend), x

    def _embedded(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """-> the input of the first layer, [tokens, hidden]"""
        x = self._of_tables(tokens, positions, types)
        return x if self.embedding_projection is None else self.embedding_projection(x)

    def _of_tables(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """-> normalised sums of rows, [tokens, width]"""
        if compiles(self.embed.weight.detach()) and self.embed_tasks is None and self.embedding_norm is not None:
            places, kinds = (None if each is None else each.weight for each in (self.positions, self.types))
            first = self.config.first_position
            return embed(tokens, positions, first, types, self.embed.weight, places, kinds, self.embedding_norm)
        x = self.embed(tokens)
        if self.positions is not None:
            x.add_(self.positions(positions + self.config.first_position if self.config.first_position else positions))
        if self.types is not None:
            x.add_(self.types.weight[0] if types is None else self.types(types))
        if self.embed_tasks is not None:
            x = self.embed_tasks(tokens, x)
            x = x if self.types_tasks is None else self.types_tasks(torch.zeros_like(tokens) if types is None else types, x)
        return x if self.embedding_norm is None else self.embedding_norm(x)  # type: ignore[no-any-return]

    def from_last_attention(self, attended: Tensor, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """The rest of :meth:`forward`, from what :meth:`to_last_attention` returns."""
        return self._normed(self._last_layer.after_attention(attended, x, rows))

    def _normed(self, x: Tensor) -> Tensor:
        """The final norm, in a family whose norms are before each part of a layer."""
        return x if self.final_norm is None else self.final_norm(x)

    @cached_property
    def native_layers(self) -> EncoderLayers | None:
        """All layers, for one call on each thread; None for a family or a format that this cannot compute. The weights must be
        loaded before."""
        layers = [layer for layer in self.layers if isinstance(layer, EncoderLayer)]
        config = self.config
        suits = compiles(self.embed.weight.detach()) and (self.relative is None or config.max_context <= MOST_RELATED)
        suits = suits and config.tasks is None and config.experts is None and not config.family.qk_norm and len(layers) > 0
        if not (suits and all(takes(layer.parts) for layer in layers)):
            return None
        parts, specs = [layer.parts for layer in layers], config.attention_specs
        relative = None if self.relative is None else [self._related(layer) for layer in range(len(layers))]
        return EncoderLayers(parts, specs, self._rope_of, config.num_heads, self._added_by_distance(), relative)

    @property
    def _last_layer(self) -> EncoderLayer:
        layer = self.layers[-1]
        assert isinstance(layer, EncoderLayer)
        return layer

    @property
    def is_biased(self) -> bool:
        """Whether :meth:`score_bias` is to be added to scores."""
        return self.distances is not None or self.relative is not None

    @property
    def slopes(self) -> Tensor | None:
        """See :func:`~kernels.whole_attention.whole_attention`. Source: Press et al. 2022, arXiv 2108.12409, whose code takes every
        other rate of twice as many heads for those beyond the largest power of two."""
        if not self.config.family.alibi:
            return None
        heads = self.config.num_heads
        most = 1 << heads.bit_length() - 1
        rates = [2 ** (-8 * head / most) for head in range(1, most + 1)]
        rates += [2 ** (-4 * head / most) for head in range(1, 2 * (heads - most), 2)]
        return torch.tensor(rates).to(self.embed.weight.device)

    @torch.inference_mode()
    def _added_by_distance(self) -> Tensor | None:
        """Biases of scores that depend on the distance of two tokens alone: ``distances`` of
        :class:`~kernels.encoder_layers.EncoderLayers`. None: the model has none."""
        if self.slopes is None and self.distances is None:
            return None
        apart = torch.arange(1 - self.config.max_context, self.config.max_context)
        if self.slopes is not None:
            return -self.slopes[:, None] * apart.abs()
        return self._bias_at(apart).contiguous()

    @torch.inference_mode()
    def _related(self, layer: int) -> Tensor:
        """DeBERTa: ``relative`` of a layer, see :class:`~kernels.encoder_layers.EncoderLayers`."""
        most = -(-self.config.max_context // RELATED_STEP) * RELATED_STEP
        queries, keys = self._heads_of_distances(layer)
        del self._relative_heads[layer]
        rows = self._rows_at(torch.arange(most, -most, -1))
        return torch.stack([keys[:, rows], queries[:, rows]])

    @torch.inference_mode()
    def distances_of(self, length: int) -> Tensor:
        """The part of the biases for sequences of ``length`` tokens that is the same in all layers: see :meth:`score_bias`.

        MPNet: biases, [heads, length, length]. DeBERTa: rows of ``relative``, [length, length] int64.
        """
        table, places = self._by_distance, torch.arange(length, device=self.embed.weight.device)
        return table[..., places[:, None] - places + self.config.max_context - 1]

    @cached_property
    def _by_distance(self) -> Tensor:
        """MPNet: the bias, [heads, distances]; DeBERTa: the row, [distances]; of each distance of a query from its key, from the
        most negative on. Buckets are computed on the CPU: on a GPU, the logarithm of a distance at the edge of one may round to
        another."""
        apart = torch.arange(1 - self.config.max_context, self.config.max_context)
        return self._bias_at(-apart) if self.relative is None else self._rows_at(apart).to(self.embed.weight.device)

    def score_bias(self, layer: int, distances: Mapping[int, Tensor], q: Tensor, k: Tensor) -> Tensor:
        """See :data:`~kernels.whole_attention.Bias`. ``distances``: :meth:`distances_of` by length.

        DeBERTa adds the products of each query with the key of the distance, and of each key with the query of the distance, and
        scales the sum of all three. Source: He et al. 2021, arXiv 2006.03654.
        """
        found = distances[q.shape[2]][..., : k.shape[2]]
        if self.relative is None:
            return found[None]
        queries, keys = self._heads_of_distances(layer)  # [heads, distances, head_dim]
        shape = *q.shape[:3], k.shape[2]
        by_query = (q @ keys.transpose(1, 2)).gather(3, found.expand(shape))
        by_key = (k @ queries.transpose(1, 2)).gather(3, found.t().expand(*shape[:2], shape[3], shape[2])).transpose(2, 3)
        scale = self.config.attention_specs[layer].scale
        assert scale is not None
        return by_query.add_(by_key).mul_(scale)

    def _heads_of_distances(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of all distances in a layer, [heads, distances, head_dim] each; computed once."""
        if layer not in self._relative_heads:
            assert self.relative is not None
            rows = self.relative.weight if self.relative_norm is None else self.relative_norm(self.relative.weight)
            whole = self.layers[layer]
            assert isinstance(whole, EncoderLayer)
            projected = whole.attention.qkv_proj(rows).view(len(rows), 3, self.config.num_heads, -1)
            queries, keys, _ = (each.transpose(0, 1).contiguous() for each in projected.unbind(1))
            self._relative_heads[layer] = queries, keys
        return self._relative_heads[layer]

    def _rows_at(self, apart: Tensor) -> Tensor:
        """DeBERTa: the row of each distance. apart: place of a query minus place of its key. -> int64, of the same shape

        With buckets, distances of less than half of them have one each, and larger ones share them at equal steps of the logarithm.
        """
        config, span = self.config, self.config.distance_span
        if config.distance_limit:
            middle = span // 2
            far = torch.where(apart.abs() < middle, middle - 1, apart.abs())
            steps = torch.log(far / middle) / torch.log(torch.tensor((config.distance_limit - 1) / middle)) * (middle - 1)
            apart = torch.where(far <= middle, apart, (steps.ceil() + middle).long() * apart.sign())
        return (apart + span).clamp_(0, 2 * span - 1)

    def _bias_at(self, apart: Tensor) -> Tensor:
        """MPNet: the bias of each distance. apart: place of a key minus place of the query. -> [heads, *shape of ``apart``], on the
        model's device

        Half of the buckets are for each direction; half of these for one distance each, the others for distances up to 128, at
        equal steps of the logarithm. Source: Raffel et al. 2020, arXiv 1910.10683.
        """
        assert self.distances is not None
        buckets = self.config.distance_buckets // 2
        near, far = apart.abs(), apart.abs().clamp(min=1).float()
        exact = buckets // 2
        large = exact + (torch.log(far / exact) / math.log(MOST_DISTANCE / exact) * (buckets - exact)).to(torch.long)
        bucket = (apart > 0) * buckets + torch.where(near < exact, near, large.clamp(max=buckets - 1))
        return self.distances(bucket.to(self.distances.weight.device)).movedim(-1, 0)  # type: ignore[no-any-return]

    def class_rows(self, hidden: Tensor) -> Tensor:
        """See :meth:`Decoder.class_rows`."""
        return hidden

    def class_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] of first tokens, or means over sequences. -> [rows, classes], float32."""
        head = self.projected if self.class_head is None else self.class_head
        return head(hidden)  # type: ignore[no-any-return]

    def vocabulary_weights(self, hidden: Tensor) -> Tensor:
        """SPLADE: hidden: [tokens, hidden] of one sequence. -> [vocab] float32, log(1 + relu(logit)) of the largest logit, or with
        ``sparse_logs`` of 2 log(1 + that)."""
        head = self.masked_head
        assert head is not None
        largest: Tensor | None = None
        for part in torch.split(head.inner(hidden), LOGIT_ROWS):
            found = linear(part, head.out.weight.float(), _float(head.out.bias)).amax(0)
            largest = found if largest is None else torch.maximum(largest, found)
        assert largest is not None
        largest.relu_()
        for _ in range(self.config.sparse_logs):
            largest.log1p_()
        return largest

    def token_weights(self, hidden: Tensor) -> Tensor:
        """bge-m3: hidden: [tokens, hidden]. -> [tokens] float32, at least 0."""
        assert self.token_weight is not None
        return self.token_weight(hidden.float()).squeeze(1).relu_()  # type: ignore[no-any-return]

    def weights_of_tokens(self, tokens: Ints, weights: npt.NDArray[np.float32]) -> list[float]:
        """tokens, weights: [tokens], of one sequence. -> each token that is not ignored, and the largest of its weights above 0."""
        ids, places = np.unique(tokens, return_inverse=True)
        largest = np.zeros(len(ids), np.float32)
        np.maximum.at(largest, places, weights)
        largest[np.isin(ids, self.config.ignored)] = 0
        kept = np.flatnonzero(largest)
        return id_weight_pairs(ids[kept], largest[kept])

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, hidden]. -> [tokens, size] float32."""
        pools = self.config.pooling is not None and self.config.pooling.mode is not None
        if self.token_projection is not None:
            return self.token_projection(hidden.float())  # type: ignore[no-any-return]
        return hidden.float() if pools else self.projected(hidden.float())

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [rotations, tokens, head_dim / 2] float32; empty in a model without rotations."""
        if not self._ropes:
            return self.inverse_frequencies, self.inverse_frequencies
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies[:, None]
        return angles.cos(), angles.sin()

    @torch.no_grad()
    def fold(self) -> None:
        """Bring what a checkpoint has filled into the layout of products."""
        if self.task_types is not None and self.types is not None:
            self.types.weight.add_(self.task_types.weight[0])
            self.task_types = None
        for part in self.modules():
            if isinstance(part, EncoderExperts):
                part.fold()

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Checkpoint name of each tensor, without a prefix -> the part of a parameter that it fills, detached and writable."""
        return {name: view.detach() for name, view in self._views()}

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        family = self.config.family
        for ours, stored in family.outer.items():
            for module in (getattr(self, ours), getattr(self, f"{ours}_tasks", None)):
                yield from _parts((stored,), module) if module is not None else ()
        for index, layer in enumerate(self.layers):
            prefix = family.layer.format(index)
            assert isinstance(layer, EncoderLayer)
            if isinstance(layer.mlp, EncoderExperts):
                yield from ((f"{prefix}mlp.{name}", view) for name, view in layer.mlp.views().items())
            for ours, names in family.inner.items():
                if ours.startswith("mlp.") and isinstance(layer.mlp, EncoderExperts):
                    continue
                if ours != "attention_norm" or getattr(layer, ours) is not None:
                    yield from _parts(tuple(prefix + name for name in names), layer.get_submodule(ours))
            for ours, delta in layer.task_deltas().items():
                yield from _parts((prefix + family.inner[ours][0],), delta)
        for head, its in ((self.class_head, family.class_head), (self.masked_head, family.masked_head)):
            if head is None or its is None:
                continue
            yield from _parts((its.dense,), head.dense)
            yield from _parts((its.norm,), head.norm) if head.norm is not None else ()
            if head.out.weight is not self.embed.weight:
                yield f"{its.out}.weight", head.out.weight
            assert head.out.bias is not None
            yield its.bias or f"{its.out}.bias", head.out.bias


def id_weight_pairs(ids: npt.NDArray[np.integer], weights: npt.NDArray[np.float32]) -> list[float]:
    """Each id and its weight, in turn: a row of :class:`engine.wire.Sparse`."""
    return np.stack([ids.astype(np.float64), weights.astype(np.float64)], 1).ravel().tolist()


Model = Decoder | Encoder
"""A model that the runner computes."""
Layer = DecoderLayer | EncoderLayer


def _parts(names: tuple[str, ...], module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for kind, parameter in module.named_parameters():
        for name, view in zip(names, parameter.chunk(len(names)), strict=True):
            yield f"{name}.{kind}", view
