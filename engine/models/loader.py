"""Decoders from and to Hugging Face directories, and encoders from them."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import hashlib
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from yardstick_llm.engine.models import checkpoint
from yardstick_llm.engine.models.checkpoint import SINGLE, Stored
from yardstick_llm.engine.models.config import ModelConfig, config_json, load_config
from yardstick_llm.engine.models.decoder import Attention, Decoder, DecoderLayer
from yardstick_llm.engine.models.encoder import Encoder, EncoderLayer
from yardstick_llm.engine.models.encoder_config import SPARSE_HEAD, TOKEN_HEAD, UNREAD, is_encoder, load_encoder_config
from yardstick_llm.engine.models.files import ModelError, is_gguf
from yardstick_llm.engine.models.formats import int8
from yardstick_llm.engine.models.formats import stored as as_stored
from yardstick_llm.engine.models.formats.coded import CodedWeight
from yardstick_llm.engine.models.formats.published import method_of, read_stored
from yardstick_llm.engine.models.formats.quantization import FORMATS, bounded, format_of, kv_bounds, pack_head
from yardstick_llm.engine.models.gguf.config import stored_tensors
from yardstick_llm.engine.models.gguf.file import read_gguf
from yardstick_llm.engine.models.modules import Projected, RMSNorm, fill_parts
from yardstick_llm.engine.models.pooling import HF_COLBERT, INLINE, Pooling, is_static, load_pooling, root_of
from yardstick_llm.engine.models.registry import family_of
from yardstick_llm.engine.models.source import locate
from yardstick_llm.engine.models.vision.tower import VisionDecoder
from yardstick_llm.engine.settings import EngineSettings

EMBEDDING, HEAD = checkpoint.BODY_PREFIX + checkpoint.EMBEDDING, "lm_head.weight"

HASHED_WHOLE = 256 << 20
"""Bytes of weights up to which :func:`fingerprint` reads everything."""
SAMPLE_BLOCK, SAMPLE_BLOCKS = 1 << 20, 64


CPU = torch.device("cpu")


def load_model(
    model: str | Path,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    max_context: int | None = None,
    device: torch.device = CPU,
) -> Decoder:
    """The decoder in a model directory, GGUF file or hub repository, converted to ``dtype``, in evaluation mode, on the CPU.

    ``quantize``: what its layers are then converted to, one of :data:`~engine.models.formats.quantization.FORMATS`, or
    one of :mod:`engine.models.formats.stored` to keep codes as they are stored, for products on ``device``. ``max_context``: see
    :attr:`~engine.settings.EngineSettings.max_context`.
    Raises :class:`~engine.models.files.ModelError` where files, names, shapes or dtypes are wrong, before a weight is copied.
    """
    directory = locate(model)
    decoder = make_decoder(load_config(directory, max_context), dtype)
    fill(decoder, read_checked(directory, decoder), quantize, device=device)
    if decoder.config.pooling is not None:
        _fill_projections(directory, decoder.projected, decoder.config.pooling)
    finish(decoder, directory, quantize)
    return decoder


def finish(decoder: Decoder, directory: Path, quantize: str | None) -> None:
    """After the weights are loaded: name their format, and pack the head for products on a CPU."""
    decoder.weight_format = format_in_words(directory, quantize)
    if quantize != as_stored.IN_INT8:
        pack_head(decoder, quantize)
    elif decoder.packed_head is None:
        pack_head(decoder, "int8")
    decoder.eval()


def layers_format(settings: EngineSettings, device: torch.device, dtype: torch.dtype, *, keeps_codes: bool) -> str | None:
    """The format of layers, as :func:`load_model` takes it."""
    if keeps_codes:
        return as_stored.NAME if settings.quantize is None else as_stored.IN_INT8
    return format_of(settings.quantize, device, dtype)


def load_encoder(
    model: str | Path, dtype: torch.dtype = torch.float32, quantize: str | None = None, max_context: int | None = None
) -> Encoder:
    """The encoder in a model directory or hub repository; arguments and errors as for :func:`load_model`."""
    directory = locate(model)
    config = load_encoder_config(directory, max_context)
    headers = stored_tensors(directory) if is_gguf(directory) else checkpoint.read_headers(directory, pickled=True)
    prefixes = config.family.prefixes
    stored = {_plain_name(name, prefixes): each for name, each in headers.items()}
    if config.architecture.startswith("XLMRobertaFor") and "emb_ln.weight" in stored:
        config = dataclasses.replace(config, architecture=config.architecture.replace("XLMRoberta", "XLMRobertaFlash"))
    if config.architecture.startswith("JinaBert") and "encoder.layer.0.attention.self.layer_norm_q.weight" in stored:
        config = dataclasses.replace(config, architecture=config.architecture.replace("JinaBert", "JinaBertCode"))
    with _allocating(), torch.device("meta"):  # a faulty configuration may ask for any amount of memory
        wanted = Encoder(config, dtype).checkpoint_views()
    inline = INLINE if config.architecture.startswith(HF_COLBERT) else ""
    apart = [name for name in stored if name == inline or name.rpartition(".")[2] in ("position_ids", "token_type_ids")]
    checkpoint.check(stored, wanted, apart, UNREAD)
    encoder = Encoder(config, dtype)
    checkpoint.copy(stored, encoder.checkpoint_views())
    encoder.fold()
    if config.modules is not None:
        _fill_projections(directory, encoder.projected, config.modules)
    for file, linear in ((SPARSE_HEAD, encoder.token_weight), (TOKEN_HEAD, encoder.token_projection)):
        if linear is not None:
            _fill_apart(checkpoint.read_pickled_header(directory / file), linear)
    if config.query_folder:
        encoder.query_weights = torch.empty(config.vocab_size)
        table = checkpoint.read_header(root_of(directory) / config.query_folder / SINGLE)
        checkpoint.check(table, {"weight": encoder.query_weights})
        checkpoint.copy(table, {"weight": encoder.query_weights})
    if quantize is not None and encoder.layers:
        form = FORMATS[quantize]
        form.check_shapes(encoder)
        for layer in dict.fromkeys(encoder.layers):
            assert isinstance(layer, EncoderLayer)
            plain = copy.deepcopy(layer)
            form.convert(layer)
            form.fill(layer, plain)
    return encoder.eval()


def _plain_name(name: str, prefixes: Sequence[str]) -> str:
    """``name`` without the name of the body and the parts that torch's parametrisation adds, and with the names of a norm's parts
    that releases of transformers from 2 on write."""
    name = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
    for old, new in (
        ("LayerNorm.gamma", "LayerNorm.weight"),
        ("LayerNorm.beta", "LayerNorm.bias"),
        ("parametrizations.weight.original", "weight"),
        ("parametrizations.weight.0.", ""),
    ):
        name = name.replace(old, new)
    return "embedding.weight" if name == "embeddings" else name  # of model2vec


def _fill_projections(directory: Path, projected: Projected, pooling: Pooling) -> None:
    for place, (projection, part) in enumerate(zip(pooling.projections, projected.parts, strict=True)):
        folder = root_of(directory) / projection.folder if projection.folder else directory
        if (folder / SINGLE).exists():
            stored = checkpoint.read_header(folder / SINGLE)
        else:
            stored = checkpoint.read_pickled_header(folder / checkpoint.PICKLED)
        if not projection.folder:
            stored = {INLINE: stored[INLINE]}
        # Names are linear.weight or norm.weight; before release 3 of sentence-transformers those of a Dense are the same.
        own: dict[str, Stored] = {}
        residual: dict[str, Stored] = {}
        for name, tensor in stored.items():
            module, _, kind = name.rpartition(".")
            (residual if module == "residual" else own)[kind] = tensor
        _fill_apart(own, part)
        if str(place) in projected.residuals:
            _fill_apart(residual, projected.residuals[str(place)])
        elif residual:
            raise ModelError(f"{projection.folder} has weights of a residual, and its config.json no use_residual; correct it.")


def _fill_apart(stored: Mapping[str, Stored], part: nn.Module) -> None:
    """Fill a module whose weights are in a file of their own."""
    views = {name: parameter.detach() for name, parameter in part.named_parameters()}
    checkpoint.check(stored, views)
    checkpoint.copy(stored, views)


def format_in_words(directory: Path, quantize: str | None) -> str | None:
    """:attr:`Decoder.weight_format`. ``quantize``: as in :func:`load_model`."""
    method = method_of(directory)
    if method is None:
        return None
    return f"codes of {method}" if quantize in (as_stored.NAME, as_stored.IN_INT8) else f"weights of {method} dequantised"


def dense_bytes(directory: Path, dtype: torch.dtype) -> int:
    """Bytes of a model's weights where all of them are dense. Raises :class:`~engine.models.files.ModelError`."""
    return dtype.itemsize * sum(math.prod(tensor.shape) for tensor in read_stored(directory).values())


