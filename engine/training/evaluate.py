"""Judges a length model: errors, ranks and intervals on sampled answers, and how well served answers meet target lengths.

Answers that were cut are not left out, which would make lengths seem short. With a horizon W, states are counted up to the position
from which every answer is known for W more tokens, and lengths above W count as W, real and predicted ones (restricted means).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from yardstick_llm.engine.loop.build import load_grammar_vocabulary, spellings_of
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lenvm import DEFAULT_GAMMA, GAMMA_FILE, LenVM, facts_of, gamma_of, is_adapter, load_lenvm
from yardstick_llm.engine.requests.units import measure
from yardstick_llm.engine.training.data import Floats, Longs, Text, check_tokenizer, predict, read_dataset, to_lengths

SERVED, REPORT, PLOTS = "served.jsonl", "report.json", "report.png"
LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Quantiles of a calibration: the bounds of intervals, the median, and confidences of a `max_length`."""
INTERVALS = {"0.5": ("0.25", "0.75"), "0.9": ("0.05", "0.95")}
BINS, BIN_STATES = 10, 30
"""Bins of the value, and the fewest states of one."""
WITHIN = (16, 64, 256, 1024)
"""The w of "ends within w tokens"."""
RESAMPLES = 1000
PASS_TOKENS = 8192


class States(NamedTuple):
    """States of several texts, [states] each."""

    text: Longs
    """Index of the text."""
    position: Longs
    """Output tokens before the state."""
    values: Floats
    predicted: Floats
    """n of the value, at most the horizon."""
    real: Floats
    """n, at most the horizon."""


