"""The scenario: one TOML file. Every value can also be given on the command line.

``__post_init__`` of the parts of a scenario raises :class:`ValueError`, which msgspec reports with the path of the key.
"""

from __future__ import annotations

import difflib
import operator
import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec

from yardstick_llm.loadgen.arrivals import Arrivals, Poisson, Stage
from yardstick_llm.loadgen.content import Data, Empirical, LogNormal, Uniform
from yardstick_llm.loadgen.errors import LoadError, reason_of
from yardstick_llm.loadgen.workloads import AnyWorkload, Score

if TYPE_CHECKING:
    from yardstick_llm.loadgen.records import Record

TIMES = ("latency", "ttft", "tpot", "itl", "lag")
"""Times with percentiles; ``p99`` alone means the latency. ``itl``: gaps between pieces of a stream."""
RATES = ("requests_per_s", "items_per_s", "tokens_per_s", "goodput")
COUNTS = ("requests", "failures", "failure_rate", "cache_hit_rate")

_FORM = re.compile(
    r"\s*(?P<measure>[a-z_0-9.]+)\s*(?P<relation><=|>=|==|<|>)\s*(?P<bound>[0-9.]+(e-?[0-9]+)?)\s*(?P<unit>ms|s|%|)\s*"
)
_TIME = re.compile(rf"(?:(?P<of>{'|'.join(TIMES)})_)?(?P<what>p[0-9]+(\.[0-9]+)?|max|mean)")
_RELATIONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}
_UNITS = {"ms": 0.001, "s": 1.0, "%": 0.01, "": 1.0}


@dataclass(frozen=True)
class Objective:
    """A condition that a run must meet: ``p99 <= 500ms``, ``failures == 0``, ``items_per_s >= 1000``."""

    text: str
    measure: str
    """Key in a summary, such as ``latency_p99`` or ``failures``."""
    of: str | None
    """The time whose percentile, maximum or mean is compared; None for rates and counts."""
    relation: str
    bound: float
    """Bound in seconds, or a plain number."""

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse an objective. Raises :class:`ValueError` with a message for its author."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"the objective {text!r} is not like `p99 <= 500ms` or `failures == 0`")
        measure, unit = found["measure"], found["unit"]
        time = _TIME.fullmatch(measure)
        if time is None and measure not in RATES + COUNTS:
            known = ", ".join(("p50 … p99.9, max, mean", *(f"{name}_p99" for name in TIMES[1:]), *RATES, *COUNTS))
            raise ValueError(f"the objective {text!r} names no measure; known: {known}")
        if (time is not None) != (unit in ("ms", "s")):
            raise ValueError(f"the objective {text!r} needs " + ("a unit, ms or s" if time else "no unit of time"))
        if time is not None and time["what"][0] == "p" and not 0 < float(time["what"][1:]) <= 100:
            raise ValueError(f"the objective {text!r} has a percentile that is not above 0 and at most 100")
        of = (time["of"] or "latency") if time is not None else None
        name = f"{of}_{time['what']}" if time is not None else measure
        return cls(text, name, of, found["relation"], float(found["bound"]) * _UNITS[unit])

    def met(self, value: float | None) -> bool:
        """Whether a run with this value meets the objective; a missing value does not."""
        return value is not None and bool(_RELATIONS[self.relation](value, self.bound))

    def allows(self, record: Record) -> bool:
        """Whether a single request stays within the bound on its latency, TTFT or TPOT."""
        if self.of not in ("latency", "ttft", "tpot") or self.relation not in ("<", "<="):
            return True
        value: float | None = getattr(record, self.of)
        return value is None or self.met(value)


Seconds = Annotated[float, msgspec.Meta(gt=0, le=10_000_000)]


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server. The API key is not part of a scenario: see ``--api-key-file``."""

    url: str = "http://127.0.0.1:8000"
    """Base URL, without `/v1`."""
    model: str | None = None
    """Name of the model; optional if only one is served."""
    timeout_s: Seconds = 60.0
    """Time after which a request counts as failed, in seconds."""
    keep_alive: bool = True
    """False: a new connection for each request, so that a Service spreads them over gateways that start during the run."""
    cache: bool = True
    """False: every request sends `Cache-Control: no-cache`, so that no result comes from the result cache."""
    metrics: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """URLs of Prometheus metrics of gateways and engines, which are read during the run for the report. With `dns+http://` in place
    of `http://`, the page of each address of the host name is read."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", self.url):
            raise ValueError("`url` is not like http://host:port, without a user name, `?` and `#`")
        if self.url.rstrip("/").endswith("/v1"):
            raise ValueError("`url` ends in /v1, which is added to it; leave that out")
        if not all(re.fullmatch(r"((dns\+)?http|https)://[^/?#@\s]+/[^#\s]*", url) for url in self.metrics):
            raise ValueError("`metrics` has a URL that is not like http://host:port/metrics, without a user name")


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run. The default is the standard scoring workload at one request per second."""

    name: str = "load"
    seed: int = 0
    """Seed of all random choices: equal seeds give equal requests at equal times."""
    duration_s: Seconds = 30.0
    """Duration of arrivals in seconds, of all stages by default; the run ends when all requests have ended."""
    warmup_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Requests due before this time, in seconds, are sent and recorded, but left out of the report."""
    target: Target = Target()
    arrivals: Arrivals = Poisson(rate=1.0)
    workloads: Annotated[tuple[AnyWorkload, ...], msgspec.Meta(min_length=1)] = (Score(),)
    """Kinds of requests; each request is drawn from them by weight."""
    objectives: tuple[str, ...] = ()
    """Conditions that the run must meet, such as `p99 <= 500ms`; docs/load.md lists the measures."""

    def __post_init__(self) -> None:
        if self.warmup_s >= self.duration_s:
            raise ValueError("`warmup_s` is not less than `duration_s`; shorten it")
        titles = [workload.title for workload in self.workloads]
        if len(set(titles)) < len(titles):
            raise ValueError("two `workloads` have the same name; give each a `name` of its own")
        for text in self.objectives:
            Objective.parse(text)


