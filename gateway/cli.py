"""The command ``yardstick``. Each subcommand imports its modules when it runs, so that help is fast."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from yardstick_llm.gateway.commands import CommandError, WrongUsage
from yardstick_llm.gateway.process.signals import end_quietly

if TYPE_CHECKING:
    from yardstick_llm.gateway.commands.client import Server
    from yardstick_llm.gateway.commands.runner import Task

app = typer.Typer(
    help="Score lists of items with a language model, and generate text, behind an OpenAI-compatible gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
keys = typer.Typer(help="Manage the API keys of a gateway.", no_args_is_help=True)
app.add_typer(keys, name="keys")
lenvm = typer.Typer(help="Make and judge a length model, which steers the length of answers.", no_args_is_help=True)
app.add_typer(lenvm, name="lenvm")

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_MOMENTS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
_LOCAL = "http://127.0.0.1:8000"
_ITEMS_A_REQUEST, _ROWS_A_REQUEST = 200, 32

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
"""Errors of standard output: its disk is full, or its reader has left."""


def main() -> None:
    """Run a subcommand. An error of a subcommand prints one line and exits with code 1, or 2 for wrong usage."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # an error of Python's own flush at the end is no line
    except CommandError as error:
        print(f"yardstick: {error}", file=sys.stderr)
        sys.exit(error.status)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes
        if error.errno != errno.EPIPE:
            print(f"yardstick: cannot write the output: {os.strerror(error.errno).lower()}", file=sys.stderr)
        sys.exit(1)


def _show_version(asked: bool) -> None:
    if asked:
        from yardstick_llm.tracing.version import project_version

        print(project_version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Take the options that stand before a subcommand."""


@app.command(context_settings=_PASS_ON, epilog="`yardstick engine --help` lists the options of the engine.")
def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Model directory, GGUF file or hub id; without it, the demo model.")] = None,
    lenvm_model: Annotated[
        str | None, typer.Option(help="Length model for `length_guidance`; by default the demo model's.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (127.0.0.1); beyond loopback, --api-keys-file is needed.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on (8000).")] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="JSON file of API keys, see `yardstick keys new`.")] = None,
    preset: Annotated[str | None, typer.Option(help="How the model is prompted and read, see `yardstick presets`.")] = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="How the model calls tools, such as hermes; by default, what its chat template asks for.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How the model marks its thinking, such as think; by default, as in its chat template.")
    ] = None,
    engines: Annotated[
        int,
        typer.Option(min=1, max=64, help="Engines behind the gateway: they share the cores of a CPU, and have a GPU each."),
    ] = 1,
) -> None:
    """Serve a model on this machine, until Ctrl-C. The gateway's settings are read from the environment, as YARDSTICK_NAME;
    options override them. All other options, such as --dtype, --quantize and --lora, are passed to the engines. The model may
    also be the first argument, without --model."""
    end_quietly()
    from yardstick_llm.gateway.commands.serve import ServeOptions, serve

    arguments = context.args
    if arguments and not arguments[0].startswith("-"):
        if model is not None:
            raise WrongUsage(f"{arguments[0]} and --model {model} name two models; leave one out")
        model, *arguments = arguments
    options = ServeOptions(
        model=model,
        lenvm_model=lenvm_model,
        host=host,
        port=port,
        api_keys_file=api_keys_file,
        preset=preset,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        engines=engines,
        engine=arguments,
    )
    serve(options)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run a gateway alone, in front of engines."""
    end_quietly()
    from yardstick_llm.gateway.commands.processes import become

    become("gateway", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Run an engine alone."""
    end_quietly()
    from yardstick_llm.gateway.commands.processes import become

    become("engine", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure engine, kernels and gateway on this machine; needs a source checkout."""
    from yardstick_llm.gateway.commands.processes import become_benchmarks

    become_benchmarks(context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def load(context: typer.Context) -> None:
    """Load-test a running server and report the results."""
    from yardstick_llm.gateway.commands.processes import become

    become("loadgen", context.args)


@app.command()
def presets(name: Annotated[str | None, typer.Argument(help="Preset to print, or a .toml file to check.")] = None) -> None:
    """List the presets, which say how models are prompted and read, or print one."""
    from yardstick_llm.gateway.commands.local import list_presets, show_preset

    if name is None:
        list_presets()
    else:
        show_preset(name)


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="Name of the key, such as its user.")],
    file: Annotated[Path, typer.Option(help="File of keys; created if it does not exist.")],
    model: Annotated[list[str] | None, typer.Option(help="A model that the key may use; repeat for several; default: all.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, max=10**12, help="Requests a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, max=10**12, help="Tokens of prompts and answers a minute.")
    ] = None,
    items_per_minute: Annotated[int | None, typer.Option(min=1, max=10**12, help="Scored items a minute.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, max=10**12, help="Concurrent requests.")] = None,
    expires: Annotated[datetime | None, typer.Option(formats=_MOMENTS, help="Expiry time, in UTC.")] = None,
    group: Annotated[str | None, typer.Option(help="Keys of one group share cached results.")] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.1, max=100, help="Share of busy servers relative to other keys; default: 1.")
    ] = None,
    priority_min: Annotated[int | None, typer.Option(help="Lowest priority that requests may have; default: -100.")] = None,
    priority_max: Annotated[int | None, typer.Option(help="Highest priority that requests may have; default: 100.")] = None,
    catalogues: Annotated[
        Literal["write", "read"] | None, typer.Option(help="Whether the key may change catalogues of its group; default: write.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The key may load and unload adapters.")] = False,
) -> None:
    """Create an API key. The key is printed once, and the file stores only its hash. A gateway that serves with this file accepts
    the key at once."""
    from yardstick_llm.gateway.commands.local import new_key

    fields = {
        "models": model or None,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "items_per_minute": items_per_minute,
        "concurrency": concurrency,
        "expires": expires and expires.replace(tzinfo=UTC),
        "group": group,
        "weight": weight,
        "priority_min": priority_min,
        "priority_max": priority_max,
        "catalogues": catalogues,
        "admin": admin or None,
    }
    new_key(name, file, **_given(fields))


