"""Encoders against Hugging Face transformers in float32: every family, packed with others and alone, of one token to the limit."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from tests.checkpoints import CLASSIFIERS, HEADLESS, make_checkpoint, write_pooling
from tests.encoders import (
    CLASSES,
    CONTEXT,
    TASKS,
    TYPED,
    WITHOUT_MASKED,
    add_module,
    load_reference,
    make_encoder,
    make_jina_v3,
    make_whole,
)
from tests.engine.parity import assert_equal_rows, some_tokens
from tests.engine.test_loop import run
from tests.processor import INT8, multiplies_bytes
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop import build_whole
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.loop.warm_up import warm_up
from yardstick_llm.engine.models import encoder
from yardstick_llm.engine.models.encoder import MOST_RELATED, Encoder, Packed
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.formats import packed
from yardstick_llm.engine.models.loader import load_encoder
from yardstick_llm.engine.models.source import locate, tokenizer_files
from yardstick_llm.engine.requests.batch import ExtendSegment
from yardstick_llm.engine.runner import machine
from yardstick_llm.engine.runner.attention.whole import WholeAttention, divide
from yardstick_llm.engine.runner.graphs import Compilations
from yardstick_llm.engine.scheduling.scheduler import Budget
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.kernels import encoder_layers, native
from yardstick_llm.kernels import int8 as codes
from yardstick_llm.kernels.encoder_layers import SpinBarrier
from yardstick_llm.kernels.int8 import FEW_ROWS, PANEL_INSTRUCTIONS, instructions
from yardstick_llm.kernels.linear import ONEDNN
from yardstick_llm.kernels.native import BLOCK
from yardstick_llm.kernels.native_attention import MOST_QUERIES

FAMILIES = (
    "bert",
    "roberta",
    "xlm_roberta",
    "distilbert",
    "modernbert",
    "mpnet",
    "electra",
    "nomic",
    "gte",
    "deberta",
    "eurobert",
    "albert",
    "ernie",
)
LENGTHS = (1, 2, 7, 7, 7, 16, 17, 40, 99, CONTEXT)


def build(directory: Path, **settings: object) -> Loop:
    return build_loop(EngineSettings(model=str(directory), name="test", **settings))


def one_call(loop: Loop) -> bool:
    """Whether the layers of its encoder are computed in one call."""
    model = loop._runner._decoder
    assert isinstance(model, Encoder)
    return model.native_layers is not None


def edit(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def texts(seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [some_tokens(rng, length, length) for length in LENGTHS]


@torch.inference_mode()
def hidden_of(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """[tokens, hidden]"""
    return model.base_model(torch.tensor([tokens])).last_hidden_state[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_transformers(tmp_path: Path, family: str) -> None:
    directory, sent = make_encoder(tmp_path, family), texts()
    model = load_reference(directory, family, "embed")
    expected = [hidden_of(model, tokens).mean(0) for tokens in sent]
    loop = build(directory, max_batched_tokens=150)
    outputs = ["embed"] if family == "eurobert" else ["embed", "token_vectors"]
    assert (loop.info.encoder, loop.info.capabilities, loop.info.max_context) == (True, outputs, CONTEXT)
    if "token_vectors" in outputs:
        (vectors,) = run(loop, wire.Score("tokens", [], sent[:4], wire.TokenVectors(normalize=False)))
        assert_equal_rows(vectors.rows, [hidden_of(model, tokens).flatten().tolist() for tokens in sent[:4]], 1e-4)
    (packed,) = run(loop, wire.Score("packed", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(packed.rows, [vector.tolist() for vector in expected], 1e-4)
    assert packed.computed_tokens == sum(LENGTHS)
    for tokens, vector in zip(sent, expected, strict=True):
        (alone,) = run(loop, wire.Score("alone", [], [tokens], wire.Embedding(dimensions=24)))
        assert_equal_rows(alone.rows, [normalize(vector[:24], dim=0).tolist()], 1e-4)
    assert loop.stats.steps > 3


@pytest.mark.parametrize(
    ("family", "context", "in_one_call"),
    [("modernbert", 700, True), ("mpnet", 700, True), ("deberta", MOST_RELATED, True), ("deberta", MOST_RELATED + 1, False)],
)
def test_long_texts_equal_transformers(tmp_path: Path, family: str, context: int, in_one_call: bool) -> None:
    """The texts have more queries than one task, and more keys than one block of keys."""
    directory = make_encoder(tmp_path, family, max_position_embeddings=context + 2 * (family == "mpnet"))
    model, loop, rng = load_reference(directory, family, "embed"), build(directory), random.Random(9)
    assert one_call(loop) == in_one_call
    sent = [some_tokens(rng, length, length) for length in (MOST_QUERIES + 1, context)]
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, [hidden_of(model, tokens).mean(0).tolist() for tokens in sent], 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_texts_and_pairs_equal_transformers(tmp_path: Path, family: str) -> None:
    directory = make_encoder(tmp_path, family, "classes")
    model, loop = load_reference(directory, family, "classes"), build(directory)
    assert (loop.info.capabilities, len(loop.info.classes)) == (["classify"], CLASSES)
    query, sent = some_tokens(random.Random(2), 20, 20), [tokens[:108] for tokens in texts()]
    for prefix in ([], query):
        (scored,) = run(loop, wire.Score("s", prefix, sent, wire.Classes()))
        with torch.inference_mode():
            expected = []
            for tokens in sent:
                types = torch.tensor([[0] * len(prefix) + [int(bool(prefix))] * len(tokens)])
                kinds = {"token_type_ids": types} if family in TYPED else {}
                expected.append(model(torch.tensor([prefix + tokens]), **kinds).logits[0].tolist())
        assert_equal_rows(scored.rows, expected, 1e-4)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """All steps are large, for two threads. -> parts of each step, and whether they cut a sequence."""
    monkeypatch.setattr(machine, "MOST_PRODUCTS", 0)
    monkeypatch.setattr(machine, "MOST_ENCODER_INT8_PRODUCTS", 0)
    monkeypatch.setattr(build_whole, "usable_cores", lambda: 2)
    steps, plan, before = list[tuple[int, bool]](), WholeAttention.plan, torch.get_num_threads()

    def watched(self: WholeAttention, segments: Sequence[ExtendSegment]) -> Packed:
        found = plan(self, segments)
        cut = bool(found.spans) or any(part.step.barrier is not None for part in found.parts)
        steps.append((len(found.parts) or len(found.spans), cut))
        return found

    monkeypatch.setattr(WholeAttention, "plan", watched)
    torch.set_num_threads(2)
    yield steps
    torch.set_num_threads(before)


@pytest.mark.parametrize("settings", [pytest.param({}, id="float32"), INT8])
@pytest.mark.parametrize(
    ("family", "in_one_call"),
    [
        ("bert", True),
        ("nomic", True),
        ("modernbert", True),
        ("mpnet", True),
        ("deberta", True),
        ("modernbert", False),
        ("deberta", False),
        ("albert", True),
        ("albert", False),
    ],
)
def test_threads_divide_a_step(
    tmp_path: Path,
    family: str,
    in_one_call: bool,
    settings: dict[str, object],
    divided: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By sequences, or within them where there are too few; those of a biased model, and of one whose layers are the same, are cut
    where its layers are computed in one call only. Then small steps are cut too, and the numbers are those of one thread."""
    directory, cuts = make_encoder(tmp_path, family, "classes"), in_one_call or family == "modernbert"
    if not in_one_call:
        monkeypatch.setattr(Encoder, "native_layers", None)
    assert one_call(build(directory, threads=1, **settings)) == in_one_call
    rng = random.Random(4)
    steps = {
        "texts of one length": ([16] * 6, (2, False)),
        "one text": ([CONTEXT - 20], (2, True) if cuts else (0, False)),
        "a long one": ([7, 2, 90], (2, cuts)),
        "a short one": ([3], (2, True) if in_one_call else (0, False)),
    }
    sent = {name: [some_tokens(rng, length, length) for length in lengths] for name, (lengths, _) in steps.items()}
    query, found = some_tokens(rng, 20, 20), {}
    for threads in (1, 2):
        loop = build(directory, threads=threads, **settings)
        divided.clear()
        for name, items in sent.items():
            (scored,) = run(loop, wire.Score(name, query, items, wire.Classes()))
            found[threads, name] = scored.rows
        if threads == 2:
            assert divided == [expected for _, expected in steps.values()]
    for name in steps:
        if in_one_call:
            assert found[2, name] == found[1, name]
        assert_equal_rows(found[2, name], found[1, name], 1e-5)


