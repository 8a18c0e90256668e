"""Finds the files of a model: its directory, or a download from the hub; and those that gateways need."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.engine.models.checkpoint import ADAPTER, PICKLED, SINGLE, VALUE_HEAD
from yardstick_llm.engine.models.config import architecture_of
from yardstick_llm.engine.models.files import ModelError, is_gguf, read_json
from yardstick_llm.engine.models.gguf.tokenizer import chat_template, special_tokens, tokenizer_json
from yardstick_llm.engine.models.pooling import MODULES_FILE, SENTENCE_CONFIG, SENTENCE_FILES, inner_folder, read_modules, root_of
from yardstick_llm.engine.models.vocabulary import VOCABULARY_FILES, special_token, tokenizer_json_of
from yardstick_llm.engine.settings import EngineSettings

FILES = [
    "config.json",
    "generation_config.json",
    SINGLE,
    "model-*.safetensors",
    "model.safetensors.index.json",
    VALUE_HEAD,
    ADAPTER,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "lenvm.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "artifact.metadata",
    "router_config.json",
    "[0-9]_*/config.json",
    "0_*/*.json",
    "0_*/model.safetensors",
    "document_[0-9]_SpladePooling/config.json",
    "query_[0-9]_*/model.safetensors",
    "[0-9]_Dense*/*model.*",
    "[0-9]_LayerNorm*/*model.*",
    "sparse_linear.pt",
    "colbert_linear.pt",
    "preprocessor_config.json",
    "processor_config.json",
    "yardstick.toml",
]
"""Files of a hub repository that the engine or the gateway needs; other formats of the same weights are not downloaded."""

ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors", "config.json"]
"""Files of a LoRA adapter's repository."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_HUB_FILE = re.compile(rf"(?P<hub_id>{_HUB_ID.pattern}):(?P<file>(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf)", re.ASCII)
_FIRST_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.ASCII)


def split_revision(source: str) -> tuple[str, str | None]:
    """Split ``ORG/NAME@REVISION`` into the hub id and the revision; a directory or a file has none."""
    if Path(source).expanduser().exists():
        return source, None
    name, _, revision = source.partition("@")
    return name, revision or None


def locate(model: str | Path, revision: str | None = None, files: Sequence[str] = FILES) -> Path:
    """The directory or GGUF file of ``model``, downloaded first where it is a hub id such as ``Qwen/Qwen3-0.6B`` or a GGUF file in
    a repository, such as ``Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf``; of a file in parts, all are downloaded.

    ``revision``: branch, tag or commit of the repository; None: its main branch. ``files``: those to download.
    Raises :class:`ModelError` where there is no such directory, repository or revision, or no network and no earlier download.
    """
    directory = Path(model).expanduser()
    if directory.is_dir() or (is_gguf(directory) and directory.is_file()):
        if revision is not None:
            raise ModelError(f"{model} is a local path, which has no revision {revision}; leave the revision out.")
        return _inner(directory)
    if hub_file := _HUB_FILE.fullmatch(str(model)):
        pattern = _FIRST_PART.sub(r"-*-of-\1.gguf", hub_file["file"])
        path = _download(hub_file["hub_id"], revision, [pattern]) / hub_file["file"]
        if not path.is_file():
            raise ModelError(f"The hub model {hub_file['hub_id']} has no file {hub_file['file']}; look at its list of files.")
        return path
    if is_gguf(directory) and not directory.exists():
        raise ModelError(f"There is no file {model}; check its path, or give ORG/NAME:FILE.gguf for a file of the hub.")
    if directory.exists() or not _HUB_ID.fullmatch(str(model)):
        raise ModelError(
            f"{model} is not a directory; give a model directory or a hub id such as Qwen/Qwen3-0.6B, or a GGUF file: its path, or"
            " ORG/NAME:FILE.gguf on the hub."
        )
    return _inner(_download(str(model), revision, files))


def _inner(directory: Path) -> Path:
    """The folder of the model itself, which early releases of sentence-transformers put below that of its modules."""
    if (directory / "config.json").exists() or not (directory / MODULES_FILE).is_file():
        return directory
    inner = directory / inner_folder(directory)
    files = (inner / name for name in ("config.json", "tokenizer.json"))  # a static embedding has no configuration
    if inner not in (directory, directory / inner.name) or not any(path.is_file() for path in files):
        raise ModelError(
            f"{directory.name} has no config.json, and neither has the folder of its first module; download the model again."
        )
    return inner


def _download(hub_id: str, revision: str | None, files: Sequence[str]) -> Path:
    # Imported here, because the import takes half a second and most engines have their model in a directory.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        directory = Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files)))
        missing = [] if SINGLE not in files or _holds(directory, "*.safetensors") else [PICKLED, f"0_*/{PICKLED}"]
        if "tokenizer.json" in files and not _holds(directory, "tokenizer.json"):
            missing += [*VOCABULARY_FILES, "0_*/vocab.txt"]
        if missing:
            snapshot_download(hub_id, revision=directory.name, allow_patterns=missing)
        return directory
    except RevisionNotFoundError:
        raise ModelError(f"The hub model {hub_id} has no revision {revision}; give a branch, a tag or a commit of it.") from None
    except GatedRepoError:
        raise ModelError(f"{hub_id} is gated; accept its terms on the hub and set HF_TOKEN, or give a local directory.") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"There is no directory and no hub model {hub_id}; check the name (a private model needs HF_TOKEN)."
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"There is no directory {hub_id}, and it cannot be downloaded from the hub ({type(error).__name__}); "
            "check the name and the network, or give a local directory."
        ) from None


