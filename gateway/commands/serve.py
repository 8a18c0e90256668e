"""``yardstick serve``: runs engines and a gateway on this machine until one of them ends or a signal arrives."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
from rich.console import Console

from yardstick_llm.engine import wire
from yardstick_llm.gateway.commands import CommandError, Interrupted, WrongUsage
from yardstick_llm.gateway.commands.client import Server
from yardstick_llm.gateway.commands.files import reason_of
from yardstick_llm.gateway.commands.lists import as_table, compute
from yardstick_llm.gateway.commands.processes import (
    Child,
    Stop,
    Supervisor,
    program_environment,
    require_engine,
    signals_raise_stop,
    supervised,
)
from yardstick_llm.gateway.commands.runner import Score
from yardstick_llm.gateway.pool.discovery import http_url
from yardstick_llm.gateway.presets.preset import PresetError, choose, is_fallback, names_a_task, parse_preset
from yardstick_llm.gateway.settings import PREFIX, Settings, SettingsError, is_loopback, load_settings

_DEMO_NAME = "yardstick-demo"
_SET_HERE = ("--token-file", "--machine-engines")
"""Options of the engine that must fit the gateway or the number of engines."""
_OF_ONE = ("--health-port",)
"""Options of which several engines cannot have the same value."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_SECONDS = 120.0
_IDLE_SPLIT = "IDLE_SPLIT_TOKENS"
_CPU_SPLIT_TOKENS = 512
"""Least item tokens of a sub-batch for an idle engine on a CPU. With two engines of the demo model, lone requests of 10 items are
scored 1.15 times as fast as with 4096 (docs/benchmarks, "Engines of one thread")."""
_OF_THE_MODEL = {"presets": "preset", "tool_parsers": "tool_parser", "reasoning_parsers": "reasoning_parser"}
"""The gateway's settings with an entry ``MODEL=NAME`` for each model, and the options with the name for the one model."""


QUERY = "red running shoes"
ITEMS = ("blue running shoes", "crimson jogging sneakers", "red wool scarf", "scarlet running trainers", "green canvas tent")
LABELS = (" Yes", " No")
PROMPT, SUFFIX = f"Query: {QUERY}\nItem: ", "\nRelevant:"
KEY_VARIABLE = "YARDSTICK_API_KEY"

SDK = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key={key})
"""
SDK_POST = "print(client.post({path!r}, cast_to=object, body={body}))\n"
SDK_EMBED = "print(client.embeddings.create(model={model!r}, input={texts}).data[0].embedding)\n"
SDK_CHAT = """\
chat = client.chat.completions.create(model={model!r}, messages=[{{"role": "user", "content": "Describe: {query}"}}])
print(chat.choices[0].message.content)
"""
SDK_COMPLETION = """\
completion = client.completions.create(model={model!r}, prompt="Describe: {query}", max_tokens=30)
print(completion.choices[0].text)
"""
SDK_GUIDED = """
short = client.chat.completions.create(
    model={model!r},
    messages=[{{"role": "user", "content": "Describe: {query}"}}],
    extra_body={{"length_guidance": {{"target_length": 30}}}},
)
print(short.usage.completion_tokens, short.choices[0].message.content)
"""
SDK_OF = {"generate": SDK_COMPLETION, "chat": SDK_CHAT, "length_guidance": SDK_GUIDED}
"""Code for each ability that is not the task of a preset."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the command line; None means not given."""

    model: str | None
    lenvm_model: str | None = None
    host: str | None = None
    port: int | None = None
    api_keys_file: Path | None = None
    preset: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    engines: int = 1
    """Number of engines."""
    engine: Sequence[str] = ()
    """Options that are passed to each engine unchanged; :mod:`engine.settings` defines them."""

    @property
    def name(self) -> str:
        """Name of the model for clients: that of the engine's option ``--name`` if it is given."""
        for option, following in zip(self.engine, [*self.engine, ""][1:], strict=True):
            if option == "--name" or option.startswith("--name="):
                return following if option == "--name" else option.removeprefix("--name=")
        return _DEMO_NAME if self.model is None else wire.served_name(self.model)

    @property
    def title(self) -> str:
        """Name of the model in messages to the user."""
        return self.model or "the demo model"


class _Models(NamedTuple):
    """Model directories, GGUF files or Hugging Face hub ids."""

    model: str
    lenvm: str | None


