"""Every readout of a score against Hugging Face transformers, however its tokens come to be computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.checkpoints import CLASSIFIERS, make_checkpoint
from tests.engine.parity import CLASSES, MODELS, Reference, assert_equal_rows, make_loop, make_model, readouts_of, some_tokens
from tests.engine.test_loop import run
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.wire import pack_ids

Build = Callable[..., Loop]

SERVED = [
    *[("qwen3", kind) for kind in MODELS],
    ("llama", "causal last"),
    ("qwen2", "headless mean"),
    ("qwen2", "classes"),
    ("gemma3", "classes"),
]
"""Families and kinds; test_families.py has the other language models, and models/test_heads.py loads all of them."""


@pytest.fixture(scope="module", params=SERVED[: len(MODELS)], ids=map("-".join, SERVED[: len(MODELS)]))
def model(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Family and kind. A family changes the rows alone, so tests of other things have one."""
    family, kind = request.param
    return family, kind


of_each_family = pytest.mark.parametrize(
    "model",
    [pytest.param(served, id="-".join(served), marks=[] if served[0] == "qwen3" else pytest.mark.slow) for served in SERVED],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def checkpoint(model: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), *model)


@pytest.fixture(scope="module")
def reference(checkpoint: Path, model: tuple[str, str]) -> Reference:
    return Reference(checkpoint, *model)


class Asked(NamedTuple):
    """One request for each readout, the rows that transformers computes for them, and generations to run beside them."""

    messages: list[wire.Score]
    rows: dict[str, list[list[float]]]
    company: list[wire.Generate]


@pytest.fixture(scope="module")
def asked(model: tuple[str, str], reference: Reference) -> Asked:
    rng = random.Random(1)
    messages = messages_of(rng, model[1], reference)
    generation = wire.Generate("g", some_tokens(rng, 10, 10), wire.Sampling(max_tokens=40, ignore_eos=True, seed=3))
    rows = {message.id: reference.rows(message) for message in messages}
    return Asked(messages, rows, [generation] if model[1].startswith("causal") else [])


@pytest.fixture
def build(checkpoint: Path) -> Build:
    return partial(make_loop, checkpoint, overlap=True)


def messages_of(rng: random.Random, kind: str, reference: Reference) -> list[wire.Score]:
    """One for each readout. Some branches of likelihoods are the most probable ones."""
    messages = []
    for index, readout in enumerate(readouts_of(kind)):
        prefix = some_tokens(rng, 1, 50)
        branches = [some_tokens(rng, 1, 40) for _ in range(5)]
        if isinstance(readout, wire.Likelihood):
            branches += [reference.greedy(prefix, 3), [*reference.greedy(prefix, 2), 7], prefix[:1]]
        messages.append(wire.Score(f"s{index}", prefix, branches, readout))
    return messages


def scored(replies: list[wire.Reply]) -> dict[str, wire.Scored]:
    failed = [reply for reply in replies if isinstance(reply, wire.Failed)]
    assert not failed
    return {reply.id: reply for reply in replies if isinstance(reply, wire.Scored)}


@of_each_family
def test_rows_equal_transformers(build: Build, asked: Asked) -> None:
    """All readouts and generations in the same steps, in few slots and chunks; then again with a warm cache, in another order."""
    messages, expected, company = asked
    loop = build(max_total_tokens=130, max_batched_tokens=15)
    found = scored(run(loop, messages[0], checked=True))
    assert_equal_rows(found[messages[0].id].rows, expected[messages[0].id])
    found = scored(run(loop, *company, *messages, checked=True))
    for message in messages:
        assert_equal_rows(found[message.id].rows, expected[message.id])
    again = scored(run(loop, *reversed(messages), *company, checked=True))
    for message in messages:
        assert_equal_rows(again[message.id].rows, expected[message.id])
    loop._scheduler.cache.clear()
    assert loop.stats.slots_free == loop.stats.slots_total


def test_what_the_model_can_do_is_described(build: Build, model: tuple[str, str]) -> None:
    info = build().info
    expected = {
        "causal last": ["score", "generate", "embed", "grammar"],
        "causal mean": ["score", "generate", "embed", "grammar"],
        "headless last": ["embed"],
        "headless mean": ["embed"],
        "classes": ["classify"],
    }
    assert info.capabilities == expected[model[1]]
    assert info.classes == ([f"LABEL_{index}" for index in range(CLASSES)] if model[1] == "classes" else [])
    assert info.embedding_size == (0 if model[1] == "classes" else 64)
    assert info.pooling == model[1].partition(" ")[2]
    assert not info.multi_label


ABILITIES: dict[str, wire.Score | wire.Generate] = {
    "score": wire.Score("x", [1], [[2]], wire.Likelihood()),
    "generate": wire.Generate("x", [1, 2]),
    "classify": wire.Score("x", [1], [[2]], wire.Classes()),
    "embed": wire.Score("x", [1], [[2]], wire.Embedding()),
}


@pytest.mark.parametrize("ability", ABILITIES)
def test_what_the_model_cannot_do_is_refused(build: Build, ability: str) -> None:
    loop = build()
    reply = run(loop, ABILITIES[ability])[-1]
    if ability in loop.info.capabilities:
        assert not isinstance(reply, wire.Failed)
    else:
        able = " and ".join(name for name in loop.info.capabilities if name != "grammar")
        assert (reply.code, reply.message) == ("invalid", f"This model cannot {ability}; it can {able}.")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_head_reads_the_last_token_that_is_no_padding(family: str, tmp_path: Path) -> None:
    """As transformers does, in every division of a prompt, and for prompts of padding alone."""
    directory = make_checkpoint(tmp_path, family, model_class=CLASSIFIERS[family], num_labels=3, pad_token_id=0)
    reference = Reference(directory, family, "classes")
    loop = make_loop(directory)
    rng = random.Random(2)
    prefix = [*some_tokens(rng, 5, 9), 0]
    divided = [
        wire.Score("ends", prefix, [[4, 5, 0], [7], [0, 8, 0, 0, 0]], wire.Classes()),
        wire.Score("alone", prefix, [[4, 5], [0, 0]], wire.Classes()),
        wire.Score("nothing", [], [[0, 0], [0]], wire.Classes()),
    ]
    found = scored(run(loop, *divided))
    for message in divided:
        assert_equal_rows(found[message.id].rows, reference.rows(message))
    items = wire.ScoreItems("items", pack_ids([3, 4, 5]), pack_ids([2, 1]), [9, 0], wire.Classes())
    expected = [reference.row(item, [9, 0], wire.Classes()) for item in ([3, 4], [5])]
    assert_equal_rows(scored(run(loop, items))["items"].rows, expected)
    (refused,) = run(loop, msgspec.structs.replace(items, query=[0, 0]))
    assert isinstance(refused, wire.Failed)
    assert "padding" in refused.message


def test_a_regression_says_so(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", model_class=CLASSIFIERS["qwen3"], num_labels=3, problem_type="regression")
    info = make_loop(directory).info
    assert (info.regression, info.multi_label) == (True, False)
