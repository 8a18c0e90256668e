"""Bodies of Text Embeddings Inference (TEI) whose meaning depends on the model's task: ``/``, ``/predict`` and ``/similarity``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gateway.schemas.activation import Activation
from gateway.schemas.parameters import EndpointName, TokenId
from gateway.schemas.truncation import MAX_ITEMS, CacheSalt, Priority, Side

_Sentences = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]


class Sentences(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence that is compared with others."""

    source_sentence: str
    sentences: _Sentences


Inputs = str | Sentences | Annotated[list[str | TokenId | list[str | TokenId]], msgspec.Meta(min_length=1, max_length=1 << 20)]


class TeiParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Options of Hugging Face's `InferenceClient` and of TEI's `/similarity`."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    """With a classifier: the function of the logits; the preset's own by default."""
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """With a classifier: return this many classes, the most probable first."""
    truncate: bool | None = None
    """The field `truncate`."""
    truncation_direction: Side | None = None
    """The field `truncation_direction`."""
    prompt_name: Literal["query", "document"] | None = None
    """The field `prompt_name`."""


class TeiRequest(Activation, kw_only=True):
    """Do what the model is for: embed, classify or rerank. Give `inputs`, or `query` and `texts`."""

    endpoint: ClassVar[EndpointName] = "tei"
    inputs: Inputs | None = None
    """For an embedding model: texts, lists of token ids, or an object with `source_sentence` and `sentences`, which are compared.
    For a classifier: a text, or a list of lists of one text. For a reranker: a pair of texts, or a list of pairs."""
    query: str | None = None
    """For a reranker: the query of `texts`."""
    texts: _Sentences | None = None
    """For a reranker: the documents."""
    return_text: bool | None = None
    """With `texts`: repeat each document in its result."""
    prompt_name: Literal["query", "document"] | None = None
    """With an embedding model: `query` puts the preset's instruction before each text; `document` is the default."""
    normalize: bool | None = True
    """With an embedding model: scale embeddings to length 1."""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """With an embedding model: length of the embeddings; the model's size by default."""
    parameters: TeiParameters | None = None
    """Options in the form of `InferenceClient`. With a classifier, the answer to one text is then a list in a list."""
    model: str | None = None
    """Name of the model; optional if only one is served."""
    priority: Priority | None = None
    """Requests with lower numbers run earlier; 0 by default."""
    cache_salt: CacheSalt | None = None
    """Requests share cached work only with requests of the same salt, within the trust group of their API key."""

    @property
    def batched(self) -> bool:
        """Whether `inputs` is a list of lists, whose answer is a list of answers."""
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    @property
    def cutting(self) -> dict[str, Any]:
        """The fields of :class:`Activation`, with those of `parameters` where they have no value."""
        fields = {name: getattr(self, name) for name in Activation.__struct_fields__}
        given = self.parameters or TeiParameters()
        for name in ("truncate", "truncation_direction"):
            fields[name] = getattr(given, name) if fields[name] is None else fields[name]
        return fields


def outline(inputs: Inputs) -> Inputs:
    """Return a small value of the same form as ``inputs``, which stands for it where only the form matters."""
    if isinstance(inputs, Sentences):
        return Sentences(source_sentence="", sentences=[""])
    if isinstance(inputs, str):
        return ""
    first = inputs[0]
    if isinstance(first, list):
        return [["" if isinstance(part, str) else 0 for part in first[:3]]]
    return ["" if isinstance(part, str) else 0 for part in inputs[:3]]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A class of a text."""

    label: str
    score: float
    """Its probability; its logit with `raw_scores`, and for a model with one class."""


class TeiInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/info`."""

    model_id: str
    model_sha: str | None = None
    """Not known to the gateway."""
    model_dtype: str | None = None
    """Not known to the gateway."""
    model_type: dict[str, dict[str, Any]]
    """`embedding`, `classifier` or `reranker`, with `id2label` and `label2id` of the last two. Empty for a model without such a
    task."""
    max_input_length: int
    """Most tokens of a prompt."""
    max_batch_tokens: int
    """Most tokens of a request."""
    max_client_batch_size: int = MAX_ITEMS
    """Most texts of a request."""
    auto_truncate: bool = False
    """Long texts are errors unless a request allows cutting them."""
    version: str