@pytest.mark.parametrize("settings", [pytest.param({}, id="float32"), INT8])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_pieces_of_a_step(tmp_path: Path, family: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has the same numbers, however many of its sequences are projected before they attend."""
    loop, encode, rng, pieces = build(make_encoder(tmp_path, family), threads=1, **settings), native.encode, random.Random(5), []
    sent = [some_tokens(rng, length, length) for length in (41, 17, 17, 90)]

    def watched(*given: Any) -> None:
        pieces.append(next(len(each) for each in given if getattr(each, "shape", ())[1:] == (2,)))
        encode(*given)

    monkeypatch.setattr(native, "encode", watched)
    found = []
    for tokens in (1 << 30, 50, 1):
        monkeypatch.setattr(encoder_layers, "PIECE_NUMBERS", tokens * 3 * 64)
        (scored,) = run(loop, wire.Score("a", [], sent, wire.Embedding()))
        found.append(scored.rows)
    assert pieces == [1, 3, 4]
    assert found[0] == found[1] == found[2]


def test_small_steps_on_crowded_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divided: list[tuple[int, bool]]) -> None:
    """Where a thread had to wait for long, one thread computes some of the next small steps; large ones are shared as before."""
    loop, share, used = build(make_encoder(tmp_path, "bert"), threads=2), encoder_layers.share, list[int]()

    def watched(work: Callable[[slice], None], parts: Sequence[slice], threads: int) -> None:
        used.append(threads)
        share(work, parts, threads)

    def threads_of(*lengths: int) -> list[int]:
        used.clear()
        for length in lengths:
            run(loop, wire.Score("a", [], [[7] * length], wire.Embedding()))
        return list(used)

    monkeypatch.setattr(encoder_layers, "share", watched)
    monkeypatch.setattr(encoder_layers, "FEW_TOKENS", 40)
    monkeypatch.setattr(encoder_layers, "MOST_ALONE", 16)
    monkeypatch.setattr(SpinBarrier, "waited", False)
    assert threads_of(30, 30) == [2, 2]
    with monkeypatch.context() as crowded:
        crowded.setattr(SpinBarrier, "waited", True)
        assert threads_of(CONTEXT, *[30] * 45) == [2, 2, *[1] * 8, 2, *[1] * 16, 2, *[1] * 16, 2, 1]
    assert threads_of(30, CONTEXT, *[30] * 16) == [1, 2, *[1] * 14, 2, 2]
    monkeypatch.setattr(SpinBarrier, "waited", True)
    assert threads_of(*[30] * 10) == [2, *[1] * 8, 2]


@pytest.mark.parametrize(
    ("lengths", "threads", "expected"),
    [
        ([50] * 40, 2, [1000, 1000]),
        ([1000] * 4, 2, [1000] * 4),
        ([1000] * 3, 2, [1500, 1500]),
        ([90, 30], 2, [120]),
        ([90, 40], 2, [66, 64]),
        ([8000, 10, 10], 4, [2004, 2004, 2010, 2002]),
        ([30] * 10, 16, [78, 72, 78, 72]),
    ],
)
def test_parts_of_a_step(lengths: list[int], threads: int, expected: list[int]) -> None:
    """Whole sequences where they keep the threads busy. A part has at least 64 tokens, because it reads all weights."""
    parts = divide(lengths, threads, cuts=True)
    assert [len(range(sum(lengths))[part]) for part in parts] == expected
    assert sum(len(range(sum(lengths))[part]) for part in divide(lengths, threads, cuts=False)) == sum(lengths)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_a_thread_that_fails_ends_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divided: list[tuple[int, bool]], in_one_call: bool
) -> None:
    """The other one does not wait for its keys, and the next step is computed."""
    family = "modernbert"
    if not in_one_call:
        monkeypatch.setattr(Encoder, "native_layers", None)
    loop, begin, failing = build(make_encoder(tmp_path, family), threads=2), Encoder.to_last_attention, [1]
    encode = native.encode

    def fail(self: Encoder, tokens: Tensor, positions: Tensor, attend: Packed) -> tuple[Tensor, Tensor]:
        if failing and positions[0]:  # the second part of a sequence
            raise RuntimeError(f"no memory for step {failing.pop()}")
        return begin(self, tokens, positions, attend)

    def fail_in_one_call(*given: Any) -> None:
        if failing and given[-5]:  # the second thread
            raise RuntimeError(f"no memory for step {failing.pop()}")
        encode(*given)

    monkeypatch.setattr(Encoder, "to_last_attention", fail)
    monkeypatch.setattr(native, "encode", fail_in_one_call)
    text = some_tokens(random.Random(5), CONTEXT, CONTEXT)
    (refused,) = run(loop, wire.Score("a", [], [text], wire.Embedding()))
    assert isinstance(refused, wire.Failed)
    assert not failing
    (scored,) = run(loop, wire.Score("b", [], [text], wire.Embedding()))
    assert len(scored.rows) == 1
    assert divided == [(2, True)] * 2


@pytest.mark.parametrize("settings", [pytest.param({}, id="float32"), INT8])
@pytest.mark.parametrize("family", ["bert", "nomic", "gte", "modernbert", "mpnet", "deberta"])
def test_layers_in_one_call_are_their_operations(
    tmp_path: Path, family: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, and the end of one; for all remainders of a tile of rows, and for more rows than are computed at a time.

    Bit for bit, but for rotations, biases, and in float32 for the activation, which round otherwise.
    """
    assert CONTEXT > BLOCK
    directory, rng, finish = make_encoder(tmp_path, family), random.Random(6), encoder.finish_layer
    used, found = set[bool](), []
    sent = [some_tokens(rng, length, length) for length in (1, 2, 3, 4, 5, 6, 7, CONTEXT)]
    monkeypatch.setattr(packed, "library", lambda: ONEDNN)

    def in_one_call(*given: Any) -> Tensor | None:
        used.add((finished := finish(*given)) is not None)
        return finished

    for way, rows in ((None, FEW_ROWS), (in_one_call, FEW_ROWS), (lambda *_: None, 0)):
        if way is not None:
            monkeypatch.setattr(Encoder, "native_layers", None)
            monkeypatch.setattr(encoder, "finish_layer", way)
        monkeypatch.setattr(codes, "FEW_ROWS", rows)
        loop = build(directory, threads=1, **settings)
        if way is None:
            assert one_call(loop)
        found.append([run(loop, wire.Score("s", [], [tokens], wire.Embedding()))[0].rows for tokens in sent])
    assert used == {True} if not settings or instructions() in PANEL_INSTRUCTIONS else {False}
    if family == "bert":
        assert found[0] == found[1]
    if settings:
        assert found[1] == found[2]
    for rows in zip(*found, strict=True):
        assert_equal_rows(rows[1], rows[2], 1e-6)
        assert_equal_rows(rows[0], rows[1], 1e-2 if settings else 1e-6)


def make_jina(directory: Path, kind: str, heads: int) -> Path:
    """Write a JinaBERT as published: a BERT without a table of positions, and with GeGLU in place of its feed-forward layers."""
    make_encoder(directory, "bert", kind, num_attention_heads=heads, hidden_size=24 * heads, max_position_embeddings=600)
    stored = load_file(directory / "model.safetensors")
    del stored[next(name for name in stored if name.endswith("position_embeddings.weight"))]
    for name in [name for name in stored if "intermediate.dense.bias" in name]:
        layer = name.removesuffix("intermediate.dense.bias")
        up = stored.pop(f"{layer}intermediate.dense.weight")
        stored[f"{layer}mlp.gated_layers.weight"] = torch.cat([up, torch.randn_like(up) / 8])
        for ours, published in (("output.dense", "mlp.wo"), ("output.LayerNorm", "mlp.layernorm")):
            for part in ("weight", "bias"):
                stored[f"{layer}{published}.{part}"] = stored.pop(f"{layer}{ours}.{part}")
        del stored[name]
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    architecture = "JinaBertForMaskedLM" if kind == "embed" else "JinaBertForSequenceClassification"
    edit(directory, architectures=[architecture], position_embedding_type="alibi", feed_forward_type="geglu")
    return directory


def make_jina_code(directory: Path) -> dict[str, Tensor]:
    """Write a JinaBERT of code as published, whose queries and keys are normalised. Returns its tensors."""
    make_jina(directory, "embed", 4)
    given, stored = load_file(directory / "model.safetensors"), {}
    names = {"mlp.gated_layers": "mlp.up_gated_layer", "mlp.wo": "mlp.down_layer", "mlp.layernorm": "layer_norm_2"}
    for name, tensor in given.items():
        module, _, kind = name.rpartition(".")
        published = next((module.replace(old, new) for old, new in names.items() if module.endswith(old)), module)
        stored[f"{published}.{kind}"] = tensor
        if module.endswith("mlp.layernorm"):
            for added in ("layer_norm_1", "attention.self.layer_norm_q", "attention.self.layer_norm_k"):
                stored[f"{module.removesuffix('mlp.layernorm')}{added}.{kind}"] = torch.rand_like(tensor) + 0.5
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return stored


@torch.inference_mode()
def jina_hidden(stored: dict[str, Tensor], tokens: list[int], heads: int, slopes: list[float], *, code: bool = False) -> Tensor:
    """[tokens, hidden] by the formulas of the paper, arXiv 2310.19923: symmetric ALiBi, GeGLU, norms after the sums. ``code``: as
    ``jina_code.rs`` of Text Embeddings Inference computes jina-embeddings-v2-base-code."""

    def of(name: str, part: str = "weight") -> Tensor:
        return next(tensor for key, tensor in stored.items() if key.removeprefix("bert.") == f"{name}.{part}")

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, of(name), of(name, "bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], of(name), of(name, "bias"), 1e-12)

    words = of("embeddings.word_embeddings")[tokens] + of("embeddings.token_type_embeddings")[0]
    x, places = norm("embeddings.LayerNorm", words), torch.arange(len(tokens))
    bias = -torch.tensor(slopes)[:, None, None] * (places[:, None] - places).abs()
    for layer in range(3):
        name = f"encoder.layer.{layer}"
        projected = [linear(f"{name}.attention.self.{each}", x) for each in ("query", "key", "value")]
        if code:
            projected[:2] = (
                norm(f"{name}.attention.self.layer_norm_{kind}", each) for kind, each in zip("qk", projected, strict=False)
            )
        q, k, v = (each.view(len(x), heads, -1).transpose(0, 1) for each in projected)
        attended = ((q @ k.transpose(1, 2) / q.shape[2] ** 0.5 + bias).softmax(-1) @ v).transpose(0, 1).flatten(1)
        given, x = x, norm(f"{name}.attention.output.LayerNorm", linear(f"{name}.attention.output.dense", attended) + x)
        if code:
            x = norm(f"{name}.layer_norm_1", x + given)
            up, gate = (x @ of(f"{name}.mlp.up_gated_layer").T).chunk(2, 1)
            x = norm(f"{name}.layer_norm_2", linear(f"{name}.mlp.down_layer", torch.nn.functional.gelu(gate) * up) + x)
            continue
        gate, up = (x @ of(f"{name}.mlp.gated_layers").T).chunk(2, 1)
        x = norm(f"{name}.mlp.layernorm", linear(f"{name}.mlp.wo", torch.nn.functional.gelu(gate) * up) + x)
    return x


@pytest.mark.parametrize("settings", [pytest.param({}, id="float32"), INT8, pytest.param({"threads": 2}, id="threads")])
def test_jina_of_code_equals_its_formulas(tmp_path: Path, settings: dict[str, Any]) -> None:
    stored, sent = make_jina_code(tmp_path), [*texts(), some_tokens(random.Random(3), 500, 500)]
    (scored,) = run(build(tmp_path, **settings), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    hidden = [jina_hidden(stored, tokens, 4, [1 / 4, 1 / 16, 1 / 64, 1 / 256], code=True) for tokens in sent]
    assert_equal_rows(scored.rows, [each.mean(0).tolist() for each in hidden], 0.3 if "quantize" in settings else 1e-4)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [(4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]), (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])],
    ids=["power of two", "others"],
)
def test_jina_equals_its_formulas(tmp_path: Path, heads: int, slopes: list[float]) -> None:
    sent = [*texts(), some_tokens(random.Random(3), 500, 500)]  # of several tiles
    directory = make_jina(tmp_path / "embed", "embed", heads)
    stored = load_file(directory / "model.safetensors")
    (vectors,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    hidden = [jina_hidden(stored, tokens, heads, slopes) for tokens in sent]
    assert_equal_rows(vectors.rows, [each.mean(0).tolist() for each in hidden], 1e-4)
    directory = make_jina(tmp_path / "classes", "classes", heads)
    stored = load_file(directory / "model.safetensors")
    (scored,) = run(build(directory), wire.Score("s", [], sent, wire.Classes()))
    pooled = [
        torch.tanh(
            jina_hidden(stored, tokens, heads, slopes)[0] @ stored["bert.pooler.dense.weight"].T + stored["bert.pooler.dense.bias"]
        )
        for tokens in sent
    ]
    expected = [(each @ stored["classifier.weight"].T + stored["classifier.bias"]).tolist() for each in pooled]
    assert_equal_rows(scored.rows, expected, 1e-4)


def test_tasks_of_jina_embeddings_v3(tmp_path: Path) -> None:
    """In one step, texts of each task have the numbers of that task's weights, merged."""
    published, *merged = make_jina_v3(tmp_path)
    first, rng = 0, random.Random(7)
    sent = [[(320 + task if task < len(TASKS) else first), *some_tokens(rng, n, n)] for n in (1, 20, 90) for task in range(4)]
    loop = build(published)
    assert (loop.info.vocab_size, loop.info.max_context) == (323, CONTEXT)
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    models = [load_reference(folder, "jina_v3", "embed") for folder in merged]
    plain = [[first, *tokens[1:]] for tokens in sent]
    expected = [hidden_of(models[place % 4], tokens).mean(0) for place, tokens in enumerate(plain)]
    assert_equal_rows(scored.rows, [vector.tolist() for vector in expected], 1e-4)
    for settings in ({"dtype": "bfloat16"}, *([{"quantize": "int8", "threads": 2}] if instructions() is not None else [])):
        (coded,) = run(build(published, **settings), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
        assert torch.cosine_similarity(torch.tensor(coded.rows), torch.stack(expected)).min() > 0.99


def test_colbert_of_jina(tmp_path: Path) -> None:
    """jina-colbert-v2 has the body of jina-embeddings-v3, and Stanford's matrix among its weights."""
    published, *_, plain = make_jina_v3(tmp_path)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) / 8
    tensors = {f"roberta.{name}": tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": weight}, published / "model.safetensors")
    edit(published, architectures=["HF_ColBERT"], lora_adaptations=None)
    (published / "modules.json").unlink()
    model, loop, sent = load_reference(plain, "jina_v3", "embed"), build(published), texts()
    assert (loop.info.capabilities, loop.info.token_vector_size) == (["token_vectors"], 16)
    (vectors,) = run(loop, wire.Score("v", [], sent, wire.TokenVectors()))
    expected = [normalize(hidden_of(model, tokens) @ weight.T, dim=1).flatten().tolist() for tokens in sent]
    assert_equal_rows(vectors.rows, expected, 1e-4)


def make_nomic_moe(directory: Path, experts: int) -> dict[str, Tensor]:
    """Write a nomic-embed-text-v2-moe as published. Returns its weights."""
    make_encoder(directory, "nomic", type_vocab_size=1)
    stored, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 8

    tensors = {name: tensor for name, tensor in stored.items() if "encoder" not in name and "pooler" not in name}
    for layer in range(4):
        at, shapes = f"encoder.layers.{layer}.", {"attn.Wqkv": (192, 64), "attn.out_proj": (64, 64)}
        shapes |= {} if layer % 2 else {"mlp.fc1": (96, 64), "mlp.fc2": (64, 96)}
        for name, shape in shapes.items():
            tensors |= {f"{at}{name}.weight": drawn(*shape), f"{at}{name}.bias": drawn(shape[0])}
        for name in ("norm1", "norm2"):
            tensors |= {f"{at}{name}.weight": 1 + drawn(64), f"{at}{name}.bias": drawn(64)}
        if layer % 2:
            tensors |= {f"{at}mlp.router.layer.weight": 8 * drawn(experts, 64), f"{at}mlp.experts.bias": drawn(64)}
            tensors |= {f"{at}mlp.experts.mlp.{name}": drawn(experts * 96, 64) for name in ("w1", "w2")}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 320, "n_embd": 64, "n_layer": 4}
    config |= {"n_head": 4, "n_inner": 96, "n_positions": CONTEXT, "activation_function": "gelu", "layer_norm_epsilon": 1e-5}
    config |= {"rotary_emb_base": 10000.0, "rotary_emb_fraction": 1.0, "qkv_proj_bias": True, "mlp_fc1_bias": True}
    config |= {"mlp_fc2_bias": True, "type_vocab_size": 1, "num_experts": experts, "moe_top_k": 2, "moe_every_n_layers": 2}
    config |= {"num_shared_experts": 0, "expert_choice_router": False, "moe_normalize_expert_weights": False, "pad_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@torch.inference_mode()
def nomic_moe_hidden(stored: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """[tokens, hidden] by the formulas of the published code: rotation, norms after the sums; in every other layer, the sum of two
    experts by their probabilities, which are not divided by their sum, and one bias."""

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, stored[f"{name}.weight"], stored[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], stored[f"{name}.weight"], stored[f"{name}.bias"], 1e-5)

    def turned(x: Tensor) -> Tensor:
        """[heads, tokens, head_dim]"""
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = norm("emb_ln", stored["embeddings.word_embeddings.weight"][tokens] + stored["embeddings.token_type_embeddings.weight"][0])
    angles = torch.arange(len(tokens))[:, None] / 10000.0 ** (torch.arange(8) / 8)
    cos, sin = angles.cos(), angles.sin()
    for layer in range(4):
        at = f"encoder.layers.{layer}"
        q, k, v = linear(f"{at}.attn.Wqkv", x).view(len(x), 3, 4, 16).permute(1, 2, 0, 3)
        attended = (turned(q) @ turned(k).transpose(1, 2) / 4).softmax(-1) @ v
        x = norm(f"{at}.norm1", linear(f"{at}.attn.out_proj", attended.transpose(0, 1).flatten(1)) + x)
        if layer % 2 == 0:
            inner = linear(f"{at}.mlp.fc2", torch.nn.functional.gelu(linear(f"{at}.mlp.fc1", x)))
        else:
            up, down = (stored[f"{at}.mlp.experts.mlp.{name}"].view(-1, 96, 64) for name in ("w1", "w2"))
            weights, chosen = (x @ stored[f"{at}.mlp.router.layer.weight"].T).softmax(1).topk(2)
            of_experts = torch.einsum("tef,efh->teh", torch.nn.functional.gelu(torch.einsum("th,efh->tef", x, up)), down)
            inner = (of_experts[torch.arange(len(x))[:, None], chosen] * weights[..., None]).sum(1)
            inner = inner + stored[f"{at}.mlp.experts.bias"]
        x = norm(f"{at}.norm2", inner + x)
    return x


def test_nomic_moe_equals_its_formulas(tmp_path: Path) -> None:
    stored, sent = make_nomic_moe(tmp_path, 8), texts()
    (scored,) = run(build(tmp_path), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, [nomic_moe_hidden(stored, tokens).mean(0).tolist() for tokens in sent], 1e-4)
    if instructions() is not None:
        (rounded,) = run(build(tmp_path, quantize="int8"), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
        exact, found = torch.tensor(scored.rows), torch.tensor(rounded.rows)
        assert 1e-3 < (found - exact).norm() / exact.norm() < 0.2
    for change, message in (({"moe_top_k": 9}, "moe_top_k"), ({"expert_choice_router": True}, "expert_choice_router")):
        edit(tmp_path, **{"moe_top_k": 2, "expert_choice_router": False} | change)
        with pytest.raises(ModelError, match=message):
            build(tmp_path)


@pytest.mark.parametrize("change", [{"feed_forward_type": "original"}, {"position_embedding_type": "absolute"}])
def test_other_variants_of_jina_are_refused(tmp_path: Path, change: dict[str, str]) -> None:
    edit(make_jina(tmp_path / "m", "embed", 4), **change)
    with pytest.raises(ModelError, match=next(iter(change))):
        build(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_MASKED])
def test_sparse_weights_equal_transformers(tmp_path: Path, family: str) -> None:
    directory, sent = make_encoder(tmp_path, family, "masked"), texts()
    model, loop = load_reference(directory, family, "masked"), build(directory)
    assert loop.info.capabilities == ["sparse"]
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Sparse()))
    with torch.inference_mode():
        expected = [model(torch.tensor([tokens])).logits[0].amax(0).relu().log1p() for tokens in sent]
    for row, wanted in zip(scored.rows, expected, strict=True):
        assert row[::2] == wanted.nonzero().flatten().tolist()
        torch.testing.assert_close(torch.tensor(row[1::2]), wanted[wanted > 0], atol=1e-4, rtol=1e-4)


