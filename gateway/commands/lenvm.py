"""``yardstick lenvm sample``: answers of a served model as token ids.

A line of an output names what it answers, so lines stand in any order, and a run adds those that are missing. The programs that
read them are in :mod:`engine.training`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import msgspec

from yardstick_llm.gateway.commands import CommandError, WrongUsage
from yardstick_llm.gateway.commands.client import Answer, Call, Report, Sender, Server, decoded
from yardstick_llm.gateway.commands.files import Row, open_source, replace_file
from yardstick_llm.gateway.commands.runner import Item, Output, RowError, Run, Task, accepted

MANIFEST, ANSWERS, TURNS = "manifest.json", "answers.jsonl", "turns.jsonl"
PROBES = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "  def f(x):\n\treturn x**2  # naïve\n",
    "Zürich, 北京, Привет, مرحبا, 🙂",
    "1234567890 3.14159 https://example.org/a?b=c&d",
)
"""Texts whose token ids tell tokenisers apart."""
CUT_WARNING, CUT_MOST = 0.2, 0.5
"""Shares of answers that ``max_tokens`` cut. Above the second, a length model learns more about the limit than about lengths."""
CUT_SURE = 200
"""Answers after which the share is known well enough to stop a run."""
STRAYS = 5
"""Most probable tokens that a stray token is drawn from: the default number of candidates of length guidance."""
BRANCHES = 8
"""Most branches of a state."""
TURN_TOKENS, TURN_WORDS = 256, 4
_WINDOW = 4
_FAILURES = 20
"""Failures without a success that end a run."""
NO_IDS = "the server returns no token ids; serve the model with Yardstick, or with a vLLM that knows `return_token_ids`"


class Prompt(NamedTuple):
    """What is asked."""

    id: str
    """Digest of its content, 16 hexadecimal digits."""
    content: str | list[dict[str, Any]]
    """A text to continue, or messages."""


class Settings(msgspec.Struct, frozen=True):
    """What changes the answers. A data set has one."""

    raw: bool
    """Prompts are continued as they are, without a chat template."""
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    stray: float
    stray_share: float
    validation_share: float
    test_share: float
    system: str = ""
    """A system message before each prompt that has none."""


class Probed(msgspec.Struct):
    """A text and its token ids."""

    text: str
    ids: list[int]


class Template(msgspec.Struct):
    """Tokens that the chat template puts before and after a user's first message."""

    before: list[int]
    after: list[int]


class Manifest(msgspec.Struct, kw_only=True):
    """What a data set was made with, and what it holds."""

    format: int = 1
    model: str
    fingerprint: str | None
    """``system_fingerprint`` of the server's answers."""
    tokenizer: list[Probed]
    template: Template | None
    settings: Settings
    prompts: int = 0
    samples: int = 0
    answers: int = 0
    cut: float = 0.0
    """Share of answers that ``max_tokens`` ended."""
    end_tokens: list[int] = []
    complete: bool = False


def read_prompts(path: Path, *, raw: bool) -> list[Prompt]:
    """Return the distinct prompts of a file, in order.

    A row has ``messages``, or a text in ``prompt`` or ``text``; in a .txt file, each line is a text. Raises :class:`CommandError`.
    """
    if path.suffix.lower() == ".txt":
        try:
            contents: list[Any] = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(f"cannot read {path}: {error}") from None
    else:
        source = open_source(path)
        names = [name for name in ("messages", "prompt", "text") if name in source.columns]
        if not names:
            raise WrongUsage(f"{path} has none of the columns messages, prompt and text; it has {', '.join(source.columns[:20])}")
        contents = [_content(row, names[0]) for row in source.rows(names[:1])]
    wrong = next((content for content in contents if isinstance(content, list) == raw and raw), None)
    if wrong is not None:
        raise WrongUsage("--raw continues texts, and this file has messages; leave --raw out, or give a column `prompt`")
    prompts = {_digest(content): content for content in contents}
    if not prompts:
        raise WrongUsage(f"{path} has no prompts")
    return [Prompt(id, content) for id, content in prompts.items()]


