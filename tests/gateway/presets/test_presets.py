"""Presets: the files in the package, the choice for a model, presets that do not fit, and the page that describes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers

from tests.fakes import FakeEngine, adapter, library
from tests.gateway.conftest import Start, metric
from tests.processes import wait_until
from yardstick_llm.engine import wire
from yardstick_llm.engine.models import encoder_config, registry
from yardstick_llm.gateway.presets.preset import (
    Preset,
    PresetError,
    builtin,
    builtin_presets,
    choose,
    fallback_of,
    fits,
    parse_preset,
    unreadable,
)
from yardstick_llm.gateway.settings import Settings, SettingsError
from yardstick_llm.gateway.text.preset_template import PresetTemplate
from yardstick_llm.gateway.text.tokenizer import Tokenizer


def test_the_files_of_the_package_are_valid() -> None:
    assert all(preset.name == name and preset.source for name, preset in builtin_presets().items())


@pytest.mark.parametrize(
    ("model", "architecture", "capabilities", "name"),
    [
        ("qwen3-reranker-8b", "Qwen3ForCausalLM", ("score",), "qwen3-reranker"),
        ("acme/zerank-1-small-finance", "Qwen3ForCausalLM", ("score",), "zerank-1"),
        ("my-qwen3-embedding-ft", "Qwen3ForCausalLM", ("score",), "judge"),  # a family has a head
        ("zerank-2-distilled-into-qwen3-reranker", "Qwen3ForCausalLM", ("score",), "judge"),  # two families say nothing
        ("Qwen3-Reranker-0.6B", "LlamaForCausalLM", ("score",), "judge"),
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
    assert choose(*given, classes=1, beside=None, chosen={}) == builtin()["qwen3-reranker-seq-cls"]
    assert choose(*given, classes=2, beside=None, chosen={}) == builtin()["classifier"]
    assert choose("anything", *given[1:], classes=1, beside=None, chosen={}) == builtin()["cross-encoder"]


LM, HEAD, EMBEDS = ("score", "generate"), ("classify",), ("embed",)
PUBLISHED: list[tuple[str | None, str, tuple[str, ...], str]] = [
    ("qwen3-reranker", "Qwen3ForCausalLM", LM, "Qwen3-Reranker-0.6B Qwen3-Reranker-4B Qwen3-Reranker-8B"),
    ("qwen3-reranker-seq-cls", "Qwen3ForSequenceClassification", HEAD, "Qwen3-Reranker-0.6B-seq-cls Qwen3-Reranker-8B-seq-cls"),
    (
        "llama-nemotron-rerank",
        "LlamaBidirectionalForSequenceClassification",
        HEAD,
        "llama-nemotron-rerank-1b-v2 llama-3.2-nv-rerankqa-1b-v2 llama-nemotron-rerank-500m-v2",
    ),
    ("mxbai-rerank-v2", "Qwen2ForCausalLM", LM, "mxbai-rerank-base-v2 mxbai-rerank-large-v2"),
    ("bge-reranker-v2-gemma", "GemmaForCausalLM", LM, "bge-reranker-v2-gemma"),
    ("zerank-1", "Qwen3ForCausalLM", LM, "zerank-1 zerank-1-small zerank-1-reranker zerank-1-small-reranker"),
    ("zerank-2", "Qwen3ForCausalLM", LM, "zerank-2 zerank-2-reranker"),
    ("ctxl-rerank-v2", "Qwen3ForCausalLM", LM, "ctxl-rerank-v2-instruct-multilingual-1b"),
    ("llama-guard-3", "LlamaForCausalLM", LM, "Llama-Guard-3-1B Llama-Guard-3-8B"),
    ("shieldgemma", "Gemma2ForCausalLM", LM, "shieldgemma-2b shieldgemma-9b shieldgemma-27b"),
    ("qwen3guard-gen", "Qwen3ForCausalLM", LM, "Qwen3Guard-Gen-0.6B Qwen3Guard-Gen-4B Qwen3Guard-Gen-8B"),
    ("granite-guardian-3", "GraniteForCausalLM", LM, "granite-guardian-3.0-2b granite-guardian-3.1-8b granite-guardian-3.2-5b"),
    ("granite-guardian-3", "GraniteMoeForCausalLM", LM, "granite-guardian-3.2-3b-a800m"),
    ("skywork-reward", "LlamaForSequenceClassification", HEAD, "Skywork-Reward-Llama-3.1-8B Skywork-Reward-Llama-3.1-8B-v0.2"),
    ("skywork-reward", "LlamaForSequenceClassification", HEAD, "Skywork-Reward-V2-Llama-3.1-8B-40M Skywork-Reward-V2-Llama-3.2-1B"),
    ("skywork-reward", "Qwen3ForSequenceClassification", HEAD, "Skywork-Reward-V2-Qwen3-0.6B Skywork-Reward-V2-Qwen3-8B"),
    ("qwen3-embedding", "Qwen3ForCausalLM", EMBEDS, "Qwen3-Embedding-0.6B Qwen3-Embedding-4B Qwen3-Embedding-8B"),
    ("e5-mistral", "MistralModel", EMBEDS, "e5-mistral-7b-instruct"),
    ("f2llm-v2", "Qwen3Model", EMBEDS, "F2LLM-v2-80M F2LLM-v2-330M F2LLM-v2-0.6B F2LLM-v2-1.7B F2LLM-v2-14B"),
    ("e5", "XLMRobertaModel", EMBEDS, "multilingual-e5-small multilingual-e5-base multilingual-e5-large"),
    ("bge-en", "BertModel", EMBEDS, "bge-small-en-v1.5 bge-base-en-v1.5 bge-large-en"),
    ("nomic-embed", "NomicBertModel", EMBEDS, "nomic-embed-text-v1 nomic-embed-text-v1.5"),
    ("nomic-embed", "ModernBertModel", EMBEDS, "modernbert-embed-base modernbert-embed-large"),
    ("e5-instruct", "XLMRobertaModel", EMBEDS, "multilingual-e5-large-instruct"),
    ("qwen3-vl-reranker", "Qwen3VLForConditionalGeneration", LM, "Qwen3-VL-Reranker-2B Qwen3-VL-Reranker-8B"),
    ("qwen3-vl-embedding", "Qwen3VLForConditionalGeneration", EMBEDS, "Qwen3-VL-Embedding-2B Qwen3-VL-Embedding-8B"),
    (None, "XLMRobertaModel", EMBEDS, "bge-m3"),
    # Presets for these would need prompts of their own.
    (None, "Qwen3Model", EMBEDS, "F2LLM-v2-0.6B-Preview F2LLM-0.6B zembed-1"),
    (None, "MistralModel", EMBEDS, "Linq-Embed-Mistral SFR-Embedding-Mistral"),
    (None, "LlamaForCausalLM", LM, "Meta-Llama-Guard-2-8B llama-3.1-nemoguard-8b-content-safety"),
    (None, "GraniteForCausalLM", LM, "granite-guardian-3.3-8b granite-guardian-3.2-8b-lora-harm-correction"),
    (None, "Qwen2ForSequenceClassification", HEAD, "mxbai-rerank-large-v2-seq"),
    (None, "Qwen3ForSequenceClassification", HEAD, "zerank-2-seq-cls Qwen3-Embedding-0.6B"),
]
"""The preset of each family of published models, or None, with their architecture and what an engine can do with them."""
FAMILIES = [(name, each, *rest) for name, *rest, models in PUBLISHED for each in models.split()]


@pytest.mark.parametrize(("name", "model", "architecture", "capabilities"), FAMILIES, ids=[family[1] for family in FAMILIES])
def test_published_models_and_their_fine_tunes_have_one_preset(
    name: str | None, model: str, architecture: str, capabilities: tuple[str, ...]
) -> None:
    classes = 1 if capabilities == HEAD else 0
    name = name or fallback_of(capabilities, classes)
    assert name is not None
    for called in (f"org/{model}", f"my-{model}"):
        assert choose(called, architecture, capabilities, classes=classes, beside=None, chosen={}) == builtin()[name], called
    fitting = [
        preset.name
        for preset in builtin_presets().values()
        if fits(preset, model, architecture) and not unreadable(preset, capabilities, classes)
    ]
    assert fitting in ([name], []), "each has at most one"


@pytest.mark.parametrize(
    ("score", "activation", "labels", "expected"),
    [
        (b'{"true_token_id": 9, "false_token_id": 7}', b"{}", (9, 7), "softmax"),
        (b'{"true_token_id": 9, "false_token_id": 7}', b'{"activation_fn": "torch.nn.Identity"}', (9, 7), "difference"),
        (b'{"true_token_id": 9, "false_token_id": null}', b'{"activation_fn": "torch.nn.Sigmoid"}', (9,), "sigmoid"),
        (b'{"true_token_id": 9}', b'{"activation_fn": "torch.nn.modules.linear.Identity"}', (9,), "none"),
    ],
)
def test_a_causal_reranker_of_sentence_transformers(
    score: bytes, activation: bytes, labels: tuple[int, ...], expected: str
) -> None:
    """As release 5.4 and later save it; those whose names choose a preset have the same files."""
    arguments = b'{"processing_kwargs": {"chat_template": {"add_generation_prompt": true, "restore_suffix": true, "think": false}}}'
    files = {
        "modules.json": b"[]",
        "1_LogitScore/config.json": score,
        "config_sentence_transformers.json": activation,
        "sentence_bert_config.json": arguments,
    }
    given: dict[str, Any] = {"capabilities": LM, "beside": None, "model_files": files}
    preset = parse_preset((choose("msmarco-relevance", "Qwen3ForCausalLM", chosen={}, **given) or "").encode())
    assert (preset.labels, preset.activation, preset.takes_instruction) == (labels, expected, True)
    assert (preset.add_generation_prompt, preset.chat_template_kwargs) == (True, {"think": False})
    assert choose("msmarco-relevance", "Qwen3ForCausalLM", chosen={"msmarco-relevance": "none"}, **given) is None
    assert choose("Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", chosen={}, **given) == builtin()["qwen3-reranker"]


def test_only_encoders_of_their_own_join_pairs() -> None:
    """A decoder that is read in both directions has a prompt of its own, which a fallback does not know. EuroBERT is none."""
    given: dict[str, Any] = {"capabilities": HEAD, "classes": 1, "beside": None, "chosen": {}, "encoder": True}
    for architecture in (*registry.FAMILIES, *encoder_config.FAMILIES):
        preset = parse_preset((choose("a-reranker", architecture, **given) or "").encode())
        is_decoder = architecture in registry.FAMILIES and not architecture.startswith("EuroBert")
        assert preset.name == ("cross-encoder" if is_decoder else "sentence-transformers"), architecture
    prompt = {"config_sentence_transformers.json": b'{"prompts": {"a": "{document}"}, "default_prompt_name": "a"}'}
    with pytest.raises(PresetError, match="document"):
        choose("a-reranker", "BertForSequenceClassification", **given, model_files=prompt)


def test_every_family_of_the_package_is_published() -> None:
    of_a_family = {preset.name for preset in builtin_presets().values() if preset.models}
    assert of_a_family - {"yardstick-demo"} == {name for name, *_ in PUBLISHED if name is not None}


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
        ({"labels": (1 << 30,)}, "not one token"),
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


@pytest.mark.slow
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


def test_a_fallback_says_so_and_does_not_prompt_a_reranker(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Unless the operator chooses it."""
    models = ["my-qwen-reranker", "zerank-3", "Granite-Guardian-3.3", "a-reward-model"]
    engines = [FakeEngine(model, model) for model in models]
    client = start(*engines)
    body = {"query": "red", "documents": ["a"]}
    pairs = {"text_1": "red", "text_2": ["a"]}
    for model in models:
        assert f"model {model}: no preset is for this name; 'judge' is used" in caplog.text
        served = client.get(f"/v1/models/{model}").json()
        assert (served["preset"]["name"], served["preset"]["fallback"]) == ("judge", True)
        for path, given in (("/v1/rerank", body), ("/rerank", {"query": "red", "texts": ["a"]}), ("/v1/score", pairs)):
            answer = client.post(path, json=given | {"model": model})
            error = answer.json()["error"]
            named = f"`presets`; {model}=judge" in error["message"]
            assert (answer.status_code, error["param"], named) == (400, "model", True), error
    chosen = start(*engines, presets=tuple(f"{model}=judge" for model in models))
    for model in models:
        answer = chosen.post("/v1/rerank", json=body | {"model": model})
        assert (answer.status_code, "x-yardstick-preset-fallback" in answer.headers) == (200, False)
        assert chosen.get(f"/v1/models/{model}").json()["preset"]["fallback"] is False


