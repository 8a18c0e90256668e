"""The served part of ``yardstick lenvm evaluate``: answers with and without length guidance, for each target length."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from yardstick_llm.gateway.commands import CommandError, WrongUsage
from yardstick_llm.gateway.commands.client import Call, Sender, Server
from yardstick_llm.gateway.commands.lenvm import (
    ANSWERS,
    MANIFEST,
    NO_IDS,
    LineTask,
    compute,
    read_manifest,
    seed_of,
)
from yardstick_llm.gateway.commands.runner import Item, accepted

SERVED = "served.jsonl"
ABOUT = "guided, about"
END_BIAS = 5.0
"""Added to the logit of the end token behind the target, by the rule that moves nothing else."""


class _Likelihood(msgspec.Struct):
    logprob: float


class _Likelihoods(msgspec.Struct):
    data: list[_Likelihood]


@dataclass(kw_only=True)
class Served(LineTask):
    """Answers with and without length guidance, and with a rule that only moves the end token, and how probable each is."""

    prompts: Mapping[str, list[int]]
    end_tokens: Sequence[int]
    most: int
    """Most tokens of an unguided answer."""
    top_k: int = 5
    min_p: float = 0.01
    command: ClassVar[str] = "lenvm evaluate"

    def key(self, fields: dict[str, Any]) -> Hashable:
        return fields["prompt_id"], fields.get("sample", 0), fields["rule"], fields["target"]

    async def compute(self, items: Sequence[Item], sender: Sender) -> list[bytes]:
        """Ask for the answer, and then for its probability without guidance."""
        fields = items[0].content
        prompt, target, rule = self.prompts[fields["prompt_id"]], fields["target"], fields["rule"]
        given: dict[str, Any] = {"max_tokens": self.most if target is None else 3 * target + 64}
        if rule.startswith("guided"):
            given["length_guidance"] = {"target_length": target, "top_k": self.top_k}
            if rule.startswith(ABOUT):
                given["length_guidance"]["constraint"] = "about"
            if end := rule.partition(", end ")[2]:
                given["length_guidance"]["end_min_p"] = float(end)
        elif rule == "end token":
            given |= {"min_tokens": target, "logit_bias": {str(token): END_BIAS for token in self.end_tokens}}
        answered = await self.ask(
            sender,
            "/v1/completions",
            prompt=prompt,
            temperature=1,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed_of(self.seed, fields["prompt_id"], *([fields["sample"]] if fields["sample"] else [])),
            **given,
        )
        choice = answered.choices[0]
        if not (ids := choice.token_ids):
            raise CommandError(NO_IDS)
        asked = {"model": self.model, "query": prompt, "items": [ids], "readout": "likelihood"}
        scored = await accepted(Call("/v1/score", msgspec.json.encode(asked)), sender)
        logprob = msgspec.json.decode(scored.content, type=_Likelihoods).data[0].logprob
        line = {**fields, "tokens": len(ids) - (choice.finish_reason == "stop"), "finish_reason": choice.finish_reason}
        return self.noted(line | {"mean_logprob": logprob / len(ids), "repeated": _repeated(ids)})


def _repeated(ids: Sequence[int], size: int = 4) -> float:
    """Return the share of runs of ``size`` tokens that occurred before."""
    runs = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


class _Line(msgspec.Struct):
    """The fields of a line of answers that an evaluation needs."""

    prompt_id: str
    split: str
    error: str | None
    prompt_ids: list[int] = []


def serve_targets(
    server: Server,
    data: Path,
    out: Path,
    *,
    model: str | None,
    split: str,
    end_min_p: float | None,
    targets: Sequence[int],
    most_prompts: int,
    samples: int,
    concurrency: int,
) -> None:
    """Write ``served.jsonl``, or continue it: ``samples`` answers to each prompt of a split for each target and rule.

    Raises :class:`CommandError`.
    """
    manifest = read_manifest(data / MANIFEST)
    prompts: dict[str, list[int]] = {}
    with (data / ANSWERS).open("rb") as stream:
        for line in stream:
            try:
                found = msgspec.json.decode(line, type=_Line)
            except ValueError:
                continue  # the program that reads all of it reports damage
            if found.split == split and found.error is None and (len(prompts) < most_prompts or found.prompt_id in prompts):
                prompts[found.prompt_id] = found.prompt_ids
    if not prompts:
        raise WrongUsage(f"{data} has no answered prompt in the split {split!r}; name another --split, or sample more prompts")
    out.mkdir(parents=True, exist_ok=True)
    name = model or manifest.model
    task = Served(
        model=name,
        seed=manifest.settings.seed,
        prompts=prompts,
        end_tokens=manifest.end_tokens,
        most=3 * max(targets) + 64,
    )

    ends = [] if end_min_p is None else [f"{rule}, end {end_min_p:g}" for rule in ("guided", ABOUT)]
    rules = ["guided", ABOUT, "end token", *ends]
    asked = [("unguided", None), *((rule, target) for target in targets for rule in rules)]
    pairs = [(sample, prompt) for sample in range(samples) for prompt in prompts]
    rows = [
        {"prompt_id": prompt, "sample": sample, "rule": rule, "target": target}
        for sample, prompt in pairs
        for rule, target in asked
    ]

    missing = compute(task, out / SERVED, rows, server, concurrency, "Writing to targets")
    if missing:
        raise CommandError(f"{missing} answers are missing (the last problem: {task.last_problem}); repeat the command")