def test_modernbert_reads_the_mean_where_its_configuration_says_so(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "modernbert", "classes", classifier_pooling="mean", norm_bias=False, classifier_bias=False)
    model, sent = load_reference(directory, "modernbert", "classes"), texts()
    (scored,) = run(build(directory), wire.Score("s", [], sent, wire.Classes()))
    with torch.inference_mode():
        assert_equal_rows(scored.rows, [model(torch.tensor([tokens])).logits[0].tolist() for tokens in sent], 1e-4)


@pytest.mark.parametrize("read", ["bos", "mean"])
def test_eurobert_as_published(tmp_path: Path, read: str) -> None:
    """Its own code comes with the weights, and named what the head reads otherwise. The default, the mean of what the inner layer
    makes of each token, is compared with the other families."""
    directory = make_encoder(tmp_path, "eurobert", "classes", classifier_pooling=read, num_key_value_heads=4)
    model, sent = load_reference(directory, "eurobert", "classes"), texts()
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["classifier_pooling"], config["rope_parameters"], config["head_dim"]
    own = {"auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}, "rope_theta": 10000.0, "rope_scaling": None}
    path.write_text(json.dumps(config | own | {"clf_pooling": read}))
    (scored,) = run(build(directory), wire.Score("s", [], sent, wire.Classes()))
    with torch.inference_mode():
        assert_equal_rows(scored.rows, [model(torch.tensor([tokens])).logits[0].tolist() for tokens in sent], 1e-4)


def test_distances_without_buckets_and_norm(tmp_path: Path) -> None:
    changes = {"position_buckets": -1, "norm_rel_ebd": "none", "max_relative_positions": 24}
    directory, sent = make_encoder(tmp_path, "deberta", **changes), texts()
    model = load_reference(directory, "deberta", "embed")
    (scored,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, [hidden_of(model, tokens).mean(0).tolist() for tokens in sent], 1e-4)


POOLED = {
    "cls_token": lambda hidden: hidden[0],
    "lasttoken": lambda hidden: hidden[-1],
    "max_tokens": lambda hidden: hidden.amax(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "weightedmean_tokens": lambda hidden: (
        (hidden * torch.arange(1, len(hidden) + 1)[:, None]).sum(0) / torch.arange(1, len(hidden) + 1).sum()
    ),
}


@pytest.mark.parametrize("mode", POOLED)
def test_pooling(tmp_path: Path, mode: str) -> None:
    directory, sent = make_encoder(tmp_path, "bert", pooling=mode), texts()
    model = load_reference(directory, "bert", "embed")
    (scored,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, [POOLED[mode](hidden_of(model, tokens)).tolist() for tokens in sent], 1e-4)


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, "cls mean last"),
        ({"pooling_mode": ["max", "mean", "cls"]}, "max mean cls"),
    ],
)
def test_pooling_of_several_modes(tmp_path: Path, config: dict[str, object], modes: str) -> None:
    """Vectors follow each other, in the order of sentence-transformers' flags or of the list."""
    directory, sent = make_encoder(tmp_path, "bert"), texts()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    pool = {"cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0), "max": lambda x: x.amax(0)}
    model, loop = load_reference(directory, "bert", "embed"), build(directory)
    assert (loop.info.embedding_size, loop.info.pooling) == (3 * 64, modes.replace(" ", "+"))
    expected = torch.stack([torch.cat([pool[mode](hidden_of(model, tokens)) for mode in modes.split()]) for tokens in sent])
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, expected.tolist(), 1e-4)
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding(dimensions=100)))
    assert_equal_rows(scored.rows, normalize(expected[:, :100], dim=1).tolist(), 1e-4)
    weight = torch.randn(24, 3 * 64, generator=torch.Generator().manual_seed(3)) / 8
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    add_module(directory, "Dense", {"in_features": 3 * 64, "out_features": 24, "bias": False} | identity, {"linear.weight": weight})
    (scored,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, (expected @ weight.T).tolist(), 1e-4)


