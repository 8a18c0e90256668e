"""One API key looks for another key's prompts: in token counts, in cache hits and in the time of answers.

The gateway is a real process. The engine is a fake whose prefix cache has exact semantics (``tests/prefixes.py``) and whose work
takes a stated time per token, so that a hit and a miss differ by far more than the noise of a busy machine. One test asks a real
engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkpoints import make_checkpoint
from tests.fakes import FakeEngine, served
from tests.gateway.keys import by, entry, write
from tests.prefixes import PrefixCache
from tests.processes import Pod, Program, wait_until
from tests.redis import RedisServer

GROUPS = {"a": None, "b": None, "c": "search", "d": "search"}
"""Keys, whose secret is their name, and their trust group."""
SECONDS_PER_TOKEN = 0.002
TOKENS = 200
MISS = 0.75 * SECONDS_PER_TOKEN * TOKENS
"""Seconds that a prompt takes at least that is in no cache."""
VOCABULARY = range(10, 20)
"""Tokens that a secret may consist of."""

prompts = (random.Random(seed).choices(range(1, 300), k=TOKENS) for seed in count())


class Seen(NamedTuple):
    """The part of an answer that depends on caches."""

    cached_tokens: int
    hits: str | None
    seconds: float


class Server:
    def __init__(self, program: Program) -> None:
        self.program = program

    def ask(self, key: str | None, path: str, body: dict[str, Any], *cache_control: str) -> Seen:
        headers = [("cache-control", each) for each in cache_control]
        if key is not None:
            headers.append(("authorization", f"Bearer {key}"))
        began = time.perf_counter()
        answer = self.program.client.post(f"/v1/{path}", json=body, headers=headers)
        seconds = time.perf_counter() - began
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return Seen(usage["prompt_tokens_details"]["cached_tokens"], answer.headers.get("x-yardstick-cache"), seconds)


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(prefixes=PrefixCache(), says=[5])
    with served(engine) as engine.url:
        yield engine


@contextmanager
def gateway(engine: str, keys: Path | None, **environment: str) -> Iterator[Server]:
    flags = ["--api-keys-file", str(keys)] if keys else []
    with Program("gateway", "--engine", engine, *flags, **environment) as program:
        yield Server(program.wait_ready())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [entry(key) | {"name": f"name of {key}"} | ({"group": group} if group else {}) for key, group in GROUPS.items()]
    return write(tmp_path_factory.mktemp("keys") / "keys.json", *entries)


@pytest.fixture(scope="module")
def server(engine: FakeEngine, keys: Path) -> Iterator[Server]:
    with gateway(engine.url, keys) as running:
        yield running


@pytest.fixture(scope="module")
def shared_by_all(engine: FakeEngine, keys: Path) -> Iterator[Server]:
    with gateway(engine.url, keys, YARDSTICK_CACHE_ISOLATION="none") as running:
        yield running


@pytest.fixture(scope="module")
def keyless(engine: FakeEngine) -> Iterator[Server]:
    with gateway(engine.url, None) as running:
        yield running


@pytest.fixture
def slow(engine: FakeEngine) -> Iterator[FakeEngine]:
    engine.faults.seconds_per_token = SECONDS_PER_TOKEN
    yield engine
    engine.faults.seconds_per_token = 0.0


BODIES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "score": lambda tokens: {"query": tokens, "items": [[7], [8]], "label_token_ids": [1]},
    "completions": lambda tokens: {"prompt": tokens, "max_tokens": 1},
    "chat/completions": lambda tokens: {"messages": [{"role": "user", "content": " ".join(map(str, tokens))}], "max_tokens": 1},
    "length": lambda tokens: {"input": [[*tokens, 7], [*tokens, 8]]},
}
"""Each endpoint's request for a prompt."""
CACHED = ("score", "length")
"""Endpoints whose results are cached; each request above has two."""


@pytest.mark.parametrize("path", BODIES)
def test_counts_tell_of_ones_own_group_only(server: Server, path: str) -> None:
    body = BODIES[path](next(prompts))
    first = server.ask("a", path, body)
    assert first.cached_tokens <= 0.1 * TOKENS, "a chat template begins alike"
    assert server.ask("b", path, body)[:2] == server.ask("c", path, body)[:2]
    again = server.ask("a", path, body)
    assert again.cached_tokens >= TOKENS - 1
    assert again.hits == ("2/2" if path in CACHED else None)
    fresh = BODIES[path](next(prompts))
    expected = server.ask("b", path, fresh)
    for stranger in ("a", "c"):
        seen = server.ask(stranger, path, fresh)
        assert seen.cached_tokens <= max(expected.cached_tokens, 0.1 * TOKENS)
        assert seen.hits == ("0/2" if path in CACHED else None)
    friend = server.ask("d", path, fresh)
    assert friend.cached_tokens >= TOKENS - 1, "c and d are one group"
    assert friend.hits == ("2/2" if path in CACHED else None)


def least(ask: Callable[[], Seen]) -> float:
    """Seconds of the quickest of three answers, because a busy machine may delay one."""
    return min(ask().seconds for _ in range(3))


