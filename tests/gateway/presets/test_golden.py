"""Presets give exactly the token ids of the models' published code.

``make_golden.py`` computed the ids without this project's code; ``golden/README.md`` says from what.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.wire import TokenizerFiles
from gateway.presets.select import builtin_presets
from gateway.reading.endpoint import Model, TextSide
from gateway.reading.pairs import Pairs
from gateway.schemas.truncation import Truncation
from gateway.text.bounds import UNBOUND
from gateway.text.catalogue import Frame, TemplateError
from gateway.text.catalogue import template_of as template_for_items
from gateway.text.chat_template import ChatTemplate
from gateway.text.facts import Facts
from gateway.text.preset_template import PresetTemplate
from gateway.text.prompts import PrefixAndBranches
from gateway.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "golden.json").read_text("utf-8"))
END_OF_TEXT = {
    "type": "Sequence",
    "processors": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [151643], "tokens": ["<|endoftext|>"]}},
        },
    ],
}
"""Post-processor of the tokenizer.json of Qwen3-Embedding. The other models' adds no token."""


@cache
def template_of(preset: str) -> PresetTemplate:
    document = json.loads((FOLDER / "tokenizer.json").read_bytes())
    if preset == "qwen3-embedding":
        document["post_processor"] = END_OF_TEXT
    files = TokenizerFiles(msgspec.json.encode(document), None, {})
    return PresetTemplate(builtin_presets()[preset], Tokenizer.from_files(files))


class Case:
    """One query with documents, and the ids of each prompt."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.query: str = case["query"]
        self.instruction: str = case["instruction"]
        self.documents: list[str] = case["documents"]
        self.prompts: list[list[int]] = [[*case["begin"], *middle, *case["end"]] for middle in case["middles"]]
        self.template = template_of(case["preset"])

    def build(self, documents: list[str]) -> PrefixAndBranches:
        return self.template.prompts(
            documents,
            query=self.query,
            instruction=self.instruction or self.template.preset.instruction,
            instructed=bool(self.instruction),
        )


def name(case: dict[str, Any]) -> str:
    return f"{case['preset']}-{case['instruction'][:6]}-{case['query'][:8]}"


@pytest.fixture(params=GOLDEN["cases"], ids=name)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def joined(built: PrefixAndBranches) -> list[list[int]]:
    prefix, branches = built
    return [[*prefix, *branch] for branch in branches]


def test_each_document_alone(case: Case) -> None:
    for document, expected in zip(case.documents, case.prompts, strict=True):
        assert joined(case.build([document])) == [expected], document


def test_all_documents_together(case: Case) -> None:
    assert joined(case.build(case.documents)) == case.prompts
    assert joined(case.build(case.documents[::-1])) == case.prompts[::-1]


def test_equal_documents(case: Case) -> None:
    for document, expected in zip(case.documents, case.prompts, strict=True):
        assert joined(case.build([document] * 3)) == [expected] * 3, document


def test_the_request_of_a_client_gives_the_same_prompts(case: Case) -> None:
    template = case.template
    side = TextSide(template._tokenizer, ChatTemplate(None, {}), template)
    model = Model(Facts("m", 4096, 151_936, 64), template._tokenizer, UNBOUND, side)
    as_query = template.preset.task == "embed" and bool(case.instruction)
    pairs = Pairs(model, template, Truncation(), "documents", case.query, case.instruction or None, as_query)
    prepared = pairs.prepared(case.documents)
    assert [[*prepared.prefix, *row, *prepared.suffix] for row in prepared.rows] == case.prompts
    assert bool(prepared.suffix) is template.preset.item_first


def test_a_catalogue_gives_the_same_prompts(case: Case) -> None:
    """Items are tokenised without the query, which may be any."""
    preset = case.template.preset
    if not preset.item_first:
        with pytest.raises(TemplateError, match="query before the document"):
            template_for_items(preset)
        return
    if case.instruction:
        preset = msgspec.structs.replace(preset, template=preset.instructed or preset.template, instruction=case.instruction)
    frame = Frame(template_for_items(preset), case.template._tokenizer)
    stored = frame.store(case.documents, 4096)
    tails = list(dict.fromkeys(item.tail for item in stored))
    seams = frame.seams(tails, case.query, 4096, UNBOUND)
    rows = [[*item.ids, *seams.rows[tails.index(item.tail)], *seams.suffix] for item in stored]
    assert rows == case.prompts
    assert len(tails) == 1, "the tokens behind an item do not depend on it"


@pytest.mark.parametrize(
    "preset", ["qwen3-reranker", "mxbai-rerank-v2", "zerank-2", "ctxl-rerank-v2", "judge", "judge-item-first", "yardstick-demo"]
)
def test_the_labels(preset: str) -> None:
    fitted = template_of(preset).fitted
    groups = [(group,) if isinstance(group, str) else group for group in fitted.preset.labels]
    assert fitted.labels == [[id for label in group for id in GOLDEN["labels"][label]] for group in groups]


def test_the_ids_that_the_sources_name() -> None:
    assert template_of("qwen3-reranker").fitted.labels == [[9693], [2152]]
    assert template_of("zerank-2").fitted.labels == [[9454]]
    assert template_of("ctxl-rerank-v2").fitted.labels == [[0]]


@pytest.mark.parametrize(("preset", "joins"), [("qwen3-reranker", True), ("mxbai-rerank-v2", False)])
def test_a_question_mark_before_a_newline(preset: str, joins: bool) -> None:
    """Qwen's token for "?\\n" spans the seam behind a query only where the model's own code does not cut there."""
    question_mark_and_newline = 5267
    (prompt,) = joined(template_of(preset).prompts(["A cat is an animal."], query="What is a cat?"))
    assert (question_mark_and_newline in prompt) is joins
