"""The program `howsmooth`: its commands, their help, its version and its exit codes.

Each command is imported when it is used, so that a list of them needs neither torch nor time.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption
from typer.main import get_command

from howsmooth.cli.terminal import CODES, INTERRUPTED, OneLineErrors, complain

COMMANDS = (
    *("measure", "bounds", "worst-case", "certify", "scan", "merge", "quantise", "quantize", "noise", "report"),
    *("compare", "reproduce", "train", "models", "demo"),
)
"""Every command, in the order of the list."""
_SPELLINGS = {"quantize": "quantise"}
"""Other spellings, which the list leaves out → the command."""
PANELS = (WHAT, WHERE, EXACT, TRAINING, OUTPUT, DETAILS, ENGINE) = (
    *("What to measure", "Where", "How exact", "Training", "Output"),
    *("What to measure, in detail", "Engine"),
)
"""Titles of the groups of options, in the order in which help shows them."""
_ONLY_IN_FULL = (DETAILS, ENGINE)
"""Groups that --help-all shows and --help does not."""
FULL = "howsmooth.full_help"
"""Key of a context's ``meta`` for help with all options."""
GLOSSARY = "Words are explained at https://howsmooth.readthedocs.io/en/latest/glossary/."


class ListedOption(TyperOption):
    """An option as help shows it: a flag without a type, a number without the range that an error would name."""

    def __init__(self, option: TyperOption):
        vars(self).update(vars(option))

    def display_type_rich(self, ctx: Any) -> str | None:
        shown = str(super().display_type_rich(ctx)).lower().replace(" range", "")
        return None if self.is_flag else re.sub(r"list\[(.*)\]", r"\1", shown)

    def _get_number_range_help_str(self) -> str | None:
        return None


def _listed(params: Iterable[Any] | None) -> list[Any]:
    return [ListedOption(param) if isinstance(param, TyperOption) else param for param in params or []]


def _reflowed(text: str) -> str:
    """The paragraphs of a docstring as one line each; examples stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(one if one.startswith("Example") else " ".join(one.split()) for one in paragraphs)


class PanelCommand(TyperCommand):
    """A command whose --help leaves out the groups of options that few need."""

    def __init__(self, *args: Any, params: Iterable[Any] | None = None, **given: Any):
        super().__init__(*args, params=_listed(params), **given)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        arguments = [param for param in self.params if not isinstance(param, TyperOption)]
        panels = {panel: [p for p in self.params if getattr(p, "rich_help_panel", "") == panel] for panel in PANELS}
        brief = FULL not in ctx.meta
        shown = [param for panel, group in panels.items() if not (brief and panel in _ONLY_IN_FULL) for param in group]
        left_out = len(self.params) - len(arguments) - len(shown)
        epilog = f"{left_out} more options: {ctx.command_path} --help-all" if left_out else None
        listing = TyperCommand(
            self.name,
            params=[*arguments, *shown],
            help=_reflowed(self.help or ""),
            epilog=epilog,
            add_help_option=False,
        )
        listing.format_help(ctx, formatter)


class Commands(OneLineErrors):
    """All commands of `COMMANDS`."""

    def __init__(self, *, params: Iterable[Any] | None = None, **given: Any):
        commands = {name: LazyCommand(name) for name in COMMANDS}
        super().__init__(**given | {"commands": commands, "params": _listed(params)})

    def get_params(self, ctx: Any) -> Any:
        return _listed(super().get_params(ctx))


class LazyCommand(TyperCommand):
    """A command of which only name and summary are known until it is used."""

    def __init__(self, name: str):
        self._module = _SPELLINGS.get(name, name).replace("-", "_")
        self._command: Any = None
        super().__init__(name, help=_summary(self._module), hidden=name in _SPELLINGS, rich_markup_mode="rich")

    @property
    def command(self) -> Any:
        """The command itself, from the module of its name."""
        if self._command is None:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
            function = getattr(import_module(f"howsmooth.cli.{self._module}"), self._module)
            alone.command(self.name, cls=PanelCommand, hidden=self.hidden)(function)
            self._command = get_command(alone)
        return self._command

    @property
    def params(self) -> Any:
        """Its options and arguments."""
        return self.command.params

    @params.setter
    def params(self, given: Any) -> None:
        """None of its own."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        return self.command.make_context(*args, **options)


def _summary(module: str) -> str:
    """The first paragraph of the docstring of a command, read from its file without an import.

    >>> _summary("merge")
    'Join stores that `howsmooth scan` wrote into a new one.'
    """
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    found = re.search(rf'^def {module}\(.*?"""(.*?)\n\n', source, re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


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
