"""Options of ``yardstick rerank``, ``score``, ``embed`` and ``batch``. Imports the rest only when a command runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.commands.errors import WrongUsage

if TYPE_CHECKING:
    from gateway.commands.offline.command import OfflineOptions

_TABLES = (".jsonl", ".csv", ".parquet")
_LOCAL = "http://127.0.0.1:8000"
_ITEMS_A_REQUEST, _ROWS_A_REQUEST = 200, 32
_ROW_OPTIONS = ("readout", "query_column", "items_column", "item_column", "keep", "concurrency", "retry_seconds")
_LIST_OPTIONS = ("sort", "format")
"""Options of ``yardstick score`` that work only with --input or only with --items."""
_RERANK_ROW_OPTIONS = ("query_column", "documents_column", "document_column", "keep", "concurrency", "retry_seconds")
_RERANK_LIST_OPTIONS = ("query", "top_n", "format")
"""Options of ``yardstick rerank`` that work only with --input or only with --documents."""


class Format(StrEnum):
    """Output formats of ``yardstick score --items`` and ``yardstick rerank --documents``."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class ReadoutOption(StrEnum):
    """Readouts of ``yardstick score``."""

    LABELS = "labels"
    LIKELIHOOD = "likelihood"


class InputType(StrEnum):
    """Kinds of embedded texts."""

    QUERY = "query"
    DOCUMENT = "document"


Input = Annotated[Path, typer.Option(help="File of rows: .jsonl, .csv or .parquet.")]
Output = Annotated[Path, typer.Option(help="File of results; the ending selects the format. The same command continues it.")]
Url = Annotated[str | None, typer.Option(help="URL of a gateway; without it, the command starts an engine and a gateway.")]
ApiKey = Annotated[str | None, typer.Option(envvar="YARDSTICK_API_KEY", help="API key, if the gateway needs one.")]
Model = Annotated[
    str | None, typer.Option(help="With --url: name of the model, if several are served. Else its directory or hub id.")
]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Most requests in flight; fewer while the server answers 429.")]
RetrySeconds = Annotated[float, typer.Option(min=0, help="Longest time that a request waits for a busy server.")]
Keep = Annotated[list[str] | None, typer.Option(help="Column of the input to repeat in the output; repeat for several.")]
Rows = Annotated[int, typer.Option(min=1, max=1000, help="Most rows that share a request.")]
QueryColumn = Annotated[str, typer.Option(help="Column of queries.")]
Instruction = Annotated[str | None, typer.Option(help="Instruction for the model; by default its preset's.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long; without it, they are failures.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (rerank, score, embed, batch):
        app.command()(command)


def rerank(
    context: typer.Context,
    query: Annotated[str | None, typer.Option(help="With --documents: the query.")] = None,
    documents: Annotated[
        typer.FileText | None, typer.Option(encoding="utf-8", help="File with one document per line; - reads standard input.")
    ] = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="With --documents: write this many, the most relevant first.")] = None,
    format: Annotated[Format | None, typer.Option(help="With --documents: how to write the results (table).")] = None,
    input: Annotated[Path | None, typer.Option(help="File of rows, instead of --documents: .jsonl, .csv or .parquet.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write to; with --documents, by default standard output.")] = None,
    url: Annotated[
        str | None, typer.Option(help=f"URL of the gateway. Default: {_LOCAL}; with --input, the command starts one.")
    ] = None,
    api_key: ApiKey = None,
    model: Model = None,
    query_column: QueryColumn = "query",
    documents_column: Annotated[str, typer.Option(help="Column of lists of documents.")] = "documents",
    document_column: Annotated[str, typer.Option(help="Column of single documents, if there are no lists.")] = "document",
    instruction: Instruction = None,
    truncate: Truncate = False,
    keep: Keep = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help=f"Documents a request ({_ITEMS_A_REQUEST}; with --input, {_ROWS_A_REQUEST} rows)."),
    ] = None,
    concurrency: Concurrency = 16,
    retry_seconds: RetrySeconds = 600,
) -> None:
    """Score the relevance of documents to a query: a list of documents on a running server, or a file of rows."""
    if (documents is None) == (input is None):
        raise WrongUsage("give either --documents, a list of documents, or --input, a file of rows")
    wrong = _RERANK_ROW_OPTIONS if input is None else _RERANK_LIST_OPTIONS
    _check_form(context, wrong, "--input" if input is None else "--documents")
    if documents is not None:
        from gateway.commands import score as lists
        from gateway.commands.results import write

        if query is None:
            raise WrongUsage("--documents needs --query")
        size = batch or _ITEMS_A_REQUEST
        job = lists.RerankJob(query, url or _LOCAL, api_key, model, instruction, truncate, top_n, size)
        write(lists.rerank(job, documents), (format or Format.TABLE).value, output)
        return
    if input is None or output is None:
        raise WrongUsage("--input needs --output, whose ending selects the format")
    from gateway.commands.offline.command import execute
    from gateway.commands.offline.tasks.rerank import RerankOptions

    columns = (query_column, documents_column, document_column)
    chosen = RerankOptions(*columns, model if url else None, instruction, truncate, tuple(keep or ()), batch or _ROWS_A_REQUEST)
    common = _common(input, output, url, api_key, model, concurrency, retry_seconds)
    raise typer.Exit(execute(common, chosen.task, _TABLES))


