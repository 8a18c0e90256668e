"""Scenarios: what is wrong in one is an error that names the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from yardstick_llm.loadgen.arrivals import Closed, Constant, Poisson, Stage, Stages
from yardstick_llm.loadgen.cli import _stages
from yardstick_llm.loadgen.content import LogNormal
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.scenario import load
from yardstick_llm.loadgen.workloads import Chat, Score

FULL = """
name = "everything"
seed = 7
duration_s = 10
warmup_s = 1.5
objectives = ["p99 <= 500ms", "failures == 0"]

[target]
url = "https://gateway.example/base"
cache = false

[arrivals]
kind = "constant"
rate = 5

[[workloads]]
kind = "score"
weight = 2
items = { kind = "lognormal", median = 10, sigma = 0.5, max = 100 }

[[workloads]]
kind = "chat"
name = "short"
length_guidance = { target_length = 80 }
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "scenario.toml"
    file.write_text(text)
    return file


def test_settings_change_everything(tmp_path: Path) -> None:
    file = write(tmp_path, FULL)
    assert load(file).arrivals == Constant(rate=5)
    assert load(file).workloads[0].items == LogNormal(median=10, sigma=0.5, max=100)
    changed = load(file, ["arrivals.rate=9", "workloads[1].max_tokens=7", "target.model=ranker", "objectives=[]", "seed=8"])
    assert changed.arrivals == Constant(rate=9)
    assert changed.workloads[1].max_tokens == 7
    assert (changed.target.model, changed.objectives, changed.seed) == ("ranker", (), 8)
    assert load(file, ["arrivals.kind=closed", "arrivals.clients=4"]).arrivals == Closed(clients=4)
    assert load(file, ["arrivals.kind=poisson", "arrivals.rate=2"]).arrivals == Poisson(rate=2)
    added = load(None, ["workloads[1].kind=chat", "workloads[1].length_guidance.target_length=80"])
    assert added.workloads == (Score(), Chat(length_guidance={"target_length": 80}))


def test_stages_set_the_duration(tmp_path: Path) -> None:
    text = '[arrivals]\nkind = "stages"\nstages = [{ rate = 1, seconds = 50 }, { rate = 9, seconds = 7.5 }]\n'
    scenario = load(write(tmp_path, text))
    assert scenario.arrivals == Stages(stages=(Stage(rate=1, seconds=50), Stage(rate=9, seconds=7.5)))
    assert scenario.duration_s == 57.5
    assert load(write(tmp_path, text), ["duration_s=20"]).duration_s == 20
    assert load(write(tmp_path, text), ["warmup_s=50"]).warmup_s == 50
    assert load(None, _stages("10:30s, 0:1m,2.5:1.5s")) == load(
        None, ["arrivals.kind=stages", "arrivals.stages=[{rate=10, seconds=30}, {rate=0, seconds=60}, {rate=2.5, seconds=1.5}]"]
    )
    for wrong in ("10", "10:30", "10:30s,", "-1:5s", "nan:5s", "1:5h"):
        with pytest.raises(LoadError, match="write it as RATE:TIME"):
            _stages(wrong)
    with pytest.raises(LoadError, match=r"`arrivals\.stages"):
        load(None, _stages("1:0s"))


WRONG = [
    ("duration = 5", "`duration` is not a setting; did you mean `duration_s`?"),
    ("[arrivals]\nkind = 'poisson'\nrate = 1\nqps = 2", "`arrivals.qps` is not a setting; known here: rate"),
    (
        "[arrivals]\nkind = 'stages'\nstages = [{rate = 1, second = 2}]",
        "`arrivals.stages[0].second` is not a setting; did you mean",
    ),
    ("[arrivals]\nkind = 'stages'\nstages = []", "`arrivals.stages`"),
    ("[arrivals]\nkind = 'poisson'", "`arrivals`: `rate` is missing; add it"),
    ("[arrivals]\nrate = 1", "`arrivals`: `kind` is missing; add it"),
    ("[arrivals]\nkind = 'poison'\nrate = 1", "known: closed, constant, poisson, ramp, stages, trace"),
    ("[arrivals]\nkind = 'poisson'\nrate = 0", "`arrivals.rate`: expected `float` > 0"),
    ("[arrivals]\nkind = 'poisson'\nrate = nan", "`arrivals.rate`"),
    ("[arrivals]\nkind = 'poisson'\nrate = '5'", "`arrivals.rate`: expected `float`, got `str`"),
    (
        "[[workloads]]\nkind = 'rank'",
        "`workloads[0].kind`: invalid value 'rank'; known: chat, completions, embeddings, rerank, score",
    ),
    ("[[workloads]]\nkind = 'score'\nitems = 0", "`workloads[0].items`: expected `int` >= 1"),
    ("[[workloads]]\nkind = 'score'\nitems = {kind = 'uniform', min = 5, max = 2}", "`workloads[0].items`: `min` is above `max`"),
    ("[[workloads]]\nkind = 'score'\nitems = {kind = 'uniform', min = 5, max = 9, mean = 7}", "`workloads[0].items.mean`"),
    ("[[workloads]]\nkind = 'score'\nitems = {kind = 'empirical', values = [1], weights = [1, 2]}", "give one for each"),
    ("[[workloads]]\nkind = 'score'\n[[workloads]]\nkind = 'score'", "give each a `name`"),
    ("warmup_s = 30", "`warmup_s` is not less"),
    ("objectives = ['p99 < 5']", "needs a unit, ms or s"),
    ("objectives = ['failures < 5 ms']", "needs no unit of time"),
    ("objectives = ['speed > 5']", "names no measure; known: p50"),
    ("objectives = ['fast']", "is not like `p99 <= 500ms`"),
    ("objectives = ['p0 < 5ms']", "not above 0"),
    ("[target]\nurl = 'gateway:80'", "`target`: `url` is not like http://host:port"),
    ("[target]\nurl = 'http://me:secret@gateway'", "without a user name"),
    ("[target]\nurl = 'http://gateway/v1'", "ends in /v1"),
    ("= 5", "is not TOML"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(LoadError) as raised:
        load(file)
    assert says in str(raised.value)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
