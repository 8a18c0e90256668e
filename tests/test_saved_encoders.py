"""Encoders, and decoders that rank, as today's sentence-transformers saves them, read by engine and gateway, with its numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import weights
from tests.clients.environments import run_client
from tests.engine.test_loop import run
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.build import build_loop
from yardstick_llm.engine.models.source import tokenizer_files
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
        info, files = self._loop.info, tokenizer_files(folder)
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_folders_of_todays_sentence_transformers(tmp_path: Path) -> None:
    given = json.dumps({"texts": TEXTS, "pairs": PAIRS})
    wanted = run_client("sentence_saved.py", str(weights.minilm()), str(tmp_path), given, environment="encoder-peers")
    model = {name: Model(tmp_path / name) for name in wanted}
    vectors = model["embedding"].rows(wire.Embedding(), TEXTS)
    torch.testing.assert_close(torch.tensor(vectors), torch.tensor(wanted["embedding"]), atol=1e-5, rtol=0)
    for name in ("cross-encoder", "modules"):
        assert model[name].capabilities == ["classify"]
        assert model[name].scores(PAIRS) == pytest.approx(wanted[name], abs=1e-5)
    for name in ("causal", "causal-parts"):
        assert model[name].by_chat_template(PAIRS[0][0], TEXTS) == pytest.approx(wanted[name], abs=1e-5)
        assert model[name].by_chat_template(PAIRS[0][0], TEXTS, "Elsewhere.") != pytest.approx(wanted[name], abs=1e-3)
    for name in ("sparse", "router"):
        for row, dense in zip(model[name].rows(wire.Sparse(), TEXTS), wanted[name], strict=True):
            found = torch.zeros(len(dense))
            found[torch.tensor(row[::2], dtype=torch.long)] = torch.tensor(row[1::2])
            torch.testing.assert_close(found, torch.tensor(dense), atol=1e-4, rtol=0)
    for name in ("vectors", "stanford"):
        for purpose, expected in zip(("query", "document"), wanted[name], strict=True):
            for text, rows in zip(TEXTS, expected, strict=True):
                torch.testing.assert_close(model[name].vectors(text, purpose), torch.tensor(rows), atol=1e-5, rtol=0)
