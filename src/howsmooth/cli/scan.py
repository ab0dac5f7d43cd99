"""`howsmooth scan`: a model on a text, every cell kept as soon as it is measured."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from howsmooth.cli.console import INTERRUPTED, MOST_SEED, NOT_CONVERGED, plain_json, set_threads, stderr, stdout
from howsmooth.cli.endings import complain, stop_word
from howsmooth.cli.sources import spread
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.small import distinct_files, printable

FOLDER = Path("howsmooth-output")
EXPORTS = {".csv": "to_csv", ".parquet": "to_parquet", ".json": "to_json"}


@dataclass(frozen=True)
class Wish:
    """What to scan, None where nothing was said; the options of the command and the keys of its config file."""

    model: Annotated[str | None, typer.Argument(help="A named model (minilm), a folder, a hub id, or random:KIND.")] = (
        None
    )
    text: Annotated[
        Path | None, typer.Option(help="What the model reads: a text, image or .wav file (Alice in Wonderland).")
    ] = None
    lengths: Annotated[str | None, typer.Option(help="Tokens per window: 64,128 or 8,16,…,512 (128).")] = None
    windows: Annotated[int | None, typer.Option(min=1, help="Windows cut from the text for each length (1).")] = None
    layers: Annotated[str | None, typer.Option(help="For example 0,2-4 (all).")] = None
    what: Annotated[
        str | None,
        typer.Option(
            help="head, attention, residual, mlp, layer, prefix, model, logits, one or several; with a choice: "
            "head\\[layers=0-5,heads=3] (head)."
        ),
    ] = None
    out: Annotated[Path | None, typer.Option(help="Store to write (howsmooth-output/scan-MODEL.sqlite).")] = None
    rtol: Annotated[float | None, typer.Option(help="Relative accuracy to certify (0.001).")] = None
    confidence: Annotated[float | None, typer.Option(help="Probability with which each upper end holds (0.99).")] = None
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST_SEED, help="Of the windows and of the solver's start (0).")
    ] = None
    bounds: Annotated[
        str | None, typer.Option(help="Upper bounds: none, proved (the three-path bound alone), cheap or all (cheap).")
    ] = None
    explain: Annotated[
        bool | None, typer.Option("--explain/--no-explain", help="Also value and score path, sink, entropy (yes).")
    ] = None

    def over(self, base: dict[str, Any]) -> dict[str, Any]:
        """These wishes where they say something, those of ``base`` elsewhere."""
        return base | {name: value for name, value in vars(self).items() if value is not None}


@spread
def scan(
    wish: Wish,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these options; flags win.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep what the store has, or measure anew.")
    ] = True,
    export: Annotated[
        list[Path] | None, typer.Option(help="Also write the rows: .csv, .parquet or .json; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as a JSON list.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for torch.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure every head (or layer, or the whole) of a model on windows of a text.

    Each number comes with its lower and upper ends, the proved three-path bound, and why it is as large as it is. A
    scan that was stopped goes on where it was when the same command is given again.

    Examples:\n
      howsmooth scan minilm\n
      howsmooth scan minilm --text novel.txt --lengths 8,16,…,512 --windows 10 --what heads,attention\n
      howsmooth scan smollm2 --layers 0,2-4 --what "head\\[heads=0-2],layer" --out smollm2.sqlite\n
      howsmooth scan --config scan.toml --rtol 1e-4 --export rows.csv --json
    """
    from howsmooth.reporting import summary
    from howsmooth.scanning import scan as run

    wanted = wish.over({} if config is None else read_config(config))
    model = wanted.pop("model", None)
    if model is None:
        raise InvalidInput("which model? Name one, for example `howsmooth scan minilm`, or set model in --config.")
    for path in export or []:
        if path.suffix not in EXPORTS:
            raise InvalidInput(f"cannot export to {path}: the name ends in {', '.join(EXPORTS)}.")
    out = wanted.pop("out", None)
    out = default_store(model) if out is None else Path(out)
    distinct_files(
        read=[*_files_of(model), ("--text", wanted.get("text")), ("--config", config)],
        written=[("--out", out), *(("--export", path) for path in export or [])],
    )
    set_threads(threads)
    with keeping(out) as progress:
        found = run(model, out=out, resume=resume, progress=progress, **wanted)
    for note in found.notes:
        typer.echo(f"howsmooth: note: {printable(note)}.", err=True)
    for path in export or []:
        getattr(found, EXPORTS[path.suffix])(path)
    if as_json:
        typer.echo(plain_json(found.json()))
    else:
        console = stdout()
        console.print(summary(found))
        console.print(f"Store: {out}", markup=False, soft_wrap=True)
    if not all(row["converged"] for row in found.rows):
        raise typer.Exit(NOT_CONVERGED)