@pytest.mark.parametrize("path", BODIES)
def test_time_tells_of_ones_own_group_only(server: Server, slow: FakeEngine, path: str) -> None:
    body = BODIES[path](next(prompts))
    assert server.ask("a", path, body).seconds >= MISS
    assert server.ask("b", path, body).seconds >= MISS
    assert least(lambda: server.ask("a", path, body)) < MISS, "a hit is quicker, so the test can tell them apart"


def test_a_flight_serves_its_own_group_only(server: Server, slow: FakeEngine) -> None:
    """Equal scores requested at the same time take one computation for each group."""
    body = BODIES["score"](next(prompts))
    before = len(slow.scores)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(server.ask, "c", "score", body)
        wait_until(lambda: len(slow.scores) == before + 1)
        others = [pool.submit(server.ask, key, "score", body) for key in "abd"]
        seen = dict(zip("cabd", (future.result() for future in (first, *others)), strict=True))
    for stranger in "ab":
        assert seen[stranger].seconds >= MISS
        assert (seen[stranger].cached_tokens, seen[stranger].hits) == (0, "0/2")
    assert seen["d"].hits == "2/2"
    assert len(slow.scores) == before + 3


@pytest.mark.slow
def test_redis_shares_within_a_group_only(engine: FakeEngine, keys: Path) -> None:
    body = BODIES["score"](next(prompts))
    with RedisServer.start() as redis:
        settings = {"YARDSTICK_REDIS_URL": redis.url, "YARDSTICK_REDIS_SECONDS": "2"}
        with gateway(engine.url, keys, **settings) as one, gateway(engine.url, keys, **settings) as two, redis.client() as store:
            assert one.ask("c", "score", body).hits == "0/2"
            wait_until(lambda: len(store.keys("yardstick:score:*")) == 2)
            assert (two.ask("a", "score", body).hits, two.ask("b", "score", body).hits) == ("0/2", "0/2")
            assert two.ask("d", "score", body).hits == "2/2"
            wait_until(lambda: len(store.keys("yardstick:score:*")) == 6)


@pytest.mark.parametrize("path", BODIES)
def test_a_cache_salt_separates_requests_of_one_group(server: Server, keyless: Server, path: str) -> None:
    for asked, key in ((server, "a"), (keyless, None)):
        body = BODIES[path](next(prompts))
        least = 0.1 * TOKENS
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
            assert asked.ask(key, path, body | salt).cached_tokens <= least
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
            assert asked.ask(key, path, body | salt).cached_tokens >= TOKENS - 1


def test_no_cache_salt_leads_into_another_group(server: Server, engine: FakeEngine) -> None:
    """Neither what engines are told, nor anything derived from it, is a salt that works for a stranger."""
    tokens = next(prompts)
    body = BODIES["score"](tokens)
    server.ask("c", "score", body)
    server.ask("c", "score", body | {"cache_salt": "x"})
    salts = [score.caller.cache_salt for score in engine.scores[-2:]]
    for guess in (*salts, "search", "x", "name of c", "c", ""):
        if guess:
            assert server.ask("a", "score", body | {"cache_salt": guess})[:2] == (0, "0/2"), guess
    assert server.ask("a", "score", body)[:2] == (0, "0/2")


def test_engines_learn_no_names(server: Server, engine: FakeEngine) -> None:
    engine.scores.clear()
    for key in GROUPS:
        server.ask(key, "score", BODIES["score"](next(prompts)) | {"cache_salt": "of the client"})
    callers = [score.caller for score in engine.scores]
    assert len({caller.tenant for caller in callers}) == len({caller.cache_salt for caller in callers}) + 1 == 4
    assert not any(word in repr(callers) for word in ("search", "name of", "of the client"))


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        *((path, ["no-store"]) for path in BODIES),
        ("score", ["max-age=0, No-Store"]),
        ("chat/completions", ["max-age=0", "no-store"]),
    ],
    ids=str,
)
def test_no_store_leaves_nothing(server: Server, engine: FakeEngine, path: str, headers: list[str]) -> None:
    body = BODIES[path](next(prompts))
    for _ in range(2):
        seen = server.ask("a", path, body, *headers)
        assert (seen.cached_tokens, seen.hits) == (0, "0/2" if path in CACHED else None)
    after = server.ask("a", path, body)
    assert after.cached_tokens <= 0.1 * TOKENS
    assert after.hits == ("0/2" if path in CACHED else None)
    seen = server.ask("a", path, body, *headers)
    assert (seen.cached_tokens, seen.hits) == (0, "0/2" if path in CACHED else None), "nor does it use anything"


def recover(cached_tokens: Callable[[list[int]], int], known: list[int], length: int) -> list[int]:
    """The attack: tokens of somebody's prompt that begins with ``known``, one after the other. A guess is right if one token more
    than what is known is cached."""
    found: list[int] = []
    for _ in range(length):
        prompt = known + found
        right = [guess for guess in VOCABULARY if cached_tokens([*prompt, guess]) == len(prompt) + 1]
        if len(right) != 1:
            break
        found += right
    return found


