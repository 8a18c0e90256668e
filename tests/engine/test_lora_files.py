"""Files of adapters: what is read, and what is refused by name."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import make_checkpoint
from tests.engine.adapters import write_adapter
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lora import config
from yardstick_llm.engine.models.lora.config import MAX_CHARACTERS_OF_ONE, AdapterError, PatternError, Patterns
from yardstick_llm.engine.models.lora.reader import AdapterReader
from yardstick_llm.engine.models.lora.registry import AdapterRegistry, LoraManager
from yardstick_llm.engine.models.lora.slots import Layout
from yardstick_llm.engine.settings import EngineSettings

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", num_hidden_layers=2)
    return directory, AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture
def adapter(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapters" / "one", base[1])


@pytest.fixture
def registry(base: tuple[Path, PreTrainedModel]) -> AdapterRegistry:
    limits = wire.Limits(1, 1, 1, 1, 1)
    info = wire.Info("base", "f", 320, 2048, [], ["score", "generate", "embed"], limits)
    return AdapterRegistry(AdapterReader(Layout(load_config(base[0])), info, torch.float32, 16), most=2)


def edit(directory: Path, **keys: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"task_type": "TOKEN_CLS"}, "TOKEN_CLS"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.*--lora-modules lm_head"),
        ({"modules_to_save": ["model.embed_tokens"]}, "embed_tokens.*--lora-modules all"),
        ({"modules_to_save": ["norm"]}, "norm"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj", "gate"]}, "gate"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"something_new": 3}, "something_new"),
        ({"r": 17}, "rank .* is 17; this engine takes at most 16"),
        ({"r": 5}, r"shape \[4, 96\], where this model needs \[5, 96\]"),
        ({"r": "4"}, "r in adapter_config.json"),
        ({"rank_pattern": {"(?=a)b": 4}}, "look-around"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "alpha_pattern"),
        ({"task_type": "SEQ_CLS"}, "classification head"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    adapter: Path, registry: AdapterRegistry, keys: dict[str, Any], named: str
) -> None:
    edit(adapter, **keys)
    with pytest.raises(AdapterError, match=named) as raised:
        registry.load("one", adapter)
    assert str(adapter.parent) not in str(raised.value)
    assert registry.description.adapters == []


L0 = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(f"{L0}.self_attn.q_proj.lora_B.weight"), "lora_B of model.layers.0.self_attn.q_proj"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}), "lm_head"),
        (lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": torch.ones(4)}), "embed_tokens"),
        (lambda tensors: tensors.update({f"{L0}.mlp.experts.3.up_proj.lora_A.weight": torch.ones(4)}), "experts"),
        (lambda tensors: tensors.update({f"{L0}.self_attn.q_proj.lora_magnitude_vector": torch.ones(4)}), "DoRA"),
        (lambda tensors: tensors.update({L0.replace("0", "7") + ".self_attn.q_proj.lora_A.weight": torch.ones(4)}), "2 layers"),
        (lambda tensors: tensors.update({"base_model.model.score.weight": torch.ones(3, 63)}), r"head has shape \[3, 63\]"),
        (lambda tensors: tensors[f"{L0}.self_attn.q_proj.lora_A.weight"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors.update({f"{L0}.self_attn.q_proj.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}), "I8"),
    ],
)
def test_unsupported_tensors_are_refused_by_name(adapter: Path, registry: AdapterRegistry, change: Any, named: str) -> None:
    edit_tensors(adapter, change)
    with pytest.raises(AdapterError, match=named):
        registry.load("one", adapter)


def test_projections_whose_rows_are_reordered_are_refused(tmp_path: Path) -> None:
    """Other adapters of the same family load."""
    base = make_checkpoint(tmp_path / "base", "ernie4_5")
    model = AutoModelForCausalLM.from_pretrained(base)
    info = wire.Info("base", "f", 320, 2048, [], ["score", "generate", "embed"], wire.Limits(1, 1, 1, 1, 1))
    registry = AdapterRegistry(AdapterReader(Layout(load_config(base)), info, torch.float32, 16), most=2)
    registry.load("mlp", write_adapter(tmp_path / "mlp", model, ["up_proj", "down_proj", "o_proj"]))
    with pytest.raises(AdapterError, match=r"q_proj.* must be merged into the model"):
        registry.load("all", write_adapter(tmp_path / "all", model, ["q_proj"]))


HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("keys", "tensors", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, {}, "lm_head, which .* lacks"),
        ({"modules_to_save": ["lm_head"]}, {EMBEDDING: torch.ones(320, 64)}, "lm_head, which .* lacks"),
        (
            {"modules_to_save": ["lm_head"]},
            {HEAD: torch.ones(321, 64)},
            r"lm_head .*321, 64\].* cannot change the vocabulary",
        ),
        ({}, {EMBEDDING: torch.ones(330, 64)}, r"embed_tokens has shape \[330, 64\].* cannot change the vocabulary"),
        ({}, {HEAD: torch.full((320, 64), float("inf"))}, "not finite"),
        ({}, {HEAD: torch.ones(320, 64), HEAD.replace(".weight", ".modules_to_save.weight"): torch.ones(320, 64)}, "twice"),
    ],
)
def test_whole_modules_are_checked(
    adapter: Path, base: tuple[Path, PreTrainedModel], keys: dict[str, Any], tensors: dict[str, torch.Tensor], named: str
) -> None:
    edit(adapter, **keys)
    edit_tensors(adapter, lambda stored: stored.update(tensors))
    info = wire.Info("base", "f", 320, 2048, [], ["score"], wire.Limits(1, 1, 1, 1, 1))
    reader = AdapterReader(Layout(load_config(base[0])), info, torch.float32, 16, modules=("lm_head", "embed_tokens"))
    with pytest.raises(AdapterError, match=named):
        reader.read("one", adapter)


def test_an_embedding_of_a_tied_model_needs_its_head(adapter: Path, tmp_path: Path) -> None:
    """Where the adapter says that they stay tied."""
    tied = Layout(load_config(make_checkpoint(tmp_path / "tied", "qwen3", num_hidden_layers=2, tie_word_embeddings=True)))
    info = wire.Info("base", "f", 320, 2048, [], ["score"], wire.Limits(1, 1, 1, 1, 1))
    reader = AdapterReader(tied, info, torch.float32, 16, modules=("lm_head", "embed_tokens"))
    edit(adapter, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    edit_tensors(adapter, lambda stored: stored.update({EMBEDDING: torch.ones(320, 64)}))
    with pytest.raises(AdapterError, match=r"lm_head, which .* lacks"):
        reader.read("one", adapter)
    edit(adapter, ensure_weight_tying=False)
    read = reader.read("one", adapter)
    assert list(read.modules) == ["embed_tokens"]
    assert read.description.bytes == read.weights.nbytes + 320 * 64 * 4


def test_damaged_files_are_refused(adapter: Path, registry: AdapterRegistry) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    (size,) = struct.unpack_from("<Q", whole)
    lying = json.dumps({f"{L0}.self_attn.q_proj.lora_A.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}})
    negative = lying.replace("[0,", "[-4,")
    for data in (
        *(whole[:end] for end in (0, 7, 8, size, size + 8, len(whole) - 1)),
        struct.pack("<Q", 1 << 62) + whole[8:],
        struct.pack("<Q", size) + b"[" * size,
        *(struct.pack("<Q", len(text)) + text.encode() for text in (lying, negative, "{}", "3", '{"a": 1}')),
    ):
        (adapter / WEIGHTS).write_bytes(data)
        with pytest.raises(AdapterError):
            registry.load("one", adapter)
    (adapter / WEIGHTS).write_bytes(whole)
    (adapter / CONFIG).write_bytes(b"[" * 100_000)
    with pytest.raises(AdapterError, match="not JSON"):
        registry.load("one", adapter)


def test_files_are_bounded_and_regular(adapter: Path, registry: AdapterRegistry) -> None:
    os.truncate(adapter / WEIGHTS, 1 << 40)  # sparse
    with pytest.raises(AdapterError, match="at most"):
        registry.load("one", adapter)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match="cannot be opened"):
        registry.load("one", adapter)
    os.mkfifo(adapter / WEIGHTS)
    with pytest.raises(AdapterError, match="no regular file"):
        registry.load("one", adapter)


def test_names_and_limits(adapter: Path, registry: AdapterRegistry, base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    for name in ("", "a:b", "a/b", "..", "x" * 129, "base"):
        with pytest.raises(AdapterError, match="name"):
            registry.load(name, adapter)
    first = registry.load("one", adapter)
    assert registry.load("one", adapter) is first
    assert registry.load("twin", adapter).digest == first.digest
    with pytest.raises(AdapterError, match="--max-loras"):
        registry.load("three", adapter)
    other = write_adapter(tmp_path / "other", base[1], seed=1)
    with pytest.raises(AdapterError, match="load_inplace"):
        registry.load("one", other)
    second = registry.load("one", other, replace=True)
    assert registry.get(first.digest) is not None, "its twin is still loaded"
    registry.unload("twin")
    assert registry.get(first.digest) is None
    assert registry.get(second.digest) is second
    with pytest.raises(AdapterError, match="no adapter"):
        registry.unload("twin")


def test_a_head_makes_a_classifier(registry: AdapterRegistry, base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "c", base[1], classes=3, task_type="SEQ_CLS", modules_to_save=["classifier", "score"])
    adapter = registry.load("c", directory)
    assert (adapter.description.capabilities, adapter.description.classes) == (
        ["classify", "embed"],
        ["LABEL_0", "LABEL_1", "LABEL_2"],
    )
    names = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "problem_type": "multi_label_classification"}
    (directory / "config.json").write_text(json.dumps(names))
    renamed = registry.load("c", directory, replace=True)
    assert (renamed.info.classes, renamed.info.multi_label) == (["no", "maybe", "yes"], True)
    assert renamed.digest != adapter.digest


def test_a_watched_adapter_follows_the_names_of_its_classes(
    base: tuple[Path, PreTrainedModel], registry: AdapterRegistry, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path / "watched" / "one", base[1], classes=2)
    manager = LoraManager(registry, lambda _: None, watched=directory.parent)
    manager.look(settled=True)

    def classes() -> list[str]:
        return registry.named("one").info.classes

    assert classes() == ["LABEL_0", "LABEL_1"]
    names = directory / "config.json"
    for expected in (["no", "yes"], ["bad", "good"]):
        names.write_text(json.dumps({"id2label": dict(enumerate(expected))}))
        manager.look()
        manager.look()
        assert classes() == expected
    names.unlink()
    manager.look()
    manager.look()
    assert classes() == ["LABEL_0", "LABEL_1"]


def test_commands_stay_below_the_root(adapter: Path, registry: AdapterRegistry, tmp_path: Path) -> None:
    told: list[wire.Adapters] = []
    manager = LoraManager(registry, told.append, root=adapter.parent)
    (adapter.parent / "link").symlink_to(tmp_path)
    for path in ("..", ".", "", "/etc", "one/../..", "link", "absent", "a\0b", str(tmp_path)):
        failed = manager.execute(wire.LoadAdapter("x", path))
        assert isinstance(failed, wire.Failed), path
        assert str(tmp_path) not in failed.message
    assert isinstance(manager.execute(wire.LoadAdapter("x", "one")), wire.Adapter)
    assert isinstance(manager.execute(wire.LoadAdapter("y", str(adapter))), wire.Adapter)
    assert manager.execute(wire.UnloadAdapter("y")) is None
    assert manager.execute(wire.UnloadAdapter("y")).code == "unknown_adapter"
    without = LoraManager(registry, told.append).execute(wire.LoadAdapter("z", "one"))
    assert "--lora-root" in without.message


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, "config.json"])
def test_files_that_are_links_stay_below_the_root(adapter: Path, registry: AdapterRegistry, tmp_path: Path, file: str) -> None:
    """As the hub's cache, which links the files of a snapshot, an adapter may have links to files below the root."""
    manager = LoraManager(registry, lambda _: None, root=adapter.parent)
    link = adapter / file
    content = link.read_bytes() if link.exists() else b"{}"
    for target, loads in ((tmp_path / "outside", False), (adapter.parent / "blob", True)):
        target.write_bytes(content)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        told = manager.execute(wire.LoadAdapter("x", "one"))
        assert isinstance(told, wire.Adapter) == loads
        assert loads or (file in told.message and "not below" in told.message and str(tmp_path) not in told.message)