def horizon_of(texts: Sequence[Text]) -> float:
    """Return W: half of the shortest answer that was cut; infinite if none was."""
    cuts = [text.length for text in texts if not text.ended]
    return max(1, min(cuts) // 2) if cuts else math.inf


def states_of(texts: Sequence[Text], values: Sequence[Floats], gamma: float, horizon: float) -> States:
    """Return the states whose remaining length is known up to the horizon. values: of every state of each text."""
    kept = [np.flatnonzero(np.arange(text.length + 1) <= horizon) for text in texts]
    joined = np.concatenate([value[at] for value, at in zip(values, kept, strict=True)])
    real = np.concatenate([text.remaining[at] for text, at in zip(texts, kept, strict=True)])
    return States(
        text=np.repeat(np.arange(len(texts)), [len(at) for at in kept]),
        position=np.concatenate(kept),
        values=joined,
        predicted=np.minimum(np.maximum(to_lengths(joined, gamma), 1.0), horizon),
        real=np.minimum(real, horizon).astype(np.float64),
    )


def calibrate(states: States) -> dict[str, Any]:
    """Return for bins of the value how real and predicted lengths differ: quantiles of ln(real / predicted).

    The quantiles have the ranks of conformal prediction, so that an interval between two of them covers a new state at least as
    often as they say. Source: Lei et al. 2018, "Distribution-Free Predictive Inference for Regression", arXiv 1604.04173, in each
    bin. States of one text depend on each other, which the ranks do not know.
    """
    bins = int(max(1, min(BINS, len(states.values) // BIN_STATES)))
    edges = np.unique(np.quantile(states.values, np.arange(1, bins) / bins)) if bins > 1 else np.empty(0)
    ratios = np.log(states.real / states.predicted)
    at = np.searchsorted(edges, states.values, side="right")
    table: dict[str, list[float]] = {f"{level:g}": [] for level in LEVELS}
    for place in range(len(edges) + 1):
        inside = np.sort(ratios[at == place]) if (at == place).any() else np.sort(ratios)
        for level in LEVELS:
            rank = level * (len(inside) + 1)
            rank = math.floor(rank) if level < 0.5 else math.ceil(rank)
            table[f"{level:g}"].append(round(float(inside[min(max(rank, 1), len(inside)) - 1]), 4))
    return {"edges": [round(float(edge), 6) for edge in edges], "log_ratio": table, "states": len(ratios)}


def judge(
    model: LenVM, texts: Sequence[Text], gamma: float, most: int, device: torch.device, spellings: Sequence[bytes]
) -> dict[str, Any]:
    """Return ``calibration``, ``metrics`` and, with the ``spellings`` of tokens, ``unit_tokens`` of a model on the validation
    texts."""
    values = predict(model, texts, most, device)
    states = states_of(texts, values, gamma, horizon_of(texts))
    errors = np.log(states.predicted / states.real)
    metrics = {
        "texts": len(texts),
        "states": len(errors),
        "mae_log": float(np.abs(errors).mean()),
        "bias_log": float(errors.mean()),
    }
    unit_tokens = measure([text.tokens[text.start :].tolist() for text in texts], spellings) if spellings else {}
    return {"calibration": calibrate(states), "metrics": metrics, "unit_tokens": unit_tokens}


def spellings_in(directory: Path) -> list[bytes]:
    """Return what each token of a model adds to a text; empty where its tokeniser does not say."""
    return spellings_of(load_grammar_vocabulary(directory, load_config(directory)))


def intervals(states: States, calibration: dict[str, Any], horizon: float) -> dict[str, tuple[Floats, Floats]]:
    """Return the bounds of each interval of a calibration."""
    at = np.searchsorted(np.array(calibration["edges"]), states.values, side="right")
    found = {}
    for name, (low, high) in INTERVALS.items():
        bounds = (states.predicted * np.exp(np.array(calibration["log_ratio"][level]))[at] for level in (low, high))
        lower, upper = (np.minimum(bound, horizon) for bound in bounds)
        found[name] = lower, upper
    return found


class Resampled:
    """Means over states, with intervals by a bootstrap over prompts, whose states depend on each other."""

    def __init__(self, groups: Longs, seed: int = 0) -> None:
        """groups: the prompt of each state or answer."""
        self._names, self._groups = np.unique(groups, return_inverse=True)
        rng = np.random.default_rng(seed)
        self._weights = rng.multinomial(len(self._names), np.full(len(self._names), 1 / len(self._names)), RESAMPLES)

    def mean(self, values: Floats) -> dict[str, float]:
        """Return the mean and the bounds of its interval of 95 %."""
        size = len(self._names)
        sums, counts = np.bincount(self._groups, values, size), np.bincount(self._groups, minlength=size)
        means = (self._weights @ sums) / np.maximum(1, self._weights @ counts)
        low, high = np.quantile(means, (0.025, 0.975))
        return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def rank_correlation(x: Floats, y: Floats) -> float | None:
    """Return Spearman's correlation, with mean ranks for ties; None for fewer than three pairs, or without differences."""
    if len(x) < 3 or len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return None
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(x: Floats) -> Floats:
    _, group, counts = np.unique(x, return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[group])


def auc(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the probability that a positive has a higher score than a negative; a tie counts half. None without either."""
    count = int(positive.sum())
    if not 0 < count < len(positive):
        return None
    return float((_ranks(scores)[positive].sum() - count * (count + 1) / 2) / (count * (len(positive) - count)))


def judge_offline(
    texts: Sequence[Text], values: Sequence[Floats], gamma: float, calibration: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the errors of ``values``, those of every state of each text."""
    horizon = horizon_of(texts)
    states = states_of(texts, values, gamma, horizon)
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(text.prompt_id for text in texts))}
    of_text = np.array([prompts[text.prompt_id] for text in texts])
    groups = of_text[states.text]
    resampled, errors = Resampled(groups), np.log(states.predicted / states.real)
    report: dict[str, Any] = {
        "prompts": len(prompts),
        "answers": len(texts),
        "states": len(errors),
        "cut_share": sum(not text.ended for text in texts) / len(texts),
        "horizon": None if math.isinf(horizon) else int(horizon),
        "mae_log": resampled.mean(np.abs(errors)),
        "bias_log": resampled.mean(errors),
        "deciles": [],
    }
    edges = np.quantile(states.position, np.arange(1, 10) / 10)
    at = np.searchsorted(np.unique(edges), states.position, side="right")
    for place in np.unique(at):
        here = at == place
        row = {"from": int(states.position[here].min()), "to": int(states.position[here].max()), "states": int(here.sum())}
        part = Resampled(groups[here])
        report["deciles"].append(row | {"bias_log": part.mean(errors[here]), "mae_log": part.mean(np.abs(errors[here]))})
    first = states.position == 0
    of_first = groups[first]
    sums = [np.bincount(of_first, each, len(prompts)) for each in (states.predicted[first], states.real[first])]
    counts = np.bincount(of_first, minlength=len(prompts))
    report["first_token_rank_correlation"] = rank_correlation(*(each[counts > 0] / counts[counts > 0] for each in sums))
    report["ends_within"] = {}
    for within in WITHIN:
        if within < horizon:
            report["ends_within"][str(within)] = auc(-states.values, states.real <= within)
    if calibration is not None:
        report["coverage"] = {}
        for name, (low, high) in intervals(states, calibration, horizon).items():
            covered = (states.real >= low) & (states.real <= high)
            widths = Resampled(groups).mean(high - low)
            report["coverage"][name] = {"share": resampled.mean(covered.astype(np.float64)), "width": widths["mean"]}
    return report


class Answer(msgspec.Struct):
    """A line of :data:`SERVED`."""

    prompt_id: str
    rule: str
    target: int | None
    error: str | None
    tokens: int = 0
    finish_reason: str | None = None
    mean_logprob: float = 0.0
    repeated: float = 0.0
    sample: int = 0


def read_served(path: Path) -> list[Answer]:
    """Read served answers, without those that failed. Raises :class:`ModelError` for a damaged line."""
    answers: dict[tuple[str, int, str, int | None], Answer] = {}
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except ValueError as error:
                raise ModelError(f"{path.name}, line {number}: {error}; remove the line and repeat the command.") from None
            if answer.error is None:
                answers[answer.prompt_id, answer.sample, answer.rule, answer.target] = answer
    return [*answers.values()]


def length_scores(tokens: Sequence[int], target: int) -> Floats:
    """Return the Length Score of each answer for "equal to", 0 to 100, in tokens where the benchmark counts words.

    Source: Zhang et al. 2025, "LIFEBench: Evaluating Length Instruction Following in Large Language Models", arXiv 2505.16234.
    """
    deviation = np.asarray(tokens, np.float64) / target - 1
    return 100 * np.exp(np.where(deviation < 0, 5, -2) * deviation)


def judge_served(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return for each target and rule how well the answers meet it, and how probable they are compared with unguided ones."""
    plain: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.rule == "unguided":
            plain.setdefault(answer.prompt_id, []).append(answer)
    usual = {prompt: float(np.mean([each.mean_logprob for each in alike])) for prompt, alike in plain.items()}
    targets = sorted({answer.target for answer in answers if answer.target is not None})
    rules = ["unguided", *sorted({answer.rule for answer in answers} - {"unguided"}, reverse=True)]
    numbers = {prompt: number for number, prompt in enumerate(plain)}
    rows = []
    for target in targets:
        for rule in rules:
            if rule == "unguided":
                found = [each for alike in plain.values() for each in alike]
            else:
                found = [each for each in answers if (each.rule, each.target) == (rule, target) and each.prompt_id in plain]
            if not found:
                continue
            resampled = Resampled(np.array([numbers[each.prompt_id] for each in found]))
            off = np.abs(np.array([each.tokens for each in found]) / target - 1)
            columns = {
                "deviation": off,
                "within_tenth": off <= 0.1,
                "lifebench": length_scores([each.tokens for each in found], target),
                "ended": [each.finish_reason == "stop" for each in found],
                "tokens": [each.tokens for each in found],
                "logprob_change": [each.mean_logprob - usual[each.prompt_id] for each in found],
                "repeated": [each.repeated for each in found],
            }
            means = {name: resampled.mean(np.asarray(column, np.float64)) for name, column in columns.items()}
            rows.append({"target": target, "rule": rule, "answers": len(found), **means})
    return rows


def table(report: dict[str, Any]) -> str:
    """Return a report as text."""
    offline = report["offline"]
    lines = [
        f"{offline['answers']} answers to {offline['prompts']} prompts, {offline['cut_share']:.1%} cut"
        + ("" if offline["horizon"] is None else f"; lengths up to {offline['horizon']} tokens"),
        f"error of ln(remaining): mean {_shown(offline['mae_log'])}, bias {_shown(offline['bias_log'])}",
        "bias by position: "
        + ", ".join(f"{row['from']}-{row['to']}: {row['bias_log']['mean']:+.2f}" for row in offline["deciles"]),
        f"rank correlation at the first token: {_number(offline['first_token_rank_correlation'])}",
        "AUC of the end within w tokens: " + ", ".join(f"{w}: {_number(each)}" for w, each in offline["ends_within"].items()),
    ]
    for name, each in offline.get("coverage", {}).items():
        lines.append(f"interval of {float(name):.0%} covers {_shown(each['share'])}, mean width {each['width']:.0f} tokens")
    width = max([17, *(len(row["rule"]) for row in report["served"])])
    if report["served"]:
        rest = "tokens  mean |d|              within 10 %  LIFEBench  ended  logprob  repeated"
        lines.append(f"target  {'rule':{width}s}  {rest}")
    for row in report["served"]:
        lines.append(
            f"{row['target']:6d}  {row['rule']:{width}s}  {row['tokens']['mean']:6.1f}  {_shown(row['deviation']):20s}  "
            f"{row['within_tenth']['mean']:11.0%}  {row['lifebench']['mean']:9.1f}  "
            f"{row['ended']['mean']:5.0%}  {round(row['logprob_change']['mean'], 2) + 0.0:+7.2f}  {row['repeated']['mean']:8.1%}"
        )
    return "\n".join(lines)


def _shown(mean: dict[str, float]) -> str:
    return f"{mean['mean']:.2f} ({mean['low']:.2f} to {mean['high']:.2f})"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def plot(report: dict[str, Any], states: States, answers: Sequence[Answer], path: Path) -> bool:
    """Draw predicted and real lengths, the bias by position, and served lengths by target; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    one, two, three = figure.subplots(1, 3)
    one.hexbin(states.real, states.predicted, xscale="log", yscale="log", gridsize=40, bins="log", cmap="Blues", mincnt=1)
    ends = [1, max(states.real.max(), states.predicted.max())]
    one.plot(ends, ends, "k--", linewidth=1)
    one.set(xlabel="real remaining tokens", ylabel="predicted", title="States")
    rows = report["offline"]["deciles"]
    places = range(len(rows))
    two.plot(places, [row["bias_log"]["mean"] for row in rows], "o-")
    two.fill_between(places, [row["bias_log"]["low"] for row in rows], [row["bias_log"]["high"] for row in rows], alpha=0.3)
    two.axhline(0, color="k", linewidth=1)
    two.set_xticks(places, [f"{row['from']}-{row['to']}" for row in rows], rotation=60)
    two.set(xlabel="output tokens so far", ylabel="mean of ln(predicted / real)", title="Bias")
    for number, rule in enumerate(sorted({answer.rule for answer in answers} - {"unguided"})):
        colour = f"C{number}"
        found: dict[int, list[int]] = {}
        for answer in answers:
            if answer.rule == rule and answer.target is not None:
                found.setdefault(answer.target, []).append(answer.tokens)
        if found:
            at = [target * (0.94 + 0.12 * number) for target in sorted(found)]
            boxes = three.boxplot([found[target] for target in sorted(found)], positions=at, widths=[x * 0.1 for x in at])
            for box in boxes["boxes"]:
                box.set_color(colour)
            three.plot([], [], color=colour, label=rule)
            three.plot(sorted(found), sorted(found), "k--", linewidth=1)
            three.set_xscale("log")
            three.set_yscale("log")
            three.set_xticks(sorted(found), [str(target) for target in sorted(found)], minor=False)
            three.minorticks_off()
            three.legend()
    three.set(xlabel="target", ylabel="tokens", title="Served answers")
    figure.savefig(path, dpi=120)
    return True


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)


def evaluate(
    data: Path,
    lenvm: Path,
    out: Path,
    split: str,
    device: torch.device,
    say: Callable[[str], None],
    *,
    recalibrate: bool = False,
    init: Path | None = None,
) -> None:
    """Write :data:`REPORT`, and :data:`PLOTS` where matplotlib is, and print the table. ``recalibrate``: first replace the
    calibration of the length model by one on the validation split. ``init``: the model that a length model adds to which is an
    adapter. Raises :class:`ModelError`."""
    if recalibrate and split == "validation":
        raise ModelError("A calibration on the validation split is not judged by that split; leave --split out.")
    if is_adapter(lenvm) and init is None:
        raise ModelError(f"{lenvm.name} is an adapter; name the model that it was trained on with --init.")
    whole = init if init is not None and is_adapter(lenvm) else lenvm
    dataset = read_dataset(data, load_config(lenvm))
    check_tokenizer(dataset.manifest, whole)
    texts = dataset.texts(split)
    facts, gamma = facts_of(lenvm), gamma_of(lenvm, None)
    if "gamma" not in facts:
        say(f"warning: {lenvm.name} names no gamma; {DEFAULT_GAMMA} is taken")
    model = load_lenvm(lenvm, torch.bfloat16 if device.type == "cuda" else torch.float32, base=init).to(device)
    if recalibrate:
        facts |= {"gamma": gamma, **judge(model, dataset.texts("validation"), gamma, PASS_TOKENS, device, spellings_in(whole))}
        write_json(lenvm / GAMMA_FILE, facts)
    values = predict(model, texts, PASS_TOKENS, device)
    answers = read_served(out / SERVED) if (out / SERVED).exists() else []
    report = {
        "model": dataset.manifest.get("model"),
        "lenvm": lenvm.name,
        "gamma": gamma,
        "split": split,
        "offline": judge_offline(texts, values, gamma, facts.get("calibration")),
        "served": judge_served(answers),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report), flush=True)
    drawn = plot(report, states_of(texts, values, gamma, horizon_of(texts)), answers, out / PLOTS)
    say(f"{out / REPORT}" + (f" and {PLOTS}" if drawn else "; install matplotlib for plots"))
