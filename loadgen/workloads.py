"""Workloads: bodies of requests. Each body is encoded once and depends only on seed, worker and position in the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Annotated, Any, Literal

import msgspec

from yardstick_llm.loadgen.content import Content, Data, Distribution, Row, Writer, draw, most

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
VocabSize = Annotated[int, msgspec.Meta(ge=2, le=10_000_000)]
Input = Literal["tokens", "text"]
MOST_TURNS = 100
REMEMBERED = 10_000
"""Number of latest queries, and of latest items of one query, from which repeats are chosen."""
Part = tuple[int, int]
"""A query or an item: its number, which determines its content, and its length."""


class Ask(msgspec.Struct, frozen=True):
    """One request, ready to be sent."""

    body: bytes
    items: int = 0
    """Number of items, documents or inputs."""
    later: tuple[bytes, ...] = ()
    """The user's further messages of a conversation, as JSON strings. ``body`` then ends with its messages."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Common fields of all workloads. ``asks`` of a kind yields requests without end."""

    weight: Weight = 1.0
    """Relative frequency of this workload."""
    name: str = ""
    """Name in the report; the kind by default."""
    extra: dict[str, Any] = {}
    """Fields that every body gets unchanged: `priority`, `temperature`, `custom_params` …"""
    data: Data | None = None
    """A file with the content of requests, instead of random content."""

    @property
    def kind(self) -> str:
        """Kind of the workload: `score`, `rerank`, `embeddings`, `chat` or `completions`."""
        return str(self.__struct_config__.tag)

    @property
    def title(self) -> str:
        """The name, or the kind if there is no name."""
        return self.name or self.kind