ORACLES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "score": lambda tokens: {"query": tokens, "items": [[9]], "label_token_ids": [1]},
    "completions": lambda tokens: {"prompt": [*tokens, 9], "max_tokens": 1},
    "length": lambda tokens: {"input": [[*tokens, 9], [*tokens, 8]]},
}


def attacked(server: Server, path: str, attacker: str, victim: str, secret: list[int]) -> list[int]:
    """Return the tokens of ``secret`` that ``attacker`` finds out after ``victim`` has sent them."""
    make, known = ORACLES[path], next(prompts)[:20]
    server.ask(victim, "completions", {"prompt": [*known, *secret, 9, 9], "max_tokens": 1})
    if path == "length":  # the length model has a prefix cache of its own
        server.ask(victim, path, make([*known, *secret]))
    # "no-cache" because a hit in the cache of results has other counts
    return recover(lambda tokens: server.ask(attacker, path, make(tokens), "no-cache").cached_tokens, known, len(secret))


@pytest.mark.slow
@pytest.mark.parametrize("path", ORACLES)
def test_the_oracle_of_cached_tokens_recovers_nothing(server: Server, shared_by_all: Server, path: str) -> None:
    secret = random.Random(path).choices(VOCABULARY, k=3)
    assert attacked(shared_by_all, path, "a", "b", secret) == secret, "the attack works where caches are shared"
    assert attacked(server, path, "a", "b", secret) == []
    assert attacked(server, path, "d", "c", secret) == secret, "and within a trust group"


def register(server: Server, key: str, tokens: list[int]) -> None:
    client, headers = server.program.client, by(key)
    client.put(f"/v1/catalogues/of-{key}", json={"template": ["{item}", "{query}"]}, headers=headers).raise_for_status()
    item = [{"id": "item", "token_ids": tokens}]
    client.put(f"/v1/catalogues/of-{key}/items", json=item, headers=headers).raise_for_status()


def item_in_request(server: Server, key: str, tokens: list[int]) -> Seen:
    body = {"query": [9], "items": [tokens], "item_first": True, "label_token_ids": [1]}
    return server.ask(key, "score", body, "no-cache")


def registered_item(server: Server, key: str, tokens: list[int]) -> Seen:
    register(server, key, tokens)
    body = {"query": [9], "catalogue": f"of-{key}", "ids": ["item"], "label_token_ids": [1]}
    return server.ask(key, "score", body, "no-cache")


def warm(server: Server, key: str) -> None:
    """Have the engine compute the items of a catalogue of ``key``: the key scores them."""
    body = {"query": [8], "catalogue": f"of-{key}", "ids": ["item"], "label_token_ids": [1]}
    server.ask(key, "score", body, "no-cache")


Guess = Callable[[Server, str, list[int]], Seen]


def recovered(server: Server, guess: Guess, attacker: str, victim: str, secret: list[int]) -> list[int]:
    """Return the tokens of ``secret`` that ``attacker`` guesses of an item that ``victim`` has registered and warmed."""
    known = next(prompts)[:20]
    register(server, victim, [*known, *secret, 9])
    warm(server, victim)
    return recover(lambda tokens: guess(server, attacker, tokens).cached_tokens, known, len(secret))


@pytest.mark.slow
@pytest.mark.parametrize("guess", [item_in_request, registered_item])
def test_time_tells_of_items_of_ones_own_group_only(server: Server, slow: FakeEngine, guess: Guess) -> None:
    """Whether another key has warmed an item shows in no time of an answer, also if both register the same item."""
    own, friends = next(prompts), next(prompts)
    for tokens, victim, strangers, friend in ((own, "b", "ac", "b"), (friends, "c", "ab", "d")):
        register(server, victim, tokens)
        warm(server, victim)
        for stranger in strangers:
            assert guess(server, stranger, tokens).seconds >= MISS
        assert least(lambda key=friend, of=tokens: guess(server, key, of)) < MISS, (
            "a hit is quicker, so the test can tell them apart"
        )


@pytest.fixture(scope="module")
def real(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")
    with Pod(model, "--name", "tiny") as pod, gateway(pod.wait_ready().url, keys) as server:
        yield server


@pytest.mark.slow
def test_the_oracle_recovers_nothing_from_a_real_engine(real: Server) -> None:
    """Neither of a prompt nor of a catalogue's item. A key guesses the item in a request, and as an item of its own catalogue."""
    secret = random.Random(2).choices(VOCABULARY, k=2)

    def prompt(attacker: str, victim: str) -> list[int]:
        return attacked(real, "completions", attacker, victim, secret)

    def item(attacker: str, victim: str) -> list[int]:
        return recovered(real, item_in_request, attacker, victim, secret)

    def registered(attacker: str, victim: str) -> list[int]:
        return recovered(real, registered_item, attacker, victim, secret)

    for found in (prompt, item, registered):
        assert found("d", "c") == secret, "within a trust group it works"
        assert found("a", "b") == found("a", "c") == []
    body = BODIES["completions"](next(prompts)[:50])
    real.ask("a", "completions", body, "no-store")
    assert real.ask("a", "completions", body).cached_tokens == 0
