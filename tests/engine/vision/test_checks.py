"""Messages with images: what is checked, and what is refused; and a pod that reads images."""

from __future__ import annotations

import msgspec
import pytest

from tests.engine.vision.models import shown, some_image
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.checks import check
from yardstick_llm.engine.server.loop_process import INLINE_BYTES, DigestChecks

INFO = wire.Info(
    model="m",
    fingerprint="f",
    vocab_size=320,
    max_context=2048,
    eos_token_ids=[2],
    capabilities=["score", "generate"],
    limits=wire.Limits(max_branches=100, max_slots=1000, max_logprobs=20, max_labels=10, max_sequences=4),
    vision=wire.VisionInfo(14, 2, 56 * 56, 28 * 28 * 20, 5, max_images=3, max_tokens=40),
)
IMAGE = some_image(1, 4, 6)
BARE = [wire.IMAGE_TOKENS] * 6


def made(**changes) -> wire.Image:
    """``IMAGE`` with other fields, and the digest of these."""
    image = msgspec.structs.replace(IMAGE, **changes)
    if "digest" not in changes:
        image = msgspec.structs.replace(image, digest=wire.image_digest(image.rows, image.columns, image.pixels))
    return image


def generate(prompt: list[int], *images: wire.Image, **fields) -> wire.Generate:
    return wire.Generate("g", prompt, images=list(images), **fields)


def test_messages_that_are_accepted() -> None:
    for prompt in ([9, *BARE], [*BARE, 9], [*BARE, *BARE], [9], [9, *shown(0, IMAGE), 9, *shown(0, IMAGE)]):
        message = generate(prompt, IMAGE, sampling=wire.Sampling(max_tokens=4))
        assert check(message, INFO) is None
        assert check(wire.Score("s", prompt, [prompt, [9]], wire.Labels([9]), images=[IMAGE]), INFO) is None
        packed, lengths = wire.pack_ids([*prompt, 9]), wire.pack_ids([len(prompt), 1])
        assert check(wire.ScoreItems("s", packed, lengths, prompt, wire.Labels([9]), images=[IMAGE]), INFO) is None


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (made(rows=3), "Image 0 has 3 rows of patches; a multiple of 2 is needed."),
        (made(columns=7), "Image 0 has 7 columns of patches; a multiple of 2 is needed."),
        (made(rows=8), f"Image 0 has {24 * 588} bytes of pixels; 8 by 6 patches have {48 * 588}."),
        (made(rows=20, columns=20), "Image 0 has 78400 pixels, at most 15680 are allowed."),
        (made(digest=bytes(15)), "The digest of image 0 has 15 bytes; 16 are needed."),
    ],
)
def test_images_that_are_refused(image: wire.Image, problem: str) -> None:
    whole = max(1, image.rows * image.columns // 4)
    assert check(generate([9, *[wire.IMAGE_TOKENS] * whole, 9], image), INFO) == problem


def large(seed: int) -> wire.Image:
    """An image whose pixels are read in a thread."""
    image = some_image(seed, 44, 44)
    assert len(image.pixels) > INLINE_BYTES
    return image


@pytest.mark.parametrize("image", [IMAGE, large(3)], ids=["small", "large"])
def test_digests_are_compared_with_pixels(image: wire.Image) -> None:
    wrong = [
        msgspec.structs.replace(image, digest=bytes(16)),
        msgspec.structs.replace(image, rows=image.rows * 2, columns=image.columns // 2),
        msgspec.structs.replace(image, pixels=image.pixels[:-1] + bytes([image.pixels[-1] ^ 1])),
        msgspec.structs.replace(image, rows=-image.rows, columns=-image.columns),
    ]
    submitted: list[wire.Request] = []
    refused: dict[str, str] = {}
    checks = DigestChecks(lambda message, _: submitted.append(message), refused.__setitem__)
    right = generate([9], image)
    for place, each in enumerate(wrong):
        checks.add(wire.Generate(f"wrong {place}", [9], images=[image, each]))
    checks.add(right)
    checks.add(wire.Generate("text", [9]))
    while checks.busy:
        checks.settle()
    assert sorted(message.id for message in submitted) == ["g", "text"]
    assert refused == {f"wrong {place}": "The digest of image 1 is not that of its pixels." for place in range(len(wrong))}


def test_messages_of_one_id_stay_in_order() -> None:
    submitted: list[wire.Request] = []
    checks = DigestChecks(lambda message, _: submitted.append(message), lambda *_: pytest.fail("refused"))
    first = generate([9], large(4))
    checks.add(first)
    checks.add(wire.Abort("g"))
    checks.add(wire.Abort("other"))
    assert submitted == [wire.Abort("other")]
    while checks.busy:
        checks.settle()
    assert submitted == [wire.Abort("other"), first, wire.Abort("g")]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([9, *BARE[1:], 9], "The prompt has 5 tokens of image 0 on end; it has 6."),
        ([9, *BARE, wire.IMAGE_TOKENS, 9], "The prompt has 7 tokens of image 0 on end; it has 6."),
        ([9, *BARE[:3], 9, *BARE[3:]], "The prompt has 3 tokens of image 0 on end; it has 6."),
        ([9, *[wire.IMAGE_TOKENS + 1] * 6], "The prompt shows image 1, and the message has 1 images."),
        ([9, *BARE, 1 << 40], f"The prompt shows image {(1 << 32) - wire.IMAGE_TOKENS}, and the message has 1 images."),
        ([9, *BARE, -1 << 70], "The prompt must be token ids between 0 and 319."),
    ],
)
def test_prompts_that_are_refused(prompt: list[int], problem: str) -> None:
    assert check(generate(prompt, IMAGE), INFO) == problem


