"""Grammars of several tenants: whose are compiled next, what they may cost, and which are kept."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import Pod
from yardstick_llm.engine import wire
from yardstick_llm.engine.loop.loop import Loop
from yardstick_llm.engine.server.loop_process import resident_bytes
from yardstick_llm.engine.structured.checker import Checker, load_vocabulary
from yardstick_llm.engine.structured.compiler import KeptGrammars, NoRoomError
from yardstick_llm.engine.structured.constraint import Constraint
from yardstick_llm.gateway.output.constraint import of_choice, of_json_schema, of_regex

MIB = 1 << 20
GOOD, HOSTILE = wire.Caller(tenant="good"), wire.Caller(tenant="hostile")
EASY = of_choice(["yes", "no"])
ENDLESS = of_json_schema({"type": "integer", "multipleOf": 400_000_007})


def costly(number: int) -> str:
    """A new grammar that takes tens of milliseconds."""
    return of_json_schema({"type": "array", "items": {"type": "integer", "multipleOf": 9001 + 2 * number}})


def asked(name: str, caller: wire.Caller, grammar: str, **fields: Any) -> wire.Generate:
    return wire.Generate(name, [5, 6, 7], sampling=wire.Sampling(max_tokens=2), grammar=grammar, caller=caller, **fields)


def ends(loop: Loop, until: str = "") -> dict[str, wire.Reply]:
    """The terminal replies until the loop is idle, or the request ``until`` has ended, in their order."""
    found: dict[str, wire.Reply] = {}
    began = time.monotonic()
    while not loop.idle and until not in found:
        assert time.monotonic() - began < 120
        for reply in loop.step():
            if isinstance(reply, wire.Failed) or (isinstance(reply, wire.Delta) and reply.finish is not None):
                found[reply.id] = reply
    return found


@pytest.mark.slow
def test_a_kept_grammar_waits_for_no_compilation(build: Callable[..., Loop]) -> None:
    loop = build()
    loop.submit(asked("first", GOOD, EASY))
    ends(loop)
    for number in range(12):
        loop.submit(asked(f"h{number}", HOSTILE, costly(number)))
    loop.submit(asked("known", GOOD, EASY))
    before = ends(loop, until="known")
    assert len(before) <= 2
    assert loop.stats.compiling >= 10
    assert all(isinstance(reply, wire.Delta) for reply in ends(loop).values())


@pytest.mark.slow
def test_new_grammars_take_turns_by_tenant(build: Callable[..., Loop]) -> None:
    loop = build()
    for number in range(7):
        loop.submit(asked(f"h{number}", HOSTILE, costly(number)))
    loop.submit(asked("new", GOOD, costly(100)))
    assert len(ends(loop, until="new")) <= 4
    loop.submit(wire.Abort("h6"))
    ends(loop)
    stats = loop.stats
    assert stats.compiling == 0
    assert stats.compiled_grammars in (7, 8)
    assert stats.grammar_bytes > 7 * 64 * 1024
    assert stats.compile_seconds > 0


@pytest.mark.slow
def test_a_refused_grammar_costs_bounded_time_and_no_memory(build: Callable[..., Loop]) -> None:
    loop = build()
    loop.submit(asked("first", GOOD, EASY))
    ends(loop)
    before = resident_bytes()
    loop.submit(asked("endless", HOSTILE, ENDLESS))
    loop.submit(asked("large", HOSTILE, of_json_schema({"type": "integer", "multipleOf": 180_007})))
    loop.submit(asked("good", GOOD, costly(200)))
    replies = ends(loop)
    assert isinstance(replies.pop("good"), wire.Delta)
    for reply in replies.values():
        assert isinstance(reply, wire.Failed)
        assert reply.code == "invalid"
        assert "too much time or memory" in reply.message
    assert resident_bytes() - before < 16 * MIB
    assert loop.stats.refused_grammars == 2
    assert loop.stats.grammar_bytes < 8 * MIB


def test_a_deadline_holds_while_a_grammar_waits(build: Callable[..., Loop]) -> None:
    loop = build()
    loop.submit(asked("busy", HOSTILE, ENDLESS))
    loop.submit(asked("late", HOSTILE, EASY, deadline=0.05))
    reply = ends(loop, until="late")["late"]
    assert isinstance(reply, wire.Failed)
    assert reply.code == "deadline"
    assert loop.stats.compiling == 1


@pytest.mark.slow
def test_requests_whose_grammar_waits_fill_the_queue_for_nobody_else(build: Callable[..., Loop]) -> None:
    loop = build(max_waiting=4)
    for number in range(6):
        loop.submit(asked(f"h{number}", HOSTILE, costly(number)))
    loop.submit(asked("other", GOOD, EASY))
    loop.submit(asked("plain", GOOD, ""))
    replies = ends(loop)
    assert [name for name, reply in replies.items() if isinstance(reply, wire.Failed) and reply.code == "overloaded"] == [
        "h4",
        "h5",
        "h3",
        "h2",
    ]
    assert isinstance(replies["other"], wire.Delta)
    assert isinstance(replies["plain"], wire.Delta)


@pytest.mark.parametrize("expected", [False, True])
def test_slow_masks_of_one_tenant_delay_no_other(
    build: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, expected: bool
) -> None:
    """``expected``: whether the engine knows already that the masks are slow, and computes them in the threads for slow ones."""
    loop = build()
    words = of_regex("[a-z]{9}")
    compute = Constraint.compute_mask

    def compute_slowly(self: Constraint) -> None:
        if self._use is not None and self._use._kept.tenant == "hostile":
            time.sleep(0.3)
        compute(self)
        if expected and self._use is not None:
            self.seconds = 0.5

    monkeypatch.setattr(Constraint, "compute_mask", compute_slowly)
    for name, caller in (("warm", GOOD), ("cold", HOSTILE)):
        loop.submit(asked(name, caller, words))
    ends(loop)
    for number in range(8):
        loop.submit(asked(f"h{number}", HOSTILE, words))
    while loop.stats.running < 8:
        loop.step()
    loop.submit(asked("good", GOOD, words))
    began = time.monotonic()
    assert len(ends(loop, until="good")) <= 3
    assert time.monotonic() - began < 0.6


class Start:
    """A state at the start of an output, without a grammar."""

    def fork(self, use: object) -> SimpleNamespace:
        return SimpleNamespace(use=use)


def kept(room: int = 100, most: int = 100) -> tuple[KeptGrammars, Callable[[str, str, int], None]]:
    grammars = KeptGrammars(room, most)

    def add(tenant: str, grammar: str, heap: int) -> None:
        grammars.reserve(tenant, heap)
        grammars.keep(tenant, grammar, Start(), heap, 1)

    return grammars, add


def test_a_tenant_with_many_grammars_evicts_its_own() -> None:
    for grammars, add in (kept(room=100), kept(most=10)):
        add("good", "a", 10)
        add("good", "b", 5)
        for number in range(300):
            add("hostile", f"h{number}", 8)
        assert grammars.heap <= 100
        assert grammars.fork("good", "a", 1)
        assert grammars.fork("good", "b", 1)
        assert grammars.fork("hostile", "h299", 1)
        assert not grammars.fork("hostile", "h0", 1)
        assert not grammars.fork("hostile", "a", 1)  # tenants share nothing


def test_grammars_in_use_stay_and_leave_room_for_others() -> None:
    grammars, add = kept(room=100)
    used = []
    with pytest.raises(NoRoomError):  # noqa: PT012
        for number in range(10):
            add("hostile", f"h{number}", 10)
            used.append(grammars.fork("hostile", f"h{number}", 2))
    assert len(used) == 5
    add("good", "a", 10)
    assert grammars.fork("good", "a", 1)
    assert grammars.fork("hostile", "h0", 1)
    used.clear()  # the requests have ended
    for number in range(20):
        add("hostile", f"n{number}", 10)
    assert grammars.heap == 100
    assert not grammars.fork("hostile", "h0", 1)


def test_a_checker_that_was_killed_is_replaced(qwen3: Path) -> None:
    checker = Checker(load_vocabulary((qwen3 / "tokenizer.json").read_bytes(), 320, [2]))
    found = checker.check(EASY)
    assert found.problem == ""
    assert 64 * 1024 < found.heap < MIB
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    checker._process.wait()
    assert checker.check(EASY).problem == ""
    checker.close()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_flood_of_new_grammars_delays_no_kept_one(tmp_path: Path) -> None:
    """A tenant asks for JSON of a schema that is kept, beside one that sends new schemas on eight connections."""
    model = make_checkpoint(tmp_path, "qwen3", hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    pod = Pod(model, "--name", "tiny", "--threads", "1").wait_ready()
    schema = of_json_schema({"type": "object", "properties": {"size": {"type": "integer", "minimum": 20}}, "required": ["size"]})
    sampling = wire.Sampling(max_tokens=24, seed=1)
    numbers = itertools.count()
    ended = threading.Event()

    def ask() -> float:
        began = time.monotonic()
        message = wire.Generate(f"g{next(numbers)}", [5, 6, 7], sampling=sampling, grammar=schema, caller=GOOD)
        assert all(isinstance(reply, wire.Delta) for reply in pod.stream(message))
        return time.monotonic() - began

    def flood() -> None:
        while not ended.is_set():
            number = next(numbers)
            pod.stream(asked(f"h{number}", HOSTILE, costly(number)))

    for _ in range(20):
        ask()
    quiet = [ask() for _ in range(100)]
    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    loud = [ask() for _ in range(100)]
    ended.set()
    for thread in threads:
        thread.join()
    assert pod.read("/stats", wire.Stats).compiled_grammars > 20
    pod.close()
    for part in (50, 95):  # the soak test checks P99 over minutes
        before, beside = (statistics.quantiles(seconds, n=100)[part - 1] for seconds in (quiet, loud))
        print(f"P{part}: {1000 * before:.0f} ms alone, {1000 * beside:.0f} ms beside the flood")
        assert beside <= 2 * before + 0.05
