"""Options that several commands share, each with one meaning; groups of options in dataclasses; the help panels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

from howsmooth._util.common import check_figure_path
from howsmooth.cli.console import MAXIMUM_SEED, set_threads
from howsmooth.cli.lazy_commands import DETAILS, ENGINE, EXACT, FULL, OUTPUT, TRAINING, WHAT, WHERE
from howsmooth.errors import InvalidInput

what_option, where_option, exact_option, training_option, output_option, details_option, engine_option = (
    partial(Option, rich_help_panel=panel) for panel in (WHAT, WHERE, EXACT, TRAINING, OUTPUT, DETAILS, ENGINE)
)


def _full_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[FULL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


AsJson = Annotated[bool, output_option("--json", help="Print JSON.")]
Debug = Annotated[bool, output_option("--debug", help="Show the traceback of an error.")]
FullHelp = Annotated[
    bool,
    output_option("--help-all", is_eager=True, callback=_full_help, help="Show all options."),
]
Threads = Annotated[int | None, engine_option(min=1, help="Threads for torch (all free cores).")]
Device = Annotated[str | None, engine_option(help="Where to compute, for example cuda (cpu).")]
Dtype = Annotated[
    str | None,
    exact_option(help="Of weights and tokens: auto (as stored), float64, float32, bfloat16 or float16 (auto)."),
]
Rtol = Annotated[float | None, exact_option(help="Relative accuracy of the two ends.")]
Confidence = Annotated[float | None, exact_option(help="Probability with which an upper end holds.")]


def _picture(path: Path | None) -> Path | None:
    if path is not None:
        check_figure_path(path)
    return path


Figure = Annotated[Path | None, output_option(callback=_picture, help="Write a picture: .png, .svg or .pdf.")]
Report = Annotated[
    Path | None, output_option(help="Write a page: a section of one that `howsmooth report` wrote, else a new one.")
]
seed_option = partial(exact_option, "--seed", min=0, max=MAXIMUM_SEED, help="Seed of everything that is drawn.")
Seed = Annotated[int, seed_option()]
Text = Annotated[
    Path | None, where_option(help="File that the model reads: a text, an image or a .wav (Alice in Wonderland).")
]
Resume = Annotated[bool, output_option("--resume/--no-resume", help="Keep what --out already has, or begin anew.")]
FOLDER = Path("howsmooth-output")
"""Folder of all that is written without --out."""
length_option = partial(where_option, "--length", metavar="<n,n,…>")
out_option = partial(output_option, "--out", "-o")


def one_length(text: str, minimum: int = 1, maximum: int = 2**24) -> int:
    """The number of tokens of a command that takes one alone.

    >>> one_length("64")
    64
    """
    from howsmooth.scans.plan import parse_lengths

    length, *others = parse_lengths(text)
    if others or not minimum <= length <= maximum:
        raise InvalidInput(f"--length is one number of tokens here, from {minimum} to {maximum}, got {text!r}.")
    return length


def default_output(name: str, suffix: str = "") -> Path:
    """A file or folder of this name, without characters that would need quotes.

    >>> default_output("scan-org/model[width=8]", ".sqlite").name
    'scan-org-model-width-8.sqlite'
    """
    return FOLDER / (re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") + suffix)


class command:
    """The function as a command: an option per field of each parameter that is a dataclass, and three for all commands.

    ``--debug`` is read where errors are reported.
    """

    def __init__(self, function: Callable[..., None]):
        update_wrapper(self, function)
        self.function = function
        self.groups: dict[str, Any] = {n: kind for n, kind in get_type_hints(function).items() if is_dataclass(kind)}
        options: dict[str, tuple[Any, Any]] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            if name in self.groups:
                hints = get_type_hints(self.groups[name], include_extras=True)
                options |= {field.name: (field.default, hints[field.name]) for field in fields(self.groups[name])}
            else:
                options[name] = parameter.default, parameter.annotation
        options |= {"threads": (None, Threads), "debug": (False, Debug), "help_all": (False, FullHelp)}
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
                for name, (default, annotation) in options.items()
            ]
        )

    def __call__(self, threads: int | None, debug: bool, help_all: bool, **given: Any) -> None:
        set_threads(threads)
        groups = {n: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for n, kind in self.groups.items()}
        self.function(**groups, **given)