def _holds(directory: Path, pattern: str) -> bool:
    """Whether there is such a file beside ``modules.json``, or in the folder of the first module."""
    return any((*directory.glob(pattern), *directory.glob(f"0_*/{pattern}")))


def located(settings: EngineSettings) -> EngineSettings:
    """``settings`` with local paths as models, so that all processes of an engine load the same files although a branch of a
    repository may move. Raises :class:`ModelError`.
    """
    model = locate(settings.model, settings.revision)
    lenvm = None if settings.lenvm_model is None else str(locate(settings.lenvm_model, settings.lenvm_revision))
    return msgspec.structs.replace(settings, model=str(model), revision=None, lenvm_model=lenvm, lenvm_revision=None)


PRESET_FILE = "yardstick.toml"
MAX_PRESET_BYTES = 64 << 10
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_files(directory: Path) -> wire.TokenizerFiles:
    """Return the tokeniser files of a model, for the gateway. Raises :class:`ModelError` if there are none."""
    if is_gguf(directory):
        return wire.TokenizerFiles(
            tokenizer_json=tokenizer_json(directory),
            chat_template=chat_template(directory),
            special_tokens=special_tokens(directory),
            architecture=architecture_of(directory),
        )
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    chat, tools = _chat_templates(directory, config.get("chat_template"))
    return wire.TokenizerFiles(
        tokenizer_json=tokenizer_json_of(directory, config),
        chat_template=chat,
        special_tokens={name: special_token(config, name) for name in SPECIAL_TOKENS if config.get(name)},
        preset=_preset(directory / PRESET_FILE),
        architecture=architecture_of(directory),
        model_files=_model_files(directory),
        tool_template=tools,
    )


MAX_MODEL_FILE_BYTES = 256 << 10
CONFIG_FILE, COLBERT_FILE = "config.json", "artifact.metadata"
GATEWAY_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function", "task_instructions")
"""Keys with which ``config.json`` names the activation of a cross-encoder, and the prompts of a model of several tasks."""


def _model_files(directory: Path) -> dict[str, bytes]:
    """See :attr:`engine.wire.TokenizerFiles.model_files`. Raises :class:`ModelError`."""
    root = root_of(directory)
    names = [MODULES_FILE, SENTENCE_CONFIG, COLBERT_FILE]
    if (root / MODULES_FILE).is_file():
        folders = [folder for _, folder in read_modules(root / MODULES_FILE) if folder == Path(folder).name]
        names += [f"{folder}/config.json" for folder in folders if root / folder != directory]
    paths = {name: root / name for name in names} | {name: directory / name for name in SENTENCE_FILES}
    found = {name: path for name, path in paths.items() if path.is_file()}
    for name, path in found.items():
        if path.stat().st_size > MAX_MODEL_FILE_BYTES:
            raise ModelError(f"{name} in the model directory has more than {MAX_MODEL_FILE_BYTES >> 10} KiB; download it again.")
    config = directory / CONFIG_FILE
    named = {key: value for key, value in read_json(config).items() if key in GATEWAY_KEYS} if config.is_file() else {}
    kept = {CONFIG_FILE: json.dumps(named).encode()} if named else {}
    return {name: path.read_bytes() for name, path in found.items()} | kept


def _preset(path: Path) -> str | None:
    """Contents of :data:`PRESET_FILE`; None where there is none. Raises :class:`ModelError`."""
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_PRESET_BYTES:
        raise ModelError(f"{path.name} in the model directory has more than {MAX_PRESET_BYTES} bytes; shorten it.")
    return _text(path)


def _text(path: Path) -> str:
    """Contents of a file in UTF-8. Raises :class:`ModelError`."""
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelError(f"{path.name} in the model directory is not UTF-8; save it in that encoding.") from error


def _chat_templates(directory: Path, configured: object) -> tuple[str | None, str | None]:
    """The template, and one for conversations with tools. Files of their own take precedence over ``tokenizer_config.json``, which
    has one template or a list of named ones; processors of images write ``chat_template.json``."""
    try:
        entries = configured if isinstance(configured, list) else [{"name": "default", "template": configured}]
        named = {str(entry["name"]): entry["template"] for entry in entries}
    except (KeyError, TypeError):
        message = "chat_template in tokenizer_config.json has an entry without name and template; correct the file."
        raise ModelError(message) from None
    if named.get("default") is None and (directory / "chat_template.json").is_file():
        named["default"] = read_json(directory / "chat_template.json").get("chat_template")
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (directory / file).is_file():
            named[name] = _text(directory / file)
    chat, tools = (named.get(name) for name in ("default", "tool_use"))
    return chat if isinstance(chat, str) else None, tools if isinstance(tools, str) else None