Input = Annotated[Path, typer.Option(help="File of rows: .jsonl, .csv or .parquet.")]
Output = Annotated[Path, typer.Option(help="File of results; the ending selects the format. The same command continues it.")]
Url = Annotated[str | None, typer.Option(help="URL of a gateway; without it, the command starts an engine and a gateway.")]
ApiKey = Annotated[str | None, typer.Option(envvar="YARDSTICK_API_KEY", help="API key, if the gateway needs one.")]
Model = Annotated[
    str | None, typer.Option(help="With --url: name of the model, if several are served. Else its directory, GGUF file or hub id.")
]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Most requests in flight; fewer while the server answers 429.")]
RetrySeconds = Annotated[float, typer.Option(min=0, help="Longest time that a request waits for a busy server.")]
Keep = Annotated[list[str] | None, typer.Option(help="Column of the input to repeat in the output; repeat for several.")]
QueryColumn = Annotated[str, typer.Option(help="Column of queries.")]
Instruction = Annotated[str | None, typer.Option(help="Instruction for the model; by default its preset's.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long; without it, they are failures.")]
# of the commands with a form for a list and a form for a file of rows
RowsInput = Annotated[Path | None, typer.Option(help="File of rows instead of a list: .jsonl, .csv or .parquet.")]
ListOutput = Annotated[Path | None, typer.Option(help="File to write to; with a list, by default standard output.")]
ListUrl = Annotated[str | None, typer.Option(help=f"URL of the gateway. Default: {_LOCAL}; with --input, the command starts one.")]
ListFormat = Annotated[Literal["table", "json", "csv"] | None, typer.Option(help="With a list: how to write the results (table).")]
ListBatch = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help=f"Items a request ({_ITEMS_A_REQUEST}; with --input, {_ROWS_A_REQUEST} rows)."),
]


