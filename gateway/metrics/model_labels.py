"""Values of the label ``model`` of the gateway's metrics."""

from __future__ import annotations

MOST_MODELS = 256
"""Most names that are labels. A series that was counted stays until the gateway ends, also if its model is gone."""
OTHER = "other"
"""Label of all models beyond them."""


class ModelLabels:
    """The label of each model: its name for the first ``most`` models, and :data:`OTHER` for all later ones.

    A gateway whose models change for weeks therefore keeps a bounded number of series. Names are those of engines."""

    def __init__(self, most: int = MOST_MODELS) -> None:
        self._labels: dict[str | None, str] = {None: "", "": ""}
        self._most = most + len(self._labels)

    def __call__(self, model: str | None) -> str:
        """Return the label of ``model``; it is empty if the model is not known."""
        label = self._labels.get(model)
        return self._add(model) if label is None else label

    def _add(self, model: str | None) -> str:
        if model is None or len(self._labels) >= self._most:
            return OTHER
        return self._labels.setdefault(model, model)
