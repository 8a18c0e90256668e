"""The command line of the scenarios."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from loadgen.errors import LoadError
from loadgen.scenarios.play import SCENARIOS, Play, Settings


def main(
    name: Annotated[str, typer.Argument(help=", ".join(SCENARIOS))],
    namespace: Annotated[str | None, typer.Option(envvar="NAMESPACE", help="Of release and load; default: the context's.")] = None,
    release: Annotated[str, typer.Option(envvar="RELEASE", help="Name of the release.")] = "yardstick",
    pool: Annotated[str, typer.Option(envvar="POOL", help="Pool of engines.")] = "default",
    image: Annotated[str | None, typer.Option(envvar="IMAGE", help="NAME:TAG of the gateway's image.")] = None,
    rate: Annotated[float, typer.Option(envvar="RATE", help="Requests a second, 10 items each.")] = 2.0,
    duration: Annotated[int, typer.Option(envvar="DURATION", help="Seconds of load.")] = 90,
    settle: Annotated[float, typer.Option(envvar="SETTLE", help="Seconds of load before the change.")] = 10.0,
    objectives: Annotated[str, typer.Option(envvar="OBJECTIVES", help="A list in TOML.")] = '["failures == 0"]',
    keep_alive: Annotated[bool, typer.Option(envvar="KEEP_ALIVE", help="Whether connections are kept.")] = True,
    logs: Annotated[Path | None, typer.Option(envvar="LOGS", help="Folder for the log, for `yardstick load report -`.")] = None,
    grace: Annotated[int | None, typer.Option(envvar="GRACE", help="Grace of the deleted engine; 0 kills it.")] = None,
    away: Annotated[float, typer.Option(envvar="AWAY", help="Seconds without the Kubernetes API.")] = 30.0,
    apiserver_stop: Annotated[str, typer.Option(envvar="APISERVER_STOP", help="Command that stops the API.")] = "",
    apiserver_start: Annotated[str, typer.Option(envvar="APISERVER_START", help="Command that starts it.")] = "",
) -> None:
    """Change a release under load; the exit code is 0 if every objective was met."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    from loadgen.scenarios.cluster import Cluster

    if name not in SCENARIOS:
        raise LoadError(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    settings = Settings(
        rate=rate,
        duration=duration,
        settle=settle,
        objectives=_list(objectives),
        keep_alive=keep_alive,
        image=image,
        logs=logs,
        grace_seconds=grace,
        away=away,
        api_stop=apiserver_stop,
        api_start=apiserver_start,
    )
    play = Play(name, Cluster(namespace, release, pool), settings)
    try:
        play.run()
    except LoadError as error:
        play.say(f"FAIL: {error}")
    except ApiException as error:
        play.say(f"FAIL: Kubernetes answers {error.status} {error.reason}")
    except HTTPError as error:
        play.say(f"FAIL: Kubernetes does not answer: {error}")
    else:
        return
    raise typer.Exit(1)


def _list(text: str) -> tuple[str, ...]:
    try:
        return tuple(map(str, tomllib.loads(f"objectives = {text}")["objectives"]))
    except (tomllib.TOMLDecodeError, TypeError):
        raise LoadError(f'OBJECTIVES {text}: write a list in TOML, such as ["failures == 0"]') from None


if __name__ == "__main__":
    try:
        typer.run(main)
    except LoadError as error:
        print(f"loadgen.scenarios: {error}", file=sys.stderr)
        sys.exit(2)