def test_parts_of_prompts_show_whole_images() -> None:
    def score(prefix: list[int], *branches: list[int]) -> str | None:
        return check(wire.Score("s", prefix, list(branches), wire.Labels([9]), images=[IMAGE]), INFO)

    assert score([9, *BARE[:2]], BARE[2:]) == "The prefix has 2 tokens of image 0 on end; it has 6."
    assert score([9], [9], [*BARE, *BARE[:1]]) == "Branch 1 has 7 tokens of image 0 on end; it has 6."
    packed, lengths = wire.pack_ids([9, *BARE]), wire.pack_ids([2, 5])
    items = wire.ScoreItems("s", packed, lengths, [9], wire.Labels([9]), images=[IMAGE])
    assert check(items, INFO) == "Item 0 has 1 tokens of image 0 on end; it has 6."
    assert check(msgspec.structs.replace(items, items=b"123"), INFO) == "items and lengths must be 32-bit integers."


def test_images_are_bounded() -> None:
    assert check(generate([9], *[IMAGE] * 4), INFO) == "4 images, at most 3 are allowed."
    large = some_image(2, 8, 8)
    expected = "The images have 48 tokens together, at most 40 are allowed; send fewer or smaller images."
    assert check(generate([9], *[large] * 3), INFO) == expected
    text = msgspec.structs.replace(INFO, vision=None)
    assert check(generate([9, *BARE], IMAGE), text) == "This model reads no images."


def test_ids_of_images_are_no_tokens() -> None:
    """Outputs, labels and prompts without images have ids of the vocabulary only."""
    assert check(generate([9, *BARE]), INFO) == "The prompt must be token ids between 0 and 319."
    labels = wire.Score("s", [9, *BARE], [[9]], wire.Labels([wire.IMAGE_TOKENS]), images=[IMAGE])
    assert check(labels, INFO) == "Label ids must be between 0 and 319."
    stops = wire.Sampling(stop_token_ids=(wire.IMAGE_TOKENS,))
    expected = "Token ids in logit_bias and stop_token_ids must be between 0 and 319."
    assert check(generate([9, *BARE], IMAGE, sampling=stops), INFO) == expected
