"""The scenarios: each starts the load Job, changes the cluster under its load, and passes if every objective was met."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadgen.errors import LoadError
from loadgen.scenarios.cluster import Cluster, Kind

START_SECONDS = 120
READY_SECONDS = 300
END_SECONDS = 180
RECORDS = "yardstick-load-records "


class Settings(msgspec.Struct, frozen=True):
    """How a scenario runs."""

    rate: float = 2.0
    duration: int = 90
    settle: float = 10.0
    """Seconds of load before the change."""
    objectives: tuple[str, ...] = ("failures == 0",)
    keep_alive: bool = True
    image: str | None = None
    logs: Path | None = None
    """Folder for the log of the load."""
    grace_seconds: int | None = None
    """Grace of a deleted engine; None: that of the pod."""
    away: float = 30.0
    """Seconds without the Kubernetes API."""
    api_stop: str = ""
    api_start: str = ""


class Play:
    """One run of a scenario."""

    def __init__(self, name: str, cluster: Cluster, settings: Settings, pause: Callable[[float], None] = time.sleep) -> None:
        self.name, self.cluster, self.settings, self._pause = name, cluster, settings, pause

    def run(self) -> None:
        """Run it and print the report of the load. Raises :class:`LoadError` if it fails."""
        SCENARIOS[self.name](self)
        self._end_load()
        self.say("PASS")

    def delete_engine(self) -> None:
        """One of two engines is deleted and comes back."""
        self._scale_to(2)
        self._begin_load()
        pod = self.cluster.engine_pods[0]
        self.cluster.delete_pod(pod, self.settings.grace_seconds)
        self.say(f"deleted {pod}")
        self._pause(5)
        self._rolled_out("stateful_set", self.cluster.engines)
        self._acted("both engines are ready again")

    def scale_engines(self) -> None:
        """Two engines become four, and then one."""
        self._scale_to(2)
        self._begin_load()
        self._scale_to(4)
        self._acted("four engines are ready")
        self._pause(self.settings.settle)
        self._scale_to(1)
        self._acted("one engine is left")

    def rolling_restart(self) -> None:
        """Every engine and every gateway is replaced."""
        self._scale_to(2)
        self._begin_load()
        parts: list[tuple[Kind, str]] = [("stateful_set", self.cluster.engines), ("deployment", self.cluster.gateways)]
        for kind, name in parts:
            self.cluster.restart(kind, name)
            self._rolled_out(kind, name)
            self._acted(f"{name} has new pods")

    def api_away(self) -> None:
        """The Kubernetes API is stopped and started again; routing continues."""
        stop, start = self.settings.api_stop, self.settings.api_start
        if not (stop and start):
            raise LoadError("APISERVER_STOP and APISERVER_START are not set: commands that stop and start the API server")
        self._begin_load()
        try:
            _shell(stop)
            if self.cluster.answers():
                raise LoadError("the API still answers; APISERVER_STOP did not stop it")
            self.say("the API is away")
            self._pause(self.settings.away)
        finally:
            _shell(start)
        self._wait(self.cluster.answers, 60, "the API does not answer again")
        self._acted(f"the API was away for {self.settings.away:g} s and answers again")

    def say(self, text: str) -> None:
        """Report progress on standard error."""
        print(f"{time.strftime('%T')}  {self.name}: {text}", file=sys.stderr, flush=True)

    def _scale_to(self, count: int) -> None:
        self.say(f"scaling {self.cluster.engines} to {count}")
        self.cluster.scale(count)
        self._rolled_out("stateful_set", self.cluster.engines)

    def _rolled_out(self, kind: Kind, name: str) -> None:
        self._wait(lambda: self.cluster.is_rolled_out(kind, name), READY_SECONDS, f"{name} did not become ready")

    def _begin_load(self) -> None:
        settings = self.settings
        self.cluster.delete_load()
        self._wait(lambda: not self.cluster.has_load(), START_SECONDS, "the Job of an earlier run is not deleted")
        self.cluster.start_load(scenario_of(self.name, self.cluster.service, settings), settings.image)
        problem = "the load did not begin; look at: kubectl describe job/yardstick-load"
        self._wait(lambda: "sending to " in self.cluster.load_log(), START_SECONDS, problem)
        self.say(f"load is on: {settings.rate:g} requests/s for {settings.duration} s")
        self._pause(settings.settle)

    def _acted(self, text: str) -> None:
        """Check that the load still runs when a change is complete."""
        if self.cluster.load_state() != "running":
            raise LoadError(f"the load ended before this was complete: {text}; raise --duration")
        self.say(text)

    def _end_load(self) -> None:
        seconds = self.settings.duration + END_SECONDS
        self._wait(lambda: self.cluster.load_state() != "running", seconds, "the load did not end")
        log = self.cluster.load_log()
        if self.settings.logs is not None:
            self.settings.logs.mkdir(parents=True, exist_ok=True)
            (self.settings.logs / f"{self.name}.log").write_text(log, encoding="utf-8")
        print("".join(line for line in log.splitlines(keepends=True) if not line.startswith(RECORDS)), end="")
        if self.cluster.load_state() != "passed":
            raise LoadError("an objective was not met")

    def _wait(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        """Look once a second. Raises :class:`LoadError` with ``problem`` if ``condition`` does not hold in time."""
        for _ in range(int(seconds)):
            if condition():
                return
            self._pause(1)
        raise LoadError(f"{problem} within {seconds:g} s")


SCENARIOS: dict[str, Callable[[Play], None]] = {
    "delete-engine": Play.delete_engine,
    "scale-engines": Play.scale_engines,
    "rolling-restart": Play.rolling_restart,
    "apiserver-away": Play.api_away,
}


def scenario_of(name: str, service: str, settings: Settings) -> str:
    """The scenario of the load, in TOML."""
    return f"""\
name = {json.dumps(name)}
duration_s = {settings.duration}
objectives = {json.dumps(settings.objectives)}
[target]
url = "http://{service}"
timeout_s = 60
keep_alive = {json.dumps(settings.keep_alive)}
cache = false
[arrivals]
kind = "poisson"
rate = {settings.rate}
[[workloads]]
kind = "score"
"""


def _shell(command: str) -> None:
    subprocess.run(["bash", "-c", command], check=True)  # noqa: S603, S607 - the user's own command
