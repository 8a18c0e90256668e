"""The scenario: one TOML file. Every value can also be given on the command line."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from loadgen.arrivals import Arrivals, Closed, Constant, Poisson, Ramp, Stage, Stages, Trace
from loadgen.data import Data
from loadgen.distributions import Empirical, LogNormal, Uniform
from loadgen.errors import LoadError, reason_of
from loadgen.objectives import Objective
from loadgen.workloads import AnyWorkload, Score

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
        """Check the URL. Raises :class:`ValueError`, which msgspec reports with the key's path."""
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
        """Check the values. Raises :class:`ValueError`, which msgspec reports with the key's path."""
        if self.warmup_s >= self.duration_s:
            raise ValueError("`warmup_s` is not less than `duration_s`; shorten it")
        titles = [workload.title for workload in self.workloads]
        if len(set(titles)) < len(titles):
            raise ValueError("two `workloads` have the same name; give each a `name` of its own")
        for text in self.objectives:
            Objective.parse(text)


def load(file: Path | None, settings: Sequence[str] = ()) -> Scenario:
    """Load the scenario in ``file``, or the default, and apply ``KEY=VALUE`` settings in order. Raises :class:`LoadError`."""
    document = _read(file) if file is not None else {"arrivals": {"kind": "poisson", "rate": 1.0}, "workloads": [{"kind": "score"}]}
    for setting in settings:
        _set(document, setting)
    if file is not None:
        _locate_files(document, file.parent)
    _add_duration(document)
    try:
        return msgspec.convert(document, Scenario, strict=True)
    except msgspec.ValidationError as error:
        where = f"{file}: " if file is not None else ""
        raise LoadError(where + _located(str(error), document)) from None


def _locate_files(document: dict[str, Any], folder: Path) -> None:
    """Make the paths of a trace and of data relative to the scenario's folder."""
    workloads = document.get("workloads")
    entries = [entry.get("data") for entry in workloads if isinstance(entry, dict)] if isinstance(workloads, list) else []
    for place in (document.get("arrivals"), *entries):
        if isinstance(place, dict) and isinstance(place.get("file"), str):
            place["file"] = str(folder / place["file"])


def _add_duration(document: dict[str, Any]) -> None:
    """Set the duration to that of all stages, unless it is given."""
    arrivals = document.get("arrivals")
    if isinstance(arrivals, dict) and arrivals.get("kind") == "stages" and "duration_s" not in document:
        with suppress(KeyError, TypeError):  # the conversion reports what is wrong
            document["duration_s"] = float(sum(stage["seconds"] for stage in arrivals["stages"]))


def as_settings(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario as plain values with all defaults, for the records."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(scenario))
    return plain


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"cannot read {file}: {reason_of(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{file} is not TOML: {error}") from None


_STEP = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+)\])?")


def _set(document: dict[str, Any], setting: str) -> None:
    """Apply a setting such as ``arrivals.rate=20`` or ``workloads[0].items=5``. A value that is not TOML is a string."""
    key, equals, text = setting.partition("=")
    steps = [_STEP.fullmatch(step.strip()) for step in key.split(".")]
    if not equals or not all(steps):
        raise LoadError(f"--set {setting}: write it as KEY=VALUE, such as arrivals.rate=20 or workloads[0].items=5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    place: Any = document
    for last, step in zip((*[False] * (len(steps) - 1), True), steps, strict=True):
        assert step is not None
        place = _enter(place, step[1], step[2], value if last else None, setting)


def _enter(place: Any, name: str, index: str | None, value: Any, setting: str) -> Any:
    """Follow one step of a key, create what is missing, and store ``value`` unless it is None."""
    if not isinstance(place, dict):
        raise LoadError(f"--set {setting}: there is nothing named {name} within a plain value")
    if index is None:
        if name == "kind" and value is not None and place.get(name) != value:
            place.clear()  # fields of the other kind do not apply to this one
        if value is not None:
            place[name] = value
        return place.setdefault(name, {})
    entries = place.setdefault(name, [])
    if not isinstance(entries, list) or int(index) > len(entries):
        raise LoadError(f"--set {setting}: {name} has no [{index}]; count from 0")
    if int(index) == len(entries):
        entries.append({})
    if value is not None:
        entries[int(index)] = value
    return entries[int(index)]


_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_KINDS: dict[str, type[msgspec.Struct]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (*get_args(AnyWorkload), Poisson, Constant, Ramp, Stages, Trace, Closed, Uniform, LogNormal, Empirical)
}


def _located(message: str, document: dict[str, Any]) -> str:
    """Convert msgspec's message to one that starts with the key and ends with the remedy."""
    found = _AT.search(message)
    path, what = (found["path"], message[: found.start()]) if found else ("", message)
    unknown = _UNKNOWN.search(what)
    if unknown is not None:
        return _unknown_key(path, unknown["name"], document)
    subject = f"`{path}`: " if path else ""
    missing = re.search(r"missing required field `(.+?)`", what)
    if missing:
        return f"{subject}`{missing[1]}` is missing; add it"
    if what.startswith("Invalid value '"):
        known = ", ".join(sorted(name for name in _KINDS if _fits(_KINDS[name], path)))
        return f"{subject}{what[0].lower()}{what[1:]}; known: {known}"
    return f"{subject}{what[:1].lower()}{what[1:]}"


def _unknown_key(path: str, name: str, document: dict[str, Any]) -> str:
    """Return the message for an unknown key."""
    plain: dict[str, type[msgspec.Struct]] = {"": Scenario, "target": Target, "data": Data, "stages": Stage}
    kind = plain.get(path.rpartition(".")[2].partition("[")[0]) or _KINDS[_at(document, path)["kind"]]
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    near = difflib.get_close_matches(name, known, 1)
    remedy = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
    return f"`{path + '.' if path else ''}{name}` is not a setting; {remedy}"


def _at(document: Any, path: str) -> Any:
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        document = document[int(index)] if index else document[name]
    return document


def _fits(kind: type[msgspec.Struct], path: str) -> bool:
    """Whether ``kind`` can stand at ``path``, whose last part may be the key ``kind`` itself."""
    room = {"arrivals": get_args(Arrivals)}.get(path.removesuffix(".kind"))
    if room is None:
        inside = re.fullmatch(r"workloads\[\d+\](\.kind)?", path)
        room = get_args(AnyWorkload) if inside else (Uniform, LogNormal, Empirical)
    return kind in room
