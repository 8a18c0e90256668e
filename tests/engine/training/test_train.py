"""Training of length models: targets and gradients against transformers, formats, interruptions, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from tests.attacks.watch import process_tree
from tests.checkpoints import make_checkpoint
from tests.engine.models.causal import causal
from tests.engine.models.published_files import write_quantised
from tests.engine.training.datasets import write_dataset
from tests.gguf_files import SHAPE, write_gguf
from tests.processes import alive, wait_until
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.checkpoint import ADAPTER
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.lenvm import load_lenvm
from yardstick_llm.engine.models.loader import load_model
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.engine.training.__main__ import main
from yardstick_llm.engine.training.data import Dataset, read_dataset
from yardstick_llm.engine.training.train import Trainer, TrainSettings, load_init, write_model

CPU = torch.device("cpu")
SMALL = {"tokens_per_step": 120, "lr": 1e-3, "checks": 3, "epochs": 3}


def settings_of(**given) -> TrainSettings:
    return TrainSettings(data="", init="", out="", **SMALL | given)


def trainer_of(init: Path, dataset: Dataset, *, dtype: torch.dtype = torch.float32, gamma: float = 0.9, **given) -> Trainer:
    settings = settings_of(**given)
    return Trainer(load_init(init, dtype, 0, settings.layers), dataset, gamma, settings, CPU)


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("init"), "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def data(init: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), init, cut=0.2)


@pytest.fixture(scope="module")
def dataset(init: Path, data: Path) -> Dataset:
    return read_dataset(data, load_config(init))


def arguments(data: Path, init: Path, out: Path, *more: str) -> list[str]:
    numbers = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", "--data", str(data), "--init", str(init), "--out", str(out), *numbers, *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "layers"),
    [("qwen3", "bce", None), ("qwen3", "huber", None), ("llama", "bce", None), ("gemma", "bce", None), ("smollm3", "bce", 3)],
)
def test_gradients_are_those_of_transformers(tmp_path: Path, data: Path, family: str, kind: str, layers: int | None) -> None:
    """Of the mean loss over the states of all texts, each text alone in the reference; packed and in several passes here.

    layers: the first ones, which the length model takes of five.
    """
    init = make_checkpoint(tmp_path, family, num_hidden_layers=5 if layers else 2)
    trainer = trainer_of(init, read_dataset(data, load_config(init)), loss=kind, tokens_per_pass=70, layers=layers)
    chosen = list(range(len(trainer.texts)))
    cut = [place for place, text in enumerate(trainer.texts) if not text.ended]
    assert cut
    assert all(trainer.sizes[place] < len(trainer.texts[place].tokens) for place in cut), "what follows the last target is not read"
    loss = trainer.gradients(chosen)

    reference = AutoModel.from_pretrained(init, attn_implementation="eager")
    del reference.layers[layers or 2 :]
    head = trainer.model.head
    fc, summary = (nn.Linear(64, size).requires_grad_() for size in (64, 1))
    for mine, theirs in ((fc, head.fc), (summary, head.summary)):
        mine.load_state_dict(theirs.state_dict())
    losses = []
    for text in trainer.texts:
        hidden = reference(torch.tensor([text.tokens.tolist()])).last_hidden_state[0]
        for drawn in range(text.length + 1):
            n = text.length + 1 - drawn
            if not text.ended and 0.9**n > 0.05:
                continue
            v = summary(nn.functional.silu(fc(hidden[text.start - 1 + drawn]))).sigmoid().squeeze()
            target = 1 - 0.9**n
            difference = (v - target).abs()
            huber = 0.5 * difference**2 if difference < 0.1 else 0.1 * (difference - 0.05)
            losses.append(-(target * v.log() + (1 - target) * (1 - v).log()) if kind == "bce" else huber)
    expected = torch.stack(losses).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    layer, theirs = trainer.model.decoder.layers[0], reference.layers[0]
    attention = theirs.self_attn
    pairs = {
        "embedding": (trainer.model.decoder.embed.weight, reference.embed_tokens.weight.grad),
        "qkv": (layer.attention.qkv_proj.weight, torch.cat([attention.get_submodule(f"{n}_proj").weight.grad for n in "qkv"])),
        "down": (layer.mlp.down_proj.weight, theirs.mlp.down_proj.weight.grad),
        "norm": (trainer.model.decoder.norm.weight, reference.norm.weight.grad),
        "fc": (head.fc.weight, fc.weight.grad),
        "bias": (head.summary.bias, summary.bias.grad),
    }
    for name, (parameter, grad) in pairs.items():
        torch.testing.assert_close(parameter.grad, grad, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method", "kind", "layers"),
    [
        ("llama", "full", None, None),
        ("llama", "lora", None, None),
        ("gemma", "full", None, None),
        ("smollm3", "full", None, 3),
        ("llama", "lora", "Q8_0", 1),
        ("gemma", "adapter", None, 1),
        ("llama", "adapter", "Q8_0", 1),
    ],
)
def test_the_published_layout_is_what_was_trained(
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    method: str,
    kind: str | None,
    layers: int | None,
) -> None:
    """Its values are those of the trained model, its own gamma and calibration are served, and LoRA leaves the embedding alone.
    An adapter has no other weights.

    kind: of the matrices of a GGUF file to begin with, beside which the result is served. layers: the first ones that it takes.
    """
    shape = {"num_hidden_layers": (layers or 0) + 2} | (SHAPE if kind else {})
    init, out = make_checkpoint(tmp_path / "init", family, **shape), tmp_path / "out"
    if kind:
        write_gguf(init, tmp_path / "init.gguf", kind)
        init = tmp_path / "init.gguf"
    more = () if layers is None else ("--layers", str(layers))
    assert main(arguments(data, init, out, "--method", method, *more)) == 0
    facts = json.loads((out / "lenvm.json").read_text())
    assert facts["metrics"]["texts"] == 8
    assert facts["training"]["best_validation_loss"] == min(each["loss"] for each in facts["training"]["history"])
    trainer = trainer_of(init, read_dataset(data, load_config(init)), gamma=facts["gamma"], method=method, layers=layers)
    for _ in trainer.steps:
        trainer.update()
        every = -(-len(trainer.steps) // SMALL["checks"])
        if trainer.progress.step % every == 0 or trainer.progress.step == len(trainer.steps):
            trainer.check()
    is_adapter = method == "adapter"
    (trained, added), loaded = trainer.finish(), load_lenvm(out, base=init)
    if kind and not is_adapter:  # codes are written as bfloat16
        for parameter in trained.parameters():
            parameter.data = parameter.data.bfloat16().float()
    tokens = torch.arange(5, 60)
    with torch.no_grad():
        expected, found = (model.value(model(tokens, torch.arange(55), causal))[0] for model in (trained, loaded))
    close = 2e-2 if kind and is_adapter else 1e-4  # its additions and its head are bfloat16 too
    torch.testing.assert_close(found, expected, atol=close, rtol=close)
    assert loaded.config.num_layers == (layers or 2)
    embedding = load_model(init).embed.weight
    same = torch.equal(loaded.decoder.embed.weight, embedding.bfloat16().float() if kind and not is_adapter else embedding)
    assert same == (method != "full")
    if is_adapter:
        assert {path.name for path in out.iterdir()} == {"config.json", "lenvm.json", ADAPTER, "value_head.safetensors"}
        assert all(tensor.abs().max() > 0 for tensor in added.values())
        assert main(arguments(data, out, tmp_path / "more")) == 1
        assert "is an adapter" in capsys.readouterr().err
    else:
        assert AutoModel.from_pretrained(out).config.num_hidden_layers == loaded.config.num_layers
    info = build_loop(EngineSettings(model=str(init), name="t", lenvm_model=str(out), max_total_tokens=256)).info
    assert info.lenvm_gamma == facts["gamma"]
    assert info.lenvm_calibration is not None
    assert info.lenvm_calibration.states == facts["calibration"]["states"]


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_length_model_of_quantised_weights_is_dense(tmp_path: Path, init: Path, key: str) -> None:
    quantised, _ = write_quantised(init, tmp_path, "w8a8", both=False)
    raw = json.loads((quantised / "config.json").read_text())
    raw[key] = raw.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(raw))
    out = tmp_path / "out"
    out.mkdir()
    model = load_init(quantised, torch.bfloat16, 0)
    expected = {name: tensor.clone() for name, tensor in model.decoder.checkpoint_views().items()}
    write_model(model, quantised, out, {}, {})
    assert key not in json.loads((out / "config.json").read_text())
    found = load_lenvm(out, torch.bfloat16).decoder.checkpoint_views()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_small_updates_accumulate_in_master_weights(init: Path, dataset: Dataset) -> None:
    """With a learning rate far below the resolution of bfloat16."""
    trainer = trainer_of(init, dataset, dtype=torch.bfloat16, lr=1e-6, warm_up=0.0)
    weight, master = (each["decoder.layers.0.mlp.down_proj.weight"] for each in (trainer.parameters, trainer.masters))
    before = weight.detach().clone(), master.clone()
    for _ in range(4):
        trainer.update()
    assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    moved = (master - before[1]).abs()
    assert moved.median() > 1e-6
    assert (weight == before[0]).float().mean() > 0.9
    assert torch.equal(weight, master.bfloat16())


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes() + (out / "value_head.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_training_that_is_interrupted_gives_the_same_bytes(tmp_path: Path, init: Path, data: Path, method: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(arguments(data, init, whole, "--method", method)) == 0
    parts.mkdir()
    given = arguments(data, init, parts, "--method", method, "--resume")
    update = Trainer.update

    def interrupted(trainer: Trainer) -> float:
        if trainer.progress.step == 2:
            raise KeyboardInterrupt
        return update(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        assert main([*given, "--save-minutes", "1e-9"]) == 130
    assert (parts / "training.pt").exists()
    assert main(given[:-1]) == 1, "it asks for --resume"
    assert main([*given, "--seed", "1"]) == 1, "of another training"
    assert main(given) == 0
    assert weights(parts) == weights(whole)
    assert not (parts / "training.pt").exists()
    assert main(given) == 0, "it is complete"
    assert main([*given, "--epochs", "9"]) == 1, "of another training"


def started(command: list[str]) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "yardstick_llm.engine.training", *command, "--device", "cpu"]
    return subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_processes_train_what_one_trains(tmp_path: Path, init: Path, data: Path) -> None:
    """Each pass has one text, so the processes have different numbers of passes, and none at times."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    common = "--tokens-per-pass", "8", "--method", "lora"
    assert main(arguments(data, init, alone, *common)) == 0
    process = started(arguments(data, init, shared, *common, "--processes", "2"))
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert "and 1 others" in said
    assert said.count("is complete") == 1
    for name in ("model.safetensors", "value_head.safetensors"):
        wanted, found = load_file(alone / name), load_file(shared / name)
        assert max(float((wanted[key] - found[key]).abs().max()) for key in wanted) < 1e-5
    losses = [json.loads((out / "lenvm.json").read_text())["training"]["history"] for out in (alone, shared)]
    assert [each["loss"] for each in losses[0]] == pytest.approx([each["loss"] for each in losses[1]], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the first", "another"])
def test_processes_end_together_and_the_training_continues(tmp_path: Path, init: Path, data: Path, killed: str) -> None:
    out = tmp_path / "out"
    command = arguments(data, init, out, "--processes", "2", "--epochs", "400", "--save-minutes", "1e-9")
    process = started(command)
    wait_until((out / "training.pt").exists, 60)
    _, _, other, *_ = process_tree(process.pid)  # the second is the warm process
    os.kill(process.pid if killed == "the first" else other, signal.SIGKILL)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == (-signal.SIGKILL if killed == "the first" else 1)
    assert ("process 1 of the training ended" in said) is (killed == "another")
    wait_until(lambda: not alive(other), 30)
    assert torch.load(out / "training.pt", weights_only=True)["step"] >= 1, "the state is whole"


def damage(data: Path, how: str) -> None:
    path = data / "answers.jsonl"
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    if how == "not JSON":
        lines[1] = lines[1][:40]
    elif how == "no prompt":
        lines[1] = json.dumps(first | {"prompt_ids": []})
    elif how == "token":
        lines[1] = json.dumps(first | {"output_ids": [5, 100_000, 2]})
    elif how == "long":
        lines[1] = json.dumps(first | {"output_ids": [5] * 5000})
    elif how == "no validation":
        lines = [line for line in lines if json.loads(line)["split"] != "validation"]
    elif how == "cut":
        cut = {"finish_reason": "length", "output_ids": [7] * 40}
        lines = [json.dumps(json.loads(line) | cut) for line in lines]
    elif how == "tokeniser":
        manifest = json.loads((data / "manifest.json").read_text())
        manifest["tokenizer"][0]["ids"][0] += 1
        (data / "manifest.json").write_text(json.dumps(manifest))
    else:
        (data / "manifest.json").unlink()
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("not JSON", r"answers\.jsonl, line 2"),
        ("no prompt", r"answers\.jsonl, line 2: not an answer"),
        ("token", "has the token 100000"),
        ("long", "has 500. tokens with its prompt"),
        ("no validation", "split 'validation'"),
        ("cut", "100% of the answers were cut"),
        ("tokeniser", "has another tokeniser"),
        ("manifest", r"manifest\.json cannot be read"),
        ("layers", "has 2 layers, not 3; give a smaller --layers"),
    ],
)
def test_data_that_cannot_be_learned_from(tmp_path: Path, init: Path, capsys: pytest.CaptureFixture[str], how: str, named: str):
    data = write_dataset(tmp_path / "data", init)
    if how != "layers":
        damage(data, how)
    more = ("--layers", "3") if how == "layers" else ()
    assert main(arguments(data, init, tmp_path / "out", *more)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("yardstick: ")
    assert re.search(named, line), line
    assert not (tmp_path / "out").exists()


def test_a_truncated_data_set_is_read_up_to_its_last_whole_line(tmp_path: Path, init: Path) -> None:
    data = write_dataset(tmp_path, init)
    path = data / "answers.jsonl"
    whole = path.read_bytes()
    count = whole.count(b"\n")
    path.write_bytes(whole[:-20])
    config = load_config(init)
    assert sum(map(len, read_dataset(data, config).splits.values())) == count - 1
    path.write_bytes(whole + b'{"prompt_id":"p00","sample":7,"split":"train","error":"busy"}\n')
    assert read_dataset(data, config).failed == 1


@pytest.mark.parametrize("state", ["damaged", "finished"])
def test_an_output_that_cannot_be_continued(tmp_path: Path, init: Path, data: Path, capsys, state: str):
    out = tmp_path / "out"
    out.mkdir()
    (out / ("training.pt" if state == "damaged" else "lenvm.json")).write_bytes(
        b"{}" if state == "finished" else b"PK\x03\x04 nothing"
    )
    assert main(arguments(data, init, out, "--resume")) == 1
    assert ("training.pt is damaged" if state == "damaged" else "already has a length model") in capsys.readouterr().err
