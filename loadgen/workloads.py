"""Workloads: bodies of requests. Each body is encoded once and depends only on seed, worker and position in the schedule.

Content consists of 65,536 prepared pieces (token ids as decimal digits, or words of four letters), chosen by the bytes of a hash.
Every body differs, a repeated item has the same bytes again, and a body of 2,000 tokens takes a tenth of a millisecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Annotated, Any, Literal

import msgspec

from loadgen.arrivals import Share
from loadgen.distributions import Distribution, draw

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Input = Literal["tokens", "text"]
REMEMBERED = 10_000
"""Number of latest queries, and of latest items of one query, from which repeats are chosen."""


class Ask(msgspec.Struct, frozen=True):
    """One request, ready to be sent."""

    body: bytes
    items: int = 0
    """Number of items of a score request."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Common fields of all workloads."""

    weight: Weight = 1.0
    """Relative frequency of this workload."""
    name: str = ""
    """Name in the report; the kind by default."""
    extra: dict[str, Any] = {}
    """Fields that every body gets unchanged: `priority`, `temperature`, `custom_params` …"""

    @property
    def kind(self) -> str:
        """Kind of the workload: `score`, `chat` or `completions`."""
        return str(self.__struct_config__.tag)

    @property
    def title(self) -> str:
        """The name, or the kind if there is no name."""
        return self.name or self.kind


class Score(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="score"):
    """`POST /v1/score`. The default is the standard workload: 10 items of 180 tokens against a query of 120, all distinct."""

    query_length: Distribution = 120
    """Length of the query in tokens, or in words with `input = "text"`."""
    item_length: Distribution = 180
    items: Distribution = 10
    """Items per request."""
    input: Input = "tokens"
    vocab_size: Annotated[int, msgspec.Meta(ge=2, le=10_000_000)] = 1000
    """Token ids are below this number, which is at most the model's vocabulary size."""
    labels: tuple[str, ...] | None = None
    """Texts of one token each, in place of `label_token_ids`."""
    label_token_ids: tuple[int, ...] = (1, 2)
    apply_softmax: bool = False
    item_first: bool = False
    repeated_queries: Fraction = 0.0
    """Share of requests that use the query of an earlier request."""
    repeated_items: Fraction = 0.0
    """Share of items that an earlier request had; with the same query if that is repeated."""

    @property
    def label_count(self) -> int:
        """Number of scores per item."""
        return len(self.label_token_ids if self.labels is None else self.labels)

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        """Yield requests without end."""
        labels = {"labels": self.labels} if self.labels is not None else {"label_token_ids": self.label_token_ids}
        flags = {name: True for name in ("apply_softmax", "item_first") if getattr(self, name)}
        head = _object({"model": model} if model else {}, labels, flags, self.extra)
        write = content.ids(self.vocab_size) if self.input == "tokens" else content.words
        for query, items in _Repeats(self, content.rng):
            told = b",".join(write(f"item {item}", length) for item, length in items)
            yield Ask(b'%b"query":%b,"items":[%b]}' % (head, write(f"query {query[0]}", query[1]), told), len(items))


