"""Images become exactly the patches of transformers' processor."""

from __future__ import annotations

import hashlib
from functools import cache
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL import ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_resize

from yardstick_llm.engine.wire import Image, VisionInfo
from yardstick_llm.gateway.images.decode import ImageError, decode, prepare, smart_resize

VISION = VisionInfo(14, 2, 56 * 56, 28 * 28 * 64, image_token=7)
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "PA-like")


@cache
def processor(max_pixels: int = VISION.max_pixels) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(size={"shortest_edge": VISION.min_pixels, "longest_edge": max_pixels})


def noise(width: int, height: int, bands: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)


def picture(mode: str, width: int, height: int) -> Pillow.Image:
    if mode == "I;16":
        return Pillow.fromarray(np.random.default_rng(1).integers(0, 1 << 16, (height, width), dtype=np.uint16))
    if mode == "PA-like":  # a palette with a transparent colour
        image = Pillow.fromarray(noise(width, height)).quantize(16)
        image.info["transparency"] = 3
        return image
    rgba = Pillow.fromarray(noise(width, height, 4), "RGBA") if mode in ("RGBA", "LA") else Pillow.fromarray(noise(width, height))
    return rgba if mode == rgba.mode else rgba.convert(mode)


def stored(image: Pillow.Image, format: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def normalised(image: Image) -> np.ndarray:
    """[patches, 3 · 2 · 14 · 14]: as the processor normalises, from our uint8 pixels."""
    reference = processor()
    patches = np.frombuffer(image.pixels, np.uint8).reshape(-1, 3, 14, 14).astype(np.float64) / 255
    mean, deviation = (np.array(each).reshape(3, 1, 1) for each in (reference.image_mean, reference.image_std))
    scaled = (patches - mean) / deviation
    return np.repeat(scaled[:, :, None], 2, axis=2).reshape(len(patches), -1)


def check_equal(content: bytes, max_pixels: int = VISION.max_pixels) -> Image:
    given = Pillow.open(BytesIO(content))
    expected = processor(max_pixels)(images=[ImageOps.exif_transpose(given)])
    ours = prepare(decode(content, max_pixels=1 << 24), VISION, max_pixels=max_pixels)
    assert [[1, ours.rows, ours.columns]] == np.array(expected["image_grid_thw"]).tolist()
    np.testing.assert_allclose(normalised(ours), np.array(expected["pixel_values"]), rtol=0, atol=1e-6)
    return ours


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_pixels_of_transformers(mode: str) -> None:
    check_equal(stored(picture(mode, 61, 90), "JPEG" if mode == "CMYK" else "PNG"))


@pytest.mark.parametrize(
    ("format", "options"), [("JPEG", {}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("BMP", {})]
)
def test_every_format_gives_the_pixels_of_transformers(format: str, options: dict[str, object]) -> None:
    check_equal(stored(picture("RGB", 200, 87), format, **options))


@settings(max_examples=15, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(2, 300), most=st.sampled_from([28 * 28 * 5, 28 * 28 * 64]))
def test_any_shape_gives_the_pixels_of_transformers(width: int, height: int, most: int) -> None:
    if max(width, height) <= 200 * min(width, height):
        check_equal(stored(picture("L", width, height)), most)


@given(height=st.integers(1, 9000), width=st.integers(1, 9000), most=st.integers(4, 4000), least=st.integers(1, 4))
def test_sizes_are_those_of_transformers(height: int, width: int, most: int, least: int) -> None:
    bounds = {"min_pixels": least * 784, "max_pixels": most * 784}
    if max(width, height) <= 200 * min(width, height):
        assert smart_resize(height, width, factor=28, **bounds) == reference_resize(height, width, 28, **bounds)
    else:
        with pytest.raises(ImageError, match="200 times"):
            smart_resize(height, width, factor=28, **bounds)


def test_the_orientation_of_a_photo_is_applied() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image = check_equal(stored(picture("RGB", 112, 56), "JPEG", exif=exif))
    assert (image.rows, image.columns) == (8, 4)


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Pillow.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if format == "WEBP" else {}
        content = stored(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert prepare(decode(content, max_pixels=1 << 20), VISION).pixels == prepare(frames[0], VISION).pixels


def test_the_digest_covers_shape_and_pixels() -> None:
    image = prepare(picture("RGB", 112, 56), VISION)
    whole = (4).to_bytes(4, "little") + (8).to_bytes(4, "little") + image.pixels
    assert image.digest == hashlib.blake2b(whole, digest_size=16).digest()
    assert VISION.tokens_of(image) == 8
    wide, high = prepare(Pillow.new("RGB", (112, 56)), VISION), prepare(Pillow.new("RGB", (56, 112)), VISION)
    assert wide.pixels == high.pixels
    assert wide.digest != high.digest