def test_projections_and_prompts_left_out(tmp_path: Path) -> None:
    """Dense and LayerNorm modules follow pooling, and the mean leaves out the tokens of the prompt."""
    directory = make_encoder(tmp_path, "bert")
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(40, 64, generator=generator) / 8, torch.randn(40, generator=generator)
    dense = {"in_features": 64, "out_features": 40, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    add_module(directory, "Dense", dense, {"linear.weight": weight, "linear.bias": bias})
    add_module(directory, "LayerNorm", {"dimension": 40}, {"norm.weight": torch.rand(40), "norm.bias": bias})
    loop, sent = build(directory), texts()
    assert loop.info.embedding_size == 40
    model = load_reference(directory, "bert", "embed")
    norm = torch.load(directory / "4_LayerNorm" / "pytorch_model.bin")
    for left_out in (0, 5):
        (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding(normalize=False, prompt_tokens=left_out)))
        pooled = torch.stack([hidden_of(model, tokens)[min(left_out, len(tokens) - 1) :].mean(0) for tokens in sent])
        inner = torch.tanh(pooled @ weight.T + bias)
        expected = torch.nn.functional.layer_norm(inner, (40,), norm["norm.weight"], norm["norm.bias"])
        assert_equal_rows(scored.rows, expected.tolist(), 1e-4)