def default_store(model: str) -> Path:
    """Where the cells of a model go when nothing is said.

    >>> default_store("org/some-model").name
    'scan-org-some-model.sqlite'
    """
    return FOLDER / f"scan-{re.sub(r'[^A-Za-z0-9._]+', '-', model).strip('-')}.sqlite"


def _files_of(model: str) -> list[tuple[str, Path]]:
    """The files that a model is read from, where it is no name."""
    try:
        place = Path(model)
        return [("MODEL", file) for file in (place.iterdir() if place.is_dir() else [place]) if file.is_file()]
    except (OSError, ValueError):  # no path at all
        return []


def read_config(path: Path) -> dict[str, Any]:
    """The options of a TOML file, with the values that flags would have."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise InvalidInput(f"{path} is nested too deeply: write lines such as lengths = [64, 128].") from None
    except (ValueError, UnicodeDecodeError) as error:  # numbers of too many digits too
        raise InvalidInput(f"{path} is not TOML ({error}): write lines such as lengths = [64, 128].") from None
    names = [field.name for field in fields(Wish)]
    unknown = [name for name in found if name not in names]
    if unknown:
        raise InvalidInput(f"{path} sets {unknown[0]!r}, which is no option of a scan: choose from {', '.join(names)}.")
    for name, kinds in _KINDS.items():
        if name in found and type(found[name]) not in kinds:
            raise InvalidInput(f"{path} sets {name} to {found[name]!r:.60}: write it as on the command line.")
        if "\0" in str(found.get(name)):
            raise InvalidInput(f"{path} sets {name} to a text with a zero byte: write it as on the command line.")
    for name in {"text", "out"} & found.keys():
        found[name] = Path(found[name])
    return found


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(["model", "text", "out", "bounds"], (str,)),
    **dict.fromkeys(["lengths", "layers"], (str, int, list)),
    "what": (str, list),
    **dict.fromkeys(["windows", "seed"], (int,)),
    **dict.fromkeys(["rtol", "confidence"], (float,)),
    "explain": (bool,),
}


@contextmanager
def keeping(out: Path) -> Iterator[Callable[[Any], None]]:
    """A bar on stderr with the time left; and after Ctrl-C one line that says what was kept."""
    console = stderr()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[cells]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    kept = ""
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("opening the model", total=1.0, cells="")

            def show(now: Any) -> None:
                nonlocal kept
                kept = f"{now.cells} of {now.total} cells"
                bar.update(task, description=now.label, completed=now.work, cells=kept)

            yield show
    except KeyboardInterrupt:
        said = f"{kept} are kept in {out}; the same command goes on from there" if kept else _kept_before(out)
        complain(f"{stop_word()}: {said}.")
        raise SystemExit(INTERRUPTED) from None


def _kept_before(out: Path) -> str:
    """What a store has when a scan is stopped before it has begun to measure."""
    from howsmooth.scanning import Store

    try:
        with Store.reading(out) as store:
            count = store.count()
    except (HowsmoothError, OSError):
        count = 0
    return f"nothing new was measured; the {count} cells in {out} are kept" if count else "nothing was measured yet"