def test_the_directory_is_watched(adapter: Path, registry: AdapterRegistry, base: tuple[Path, PreTrainedModel]) -> None:
    def names() -> list[str]:
        return [each.name for each in registry.description.adapters]

    manager = LoraManager(registry, lambda _: None, watched=adapter.parent)
    manager.look(settled=True)
    assert names() == ["one"]
    two = write_adapter(adapter.parent / "two", base[1], seed=2)
    whole = (two / WEIGHTS).read_bytes()
    (two / WEIGHTS).write_bytes(whole[:1000])  # half copied
    for _ in range(3):
        manager.look()
    assert names() == ["one"]
    (two / WEIGHTS).write_bytes(whole)
    manager.look()
    assert names() == ["one"], "files that have just changed are left alone"
    manager.look()
    assert names() == ["one", "two"]
    before = registry.named("two").digest
    write_adapter(two, base[1], seed=3)
    manager.look()
    manager.look()
    assert registry.named("two").digest != before
    for path in adapter.iterdir():
        path.unlink()
    manager.look()
    assert names() == ["two"]
    manager.execute(wire.UnloadAdapter("two"))
    manager.look()
    assert names() == [], "what a person unloaded stays unloaded until its files change"


@pytest.mark.parametrize("path", ["nowhere", "{adapter}/adapter_config.json"])
def test_an_adapter_that_is_absent_at_the_start_is_named(base: tuple[Path, PreTrainedModel], adapter: Path, path: str) -> None:
    lora = [f"one={adapter}", f"gone={path.format(adapter=adapter)}"]
    settings = EngineSettings(model=str(base[0]), name="base", lora=lora, max_total_tokens=64)
    with pytest.raises(ModelError, match=r"The LoRA adapter gone cannot be loaded\..* is not a directory"):
        build_loop(settings)


PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
MODULES = [f"model.layers.{layer}.{projection}" for layer in (0, 1, 9, 10, 21, 100) for projection in PROJECTIONS]
HOSTILE = {
    "alternatives": "(|.|..)" * 60 + "Z",
    "words": "(|m|mo|o|od|d|de|.|.l)" * 20 + "Z",
    "stars": ".*" * 200 + "Z",
    "sets": r"[\w.]*" * 80 + "Z",
    "optional": ".?" * 200 + "." * 60 + "Z",
    "repeated": r"(([\w.]+)+)+Z",
    "repeated alternatives": "(|.|..)*" * 50 + "Z",
    "counted": r"(([\w.]{1,6}){1,6}){1,6}Z",
}

atoms = st.sampled_from(
    ["a", "q", ".", r"\.", "1", "0", "_", "^", "$", r"\d", r"\w", r"\W", r"\b", "[01]", "[^.]", "[a-q_]", r"[\d.-]", "-"]
)
signs = st.sampled_from(["", "", "", "?", "*", "+", "*?", "+?", "??", "{2}", "{1,2}", "{2,}"])
patterns = st.recursive(
    st.builds(lambda atom, sign: atom if atom in ("^", "$", r"\b") else atom + sign, atoms, signs),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds(lambda part, sign: f"(?:{part}){sign}", inner, signs),
    ),
    max_leaves=12,
)


