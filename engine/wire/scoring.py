"""A score: the kinds of readout, the request and the answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.wire.common import Caller, Image
from engine.wire.server import Info


class Labels(msgspec.Struct, tag="labels", frozen=True, omit_defaults=True):
    """Log-probabilities of ``tokens`` as the next token, over the full vocabulary. A row has one number for each."""

    tokens: list[int]
    raw: bool = False
    """Logits instead of log-probabilities."""


class Likelihood(msgspec.Struct, tag="likelihood", frozen=True):
    """Log-probability of each token of the branch, given the prefix and the branch's tokens before it.

    The prefix has at least one token. A row has one number for each token of the branch, and a last one: 1 where each of them was
    the most probable token at its place, otherwise 0.
    """


class Classes(msgspec.Struct, tag="classes", frozen=True):
    """Logits of the model's classification or reward head. A row has one number for each of ``Info.classes``. Only where
    ``Info.capabilities`` has ``classify``."""


class Embedding(msgspec.Struct, tag="embedding", frozen=True, omit_defaults=True):
    """The pooled hidden state of the prompt. Only where ``Info.capabilities`` has ``embed``."""

    dimensions: int | None = None
    """Length of the row: its first numbers are kept (Matryoshka). At most ``Info.embedding_size``; None keeps all."""
    normalize: bool = True
    """Scale to length 1, after numbers are cut off."""


class LengthValue(msgspec.Struct, tag="length_value", frozen=True):
    """The length model's estimate. A row has one number: z of v = sigmoid(z) = 1 − gamma^(tokens to come); v itself rounds to 1 for
    long texts. Only where ``Info.capabilities`` has ``length_guidance``."""


ScoreReadout = Labels | Likelihood | Classes | Embedding | LengthValue
"""The kinds of output of a :class:`Score`; one row for each branch."""


class Score(msgspec.Struct, tag="score", frozen=True, omit_defaults=True):
    """Read ``readout`` after each prompt ``prefix + branches[i]``, without decoding. A branch has at least one token."""

    id: str
    prefix: list[int]
    branches: list[list[int]]
    readout: ScoreReadout
    priority: int = 0
    """Lower runs earlier among the requests of one tenant; equal priorities run in order of arrival. A priority never moves a
    request ahead of another tenant's requests. Requests age: one of priority p is served like one of priority 0 that came p times
    5 seconds later (:data:`engine.scheduling.fair_queue.AGING_SECONDS`). Priorities beyond -10 and 10 count as these."""
    deadline: float | None = None
    """Seconds from receipt until the request expires; items that are not computed by then are dropped."""
    caller: Caller = Caller()
    adapter: str = ""
    """Digest of an adapter (:class:`engine.wire.Adapter`); empty: the base model."""
    images: list[Image] = []
    """Each image once, however often the prompts name it. Only where ``Info.vision`` is given."""


class ScoreItems(msgspec.Struct, tag="score_items", frozen=True, omit_defaults=True):
    """Read ``readout`` after each prompt ``item + query``, without decoding.

    Each item is a prefix of its own that stays in the prefix cache, so a later query computes only its own tokens. The query is the
    branch of each item and has at least one token; an item may be empty. Token ids of items are packed (:mod:`engine.wire.common`),
    because a message has tens of thousands of them.
    """

    id: str
    items: bytes
    """Token ids of all items, one after another."""
    lengths: bytes
    """Length of each item, in tokens."""
    query: list[int]
    readout: ScoreReadout
    priority: int = 0
    """See :class:`Score`."""
    deadline: float | None = None
    """See :class:`Score`."""
    caller: Caller = Caller()
    pin_seconds: float | None = None
    """Pin each item for this time after it is scored: it is not evicted until then. A later message with a time replaces it, 0 ends
    it, None changes nothing. Items that find no room, or whose caller keeps nothing, are scored and not pinned. Pins give way only
    to a request that otherwise could not be computed at all, and end with the pod."""
    adapter: str = ""
    """See :class:`Score`."""
    images: list[Image] = []
    """Each image once, however often the prompts name it. Only where ``Info.vision`` is given."""


class Scored(msgspec.Struct, tag="scored", frozen=True):
    """The answer to :class:`Score` and :class:`ScoreItems`."""

    id: str
    rows: list[list[float]]
    """[branch or item][number]; the readout says which numbers. Logarithms are natural."""
    cached_tokens: int
    """Prefix tokens that were found in the prefix cache of the model that computed the rows."""
    computed_tokens: int
    """Tokens that went through the model for this request."""
    queue_seconds: float = 0.0
    """Time from the receipt of the whole request by the engine's HTTP server to the first step that computed a part of it."""
    cached_items: int = 0
    """Items of :class:`ScoreItems` that were in the prefix cache whole."""
    pinned_items: int = 0
    """Items of :class:`ScoreItems` with ``pin_seconds`` above 0 that are pinned."""


def row_length(readout: ScoreReadout, branch: Sequence[int], info: Info) -> int:
    """Return the number of numbers in the row of ``readout`` for ``branch``."""
    match readout:
        case Labels():
            return len(readout.tokens)
        case Likelihood():
            return len(branch) + 1
        case Classes():
            return len(info.classes)
        case Embedding():
            return readout.dimensions or info.embedding_size
        case LengthValue():
            return 1
