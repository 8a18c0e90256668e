"""Bodies of ``/v1/classify``, in the form of vLLM."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from gateway.schemas.activation import Activation
from gateway.schemas.length import Texts
from gateway.schemas.parameters import EndpointName
from gateway.schemas.truncation import CacheSalt, Priority
from gateway.schemas.usage import Usage


class ClassifyRequest(Activation, kw_only=True):
    """Classify texts with a model's classification head, or with a guard model."""

    endpoint: ClassVar[EndpointName] = "classify"
    input: Texts
    """A text, several texts, one list of token ids, or several such lists. Token ids are complete prompts."""
    model: str | None = None
    """Name of the model; optional if only one is served."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class Category(msgspec.Struct, frozen=True, kw_only=True):
    """A category of a guard model."""

    name: str
    prob: float
    """Probability that the model names this category first, if its verdict is the first label."""


class Classification(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The classes of one text."""

    index: int
    label: str
    """The most probable class."""
    probs: list[float]
    """Probability of each class. Its logit with `raw_scores`, and for a model with one class (a reward model)."""
    num_classes: int
    categories: list[Category] | None = None
    """From a guard model, the most probable category first."""


class ClassifyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each text, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Seconds since 1970."""
    model: str
    classes: list[str]
    """Names of the classes, in the order of `probs`."""
    data: list[Classification]
    usage: Usage
