"""Encoders, and decoders that rank, as today's sentence-transformers saves them, read by engine and gateway, with its numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from tests import weights
from tests.clients.environments import run_client
from tests.encoders import TASKS, load_reference, make_jina_v3
from tests.engine.test_loop import run
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.source import locate, tokenizer_files
from yardstick_llm.engine.settings import EngineSettings
from yardstick_llm.gateway.presets.preset import choose, parse_preset
from yardstick_llm.gateway.requests.endpoint import Model as TextModel
from yardstick_llm.gateway.requests.endpoint import TextSide
from yardstick_llm.gateway.requests.rerank import RERANK, RerankRequest
from yardstick_llm.gateway.text.chat_template import ChatTemplate
from yardstick_llm.gateway.text.prepared import UNBOUND, Facts
from yardstick_llm.gateway.text.preset_template import Limits, PresetTemplate
from yardstick_llm.gateway.text.tokenizer import Tokenizer

TEXTS = ["red shoes", "Where is the blue table? It is here.", "a quick brown fox " * 12]
PAIRS = [("blue table", text) for text in TEXTS]


class Model:
    """A folder in an engine's loop, with the preset and the tokeniser that a gateway makes of its files."""

    def __init__(self, folder: Path) -> None:
        self._loop = build_loop(EngineSettings(model=str(folder), name=folder.name))
        info, files = self._loop.info, tokenizer_files(locate(folder))
        self.capabilities = info.capabilities
        given = {"classes": len(info.classes), "encoder": info.encoder, "beside": None, "model_files": files.model_files}
        text = choose(folder.name, files.architecture, info.capabilities, chosen={}, **given)
        assert text is not None
        self.preset = parse_preset(text.encode())
        tokenizer = Tokenizer.from_files(files)
        self._template = PresetTemplate(self.preset, tokenizer)
        self._limits = Limits(info.max_context, "right")
        side = TextSide(tokenizer, ChatTemplate(files.chat_template, files.special_tokens), self._template)
        self._texts = TextModel(Facts(folder.name, info.max_context, info.vocab_size, 64), tokenizer, UNBOUND, side)

    def rows(self, readout: wire.ScoreReadout, documents: Sequence[str], query: str | None = None, purpose: str = "") -> Any:
        prompt = None if query is not None else self.preset.prompt_for(purpose or None)
        given = {"query": query, "prompt": prompt, "as_query": purpose == "query"}
        found = []
        for whole in self._template.wholes(documents, self._limits, **given):
            prefix, row = (whole.first, whole.second) if self._template.typed else ([], [*whole.first, *whole.second])
            (scored,) = run(self._loop, wire.Score("s", prefix, [row], readout))
            found.append([*scored.rows[0]])
        return found

    def vectors(self, text: str, purpose: str) -> torch.Tensor:
        """[tokens, size]"""
        fitted, prompt = self._template.fitted, self.preset.prompt_for(purpose)
        (whole,) = self._template.wholes([text], self._limits, query=None, prompt=prompt, as_query=purpose == "query")
        expansion = whole.second.count(fitted.expansion) if fitted.expansion is not None else 0
        (row,) = self.rows(wire.TokenVectors(expansion_tokens=expansion), [text], purpose=purpose)
        skipped = fitted.skipped if purpose == "document" else []
        return torch.tensor(row).view(len(whole.second), -1)[[token not in skipped for token in whole.second]]

    def by_chat_template(self, query: str, documents: list[str], instruction: str | None = None) -> list[float]:
        """Scores of a decoder."""
        request = RerankRequest(query=query, documents=[*documents], instruction=instruction)
        prepared = RERANK.read(request, self._texts)
        fitted = self._template.fitted
        (scored,) = run(self._loop, wire.Score("s", prepared.prefix, prepared.rows, fitted.readout))
        return [fitted.score(row) for row in scored.rows]

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        (query,) = {query for query, _ in pairs}
        rows = self.rows(wire.Classes(), [document for _, document in pairs], query)
        return [self._template.fitted.score(row) for row in rows]


def write_unigrams(folder: Path, words: str, size: int) -> None:
    """Write a tokeniser like that of XLM-RoBERTa, with ``size`` tokens."""
    vocabulary = [*special_tokens, *(f"\u2581{word}" for word in words.split())]
    vocabulary += [f"unused{number}" for number in range(size - len(vocabulary))]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(token, -1.0) for token in vocabulary], special_tokens.index("<unk>"), False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)])
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))


special_tokens = ["<s>", "<pad>", "</s>", "<unk>"]


def test_prompts_of_a_model_of_several_tasks(tmp_path: Path) -> None:
    """The name of a prompt or a purpose chooses the task's weights and its text. Without one, there are neither."""
    published, *merged = make_jina_v3(tmp_path)
    write_unigrams(published, "find: red blue shoes", 320)
    library, model = tokenizers.Tokenizer.from_file(str(published / "tokenizer.json")), Model(published)
    by_task = {name: load_reference(folder, "jina_v3", "embed") for name, folder in zip((*TASKS, ""), merged, strict=True)}
    purposes = {"query": "retrieval.query", "document": "retrieval.passage", "": ""} | {task: task for task in TASKS}
    for purpose, task in purposes.items():
        ids = library.encode(("find: " if task == "retrieval.query" else "") + "red <|task:text-matching|> shoes").ids
        with torch.inference_mode():
            wanted = by_task[task](torch.tensor([ids])).last_hidden_state.mean(1)
        (row,) = model.rows(wire.Embedding(normalize=False), ["red <|task:text-matching|> shoes"], purpose=purpose)
        torch.testing.assert_close(torch.tensor([row]), wanted, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_folders_of_todays_sentence_transformers(tmp_path: Path) -> None:
    given = json.dumps({"texts": TEXTS, "pairs": PAIRS})
    wanted = run_client("sentence_saved.py", str(weights.minilm()), str(tmp_path), given, environment="encoder-peers")
    of_queries = wanted.pop("router queries")
    model = {name: Model(tmp_path / name) for name in wanted}
    for name in ("embedding", "folder", "static"):
        vectors = model[name].rows(wire.Embedding(), TEXTS)
        torch.testing.assert_close(torch.tensor(vectors), torch.tensor(wanted[name]), atol=1e-5, rtol=0)
    for name in ("cross-encoder", "modules"):
        assert model[name].capabilities == ["classify"]
        assert model[name].scores(PAIRS) == pytest.approx(wanted[name], abs=1e-5)
    for name in ("causal", "causal-parts"):
        assert model[name].by_chat_template(PAIRS[0][0], TEXTS) == pytest.approx(wanted[name], abs=1e-5)
        assert model[name].by_chat_template(PAIRS[0][0], TEXTS, "Elsewhere.") != pytest.approx(wanted[name], abs=1e-3)
    sparse = [(model[name].rows(wire.Sparse(), TEXTS), wanted[name]) for name in ("sparse", "router")]
    sparse.append((model["router"].rows(wire.Sparse(query=True), TEXTS, purpose="query"), of_queries))
    for rows, expected in sparse:
        for row, dense in zip(rows, expected, strict=True):
            found = torch.zeros(len(dense))
            found[torch.tensor(row[::2], dtype=torch.long)] = torch.tensor(row[1::2])
            torch.testing.assert_close(found, torch.tensor(dense), atol=1e-4, rtol=0)
    for name in ("vectors", "stanford"):
        for purpose, expected in zip(("query", "document"), wanted[name], strict=True):
            for text, rows in zip(TEXTS, expected, strict=True):
                torch.testing.assert_close(model[name].vectors(text, purpose), torch.tensor(rows), atol=1e-5, rtol=0)
