"""The measured model: random weights in the shape of published measurements, or a real model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from engine.models.config import ModelConfig, load_config
from engine.models.decoder import Decoder
from engine.models.loader import load_model, save_model
from engine.models.quantization import FORMATS, format_of
from engine.models.rope import Rope
from engine.models.source import locate

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
SHAPES = {"small": SMALL, "qwen3-0.6b": QWEN3_06B}
"""``small`` is for CPUs; ``qwen3-0.6b`` is the shape of published numbers."""


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

    def load(self) -> Decoder:
        """Load the weights, on a GPU if there is one. Raises :class:`~engine.models.errors.ModelError`."""
        device, dtype = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), getattr(torch, self.dtype)
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
        save_model(random_decoder(SHAPES[shape]), SHAPES[shape], made, getattr(torch, dtype))
        _write_tokenizer(made)
        yield Subject(made if kept is None else made.rename(kept), SHAPES[shape], dtype, quantize)


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """Write random weights, scaled so that activations stay near one."""
    torch.manual_seed(seed)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.05 if "embed" in name else parameter.shape[1] ** -0.5)
    return decoder.eval()


def _write_tokenizer(directory: Path) -> None:
    """Write a tokeniser with one token per byte; the gateway needs one, although requests with token ids do not use it."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
