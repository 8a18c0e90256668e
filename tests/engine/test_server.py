"""The pod as a real process: its HTTP face, its loop process, and how both end."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.processes import Pod, alive, free_port, wait_until
from tests.warm import as_in_production
from yardstick_llm.engine import wire
from yardstick_llm.engine.server import channel
from yardstick_llm.engine.server.loop_client import WAITING
from yardstick_llm.engine.server.process import _listen


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tmp")


@pytest.fixture(scope="module")
def pod(qwen3: Path, temporary: Path) -> Iterator[Pod]:
    with as_in_production():
        pod = Pod(qwen3, "--name", "tiny", "--max-total-tokens", "4096", TMPDIR=str(temporary))
    yield pod.wait_ready()
    pod.close()


@pytest.fixture
def own_pod(qwen3: Path) -> Iterator[Pod]:
    pod = Pod(qwen3)
    yield pod.wait_ready()
    pod.close()


def test_idle_threads_of_the_loop_sleep(pod: Pod):
    if any(name in os.environ for name in WAITING):
        pytest.skip("the environment says how threads wait")
    variables = Path(f"/proc/{pod.loop_pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_WAIT_POLICY=PASSIVE" in variables


def test_a_pod_that_is_killed_leaves_no_temporary_file(pod: Pod, temporary: Path):
    assert pod.ask("/score", wire.Score("a", [5], [[7]], wire.Labels([1])))[0] == 200
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_messages_of_the_loop_arrive_in_any_division(size: int):
    bodies = b"", b"a", b"b" * 100, b"c" * 300_000
    times = math.nan, 0.0, 12.5, math.nan
    stream = b"".join(
        channel.header_of(body, math.nan if at is None else at) + body for body, at in zip(bodies, times, strict=True)
    )
    unpacker = channel.Unpacker()
    found = [message for begin in range(0, len(stream), size) for message in unpacker.feed(stream[begin : begin + size])]
    assert found == [*zip(bodies, (None, 0.0, 12.5, None), strict=True)]


def test_info_and_tokenizer(pod: Pod, qwen3: Path):
    info = pod.read("/info", wire.Info)
    assert (info.model, info.vocab_size, info.max_context, info.eos_token_ids) == ("tiny", 320, 2048, [2])
    assert info.limits.max_slots == 4096
    files = pod.read("/tokenizer", wire.TokenizerFiles)
    assert files.tokenizer_json == (qwen3 / "tokenizer.json").read_bytes()
    assert "<|im_start|>" in files.chat_template
    assert files.special_tokens["eos_token"] == "<|im_end|>"


def test_refusals_have_their_status(pod: Pod):
    assert pod.ask("/score", wire.Score("a", [5], [[7]], wire.Labels([])))[0] == 400
    assert pod.ask("/generate", wire.Generate("a", []))[1].code == "invalid"
    response = pod.client.post("/score", content=b"\xff not msgpack")
    assert response.status_code == 400
    assert isinstance(msgspec.msgpack.decode(response.content, type=wire.Reply), wire.Failed)
    assert pod.client.get("/nowhere").status_code == 404


FAULTY = {
    "another message": ("/score", wire.encode(wire.Generate("v", [5])), "The body is not a Score message"),
    "no id": ("/score", msgspec.msgpack.encode({"type": "score", "prefix": [5], "branches": [[7]]}), "`id`"),
    "a fraction for a token": (
        "/generate",
        msgspec.msgpack.encode({"type": "generate", "id": "x", "prompt": [5, 0.5]}),
        "The body is not a Generate message: Expected `int`, got `float` - at `$.prompt[1]`.",
    ),
    "cut short": ("/generate", wire.encode(wire.Generate("x", [5] * 100))[:-9], "The body is not a Generate message"),
}


@pytest.mark.parametrize(("path", "body", "problem"), FAULTY.values(), ids=FAULTY)
def test_a_faulty_body_is_refused_wherever_it_is_decoded(pod: Pod, path: str, body: bytes, problem: str):
    response = pod.client.post(path, content=body)
    failure = msgspec.msgpack.decode(response.content, type=wire.Failed)
    assert (response.status_code, failure.code) == (400, "invalid")
    assert problem in failure.message
    assert pod.ask("/score", wire.Score("x", [5, 6], [[7]], wire.Labels([1])))[0] == 200


def test_a_client_that_leaves_ends_its_work(pod: Pod):
    message = wire.Generate("leaver", [5, 6], wire.Sampling(max_tokens=2000, ignore_eos=True))
    with pod.client.stream("POST", "/generate", content=wire.encode(message)) as response:
        chunks = response.iter_raw()  # kept: when it goes, the connection is closed
        next(chunks)
        assert pod.read("/stats", wire.Stats).running == 1
    wait_until(lambda: pod.read("/stats", wire.Stats).running == 0)
    assert pod.read("/stats", wire.Stats).computed_tokens < 2000


def test_a_hedge_of_items_that_is_left_frees_its_slots(pod: Pod):
    """As the gateway sends it: nothing is kept, and the connection closes before the end."""
    items = [[i % 300, *range(3, 300)] for i in range(2000)]
    packed, lengths = b"".join(map(wire.pack_ids, items)), wire.pack_ids([*map(len, items)])
    message = wire.ScoreItems("hedge", packed, lengths, [5], wire.Labels([1]), caller=wire.Caller(keep_prefix=False))
    body, url = wire.encode(message), pod.client.base_url
    stats = lambda: pod.read("/stats", wire.Stats)  # noqa: E731
    before = stats()
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"POST /score HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: stats().computed_tokens > before.computed_tokens, 30)
    wait_until(lambda: not stats().running and not stats().waiting)
    after = stats()
    assert after.computed_tokens - before.computed_tokens < 500_000, "of 600,000"
    assert (after.scored_items, after.slots_items) == (before.scored_items, before.slots_items)
    assert after.slots_free + after.slots_cached == after.slots_total


def test_abort_ends_a_stream_with_its_last_word(pod: Pod):
    message = wire.Generate("aborted", [5, 6], wire.Sampling(max_tokens=2000, ignore_eos=True))
    reader, replies = wire.FrameReader(), []
    with pod.client.stream("POST", "/generate", content=wire.encode(message)) as response:
        for chunk in response.iter_raw():
            if not replies:
                assert httpx.post(f"{pod.client.base_url}/abort", content=wire.encode(wire.Abort("aborted"))).status_code == 204
            replies += reader.feed(chunk)
    assert replies[-1].finish == "abort"


def test_queue_time_counts_from_the_receipt_by_the_server(pod: Pod):
    """While the loop is stopped, it reads no message; the server does."""
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        os.kill(pod.loop_pid, signal.SIGSTOP)
        try:
            asked = threads.submit(pod.ask, "/score", wire.Score("q", [5, 6], [[7]], wire.Labels([1])))
            time.sleep(1)
        finally:
            os.kill(pod.loop_pid, signal.SIGCONT)
        status, scored = asked.result()
    assert status == 200
    assert 0.1 < scored.queue_seconds < time.monotonic() - began


@pytest.mark.slow
def test_a_killed_server_takes_its_loop_along(own_pod: Pod):
    loop_pid = own_pod.loop_pid
    own_pod.process.kill()
    wait_until(lambda: not alive(loop_pid))


@pytest.mark.slow
def test_a_lost_loop_ends_the_pod(own_pod: Pod):
    message = wire.Generate("g", [5, 6], wire.Sampling(max_tokens=2000, ignore_eos=True))
    reader, replies = wire.FrameReader(), []
    with own_pod.client.stream("POST", "/generate", content=wire.encode(message)) as response:
        for chunk in response.iter_raw():
            if not replies:
                os.kill(own_pod.loop_pid, signal.SIGKILL)
            replies += reader.feed(chunk)
    assert (replies[-1].code, replies[-1].retryable) == ("internal", True)
    assert own_pod.process.wait(40) == 1
    assert own_pod.process.stderr.read().splitlines()[-1] == "engine: The engine's loop ended with exit code -9."


@pytest.mark.slow
def test_a_missing_model_is_one_line():
    command = [sys.executable, "-m", "yardstick_llm.engine", "--model", "absent", "--port", str(free_port())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("engine: absent is not a directory")


def test_a_port_in_use_is_one_line(pod: Pod, qwen3: Path):
    second = Pod(qwen3, port=pod.port)
    assert second.process.wait(30) == 1
    assert second.process.stderr.read().startswith(f"engine: cannot listen on 127.0.0.1 port {pod.port}")
    second.close()


@pytest.mark.slow
def test_the_server_imports_no_torch():
    code = "import sys, engine.server.app, engine.server.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio leaves TCP_NODELAY off where a socket does not name its protocol."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[int] = loop.create_future()

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async with await loop.create_server(Connection, sock=_listen("127.0.0.1", 0, "--port")) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await accepted
        writer.close()