@app.command()
def rerank(
    context: typer.Context,
    query: Annotated[str | None, typer.Option(help="With --documents: the query.")] = None,
    documents: Annotated[
        typer.FileText | None, typer.Option(encoding="utf-8", help="File with one document per line; - reads standard input.")
    ] = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="With --documents: write this many, the most relevant first.")] = None,
    format: ListFormat = None,
    input: RowsInput = None,
    output: ListOutput = None,
    url: ListUrl = None,
    api_key: ApiKey = None,
    model: Model = None,
    query_column: QueryColumn = "query",
    documents_column: Annotated[str, typer.Option(help="Column of lists of documents.")] = "documents",
    document_column: Annotated[str, typer.Option(help="Column of single documents, if there are no lists.")] = "document",
    instruction: Instruction = None,
    truncate: Truncate = False,
    keep: Keep = None,
    batch: ListBatch = None,
    concurrency: Concurrency = 16,
    retry_seconds: RetrySeconds = 600,
) -> None:
    """Score the relevance of documents to a query: a list of documents on a running server, or a file of rows."""
    for_lists = ("query", "top_n", "format")
    for_rows = ("query_column", "documents_column", "document_column", "keep", "concurrency", "retry_seconds")
    _check_form(context, "documents", for_lists, for_rows)
    from yardstick_llm.gateway.commands.runner import Rerank

    fields = {"model": model if url or documents else None, "instruction": instruction, "truncate": truncate or None}
    size = batch or (_ROWS_A_REQUEST if documents is None else _ITEMS_A_REQUEST)
    task = Rerank(_given(fields), size, keep or (), documents_column, document_column, query_column, query)
    if documents is not None:
        from yardstick_llm.gateway.commands import lists

        results = lists.compute(task, _server(url, api_key), lists.read_lines(documents))
        lists.write(results.best(top_n), format or "table", output)
        return
    _run_file(task, input, output, url, api_key, model, concurrency, retry_seconds)


@app.command()
def score(
    context: typer.Context,
    labels: Annotated[str | None, typer.Option(help="Tokens to score, separated by commas: Yes,No")] = None,
    query: Annotated[str | None, typer.Option(help="Text that all prompts share; with --input, a column may have it.")] = None,
    items: Annotated[
        typer.FileText | None, typer.Option(encoding="utf-8", help="File with one item per line; - reads standard input.")
    ] = None,
    input: RowsInput = None,
    output: ListOutput = None,
    url: ListUrl = None,
    api_key: ApiKey = None,
    model: Model = None,
    readout: Annotated[
        Literal["labels", "likelihood"],
        typer.Option(help="With --input: probabilities of labels, or the log-probability of each item's own tokens."),
    ] = "labels",
    apply_softmax: Annotated[bool, typer.Option("--apply-softmax", help="Scale the scores of an item to a sum of 1.")] = False,
    item_first: Annotated[bool, typer.Option("--item-first", help="Put the item before the query.")] = False,
    suffix: Annotated[str, typer.Option(help="Text added to each item, such as the question to answer about it.")] = "",
    sort: Annotated[bool, typer.Option("--sort", help="With --items: order by the first label, best first.")] = False,
    batch: ListBatch = None,
    format: ListFormat = None,
    query_column: QueryColumn = "query",
    items_column: Annotated[str, typer.Option(help="Column of lists of items.")] = "items",
    item_column: Annotated[str, typer.Option(help="Column of single items, if there are no lists.")] = "item",
    keep: Keep = None,
    concurrency: Concurrency = 16,
    retry_seconds: RetrySeconds = 600,
) -> None:
    """Score items against a query: a list of items on a running server, or a file of rows.

    An item's prompt is query, item and suffix, joined without separators.
    """
    if (labels is None) == (readout == "labels"):
        raise WrongUsage("--readout likelihood goes without --labels" if labels else "give --labels, such as Yes,No")
    for_rows = ("readout", "query_column", "items_column", "item_column", "keep", "concurrency", "retry_seconds")
    _check_form(context, "items", ("sort", "format"), for_rows)
    from yardstick_llm.gateway.commands.runner import Score

    fields: dict[str, Any] = {"readout": "likelihood"} if labels is None else {"labels": labels.split(",")}
    fields |= {"model": model if url or items else None, "apply_softmax": apply_softmax or None, "item_first": item_first or None}
    size = batch or (_ROWS_A_REQUEST if items is None else _ITEMS_A_REQUEST)
    column = query_column if query is None else None
    task = Score(_given(fields), size, keep or (), items_column, item_column, column, query, suffix=suffix)
    if items is not None:
        from yardstick_llm.gateway.commands import lists

        results = lists.compute(task, _server(url, api_key), lists.read_lines(items))
        lists.write(results.best() if sort else results, format or "table", output)
        return
    _run_file(task, input, output, url, api_key, model, concurrency, retry_seconds)


