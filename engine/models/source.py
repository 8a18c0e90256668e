"""Finds the directory of a model, or downloads it from the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engine.models.errors import ModelError

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "value_head.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "lenvm.json",
    "modules.json",
    "*_Pooling/config.json",
    "yardstick.toml",
]
"""Files of a hub repository that the engine or the gateway needs; other formats of the same weights are not downloaded."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def locate(model: str | Path, revision: str | None = None, files: Sequence[str] = FILES) -> Path:
    """The directory of ``model``, downloaded first where it is a hub id such as ``Qwen/Qwen3-0.6B``.

    ``revision``: branch, tag or commit of the repository; None: its main branch. ``files``: those to download.
    Raises :class:`ModelError` where there is no such directory, repository or revision, or no network and no earlier download.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ModelError(f"{directory.name} is a directory, which has no revision {revision}; leave the revision out.")
        return directory
    if directory.exists() or not _HUB_ID.fullmatch(str(model)):
        raise ModelError(f"{directory.name} is not a directory; give a model directory or a hub id such as Qwen/Qwen3-0.6B.")
    return _download(str(model), revision, files)


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
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files)))
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
