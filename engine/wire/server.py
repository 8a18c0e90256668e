"""Messages in which an engine describes itself: model, limits, counters and tokeniser."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import Any

import msgspec

from engine.wire.common import VisionInfo


class Limits(msgspec.Struct, frozen=True):
    """Limits of one request."""

    max_branches: int
    """Branches of one :class:`Score`."""
    max_slots: int
    """Prefix + its longest branch, in tokens; also prompt + max_tokens."""
    max_logprobs: int
    max_labels: int
    max_sequences: int
    """``n``."""
    max_candidates: int = 64
    """``LengthGuidance.top_k``."""


class AttentionChoice(msgspec.Struct, frozen=True):
    """The attention backend of an engine."""

    backend: str
    """``reference``, ``triton`` or ``flashinfer``."""
    reason: str
    """Why it was chosen, as a clause."""
    fallback: bool = False
    """Whether ``auto`` chose it because the fastest backend of the device cannot be used."""
    modules: str = ""
    """Origin of FlashInfer's modules: ``prebuilt``, or ``compiled`` on this machine. Empty for other backends."""


class Info(msgspec.Struct, tag="info", frozen=True):
    """Description of a served model. Constant for the life of the pod."""

    model: str
    """The name clients ask for."""
    fingerprint: str
    """Digest of weights, dtype and the settings that change numbers; part of every cache key."""
    vocab_size: int
    """Rows of the head; the tokeniser's vocabulary may be smaller (padding)."""
    max_context: int
    """Prompt and output tokens together."""
    eos_token_ids: list[int]
    capabilities: list[str]
    """``score`` (:class:`Labels` and :class:`Likelihood`), ``generate``, ``classify`` (:class:`Classes`), ``embed``
    (:class:`Embedding`), ``length_guidance`` (:class:`LengthGuidance` and :class:`LengthValue`), ``grammar``
    (``Generate.grammar``) and ``vision`` (:class:`Image`)."""
    limits: Limits
    lenvm_gamma: float | None = None
    """Gamma where ``LengthGuidance.gamma`` names none; None without a length model."""
    classes: list[str] = []
    """Names of the classes of the model's head, in the order of :class:`Classes` rows; one for a reward model."""
    multi_label: bool = False
    """Whether classes exclude each other (False: softmax) or not (True: sigmoid)."""
    regression: bool = False
    """Whether the head's outputs are numbers, which no function makes probabilities."""
    embedding_size: int = 0
    """Length of an :class:`Embedding` row; 0 where the model does not embed."""
    arithmetic: str = ""
    """Number formats that the model computes in, for people: ``float32``, or ``float32, matrix products in int8 (avx512_vnni)``."""
    attention: AttentionChoice | None = None
    """None from an engine that does not say."""
    vision: VisionInfo | None = None
    """None where the model reads no images."""
    slot_bytes: int = 0
    """Bytes of keys and values of one token; 0 from an engine that does not say."""


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Snapshot of an engine's counters and gauges."""

    running: int
    waiting: int
    slots_total: int
    slots_free: int
    slots_cached: int
    """Held by the prefix cache alone: can be freed at once."""
    steps: int
    computed_tokens: int
    cached_tokens: int
    slots_items: int = 0
    """Held by items of :class:`ScoreItems` in the prefix cache, in use or not."""
    item_bytes: int = 0
    """Bytes of keys and values of these items."""
    slots_pinned: int = 0
    """Tokens of pinned items."""
    slots_reserved: int = 0
    """Slots that items never take from generations and queries."""
    unpinned_items: int = 0
    """Times that an item was to be pinned and was not, because pins have no more room."""
    displaced_pins: int = 0
    """Pins that ended early because another salt had less than its equal part of their room."""
    scored_items: int = 0
    """Items of :class:`ScoreItems` that were scored."""
    cached_items: int = 0
    """Scored items that were in the prefix cache whole."""
    evicted_item_tokens: int = 0
    """Tokens of items that were evicted from the prefix cache."""
    replayed_steps: int = 0
    """Steps whose launches were replayed from a CUDA graph."""
    attention_fallback: int = 0
    """1 if :attr:`AttentionChoice.fallback`."""
    draft_tokens: int = 0
    """Tokens of drafts that steps computed (:class:`engine.wire.DraftOptions`)."""
    accepted_draft_tokens: int = 0
    """Drafted tokens that were drawn."""
    lenvm_tokens: int = 0
    """Tokens that the length model computed, candidates included."""
    guided_draws: int = 0
    """Draws that used the length model's values."""
    decided_draws: int = 0
    """Draws of guided requests that were decided without the length model: one candidate, or little entropy."""
    replayed_lenvm_passes: int = 0
    """Passes of the length model whose launches were replayed from a CUDA graph."""
    late_compilations: int = 0
    """Triton kernels that were compiled or loaded after the engine was ready. Each delays the requests in progress."""
    wait_seconds: float = 0.0
    """Expected queue time of a new request, of the tenant for which it is longest."""
    tenants: int = 0
    """Tenants with a request that has not ended."""
    refused_invalid: int = 0
    """Requests refused because they were faulty."""
    refused_queue: int = 0
    """Requests refused because the queue was full."""
    refused_wait: int = 0
    """Requests refused because they would have waited too long."""
    refused_adapter: int = 0
    """Requests refused because the engine does not have their adapter."""
    displaced: int = 0
    """Waiting requests that lost their place in a full queue to a tenant with fewer requests in it."""
    structured_requests: int = 0
    """Generations with a grammar."""
    compiled_grammars: int = 0
    """Grammars compiled; one that is in use or was used lately is compiled once."""
    refused_grammars: int = 0
    """Grammars that are not valid, or take too much time or memory."""
    compile_seconds: float = 0.0
    """Time spent in checking and compiling grammars, of refused ones as well."""
    compiling: int = 0
    """Requests that wait until their grammar is compiled."""
    grammar_bytes: int = 0
    """Memory of compiled grammars."""
    masks: int = 0
    """Sets of tokens that grammars allowed, one for each token drawn."""
    mask_seconds: float = 0.0
    """Time spent in computing them, of all threads together."""
    adapters: int = 0
    """Adapters in host memory that requests may name."""
    adapter_bytes: int = 0
    """Host memory of all adapters, of unloaded ones that requests still use as well."""
    adapter_loads: int = 0
    """Adapters loaded."""
    adapter_load_failures: int = 0
    """Adapters that could not be loaded."""
    adapter_load_seconds: float = 0.0
    """Time spent in reading and checking adapters, also of those that could not be loaded."""
    adapter_swaps: int = 0
    """Copies of an adapter from host memory to a slot of the device."""
    computed_images: int = 0
    """Images that vision towers embedded; with a length model, each counts once for each model."""
    cached_images: int = 0
    """Times that a request needed embeddings that were there."""
    image_bytes: int = 0
    """Embeddings of images on the device."""
    tower_seconds: float = 0.0
    """Time that vision towers took."""


class TokenizerFiles(msgspec.Struct, tag="tokenizer", frozen=True):
    """A model's text side, as opaque to the engine as it is needed by the gateway."""

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    """Names as in ``tokenizer_config.json`` (``bos_token``, ``eos_token``, ...) to their text: the variables of chat templates."""
    preset: str | None = None
    """Contents of ``yardstick.toml`` beside the weights: how the model is prompted and read."""
    architecture: str = ""
    """The first of ``architectures`` in the model's ``config.json``."""


_COMMIT = re.compile("[0-9a-f]{40}")


def served_name(model: str) -> str:
    """Return the name under which a directory or hub id is served: its last part, NAME for a snapshot in the hub's cache
    (``models--ORG--NAME/snapshots/…``), and for another directory that is called by a commit, what its ``config.json`` says."""
    path = Path(os.path.abspath(model))  # noqa: PTH100  a link has a name of its own
    cached = path.parent.parent.name.split("--") if path.parent.name == "snapshots" else []
    if cached[:1] == ["models"]:
        return cached[-1]
    if not _COMMIT.fullmatch(path.name):
        return path.name
    try:
        written = msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return path.name
    return PurePath(str(written.get("_name_or_path", ""))).name or path.name