def test_token_vectors_and_token_weights(tmp_path: Path) -> None:
    """bge-m3 has an embedding, a vector of each token, and a weight of each token that is not special."""
    directory, sent = make_encoder(tmp_path, "xlm_roberta", pooling="cls_token"), texts()
    generator = torch.Generator().manual_seed(3)
    for file, out in (("colbert_linear.pt", 64), ("sparse_linear.pt", 1)):
        tensors = {"weight": torch.randn(out, 64, generator=generator) / 8, "bias": torch.randn(out, generator=generator) / 8}
        torch.save(tensors, directory / file)
    heads = {name: torch.load(directory / f"{name}_linear.pt") for name in ("colbert", "sparse")}
    loop, model = build(directory), load_reference(directory, "xlm_roberta", "embed")
    assert (loop.info.capabilities, loop.info.token_vector_size) == (["embed", "token_vectors", "sparse"], 64)
    hidden = [hidden_of(model, tokens) for tokens in sent]
    (vectors,) = run(loop, wire.Score("v", [], sent, wire.TokenVectors()))
    expected = [normalize(each @ heads["colbert"]["weight"].T + heads["colbert"]["bias"], dim=1) for each in hidden]
    assert_equal_rows(vectors.rows, [each.flatten().tolist() for each in expected], 1e-4)
    sent = [[0, *tokens[:100], 2] for tokens in sent]
    (sparse,) = run(loop, wire.Score("w", [], sent, wire.Sparse()))
    for tokens, row in zip(sent, sparse.rows, strict=True):
        each = (hidden_of(model, tokens) @ heads["sparse"]["weight"].T + heads["sparse"]["bias"]).relu()[:, 0].tolist()
        largest = {token: max(w for t, w in zip(tokens, each, strict=True) if t == token) for token in set(tokens) - {0, 1, 2}}
        wanted = {token: weight for token, weight in sorted(largest.items()) if weight > 0}
        assert row[::2] == list(wanted)
        torch.testing.assert_close(row[1::2], list(wanted.values()), atol=1e-4, rtol=1e-4)