def make_decoder(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """A decoder of uninitialised weights, with a vision tower where the model has one."""
    with _allocating():
        return Decoder(config, dtype) if config.vision is None else VisionDecoder(config, dtype)


@contextmanager
def _allocating() -> Iterator[None]:
    """Raises :class:`~engine.models.files.ModelError` where torch cannot make tensors of the sizes that a configuration has."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError(
            "config.json has sizes of tensors that do not fit in memory; correct the file, or download the model again."
        ) from error


def read_checked(directory: Path, decoder: Decoder) -> dict[str, Stored]:
    """Headers of the weights of ``decoder``, the whole of it. Raises :class:`~engine.models.files.ModelError` where they do not
    fit.
    """
    stored = read_stored(directory)
    unread = family_of(decoder.config.architecture).unread
    checkpoint.check(stored, decoder_views(decoder, stored), [HEAD] if decoder.head is None else [], unread)
    return stored


def decoder_views(decoder: Decoder, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Views to fill from ``stored``. A tied model may store its embedding under the head's name only."""
    return _as_stored(decoder.checkpoint_views(), stored)


def fill(
    decoder: Decoder, stored: Mapping[str, Stored], quantize: str | None = None, part: int = 0, device: torch.device = CPU
) -> None:
    """Copy all weights, or the ``part``-th part of each where the decoder has a part, from ``stored``, which has been checked.

    With ``quantize``, all layers of a kind pass through a single one in the decoder's dtype. Raises
    :class:`~engine.models.files.ModelError`.
    """
    if quantize is None:
        checkpoint.copy(stored, decoder_views(decoder, stored), part)
        _finish_layers(decoder, decoder.config)
    else:
        _fill_in_format(decoder, stored, quantize, part, device)
    if isinstance(decoder, VisionDecoder):
        decoder.tower.fold()


def _fill_in_format(decoder: Decoder, stored: Mapping[str, Stored], quantize: str, part: int, device: torch.device) -> None:
    in_int8 = quantize == as_stored.IN_INT8
    form = None if quantize == as_stored.NAME or in_int8 else FORMATS[quantize]
    if form is not None or in_int8:
        (form or FORMATS["int8"]).check_shapes(decoder)
    checkpoint.copy(stored, _as_stored(decoder.outer_views(), stored), part)
    decoder.norm.add_offset()
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    kinds = [type(layer.mlp) for layer in layers]
    if form is None:  # most of the passage is not written, so it takes no memory
        dtype = decoder.embed.weight.dtype
        passages = {kind: DecoderLayer(decoder.config, kinds.index(kind), dtype) for kind in set(kinds)}
        for kind, passage in passages.items():
            _leave_out(passage, set(dict(layers[kinds.index(kind)].named_parameters())))
    else:
        passages = {kind: copy.deepcopy(layers[kinds.index(kind)]) for kind in set(kinds)}
        for layer in layers:
            # Before weights are loaded: unwritten memory is not allocated, and memory freed later would leave holes.
            form.convert(layer)
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        passage = passages[kind]
        views = decoder.layer_views(index, passage)
        codes: dict[str, CodedWeight] = {}
        if form is None:
            found = {
                name: weight.cut(*checkpoint.stretches(views[name].shape, weight.shape, part))
                for name, weight in checkpoint.read_all_codes(stored, views).items()
            }
            whole = as_stored.codes_of(passage, views, {name: weight for name, weight in found.items() if weight is not None})
            if decoder.config.interleaved:
                whole.pop(as_stored.QKV, None)  # is dense, so that its rows can be reordered
            codes = as_stored.convert(layer, whole, device, in_int8=in_int8)
            views = as_stored.dense_views(passage, views, codes)
        checkpoint.copy(stored, views, part)
        _finish_layers(passage, decoder.config)
        layer.attention.kv_bounds = kv_bounds(passage, decoder.config) if bounded(decoder.config) else None
        if form is None:
            fill_parts(layer, passage, codes)
            _trim_heap()
        else:
            form.fill(layer, passage)
    if in_int8 and decoder.config.lm_head:
        name = HEAD if HEAD in stored else EMBEDDING
        of_head = checkpoint.read_all_codes(stored, [name]).get(name)
        if of_head is not None and int8.takes_codes(of_head):
            decoder.packed_head = int8.panels_of(of_head)


def _leave_out(passage: DecoderLayer, kept: Container[str]) -> None:
    """Take the biases from ``passage`` that its layer lacks, as it does where another process adds them."""
    for name in [name for name, _ in passage.named_parameters() if name not in kept]:
        owner, _, attribute = name.rpartition(".")
        passage.get_submodule(owner).register_parameter(attribute, None)


def _trim_heap() -> None:
    """Give free pages back to the system. Codes are smaller than what is freed while they are read, so glibc keeps holes of it: 33
    MiB of 94 after a model of 61 million parameters in float32."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@torch.no_grad()
def _finish_layers(module: nn.Module, config: ModelConfig) -> None:
    """Bring what a checkpoint has filled into the layout of the decoder: offsets of norms, and pairs of elements that are rotated,
    which are half of what is rotated apart."""
    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.add_offset()
        if isinstance(part, Attention) and config.interleaved:
            for parameter in part.qkv_proj.parameters():
                turned = parameter.view(-1, config.head_dim, *parameter.shape[1:])[: sum(part.split[:2]), : config.rotary_dim]
                pairs = turned.reshape(len(turned), -1, 2, *parameter.shape[1:])
                turned.copy_(pairs.transpose(1, 2).reshape(turned.shape))


def _as_stored(views: dict[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """``views`` with the embedding under the head's name, where that alone is stored."""
    if HEAD not in views and EMBEDDING not in stored and HEAD in stored:
        views[HEAD] = views.pop(EMBEDDING)
    return views


def save_model(decoder: Decoder, config: ModelConfig, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors`` for Hugging Face transformers; ``dtype`` None keeps the decoder's."""
    write_checkpoint(decoder.checkpoint_views(), config, directory, dtype)


def write_checkpoint(tensors: Mapping[str, Tensor], config: ModelConfig, directory: Path, dtype: torch.dtype | None) -> None:
    """Write ``tensors``, all of one dtype, as ``model.safetensors``, and ``config.json`` beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / SINGLE, metadata={"format": "pt"})
    kind = str(next(iter(stored.values())).dtype).removeprefix("torch.")
    text = json.dumps(config_json(config) | {"torch_dtype": kind}, indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def fingerprint(
    directory: Path,
    dtype: torch.dtype,
    quantize: str | None = None,
    parts: int = 1,
    kv_dtype: str = "auto",
    config: ModelConfig | None = None,
) -> str:
    """Digest of what makes a model's numbers: weights, ``config.json`` and the format it is served in. 32 hexadecimal digits.

    ``parts``: processes that share the model. They count where it is quantised, because each finds scales for its own part.
    ``kv_dtype``: see :attr:`~engine.settings.EngineSettings.kv_dtype`. ``config``: of the decoder, or of its part in this
    process, as it is served; None: as ``config.json`` says. Experts that are shared whole have the scales of one process.
    Up to :data:`HASHED_WHOLE` bytes of weights are read whole. Of larger files, each one's name, size, header and
    :data:`SAMPLE_BLOCKS` blocks of :data:`SAMPLE_BLOCK` bytes at equal distances are: fine-tuning changes every tensor, so a
    sample tells models apart in a second, where reading all would take minutes. It is no proof against a forger.
    """
    files = list(read_gguf(directory).parts) if is_gguf(directory) else checkpoint.weight_files(directory)
    whole = sum(path.stat().st_size for path in files) <= HASHED_WHOLE
    are_whole = config is not None and config.experts is not None and config.experts.held is not None
    shared = f"{parts}, experts whole" if are_whole else str(parts)
    digest = hashlib.sha256((str(dtype) if quantize is None else f"{dtype}, {quantize} in {shared}").encode())
    if kv_dtype != "auto":
        digest.update(f"\0keys and values in {kv_dtype}\0".encode())
    if config is not None and config.has_long_factors:
        digest.update(b"\0long factors\0")
    if not (is_gguf(directory) or is_static(directory)):  # whose weights have all of their configuration
        digest.update((directory / "config.json").read_bytes())
    if (pooling := load_pooling(directory)) is not None:
        digest.update(f"\0pooling {pooling}\0".encode())
        files += [
            path
            for each in pooling.projections
            if each.folder
            for path in sorted((root_of(directory) / each.folder).glob("*model.*"))
        ]
    if is_encoder(directory):
        whole_config = load_encoder_config(directory)
        if (logs := whole_config.sparse_logs) != 1:
            digest.update(f"\0{logs} logarithms\0".encode())
        files += [root_of(directory) / whole_config.query_folder / SINGLE] if whole_config.query_folder else []
        files += [directory / name for name in (SPARSE_HEAD, TOKEN_HEAD) if (directory / name).is_file()]
    elif (vision := load_config(directory).vision) is not None:
        digest.update(f"\0images {vision.preprocessing}\0".encode())
    for path in files:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        for block in _blocks(path, whole):
            digest.update(block)
    return digest.hexdigest()[:32]


def _blocks(path: Path, whole: bool) -> Iterator[bytes]:
    """All blocks of a file, or a sample whose first blocks hold the header of any usual checkpoint."""
    size = path.stat().st_size
    stride = SAMPLE_BLOCK if whole else max(SAMPLE_BLOCK, size // SAMPLE_BLOCKS)
    with path.open("rb") as file:
        for start in range(0, size, stride):
            file.seek(start)
            yield file.read(SAMPLE_BLOCK)