class Generation(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common fields of chat and completions."""

    max_tokens: Distribution = 64
    """Most tokens of the answer."""
    stream: bool = True
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Request the log-probabilities of the answer's tokens, and of this many others at each position."""
    length_guidance: dict[str, Any] | None = None
    """Length guidance: `{ target_length = 80 }` or `{ mode = "centered_exp", scale = -10.0 }`."""
    prompts: tuple[str, ...] = ()
    """Prompts to choose from; without them, prompts are random words."""
    prompt_length: Distribution = 32
    """Length in words, or in tokens with `input = "tokens"` where the kind supports it."""

    def common(self, content: Content, model: str | None) -> dict[str, Any]:
        """Return fields of one body; the seed makes the answer repeatable."""
        fields: dict[str, Any] = {"max_tokens": draw(self.max_tokens, content.rng), "seed": content.rng.getrandbits(31)}
        fields |= {"model": model} if model else {}
        fields |= {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        return fields | ({"length_guidance": self.length_guidance} if self.length_guidance is not None else {})

    def text(self, content: Content, place: int) -> bytes:
        """Return a prompt as JSON."""
        if self.prompts:
            return msgspec.json.encode(content.rng.choice(self.prompts))
        return content.words(f"prompt {place}", draw(self.prompt_length, content.rng))


class Chat(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="chat"):
    """`POST /v1/chat/completions`."""

    system: str | None = None
    """A system message before each prompt."""

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        """Yield requests without end."""
        logprobs = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        before = msgspec.json.encode({"role": "system", "content": self.system}) + b"," if self.system is not None else b""
        place = 0
        while True:
            head = _object(self.common(content, model), logprobs, self.extra)
            yield Ask(b'%b"messages":[%b{"role":"user","content":%b}]}' % (head, before, self.text(content, place)))
            place += 1


class Completions(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="completions"):
    """`POST /v1/completions`."""

    input: Input = "text"
    """Form of random prompts."""
    vocab_size: Annotated[int, msgspec.Meta(ge=2, le=10_000_000)] = 1000
    """Token ids are below this number, which is at most the model's vocabulary size."""

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        """Yield requests without end."""
        logprobs = {} if self.logprobs is None else {"logprobs": self.logprobs}
        write = content.ids(self.vocab_size)
        place = 0
        while True:
            head = _object(self.common(content, model), logprobs, self.extra)
            ids = self.input == "tokens" and not self.prompts
            length = draw(self.prompt_length, content.rng) if ids else 0
            yield Ask(b'%b"prompt":%b}' % (head, write(f"prompt {place}", length) if ids else self.text(content, place)))
            place += 1


AnyWorkload = Score | Chat | Completions
Writer = Callable[[str, int], bytes]


class Content:
    """Random content of one worker and one workload."""

    def __init__(self, seed: int, share: Share, workload: int) -> None:
        """``workload``: index of the workload in the scenario."""
        self.rng = share.seed(seed, f"workload {workload}")
        self._salt = f"{seed} {share.index} {workload}"

    def ids(self, vocab_size: int) -> Writer:
        """Return a function of a name and a length that writes that many token ids below ``vocab_size``, as a JSON list."""
        size = 1 << 16
        order = Random(vocab_size)
        table = [b"%d" % (index % vocab_size if vocab_size <= size else order.randrange(vocab_size)) for index in range(size)]

        def write(name: str, length: int) -> bytes:
            return b"[%b]" % b",".join(map(table.__getitem__, self._choices(name, length)))

        return write

    def words(self, name: str, length: int) -> bytes:
        """Return ``length`` words as a JSON string. It begins with a space, so that words stay whole if texts are joined."""
        return b'" %b"' % b" ".join(map(_WORDS.__getitem__, self._choices(name, length)))

    def _choices(self, name: str, length: int) -> memoryview:
        """Return [length] numbers below 65,536, as a function of the name."""
        digest = hashlib.shake_128(f"{self._salt} {name}".encode()).digest(2 * length)
        return memoryview(digest).cast("H")


Part = tuple[int, int]
"""A query or an item: its number, which determines its content, and its length."""


class _Repeats:
    """Chooses the query and the items of each request: new ones, or earlier ones."""

    def __init__(self, workload: Score, rng: Random) -> None:
        self._workload = workload
        self._rng = rng
        self._count = 0
        self._queries: list[Part] = []
        self._asked: dict[Part | None, list[Part]] = {}
        """Items by the query they were used with; by None if queries never repeat."""

    def __iter__(self) -> Iterator[tuple[Part, list[Part]]]:
        workload, rng = self._workload, self._rng
        while True:
            known = bool(self._queries) and rng.random() < workload.repeated_queries
            query = rng.choice(self._queries) if known else self._fresh(workload.query_length)
            if workload.repeated_queries and not known:
                self._queries.append(query)
                self._forget()
            asked = self._asked.setdefault(query if workload.repeated_queries else None, []) if workload.repeated_items else []
            yield query, self._items(asked)

    def _items(self, asked: list[Part]) -> list[Part]:
        """Return distinct items of one request; new ones are added to ``asked``."""
        rng, count = self._rng, draw(self._workload.items, self._rng)
        wanted = sum(rng.random() < self._workload.repeated_items for _ in range(count)) if asked else 0
        old = rng.sample(asked, min(len(asked), wanted))
        fresh = [self._fresh(self._workload.item_length) for _ in range(count - len(old))]
        items = old + fresh
        if old:
            rng.shuffle(items)
        if self._workload.repeated_items:
            asked += fresh
            if len(asked) > 2 * REMEMBERED:
                del asked[:REMEMBERED]
        return items

    def _fresh(self, length: Distribution) -> Part:
        self._count += 1
        return self._count, draw(length, self._rng)

    def _forget(self) -> None:
        """Keep only the latest queries and their items."""
        if len(self._queries) > 2 * REMEMBERED:
            for query in self._queries[:REMEMBERED]:
                self._asked.pop(query, None)
            del self._queries[:REMEMBERED]


def _object(*parts: dict[str, Any]) -> bytes:
    """Return a JSON object of all fields, without its closing brace, so that one more field can follow."""
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= part
    return msgspec.json.encode(fields)[:-1] + (b"," if fields else b"")


_CONSONANTS = "bcdfghjklmnprstv"
_VOWELS = ("a", "e", "i", "o", "u", "y", "ai", "ea", "ee", "ie", "oa", "oo", "ou", "ay", "ei", "oi")
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_WORDS = [(first + second).encode() for first in _SYLLABLES for second in _SYLLABLES]
