"""Options that several commands share, each with one meaning; groups of options in dataclasses; the help panels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer import Option

from howsmooth._util.common import check_figure_path
from howsmooth.cli.program import DETAILS, ENGINE, EXACT, FULL, OUTPUT, TRAINING, WHAT, WHERE
from howsmooth.cli.terminal import MAXIMUM_SEED, MAXIMUM_THREADS, parse_bytes
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from howsmooth.engines import Engine


def option(panel: str, text: str, *flags: str, **settings: Any) -> Any:
    """An option in a panel of the help, with its text there."""
    return Option(*flags, help=text, rich_help_panel=panel, **settings)


what_option, where_option, exact_option, training_option, output_option, details_option, engine_option = (
    partial(option, panel) for panel in (WHAT, WHERE, EXACT, TRAINING, OUTPUT, DETAILS, ENGINE)
)


def length_option(text: str) -> Any:
    """A number of tokens, or several."""
    return where_option(text, metavar="<n,n,…>")


def out_option(text: str) -> Any:
    """The file or folder to write."""
    return output_option(text, "--out", "-o")


def _full_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[FULL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


AsJson = Annotated[bool, output_option("Print JSON.", "--json")]
Debug = Annotated[bool, output_option("Show the traceback of an error.", "--debug")]
FullHelp = Annotated[
    bool,
    output_option("Show all options.", "--help-all", is_eager=True, callback=_full_help),
]
Threads = Annotated[int | None, engine_option("Threads for torch (all free cores).", min=1, max=MAXIMUM_THREADS)]
Device = Annotated[str | None, engine_option("Where to compute, for example cuda (cpu).")]
Dtype = Annotated[
    str | None,
    exact_option("Of weights and tokens: auto (as stored), float64, float32, bfloat16 or float16 (auto)."),
]
Rtol = Annotated[float | None, exact_option("Relative accuracy of the two ends.")]
Confidence = Annotated[float | None, exact_option("Probability with which an upper end holds.")]


def _picture(path: Path | None) -> Path | None:
    if path is not None:
        check_figure_path(path)
    return path


Figure = Annotated[Path | None, output_option("Write a picture: .png, .svg or .pdf.", callback=_picture)]
Report = Annotated[
    Path | None, output_option("Write a page: a section of one that `howsmooth report` wrote, else a new one.")
]
seed_option = partial(exact_option, "Seed of everything that is drawn.", min=0, max=MAXIMUM_SEED)
Seed = Annotated[int, seed_option()]
Text = Annotated[
    Path | None, where_option("File that the model reads: a text, an image or a .wav (Alice in Wonderland).")
]
Resume = Annotated[bool, output_option("Keep what --out already has, or begin anew.")]
_ENGINES_OF = {
    "partition": ("slurm",),
    "time": ("slurm",),
    "job_memory": ("slurm",),
    "cores": ("slurm", "ray"),
    "address": ("ray",),
}
"""Option → the engines that take it."""
_LONGEST = 2**24
FOLDER = Path("howsmooth-output")
"""Folder of all that is written without --out."""


def one_length(text: str, minimum: int = 1) -> int:
    """The number of tokens of a command that takes one alone.

    >>> one_length("64")
    64
    """
    from howsmooth.scans.plan import parse_lengths

    length, *others = parse_lengths(text)
    if others or not minimum <= length <= _LONGEST:
        raise InvalidInput(f"--length is one number of tokens here, from {minimum} to {_LONGEST}, got {text!r}.")
    return length


def default_output(name: str, suffix: str = "") -> Path:
    """A file or folder of this name, without characters that would need quotes.

    >>> default_output("scan-org/model[width=8]", ".sqlite").name
    'scan-org-model-width-8.sqlite'
    """
    return FOLDER / (re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") + suffix)


@dataclass(frozen=True)
class EngineOptions:
    """The workers: this process, several processes, or a cluster."""

    jobs: Annotated[
        int | None,
        engine_option("Workers: processes, tasks of a SLURM array or of Ray at a time (1).", min=1, max=10_000),
    ] = None
    engine: Annotated[
        str | None, engine_option("processes (on this machine), slurm or ray; slurm and ray are extras.")
    ] = None
    cores: Annotated[
        int | None, engine_option("Cores, and threads of torch, of a task of SLURM or Ray (1).", min=1, max=1024)
    ] = None
    address: Annotated[str | None, engine_option("Address of the Ray cluster (one is started here).")] = None
    partition: Annotated[str | None, engine_option("Partition of SLURM jobs (the cluster's own choice).")] = None
    time: Annotated[int | None, engine_option("Minutes for a SLURM job (60).", min=1)] = None
    job_memory: Annotated[str | None, engine_option("Memory of a SLURM job, for example 8GB (4GB).")] = None

    def chosen(self) -> Engine | None:
        """The engine; None for this process."""
        from howsmooth.engines import Engine

        for name, engines in _ENGINES_OF.items():
            if getattr(self, name) is not None and self.engine not in engines:
                flag, hint = name.replace("_", "-"), "; on this machine, --threads are divided" * (name == "cores")
                raise InvalidInput(f"--{flag} is for --engine {' or '.join(engines)}: add that, or leave it out{hint}.")
        if self.engine is None and self.jobs in (None, 1):
            return None
        named: dict[str, Any] = {"kind": self.engine, "jobs": self.jobs, "address": self.address}
        size = None if self.job_memory is None else max(1, parse_bytes(self.job_memory) // 10**6)
        named |= {"partition": self.partition, "time": self.time, "memory": size, "threads": self.cores}
        return Engine(**{name: value for name, value in named.items() if value is not None})


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
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        groups = {n: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for n, kind in self.groups.items()}
        self.function(**groups, **given)
