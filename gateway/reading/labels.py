"""The labels of ``/v1/score``: tokens whose probabilities are the scores."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import InvalidRequest
from gateway.reading.endpoint import Model
from gateway.schemas.score import ScoreRequest
from gateway.text.bounds import TooManyTokens

SHOWN_TOKENS = 16
"""Most tokens of a multi-token label that the error message shows. Encoding stops beyond this number."""


def labels_of(request: ScoreRequest, model: Model) -> list[int]:
    """Return the token ids of the labels. Raises :class:`InvalidRequest`."""
    given: Sequence[str | int] | None = request.labels if request.labels is not None else request.label_token_ids
    if given is None or (request.labels is not None and request.label_token_ids is not None):
        raise InvalidRequest("Give either `labels` (texts) or `label_token_ids`, to say which tokens are scored.", param="labels")
    param = "labels" if request.labels is not None else "label_token_ids"
    if not given:
        raise InvalidRequest(f"`{param}` is empty; name at least one token.", param=param)
    if len(given) > model.facts.max_labels:
        raise InvalidRequest(f"`{param}` has {len(given)} labels; at most {model.facts.max_labels} are allowed.", param=param)
    labels = [_label(model, label, index) if isinstance(label, str) else label for index, label in enumerate(given)]
    for index, label in enumerate(labels):
        if not model.vocabulary.has_token(label):
            known = f"ids are 0 to {model.vocabulary.vocab_size - 1}"
            raise InvalidRequest(
                f"`{param}[{index}]`: {label} is not a token of {model.facts.name!r}; {known}.", param=f"{param}[{index}]"
            )
    return labels


def _label(model: Model, text: str, index: int) -> int:
    """Return the token id of a text label. A long label is not tokenised."""
    tokenizer, pieces = model.texts.tokenizer, ""
    try:
        ids = tokenizer.encode(text, limit=SHOWN_TOKENS, add_special_tokens=False)
        if len(ids) == 1:
            return ids[0]
        length = f"{len(ids)} tokens"
        pieces = ": " + (", ".join(f"{tokenizer.token_text(id)!r} ({id})" for id in ids) or "none")
    except TooManyTokens as error:
        length = str(error)
    raise InvalidRequest(
        f"`labels[{index}]`: {text[:100]!r} is {length} of {model.facts.name!r}, not one{pieces}."
        " Choose a label that is one token.",
        param=f"labels[{index}]",
    )