def matched(pattern: str, module: str) -> bool:
    return Patterns({pattern: 1}).number_of(module, 0) == 1


def parsed(**keys: Any) -> config.AdapterConfig:
    return config.parse(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | keys).encode())


@given(patterns, st.text("aq.10_-", max_size=12))
def test_a_pattern_matches_what_re_matches(pattern: str, module: str) -> None:
    assert matched(pattern, module) == bool(re.match(rf"(.*\.)?({pattern})$", module))


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r"layers\.10\.self_attn\.k_proj",
        "^model.layers.0.self_attn.q_proj",
        r".*layers\.(1[0-9]|2[01])\..*",
        r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
        r"layers\.(?:0|1|9)\.self_attn\.[qk]_proj$",
        "proj",
        "layers.[^0].+",
        r"(\w+\.)+\d{2}\.self_attn\.(?P<kind>q|k)_proj",
        r".*\b1\.mlp.*",
    ],
)
def test_patterns_as_people_write_them(pattern: str) -> None:
    peft = [get_pattern_key([pattern], module) == pattern for module in MODULES]
    assert [matched(pattern, module) for module in MODULES] == peft
    assert any(peft) or pattern == "proj"


@pytest.mark.timeout(30)
def test_a_pattern_for_each_module_of_a_large_model_is_quick() -> None:
    """PEFT's EVA writes the whole name of each module."""
    names = [f"model.layers.{layer}.{projection}" for layer in range(126) for projection in (*PROJECTIONS, "mlp.up_proj")]
    ranks = {name: 1 + number % 60 for number, name in enumerate(names)}
    read = parsed(**LoraConfig(r=8, rank_pattern=ranks, task_type="CAUSAL_LM").to_dict() | {"target_modules": None})
    assert [read.rank_of(name) for name in names] == [*ranks.values()]