def serve(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises :class:`CommandError` if it cannot start, if Ctrl-C comes before it serves, or if a
    process ends by itself."""
    require_engine()
    _check_engine_options(options)
    settings = gateway_settings(options, program_environment())
    _check_port(settings)
    ready = False
    try:
        with signals_raise_stop(), children(options, settings, models_of(options)) as supervisor:
            supervisor.wait_until_ready(options.title)
            ready = True
            _say_ready(options, settings, supervisor)
            supervisor.watch()
    except Stop as stop:
        if not ready and stop.number == signal.SIGINT:
            raise Interrupted(f"interrupted before {options.title} was ready") from None


def _check_engine_options(options: ServeOptions) -> None:
    """Raise :class:`WrongUsage` for options of the engine that cannot be passed on."""
    for argument in options.engine:
        option, _, _ = argument.partition("=")
        if len(option) > 2 and any(name.startswith(option) for name in _SET_HERE):  # argparse accepts the beginning of a name
            raise WrongUsage(f"`yardstick serve` chooses {option} itself; leave it out, or run `yardstick engine` and `gateway`")
        if options.engines > 1 and len(option) > 2 and any(name.startswith(option) for name in _OF_ONE):
            raise WrongUsage(f"{option} names one port, and --engines {options.engines} needs several; leave one of the two out")


def gateway_settings(options: ServeOptions, environment: Mapping[str, str]) -> Settings:
    """Return the gateway's settings: ``environment``, overridden by options and by the engines that are started here.

    Raises :class:`CommandError`.
    """
    if f"{PREFIX}ENGINES" in environment:
        raise CommandError(
            f"{PREFIX}ENGINES is set, but `yardstick serve` starts the engine itself; unset it, or run `yardstick gateway` to"
            " serve other engines"
        )
    flags: dict[str, Any] = {"host": options.host, "port": options.port, "api_keys_file": options.api_keys_file}
    for setting, chosen in _OF_THE_MODEL.items():
        flags[setting] = None if getattr(options, chosen) is None else [f"{options.name}={getattr(options, chosen)}"]
    host = options.host or environment.get(f"{PREFIX}HOST", "127.0.0.1")
    with_keys = options.api_keys_file is not None or f"{PREFIX}API_KEYS_FILE" in environment
    if not with_keys and not is_loopback(host):
        raise CommandError(
            f"{host} can be reached from other machines, so API keys are needed; make one with "
            "`yardstick keys new NAME --file keys.json` and add --api-keys-file keys.json"
        )
    try:
        *engines, port = _free_ports(options.engines + 1)
        settings = load_settings(environment, flags | {"engines": [http_url("127.0.0.1", engine) for engine in engines]})
    except SettingsError as error:
        raise CommandError(str(error)) from None
    return settings if settings.port else msgspec.structs.replace(settings, port=port)


class Program(NamedTuple):
    """A program to start, as :class:`Child` takes it."""

    name: str
    arguments: list[str]
    variables: dict[str, str]


def engine_programs(options: ServeOptions, settings: Settings, models: _Models, gpus: Sequence[str | None]) -> list[Program]:
    """Return the engines to start, in the order of ``settings.engines``. ``gpus``: see :func:`gpus_of_engines`."""
    programs = []
    for number, (url, visible) in enumerate(zip(settings.engines, gpus, strict=True), 1):
        arguments = _engine_arguments(options, models, urlsplit(url).port or 0)
        if settings.tracing_endpoint is not None:
            arguments += ["--tracing-endpoint", settings.tracing_endpoint]
        name = "engine" if options.engines == 1 else f"engine {number}"
        programs.append(Program(name, arguments, {} if visible is None else {VISIBLE: visible}))
    return programs


def splitting(gpus: Sequence[str | None], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the gateway's variables that divide score requests among idle engines of a CPU. Settings of the user take precedence.

    ``gpus``: see :func:`gpus_of_engines`.
    """
    chosen = any(f"{PREFIX}{name}" in environment for name in ("SPLIT_TOKENS", _IDLE_SPLIT))
    return {} if chosen or len(gpus) == 1 or any(gpus) else {f"{PREFIX}{_IDLE_SPLIT}": str(_CPU_SPLIT_TOKENS)}


@contextmanager
def children(options: ServeOptions, settings: Settings, models: _Models) -> Iterator[Supervisor]:
    """Start all programs, and end all in every case. Raises :class:`CommandError`."""
    gpus = gpus_of_engines(options.engines, options.engine, program_environment())
    engines = [Child(*program) for program in engine_programs(options, settings, models, gpus)]
    gateway = Child("gateway", _gateway_arguments(settings), splitting(gpus, program_environment()))
    with supervised(engines, gateway, settings) as supervisor:
        yield supervisor


@contextmanager
def own_server(model: str | None, api_key: str | None) -> Iterator[Server]:
    """An engine and a gateway on free ports of this machine, until the end of the block. ``model`` None: the demo model.

    Raises :class:`CommandError`.
    """
    require_engine()
    options = ServeOptions(model=model, host="127.0.0.1", port=0)
    settings = gateway_settings(options, program_environment())
    with children(options, settings, models_of(options)) as supervisor:
        supervisor.wait_until_ready(options.title, talkative=False)
        yield Server(supervisor.url, api_key, own=True, check=supervisor.check_running)


def _say_ready(options: ServeOptions, settings: Settings, supervisor: Supervisor) -> None:
    """Print calls to try, and for the demo model without keys an example with its scores."""
    out = Console(highlight=False)
    with_key = settings.api_keys_file is not None
    if options.model is None and not with_key:
        show_example(out, supervisor.url, options.name)
    abilities = abilities_of(settings.engines[0], settings.chosen_presets)
    show_calls(out, supervisor.url, options.name, abilities, with_key=with_key)
    if settings.console:
        supervisor.console.print(f"\nOpen the web console: {supervisor.url}/", soft_wrap=True)
    supervisor.console.print("\nServing; press Ctrl-C to stop.")


def _engine_arguments(options: ServeOptions, models: _Models, port: int) -> list[str]:
    arguments = ["engine", "--model", models.model, "--host", "127.0.0.1", "--port", str(port), "--name", options.name]
    if models.lenvm is not None:
        arguments += ["--lenvm-model", models.lenvm]
    return [*arguments, "--machine-engines", str(options.engines), *options.engine]


def _gateway_arguments(settings: Settings) -> list[str]:
    """Return the settings that may differ from the environment, which the gateway reads too."""
    arguments = ["gateway", "--host", settings.host, "--port", str(settings.port)]
    arguments += [argument for engine in settings.engines for argument in ("--engine", engine)]
    if settings.api_keys_file is not None:
        arguments += ["--api-keys-file", str(settings.api_keys_file)]
    for setting, option in _OF_THE_MODEL.items():
        flag = "--" + option.replace("_", "-")
        arguments += [argument for chosen in getattr(settings, setting) for argument in (flag, chosen)]
    return arguments


def _check_port(settings: Settings) -> None:
    """Check that the gateway can listen, before anything is loaded. Raises :class:`CommandError`."""
    try:
        host = "0.0.0.0" if settings.host == "*" else settings.host  # noqa: S104  the operator asks for all addresses
        family, kind, protocol, _, address = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        remedy = "stop what uses it, or choose another with --port" if used else "check --host and --port"
        raise CommandError(f"cannot listen on {settings.host} port {settings.port} ({reason_of(error)}); {remedy}") from None


def models_of(options: ServeOptions) -> _Models:
    """Return the models to load: the demo models if none is named. A length model of the user applies to both cases."""
    if options.model is not None:
        return _Models(options.model, options.lenvm_model)
    return _Models(_demo_model("base"), options.lenvm_model or _demo_model("lenvm"))


def _demo_model(name: str) -> str:
    spec = importlib.util.find_spec("yardstick_llm.engine")
    roots = spec.submodule_search_locations if spec is not None else None
    path = Path(next(iter(roots or [])), "demo", "models", name)
    if not path.is_dir():
        raise CommandError("the demo models are missing from this installation; name a model with --model")
    return str(path)


def _free_ports(count: int) -> list[int]:
    """Return different free ports of this machine."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def gpus_of_engines(engines: int, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str | None]:
    """Return :data:`VISIBLE` for each engine; None where an engine may see all GPUs, because it is alone or computes on a CPU.

    ``arguments``: options of the engines. Raises :class:`WrongUsage` if there are too few GPUs, and :class:`CommandError` if they
    cannot be counted.
    """
    device, processes = _placement(arguments)
    found = [] if engines == 1 or device == "cpu" else _found(environment)
    if not found:  # where `--device cuda` was given, the engine explains what is missing
        return [None] * engines
    needed = engines * processes
    if len(found) < needed:
        each = f" of {processes} GPUs each (--tensor-parallel)" if processes > 1 else ""
        remedy = "lower --engines, or add --device cpu"
        raise WrongUsage(f"--engines {engines}{each} needs {needed} GPUs, and torch finds {len(found)}; {remedy}")
    return [",".join(found[engine * processes : (engine + 1) * processes]) for engine in range(engines)]


def _placement(arguments: Sequence[str]) -> tuple[str | None, int]:
    """Return device and processes of each engine. A wrong value is left to the engine, which refuses it."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--device")
    parser.add_argument("--tensor-parallel", default="1")
    try:
        known, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return None, 1
    return known.device, int(known.tensor_parallel) if known.tensor_parallel.isdecimal() else 1


