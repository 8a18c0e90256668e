"""Images in prompts: pixels in the order of a vision model's patches, and the token ids that stand for them."""

from __future__ import annotations

import hashlib

import msgspec

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
