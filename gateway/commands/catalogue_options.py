"""Options of ``yardstick catalogue``. Imports the rest only when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

catalogues = typer.Typer(help="Register items that requests score by their ids.", no_args_is_help=True)

_LOCAL = "http://127.0.0.1:8000"
Catalogue = Annotated[str, typer.Option(help="Name of the catalogue.")]
Url = Annotated[str, typer.Option(help="URL of the gateway.")]
ApiKey = Annotated[str | None, typer.Option(envvar="YARDSTICK_API_KEY", help="API key, if the gateway needs one.")]


@catalogues.command()
def load(
    file: Annotated[Path, typer.Argument(help="File of items: .jsonl, .csv or .parquet. Each id occurs once.")],
    catalogue: Catalogue,
    url: Url = _LOCAL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model of a new catalogue, if several are served.")] = None,
    preset: Annotated[bool, typer.Option("--preset", help="Take template and labels of a new catalogue from the preset.")] = False,
    template: Annotated[
        list[str] | None, typer.Option(help="Prompts of a new catalogue, with {item} and {query}; repeat for several pieces.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Label of a new catalogue; repeat for several.")] = None,
    ttl_seconds: Annotated[float | None, typer.Option(min=0, help="Time after which items of a new catalogue expire.")] = None,
    id_column: Annotated[str, typer.Option(help="Column of ids.")] = "id",
    text_column: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    batch: Annotated[int, typer.Option(min=1, max=2000, help="Items of a request.")] = 500,
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Most requests in flight; fewer while the server answers 429.")
    ] = 4,
    retry_seconds: Annotated[float, typer.Option(min=0, help="Longest time that a request waits for a busy server.")] = 600.0,
    start_row: Annotated[int, typer.Option(min=1, help="First row to send, to continue a load that was interrupted.")] = 1,
) -> None:
    """Create a catalogue if there is none, and register the items of a file. Repeating the command changes nothing: items that
    the server has with the same text keep their cached keys, values and scores."""
    from gateway.commands.catalogue import Form, Load, load

    form = Form(model, template or None, label or None, ttl_seconds, preset or None)
    load(Load(file, catalogue, url, api_key, form, id_column, text_column, batch, concurrency, retry_seconds, start_row))


@catalogues.command()
def status(catalogue: Catalogue, url: Url = _LOCAL, api_key: ApiKey = None) -> None:
    """Print what a catalogue holds, as JSON."""
    from gateway.commands.catalogue import Access, status

    status(Access(url, api_key), catalogue)


@catalogues.command()
def delete(catalogue: Catalogue, url: Url = _LOCAL, api_key: ApiKey = None) -> None:
    """Delete a catalogue and its items."""
    from gateway.commands.catalogue import Access, delete

    delete(Access(url, api_key), catalogue)