def refused(client: httpx.Client, method: str, path: str, **body: Any) -> bool:
    """Whether a request is refused because its model has a fallback preset."""
    answer = client.request(method, path, json=body)
    if answer.status_code == 200:
        return False
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], "`presets`" in error["message"]) == (400, "model", True), answer.text
    return True


@pytest.mark.slow
@pytest.mark.parametrize("classes", [("safe", "unsafe", "other"), ("reward",)])
def test_a_fallback_does_not_prompt_a_guard_with_a_head(start: Start, classes: tuple[str, ...]) -> None:
    fallback = "classifier" if len(classes) > 1 else "cross-encoder"
    engine = {"model": "my-guard", "capabilities": ("classify",), "classes": classes}
    client = start(FakeEngine(**engine))  # type: ignore[arg-type]
    assert refused(client, "POST", "/v1/classify", input=["red"])
    other = client.post("/v1/embeddings", json={"input": "red"}).json()["error"]["message"]
    assert other.endswith("it serves no request until the operator chooses a preset.")
    chosen = start(FakeEngine(**engine), presets=(f"my-guard={fallback}",))  # type: ignore[arg-type]
    assert not refused(chosen, "POST", "/v1/classify", input=["red"])


def test_a_fallback_does_not_prompt_the_items_of_a_reranker(start: Start) -> None:
    client = start(FakeEngine(model="my-reranker"))
    assert refused(client, "PUT", "/v1/catalogues/shop", preset=True)
    assert not refused(client, "PUT", "/v1/catalogues/shop", template="{item}:{query}", labels=[" Yes"])
    chosen = start(FakeEngine(model="my-reranker"), presets=("my-reranker=judge-item-first",))
    assert not refused(chosen, "PUT", "/v1/catalogues/shop", preset=True)


