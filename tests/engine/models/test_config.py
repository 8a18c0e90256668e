"""Accepted contents of ``config.json``, and the errors for others."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config, PreTrainedConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.checkpoints import FAMILIES, TRAINED
from yardstick_llm.engine.models.config import ModelConfig, config_json, load_config, parse_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.rope import LinearRope, LongRope, Rope, YarnRope

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


PHI = {"architectures": ["Phi3ForCausalLM"]}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}


def parse(**changes: Any) -> ModelConfig:
    return parse_config({**BASE, **changes})


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_old_and_new_rope_layouts_mean_the_same(name: str) -> None:
    scaling = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    old = parse(rope_theta=500.0, rope_scaling=scaling)
    assert old == parse(rope_parameters={**scaling, "rope_theta": 500.0})
    assert isinstance(old.rope, YarnRope)
    assert old.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_gives_the_scaled_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse(rope_scaling=scaling).max_context == 2048
    assert parse(rope_scaling=scaling, max_position_embeddings=4096).max_context == 4096
    assert parse(rope_scaling=LLAMA3).max_context == 512


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "default"},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16.0},
    ],
)
def test_frequencies_equal_transformers(rope_parameters: dict[str, Any]) -> None:
    rope_parameters = {"rope_theta": 1e6, **rope_parameters}
    reference = Qwen3Config(head_dim=128, max_position_embeddings=131072, rope_parameters=dict(rope_parameters))
    own = parse(head_dim=128, max_position_embeddings=131072, rope_parameters=rope_parameters).rope
    if rope_parameters["rope_type"] == "default":
        expected, amplitude = 1e6 ** -(torch.arange(0, 128, 2) / 128), 1.0
    else:
        expected, amplitude = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](reference)
    torch.testing.assert_close(own.inverse_frequencies(128), expected, rtol=1e-6, atol=0)
    assert own.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize(
    ("max_context", "expected"), [(None, (250, False)), (250, (250, False)), (251, (251, True)), (512, (512, True))]
)
def test_the_context_chooses_the_factors_of_longrope(name: str, max_context: int | None, expected: tuple[int, bool]) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.5, 1.9, 2.0], "long_factor": [1.0, 1.5, 3.0, 6.0, 10.0, 20.0]}
    written = {"original_max_position_embeddings": 250, "partial_rotary_factor": 0.75, "rope_scaling": {"type": name, **factors}}
    config = parse_config({**BASE, **PHI, **written}, max_context=max_context)
    rope = config.rope
    assert isinstance(rope, LongRope)
    assert (config.max_context, rope.is_long) == expected
    assert config.rotary_dim == 12
    shape = {key: BASE[key] for key in BASE if key != "architectures"}
    renamed = copy.deepcopy(written) | {"rope_scaling": {"type": "longrope", **factors}}  # transformers fails with the old names
    reference = Phi3Config(**shape, pad_token_id=0, **renamed)
    inverse, amplitude = ROPE_INIT_FUNCTIONS["longrope"](reference, seq_len=251 if rope.is_long else None)
    torch.testing.assert_close(rope.inverse_frequencies(12), inverse, rtol=1e-6, atol=0)
    assert rope.amplitude == pytest.approx(amplitude)


def test_a_context_beyond_the_models_is_refused() -> None:
    assert parse_config(BASE, max_context=100).max_context == 100
    with pytest.raises(ModelError, match="--max-context is 513, and the model has a context of 512; lower it"):
        parse_config(BASE, max_context=513)


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    assert parse_config({**BASE, "eos_token_id": 5}, {"eos_token_id": [7, 5, 5000]}).eos_token_ids == (7, 5)
    assert parse_config({**BASE, "eos_token_id": [5, 6]}).eos_token_ids == (5, 6)


def test_the_default_eos_id_counts_where_no_file_names_any() -> None:
    llama = {**BASE, "architectures": ["LlamaForCausalLM"]}
    assert parse_config(llama).eos_token_ids == (2,)
    assert parse_config(llama, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert parse_config(llama | {"eos_token_id": 8}).eos_token_ids == (8,)
    assert parse_config(llama | {"eos_token_id": None}).eos_token_ids == ()
    assert parse_config({**BASE, "architectures": ["SmolLM3ForCausalLM"]}).eos_token_ids == ()  # 128001 is beyond the vocabulary


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None, "use_sliding_window": True},
        {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": None},
    ],
)
def test_accepted(changes: dict[str, Any]) -> None:
    assert parse(**changes).hidden_size == 64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": []}, "architectures in config.json is"),
        ({"hidden_size": None}, "hidden_size is missing from config.json"),
        ({"hidden_size": "64"}, "hidden_size in config.json is '64', but must be a whole number"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) in config.json is not a multiple"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"use_sliding_window": True, "sliding_window": "no"}, "sliding_window in config.json is 'no'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window in config.json is missing, and layer_types asks",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types in config.json has 1 entries, and num_hidden_layers is 2"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers in config.json has 1 entries"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, "x"]}, "no_rope_layers"),
        ({**CLASSIFIER, "id2label": {"1": "a"}}, "id2label in config.json is .* must be an object of names by number"),
        ({**CLASSIFIER, "id2label": ["a"]}, "id2label"),
        ({**CLASSIFIER, "id2label": {"0": []}}, "id2label"),
        ({**CLASSIFIER, "id2label": {"0": "a"}, "num_labels": 2}, "num_labels in config.json is 2, but id2label has 1 names"),
        ({"rope_scaling": "yarn"}, "rope_scaling in config.json is 'yarn', but must be an object"),
        (
            {**PHI, "rope_scaling": {**LONG, "long_factor": [1.0] * 7}},
            "long_factor in rope_scaling of config.json has 7 factors, and",
        ),
        ({**PHI, "rope_scaling": {**LONG, "short_factor": [1.0] * 7 + [0]}}, "short_factor .* must be a list of numbers greater"),
        ({**PHI, "rope_scaling": {"type": "longrope"}}, "short_factor is missing from rope_scaling of config.json"),
        ({**PHI, "partial_rotary_factor": 0.6}, "partial_rotary_factor in config.json rotates 9 of the 16 elements of a head"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing from rope_scaling of config.json"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse(**changes)


def written_by_transformers(family: str, **given: Any) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """A configuration of twelve layers, and its ``config.json`` without the keys whose defaults transformers knows."""
    config_class, model_class = FAMILIES[family]
    shape = {key: BASE[key] for key in BASE if key not in ("architectures", "num_hidden_layers")}
    config = config_class(**shape, num_hidden_layers=12, architectures=[model_class.__name__], **given)
    return config, json.loads(config.to_json_string(use_diff=True)) | {"architectures": [model_class.__name__]}


@pytest.mark.parametrize("given", [{}, {"sliding_window": 77}, {"sliding_window": None}], ids=str)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*TRAINED, "granite4")])
def test_windows_are_those_of_transformers(family: str, given: dict[str, Any]) -> None:
    if given.get("sliding_window", 0) is None and family in ("gemma2", "gemma3", "olmo3", "exaone4"):
        pytest.skip("transformers has no full attention in place of its windows")
    config, written = written_by_transformers(family, **given)
    found = parse_config(written).windows
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 12
    always = ("gemma2", "gemma3", "mistral", "ministral", "phi3", "phi4_mini", "olmo3", "exaone4", "mixtral")
    local = family in always and bool(window)
    expected = tuple(window if kind == "sliding_attention" else None for kind in kinds) if local else ()
    assert found == expected


def test_a_window_that_no_context_exceeds_limits_no_attention() -> None:
    """As that of Phi-4-mini, of 262,144 tokens. Layers that had one keep the rotation of windows."""
    written = written_by_transformers("mistral")[1] | {"max_position_embeddings": 64}
    configs = [parse_config(written | {"sliding_window": window}) for window in (63, 64, 65)]
    assert [config.attention_specs[0].window for config in configs] == [63, None, None]
    gemma = written_by_transformers("gemma3", sliding_window=77)[1]
    short, whole = parse_config(gemma, max_context=50), parse_config(gemma, max_context=78)
    assert {spec.window for spec in short.attention_specs} == {None}
    assert {spec.window for spec in whole.attention_specs} == {None, 77}
    assert [short.rope_of(layer) for layer in range(12)] == [whole.rope_of(layer) for layer in range(12)]
    assert short.rope_of(0) == short.local_rope != short.rope


@pytest.mark.parametrize(
    ("written", "rope", "local"),
    [
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, LinearRope(1e6, 8.0), Rope(1e4)),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                }
            },
            LinearRope(1e6, 8.0),
            Rope(3e4),
        ),
    ],
)
def test_rotations_of_gemma_3(written: dict[str, Any], rope: Rope, local: Rope) -> None:
    """In the forms of published files and of transformers 5."""
    config = parse_config(
        {**BASE, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "sliding_window": 512, **written}
    )
    assert [config.rope_of(layer) for layer in range(6)] == [local] * 5 + [rope]


def test_rotations_of_olmo_3() -> None:
    """YaRN stretches the layers without a window alone: in the forms of releases 4 and 5."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    kinds = {"full_attention": yarn | {"rope_theta": 3e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 3e5}}
    for written in ({"rope_theta": 3e5, "rope_scaling": yarn}, {"rope_parameters": kinds}):
        config = parse(architectures=["Olmo3ForCausalLM"], num_hidden_layers=4, sliding_window=512, **written)
        assert [config.rope_of(layer) for layer in range(4)] == [Rope(3e5)] * 3 + [YarnRope(3e5, 8.0, 8192, 1.2)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_local_experts": 64}, "num_local_experts in config.json is not 0"),
        ({"layer_types": ["mamba", "attention"]}, "layer_types in config.json asks for mamba"),
        ({"layer_types": None}, "layer_types in config.json asks for mamba"),
        ({"position_embedding_type": None}, "position_embedding_type in config.json is not supported; only rope is"),
    ],
)
def test_granite_4_is_dense(changes: dict[str, Any], named: str) -> None:
    """Its class has experts and Mamba, too."""
    dense = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0, "layer_types": ["attention"] * 2}
    given = dense | {"num_hidden_layers": 2, "position_embedding_type": "rope", "shared_intermediate_size": 200}
    assert (parse(**given).intermediate_size, parse(**given).windows, parse(**given).experts) == (200, (), None)
    with pytest.raises(ModelError, match=named):
        parse(**given | changes)


