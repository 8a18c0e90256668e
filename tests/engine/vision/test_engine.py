"""Prompts with images through the engine, against Hugging Face transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.engine.lenvm.writing import run
from tests.engine.parity import make_loop
from tests.engine.test_graphs import Replanned, Rerun
from tests.engine.vision.models import Reference, make_vision_checkpoint, shown, some_image, some_text
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.requests.batch import Batch
from yardstick_llm.engine.runner.graphs import StepGraphs
from yardstick_llm.engine.runner.runner import PendingStep

LABELS = [5, 17, 300]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def rows(loop: Loop, message: wire.Score | wire.ScoreItems) -> torch.Tensor:
    (scored,) = run(loop, message)[message.id]
    assert isinstance(scored, wire.Scored), scored
    return torch.tensor(scored.rows)


def expected(reference: Reference, message: wire.Score) -> torch.Tensor:
    return torch.tensor([reference.row(message.prefix + branch, message.images, LABELS) for branch in message.branches])


def score(name: str, prefix: list[int], branches: list[list[int]], images: list[wire.Image]) -> wire.Score:
    return wire.Score(name, prefix, branches, wire.Labels(LABELS), images=images)


def messages(seed: int) -> list[wire.Score]:
    """Images in the prefix, in branches, at the beginning and the end of both, twice, and of different shapes."""
    rng = random.Random(seed)
    images = [some_image(seed * 10 + place, *shape) for place, shape in enumerate([(10, 12), (2, 2), (4, 18), (8, 8)])]

    def text(low: int = 1, high: int = 9) -> list[int]:
        return some_text(rng, low, high)

    first, second, third, fourth = (shown(place, image) for place, image in enumerate(images))
    bare = [wire.IMAGE_TOKENS + 3] * 16
    return [
        score("prefix", text() + first + text(), [text(), text(), text(20, 30)], images[:1]),
        score("branches", text(), [first + text(), text() + second + text(), text(), text() + third + first[:]], images),
        score("two", text() + first + text() + third, [text() + second + text(), first + text()], images),
        score("twice", first + text() + first, [first, text() + second], images),
        score("ends", bare, [text() + bare, [9]], images),
        score("text", text(30, 40), [text(), text()], []),
        score("unused", text(), [fourth], images),
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batched_tokens": 29},
        {"image_cache_mib": 1, "overlap": True},
        pytest.param({"max_total_tokens": 170, "max_batched_tokens": 40, "overlap": True}, marks=pytest.mark.slow),
    ],
    ids=["chunked", "small cache", "few slots"],
)
def test_scores_equal_transformers(settings: dict, checkpoint: Path, reference: Reference) -> None:
    loop = make_loop(checkpoint, **settings)
    if "image_cache_mib" in settings:
        loop._images.cache._max_bytes = 1  # nothing is kept that no step needs
    given = messages(3)
    wanted = {message.id: expected(reference, message) for message in given}
    for _ in range(2):  # cold, then from the prefix cache
        replies = run(loop, *given)
        for message in given:
            (scored,) = replies[message.id]
            torch.testing.assert_close(torch.tensor(scored.rows), wanted[message.id], atol=1e-5, rtol=1e-5)
    assert loop.stats.computed_images > 0
    assert loop._images.registry.pixel_bytes == 0


def test_likelihoods_of_branches_with_images(checkpoint: Path, reference: Reference) -> None:
    """Tokens of images count as the token that marks a merged patch, as in transformers."""
    rng, images = random.Random(4), [some_image(40, 4, 6), some_image(41, 2, 4)]
    prefix = some_text(rng, 3, 5) + [wire.IMAGE_TOKENS] * 6
    branches = [some_text(rng, 3, 5) + shown(1, images[1]) + some_text(rng, 2, 3), some_text(rng, 4, 4)]
    found = run(make_loop(checkpoint), wire.Score("l", prefix, branches, wire.Likelihood(), images=images))["l"][0].rows
    for row, branch in zip(found, branches, strict=True):
        tokens = prefix + branch
        logits = reference.logits(tokens, images).log_softmax(-1)
        targets = [5 if token >= wire.IMAGE_TOKENS else token for token in branch]
        wanted = logits[range(len(prefix) - 1, len(tokens) - 1), targets]
        torch.testing.assert_close(torch.tensor(row[:-1]), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("readout", [wire.Labels(LABELS), wire.Likelihood()], ids=["labels", "likelihood"])
def test_items_first(readout: wire.ScoreReadout, checkpoint: Path, reference: Reference) -> None:
    rng, images = random.Random(5), [some_image(50, 4, 6), some_image(51, 6, 2), some_image(52, 2, 8)]
    items = [
        shown(0, images[0]) + some_text(rng, 3, 5),
        some_text(rng, 3, 5) + shown(1, images[1]) + some_text(rng, 3, 5),
        some_text(rng, 3, 5),
    ]
    for name, query in (("text", some_text(rng, 3, 5)), ("image", shown(2, images[2]) + some_text(rng, 2, 4))):
        loop = make_loop(checkpoint)
        packed, lengths = wire.pack_ids([token for item in items for token in item]), wire.pack_ids([len(item) for item in items])
        for state in ("cold", "warm"):
            message = wire.ScoreItems(f"{name} {state}", packed, lengths, query, readout, images=images)
            (scored,) = run(loop, message)[message.id]
            assert isinstance(scored, wire.Scored), scored
            for item, row in zip(items, scored.rows, strict=True):
                logits = reference.logits(item + query, images).log_softmax(-1)
                wanted = logits[-1, LABELS]
                if isinstance(readout, wire.Likelihood):
                    targets = [5 if token >= wire.IMAGE_TOKENS else token for token in query]
                    wanted, row = logits[range(len(item) - 1, len(item) + len(query) - 1), targets], row[:-1]
                torch.testing.assert_close(torch.tensor(row), wanted, atol=1e-5, rtol=1e-5)
        assert scored.cached_items == 3


def drawn(replies: list[wire.Reply], index: int = 0) -> list[int]:
    return [token for reply in replies if reply.index == index for token in reply.tokens]


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(checkpoint: Path, reference: Reference) -> None:
    """Two sequences of 60 tokens, one of them taken up again after 25, beside a text, with too few slots for all."""
    rng, image = random.Random(6), some_image(60, 6, 14)
    prompts = [some_text(rng, 5, 9) + shown(0, image) + some_text(rng, 5, 9), shown(0, image) + some_text(rng, 9, 12)]
    sampling = wire.Sampling(max_tokens=60, min_tokens=60, temperature=0.0)
    wanted = [reference.greedy(prompt, [image], 60) for prompt in prompts]
    assert all(len(set(tokens)) > 5 for tokens in wanted)
    loop = make_loop(checkpoint, max_batched_tokens=20, max_total_tokens=180, overlap=True, prompt_lookup=4)
    text = some_text(rng, 20, 30)
    replies = run(
        loop,
        wire.Generate("first", prompts[0], sampling, images=[image]),
        wire.Generate("second", prompts[1] + wanted[1][:25], sampling, resume_offset=25, images=[image]),
        wire.Generate("text", text, wire.Sampling(max_tokens=20, min_tokens=20, temperature=0.0)),
    )
    assert drawn(replies["first"]) == wanted[0]
    assert drawn(replies["second"]) == wanted[1][25:]
    assert drawn(replies["text"]) == reference.greedy(text, [], 20)


def test_prompt_logprobs_and_penalties(checkpoint: Path, reference: Reference) -> None:
    """Both read the prompt, in which an image is the token that marks its merged patches."""
    rng, image = random.Random(7), some_image(70, 4, 8)
    prompt = some_text(rng, 5, 9) + shown(0, image) + some_text(rng, 3, 5) + [wire.IMAGE_TOKENS] * 8
    sampling = wire.Sampling(max_tokens=2, temperature=0.0, repetition_penalty=1.5, ignore_eos=True, n=2)
    replies = run(
        make_loop(checkpoint, max_batched_tokens=9), wire.Generate("g", prompt, sampling, prompt_logprobs=1, images=[image])
    )
    found = [value for reply in replies["g"] if reply.prompt_logprobs for value in reply.prompt_logprobs.chosen]
    logits = reference.logits(prompt, [image])
    targets = [5 if token >= wire.IMAGE_TOKENS else token for token in prompt[1:]]
    wanted = logits.log_softmax(-1)[range(len(targets)), targets]
    assert found[0] is None
    torch.testing.assert_close(torch.tensor(found[1:]), wanted, atol=1e-5, rtol=1e-5)
    last, seen = logits[-1].clone(), sorted({*targets, prompt[0]})
    last[seen] = torch.where(last[seen] > 0, last[seen] / 1.5, last[seen] * 1.5)
    assert drawn(replies["g"])[0] == drawn(replies["g"], 1)[0] == int(last.argmax())


def test_images_never_match_others(checkpoint: Path, reference: Reference) -> None:
    """Same tokens and shape, other pixels; other salts; callers that keep nothing; and images that were forgotten."""
    rng, images = random.Random(8), [some_image(80 + place, 4, 6) for place in range(3)]
    prefix, branch = some_text(rng, 3, 3) + shown(0, images[0]) + some_text(rng, 3, 3), some_text(rng, 2, 2)
    loop = make_loop(checkpoint)
    cached = {}
    steps = [
        ("a", 0, wire.Caller()),
        ("a again", 0, wire.Caller()),
        ("b", 1, wire.Caller()),
        ("a of a salt", 0, wire.Caller(cache_salt="s")),
        ("a of the salt again", 0, wire.Caller(cache_salt="s")),
        ("a of nobody", 0, wire.Caller(keep_prefix=False)),
        ("a of nobody again", 0, wire.Caller(keep_prefix=False)),
    ]
    for name, place, caller in steps:
        message = wire.Score(name, prefix, [branch], wire.Labels(LABELS), caller=caller, images=[images[place]])
        (scored,) = run(loop, message)[name]
        torch.testing.assert_close(torch.tensor(scored.rows), expected(reference, message), atol=1e-5, rtol=1e-5)
        cached[name] = scored.cached_tokens
    assert cached == {name: len(prefix) if name.endswith("again") and "nobody" not in name else 0 for name in cached} | {"b": 4}
    assert loop.stats.computed_images == 5
    loop._images.registry._remembered = 1
    for name, place, found in (("c", 2, 4), ("a forgotten", 0, 4), ("a known", 0, len(prefix))):
        message = score(name, prefix, [branch], [images[place]])
        (scored,) = run(loop, message)[name]
        assert scored.cached_tokens == found
        torch.testing.assert_close(torch.tensor(scored.rows), expected(reference, message), atol=1e-5, rtol=1e-5)


def test_memory_of_pixels_is_bounded(checkpoint: Path) -> None:
    loop, image = make_loop(checkpoint), some_image(90, 4, 4)
    loop._images._most_bytes = len(image.pixels) - 1
    given = [score(name, shown(0, image), [[9]], [image]) for name in ("first", "second")]
    replies = run(loop, *given, score("text", [9], [[9]], []))
    assert isinstance(replies["text"][0], wire.Scored)
    assert isinstance(replies["first"][0], wire.Scored)
    assert (replies["second"][0].code, replies["second"][0].retryable) == ("overloaded", True)
    assert loop._images.registry.pixel_bytes == 0


def test_a_failed_step_leaves_no_embeddings(
    checkpoint: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, image = make_loop(checkpoint), some_image(91, 4, 4)
    message = score("s", shown(0, image), [[9]], [image])
    with monkeypatch.context() as patch:
        patch.setattr(loop._runner._decoder.tower, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        assert run(loop, message)["s"][0].code == "internal"
    assert loop.stats.image_bytes == 0
    assert "broken" in caplog.text
    torch.testing.assert_close(rows(loop, message), expected(reference, message), atol=1e-5, rtol=1e-5)


def test_the_engine_describes_its_vision(checkpoint: Path) -> None:
    loop = make_loop(checkpoint, max_image_tokens=100)
    assert "vision" in loop.info.capabilities
    assert loop.info.vision == wire.VisionInfo(14, 2, 56 * 56, 100 * 28 * 28, 5, wire.MAX_IMAGES, 2048)


def test_a_tower_is_not_shared_by_processes(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="vision tower, so --tensor-parallel cannot"):
        make_loop(checkpoint, tensor_parallel=2)


def test_captured_steps_place_text_behind_images(checkpoint: Path, reference: Reference) -> None:
    """Steps with tokens of images are launched, and those behind them replayed."""
    rng, image = random.Random(11), some_image(110, 4, 12)
    prompt = some_text(rng, 3, 5) + shown(0, image) + some_text(rng, 3, 5)
    loop = make_loop(checkpoint)
    runner = loop._runner
    runner._graphs = [StepGraphs(runner._decoder, Replanned(runner._attention), Rerun(), (1, 2, 64))]
    sampling = wire.Sampling(max_tokens=12, min_tokens=12, temperature=0.0)
    assert drawn(run(loop, wire.Generate("g", prompt, sampling, images=[image]))["g"]) == reference.greedy(prompt, [image], 12)
    assert loop.stats.replayed_steps == 11


def test_a_step_embeds_few_images(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that came behind many images does not wait for them, and the images count as tokens of their steps."""
    monkeypatch.setattr("yardstick_llm.engine.loop.build.CPU_BATCHED_PATCHES", 40)
    loop, images = make_loop(checkpoint), [some_image(120 + place, 4, 6) for place in range(5)]
    steps, launch = [], loop._runner.launch

    def watched(batch: Batch) -> PendingStep:
        steps.append((len(batch.images), {segment.request.id for segment in batch.segments}, batch.load - batch.tokens))
        return launch(batch)

    monkeypatch.setattr(loop._runner, "launch", watched)
    run(
        loop,
        score("images", [9], [shown(place, image) for place, image in enumerate(images)], images),
        score("text", [9], [[9]], []),
    )
    assert [count for count, _, _ in steps] == [1] * 5
    assert [extra for _, _, extra in steps] == [6] * 5
    assert "text" in steps[0][1]
