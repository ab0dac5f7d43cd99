"""The program `howsmooth`: its commands, its version and its exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from howsmooth.cli.exit_codes import CODES, INTERRUPTED, complain
from howsmooth.cli.lazy_commands import Commands

GLOSSARY = "Words are explained at https://howsmooth.readthedocs.io/en/latest/glossary/."

app = typer.Typer(
    cls=Commands,
    name="howsmooth",
    help="How smooth is this attention? Measures and bounds the Lipschitz constant of self-attention.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=f"{CODES}\n\n{GLOSSARY}",
)


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


def leave_busy_cores() -> None:
    """Let torch take the cores that are free, before it is imported; where OMP_NUM_THREADS gives a number, that one.

    torch takes all cores. Beside other work each product then waits for the slowest thread: on two cores at a load of 5
    ``howsmooth measure random --width 512 --length 512`` took 46 s with two threads and 12 s with one.
    """
    try:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return
    if load >= 0.5:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores - round(load))))


def main(args: Sequence[str] | None = None) -> None:
    """The console script."""
    leave_busy_cores()
    try:
        app(args, prog_name="howsmooth")
    except KeyboardInterrupt:  # before the command had begun, when no other signal was listened for
        complain("interrupted")
        sys.exit(INTERRUPTED)