@app.command()
def embed(
    input: Input,
    output: Output,
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    text_column: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    dimensions: Annotated[int | None, typer.Option(min=1, help="Length of the embeddings; the model's size by default.")] = None,
    input_type: Annotated[
        Literal["query", "document"] | None, typer.Option(help="Whether the texts are queries or documents.")
    ] = None,
    instruction: Instruction = None,
    truncate: Truncate = False,
    keep: Keep = None,
    batch: Annotated[int, typer.Option(min=1, max=1000, help="Most rows that share a request.")] = _ROWS_A_REQUEST,
    concurrency: Concurrency = 16,
    retry_seconds: RetrySeconds = 600,
) -> None:
    """Embed the texts in a file."""
    from yardstick_llm.gateway.commands.runner import Embed

    fields = {"model": model if url else None, "dimensions": dimensions, "input_type": input_type}
    fields |= {"instruction": instruction, "truncate": truncate or None}
    task = Embed(_given(fields), batch, keep or (), text_column=text_column)
    _run_file(task, input, output, url, api_key, model, concurrency, retry_seconds)


@app.command()
def batch(
    input: Annotated[Path, typer.Option(help="OpenAI's batch file: .jsonl with custom_id, method, url and body.")],
    output: Annotated[Path, typer.Option(help="File of answers, .jsonl. The same command continues it.")],
    url: Url = None,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Without --url: directory, GGUF file or hub id of the model.")] = None,
    concurrency: Concurrency = 16,
    retry_seconds: RetrySeconds = 600,
) -> None:
    """Send the requests of an OpenAI batch file."""
    from yardstick_llm.gateway.commands.runner import Batch

    _run_file(Batch(), input, output, url, api_key, model, concurrency, retry_seconds)


def _server(url: str | None, api_key: str | None) -> Server:
    from yardstick_llm.gateway.commands.client import Server

    return Server(url or _LOCAL, api_key)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_form(context: typer.Context, lists: str, for_lists: tuple[str, ...], for_rows: tuple[str, ...]) -> None:
    """Check that the options are those of one form of a command: with the option ``lists``, or with --input."""
    given = context.params
    if (given[lists] is None) == (given["input"] is None):
        raise WrongUsage(f"give either --{lists}, a list of {lists}, or --input, a file of rows")
    names, form = (for_lists, lists) if given[lists] is None else (for_rows, "input")
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise WrongUsage(f"--{name.replace('_', '-')} works only with --{form}")
    if given[lists] is not None and given["query"] is None:
        raise WrongUsage(f"--{lists} needs --query")
    if given[lists] is None and given["output"] is None:
        raise WrongUsage("--input needs --output, whose ending selects the format")


def _run_file(
    task: Task,
    input: Path | None,
    output: Path | None,
    url: str | None,
    api_key: str | None,
    model: str | None,
    concurrency: int,
    retry_seconds: float,
) -> NoReturn:
    """Run ``task`` for a file, on the gateway at ``url`` or on a server that starts for it."""
    from yardstick_llm.gateway.commands.runner import execute

    @contextmanager
    def server() -> Iterator[Server]:
        if url is not None:
            yield _server(url, api_key)
            return
        from yardstick_llm.gateway.commands.serve import own_server

        with own_server(model, api_key) as running:
            yield running

    assert input is not None
    assert output is not None
    raise typer.Exit(execute(task, input, output, server, concurrency, retry_seconds))


BaseUrl = Annotated[str, typer.Option("--base-url", "--url", help="URL of the server, with or without /v1.")]
Shares = Annotated[float, typer.Option(min=0, max=0.5, help="Share of the prompts.")]