def _content(row: Row, name: str) -> str | list[dict[str, Any]]:
    value = row.fields.get(name)
    if row.problem is not None:
        raise WrongUsage(f"the prompts' row {row.number}: {row.problem}")
    if name != "messages":
        if not isinstance(value, str) or not value.strip():
            raise WrongUsage(f"the prompts' row {row.number} has no text in {name!r}")
        return value
    try:
        messages = msgspec.json.decode(value) if isinstance(value, str) else value
        messages = msgspec.convert(messages, list[dict[str, Any]])
    except ValueError:
        raise WrongUsage(f"the prompts' row {row.number} has no list of messages in {name!r}") from None
    while messages and messages[-1].get("role") == "assistant":  # data sets often have an answer, which is not the model's
        messages.pop()
    if not messages:
        raise WrongUsage(f"the prompts' row {row.number} has no message of a user")
    return messages


def _digest(content: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]


def split_of(prompt_id: str, settings: Settings) -> str:
    """Return ``train``, ``validation`` or ``test``. Samples of a prompt are in one split."""
    place = int(prompt_id[:8], 16) / 2**32
    if place < settings.test_share:
        return "test"
    return "validation" if place < settings.test_share + settings.validation_share else "train"


def seed_of(*parts: object) -> int:
    """Return a seed of 31 bits that is a function of ``parts``."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


class Choice(msgspec.Struct):
    """An answer to a prompt."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    text: str = ""
    logprobs: Any = None


class Answered(msgspec.Struct):
    """An answer of ``/v1/completions`` or ``/v1/chat/completions`` with ``return_token_ids``, in the form of vLLM."""

    choices: list[Choice]
    prompt_token_ids: list[int] | None = None
    """Of a chat."""
    system_fingerprint: str | None = None

    def ids(self) -> tuple[list[int], list[int]]:
        """Prompt and output of the first choice. Raises :class:`CommandError` for a server that returns none."""
        prompt = self.prompt_token_ids if self.choices[0].prompt_token_ids is None else self.choices[0].prompt_token_ids
        if prompt is None or self.choices[0].token_ids is None:
            raise CommandError(NO_IDS)
        return prompt, self.choices[0].token_ids


class Written(NamedTuple):
    """An answer, with the names that a line has."""

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str | None
    stray_positions: Sequence[int] = ()