RERANK = {"query": "red", "documents": ["a"]}
ADAPTERS = {name: adapter(digest, name) for digest, name in (("aa11", "french"), ("bb22", "my-reranker-lora"))}
HEADS = {"my-guard-head": adapter("cc33", "my-guard-head", ("classify",), classes=["safe", "unsafe", "other"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "presets", "refuses"),
    [
        ("Qwen3-8B", (), {"my-reranker-lora"}),
        ("my-reranker", (), {"french", "my-reranker-lora"}),
        ("Qwen3-8B", ("Qwen3-8B=judge",), set()),
        ("Qwen3-8B", ("my-reranker-lora=judge",), set()),
        ("Qwen3-8B", ("Qwen3-8B:my-reranker-lora=judge",), set()),
        ("my-reranker", ("my-reranker-lora=judge",), {"french"}),
    ],
)
def test_an_adapter_is_judged_by_its_own_name_too(start: Start, base: str, presets: tuple[str, ...], refuses: set[str]) -> None:
    client = start(FakeEngine(base, adapters=ADAPTERS), presets=presets)
    wait_until(lambda: len(client.get("/v1/models").json()["data"]) == 3)
    for name in ADAPTERS:
        for called in (name, f"{base}:{name}"):
            assert refused(client, "POST", "/v1/rerank", model=called, **RERANK) is (name in refuses), called
        if name in refuses:
            assert refused(client, "PUT", f"/v1/catalogues/{name}", model=name, preset=True)


@pytest.mark.slow
def test_an_adapter_with_a_head_is_judged_by_its_own_name(start: Start) -> None:
    """The preset of its base reads no head."""
    for presets, expected in (((), True), (("Qwen3-8B=judge",), True), (("my-guard-head=classifier",), False)):
        client = start(FakeEngine("Qwen3-8B", adapters=HEADS), presets=presets)
        wait_until(lambda client=client: len(client.get("/v1/models").json()["data"]) == 2)
        shown = {model["id"]: model["preset"]["fallback"] for model in client.get("/v1/models").json()["data"]}
        assert shown["my-guard-head"] is expected
        assert refused(client, "POST", "/v1/classify", model="my-guard-head", input=["red"]) is expected


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [
        ({"preset": builtin()["yardstick-demo"]}, "/v1/rerank", RERANK),
        ({"capabilities": ("embed",), "embedding_size": 8}, "/v1/embeddings", {"input": "red"}),
    ],
)
def test_an_instruction_that_the_prompt_has_no_place_for_is_refused(
    start: Start, engine: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    client = start(FakeEngine(**engine))
    assert client.post(path, json=body).status_code == 200
    answer = client.post(path, json=body | {"instruction": "Find red things."})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "instruction"), answer.text


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


PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")


def rows(heading: str) -> list[str]:
    """The first cells of the table under a heading."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n##")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.M)


def test_the_page_lists_every_preset() -> None:
    assert sorted(rows("Presets in the package")) == sorted(builtin())


def test_the_page_lists_every_key() -> None:
    assert rows("Keys") == [field.name for field in msgspec.structs.fields(Preset)]


def test_the_example_is_valid() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)
    preset = parse_preset(example.encode())
    assert preset.template[0] == "<|im_start|>user\nQuery: {query}\n"
    assert preset.template[2] == "<|im_end|>\n<|im_start|>assistant\n"
