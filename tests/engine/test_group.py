"""One model over the processes of two nodes, which are engines started on the command line; and strangers at the port of node 0."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.test_distributed import GENERATE, SCORE, SETTINGS, answers, drawn, logprobs
from tests.processes import Pod, free_port, wait_until
from yardstick_llm.engine import wire
from yardstick_llm.engine.models.files import ModelError
from yardstick_llm.engine.runner.distributed import group
from yardstick_llm.engine.runner.distributed.group import LENGTH_BYTES, Hello, Nodes, Refused, Welcome, check_group, greet
from yardstick_llm.engine.settings import EngineSettings

TOKEN = "secret-of-the-engines"
LOST_SECONDS, START_SECONDS = 20, 200
"""More than it takes to end and to start on a busy machine."""


class Group:
    """Two nodes."""

    def __init__(self, model: Path, folder: Path) -> None:
        (folder / "token").write_text(f"{TOKEN}\n")
        self.model = model
        self.port = free_port()
        self.processes = 2
        """On both nodes together."""
        self.options = ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{self.port}"]
        self.options += ["--token-file", str(folder / "token"), "--threads", "1"]
        self.options += [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self.pods: list[Pod] = []

    def start(self, rank: int, model: Path | None = None) -> Pod:
        pod = Pod(model or self.model, *self.options, "--tensor-parallel", str(self.processes), "--node-rank", str(rank))
        pod.client.headers["authorization"] = f"Bearer {TOKEN}"
        self.pods.append(pod)
        return pod


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("group"), "qwen3", num_key_value_heads=4)


@pytest.fixture
def nodes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nodes = Group(model, tmp_path)
    yield nodes
    for pod in nodes.pods:
        pod.close()


def node_up(pod: Pod) -> bool:
    return 'yardstick_engine_node_up{nnodes="2",node_rank="' in (text := pod.client.get("/metrics").text) and '"} 1.0' in text


def ready(pod: Pod) -> Pod:
    wait_until(pod._ready, START_SECONDS, pause=0.1)
    return pod


def readiness(pod: Pod) -> str:
    try:
        return pod.client.get("/readyz").text
    except httpx.TransportError:
        return ""


def check_scores(pod: Pod, alone: dict[str, list[wire.Reply]]) -> None:
    status, scored = pod.ask("/score", SCORE)
    assert status == 200
    torch.testing.assert_close(scored.rows, alone["s"][0].rows, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_give_the_numbers_of_one_and_end_and_start_together(nodes: Group, model: Path) -> None:
    alone, nodes.processes = answers(model), 4  # nodes may have several
    second = nodes.start(1)  # in any order
    wait_until(lambda: readiness(second).startswith("Node 1 waits for node 0 at 127.0.0.1"), START_SECONDS, pause=0.1)
    first = nodes.start(0)
    wait_until(lambda: strangers_are_closed(nodes.port), START_SECONDS, pause=0.5)
    ready(first)
    ready(second)
    assert node_up(first)
    assert node_up(second)
    assert strangers_are_closed(nodes.port)
    check_scores(first, alone)
    generated = first.stream(GENERATE)
    assert [drawn(generated, index) for index in (0, 1)] == [drawn(alone["g"], index) for index in (0, 1)]
    torch.testing.assert_close(logprobs(generated), logprobs(alone["g"]), rtol=0, atol=1e-5)
    assert second.client.post("/score", content=wire.encode(SCORE)).status_code == 404

    os.kill(second.process.pid, signal.SIGKILL)
    assert first.process.wait(LOST_SECONDS) == 1
    assert any("node 1 is lost" in line for line in first.process.stderr.read().splitlines())
    nodes.processes = 2
    second = nodes.start(1)
    first = ready(nodes.start(0))
    check_scores(first, alone)

    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: second.client.get("/readyz").status_code == 503, LOST_SECONDS)
    assert not node_up(second)
    first = ready(nodes.start(0))
    check_scores(first, alone)

    reader, replies = wire.FrameReader(), []
    message = wire.Generate("long", [5, 6], wire.Sampling(max_tokens=60, ignore_eos=True))
    with first.client.stream("POST", "/generate", content=wire.encode(message)) as response:
        for chunk in response.iter_raw():
            if not replies:
                second.process.terminate()  # the engine drains
            replies += reader.feed(chunk)
    assert [reply.finish for reply in replies if reply.finish] == ["length"]
    assert (first.process.wait(LOST_SECONDS), second.process.wait(LOST_SECONDS)) == (0, 0)


@pytest.mark.slow
def test_nodes_with_other_files_do_not_compute_together(nodes: Group, tmp_path: Path) -> None:
    first = nodes.start(0)
    second = nodes.start(1, model=make_checkpoint(tmp_path / "other", "qwen3", num_key_value_heads=4, rope_theta=5000.0))
    assert (first.process.wait(START_SECONDS), second.process.wait(START_SECONDS)) == (1, 1)
    line = "The files of the model are not those of node 0; give all nodes the same --model and --revision."
    assert second.process.stderr.read().splitlines()[-1] == f"engine: {line}"
    assert first.process.stderr.read().splitlines()[-1] == f"engine: Node 1: {line}"


SETTING = EngineSettings(
    model="m", name="m", tensor_parallel=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:1", dist_token_file="t"
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"node_rank": 2}, "--node-rank is 2 and --nnodes is 2; nodes have the numbers 0 to 1"),
        ({"nnodes": 1}, "--node-rank is 1 and --nnodes is 1"),
        ({"tensor_parallel": 3}, "--tensor-parallel is 3 and --nnodes is 2; give --tensor-parallel the number of processes on all"),
        ({"dist_init_addr": None}, "--dist-init-addr is None, but must be HOST:PORT"),
        ({"dist_init_addr": "[::1]"}, "must be HOST:PORT"),
        ({"dist_init_addr": "engine-0:99999"}, "must be HOST:PORT"),
        ({"dist_token_file": None}, "--nnodes needs --token-file"),
    ],
)
def test_options_that_do_not_go_together(change: dict[str, object], problem: str) -> None:
    check_group(SETTING)
    with pytest.raises(ModelError, match=problem):
        check_group(msgspec.structs.replace(SETTING, **change))


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    """Of node 1 of a group whose node 0 listens."""
    (tmp_path / "token").write_text(f"{TOKEN}\nolder")
    address = f"127.0.0.1:{free_port()}"
    settings = msgspec.structs.replace(SETTING, dist_init_addr=address, dist_token_file=str(tmp_path / "token"))
    Nodes(msgspec.structs.replace(settings, node_rank=0), "digest", 9)
    return settings


async def ask(settings: EngineSettings, *, to_store: bool = False) -> tuple[Welcome | Refused, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*group.address_of(settings))
    try:
        return await greet(reader, writer, settings, to_store=to_store), writer
    except OSError:
        writer.close()
        raise


def strangers_are_closed(port: int) -> bool:
    """Whether node 0 closes connections that send too much, nonsense, or a hello without the token; false before it listens."""
    hello = bytes(group._MAC_BYTES) + msgspec.msgpack.encode(Hello(bytes(32), group.code_digest(), 2, 1, 2))
    for message in (
        (1 << 40).to_bytes(LENGTH_BYTES, "little"),
        b"GET / HTTP/1.1\r\n\r\n",
        framed(hello),
        framed(b""),
        framed(b"x" * 4096),
    ):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
                stranger.sendall(message)
                while stranger.recv(1 << 16):
                    pass
        except ConnectionRefusedError:
            return False
        except ConnectionResetError:  # it had not read all
            pass
    return True


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nnodes": 3}, "--nnodes is 3 on node 1 and 2 on node 0; give all nodes the same."),
        ({"tensor_parallel": 4}, "--tensor-parallel is 4 on node 1 and 2 on node 0; give all nodes the same."),
        ({"node_rank": 0}, "--node-rank is 0, and must be 1 to 1."),
    ],
)
async def test_nodes_of_another_group_are_refused(settings: EngineSettings, change: dict[str, object], reason: str) -> None:
    answer, writer = await ask(msgspec.structs.replace(settings, **change))
    writer.close()
    assert answer == Refused(reason)


async def test_other_code_is_refused(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "code_digest", lambda: "other")
    answer, writer = await ask(settings)
    writer.close()
    assert isinstance(answer, Refused)
    assert answer.reason.startswith("Node 1 runs other code (other) than node 0 (")


async def test_strangers_do_no_harm(settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even many that say nothing: places for them become free again."""
    monkeypatch.setattr(group, "HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(group, "MAX_HANDSHAKES", 3)
    port = group.address_of(settings).port
    assert await asyncio.to_thread(strangers_are_closed, port)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
    for reader, writer in silent:
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
    (tmp_path / "wrong").write_text("wrong")
    with pytest.raises(OSError, match="it closed the connection; it may have another token"):
        await ask(msgspec.structs.replace(settings, dist_token_file=str(tmp_path / "wrong")))
    (tmp_path / "wrong").write_text("older")  # one of the tokens of node 0, which answers with the same
    answer, writer = await ask(msgspec.structs.replace(settings, dist_token_file=str(tmp_path / "wrong")))
    assert isinstance(answer, Welcome)
    assert answer.fingerprint == "digest"
    second, other = await ask(settings)
    assert second == Refused("There is a node 1 already; give each node its own --node-rank.")
    for each in (writer, other):
        each.close()


async def test_a_false_node_0_gets_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    heard = bytearray()

    async def false(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(bytes(32)))
        heard.extend(await group.read_frame(reader))
        writer.write(framed(bytes(32) + msgspec.msgpack.encode(Welcome(SETTING, ""))))
        writer.close()

    async with await asyncio.start_server(false, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(OSError, match="it does not have the same token"):
            await ask(msgspec.structs.replace(SETTING, dist_init_addr=address, dist_token_file=str(tmp_path / "token")))
    assert TOKEN.encode() not in heard


async def test_node_0_waits_until_all_have_loaded(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that left before that may come again, and its failure is that of node 0."""
    monkeypatch.setattr(group, "REPORT_SECONDS", 0.05)
    address = f"127.0.0.1:{free_port()}"
    leader = Nodes(msgspec.structs.replace(settings, node_rank=0, dist_init_addr=address), "digest", 9)
    node = msgspec.structs.replace(settings, dist_init_addr=address)
    _, writer = await ask(node)
    writer.write(group.frame(group.Loaded()))
    writer.close()
    await writer.wait_closed()
    await asyncio.to_thread(wait_until, lambda: not leader._members)
    waiting = asyncio.create_task(asyncio.to_thread(leader.wait))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    _, writer = await ask(node)
    writer.write(group.frame(group.Failed("There is no config.json.")))
    with pytest.raises(ModelError, match=r"Node 1: There is no config\.json\."):
        await waiting
    writer.close()