class Ranking(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common fields of score and rerank: a query, and items that are judged against it."""

    query_length: Distribution = 120
    """Length of the query in tokens, or in words if it is a text."""
    item_length: Distribution = 180
    items: Distribution = 10
    """Items per request."""
    repeated_queries: Fraction = 0.0
    """Share of requests that use the query of an earlier request."""
    repeated_items: Fraction = 0.0
    """Share of items that an earlier request had; with the same query if that is repeated."""

    def __post_init__(self) -> None:
        if self.data is not None and (self.repeated_queries or self.repeated_items):
            raise ValueError("`repeated_queries` and `repeated_items` do not go with `data`; repeat rows in the file")

    def parts(self, content: Content, write: Writer) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield the query as JSON, the items as JSON without brackets, and their number. ``write`` makes random content."""
        if self.data is not None:
            yield from content.rows(self.data, _query_and_items)
        for query, items in self._drawn(content.rng):
            written_items = b",".join(write(f"item {item}", length) for item, length in items)
            yield write(f"query {query[0]}", query[1]), written_items, len(items)

    def _drawn(self, rng: Random) -> Iterator[tuple[Part, list[Part]]]:
        """Yield the query and the distinct items of each request: new ones, or earlier ones."""
        numbers = count(1)
        queries: list[Part] = []
        asked: dict[Part | None, list[Part]] = {}
        """Items by the query they were used with; by None if queries never repeat."""
        while True:
            known = bool(queries) and rng.random() < self.repeated_queries
            query = rng.choice(queries) if known else (next(numbers), draw(self.query_length, rng))
            if self.repeated_queries and not known:
                queries.append(query)
                if len(queries) > 2 * REMEMBERED:
                    for forgotten in queries[:REMEMBERED]:
                        asked.pop(forgotten, None)
                    del queries[:REMEMBERED]
            before = asked.setdefault(query if self.repeated_queries else None, []) if self.repeated_items else []
            size = draw(self.items, rng)
            wanted = sum(rng.random() < self.repeated_items for _ in range(size)) if before else 0
            old = rng.sample(before, min(len(before), wanted))
            new = [(next(numbers), draw(self.item_length, rng)) for _ in range(size - len(old))]
            items = old + new
            if old:
                rng.shuffle(items)
            if self.repeated_items:
                before += new
                if len(before) > 2 * REMEMBERED:
                    del before[:REMEMBERED]
            yield query, items


def _query_and_items(row: Row) -> tuple[bytes, bytes, int]:
    if row.query is None or not row.items:
        raise ValueError("it has no `query` with `items`; add both")
    return msgspec.json.encode(row.query), msgspec.json.encode(row.items)[1:-1], len(row.items)


class Score(Ranking, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="score"):
    """`POST /v1/score`. The default is the standard workload: 10 items of 180 tokens against a query of 120, all distinct."""

    input: Input = "tokens"
    vocab_size: VocabSize = 1000
    """Token ids are below this number, which is at most the model's vocabulary size."""
    labels: tuple[str, ...] | None = None
    """Texts of one token each, in place of `label_token_ids`."""
    label_token_ids: tuple[int, ...] = (1, 2)
    apply_softmax: bool = False
    item_first: bool = False

    @property
    def label_count(self) -> int:
        """Number of scores per item."""
        return len(self.label_token_ids if self.labels is None else self.labels)

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        labels = {"labels": self.labels} if self.labels is not None else {"label_token_ids": self.label_token_ids}
        flags = {name: True for name in ("apply_softmax", "item_first") if getattr(self, name)}
        head = _object(_named(model), labels, flags, self.extra)
        write = content.ids(self.vocab_size) if self.input == "tokens" else content.words
        for query, items, size in self.parts(content, write):
            yield Ask(b'%b"query":%b,"items":[%b]}' % (head, query, items), size)


class Rerank(Ranking, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rerank"):
    """`POST /v1/rerank`."""

    top_n: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """Number of results; all documents by default."""

    def results(self, documents: int) -> int:
        """Return the number of results for this number of documents."""
        return documents if self.top_n is None else min(self.top_n, documents)

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        head = _object(_named(model), {} if self.top_n is None else {"top_n": self.top_n}, self.extra)
        for query, documents, size in self.parts(content, content.words):
            yield Ask(b'%b"query":%b,"documents":[%b]}' % (head, query, documents), size)


class Embeddings(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="embeddings"):
    """`POST /v1/embeddings`."""

    item_length: Distribution = 180
    items: Distribution = 1
    """Texts per request."""
    encoding_format: Literal["float", "base64"] = "base64"
    """Form of the answer; OpenAI's clients ask for base64."""

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        head = _object(_named(model), {"encoding_format": self.encoding_format}, self.extra)
        for items, size in self._texts(content):
            yield Ask(b'%b"input":[%b]}' % (head, items), size)

    def _texts(self, content: Content) -> Iterator[tuple[bytes, int]]:
        if self.data is not None:
            yield from content.rows(self.data, _texts_to_embed)
        numbers = count()
        while True:
            size = draw(self.items, content.rng)
            texts = (content.words(f"item {next(numbers)}", draw(self.item_length, content.rng)) for _ in range(size))
            yield b",".join(texts), size


def _texts_to_embed(row: Row) -> tuple[bytes, int]:
    texts = row.items or ([row.prompt] if row.prompt is not None else [])
    if not texts:
        raise ValueError("it has neither `items` nor `prompt`; add one")
    return msgspec.json.encode(texts)[1:-1], len(texts)


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

    def __post_init__(self) -> None:
        if self.data is not None and self.prompts:
            raise ValueError("`prompts` does not go with `data`; leave one out")

    def common(self, content: Content, model: str | None) -> dict[str, Any]:
        """Return fields of one body; the seed makes the answer repeatable."""
        fields: dict[str, Any] = {"max_tokens": draw(self.max_tokens, content.rng), "seed": content.rng.getrandbits(31)}
        fields |= _named(model)
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
    turns: Distribution = 1
    """Requests of one conversation; each carries the earlier messages and answers."""
    think_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """Pause between an answer and the next turn, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if most(self.turns) > MOST_TURNS:
            raise ValueError(f"`turns` is above {MOST_TURNS}; lower it")

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        """Yield the first requests of conversations, without end."""
        logprobs = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        before = _message("system", msgspec.json.encode(self.system)) + b"," if self.system is not None else b""
        for first, later in self._conversations(content):
            head = _object(self.common(content, model), logprobs, self.extra)
            yield Ask(b'%b"messages":[%b%b]}' % (head, before, first), later=later)

    def _conversations(self, content: Content) -> Iterator[tuple[bytes, tuple[bytes, ...]]]:
        """Yield the first messages as JSON without brackets, and the user's later messages."""
        if self.data is not None:
            whole = self.turns == 1 and self.data.format == "jsonl"
            for first, later in content.rows(self.data, _whole_conversation if whole else _conversation):
                yield first, later[: draw(self.turns, content.rng) - 1]
        place = 0
        while True:
            turns = draw(self.turns, content.rng)
            texts = [self.text(content, place + turn) for turn in range(turns)]
            yield _message("user", texts[0]), tuple(texts[1:])
            place += turns


def _whole_conversation(row: Row) -> tuple[bytes, tuple[bytes, ...]]:
    """Return all messages of a row as one request, without later texts."""
    return (msgspec.json.encode(row.messages)[1:-1], ()) if row.messages else _conversation(row)


def _conversation(row: Row) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the messages until the first of the user, and the user's later texts. Answers of the file are left out."""
    if not row.messages:
        if not isinstance(row.prompt, str):
            raise ValueError("it has neither `messages` nor `prompt` with a text; add one")
        return _message("user", msgspec.json.encode(row.prompt)), ()
    users = [place for place, each in enumerate(row.messages) if each.get("role") == "user"]
    if not users:
        raise ValueError("its `messages` have none of the role `user`; add one")
    later = tuple(msgspec.json.encode(row.messages[place].get("content")) for place in users[1:])
    return msgspec.json.encode(row.messages[: users[0] + 1])[1:-1], later


def follow_up(body: bytes, answer: str, next_text: bytes) -> bytes:
    """Return the body of the next turn: ``body`` with the answer to it and the user's next message, a JSON string."""
    return b"%b,%b,%b]}" % (body[:-2], _message("assistant", msgspec.json.encode(answer)), _message("user", next_text))


def _message(role: str, content: bytes) -> bytes:
    """Return one message. ``content``: a JSON string."""
    return b'{"role":"%b","content":%b}' % (role.encode(), content)


class Completions(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="completions"):
    """`POST /v1/completions`."""

    input: Input = "text"
    """Form of random prompts."""
    vocab_size: VocabSize = 1000
    """Token ids are below this number, which is at most the model's vocabulary size."""

    def asks(self, content: Content, model: str | None) -> Iterator[Ask]:
        logprobs = {} if self.logprobs is None else {"logprobs": self.logprobs}
        for prompt in self._prompts(content):
            yield Ask(b'%b"prompt":%b}' % (_object(self.common(content, model), logprobs, self.extra), prompt))

    def _prompts(self, content: Content) -> Iterator[bytes]:
        if self.data is not None:
            yield from content.rows(self.data, _prompt)
        write = content.ids(self.vocab_size)
        ids = self.input == "tokens" and not self.prompts
        for place in count():
            yield write(f"prompt {place}", draw(self.prompt_length, content.rng)) if ids else self.text(content, place)


def _prompt(row: Row) -> bytes:
    if not row.prompt:
        raise ValueError("it has no `prompt`; add it")
    return msgspec.json.encode(row.prompt)


AnyWorkload = Score | Rerank | Embeddings | Chat | Completions


def _named(model: str | None) -> dict[str, str]:
    return {"model": model} if model else {}


def _object(*parts: dict[str, Any]) -> bytes:
    """Return a JSON object of all fields, without its closing brace, so that one more field can follow."""
    fields = {name: value for part in parts for name, value in part.items()}
    return msgspec.json.encode(fields)[:-1] + (b"," if fields else b"")