def _found(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that torch finds, as :data:`VISIBLE` names them. A process of its own asks, because importing torch takes
    seconds and hundreds of megabytes; builds without CUDA find none. Raises :class:`CommandError`."""
    if version("torch").endswith("+cpu"):
        return []
    command = [sys.executable, "-c", _COUNT]
    try:
        asked = subprocess.run(  # noqa: S603 - our own program
            command, env=environment, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"torch did not count the GPUs in {_COUNT_SECONDS:g} s; check the driver, or add --device cpu") from None
    count = int(asked.stdout) if asked.stdout.strip().isdecimal() else 0
    listed = environment.get(VISIBLE)
    names = [str(number) for number in range(count)] if listed is None else [name.strip() for name in listed.split(",")]
    return names[:count]


def show_example(console: Console, url: str, model: str) -> None:
    """Score the example on the demo model and print it, best first. Raises :class:`CommandError`."""
    body = example_body(model)
    task = Score({"model": model, "labels": body["labels"], "apply_softmax": True}, query=PROMPT, suffix=SUFFIX)
    results = compute(task, Server(url, None, own=True), ITEMS)
    console.print(f'\nHow well does each item answer "{QUERY}"? POST {url}/v1/score returns:', soft_wrap=True)
    console.print(as_table(results.best()))


def abilities_of(engine: str, presets: Mapping[str, str]) -> set[str]:
    """Return what the model of the engine at this URL can do: its capabilities, the task of its preset, and ``chat`` if it has a
    chat template; not what the gateway refuses while the model has a fallback preset. ``presets``: the setting. Raises
    :class:`CommandError`."""
    try:
        with httpx.Client(base_url=engine, trust_env=False, timeout=60) as client:
            info = msgspec.msgpack.decode(client.get("/info").raise_for_status().content, type=wire.Info)
            files = msgspec.msgpack.decode(client.get("/tokenizer").raise_for_status().content, type=wire.TokenizerFiles)
        preset = choose(
            info.model,
            files.architecture,
            info.capabilities,
            classes=len(info.classes),
            encoder=info.encoder,
            beside=files.preset,
            chosen=presets,
            model_files=files.model_files,
        )
    except (httpx.HTTPError, msgspec.MsgspecError, PresetError) as error:
        raise CommandError(f"the engine does not say what its model can do: {error}") from None
    abilities = set(info.capabilities)
    if preset is not None:
        read = parse_preset(preset.encode())
        fallback = is_fallback(read.name, info.model, beside=files.preset, chosen=presets)
        unprompted = fallback and read.task != "embed" and names_a_task(info.model)
        abilities = abilities - {"classify"} if unprompted else abilities | {read.task}
    return abilities | ({"chat"} if "generate" in abilities and files.chat_template else set())


def show_calls(console: Console, url: str, model: str, abilities: set[str], *, with_key: bool) -> None:
    """Print a curl command and code for the OpenAI SDK, ready to be pasted, that use what the model can do.

    ``abilities``: see :func:`abilities_of`.
    """
    if not abilities:
        message = "No preset is for this model, which may need the prompt of its training; choose one with --preset."
        console.print(f"\n{message}", soft_wrap=True)
        return
    key = f'os.environ["{KEY_VARIABLE}"]' if with_key else '"none"'
    sdk = ("import os\n" if with_key else "") + SDK.format(url=url, key=key)
    path, body = _first_call(model, abilities)
    if path == "/embeddings":
        sdk += SDK_EMBED.format(model=model, texts=list(ITEMS))
    elif path not in ("/chat/completions", "/completions"):
        sdk += SDK_POST.format(path=path, body=body)
    for ability, lines in SDK_OF.items():
        needed = {"generate"} if ability == "generate" else {"chat", ability}
        if needed <= abilities and not (ability == "generate" and "chat" in abilities):
            sdk += lines.format(model=model, query=QUERY)
    authorization = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if with_key else ""
    curl = f"curl {url}/v1{path} -H 'content-type: application/json'{authorization} -d {shlex.quote(json.dumps(body))}"
    for title, text in (("With curl:", curl), ("With the OpenAI SDK:", sdk.rstrip())):
        console.print(f"\n{title}\n", style="bold")
        console.print(text, markup=False, soft_wrap=True)


def _first_call(model: str, abilities: set[str]) -> tuple[str, dict[str, Any]]:
    """Return the path below ``/v1`` and the body of the call that shows best what the model is for."""
    if "classify" in abilities and "rerank" not in abilities:
        return "/classify", {"model": model, "input": list(ITEMS)}
    if "embed" in abilities:
        return "/embeddings", {"model": model, "input": list(ITEMS)}
    if "score" in abilities:
        return "/score", example_body(model)
    if "rerank" in abilities:
        return "/rerank", {"model": model, "query": QUERY, "documents": list(ITEMS)}
    if "chat" in abilities:
        return "/chat/completions", {"model": model, "messages": [{"role": "user", "content": f"Describe: {QUERY}"}]}
    return "/completions", {"model": model, "prompt": f"Describe: {QUERY}", "max_tokens": 30}


def example_body(model: str) -> dict[str, Any]:
    """Return the example's request body; examples/demo_models/README.md documents the format of its prompts."""
    items = [item + SUFFIX for item in ITEMS]
    return {"model": model, "query": PROMPT, "items": items, "labels": list(LABELS), "apply_softmax": True}
