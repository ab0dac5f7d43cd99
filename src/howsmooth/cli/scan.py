"""`howsmooth scan`: a model on a text, every cell kept as soon as it is measured."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Argument, Option

from howsmooth._util.common import distinct_files, printable
from howsmooth.cli.console import MOST_SEED, plain_json, progress_line, stdout
from howsmooth.cli.engine_options import Workers, print_plan
from howsmooth.cli.exit_codes import INTERRUPTED, NOT_CONVERGED, USER_ERROR, complain, stop_word
from howsmooth.cli.options import Device, RowsAsJson, WeightDtype, command
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.scans.shards import parse_shard

FOLDER = Path("howsmooth-output")
Reference = Enum("Reference", {"random": "random"})
EXPORTS = {".csv": "to_csv", ".parquet": "to_parquet", ".json": "to_json"}


@dataclass(frozen=True)
class Wish:
    """What to scan, None where nothing was said; the options of the command and the keys of its config file."""

    model: Annotated[str | None, Argument(help="A named model (minilm), a folder, a hub id, or random:KIND.")] = None
    text: Annotated[
        Path | None, Option(help="What the model reads: a text, image or .wav file (Alice in Wonderland).")
    ] = None
    lengths: Annotated[str | None, Option(help="Tokens per window: 64,128, 8,16,…,512 or 2,4,...,100 (128).")] = None
    windows: Annotated[int | None, Option(min=1, help="Windows cut from the text for each length (1).")] = None
    layers: Annotated[str | None, Option(help="For example 0,2-4 (all).")] = None
    what: Annotated[
        str | None,
        Option(
            help="head, attention, residual, mlp, layer, prefix, model, logits, one or several; with a choice: "
            "head\\[layers=0-5,heads=3] (head)."
        ),
    ] = None
    device: Device = None
    dtype: WeightDtype = None
    out: Annotated[Path | None, Option(help="Store to write (howsmooth-output/scan-MODEL.sqlite).")] = None
    rtol: Annotated[float | None, Option(help="Relative accuracy to certify (0.001).")] = None
    confidence: Annotated[float | None, Option(help="Probability with which each upper end holds (0.99).")] = None
    seed: Annotated[int | None, Option(min=0, max=MOST_SEED, help="Of the windows and of the solver's start (0).")] = (
        None
    )
    bounds: Annotated[
        str | None, Option(help="Upper bounds: none, proved (the three-path bound alone), cheap or all (cheap).")
    ] = None
    reference: Annotated[
        Reference | None,
        Option(help="random: also the same architecture with random weights, as a line to compare with."),
    ] = None
    explain: Annotated[
        bool | None, Option("--explain/--no-explain", help="Also value and score path, sink, entropy (yes).")
    ] = None

    def over(self, base: dict[str, Any]) -> dict[str, Any]:
        """These wishes where they say something, those of ``base`` elsewhere."""
        given = {name: getattr(value, "value", value) for name, value in vars(self).items() if value is not None}
        return base | given


@command
def scan(
    wish: Wish,
    workers: Workers,
    config: Annotated[Path | None, Option(help="TOML file with any of these options; flags win.")] = None,
    resume: Annotated[bool, Option("--resume/--no-resume", help="Keep what the store has, or measure anew.")] = True,
    export: Annotated[
        list[Path] | None, Option(help="Also write the rows: .csv, .parquet or .json; may be repeated.")
    ] = None,
    plan: Annotated[
        bool, Option("--plan", help="Measure nothing: print cells, time, memory, and a script for SLURM.")
    ] = False,
    as_json: RowsAsJson = False,
) -> None:
    """Measure every head (or layer, or the whole) of a model on windows of a text.

    Each number comes with its lower and upper ends, the proved three-path bound, and why it is as large as it is. A
    scan that was stopped goes on where it was when the same command is given again.

    Examples:\n
      howsmooth scan minilm\n
      howsmooth scan minilm --text novel.txt --lengths 8,16,…,512 --windows 10 --what heads,attention\n
      howsmooth scan smollm2 --layers 0,2-4 --what "head\\[heads=0-2],layer" --out smollm2.sqlite\n
      howsmooth scan minilm --what heads,layer,model --reference random\n
      howsmooth scan smollm2 --windows 100 --jobs 16 --plan\n
      howsmooth scan smollm2 --jobs 4 --out smollm2.sqlite\n
      howsmooth scan smollm2 --shard 2/8 --out shard-2.sqlite\n
      howsmooth scan --config scan.toml --rtol 1e-4 --export rows.csv --json
    """
    from howsmooth.reports import summary
    from howsmooth.scans import scan as run

    wanted = wish.over({} if config is None else read_config(config))
    model = wanted.pop("model", None)
    if model is None:
        raise InvalidInput("which model? Name one, for example `howsmooth scan minilm`, or set model in --config.")
    for path in export or []:
        if path.suffix not in EXPORTS:
            raise InvalidInput(f"cannot export to {path}: the name ends in {', '.join(EXPORTS)}.")
    out = wanted.pop("out", None)
    out = default_store(model, workers.shard) if out is None else Path(out)
    distinct_files(
        read=[*_files_of(model), ("--text", wanted.get("text")), ("--config", config)],
        written=[("--out", out), *(("--export", path) for path in export or [])],
    )
    if plan:
        print_plan(model, out, wanted, workers, as_json)
        return
    with keeping(out) as progress:
        scanned = run(model, out=out, resume=resume, progress=progress, **workers.options(), **wanted)
    for note in scanned.notes:
        typer.echo(f"howsmooth: note: {printable(note)}.", err=True)
    for path in export or []:
        getattr(scanned, EXPORTS[path.suffix])(path)
    if as_json:
        typer.echo(plain_json(scanned.json()))
    else:
        console = stdout()
        if scanned.rows:  # none when every unit failed
            console.print(summary(scanned))
        console.print(f"Store: {out}", markup=False, soft_wrap=True)
    for failure in scanned.failures:
        complain(f"not measured: {failure}.")
    if scanned.failures:
        raise typer.Exit(USER_ERROR)
    if not all(row["converged"] for row in scanned.rows):
        raise typer.Exit(NOT_CONVERGED)


def default_store(model: str, shard: str | None = None) -> Path:
    """Where the cells of a model, or of one shard of its scan, go when nothing is said.

    >>> default_store("org/some-model").name, default_store("minilm", "2/8").name
    ('scan-org-some-model.sqlite', 'scan-minilm-2-of-8.sqlite')
    """
    suffix = "" if shard is None else f"-{parse_shard(shard)}".replace("/", "-of-")
    return FOLDER / f"scan-{re.sub(r'[^A-Za-z0-9._]+', '-', model).strip('-')}{suffix}.sqlite"


def _files_of(model: str) -> list[tuple[str, Path]]:
    """The files that a model is read from, where it is no name."""
    try:
        path = Path(model)
        return [("MODEL", file) for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()]
    except (OSError, ValueError):  # no path at all
        return []


def read_config(path: Path) -> dict[str, Any]:
    """The options of a TOML file, with the values that flags would have."""
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise InvalidInput(f"{path} is nested too deeply: write lines such as lengths = [64, 128].") from None
    except (ValueError, UnicodeDecodeError) as error:  # numbers of too many digits too
        raise InvalidInput(f"{path} is not TOML ({error}): write lines such as lengths = [64, 128].") from None
    names = [field.name for field in fields(Wish)]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise InvalidInput(f"{path} sets {unknown[0]!r}, which is no option of a scan: choose from {', '.join(names)}.")
    for name, kinds in _KINDS.items():
        if name in options and type(options[name]) not in kinds:
            raise InvalidInput(f"{path} sets {name} to {options[name]!r:.60}: write it as on the command line.")
        if "\0" in str(options.get(name)):
            raise InvalidInput(f"{path} sets {name} to a text with a zero byte: write it as on the command line.")
    return options | {name: Path(options[name]) for name in {"text", "out"} & options.keys()}


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(["model", "text", "out", "bounds", "reference", "device", "dtype"], (str,)),
    **dict.fromkeys(["lengths", "layers"], (str, int, list)),
    "what": (str, list),
    **dict.fromkeys(["windows", "seed"], (int,)),
    **dict.fromkeys(["rtol", "confidence"], (float,)),
    "explain": (bool,),
}


@contextmanager
def keeping(out: Path) -> Iterator[Callable[[Any], None]]:
    """A bar on stderr with the time left; and after Ctrl-C one line that says what was kept."""
    columns = (BarColumn(), TextColumn("{task.fields[cells]}"), TimeElapsedColumn(), TimeRemainingColumn())
    kept = ""
    try:
        with progress_line("opening the model", *columns, total=1.0, cells="") as update:

            def show(now: Any) -> None:
                nonlocal kept
                kept = f"{now.cells} of {now.total} cells"
                update(description=now.label, completed=now.work, cells=kept)

            yield show
    except KeyboardInterrupt:
        said = f"{kept} are kept in {out}; the same command goes on from there" if kept else _kept_before(out)
        complain(f"{stop_word()}: {said}.")
        raise SystemExit(INTERRUPTED) from None


def _kept_before(out: Path) -> str:
    """What a store has when a scan is stopped before it has begun to measure."""
    from howsmooth.scans import Store

    try:
        with Store.reading(out) as store:
            count = store.count()
    except (HowsmoothError, OSError):
        count = 0
    return f"nothing new was measured; the {count} cells in {out} are kept" if count else "nothing was measured yet"