@lenvm.command()
def sample(
    out: Annotated[Path, typer.Option(help="Folder of the data set. The same command continues it.")],
    base_url: BaseUrl = _LOCAL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Name of the model, if several are served.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts: .txt (one a line), .jsonl, .csv or .parquet with messages, prompt or text."),
    ] = None,
    magpie: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Let an instruct model write this many prompts itself.")
    ] = None,
    system: Annotated[
        str, typer.Option(help="System message before each prompt that has none, such as `Answer in one short sentence.`.")
    ] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompts as they are, without the chat template.")] = False,
    samples: Annotated[int, typer.Option(min=1, max=1000, help="Answers to each prompt.")] = 4,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer; few answers should reach it.")] = 2048,
    seed: Annotated[int, typer.Option(help="Equal seeds, settings and models give equal answers.")] = 0,
    stray: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of unlikely tokens in answers with such; 0.03 is a good start.")
    ] = 0.0,
    stray_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers with stray tokens, besides the first of each prompt.")
    ] = 0.25,
    branch: Annotated[
        int, typer.Option(min=0, max=8, help="Further answers to each prompt that differ in one token of its first answer.")
    ] = 0,
    validation_share: Shares = 0.05,
    test_share: Shares = 0.05,
    concurrency: Concurrency = 64,
    allow_censored: Annotated[
        bool, typer.Option("--allow-censored", help="Go on if --max-tokens cuts more than half of the answers.")
    ] = False,
) -> None:
    """Collect answers of a served model as token ids, to train and to judge a length model with."""
    from yardstick_llm.gateway.commands.lenvm import Settings, sample

    if (prompts is None) == (magpie is None):
        raise WrongUsage("give either --prompts, a file, or --magpie, a number of prompts that the model writes")
    if raw and magpie is not None:
        raise WrongUsage("--magpie writes turns of users, which --raw would not put into a chat; leave one of the two out")
    if raw and system:
        raise WrongUsage("--system is a message, and --raw continues prompts without a chat; leave one of the two out")
    settings = Settings(raw, temperature, top_p, max_tokens, seed, stray, stray_share, validation_share, test_share, system)
    server = _server(base_url.removesuffix("/").removesuffix("/v1"), api_key)
    status = sample(
        server,
        out,
        settings,
        model=model,
        prompts=prompts,
        magpie=magpie,
        samples=samples,
        branch=branch,
        concurrency=concurrency,
        allow_cut=allow_censored,
    )
    raise typer.Exit(status)


@lenvm.command(context_settings=_PASS_ON, add_help_option=False)
def train(context: typer.Context) -> None:
    """Train a length model on such answers; needs the engine."""
    from yardstick_llm.gateway.commands.processes import become

    become("engine.training", ["train", *context.args])


@lenvm.command()
def evaluate(
    data: Annotated[Path, typer.Option(help="Folder of `yardstick lenvm sample`.")],
    lenvm: Annotated[Path, typer.Option(help="Folder of the length model.")],
    out: Annotated[Path, typer.Option(help="Folder of the report.")],
    split: Annotated[Literal["test", "validation", "train"], typer.Option(help="Prompts to judge by.")] = "test",
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", "--url", help="Yardstick that serves both models: also measure how well answers meet targets."),
    ] = None,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Name of the served model; by default that of the data set.")] = None,
    targets: Annotated[str, typer.Option(help="Lengths in tokens to steer to.")] = "20,40,80,160,320",
    end_min_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Also try guidance with this `end_min_p`, such as 0.001; 1 is off.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First give the length model a calibration, measured on the validation prompts.")
    ] = False,
    init: Annotated[
        str | None, typer.Option(help="Model that the length model was trained on, if that is an adapter; as for `train`.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Most prompts to write answers to.")] = 100,
    samples: Annotated[int, typer.Option(min=1, max=100, help="Answers to each prompt for each target and rule.")] = 1,
    concurrency: Concurrency = 16,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one.")] = None,
) -> None:
    """Judge a length model by answers that it was not trained on, and by how well guided answers meet targets; needs the engine.
    The same command continues it."""
    from yardstick_llm.gateway.commands.processes import become, require_engine

    require_engine()
    arguments = ["evaluate", "--data", str(data), "--lenvm", str(lenvm), "--out", str(out), "--split", split]
    if base_url is not None:
        from yardstick_llm.gateway.commands.lenvm_served import serve_targets

        try:
            lengths = sorted({int(target) for target in targets.split(",")})
        except ValueError:
            lengths = [0]
        if lengths[0] < 1:
            raise WrongUsage(f"--targets is {targets!r}; give numbers of tokens, such as 20,40,80")
        server = _server(base_url.removesuffix("/").removesuffix("/v1"), api_key)
        serve_targets(
            server,
            data,
            out,
            model=model,
            split=split,
            end_min_p=end_min_p,
            targets=lengths,
            most_prompts=prompts,
            samples=samples,
            concurrency=concurrency,
        )
    for name, value in (("--init", init), ("--device", device)):
        arguments += [] if value is None else [name, value]
    become("engine.training", arguments + (["--calibrate"] if calibrate else []))


if __name__ == "__main__":
    main()
