"""Guided draws written out: each candidate's text through transformers on its own, then the head and the formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import END_OF_TURN, make_checkpoint
from tests.kernels.test_length_tilt import Case, expected
from yardstick_llm.engine import wire

GAMMA = 0.9


def make_lenvm_checkpoint(directory: Path, family: str, **overrides) -> Path:
    """A length model of random weights whose values are far apart, its head in a file of its own."""
    make_checkpoint(directory, family, seed=1, **overrides)
    size = overrides.get("hidden_size", 64)
    generator = torch.Generator().manual_seed(3)
    shapes = {"fc.weight": (size, size), "fc.bias": (size,), "summary.weight": (1, size), "summary.bias": (1,)}
    head = {f"v_head.{name}": torch.randn(shape, generator=generator) * size**-0.5 * 2 for name, shape in shapes.items()}
    save_file(head, directory / "value_head.safetensors")
    return directory


@dataclass(frozen=True)
class Draw:
    """The expected result of a guided draw."""

    ids: list[int]
    """Candidates, most probable first."""
    prior: Tensor
    """[candidates] float64"""
    z: Tensor
    """[candidates] float64, raw"""
    v: Tensor
    """[candidates] float64, 0 for an end of sequence"""
    tilted: Tensor
    """[candidates] float64: what the token is drawn from"""


class Plain:
    """Both models, without cache, batch or branches."""

    def __init__(self, base: Path, length: Path) -> None:
        self.base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.length: PreTrainedModel = AutoModel.from_pretrained(length, dtype=torch.float32).eval()
        self.head = load_file(length / "value_head.safetensors")

    @torch.inference_mode()
    def raw_values(self, texts: list[list[int]]) -> Tensor:
        """The raw value at the end of each of some texts of one length, [texts]."""
        hidden = self.length(torch.tensor(texts)).last_hidden_state[:, -1]
        inner = hidden @ self.head["v_head.fc.weight"].T + self.head["v_head.fc.bias"]
        return (inner / (1 + torch.exp(-inner))) @ self.head["v_head.summary.weight"][0] + self.head["v_head.summary.bias"]

    @torch.inference_mode()
    def candidates(self, text: list[int], message: wire.Generate) -> tuple[list[int], Tensor]:
        """Ids by falling probability, and their probabilities, float64, with the sum 1."""
        sampling, guidance = message.sampling, message.length_guidance
        logits = self.base(torch.tensor([text])).logits[0, -1].double()
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        p = (logits / (1.0 if chooses(guidance) else sampling.temperature)).softmax(-1)
        top = p.topk(guidance.top_k)
        kept, before = [], 0.0
        for rank, (value, token) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
            if rank == 0 or (before <= sampling.top_p and value >= top.values[0] * sampling.min_p):
                kept.append(token)
            before += value
        least = guidance.end_min_p
        if least is not None and guidance.top_k > 1 and END_OF_TURN not in kept and p[END_OF_TURN] >= least * p.max():
            kept = [*kept[: guidance.top_k - 1], END_OF_TURN]
        return kept, p[kept] / p[kept].sum()

    def draw(self, text: list[int], drawn: int, message: wire.Generate) -> Draw:
        """The distribution after ``text``, whose last ``drawn`` tokens are output."""
        ids, p = self.candidates(text, message)
        z = self.raw_values([[*text, token] for token in ids]).double()
        v = z.sigmoid()
        ends = [token == END_OF_TURN for token in ids]
        v[ends] = 0.0
        guidance = message.length_guidance
        entropy = float(-(p * p.log()).sum())
        if len(ids) == 1 or entropy < guidance.entropy_threshold or float((p * v).sum()) < guidance.value_min:
            tilted = p
        else:
            tilted = tilt(p, z, ends, drawn, guidance)
        if chooses(guidance) and message.sampling.temperature > 0:
            tilted = (tilted.log() / message.sampling.temperature).softmax(-1)
        return Draw(ids, p, z, v, tilted)


def chooses(guidance: wire.LengthGuidance) -> bool:
    return guidance.constraint in ("eq", "ge", "le", "within", "about")


def tilt(p: Tensor, z: Tensor, ends: list[bool], drawn: int, guidance: wire.LengthGuidance) -> Tensor:
    """Each rule by the definition that the kernel is compared with."""
    rule, target = guidance.constraint or guidance.mode, guidance.target_length or 0
    left, scale = max(target - drawn, 0), guidance.scale
    if rule == "about":
        left, scale = target - drawn, max(0.1 * target, 0.5)
    case = Case(rule, p.tolist(), z.tolist(), ends, scale, guidance.gamma or GAMMA, left)
    return torch.tensor(expected(case), dtype=torch.float64)