def test_pickled_weights_of_old_names(tmp_path: Path) -> None:
    directory, sent = make_encoder(tmp_path / "new", "bert"), texts()
    old = Path(shutil.copytree(directory, tmp_path / "old"))
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(old / "model.safetensors").items()}
    for now, before in names.items():
        tensors = {name.replace(now, before): tensor for name, tensor in tensors.items()}
    tensors |= {"bert.embeddings.position_ids": torch.arange(4), "cls.seq_relationship.bias": torch.zeros(2)}
    (old / "model.safetensors").unlink()
    torch.save(tensors, old / "pytorch_model.bin")
    rows = [run(build(each), wire.Score("s", [], sent, wire.Embedding()))[0].rows for each in (directory, old)]
    assert rows[0] == rows[1]


def test_jinas_names_of_tensors(tmp_path: Path) -> None:
    """jina-reranker-v2 is an XLM-RoBERTa with one matrix for queries, keys and values, and other names."""
    directory, sent = make_encoder(tmp_path / "new", "xlm_roberta", "classes"), texts()
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    names = (
        ("embeddings.LayerNorm", "emb_ln"),
        ("encoder.layer.", "encoder.layers."),
        ("attention.output.dense", "mixer.out_proj"),
        ("attention.output.LayerNorm", "norm1"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.LayerNorm", "norm2"),
        ("output.dense", "mlp.fc2"),
    )
    tensors = load_file(other / "model.safetensors")
    for layer in range(3):
        before = f"roberta.encoder.layer.{layer}."
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{before}attention.self.{part}.{kind}") for part in ("query", "key", "value")]
            tensors[f"{before}mixer.Wqkv.{kind}"] = torch.cat(parts)
    for ours, theirs in names:
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, other / "model.safetensors")
    rows = [run(build(each), wire.Score("s", [3], sent[:-1], wire.Classes()))[0].rows for each in (directory, other)]
    assert rows[0] == rows[1]


def test_warming_up(tmp_path: Path) -> None:
    """Requests that reach every kernel of a model with all outputs."""
    directory = make_encoder(tmp_path, "xlm_roberta")
    for file, out in (("colbert_linear.pt", 64), ("sparse_linear.pt", 1)):
        torch.save({"weight": torch.ones(out, 64), "bias": torch.zeros(out)}, directory / file)
    loop = build(directory)
    warm_up(loop, Budget(256, 8), Compilations())
    assert loop.stats.steps >= 4


