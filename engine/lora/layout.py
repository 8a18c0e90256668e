"""Where the projections that an adapter changes are in a decoder whose projections are fused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.models.config import ModelConfig

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that an adapter may change, by their names in checkpoints; with fused checkpoints, :data:`FUSED` as well."""
FUSED = ("qkv_proj", "gate_up_proj")
WHOLE = ("lm_head", "embed_tokens")
"""Modules of [vocab, hidden] numbers that an adapter may bring whole, where the engine takes them."""


class Part(NamedTuple):
    """One projection of the checkpoint within a fused one."""

    name: str
    """Below ``model.layers.N.``, such as ``self_attn.q_proj``."""
    outputs: int


class Product(NamedTuple):
    """One matrix product of a layer."""

    layer: int
    module: str
    """Below the layer of the decoder, such as ``attention.qkv_proj``."""
    inputs: int
    parts: tuple[Part, ...]
    """In the order of the output's columns."""

    @property
    def outputs(self) -> int:
        """Columns of the output."""
        return sum(part.outputs for part in self.parts)

    def numbers(self, rank: int) -> int:
        """Numbers of an adapter of this rank."""
        return rank * (len(self.parts) * self.inputs + self.outputs)


class Layout:
    """The products of a decoder that adapters may change, in the order of their index."""

    def __init__(self, config: ModelConfig) -> None:
        self.products = list(_products(config))
        self.places = {
            (product.layer, part.name): (index, number)
            for index, product in enumerate(self.products)
            for number, part in enumerate(product.parts)
        }
        """Index of the product and number of the part, by layer and name of the projection."""
        self.layers = config.num_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.has_token_head = config.lm_head
        self.tied = config.tied


def _products(config: ModelConfig) -> Iterator[Product]:
    hidden, size, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    if config.fused_projections:
        qkv: tuple[Part, ...] = (Part("self_attn.qkv_proj", q + 2 * kv),)
        gate_up: tuple[Part, ...] = (Part("mlp.gate_up_proj", 2 * size),)
    else:
        qkv = Part("self_attn.q_proj", q), Part("self_attn.k_proj", kv), Part("self_attn.v_proj", kv)
        gate_up = Part("mlp.gate_proj", size), Part("mlp.up_proj", size)
    for layer in range(config.num_layers):
        yield Product(layer, "attention.qkv_proj", hidden, qkv)
        yield Product(layer, "attention.o_proj", q, (Part("self_attn.o_proj", hidden),))
        if config.experts is None or layer not in config.experts.layers:
            yield Product(layer, "mlp.gate_up_proj", hidden, gate_up)
            yield Product(layer, "mlp.down_proj", size, (Part("mlp.down_proj", hidden),))
