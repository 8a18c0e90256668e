"""Types that messages of all kinds use: caller, failures, token ids, images, adapters."""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

MODEL_HEADER = "x-yardstick-model"
"""The name of the model, percent-encoded; sent while it is loading as well."""
ADAPTERS_HEADER = "x-yardstick-adapters"
"""Revision of the answer of ``GET /adapters``, in ASCII. Another list and another process have another revision."""
ErrorCode = Literal[
    "invalid", "unauthorized", "unknown_adapter", "overloaded", "not_ready", "deadline", "aborted", "out_of_memory", "internal"
]
"""``unknown_adapter``: the engine has no adapter of this digest or name; another replica may."""
STATUS_OF_CODE: dict[str, int] = {
    "invalid": 400,
    "unauthorized": 401,
    "unknown_adapter": 404,
    "overloaded": 429,
    "not_ready": 503,
    "deadline": 504,
    "aborted": 499,
    "out_of_memory": 503,
    "internal": 500,
}


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client on whose behalf a request runs."""

    request_id: str = ""
    """The `x-request-id` of the client's request; the engine's log names it."""
    tenant: str = ""
    """The flow of the engine's fair queue: an opaque id of the API key, never a secret. Empty: the gateway asks for no keys."""
    weight: float = 1.0
    """Share of the engine relative to other tenants; 0.001 to 1000."""
    cache_salt: str = ""
    """Namespace in the prefix cache: only requests with an equal salt share cached tokens."""
    keep_prefix: bool = True
    """False: the prefix cache shares nothing with this request and keeps nothing of it after its end."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop a request. It still gets its terminal message."""

    id: str


class Failed(msgspec.Struct, tag="failed", frozen=True, omit_defaults=True):
    """The request ended without a result."""

    id: str
    code: ErrorCode
    message: str
    """The problem and its remedy, for a person; no paths, no tracebacks."""
    retryable: bool = False
    """True where the same request may succeed on another replica, or here later."""
    retry_after: float | None = None
    """Seconds."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit integers, the least significant byte first."""
    if isinstance(ids, array) and ids.typecode == "I" and sys.byteorder == "little":
        return ids.tobytes()
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


IMAGE_TOKENS = 1 << 30
"""Token id ``IMAGE_TOKENS + i`` in a prompt stands for one merged patch of ``images[i]`` of the same message. An image's tokens
stand together, :meth:`VisionInfo.tokens_of` of them. They are not ids of the vocabulary: no output and no label may have them."""
MAX_IMAGES = 256
"""Most images of one message."""


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image that was resized to whole merged patches. Its normalisation is the engine's."""

    digest: bytes
    """:func:`image_digest` of the other fields. The engine computes it again before it trusts it."""
    rows: int
    """Height in patches; a multiple of :attr:`VisionInfo.merge_size`."""
    columns: int
    """Width in patches; a multiple of :attr:`VisionInfo.merge_size`."""
    pixels: bytes
    """[rows · columns, 3, patch_size, patch_size] uint8, RGB. Patches of one merged patch follow each other, in the order of
    Hugging Face's processor: [rows / m, columns / m, m, m] with m = merge_size."""


class VisionInfo(msgspec.Struct, frozen=True):
    """Constants with which a gateway prepares images for a model, those of its ``preprocessor_config.json`` and ``config.json``."""

    patch_size: int
    """Height and width of a patch, in pixels."""
    merge_size: int
    """Height and width of a merged patch, in patches. A merged patch is one token."""
    min_pixels: int
    """Smaller images are enlarged."""
    max_pixels: int
    """Larger images are reduced."""
    image_token: int
    """Id of the token that marks one merged patch in a rendered chat template (``<|image_pad|>``). The gateway replaces one such
    token by the tokens of the image."""
    max_images: int = MAX_IMAGES
    """Most images of one message."""
    max_tokens: int = 0
    """Most image tokens of one message, counted once for each image."""

    def tokens_of(self, image: Image) -> int:
        """Return the number of tokens of ``image``."""
        return image.rows * image.columns // self.merge_size**2


def image_digest(rows: int, columns: int, pixels: bytes) -> bytes:
    """Return 16 bytes of BLAKE2b over ``rows`` and ``columns``, each as 4 bytes, the least significant first, and ``pixels``."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(rows.to_bytes(4, "little") + columns.to_bytes(4, "little"))
    digest.update(pixels)
    return digest.digest()


ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Names of adapters. They have no colon, which separates base and adapter in ``base:adapter`` for clients."""


class Adapter(msgspec.Struct, tag="adapter", frozen=True, omit_defaults=True):
    """An adapter that requests may name."""

    name: str
    """See :data:`ADAPTER_NAME`; not the name of the base model."""
    digest: str
    """Digest of weights and configuration, hexadecimal: what :attr:`engine.wire.Score.adapter` names."""
    rank: int
    """Largest rank of its matrices."""
    bytes: int
    """Host memory that it takes."""
    capabilities: list[str]
    """Capabilities for requests with this adapter; see :attr:`engine.wire.Info.capabilities`."""
    classes: list[str] = []
    """Classes for requests with this adapter; see :attr:`engine.wire.Info.classes`."""
    multi_label: bool = False
    """For requests with this adapter; see :attr:`engine.wire.Info.multi_label`."""
    regression: bool = False
    """For requests with this adapter; see :attr:`engine.wire.Info.regression`."""


class Adapters(msgspec.Struct, tag="adapters", frozen=True, omit_defaults=True):
    """The adapters of an engine, by name."""

    adapters: list[Adapter]
    max_adapters: int = 0
    """Most adapters in host memory; 0: the engine takes none."""
    max_rank: int = 0
    problem: str = ""
    """Why it takes none, as a clause."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True, omit_defaults=True):
    """Load an adapter in PEFT's format. Loading equal files under the same name again changes nothing."""

    name: str
    path: str
    """A directory on the engine's machine, or a hub id."""
    replace: bool = False
    """Replace an adapter of this name that has another digest; without this, that is an error."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Unload an adapter. Requests in progress finish with its weights."""

    name: str
