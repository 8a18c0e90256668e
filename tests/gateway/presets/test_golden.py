"""Presets give exactly the token ids of the models' published code."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from tests.gateway.presets.published import DOCUMENT, FOLDER, Case, cases, encode
from yardstick_llm.engine.wire import TokenizerFiles
from yardstick_llm.gateway.presets.preset import builtin_presets
from yardstick_llm.gateway.requests.endpoint import Model, TextSide
from yardstick_llm.gateway.requests.pairs import Pairs
from yardstick_llm.gateway.requests.rerank import RERANK, RerankRequest
from yardstick_llm.gateway.requests.texts import CLASSIFY, ClassifyRequest
from yardstick_llm.gateway.schemas.common import Truncation
from yardstick_llm.gateway.text.catalogue import Frame, TemplateError
from yardstick_llm.gateway.text.catalogue import template_of as template_for_items
from yardstick_llm.gateway.text.chat_template import ChatTemplate
from yardstick_llm.gateway.text.prepared import UNBOUND, Facts
from yardstick_llm.gateway.text.preset_template import PresetTemplate
from yardstick_llm.gateway.text.tokenizer import Tokenizer

CHAT_TEMPLATES = {"qwen3guard-gen": "qwen3guard-gen.jinja", "skywork-reward": "qwen3.jinja"}
ENDS = {"qwen3-embedding": "<|endoftext|>", "qwen3-vl-embedding": "<|endoftext|>", "f2llm-v2": "<|im_end|>"}
"""Token that the post-processor of a model's tokenizer.json appends. The other models' adds none."""


def appending(token: str, id: int) -> dict[str, Any]:
    end = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    appends = {
        "type": "TemplateProcessing",
        "single": [texts[0], end],
        "pair": texts,
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "processors": [bytes_, appends]}


@cache
def template_of(preset: str) -> PresetTemplate:
    document = DOCUMENT
    if preset in ENDS:
        document = DOCUMENT | {"post_processor": appending(ENDS[preset], DOCUMENT["model"]["vocab"][ENDS[preset]])}
    files = TokenizerFiles(msgspec.json.encode(document), None, {})
    return PresetTemplate(builtin_presets()[preset], Tokenizer.from_files(files))


def model_of(preset: str) -> Model:
    template = template_of(preset)
    chat = (FOLDER / CHAT_TEMPLATES[preset]).read_text("utf-8") if preset in CHAT_TEMPLATES else None
    side = TextSide(template._tokenizer, ChatTemplate(chat, {}), template)
    return Model(Facts("m", 4096, 151_936, 64), template._tokenizer, UNBOUND, side)


def name(case: Case) -> str:
    return f"{case.preset}-{case.instruction[:6]}-{case.query[:8]}"


CASES: dict[bool, list[Case]] = {True: [], False: []}
"""The cases, by whether their preset has a template of its own; the others use the model's chat template."""
for each in cases():
    CASES[each.preset not in CHAT_TEMPLATES].append(each)
own_template = pytest.mark.parametrize("case", CASES[True], ids=name)


@pytest.mark.slow
@own_template
def test_documents_alone_and_together(case: Case) -> None:
    template, model = template_of(case.preset), model_of(case.preset)
    as_query = template.preset.task == "embed" and bool(case.instruction)
    pairs = Pairs(model, template, Truncation(), "documents", case.query, case.instruction or None, as_query)
    for documents, prompts in [
        *(([text] * count, [ids] * count) for text, ids in zip(case.documents, case.prompts, strict=True) for count in (1, 3)),
        (case.documents, case.prompts),
        (case.documents[::-1], case.prompts[::-1]),
    ]:
        prepared = pairs.prepared(documents)
        assert [[*prepared.prefix, *row, *prepared.suffix] for row in prepared.rows] == prompts, documents
        assert bool(prepared.suffix) is template.preset.item_first


@pytest.mark.slow
@own_template
def test_a_catalogue_gives_the_same_prompts(case: Case) -> None:
    """Items are tokenised without the query, which may be any."""
    template = template_of(case.preset)
    preset = template.preset
    if not preset.item_first:
        with pytest.raises(TemplateError, match="query before the document"):
            template_for_items(preset)
        return
    if case.instruction:
        preset = msgspec.structs.replace(preset, template=preset.instructed or preset.template, instruction=case.instruction)
    frame = Frame(template_for_items(preset), template._tokenizer)
    stored = frame.store(case.documents, 4096)
    tails = list(dict.fromkeys(item.tail for item in stored))
    seams = frame.seams(tails, case.query, 4096, UNBOUND)
    rows = [[*item.ids, *seams.rows[tails.index(item.tail)], *seams.suffix] for item in stored]
    assert rows == case.prompts
    assert len(tails) == 1, "the tokens behind an item do not depend on it"


@pytest.mark.parametrize("case", CASES[False], ids=name)
def test_the_chat_template_gives_the_same_prompts(case: Case) -> None:
    model = model_of(case.preset)
    alone = [([text], [ids]) for text, ids in zip(case.documents, case.prompts, strict=True)]
    for documents, expected in [*alone, (case.documents, case.prompts)]:
        if template_of(case.preset).preset.task == "classify":
            prepared = CLASSIFY.read(ClassifyRequest(input=documents), model)
            expected = [ids for prompt in expected for ids in (prompt, prompt + encode(" Unsafe\nCategories:"))]
        else:
            prepared = RERANK.read(RerankRequest(query=case.query, documents=[*documents]), model)
        assert [[*prepared.prefix, *row] for row in prepared.rows] == expected


READ = ["qwen3-reranker", "qwen3-vl-reranker", "mxbai-rerank-v2", "zerank-1", "zerank-2", "ctxl-rerank-v2", "qwen3guard-gen"]


@pytest.mark.parametrize("preset", [*READ, "judge", "judge-item-first", "yardstick-demo"])
def test_the_labels(preset: str) -> None:
    fitted = template_of(preset).fitted
    groups = [(group,) if isinstance(group, str) else group for group in fitted.preset.labels]
    spelled = [[encode(label) for label in group] for group in groups]
    assert fitted.labels == [[ids[0] for ids in group if len(ids) == 1] for group in spelled]
    assert fitted.categories == [id for label in getattr(fitted.preset.categories, "names", ()) for id in encode(label)]


def test_the_ids_that_the_sources_name() -> None:
    assert template_of("qwen3-reranker").fitted.labels == [[9693], [2152]]
    assert template_of("zerank-1").fitted.labels == template_of("zerank-2").fitted.labels == [[9454]]
    assert template_of("ctxl-rerank-v2").fitted.labels == [[0]]
    guard = template_of("qwen3guard-gen").fitted
    assert (guard.labels, guard.names) == ([[73067], [2093], [22291]], ["Unsafe", "Controversial", "Safe"])
