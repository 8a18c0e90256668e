"""What an evaluation says: known answers, intervals that cover, and lengths that a cut hides."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.checkpoints import make_checkpoint
from tests.engine.lenvm.plain import make_lenvm_checkpoint
from tests.engine.training.datasets import write_dataset
from yardstick_llm.engine.models.config import load_config
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.models.lenvm import calibration_of, unit_tokens_of
from yardstick_llm.engine.training.__main__ import main
from yardstick_llm.engine.training.data import Text, gamma_for, learned, length_quantile, read_dataset, to_lengths
from yardstick_llm.engine.training.evaluate import (
    Answer,
    auc,
    calibrate,
    horizon_of,
    intervals,
    judge_offline,
    judge_served,
    length_scores,
    rank_correlation,
    states_of,
)

GAMMA = 0.97


def texts_of(lengths: list[int], most: int | None = None) -> list[Text]:
    """One text of each length, cut at ``most``; the n-th of four prompts."""
    return [
        Text(f"p{n % 40}", n, np.zeros(3 + min(length, most or length), np.int32), 3, ended=most is None or length < most)
        for n, length in enumerate(lengths)
    ]


def test_states_and_targets_of_a_text() -> None:
    ended, cut = texts_of([3, 90], 60)
    assert ended.remaining.tolist() == [4, 3, 2, 1]
    assert learned(ended, GAMMA, 0.05).all()
    kept = learned(cut, GAMMA, 0.3)
    assert kept.tolist() == [GAMMA ** (61 - state) <= 0.3 for state in range(61)]
    assert (kept[0], kept[-1]) == (True, False)
    np.testing.assert_allclose(to_lengths(1 - GAMMA ** np.arange(1.0, 200), GAMMA), np.arange(1, 200), rtol=1e-6)
    assert 1 - gamma_for(130) ** 130 == pytest.approx(0.99)


def test_quantiles_count_cut_lengths_as_far_as_they_are_known() -> None:
    assert length_quantile([1, 2, 3, 4], [True] * 4, 0.5) == 2
    # of four, one is longer than 1, and nobody knows by how much: the share beyond 2 is 3/4 · 1/2
    assert length_quantile([1, 1, 2, 3], [True, False, True, True], 0.5) == 2
    assert length_quantile([5, 5, 9], [True, False, False], 0.9) == 9


def test_a_perfect_model_has_no_error_and_a_biased_one_has_its_bias() -> None:
    texts = texts_of(np.random.default_rng(0).integers(1, 90, 200).tolist())
    values = [1 - GAMMA**text.remaining for text in texts]
    report = judge_offline(texts, values, GAMMA, None)
    assert report["mae_log"]["mean"] == pytest.approx(0, abs=1e-6)
    assert report["first_token_rank_correlation"] == pytest.approx(1, abs=1e-3)
    assert report["ends_within"]["16"] == 1.0
    biased = judge_offline(texts, [1 - GAMMA ** (1.5 * text.remaining) for text in texts], GAMMA, None)
    assert biased["bias_log"]["mean"] == pytest.approx(math.log(1.5))
    assert all(row["bias_log"]["mean"] == pytest.approx(math.log(1.5)) for row in biased["deciles"])
    assert len(biased["deciles"]) == 10


@pytest.mark.parametrize("most", [None, 60])
def test_intervals_cover_new_texts_as_often_as_they_say(most: int | None) -> None:
    """The real length is exponential around what is predicted, with and without a cut."""
    rng = np.random.default_rng(1)

    def drawn(count: int) -> tuple[list[Text], list[np.ndarray]]:
        mean = rng.uniform(10, 50, count)
        texts = texts_of((1 + rng.exponential(mean)).astype(int).tolist(), most)
        return texts, [np.full(text.length + 1, 1 - GAMMA**each) for text, each in zip(texts, mean, strict=True)]

    fitted, values = drawn(3000)
    calibration = calibrate(states_of(fitted, values, GAMMA, horizon_of(fitted)))
    texts, values = drawn(3000)
    horizon = horizon_of(texts)
    assert math.isinf(horizon) == (most is None)
    states = states_of(texts, values, GAMMA, horizon)
    for name, (low, high) in intervals(states, calibration, horizon).items():
        share = ((states.real >= low) & (states.real <= high)).mean()
        assert share >= float(name) - 0.03, (name, share)
        assert share <= float(name) + 0.03 or most is not None


def test_a_cut_does_not_make_lengths_seem_short() -> None:
    """Restricted means of cut answers are those of the same answers without the cut."""
    lengths = np.random.default_rng(2).geometric(1 / 50, 4000).tolist()
    whole, cut = texts_of(lengths), texts_of(lengths, 80)
    horizon = horizon_of(cut)
    assert horizon == 40
    found = []
    for texts in (whole, cut):
        values = [np.full(text.length + 1, 0.5) for text in texts]
        found.append(states_of(texts, values, GAMMA, horizon))
    assert found[0].real.tolist() == found[1].real.tolist()
    assert (found[0].real == horizon).mean() > 0.3


def test_ranks_against_plain_counting() -> None:
    rng = np.random.default_rng(3)
    scores, positive = rng.integers(0, 6, 80).astype(float), rng.random(80) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(np.mean(pairs))
    assert auc(scores, np.ones(80, bool)) is None
    assert rank_correlation(np.array([1.0, 2, 3, 4]), np.array([1.0, 10, 100, 50])) == pytest.approx(0.8)
    assert rank_correlation(np.ones(5), np.arange(5.0)) is None


def test_served_answers_are_compared_with_unguided_ones_of_the_same_prompt() -> None:
    def answer(prompt: str, rule: str, target: int | None, tokens: int, logprob: float, finish: str = "stop") -> Answer:
        return Answer(prompt, rule, target, None, tokens, finish, logprob, 0.25)

    answers = [
        *(answer(prompt, "unguided", None, 80, logprob) for prompt in "ab" for logprob in (-0.5, -1.5)),
        answer("a", "guided", 40, 42, -1.5),
        answer("b", "guided", 40, 60, -1.25, "length"),
        answer("c", "guided", 40, 1000, -9.0),
    ]
    plain, guided = judge_served(answers)
    assert (plain["rule"], plain["deviation"]["mean"], plain["logprob_change"]["mean"]) == ("unguided", 1.0, 0.0)
    assert guided["answers"] == 2, "the prompt c has no unguided answer"
    assert guided["deviation"]["mean"] == pytest.approx((0.05 + 0.5) / 2)
    assert (guided["within_tenth"]["mean"], guided["ended"]["mean"]) == (0.5, 0.5)
    assert guided["logprob_change"]["mean"] == pytest.approx(-0.375)
    assert guided["lifebench"]["mean"] == pytest.approx(50 * (math.exp(-2 * 0.05) + math.exp(-2 * 0.5)))
    assert length_scores([20, 40], 40).tolist() == pytest.approx([100 * math.exp(-5 * 0.5), 100])
    low, high = (guided["deviation"][name] for name in ("low", "high"))
    assert (low, high) == (pytest.approx(0.05), pytest.approx(0.5))


@pytest.mark.slow
@pytest.mark.parametrize("plots", [True, False])
def test_a_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plots: bool):
    lenvm = make_lenvm_checkpoint(tmp_path / "lenvm", "qwen3", num_hidden_layers=1)
    data, out = write_dataset(tmp_path / "data", lenvm, cut=0.2), tmp_path / "out"
    out.mkdir()
    row = {"prompt_id": "p02", "rule": "unguided", "target": None, "tokens": 5, "finish_reason": "stop", "error": None}
    rows = [row, row | {"rule": "guided", "target": 10}, row | {"rule": "guided", "target": 20, "error": "busy"}]
    (out / "served.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"prompt')
    if not plots:
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["evaluate", "--data", str(data), "--lenvm", str(lenvm), "--out", str(out)]) == 0
    done = capsys.readouterr()
    report = json.loads((out / "report.json").read_text())
    assert report["offline"]["horizon"] == 15
    assert [(row["target"], row["rule"]) for row in report["served"]] == [(10, "unguided"), (10, "guided")]
    assert "names no gamma; 0.997" in done.err
    assert ("report.png" in done.err) == plots == (out / "report.png").exists()
    assert "8 answers to 4 prompts" in done.out
    assert "coverage" not in report["offline"]
    again = ["evaluate", "--data", str(data), "--lenvm", str(lenvm), "--out", str(out), "--calibrate"]
    assert main(again) == 0
    facts = json.loads((lenvm / "lenvm.json").read_text())
    assert (facts["gamma"], facts["metrics"]["texts"]) == (0.997, 8)
    calibration = calibration_of(lenvm)
    assert calibration is not None
    assert set(calibration.log_ratio) >= {"0.05", "0.95"}
    answers = [text.tokens[text.start :].tolist() for text in read_dataset(data, load_config(lenvm)).texts("validation")]
    decoded = [len(Tokenizer.from_file(str(lenvm / "tokenizer.json")).decode([id])) for text in answers for id in text]
    assert unit_tokens_of(lenvm)["characters"] == pytest.approx(len(decoded) / sum(decoded), rel=0.25)
    (lenvm / "lenvm.json").write_text(json.dumps(facts | {"unit_tokens": {"words": -1}}))
    with pytest.raises(ModelError, match="unit_tokens"):
        unit_tokens_of(lenvm)
    assert json.loads((out / "report.json").read_text())["offline"]["coverage"]["0.9"]["share"]["mean"] > 0.5
    assert main([*again, "--split", "validation"]) == 1


def test_a_length_model_of_another_tokeniser_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = make_checkpoint(tmp_path / "init", "qwen3")
    data = write_dataset(tmp_path / "data", init)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["tokenizer"][0]["ids"].reverse()
    (data / "manifest.json").write_text(json.dumps(manifest))
    lenvm = make_lenvm_checkpoint(tmp_path / "lenvm", "qwen3", num_hidden_layers=1)
    assert main(["evaluate", "--data", str(data), "--lenvm", str(lenvm), "--out", str(tmp_path / "out")]) == 1
    assert "has another tokeniser" in capsys.readouterr().err
    (lenvm / "lenvm_adapter.safetensors").touch()
    assert main(["evaluate", "--data", str(data), "--lenvm", str(lenvm), "--out", str(tmp_path / "out")]) == 1
    assert "with --init" in capsys.readouterr().err
