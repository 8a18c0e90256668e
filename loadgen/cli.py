"""``yardstick load``: the subcommands run, search, report and compare."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from yardstick_llm.loadgen import records
from yardstick_llm.loadgen import report as reports
from yardstick_llm.loadgen import search as searches
from yardstick_llm.loadgen.arrivals import Share
from yardstick_llm.loadgen.errors import LoadError
from yardstick_llm.loadgen.scenario import Scenario, load
from yardstick_llm.loadgen.statistics import Results, evaluate

KEY_VARIABLES = ["YARDSTICK_LOAD_KEY", "YARDSTICK_API_KEY"]

app = typer.Typer(
    name="yardstick load",
    help="Run a load test against a server and report the results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

INTERRUPTED = 130
"""Exit code of a run that a signal ends."""


def main() -> None:
    """Run a subcommand. An error prints one line and exits with code 2; an objective that is not met gives exit code 1."""
    try:
        app(prog_name="yardstick load")
    except LoadError as error:
        print(f"yardstick load: {error}", file=sys.stderr)
        sys.exit(2)


ScenarioFile = Annotated[Path | None, typer.Argument(help="TOML file; without it, the standard scoring workload.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A value of the scenario, such as arrivals.rate=20; repeat."),
]
Url = Annotated[str | None, typer.Option(help="URL of the gateway; the same as --set target.url=…")]
Model = Annotated[str | None, typer.Option(help="The same as --set target.model=…")]
Duration = Annotated[float | None, typer.Option(help="Seconds; the same as --set duration_s=…")]
Seed = Annotated[int | None, typer.Option(help="The same as --set seed=…")]
Objectives = Annotated[
    list[str] | None, typer.Option("--objective", help="Replaces the scenario's objectives, such as 'p99 <= 500ms'; repeat.")
]
ApiKey = Annotated[str | None, typer.Option(envvar=KEY_VARIABLES, help="API key, if the gateway needs one.")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File that has the key in its first line.")]


@app.command()
def run(
    scenario: ScenarioFile = None,
    settings: Settings = None,
    url: Url = None,
    model: Model = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second; the same as --set arrivals.rate=…")] = None,
    stages: Annotated[
        str | None, typer.Option(metavar="RATE:TIME,…", help="Rates in turn, such as 10:30s,50:2m,10:30s, in place of --rate.")
    ] = None,
    duration: Duration = None,
    seed: Seed = None,
    objectives: Objectives = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the records and the reports.")] = None,
    worker: Annotated[str, typer.Option(help="INDEX/COUNT: this worker's share of the load; the first index is 0.")] = "0/1",
    together: Annotated[Path | None, typer.Option(help="Folder that all workers share: start when all are ready.")] = None,
    log_records: Annotated[bool, typer.Option("--log-records", help="Also print the records, for `report -`.")] = False,
) -> None:
    """Send the scenario's requests; exit code 1 if an objective is not met, and 130 if a signal ends it."""
    from yardstick_llm.loadgen.runner import run as send

    flags = {"target.url": url, "target.model": model, "arrivals.rate": rate, "duration_s": duration, "seed": seed}
    plan = load(scenario, [*_stages(stages), *(settings or ()), *_given(flags, objectives)])
    done = send(plan, _share(worker), _key(api_key, api_key_file), _command(), out, together)
    results = evaluate(done)
    if log_records:
        for line in records.to_log(done):
            print(line)
    reports.show(results)
    if out is not None:
        reports.write(results, out)
    raise typer.Exit(INTERRUPTED if done.interrupted else not results.passed)


