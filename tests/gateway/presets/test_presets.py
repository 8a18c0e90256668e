"""Presets: the files in the package, the choice for a model, and presets that do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tokenizers

from engine import wire
from gateway.presets.fitted import Fitted, log_sum, softmax
from gateway.presets.preset import Preset, PresetError, parse_preset
from gateway.presets.select import builtin, builtin_presets, choose
from gateway.settings import Settings, SettingsError
from gateway.text.preset_template import PresetTemplate
from gateway.text.tokenizer import Tokenizer
from tests.fakes import FakeEngine, library
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until


def test_the_files_of_the_package_are_valid() -> None:
    presets = builtin_presets()
    assert {"qwen3-reranker", "mxbai-rerank-v2", "zerank-2", "llama-guard-3", "skywork-reward", "qwen3-embedding", "judge"} <= set(
        presets
    )
    assert all(preset.name == name and preset.source for name, preset in presets.items())


@pytest.mark.parametrize(
    ("model", "architecture", "capabilities", "name"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", ("score", "generate"), "qwen3-reranker"),
        ("qwen3-reranker-8b", "Qwen3ForCausalLM", ("score",), "qwen3-reranker"),
        ("Qwen3-Reranker-0.6B", "LlamaForCausalLM", ("score",), "judge"),
        ("mixedbread-ai/mxbai-rerank-large-v2", "Qwen2ForCausalLM", ("score",), "mxbai-rerank-v2"),
        ("zeroentropy/zerank-2-reranker", "Qwen3ForCausalLM", ("score",), "zerank-2"),
        ("meta-llama/Llama-Guard-3-8B", "LlamaForCausalLM", ("score",), "llama-guard-3"),
        ("Skywork/Skywork-Reward-Llama-3.1-8B-v0.2", "LlamaForSequenceClassification", ("classify",), "skywork-reward"),
        ("BAAI/bge-reranker-v2-gemma", "GemmaForCausalLM", ("score", "generate"), "bge-reranker-v2-gemma"),
        ("google/shieldgemma-9b", "Gemma2ForCausalLM", ("score",), "shieldgemma"),
        ("Qwen/Qwen3-Embedding-4B", "Qwen3ForCausalLM", ("embed",), "qwen3-embedding"),
        ("anything", "Qwen3Model", ("embed",), "embedding"),
        ("anything", "Qwen2ForSequenceClassification", ("classify",), "classifier"),
        ("anything", "Qwen3ForCausalLM", ("score", "generate"), "judge"),
        ("yardstick-demo", "Qwen3ForCausalLM", ("score", "generate"), "yardstick-demo"),
        ("anything", "Qwen3ForCausalLM", ("generate",), None),
    ],
)
def test_the_name_and_the_architecture_choose(
    model: str, architecture: str, capabilities: tuple[str, ...], name: str | None
) -> None:
    assert choose(model, architecture, capabilities, beside=None, chosen={}) == (None if name is None else builtin()[name])


def test_the_setting_comes_before_the_file_and_the_file_before_the_name(tmp_path: Path) -> None:
    file, beside = tmp_path / "own.toml", builtin()["judge"]
    file.write_text(own := builtin()["judge"].replace('"judge"', '"own"'))
    given = ("Qwen3-Reranker-4B", "Qwen3ForCausalLM", ("score",))
    assert choose(*given, beside=beside, chosen={}) == beside
    assert choose(*given, beside=beside, chosen={"Qwen3-Reranker-4B": "zerank-2"}) == builtin()["zerank-2"]
    assert choose(*given, beside=beside, chosen={"Qwen3-Reranker-4B": str(file)}) == own
    assert choose(*given, beside=beside, chosen={"Qwen3-Reranker-4B": "none"}) is None


@pytest.mark.parametrize(
    ("capabilities", "classes", "name", "problem"),
    [
        (("classify",), 1, "judge", "the model has none"),
        (("score", "generate"), 0, "classifier", "reads a classification head, and the model has none"),
        (("score",), 0, "qwen3-embedding", "is for embeddings"),
        (("classify",), 3, "cross-encoder", "the model's head has 3 classes"),
    ],
)
def test_a_preset_that_does_not_fit_the_head_is_refused(
    capabilities: tuple[str, ...], classes: int, name: str, problem: str
) -> None:
    for chosen, beside in (({"a": name}, None), ({}, builtin()[name])):
        with pytest.raises(PresetError, match=problem):
            choose("a", "Qwen3ForCausalLM", capabilities, classes=classes, beside=beside, chosen=chosen)


def test_a_head_with_one_number_is_a_reranker() -> None:
    """A preset that the name chooses and the head does not fit is passed over."""
    given = ("Qwen3-Reranker-0.6B-seq-cls", "Qwen3ForSequenceClassification", ("classify",))
    assert choose(*given, classes=1, beside=None, chosen={}) == builtin()["cross-encoder"]
    assert choose(*given, classes=2, beside=None, chosen={}) == builtin()["classifier"]


BROKEN = {
    "not TOML": ("name =", "Invalid value"),
    "an unknown key": ('name = "a"\ntask = "rerank"\nlabel = ["a"]', "label"),
    "an unknown task": ('name = "a"\ntask = "translate"', "task"),
    "no document": ('name = "a"\ntask = "rerank"\ntemplate = ["{query}"]\nlabels = ["a"]', "{document} exactly once"),
    "no query": ('name = "a"\ntask = "rerank"\ntemplate = ["{document}"]\nlabels = ["a"]', "{query}"),
    "a field twice": ('name = "a"\ntask = "rerank"\ntemplate = ["{query}{query}{document}"]\nlabels = ["a"]', "more than once"),
    "one label": (
        'name = "a"\ntask = "rerank"\ntemplate = ["{query}{document}"]\nlabels = ["a"]\nactivation = "difference"',
        "two labels",
    ),
    "a sum of logits": (
        'name = "a"\ntask = "rerank"\ntemplate = ["{query}{document}"]\nlabels = [["a", "b"]]\nactivation = "none"',
        "cannot be added",
    ),
    "labels of an embedding": ('name = "a"\ntask = "embed"\ntemplate = ["{document}"]\nlabels = ["a"]', "no `labels`"),
    "too large": ("# " + "a" * 70_000, "bytes"),
    "too deep": ("a = " + "[" * 2000 + "]" * 2000, "nested too deeply"),
    "too many digits": ('name = "a"\nmax_tokens_per_doc = ' + "9" * 5000, "5000 digits"),
    "too large a number": ('name = "a"\ntask = "embed"\nmax_tokens_per_doc = 99999999999999999999', "max_tokens_per_doc"),
    "no scale": ('name = "a"\ntask = "rerank"\nscale = nan', "scale"),
    "an endless scale": ('name = "a"\ntask = "rerank"\nscale = inf', "scale"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_presets_say_what_is_wrong(case: str) -> None:
    document, problem = BROKEN[case]
    with pytest.raises(PresetError, match=problem.replace("{", r"\{")):
        parse_preset(document.encode())


def preset(**fields: object) -> Preset:
    return Preset(**{"name": "a", "task": "rerank", "template": ("{query}: {document}",), "labels": (" Yes",)} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"labels": (" Yes and No",)}, "not one token"),
        ({"template": ("<|start_of_turn|>{query}: {document}",)}, "<|start_of_turn|>"),
    ],
)
def test_presets_that_do_not_fit_the_tokeniser(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(PresetError) as caught:
        PresetTemplate(preset(**fields), Tokenizer(tokenizers.Tokenizer.from_str(library().to_str())))
    assert problem in str(caught.value)


@pytest.mark.slow
def test_a_model_whose_preset_does_not_fit_is_not_served(start: Start) -> None:
    document = 'name = "own"\ntask = "rerank"\ntemplate = ["{query}{document}"]\nlabels = ["No such token"]'
    client = start(FakeEngine(preset=document), wait=False)
    answer = client.get("/readyz")
    while "not started" in answer.text or "No engine is ready" in answer.text:
        answer = client.get("/readyz")
    assert "the label 'No such token' is not one token" in answer.text, answer.text
    assert metric(client, "yardstick_engines_ready") == 0


def test_a_broken_preset_of_one_model_ends_no_text_worker_of_others(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    document = (
        'name = "own"\ntask = "rerank"\ntemplate = ["{query}{document}"]\nlabels = [" Yes"]\nmax_tokens_per_doc = 1' + "0" * 30
    )
    client = start(FakeEngine(model="bad", fingerprint="bad", preset=document), FakeEngine(model="good"), wait=False)
    wait_until(lambda: metric(client, "yardstick_engines_ready") == 1)
    text = {"model": "good", "messages": [{"role": "user", "content": "one that workers read: \U0001f98a"}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=text).status_code == 200
    wait_until(lambda: "max_tokens_per_doc" in caplog.text)
    assert "fork server" not in caplog.text


@pytest.mark.parametrize(
    ("entry", "problem"), [("a", "MODEL=PRESET"), ("a=nothing", "there is no preset"), ("a=x.toml", "cannot be read")]
)
def test_the_setting_is_checked_at_the_start(entry: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Settings(engines=("http://127.0.0.1:1",), presets=(entry,))


def test_probabilities_of_extreme_logits() -> None:
    assert softmax([-math.inf, -math.inf]) == [0.5, 0.5]
    assert softmax([1000.0, -1000.0]) == [1.0, 0.0]
    assert log_sum([-math.inf, 2.0]) == pytest.approx(2.0)
    fitted = Fitted(preset(labels=("a", "b")), [[0], [1]])
    assert fitted.score([0.0, -math.inf]) == 1.0
    assert fitted.score([-math.inf, 0.0]) == 0.0
    assert fitted.score([-math.inf, -math.inf]) == 0.5
    assert Fitted(preset(labels=("a",)), [[0]]).score([math.log(0.25)]) == pytest.approx(0.25)


def test_models_show_their_preset(start: Start) -> None:
    document = (
        'name = "own"\ntask = "rerank"\ninstruction = "Find"\ntemplate = ["{query}{document}"]\nlabels = [[" Yes", " No"], " or"]'
    )
    client = start(FakeEngine(preset=document))
    (model,) = client.get("/v1/models").json()["data"]
    assert model["preset"] == {
        "name": "own",
        "task": "rerank",
        "instruction": "Find",
        "labels": [" Yes", " No", " or"],
        "activation": "softmax",
        "fallback": False,
    }
    client = start(FakeEngine(model="plain"), presets=("plain=none",))
    (model,) = client.get("/v1/models").json()["data"]
    assert model["preset"] is None


@pytest.mark.parametrize(
    ("folder", "config", "name"),
    [
        ("Qwen/Qwen3-0.6B", None, "Qwen3-0.6B"),
        ("models/my-ranker/", None, "my-ranker"),
        (f"hub/models--Qwen--Qwen3-Reranker-0.6B/snapshots/{'0a' * 20}", None, "Qwen3-Reranker-0.6B"),
        ("hub/models--Qwen--Qwen3-Reranker-0.6B/snapshots/main", None, "Qwen3-Reranker-0.6B"),
        (f"hub/models--gpt2/snapshots/{'0a' * 20}", None, "gpt2"),
        ("0a" * 20, {"_name_or_path": "Qwen/Qwen3-Reranker-4B"}, "Qwen3-Reranker-4B"),
        ("0a" * 20, {}, "0a" * 20),
        ("0a" * 20, None, "0a" * 20),
    ],
)
def test_a_model_is_named_after_its_repository(folder: str, config: dict[str, str] | None, name: str, tmp_path: Path) -> None:
    directory = tmp_path / folder
    if config is not None:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
    assert wire.served_name(str(directory)) == name


def test_a_model_is_named_after_a_link_and_after_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("0a" * 20)
    snapshot.mkdir(parents=True)
    (tmp_path / "my-model").symlink_to(snapshot)
    assert wire.served_name(str(tmp_path / "my-model")) == "my-model"
    monkeypatch.chdir(snapshot)
    assert wire.served_name(".") == "Qwen3-0.6B"


@pytest.mark.parametrize("model", ["my-qwen-reranker", "zerank-1-small", "Granite-Guardian-3", "a-reward-model"])
def test_a_fallback_says_so_and_does_not_prompt_a_reranker(start: Start, model: str, caplog: pytest.LogCaptureFixture) -> None:
    """Unless the operator chooses it."""
    client = start(FakeEngine(model=model))
    assert f"model {model}: no preset is for this name; 'judge' is used" in caplog.text
    (served,) = client.get("/v1/models").json()["data"]
    assert (served["preset"]["name"], served["preset"]["fallback"]) == ("judge", True)
    body = {"query": "red", "documents": ["a"]}
    pairs = {"text_1": "red", "text_2": ["a"]}
    for path, given in (("/v1/rerank", body), ("/rerank", {"query": "red", "texts": ["a"]}), ("/v1/score", pairs)):
        refused = client.post(path, json=given)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], f"`presets`; {model}=judge" in error["message"]) == (400, "model", True), error
    chosen = start(FakeEngine(model=model), presets=(f"{model}=judge",))
    answer = chosen.post("/v1/rerank", json=body)
    assert (answer.status_code, "x-yardstick-preset-fallback" in answer.headers) == (200, False)
    assert chosen.get("/v1/models").json()["data"][0]["preset"]["fallback"] is False


def test_a_fallback_prompts_a_model_of_another_kind(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    client = start(FakeEngine(model="Qwen3-8B"))
    (warning,) = [record for record in caplog.records if "no preset is for this name" in record.message]
    assert warning.levelname == "WARNING"
    assert client.get("/v1/models").json()["data"][0]["preset"]["fallback"] is True
    answers = [
        client.post("/v1/rerank", json={"query": "red", "documents": ["a"]}),
        client.post("/v1/score", json={"text_1": "red", "text_2": ["a"]}),
        client.post("/rerank", json={"query": "red", "texts": ["a"]}),
    ]
    assert [(answer.status_code, answer.headers["x-yardstick-preset-fallback"]) for answer in answers] == [(200, "judge")] * 3
    own_template = client.post("/v1/score", json={"query": "red", "items": ["a"], "labels": [" Yes"]})
    assert (own_template.status_code, "x-yardstick-preset-fallback" in own_template.headers) == (200, False)
