"""The files of a model directory that gateways need: tokeniser, chat template and preset."""

from __future__ import annotations

from pathlib import Path

from engine import wire
from engine.models.config import load_config
from engine.models.errors import ModelError
from engine.models.files import read_json

PRESET_FILE = "yardstick.toml"
MAX_PRESET_BYTES = 64 << 10
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_files(directory: Path) -> wire.TokenizerFiles:
    """Return the tokeniser files of a model directory, for the gateway. Raises :class:`ModelError` if there are none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError("There is no tokenizer.json in the model directory; the gateway needs one to turn text into tokens.")
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    return wire.TokenizerFiles(
        tokenizer_json=path.read_bytes(),
        chat_template=_chat_template(directory, config.get("chat_template")),
        special_tokens={name: _text_of(config[name]) for name in SPECIAL_TOKENS if config.get(name)},
        preset=_preset(directory / PRESET_FILE),
        architecture=load_config(directory).architecture,
    )


def _preset(path: Path) -> str | None:
    """Contents of :data:`PRESET_FILE`; None where there is none. Raises :class:`ModelError`."""
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_PRESET_BYTES:
        raise ModelError(f"{path.name} in the model directory has more than {MAX_PRESET_BYTES} bytes; shorten it.")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelError(f"{path.name} in the model directory is not UTF-8; save it in that encoding.") from error


def _text_of(token: object) -> str:
    """A special token is written as its text or as an object with its text under ``content``."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _chat_template(directory: Path, configured: object) -> str | None:
    """A separate file takes precedence over ``tokenizer_config.json``, which has one template or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {entry["name"]: entry["template"] for entry in configured}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None