class Harmful:
    """Runs code where a pickle is read without restrictions."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK", "pytorch_model.bin is damaged"),
        ({"a": Harmful()}, "pytorch_model.bin has more than tensors"),
        ([torch.ones(2)], "is not a table of tensors by name"),
        ({"embeddings.LayerNorm.weight": torch.ones(1).expand(1 << 40)}, "lack tensor"),
    ],
)
def test_faulty_pickles(tmp_path: Path, content: object, message: str) -> None:
    directory = make_encoder(tmp_path, "bert")
    (directory / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (directory / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=message):
        build(directory)


@pytest.mark.parametrize("settings", [INT8, pytest.param({"dtype": "bfloat16"}, id="bfloat16")])
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta", "albert"])
def test_formats_change_little(tmp_path: Path, family: str, settings: dict[str, str]) -> None:
    directory, sent = make_encoder(tmp_path, family), texts()
    rows = [
        torch.tensor(run(build(directory, **each), wire.Score("s", [], sent, wire.Embedding()))[0].rows) for each in ({}, settings)
    ]
    cosines = (rows[0] * rows[1]).sum(1)
    assert 0.99 < cosines.min() < 1 - 1e-7


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel"),
        ({"lenvm_model": "/"}, "--lenvm-model"),
        ({"quantize": "fp8"}, "--quantize fp8"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=f"^{named} cannot be used with this BertModel"):
        build(make_encoder(tmp_path, "bert"), **settings)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type in config.json is relative_key"),
        ("bert", {"hidden_act": "mish"}, "hidden_act in config.json is mish"),
        ("bert", {"is_decoder": True}, "is_decoder in config.json is true"),
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups in config.json is not 1"),
        ("bert", {"embedding_size": 32}, "embedding_size in config.json is not hidden_size"),
        ("bert", {"num_attention_heads": 5}, "is not 5 heads"),
        ("bert", {"hidden_size": 1 << 26}, "has shape"),
        ("bert", {"num_hidden_layers": 1 << 40}, "num_hidden_layers in config.json is"),
        ("bert", {"num_hidden_layers": 4}, "lack tensor encoder.layer.3"),
        ("bert", {"num_hidden_layers": 2}, "which the model has no place for"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types in config.json must name"),
        ("nomic", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
        ("gte", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "is not supported for encoders"),
        ("deberta", {"share_att_key": False}, "share_att_key in config.json must be true"),
        ("deberta", {"conv_kernel_size": 3}, "conv_kernel_size in config.json is set"),
        ("deberta", {"pos_att_type": "c2p"}, "pos_att_type in config.json must be c2p and p2c"),
        ("deberta", {"position_buckets": 500}, "position_buckets in config.json is 500"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, family: str, changes: dict[str, object], message: str) -> None:
    edit(make_encoder(tmp_path, family), **changes)
    with pytest.raises(ModelError, match=message):
        build(tmp_path)


def test_keys_of_published_files_that_change_nothing(tmp_path: Path) -> None:
    """ModernBERT's files name positions that its code does not read, and some name classes by numbers."""
    directory, sent = make_encoder(tmp_path, "modernbert", "classes"), texts()[:4]
    (before,) = run(build(directory), wire.Score("s", [], sent, wire.Classes()))
    edit(directory, position_embedding_type="absolute", id2label={str(number): number for number in range(CLASSES)})
    loop = build(directory)
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Classes()))
    assert_equal_rows(scored.rows, before.rows, 0)
    assert loop.info.classes == [str(number) for number in range(CLASSES)]


@pytest.mark.parametrize(
    ("name", "content", "context"),
    [
        ("sentence_xlm-roberta_config.json", {"max_seq_length": 50}, 50),
        ("sentence_bert_config.json", {"max_seq_length": None}, 40),
        ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, 40),
        ("sentence_bert_config.json", {"max_seq_length": 10**6}, CONTEXT),
    ],
)
def test_where_texts_are_cut(tmp_path: Path, name: str, content: dict[str, object], context: int) -> None:
    directory = make_encoder(tmp_path, "bert")
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 40}')
    (directory / name).write_text(json.dumps(content))
    assert build(directory).info.max_context == context
    (directory / name).unlink()
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert build(directory).info.max_context == CONTEXT


def test_modules_that_no_model_of_ours_has(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert", "masked")
    modules = [{"type": "sentence_transformers.base.modules.router.Router", "path": ""}]
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"\(Router\) have none with a Pooling"):
        build(directory)
    route = {"types": {"": "s.MLMTransformer", "1_Splade": "s.SpladePooling", "0_Dense": "s.Dense"}}
    structure = {"structure": {"query": ["0_Dense"], "document": ["", "1_Splade"]}}
    (directory / "router_config.json").write_text(json.dumps(route | structure))
    with pytest.raises(ModelError, match=r"has Dense for queries, which is not supported; only SparseStaticEmbedding"):
        build(directory)
    directory = make_encoder(tmp_path / "scores", "bert")
    (directory / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    with pytest.raises(ModelError, match="must have Pooling of cls or mean, and Dense"):
        build(directory)
    qwen = make_whole(tmp_path / "decoder", "qwen3")
    (qwen / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    with pytest.raises(ModelError, match="scores of a decoder's pooled vectors"):
        build(qwen)


def test_queries_with_a_table_of_weights_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only documents of the same model are."""
    directory = make_encoder(tmp_path, "bert", "masked")
    table = torch.rand(320, generator=torch.Generator().manual_seed(2)) + 0.1
    folders = {"": "s.MLMTransformer", "1_Splade": "s.SpladePooling", "0_Table": "s.SparseStaticEmbedding"}
    structure = {"query": ["0_Table"], "document": ["", "1_Splade"]}
    (directory / "modules.json").write_text('[{"type": "sentence_transformers.base.modules.router.Router", "path": ""}]')
    (directory / "router_config.json").write_text(json.dumps({"types": folders, "structure": structure}))
    (directory / "0_Table").mkdir()
    save_file({"weight": table}, directory / "0_Table" / "model.safetensors")
    loop, sent, computed = build(directory), texts()[:6], list[int]()
    forward = Encoder._embedded

    def counted(self: Encoder, tokens: Tensor, *more: Any) -> Tensor:
        computed.append(len(tokens))
        return forward(self, tokens, *more)

    monkeypatch.setattr(Encoder, "_embedded", counted)
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Sparse(query=True)))
    assert not computed
    for tokens, row in zip(sent, scored.rows, strict=True):
        found = {int(token): weight for token, weight in zip(row[::2], row[1::2], strict=True)}
        assert found == pytest.approx({token: float(table[token]) for token in tokens})
    run(loop, wire.Score("d", [], sent, wire.Sparse()))
    assert sum(computed) == sum(map(len, sent))


def test_layers_that_share_their_weights_are_one(tmp_path: Path) -> None:
    for quantize in (None, "packed", *(["int8"] if instructions() is not None else [])):
        encoder = load_encoder(make_encoder(tmp_path / str(quantize), "albert"), quantize=quantize)
        assert len(encoder.layers) > len(set(encoder.layers)) == 1


def test_other_weights_of_the_same_model_have_another_fingerprint(tmp_path: Path) -> None:
    """The result cache of a gateway tells them apart by it."""
    directory, found = make_encoder(tmp_path, "bert", "masked"), set[str]()
    modules = [("Transformer", ""), ("SpladePooling", "1_SpladePooling")]
    (directory / "modules.json").write_text(
        json.dumps([{"type": f"sentence_transformers.{k}", "path": path} for k, path in modules])
    )
    (directory / "1_SpladePooling").mkdir()
    for activation in ("relu", "log1p_relu"):
        (directory / "1_SpladePooling" / "config.json").write_text(json.dumps({"activation_function": activation}))
        found.add(build(directory).info.fingerprint)
    assert len(found) == 2


def test_a_model_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """As early releases of sentence-transformers write it."""
    directory, sent = make_encoder(tmp_path, "bert"), texts()[:4]
    add_module(
        directory,
        "Dense",
        {"in_features": 64, "out_features": 8},
        {"linear.weight": torch.ones(8, 64), "linear.bias": torch.ones(8)},
    )
    before, files = build(directory), tokenizer_files(directory)
    (directory / "0_Transformer").mkdir()
    for path in [path for path in directory.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(directory / "0_Transformer" / path.name)
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([modules[0] | {"path": "0_Transformer"}, *modules[1:]]))
    after = build(directory)
    assert after.info == before.info
    moved = tokenizer_files(locate(directory))
    assert (moved.tokenizer_json, [*moved.model_files]) == (files.tokenizer_json, [*files.model_files])
    rows = [run(loop, wire.Score("s", [], sent, wire.Embedding()))[0].rows for loop in (before, after)]
    assert rows[0] == rows[1]
    (beside := tmp_path / "other" / "model").mkdir(parents=True)
    (beside / "modules.json").write_text(json.dumps([modules[0] | {"path": ".."}]))
    (beside.parent / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="names a folder outside the model directory"):
        locate(beside)
    (directory / "0_Transformer" / "config.json").unlink()
    with pytest.raises(ModelError, match="There is no config"):
        build(directory)


@pytest.mark.parametrize(("folder", "name"), [("0_StaticEmbedding", "embedding.weight"), (".", "embeddings")])
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, id="float32"), pytest.param({"quantize": "int8", "threads": 2}, marks=multiplies_bytes, id="int8")],
)
def test_static_embeddings(tmp_path: Path, folder: str, name: str, settings: dict[str, object]) -> None:
    """The mean of a text's rows in a table, as sentence-transformers (static-retrieval-mrl-en-v1) and model2vec (potion) do."""
    table, sent = torch.randn(320, 48, generator=torch.Generator().manual_seed(3)), texts()
    (tmp_path / folder).mkdir(exist_ok=True)
    save_file({name: table}, tmp_path / folder / "model.safetensors")
    (tmp_path / folder / "tokenizer.json").write_text(json.dumps({"truncation": None}))
    if folder == ".":
        (tmp_path / "config.json").write_text('{"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": 48}')
    modules = [("StaticEmbedding", folder), ("Normalize", "1_Normalize")]
    written = [{"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"} for at, (kind, path) in enumerate(modules)]
    (tmp_path / "modules.json").write_text(json.dumps(written))
    loop = build(tmp_path, max_batched_tokens=150, **settings)
    assert (loop.info.encoder, loop.info.embedding_size, loop.info.max_context) == (True, 48, 1 << 20)
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, [table[tokens].mean(0).tolist() for tokens in sent], 1e-6)
    (tmp_path / folder / "tokenizer.json").write_text(json.dumps({"truncation": {"max_length": 9}}))
    assert build(tmp_path).info.max_context == 9


def test_dropout_changes_nothing(tmp_path: Path) -> None:
    directory, sent = make_encoder(tmp_path, "bert"), texts()[:4]
    (before,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding()))
    add_module(directory, "Dropout", {"dropout": 0.2})
    (after,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding()))
    assert_equal_rows(after.rows, before.rows, 0)