@dataclass(kw_only=True)
class LineTask(Task):
    """Lines that name what they answer. The file of an earlier run says what is missing."""

    model: str
    seed: int
    done: set[Hashable] = field(default_factory=set)
    """Keys of the lines that did not fail."""
    failures: int = 0
    """Of this run."""
    last_problem: str = ""

    ordered: ClassVar[bool] = False

    def keeps(self, line: bytes, number: int, path: Path) -> bool:
        if not line.endswith(b"\n"):
            return False
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if fields["error"] is None:
                self.note(fields)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{path}, line {number}, is damaged ({type(error).__name__}: {error})"
            raise WrongUsage(f"{problem}; remove the line, and the same command computes it again") from None
        return True

    def note(self, fields: dict[str, Any]) -> None:
        """Count a line that did not fail. Raises KeyError, TypeError or ValueError if it is damaged."""
        self.done.add(self.key(fields))

    def noted(self, fields: dict[str, Any]) -> list[bytes]:
        """Count a line that did not fail, and return it."""
        line = {**fields, "error": None}
        self.note(line)
        return [encoded_line(line)]

    def key(self, fields: dict[str, Any]) -> Hashable:
        """Return what the line with ``fields`` answers."""
        raise NotImplementedError

    def item(self, row: Row) -> Item:
        return Item(row, row.fields)

    async def ask(self, sender: Sender, path: str, **fields: Any) -> Answered:
        """Return one answer with token ids. Raises :class:`~gateway.commands.runner.Refused`, and ValueError if it cannot be
        used."""
        body = {"model": self.model, "return_token_ids": True, **fields}
        return msgspec.json.decode((await accepted(Call(path, msgspec.json.encode(body)), sender)).content, type=Answered)

    def failure(self, row: Row, answer: Answer) -> bytes:
        self.failures += 1
        self.last_problem = answer.problem or ""
        if self.failures >= _FAILURES and not self.done:
            raise CommandError(f"the first {self.failures} requests failed: {answer.problem}")
        return encoded_line({**self.named(row.fields), "error": answer.problem})

    def named(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a line that say what it answers."""
        return fields

    def stops(self, answer: Answer) -> bool:
        return super().stops(answer) or answer.status == 404 or answer.param in ("model", "return_token_ids", "length_guidance")


def encoded_line(fields: dict[str, Any]) -> bytes:
    """Return a line of an output."""
    return msgspec.json.encode(fields) + b"\n"


def compute(task: LineTask, path: Path, rows: Sequence[dict[str, Any]], server: Server, concurrency: int, title: str) -> int:
    """Add to ``path`` the lines that it lacks of ``rows``, and those that failed once more. Return how many are still missing.

    ``rows``: the fields that name each line. Raises :class:`CommandError`.
    """
    output = Output(path, task)
    try:
        for attempt in range(2):
            missing = [fields for fields in rows if task.key(fields) not in task.done]
            if not missing:
                break
            total = output.rows + len(missing)
            with Report(title, total) as report:
                if output.rows:
                    report.say(f"{len(missing)} answers {'failed and are tried again' if attempt else 'are missing'}")
                sender = Sender(server, concurrency)
                given = (Row(number, fields, 64, number) for number, fields in enumerate(missing, start=1))
                asyncio.run(Run(task, sender, output, total, report).run(given, _WINDOW * concurrency))
    finally:
        output.close()
    return sum(task.key(fields) not in task.done for fields in rows)


@dataclass(kw_only=True)
class Sample(LineTask):
    """Answers of the model to prompts, some of them with stray tokens."""

    prompts: Mapping[str, Prompt]
    settings: Settings
    end_tokens: Counter[int] = field(default_factory=Counter)
    """Last tokens of the answers that ended by themselves."""
    cut: int = 0
    allow_cut: bool = False
    command: ClassVar[str] = "lenvm sample"

    @property
    def cut_share(self) -> float:
        """Share of the answers that ``max_tokens`` ended."""
        return self.cut / max(1, len(self.done))

    def key(self, fields: dict[str, Any]) -> Hashable:
        return fields["prompt_id"], fields["sample"]

    def note(self, fields: dict[str, Any]) -> None:
        super().note(fields)
        self.cut += fields["finish_reason"] != "stop"
        if fields["finish_reason"] == "stop" and fields["output_ids"]:
            self.end_tokens[fields["output_ids"][-1]] += 1

    def named(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "split": split_of(fields["prompt_id"], self.settings)}

    @property
    def drawn(self) -> dict[str, Any]:
        """How tokens are drawn, as fields of a request."""
        return {"temperature": self.settings.temperature, "top_p": self.settings.top_p}

    async def _begin(self, fields: dict[str, Any], sender: Sender, sample: int, max_tokens: int) -> Answered:
        """Answer the prompt from its beginning, with the seed of ``sample``."""
        prompt = self.prompts[fields["prompt_id"]]
        asked = {**self.drawn, "max_tokens": max_tokens, "seed": seed_of(self.seed, prompt.id, sample)}
        if self.settings.raw:
            return await self.ask(sender, "/v1/completions", prompt=prompt.content, **asked)
        messages = [{"role": "user", "content": prompt.content}] if isinstance(prompt.content, str) else prompt.content
        if self.settings.system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.settings.system}, *messages]
        return await self.ask(sender, "/v1/chat/completions", messages=messages, **asked)

    def is_stray(self, fields: dict[str, Any]) -> bool:
        """Whether an answer has stray tokens; the first of each prompt has none."""
        lot = Random(seed_of(self.seed, "stray", fields["prompt_id"], fields["sample"]))
        return self.settings.stray > 0 and fields["sample"] > 0 and lot.random() < self.settings.stray_share

    async def compute(self, items: Sequence[Item], sender: Sender) -> list[bytes]:
        fields = items[0].content
        if fields["sample"] < 0:
            written = await self._branched(fields, sender)
        elif self.is_stray(fields):
            written = await self._strayed(fields, sender)
        else:
            answered = await self._begin(fields, sender, fields["sample"], self.settings.max_tokens)
            written = Written(*answered.ids(), answered.choices[0].finish_reason)
        if written.finish_reason not in ("stop", "length"):
            raise RowError(f"finish_reason is {written.finish_reason!r}")
        lines = self.noted({**self.named(fields), **written._asdict()})
        if len(self.done) >= CUT_SURE:
            self.check_cut()
        return lines

    async def _branched(self, fields: dict[str, Any], sender: Sender) -> Written:
        """Continue the first answer of a prompt from a state in its middle, with one of the most probable tokens there.

        All branches of a prompt begin at one state; sample -1 has the most probable token, -2 the next one.
        """
        lot = Random(seed_of(self.seed, "branch", fields["prompt_id"]))
        place = int(math.exp(lot.random() * math.log(self.settings.max_tokens)))
        share = lot.random()
        trunk = await self._begin(fields, sender, 0, place)
        prompt, output = trunk.ids()
        # an answer that ended before is left in its middle
        output = output[: int(share * len(output))] if trunk.choices[0].finish_reason == "stop" else output[:-1]
        # an end token that is drawn would be told without log-probabilities
        ahead = {"max_tokens": 1, "logprobs": BRANCHES + 1, "return_tokens_as_token_ids": True, "ignore_eos": True}
        state = await self.ask(sender, "/v1/completions", prompt=prompt + output, seed=0, **self.drawn, **ahead)
        tops = state.choices[0].logprobs["top_logprobs"][0]
        ranked = sorted(tops, key=lambda name: (-tops[name], name))
        tokens = [token for name in ranked if (token := int(name.rpartition(":")[2])) not in self.end_tokens]
        head = [*output, tokens[min(-1 - fields["sample"], len(tokens) - 1)]] if tokens else output
        room = self.settings.max_tokens - len(head)
        if room <= 0:
            return Written(prompt, head, "length")
        seed = seed_of(self.seed, "branch", fields["prompt_id"], fields["sample"])
        end = await self.ask(sender, "/v1/completions", prompt=prompt + head, seed=seed, max_tokens=room, **self.drawn)
        choice = end.choices[0]
        return Written(prompt, head + (choice.token_ids or []), choice.finish_reason or "stop")

    async def _strayed(self, fields: dict[str, Any], sender: Sender) -> Written:
        """Continue an answer again and again after a token that is drawn uniformly from the most probable ones."""
        prompt, _ = (await self._begin(fields, sender, fields["sample"], 1)).ids()
        lot = Random(seed_of(self.seed, "tokens", fields["prompt_id"], fields["sample"]))
        output: list[int] = []
        strays: list[int] = []
        while True:
            gap = 1 + int(math.log(1 - lot.random()) / math.log(1 - self.settings.stray)) if self.settings.stray < 1 else 1
            room = self.settings.max_tokens - len(output)
            answered = await self.ask(
                sender,
                "/v1/completions",
                prompt=prompt + output,
                max_tokens=min(gap, room),
                **self.drawn,
                seed=lot.getrandbits(31),
                logprobs=STRAYS,
                return_tokens_as_token_ids=True,
            )
            choice = answered.choices[0]
            output += choice.token_ids or []
            if choice.finish_reason == "stop" or gap >= room or not choice.token_ids:
                return Written(prompt, output, choice.finish_reason or "stop", strays)
            top = [int(name.rpartition(":")[2]) for name in choice.logprobs["top_logprobs"][-1]]
            others = [token for token in sorted(top) if token != output[-1] and token not in self.end_tokens]
            if others:
                output[-1] = lot.choice(others)
                strays.append(len(output) - 1)

    def check_cut(self) -> None:
        """Raise :class:`CommandError` if ``max_tokens`` ends too many answers."""
        if self.cut_share > CUT_MOST and not self.allow_cut:
            raise CommandError(
                f"--max-tokens {self.settings.max_tokens} cut {self.cut_share:.0%} of {len(self.done)} answers, whose lengths stay "
                "unknown; repeat with a larger --max-tokens and another --out, or add --allow-censored"
            )


@dataclass(kw_only=True)
class Magpie(LineTask):
    """Turns of users that the model writes itself, from the beginning of its bare chat template.

    Source: Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing",
    arXiv 2406.08464.
    """

    template: Template
    turns: dict[int, str] = field(default_factory=dict)
    """Finished turns by attempt."""
    command: ClassVar[str] = "lenvm sample"

    def key(self, fields: dict[str, Any]) -> Hashable:
        return int(fields["attempt"])

    def note(self, fields: dict[str, Any]) -> None:
        super().note(fields)
        if fields["text"] is not None:
            self.turns[fields["attempt"]] = fields["text"]

    async def compute(self, items: Sequence[Item], sender: Sender) -> list[bytes]:
        answered = await self.ask(
            sender,
            "/v1/completions",
            prompt=self.template.before,
            temperature=1,
            top_p=1,
            max_tokens=TURN_TOKENS,
            seed=seed_of(self.seed, "magpie", items[0].content["attempt"]),
            stop_token_ids=self.template.after[:1],
        )
        choice = answered.choices[0]
        text = choice.text.strip()
        usable = choice.finish_reason == "stop" and len(text.split()) >= TURN_WORDS
        return self.noted({**items[0].content, "text": text if usable else None})

    def distinct(self) -> list[str]:
        """Return the turns in the order of attempts, without those that differ from an earlier one in case and punctuation only."""
        turns: dict[str, str] = {}
        for attempt in sorted(self.turns):
            turns.setdefault(" ".join(re.findall(r"\w+", self.turns[attempt].lower())), self.turns[attempt])
        return [*turns.values()]


def write_turns(task: Magpie, path: Path, count: int, server: Server, concurrency: int) -> list[Prompt]:
    """Return ``count`` prompts that the model writes. Raises :class:`CommandError`."""
    attempts = count + count // 4 + 8
    while True:
        compute(task, path, [{"attempt": number} for number in range(attempts)], server, concurrency, "Writing prompts")
        turns = task.distinct()
        if len(turns) >= count:
            return [Prompt(_digest(turn), turn) for turn in turns[:count]]
        if attempts > 20 * count + 200:
            raise CommandError(
                f"the model wrote {len(turns)} usable turns of users in {attempts} attempts, not {count}; it may not be an "
                "instruct model; give --prompts"
            )
        attempts += 2 * (count - len(turns)) + 8


async def _probe(server: Server, model: str | None, *, raw: bool) -> tuple[str, str | None, list[Probed], Template | None]:
    """Return the model's name and fingerprint, token ids of :data:`PROBES`, and the template. Raises :class:`CommandError`."""
    async with Sender(server, 1) as sender:
        if model is None:
            listed = decoded((await sender.send(Call("/v1/models", method="GET"))).usable(), dict[str, Any], server.url)
            names = [entry["id"] for entry in listed.get("data", [])]
            if len(names) != 1:
                raise WrongUsage(f"the server has the models {', '.join(names)}; name one with --model")
            model = names[0]

        async def ask(path: str, **fields: Any) -> Answered:
            body = {"model": model, "max_tokens": 1, "temperature": 0, "return_token_ids": True, **fields}
            answer = await sender.send(Call(path, msgspec.json.encode(body)))
            return decoded(answer.usable(), Answered, server.url)

        probed = await ask("/v1/completions", prompt=PROBES, add_special_tokens=False)
        ids = [choice.prompt_token_ids for choice in probed.choices]
        if len(ids) != len(PROBES) or None in ids:
            raise CommandError(NO_IDS)
        tokenizer = [Probed(text, each or []) for text, each in zip(PROBES, ids, strict=True)]
        template = None
        if not raw:
            chats = [await ask("/v1/chat/completions", messages=[{"role": "user", "content": text}]) for text in ("7", "What")]
            first, second = (chat.ids()[0] for chat in chats)
            before = next((place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
            pairs = enumerate(zip(reversed(first), reversed(second), strict=False))
            after = next((place for place, pair in pairs if pair[0] != pair[1]), 0)
            template = Template(first[:before], first[len(first) - after :])
    return model, probed.system_fingerprint, tokenizer, template


def _manifest(path: Path, found: Manifest) -> Manifest:
    """Return ``found``, or the manifest of an earlier run with the same settings and model. Raises :class:`WrongUsage`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return found
    before = read_manifest(path)
    for name in ("model", "fingerprint", "tokenizer", "template"):
        if getattr(before, name) != getattr(found, name):
            raise WrongUsage(f"{path.parent} has answers of another model (its {name} differs); name another --out")
    for name in Settings.__struct_fields__:
        old, new = getattr(before.settings, name), getattr(found.settings, name)
        if old != new:
            raise WrongUsage(
                f"{path.parent} was made with --{name.replace('_', '-')} {old}, not {new}; repeat that, or name another --out"
            )
    return before


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a data set. Raises :class:`WrongUsage`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise WrongUsage(f"{path.parent} is no data set of `yardstick lenvm sample`: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise WrongUsage(f"{path} cannot be read ({error}); make the data set again with `yardstick lenvm sample`") from None


def sample(
    server: Server,
    out: Path,
    settings: Settings,
    *,
    model: str | None,
    prompts: Path | None,
    magpie: int | None,
    samples: int,
    branch: int,
    concurrency: int,
    allow_cut: bool,
) -> int:
    """Write a data set, or continue it, and return the exit status: 1 if answers are missing. Raises :class:`CommandError`.

    branch: answers beyond the ``samples`` that differ in one token; they are counted as samples -1, -2 and so on.
    """
    given = None if prompts is None else read_prompts(prompts, raw=settings.raw)
    name, fingerprint, tokenizer, template = asyncio.run(_probe(server, model, raw=settings.raw))
    found = Manifest(model=name, fingerprint=fingerprint, tokenizer=tokenizer, template=template, settings=settings)
    manifest = _manifest(out / MANIFEST, found)
    _write(out, manifest)
    if given is None:
        assert magpie is not None
        if template is None or not template.before or not template.after:
            raise WrongUsage("--magpie needs a chat template with something before and after a user's message; give --prompts")
        given = write_turns(Magpie(model=name, seed=settings.seed, template=template), out / TURNS, magpie, server, concurrency)
    by_id = {prompt.id: prompt for prompt in given}
    task = Sample(model=name, seed=settings.seed, prompts=by_id, settings=settings, allow_cut=allow_cut)
    numbers = [*range(samples), *range(-1, -1 - branch, -1)]
    rows = [{"prompt_id": prompt, "sample": number} for number in numbers for prompt in by_id]
    missing = compute(task, out / ANSWERS, rows, server, concurrency, "Sampling")
    manifest.prompts, manifest.samples, manifest.answers = len(by_id), samples, len(task.done)
    manifest.cut, manifest.end_tokens, manifest.complete = task.cut_share, sorted(task.end_tokens), not missing
    _write(out, manifest)
    task.check_cut()
    if task.cut_share > CUT_WARNING:
        warning = (
            f"warning: --max-tokens {settings.max_tokens} cut {task.cut_share:.0%} of the answers; of these, only the least length"
        )
        print(f"{warning} is known", file=sys.stderr)
    problems = f"; {missing} are missing ({task.last_problem}); the same command tries them again" if missing else ""
    done = f"{len(task.done)} answers to {len(by_id)} prompts, {task.cut_share:.1%} cut"
    print(f"{out}: {done}{problems}", file=sys.stderr)
    return int(missing > 0)


def _write(out: Path, manifest: Manifest) -> None:
    replace_file(out / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
