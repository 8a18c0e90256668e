"""The paths of the API that a model serves, for errors."""

from __future__ import annotations

from gateway.pool.replica import ServedModel

ENDPOINTS: dict[str, str] = {
    "score": "/v1/score",
    "generate": "/v1/chat/completions",
    "classify": "/v1/classify",
    "embed": "/v1/embeddings",
    "length_guidance": "/v1/length",
}
"""The main endpoint of each capability, for error messages."""


def paths_of(model: ServedModel) -> str:
    """Return the paths that ``model`` serves, separated by commas."""
    paths = [ENDPOINTS[capability] for capability in model.info.capabilities if capability in ENDPOINTS]
    fitted = model.tokenizer.table.fitted
    if fitted is not None and fitted.preset.task == "rerank":
        paths.insert(0, "/v1/rerank")
    return ", ".join(paths)