def test_layers_without_a_rotation() -> None:
    smol = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 6}
    assert parse(**smol).unrotated == (3,)
    assert parse(**smol, no_rope_layer_interval=2).unrotated == (1, 3, 5)
    assert parse(**smol, no_rope_layers=[0, 1, 1, 1, 1, 0]).unrotated == (0, 5)
    exaone = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 8}
    assert parse(**exaone).unrotated == (3, 7)
    assert parse(**exaone, sliding_window=None).unrotated == ()
    assert parse(**exaone, layer_types=["full_attention"] * 8).unrotated == tuple(range(8))


@pytest.mark.parametrize(
    ("family", "given"),
    [("Mistral", {}), ("Gemma2", {}), ("Gemma", {}), ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1})],
)
def test_a_configuration_that_cannot_be_written_is_refused(family: str, given: dict[str, Any]) -> None:
    """Not for the activation of the families that are written, which other families do not have."""
    config = parse(**{"architectures": [f"{family}ForCausalLM"], "sliding_window": 77} | given)
    problem = f"configuration of this {family}ForCausalLM cannot be written, because only those of Llama, Qwen2 and Qwen3 without"
    with pytest.raises(ModelError, match=problem):
        config_json(config)


@pytest.mark.parametrize(
    ("changes", "classes"),
    [
        ({"id2label": None, "num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"1": "unsafe", "0": "safe"}}, ("safe", "unsafe")),
        ({"id2label": {str(number): f"c{number}" for number in range(12)}}, tuple(f"c{number}" for number in range(12))),
    ],
)
def test_classes_have_the_names_of_transformers(changes: dict[str, Any], classes: tuple[str, ...]) -> None:
    config = parse(**CLASSIFIER, **changes)
    assert (config.classes, config.multi_label, config.lm_head) == (classes, False, False)
    assert parse_config(config_json(config)) == config
    assert parse(**changes).classes == ()  # of a model with a language-model head


def test_problem_type_tells_whether_classes_exclude_each_other() -> None:
    assert parse(**CLASSIFIER, problem_type="multi_label_classification").multi_label
    for kind in ("single_label_classification", "regression", None):
        assert not parse(**CLASSIFIER, problem_type=kind).multi_label
    config = parse(**CLASSIFIER, problem_type="multi_label_classification")
    assert parse_config(config_json(config)) == config


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_unreadable_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)