@pytest.mark.timeout(15)
@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_no_pattern_takes_long(pattern: str, key: str) -> None:
    read = parsed(**{key: {pattern: 4}})
    assert [(read.rank_of(module), read.scale_of(module)) for module in MODULES] == [(8, 2.0)] * len(MODULES)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)", r"RE2 cannot read \(invalid perl operator: \(\?=\); it has no look-around"),
        (r"(a)\1", r"contains \\1, and"),
        ("(a)" * 10 + r"\10", r"\\1, and"),
        ("a{,2}", "{,, and"),
        ("[[:alpha:]]", r"\[:, and"),
        ("(?i)" + r"[\pL\PL]" * 60, r"\\p, and"),
        ("a**", r"RE2 cannot read \(bad repetition operator"),
        ("(a", "missing"),
        ("a)", "unexpected"),
        ("(a{100}){100}", "repetition size"),
        (".{1000}" * 70, "too large"),
        ("é", "ASCII"),
        ("\ud800", "ASCII"),
        ("", "0 characters"),
        ("a" * (MAX_CHARACTERS_OF_ONE + 1), "513 characters"),
    ],
)
def test_other_patterns_are_refused(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        Patterns({pattern: 1})
    with pytest.raises(AdapterError, match=f"^rank_pattern in adapter_config.json has .*{words}"):
        parsed(rank_pattern={pattern: 4})


def test_the_first_pattern_that_matches_counts() -> None:
    read = parsed(rank_pattern={"k_proj": 1, "q_proj": 2, ".*": 3, r"layers\.0\..*": 4})
    assert [read.rank_of(f"model.layers.0.self_attn.{name}_proj") for name in "kqv"] == [1, 2, 3]


def test_all_patterns_together_are_bounded() -> None:
    with pytest.raises(AdapterError, match="65,536 characters together"):
        parsed(rank_pattern={f"{'a' * 500}{number}": 4 for number in range(132)})