def embed(
    input: Input,
    output: Output,
    url: Url = None,
    api_key: ApiKey = None,
    model: Model = None,
    text_column: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    dimensions: Annotated[int | None, typer.Option(min=1, help="Length of the embeddings; the model's size by default.")] = None,
    input_type: Annotated[InputType | None, typer.Option(help="Whether the texts are queries or documents.")] = None,
    instruction: Instruction = None,
    truncate: Truncate = False,
    keep: Keep = None,
    batch: Rows = _ROWS_A_REQUEST,
    concurrency: Concurrency = 16,
    retry_seconds: RetrySeconds = 600,
) -> None:
    """Embed the texts in a file."""
    from gateway.commands.offline.command import execute
    from gateway.commands.offline.tasks.embed import EmbedOptions

    kind = input_type.value if input_type else None
    chosen = EmbedOptions(text_column, model if url else None, dimensions, kind, instruction, truncate, tuple(keep or ()), batch)
    common = _common(input, output, url, api_key, model, concurrency, retry_seconds)
    raise typer.Exit(execute(common, chosen.task, _TABLES))


def batch(
    input: Annotated[Path, typer.Option(help="OpenAI's batch file: .jsonl with custom_id, method, url and body.")],
    output: Annotated[Path, typer.Option(help="File of answers, .jsonl. The same command continues it.")],
    url: Url = None,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Without --url: directory or hub id of the model.")] = None,
    concurrency: Concurrency = 16,
    retry_seconds: RetrySeconds = 600,
) -> None:
    """Send the requests of an OpenAI batch file."""
    from gateway.commands.offline.command import execute
    from gateway.commands.offline.tasks.batch import Batch

    if input.suffix.lower() != ".jsonl":
        raise WrongUsage(f"{input} does not end in .jsonl")
    common = _common(input, output, url, api_key, model, concurrency, retry_seconds)
    raise typer.Exit(execute(common, lambda _: Batch(), (".jsonl",)))


def score(
    context: typer.Context,
    labels: Annotated[str | None, typer.Option(help="Tokens to score, separated by commas: Yes,No")] = None,
    query: Annotated[str | None, typer.Option(help="Text that all prompts share; with --input, a column may have it.")] = None,
    items: Annotated[
        typer.FileText | None, typer.Option(encoding="utf-8", help="File with one item per line; - reads standard input.")
    ] = None,
    input: Annotated[Path | None, typer.Option(help="File of rows, instead of --items: .jsonl, .csv or .parquet.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write to; with --items, by default standard output.")] = None,
    url: Annotated[
        str | None, typer.Option(help=f"URL of the gateway. Default: {_LOCAL}; with --input, the command starts one.")
    ] = None,
    api_key: ApiKey = None,
    model: Model = None,
    readout: Annotated[
        ReadoutOption, typer.Option(help="With --input: probabilities of labels, or the log-probability of each item's own tokens.")
    ] = ReadoutOption.LABELS,
    apply_softmax: Annotated[bool, typer.Option("--apply-softmax", help="Scale the scores of an item to a sum of 1.")] = False,
    item_first: Annotated[bool, typer.Option("--item-first", help="Put the item before the query.")] = False,
    suffix: Annotated[str, typer.Option(help="Text added to each item, such as the question to answer about it.")] = "",
    sort: Annotated[bool, typer.Option("--sort", help="With --items: order by the first label, best first.")] = False,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help=f"Items a request ({_ITEMS_A_REQUEST}; with --input, {_ROWS_A_REQUEST} rows)."),
    ] = None,
    format: Annotated[Format | None, typer.Option(help="With --items: how to write the results (table).")] = None,
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
    if (labels is None) == (readout is ReadoutOption.LABELS):
        raise WrongUsage("--readout likelihood goes without --labels" if labels is not None else "give --labels, such as Yes,No")
    named = () if labels is None else tuple(labels.split(","))
    if (items is None) == (input is None):
        raise WrongUsage("give either --items, a list of items, or --input, a file of rows")
    _check_form(context, _ROW_OPTIONS if input is None else _LIST_OPTIONS, "--input" if input is None else "--items")
    if items is not None:
        from gateway.commands.results import write
        from gateway.commands.score import ScoreJob, run

        if query is None:
            raise WrongUsage("--items needs --query")
        size = batch or _ITEMS_A_REQUEST
        job = ScoreJob(query, named, url or _LOCAL, api_key, model, apply_softmax, item_first, size, suffix)
        write(run(job, items), (format or Format.TABLE).value, output, by_first_label=sort)
        return
    if input is None or output is None:
        raise WrongUsage("--input needs --output, whose ending selects the format")
    from gateway.commands.offline.command import execute
    from gateway.commands.offline.tasks.score import ScoreOptions

    chosen = ScoreOptions(
        labels=named,
        query=query,
        query_column=query_column,
        items_column=items_column,
        item_column=item_column,
        model=model if url else None,
        apply_softmax=apply_softmax,
        item_first=item_first,
        suffix=suffix,
        likelihood=readout is ReadoutOption.LIKELIHOOD,
        keep=tuple(keep or ()),
        batch=batch or _ROWS_A_REQUEST,
    )
    common = _common(input, output, url, api_key, model, concurrency, retry_seconds)
    raise typer.Exit(execute(common, chosen.task, _TABLES))


def _check_form(context: typer.Context, names: tuple[str, ...], other: str) -> None:
    """Check that no option of the other form of the command is given. Raises :class:`WrongUsage`."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise WrongUsage(f"--{name.replace('_', '-')} works only with {other}")


def _common(
    input: Path, output: Path, url: str | None, api_key: str | None, model: str | None, concurrency: int, retry_seconds: float
) -> OfflineOptions:
    from gateway.commands.offline.command import OfflineOptions

    return OfflineOptions(input, output, url, api_key, model, concurrency, retry_seconds)
