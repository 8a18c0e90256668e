"""The command ``yardstick``. Each subcommand imports its modules when it runs, so that help is fast."""

from __future__ import annotations

import errno
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gateway.commands import catalogue_options
from gateway.commands.errors import CommandError
from gateway.commands.offline import options as offline
from gateway.process.early_end import end_quietly

app = typer.Typer(
    help="Score lists of items with a language model, and generate text, behind an OpenAI-compatible gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
keys = typer.Typer(help="Manage the API keys of a gateway.", no_args_is_help=True)
app.add_typer(keys, name="keys")
offline.add_commands(app)
app.add_typer(catalogue_options.catalogues, name="catalogue")

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

_MOMENTS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]


class CatalogueAccess(StrEnum):
    """Permissions of a key on catalogues."""

    WRITE = "write"
    READ = "read"


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
        from tracing.version import project_version

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
    model: Annotated[str | None, typer.Option(help="Model directory or hub id; without it, the demo model.")] = None,
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
    options override them. All other options, such as --dtype, --quantize and --lora, are passed to the engines."""
    end_quietly()
    from gateway.commands.serve import ServeOptions, serve

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
        engine=context.args,
    )
    serve(options)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run a gateway alone, in front of engines."""
    end_quietly()
    from gateway.commands.launch import become

    become("gateway", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Run an engine alone."""
    end_quietly()
    from gateway.commands.launch import become

    become("engine", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure engine, kernels and gateway on this machine; needs a source checkout."""
    from gateway.commands.bench import bench

    bench(context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def load(context: typer.Context) -> None:
    """Load-test a running server and report the results."""
    from gateway.commands.launch import become

    become("loadgen", context.args)


@app.command()
def presets(name: Annotated[str | None, typer.Argument(help="Preset to print, or a .toml file to check.")] = None) -> None:
    """List the presets, which say how models are prompted and read, or print one."""
    from gateway.commands.presets import list_presets, show_preset

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
        CatalogueAccess | None, typer.Option(help="Whether the key may change catalogues of its group; default: write.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The key may load and unload adapters.")] = False,
) -> None:
    """Create an API key. The key is printed once, and the file stores only its hash. A gateway that serves with this file accepts
    the key at once."""
    from gateway.commands.keys import new

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
        "catalogues": catalogues and catalogues.value,
        "admin": admin or None,
    }
    new(name, file, **{field: value for field, value in fields.items() if value is not None})


if __name__ == "__main__":
    main()
