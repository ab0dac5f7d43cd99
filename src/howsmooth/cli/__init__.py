"""The command line: `howsmooth COMMAND …`, one module per command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from howsmooth.cli.bounds import bounds
from howsmooth.cli.certify import certify
from howsmooth.cli.demo import demo
from howsmooth.cli.endings import CODES, INTERRUPTED, OneLineErrors, complain, stop_word
from howsmooth.cli.measure import measure
from howsmooth.cli.models import models
from howsmooth.cli.noise import noise
from howsmooth.cli.quantise import quantise
from howsmooth.cli.report import report
from howsmooth.cli.reproduce import reproduce
from howsmooth.cli.scan import scan
from howsmooth.cli.train import train
from howsmooth.cli.worst_case import worst_case

__all__ = ["app", "main"]

app = typer.Typer(
    cls=OneLineErrors,
    name="howsmooth",
    help="How smooth is this attention? Measures and bounds the Lipschitz constant of self-attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=CODES,
)
app.command()(measure)
app.command()(bounds)
app.command("worst-case")(worst_case)
app.command()(certify)
app.command()(scan)
app.command()(quantise)
app.command("quantize", hidden=True)(quantise)
app.command()(noise)
app.command()(report)
app.command()(reproduce)
app.command()(train)
app.command()(models)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        from howsmooth import __version__

        typer.echo(f"howsmooth {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> None:
    """The console script."""
    try:
        app(args, prog_name="howsmooth")
    except KeyboardInterrupt:  # before the command had begun
        complain(stop_word())
        sys.exit(INTERRUPTED)