@app.command()
def search(
    scenario: ScenarioFile = None,
    settings: Settings = None,
    url: Url = None,
    model: Model = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of each run; the same as --set duration_s=…")] = None,
    seed: Seed = None,
    objectives: Objectives = None,
    start: Annotated[float, typer.Option(help="First rate, in requests a second.")] = 1.0,
    most: Annotated[float, typer.Option(help="Highest rate that is tried.")] = 10_000.0,
    tolerance: Annotated[float, typer.Option(help="Largest relative gap between the rate and a rate that is too high.")] = 0.05,
    probes: Annotated[int, typer.Option(help="Most runs.")] = 20,
    limit: Annotated[float, typer.Option(help="Most seconds of all runs.")] = 1200.0,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result, and for each run's records and reports.")] = None,
) -> None:
    """Search for the highest rate that meets the objectives; exit code 1 if no rate does, and 130 if a signal ends the search."""
    from yardstick_llm.loadgen.runner import run as send

    plan, key = searches.Plan(start, most, tolerance, probes, limit), _key(api_key, api_key_file)
    flags = {"target.url": url, "target.model": model, "arrivals.rate": start, "duration_s": duration, "seed": seed}
    chosen = load(scenario, [*(settings or ()), *_given(flags, objectives)])

    def measure(changed: Scenario, number: int) -> Results:
        folder = out / f"run-{number:02}" if out is not None else None
        done = send(changed, Share(), key, _command(), folder)
        results = evaluate(done)
        if folder is not None:
            reports.write(results, folder)
        return results

    found = searches.search(chosen, plan, _command(), measure)
    searches.show(found)
    if out is not None:
        searches.write(found, out)
    raise typer.Exit(INTERRUPTED if found.reason == "interrupted" else found.rate is None)


@app.command()
def report(
    sources: Annotated[list[str], typer.Argument(help="Folders or files of records of one run's workers; - reads a log.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the merged records and the reports.")] = None,
) -> None:
    """Merge the workers of a run and report it again; exit code 1 if an objective is not met."""
    runs = records.from_log(sys.stdin) if sources == ["-"] else records.read([Path(source) for source in sources])
    results = evaluate(records.merge(runs))
    if out is not None:
        records.write(runs, out)
        reports.write(results, out)
    reports.show(results)
    raise typer.Exit(not results.passed)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder or file of records.")],
    second: Annotated[Path, typer.Argument(help="Folder or file of records.")],
) -> None:
    """Compare two runs."""
    one, other = [evaluate(records.merge(records.read([source]))) for source in (first, second)]
    reports.compare(one, other, (str(first), str(second)))


def _given(flags: Mapping[str, str | float | None], objectives: list[str] | None) -> list[str]:
    """Return the settings that flags stand for. A JSON string is a TOML string."""
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    return [*given, f"objectives={json.dumps(objectives)}"] if objectives else given


def _stages(text: str | None) -> list[str]:
    """Return settings for ``--stages``."""
    if text is None:
        return []
    found = [re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(s|m)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise LoadError(f"--stages {text}: write it as RATE:TIME,…, such as 10:30s,50:2m: requests a second, and s or m")
    pairs = [(float(one[1]), float(one[2]) * (60 if one[3] == "m" else 1)) for one in found if one]
    parts = ", ".join(f"{{ rate = {rate}, seconds = {seconds} }}" for rate, seconds in pairs)
    return ["arrivals.kind=stages", f"arrivals.stages=[{parts}]", f"duration_s={sum(seconds for _, seconds in pairs)}"]


def _share(text: str) -> Share:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise LoadError(f"--worker {text}: write it as INDEX/COUNT, the first of four being 0/4")
    return Share(int(found[1]), int(found[2]))


def _key(given: str | None, file: Path | None) -> str | None:
    """Return the API key; a key from a file takes precedence."""
    if file is not None:
        try:
            given = (file.read_text(encoding="utf-8").splitlines() or [""])[0].strip()
        except (OSError, UnicodeDecodeError):
            raise LoadError(f"--api-key-file {file} cannot be read; name a file that has the key in its first line") from None
    if given is not None and not re.fullmatch(r"[\x21-\x7e]*", given):
        raise LoadError("the API key has characters that no key has, such as spaces; check how it was copied")
    return given or None


def _command() -> str:
    """Return the command line for the records, without the key."""
    words = ["yardstick", "load", *sys.argv[1:]]
    hidden = ["***" if before == "--api-key" else word for before, word in zip(["", *words], words, strict=False)]
    return shlex.join(re.sub(r"^--api-key=.*", "--api-key=***", word) for word in hidden)
