"""The measured model, random weights in the shape of published measurements or a real model, and the scoring workload."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.config import ExpertConfig, ModelConfig, load_config
from yardstick_llm.engine.models.decoder import Decoder, DecoderLayer
from yardstick_llm.engine.models.formats.quantization import FORMATS, bounded, format_of, kv_bounds, pack_head
from yardstick_llm.engine.models.loader import load_model, save_model
from yardstick_llm.engine.models.rope import Rope
from yardstick_llm.engine.models.source import locate

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""Largest difference of a log-probability between two methods; in fewer bits than float32, of nine tenths of them. In bfloat16 the
standard deviation is about 0.03."""
QUANTIZED_TOLERANCE = 1.5
"""Largest difference if one method or both compute in 8 bits. Random weights magnify its rounding: of 2 million
log-probabilities in FP8 after 28 layers, one in a thousand differed by more than 0.9, and one by 1.6."""

SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_context=40_960,
    rope=Rope(1_000_000.0),
    tied=True,
    qk_norm=True,
)
QWEN3_06B = replace(SMALL, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128)
QWEN3_8B = replace(QWEN3_06B, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32, tied=False)
QWEN3_30B_A3B = replace(
    QWEN3_06B,
    architecture="Qwen3MoeForCausalLM",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    tied=False,
    experts=ExpertConfig(count=128, chosen=8, size=768, renormalise=True, layers=tuple(range(48))),
)
TINY = replace(SMALL, vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
SHAPES = {"tiny": TINY, "small": SMALL, "qwen3-0.6b": QWEN3_06B, "qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}
"""``tiny`` only shows that a benchmark works, and ``small`` is for CPUs; the others are shapes of published numbers."""
QWEN25_7B = replace(
    SMALL,
    architecture="Qwen2ForCausalLM",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    max_context=32_768,
    tied=False,
    qk_norm=False,
    qkv_bias=True,
)
QWEN25_15B = replace(QWEN25_7B, hidden_size=1536, intermediate_size=8960, num_heads=12, num_kv_heads=2, tied=True)
"""Shapes of the published measurements of length guidance; the length model has the base model's vocabulary."""


LABELS_BELOW = 256
"""Upper bound of label ids. Every tokeniser has these tokens as text; the last rows of a head are often padding."""


@dataclass(frozen=True)
class Workload:
    """One request's lengths, in tokens."""

    query: int = 120
    item: int = 180
    items: int = 10
    labels: int = 2

    def __str__(self) -> str:
        return f"{self.query}/{self.item}/{self.items}"

    @property
    def tokens(self) -> int:
        """Number of tokens that must be computed: the query once and every item once."""
        return self.query + self.items * self.item

    def request(self, name: str, rng: np.random.Generator, vocab_size: int) -> wire.Score:
        """Return one request of random token ids; no two requests share text."""

        def tokens(*shape: int) -> Any:
            return rng.integers(0, vocab_size, shape).tolist()

        labels = rng.choice(LABELS_BELOW, self.labels, replace=False).tolist()
        return wire.Score(name, tokens(self.query), tokens(self.items, self.item), wire.Labels(labels))


@dataclass(frozen=True)
class Subject:
    """The measured model and its number format."""

    directory: Path
    config: ModelConfig
    dtype: str
    quantize: str | None = None
    kv_dtype: str = "auto"

    @property
    def format(self) -> str:
        """Number format, as named in tables."""
        name = self.dtype if self.quantize is None else f"{self.dtype}, {self.quantize.upper()}"
        return name if self.kv_dtype == "auto" else f"{name}, KV in {self.kv_dtype.upper()}"

    @property
    def is_exact(self) -> bool:
        """Whether another method gives the same numbers but for the order of sums in float32."""
        return self.format == "float32"

    @property
    def tolerance(self) -> float:
        """See :data:`TOLERANCE`."""
        return TOLERANCE[self.dtype] if self.format == self.dtype else QUANTIZED_TOLERANCE

    def load(self) -> Decoder:
        """Load the weights, on a GPU if there is one. Raises :class:`~engine.models.files.ModelError`."""
        device, dtype = default_device(), getattr(torch, self.dtype)
        if self.quantize is not None:
            FORMATS[self.quantize].check_device(device, dtype)
        return load_model(self.directory, dtype, format_of(self.quantize, device, dtype)).to(device)


@contextmanager
def subject(
    shape: str, model: str | None, dtype: str, quantize: str | None = None, models: Path | None = None
) -> Iterator[Subject]:
    """Yield ``model``, a directory or hub id, or else random weights of ``shape`` in a directory that is deleted afterwards, or
    kept in the folder ``models`` for other runs."""
    if model is not None:
        directory = locate(model)
        yield Subject(directory, load_config(directory), dtype, quantize)
        return
    kept = None if models is None else models / f"{shape}-{dtype}"
    if kept is not None and kept.is_dir():
        yield Subject(kept, SHAPES[shape], dtype, quantize)
        return
    if models is not None:
        models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="yardstick-bench-", dir=models) as name:
        made = Path(name) / "model"
        save_model(random_decoder(SHAPES[shape], device=default_device()), SHAPES[shape], made, getattr(torch, dtype))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # servers that other processes start take what is free
        _write_tokenizer(made)
        yield Subject(made if kept is None else made.rename(kept), SHAPES[shape], dtype, quantize)


def default_device() -> torch.device:
    """Return the first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def random_decoder(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    quantize: str | None = None,
) -> Decoder:
    """Return a decoder of random weights that were drawn on ``device`` and, where asked for, quantised there."""
    device = device or torch.device("cpu")
    torch.manual_seed(seed)
    with device:
        decoder = Decoder(config, dtype)
    randomise(decoder)
    form = format_of(quantize, device, dtype) if quantize is not None else None
    if form is not None:
        FORMATS[form].check_device(device, dtype)
        FORMATS[form].check_shapes(decoder)
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            source = copy.deepcopy(layer)
            with device:
                FORMATS[form].convert(layer)
            layer.attention.kv_bounds = kv_bounds(source, config) if bounded(config) else None
            FORMATS[form].fill(layer, source)
        pack_head(decoder, form)
    return decoder.eval()


def randomise(module: nn.Module) -> None:
    """Write random weights, scaled so that activations stay near one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.05 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.zero_()


def _write_tokenizer(directory: Path) -> None:
    """Write a tokeniser with one token per byte; the gateway needs one, although requests with token ids do not use it."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