def load(file: Path | None, settings: Sequence[str] = ()) -> Scenario:
    """Load the scenario in ``file``, or the default, and apply ``KEY=VALUE`` settings in order. Raises :class:`LoadError`."""
    document: dict[str, Any] = {"arrivals": {"kind": "poisson", "rate": 1.0}, "workloads": [{"kind": "score"}]}
    if file is not None:
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise LoadError(f"cannot read {file}: {reason_of(error)}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise LoadError(f"{file} is not TOML: {error}") from None
    for setting in settings:
        _set(document, setting)
    arrivals, workloads = document.get("arrivals"), document.get("workloads")
    if file is not None:  # a trace and data are relative to the scenario's folder
        entries = [entry.get("data") for entry in workloads if isinstance(entry, dict)] if isinstance(workloads, list) else []
        for place in (arrivals, *entries):
            if isinstance(place, dict) and isinstance(place.get("file"), str):
                place["file"] = str(file.parent / place["file"])
    if isinstance(arrivals, dict) and arrivals.get("kind") == "stages" and "duration_s" not in document:
        with suppress(KeyError, TypeError):  # the conversion reports what is wrong
            document["duration_s"] = float(sum(stage["seconds"] for stage in arrivals["stages"]))
    try:
        return msgspec.convert(document, Scenario, strict=True)
    except msgspec.ValidationError as error:
        where = f"{file}: " if file is not None else ""
        raise LoadError(where + _located(str(error), document)) from None


def as_settings(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario as plain values with all defaults, for the records."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(scenario))
    return plain


def _set(document: dict[str, Any], setting: str) -> None:
    """Apply a setting such as ``arrivals.rate=20`` or ``workloads[0].items=5``. A value that is not TOML is a string."""
    key, equals, text = setting.partition("=")
    steps = [re.fullmatch(r"([A-Za-z_]\w*)(?:\[(\d+)\])?", step.strip()) for step in key.split(".")]
    if not equals or not all(steps):
        raise LoadError(f"--set {setting}: write it as KEY=VALUE, such as arrivals.rate=20 or workloads[0].items=5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    keys = [part if index == 0 else int(part) for step in steps if step for index, part in enumerate(step.groups()) if part]
    place: Any = document
    for number, (name, following) in enumerate(zip(keys, [*keys[1:], None], strict=True)):
        if isinstance(name, int):
            if not isinstance(place, list) or name > len(place):
                raise LoadError(f"--set {setting}: {keys[number - 1]} has no [{name}]; count from 0")
            if name == len(place):
                place.append({})
        elif not isinstance(place, dict):
            raise LoadError(f"--set {setting}: there is nothing named {name} within a plain value")
        elif following is None and name == "kind" and place.get(name) != value:
            place.clear()  # fields of the other kind do not apply to this one
        elif following is not None:
            place.setdefault(name, [] if isinstance(following, int) else {})
        if following is None:
            place[name] = value
        else:
            place = place[name]


def _located(message: str, document: dict[str, Any]) -> str:
    """Convert msgspec's message to one that starts with the key and ends with the remedy."""
    found = re.search(r" - at `\$\.?(?P<path>[^`]*)`$", message)
    path, what = (found["path"], message[: found.start()]) if found else ("", message)
    subject, what = f"`{path}`: " if path else "", what[:1].lower() + what[1:]
    if unknown := re.search(r"unknown field `(.*?)`", what):
        place: Any = document
        for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
            place = place[int(index)] if index else place[name]
        kinds = structs_at(path)
        kind = next((kind for kind in kinds if kind.__struct_config__.tag == place.get("kind")), kinds[0])
        known = [field.encode_name for field in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(unknown[1], known, 1)
        remedy = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
        return f"`{path + '.' if path else ''}{unknown[1]}` is not a setting; {remedy}"
    if missing := re.search(r"missing required field `(.+?)`", what):
        return f"{subject}`{missing[1]}` is missing; add it"
    if what.startswith("invalid value '"):
        tags = sorted(str(kind.__struct_config__.tag) for kind in structs_at(path.removesuffix(".kind")))
        return f"{subject}{what}; known: {', '.join(tags)}"
    return f"{subject}{what}"


def structs_at(path: str) -> tuple[type[msgspec.Struct], ...]:
    """Return what can stand at ``path`` of a scenario, such as ``workloads[0].items``."""
    match re.sub(r"\[\d+\]", "", path).split("."):
        case [""]:
            return (Scenario,)
        case ["target"]:
            return (Target,)
        case ["arrivals"]:
            return get_args(Arrivals)
        case ["arrivals", "stages"]:
            return (Stage,)
        case ["workloads"]:
            return get_args(AnyWorkload)
        case ["workloads", "data"]:
            return (Data,)
    return (Uniform, LogNormal, Empirical)
