"""The paths of the API that a model serves, for errors."""

from __future__ import annotations

from gateway.errors import InvalidRequest
from gateway.pool.replica import ServedModel
from gateway.presets.preset import Fitted, Task, names_a_task

ENDPOINTS: dict[str, str] = {
    "score": "/v1/score",
    "generate": "/v1/chat/completions",
    "length_guidance": "/v1/length",
}
"""The main endpoint of each capability, for error messages."""
BY_PRESET: dict[Task, str] = {"rerank": "/v1/rerank", "classify": "/v1/classify", "embed": "/v1/embeddings"}
"""Endpoints that need a preset."""


def paths_of(model: ServedModel) -> str:
    """Return the paths that ``model`` serves, separated by commas."""
    fitted = model.tokenizer.table.fitted
    by_preset = [path for task, path in BY_PRESET.items() if fitted is not None and fitted.serves(task)]
    able = [ENDPOINTS[capability] for capability in model.info.capabilities if capability in ENDPOINTS]
    return ", ".join([*by_preset, *able])


def check_fallback(fitted: Fitted, model: ServedModel, task: Task) -> None:
    """Raise :class:`InvalidRequest` if ``fitted``, the preset of ``model``, is a fallback for a reranker, guard or reward model, or
    for an adapter that is one or changes one, because the prompt of its training is unknown."""
    if model.preset_is_fallback and task != "embed" and (names_a_task(model.name) or names_a_task(model.base.name)):
        raise InvalidRequest(
            f"No preset is for the model {model.name!r}, which may need the prompt of its training. The operator can choose "
            f"one with the setting `presets`; {model.name}={fitted.preset.name} keeps the fallback.",
            param="model",
        )