def test_messages_that_are_refused(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert")
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    loop = build(directory)
    assert loop.info.max_context == 64
    items = wire.ScoreItems("i", wire.pack_ids([5]), wire.pack_ids([1]), [6], wire.Embedding())
    for message, problem in (
        (wire.Score("s", [], [[5] * 65], wire.Embedding()), "a prompt of 65 tokens; 64 fit"),
        (wire.Score("s", [], [[5]], wire.Classes()), "cannot classify; it can embed"),
        (items, "computes prompts whole"),
    ):
        (failed,) = run(loop, message)
        assert problem in failed.message
    with pytest.raises(ModelError, match="--max-context is 65"):
        build(directory, max_context=65)


def test_the_files_that_gateways_need(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert")
    (directory / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    files = tokenizer_files(directory)
    assert files.architecture == "BertModel"
    assert set(files.model_files) == {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"}


@torch.inference_mode()
def both_ways(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """[tokens, hidden] of a decoder whose tokens all attend to each other."""
    mask = torch.zeros(1, 1, len(tokens), len(tokens))
    return model.base_model(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoders_read_in_both_directions(tmp_path: Path, family: str) -> None:
    directory = write_pooling(make_checkpoint(tmp_path, family, model_class=HEADLESS[family]), "mean_tokens")
    edit(directory, is_causal=False)
    loop, model, sent = build(directory, max_batched_tokens=150), HEADLESS[family].from_pretrained(directory).eval(), texts()
    assert loop.info.encoder
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding(normalize=False)))
    assert_equal_rows(scored.rows, [both_ways(model, tokens).mean(0).tolist() for tokens in sent], 1e-4)


def test_embedding_gemma(tmp_path: Path) -> None:
    """Windows in both directions, and two Dense modules after the mean."""
    window = {"sliding_window": 20, "use_bidirectional_attention": True}
    directory = write_pooling(make_checkpoint(tmp_path, "gemma3", model_class=HEADLESS["gemma3"], **window), "mean_tokens")
    weights = []
    for size in (96, 64):
        weights.append(torch.randn(size, 160 - size, generator=torch.Generator().manual_seed(size)) / 8)
        shape = {"in_features": 160 - size, "out_features": size, "bias": False}
        identity = {"activation_function": "torch.nn.modules.linear.Identity"}
        add_module(directory, "Dense", shape | identity, {"linear.weight": weights[-1]})
    loop, model, sent = build(directory), HEADLESS["gemma3"].from_pretrained(directory, dtype=torch.float32).eval(), texts()
    (scored,) = run(loop, wire.Score("s", [], sent, wire.Embedding()))
    vectors = torch.stack([hidden_of(model, tokens).mean(0) for tokens in sent]) @ weights[0].T @ weights[1].T
    assert_equal_rows(scored.rows, normalize(vectors, dim=1).tolist(), 1e-4)


def test_a_decoder_whose_own_code_decides_how_it_attends(tmp_path: Path) -> None:
    """As gte-Qwen2-7B-instruct is published."""
    directory, sent = make_whole(tmp_path, "qwen3"), texts()[:3]
    (before,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding()))
    own = {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}
    edit(directory, is_causal=None, **own)
    with pytest.raises(ModelError, match="add is_causal"):
        build(directory)
    edit(directory, is_causal=False, **own)
    (after,) = run(build(directory), wire.Score("s", [], sent, wire.Embedding()))
    assert_equal_rows(after.rows, before.rows, 0)


def test_llama_nemotron(tmp_path: Path) -> None:
    """The head reads the mean of all tokens, as the code that is published with the weights does."""
    directory = make_checkpoint(tmp_path, "llama", model_class=CLASSIFIERS["llama"], num_labels=1)
    model = CLASSIFIERS["llama"].from_pretrained(directory).eval()
    edit(directory, architectures=["LlamaBidirectionalForSequenceClassification"], pooling="avg", temperature=0.5)
    prefix, sent = [7, 8, 9], texts()
    (scored,) = run(build(directory), wire.Score("s", prefix, sent, wire.Classes()))
    with torch.inference_mode():
        expected = [(model.score(both_ways(model, prefix + tokens).mean(0)) / 0.5).tolist() for tokens in sent]
    assert_equal_rows(scored.rows, expected, 1e-4)
