"""How an embedding model makes vectors of hidden states, read from the files of sentence-transformers beside its weights.

``modules.json`` lists the modules of the model in order: ``Transformer``, ``Pooling`` and, for some models, ``Dense``,
``LayerNorm`` and ``Normalize``. The configuration of a module is ``config.json`` in the folder that its entry names. A model with
``Dense`` and without ``Pooling`` makes a vector for each token (ColBERT, as PyLate or sentence-transformers write it). The modules
of a cross-encoder make its scores. Normalisation is a choice of each request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from yardstick_llm.engine.models import checkpoint
from yardstick_llm.engine.models.files import Keys, ModelError, is_gguf, load_json, read_json
from yardstick_llm.engine.models.gguf.config import pooling_of

Mode = Literal["cls", "last", "mean", "mean_sqrt", "max", "weightedmean"]
"""What is pooled: the first or the last token, or all tokens of the prompt: their mean, their sum divided by the square root of
their number, the maximum of each element, or their mean weighted by position, the first token by 1."""

MODULES_FILE = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
SENTENCE_FILES = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file of the module ``Transformer``, of which a model has one; early releases call it by the family."""
TOKENIZER_FILE = "tokenizer_config.json"
MODES: dict[str, Mode] = {
    "cls": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "max": "max",
    "weightedmean": "weightedmean",
}
"""Modes by their names in sentence-transformers."""
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Before release 5.4 of sentence-transformers each mode is a flag of its own. The vectors of several are in this order."""
STATIC = "StaticEmbedding"
"""Module that takes the mean of a text's rows in a table, and the architecture of a model of it, which has no ``config.json``."""
KNOWN_MODULES = ("Transformer", STATIC, "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "MultiVectorMask")
TASKS_KEY, TASKS_MODULE = "lora_adaptations", "custom_st.Transformer"
"""Key of ``config.json`` that names the tasks of a model, and its module Transformer."""
SPLADE, ROUTER, ROUTER_FILE = "SpladePooling", "Router", "router_config.json"
SPLADE_LOGS = {"relu": 1, "log1p_relu": 2}
"""How often the logarithm of a weight is taken, by the name of the activation."""
HF_COLBERT, INLINE = "HF_ColBERT", "linear.weight"
"""Architecture of models that Stanford's ColBERT wrote, and the tensor that makes their vectors."""
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
MAX_WIDTH = 1 << 14
"""Largest width of a ``Dense`` module."""


@dataclass(frozen=True)
class Projection:
    """A ``Dense`` or ``LayerNorm`` module."""

    folder: str
    """Of its weights."""
    size: int
    """Width of its output."""
    inner: int = 0
    """Width of its input; 0 for a ``LayerNorm``."""
    bias: bool = True
    activation: str = "Identity"
    """Name of a class of ``torch.nn``."""
    residual: bool = False
    """Whether its input is added to its output, multiplied by weights of its own where their widths differ."""


@dataclass(frozen=True)
class Pooling:
    """From hidden states to vectors."""

    mode: Mode | None
    """None: each token has a vector of its own."""
    more: tuple[Mode, ...] = ()
    """Further modes, whose vectors are appended to that of the first."""
    include_prompt: bool = True
    """Whether tokens of a prompt before the text are pooled too. Otherwise a request says how many they are."""
    projections: tuple[Projection, ...] = ()

    @property
    def modes(self) -> tuple[Mode, ...]:
        """All modes, in the order of their vectors."""
        return () if self.mode is None else (self.mode, *self.more)

    def size(self, hidden_size: int) -> int:
        """Length of a vector."""
        return self.projections[-1].size if self.projections else hidden_size * max(1, len(self.modes))


def load_pooling(directory: Path, hidden_size: int = 0) -> Pooling | None:
    """Pooling of the model in ``directory``; None where it is not an embedding model. Raises :class:`ModelError`.

    ``hidden_size``: width of hidden states, if the widths of projections are to be checked.
    """
    if is_gguf(directory):
        mode = pooling_of(directory)
        return None if mode is None else Pooling(mode)
    if (inline := _inline(directory)) is not None:
        return inline
    root = root_of(directory)
    if not (root / MODULES_FILE).is_file():
        return None
    modules = read_modules(root / MODULES_FILE)
    names = [name for name, _ in modules]
    if {"Pooling", "Dense", "MultiVectorMask", STATIC}.isdisjoint(names):
        return None
    own = TASKS_MODULE in names and bool(read_json(directory / "config.json").get(TASKS_KEY))
    if unknown := [name for name in names if name not in KNOWN_MODULES and not (own and name == TASKS_MODULE)]:
        raise ModelError(
            f"The module {unknown[0]:.80} in {MODULES_FILE} is not supported; use a model with {', '.join(KNOWN_MODULES)} only."
        )
    pooling = Pooling("mean" if names[0] == STATIC else None)
    if "Pooling" in names:
        place = names.index("Pooling")
        if any(name in ("Dense", "LayerNorm") for name in names[:place]):
            raise ModelError(f"{MODULES_FILE} has a module before Pooling that changes vectors of tokens, which is not supported.")
        pooling = _pooling(*_config(root, *modules[place]))
    width, projections = pooling.size(hidden_size), []
    for name, folder in modules:
        if name in ("Dense", "LayerNorm"):
            projection = _projection(name, folder, *_config(root, name, folder))
            if width and (projection.inner or projection.size) != width:
                raise ModelError(
                    f"{folder}/config.json takes {projection.inner or projection.size} numbers, and there are {width}."
                )
            width = projection.size
            projections.append(projection)
    return replace(pooling, projections=tuple(projections))


def _inline(directory: Path) -> Pooling | None:
    """Return the projection of a model that Stanford's ColBERT wrote. Its matrix is among the weights. None for other models."""
    config = directory / "config.json"
    keys = Keys(read_json(config) if config.is_file() else {}, config.name)
    if not keys.present("architectures") or HF_COLBERT not in keys.strings("architectures"):
        return None
    found = checkpoint.read_headers(directory, pickled=True).get(INLINE)
    if found is None or len(found.shape) != 2:
        raise ModelError(f"The weights of a {HF_COLBERT} have no matrix {INLINE}; download the model again.")
    return Pooling(None, projections=(Projection("", found.shape[0], found.shape[1], bias=False),))


def root_of(directory: Path) -> Path:
    """The folder with ``modules.json``: ``directory``, or the one above it where an early release of sentence-transformers put the
    model in a folder of its own. Raises :class:`ModelError`."""
    above = directory.parent
    if is_gguf(directory) or (directory / MODULES_FILE).is_file() or not (above / MODULES_FILE).is_file():
        return directory
    return above if inner_folder(above) == directory.name else directory


def inner_folder(root: Path) -> str:
    """The folder of the first module of ``modules.json`` in ``root``."""
    return next((folder for _, folder in read_modules(root / MODULES_FILE)), "")


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json``, or what stands for it where the model is a :data:`STATIC` one. Raises :class:`ModelError`."""
    if not is_static(directory):
        return read_json(directory / "config.json")
    stored = checkpoint.read_headers(directory, pickled=True)
    table = next((stored[name] for name in ("embedding.weight", "embeddings") if name in stored), None)
    if table is None or len(table.shape) != 2:
        raise ModelError(f"The weights of a {STATIC} have no matrix embedding.weight; download the model again.")
    return {"architectures": [STATIC], "vocab_size": table.shape[0], "hidden_size": table.shape[1]}


def is_static(directory: Path) -> bool:
    """Whether the model is a :data:`STATIC` one. Raises :class:`ModelError`."""
    path = root_of(directory) / MODULES_FILE
    return path.is_file() and [name for name, _ in read_modules(path)[:1]] == [STATIC]


def read_modules(path: Path) -> list[tuple[str, str]]:
    """Name of the class and folder of each module. Raises :class:`ModelError`."""
    try:
        modules = load_json(path)
        found = [(_class_name(str(module["type"])), str(module["path"])) for module in modules]
    except (ValueError, OSError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path.name} is not a list of modules with type and path; download the model again.") from error
    check_inside((folder for _, folder in found), path.name)
    return found


def check_inside(folders: Iterable[str], file: str) -> None:
    """Raise :class:`ModelError` if ``file`` names a folder outside the model's."""
    if outside := [each for each in folders if not each.isprintable() or ".." in Path(each).parts or Path(each).is_absolute()]:
        raise ModelError(f"{file} names a folder outside the model directory ({outside[0]!r:.80}); download the model again.")


def max_seq_length(directory: Path) -> int | None:
    """Tokens after which sentence-transformers cuts a text: those of the module ``Transformer``, else of the tokeniser. None where
    nothing says so. Raises :class:`ModelError`."""
    if is_static(directory):
        cut = Keys(read_json(directory / "tokenizer.json"), "tokenizer.json").section("truncation")
        return None if cut is None else cut.count("max_length")
    for names, key in ((SENTENCE_FILES, "max_seq_length"), ((TOKENIZER_FILE,), "model_max_length")):
        path = next((directory / name for name in names if (directory / name).is_file()), None)
        raw = read_json(path) if path is not None else {}
        # transformers writes 1e30, as a whole number, for a tokeniser without a limit.
        if path is not None and raw.get(key) is not None and not (isinstance(raw[key], (int, float)) and raw[key] >= 1 << 31):
            return Keys(raw, path.name).count(key)
    return None


def scores_pairs(directory: Path) -> bool:
    """Whether the modules of the model in ``directory`` are those of a cross-encoder."""
    path = root_of(directory) / SENTENCE_CONFIG
    return path.is_file() and read_json(path).get("model_type") == "CrossEncoder"


def _class_name(module_type: str) -> str:
    """The last part of a type of sentence-transformers or PyLate; types of a model's own code keep their whole name."""
    known = module_type.startswith(("sentence_transformers.", "pylate."))
    return module_type.rpartition(".")[2] if known else module_type


def _config(directory: Path, name: str, folder: str) -> tuple[dict[str, Any], str]:
    """Configuration of a module, and its file."""
    file = f"{folder}/config.json"
    if not folder or Path(folder).name != folder or not (directory / file).is_file():
        raise ModelError(f"{MODULES_FILE} names a {name} module, but there is no {file}; download the model again.")
    return read_json(directory / file), file


def _pooling(raw: dict[str, Any], file: str) -> Pooling:
    keys = Keys(raw, file)
    if isinstance(raw.get("pooling_mode"), list):
        names = keys.strings("pooling_mode")
    elif keys.present("pooling_mode"):
        names = [keys.text("pooling_mode", "")]
    else:
        flags = [key for key in raw if key.startswith("pooling_mode_") and keys.flag(key, False)]
        flags.sort(key=[*_OLD_KEYS, *flags].index)
        names = [_OLD_KEYS.get(key, key.removeprefix("pooling_mode_")) for key in flags]
    if not names or set(names) - set(MODES):
        found = " and ".join(names) or "no mode"
        raise ModelError(f"{file} asks for pooling by {found}, which is not supported; use a model with {' or '.join(MODES)}.")
    mode, *more = (MODES[name] for name in names)
    return Pooling(mode, tuple(more), keys.flag("include_prompt", True))


def _projection(name: str, folder: str, raw: dict[str, Any], file: str) -> Projection:
    keys = Keys(raw, file)
    if name == "LayerNorm":
        return Projection(folder, keys.count("dimension"))
    activation = keys.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise keys.error("activation_function", f"is {activation:.80}; only {', '.join(_ACTIVATIONS)} are supported")
    sizes = keys.count("in_features"), keys.count("out_features")
    if max(sizes) > MAX_WIDTH:
        raise ModelError(f"{file} has {max(sizes)} features, at most {MAX_WIDTH} are supported.")
    return Projection(folder, sizes[1], sizes[0], keys.flag("bias", True), activation, keys.flag("use_residual", False))
