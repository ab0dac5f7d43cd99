"""Commands whose options stand in one place: groups of them in dataclasses, and those that nearly all share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Option

from howsmooth.cli.console import set_threads

AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
RowsAsJson = Annotated[bool, Option("--json", help="Print the rows as a JSON list.")]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]
Threads = Annotated[int | None, Option(min=1, help="Threads for torch.")]
Device = Annotated[str | None, Option(help="Where to compute, for example cuda (cpu).")]
WeightDtype = Annotated[
    str | None,
    Option(help="auto (weights as stored, computed in float32), float64, or bfloat16 or float16 weights (auto)."),
]
Picture = Annotated[Path | None, Option(help="Write a picture: .png, .svg or .pdf.")]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a command: an option per field of each parameter that is a dataclass; --threads and --debug last.

    ``--debug`` is looked at where errors are reported.
    """
    hints: dict[str, Any] = get_type_hints(function)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if name in groups:
            annotations = get_type_hints(groups[name], include_extras=True)
            options |= {field.name: (field.default, annotations[field.name]) for field in fields(groups[name])}
        else:
            options[name] = parameter.default, parameter.annotation
    options |= {"threads": (None, Threads), "debug": (False, Debug)}

    @wraps(function)
    def run(threads: int | None = None, debug: bool = False, **given: Any) -> None:
        set_threads(threads)
        built = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        function(**built, **given)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (default, annotation) in options.items()
        ]
    )
    return run
