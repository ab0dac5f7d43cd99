"""`howsmooth scan`: a model on a text, every cell stored as soon as it is measured."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Argument

from howsmooth._util.common import distinct_files, printable
from howsmooth.cli.options import (
    AsJson,
    Confidence,
    Device,
    Dtype,
    EngineOptions,
    Resume,
    Rtol,
    Text,
    command,
    default_output,
    engine_option,
    length_option,
    out_option,
    output_option,
    seed_option,
    what_option,
    where_option,
)
from howsmooth.cli.terminal import (
    NOT_CONVERGED,
    USER_ERROR,
    complain,
    print_json,
    print_line,
    progress_line,
    show,
    stored,
    terminal_json,
)
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.models.weight_files import load_tokens
from howsmooth.scans.units import parse_shard

EXPORTS = {".csv": "to_csv", ".parquet": "to_parquet", ".json": "to_json"}


@dataclass(frozen=True)
class ScanFlags:
    """A scan, None where no option gives a value: the options of the command and the keys of its config file."""

    model: Annotated[
        str | None,
        Argument(
            help="A named model (minilm), a folder, a hub id, random:KIND, or a network: an .onnx or .pt2 file, "
            "module:attribute."
        ),
    ] = None
    what: Annotated[
        str | None,
        what_option(
            "head, attention, residual, mlp, layer, prefix, model, logits, one or several; with a choice: "
            "head\\[layers=0-5,heads=3] (head)."
        ),
    ] = None
    layers: Annotated[str | None, what_option("For example 0,2-4 (all).")] = None
    bounds: Annotated[
        str | None, what_option("Upper bounds: none, proved (the three-path bound alone), cheap or all (cheap).")
    ] = None
    reference: Annotated[
        Literal["random"] | None,
        what_option("random: also the same architecture with random weights, as a line to compare with."),
    ] = None
    explain: Annotated[bool | None, what_option("Also value and score path, sink, entropy (yes).")] = None
    text: Text = None
    input: Annotated[
        Path | None, where_option("File with the input of a network, as it takes it, or several along a first axis.")
    ] = None
    length: Annotated[str | None, length_option("Tokens per window: 64,128, 8,16,…,512 or 2,4,...,100 (128).")] = None
    windows: Annotated[int | None, where_option("Windows of the text for each length (1).", min=1)] = None
    dtype: Dtype = None
    rtol: Rtol = None
    confidence: Confidence = None
    seed: Annotated[int | None, seed_option()] = None
    device: Device = None
    out: Annotated[Path | None, out_option("Store to write (howsmooth-output/scan-MODEL.sqlite).")] = None


@dataclass(frozen=True)
class ScanEngineOptions(EngineOptions):
    """The workers of a scan, and the part of it that they measure."""

    timeout: Annotated[float | None, engine_option("Seconds after which a worker gives up a unit (3600).", min=0.1)] = (
        None
    )
    shard: Annotated[
        str | None, engine_option("Measure part i of N, as i/N; slurm: the part of this task of a job array.")
    ] = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `howsmooth.scan`."""
        options = {"timeout": self.timeout, "shard": self.shard, "executor": self.chosen()}
        return {name: value for name, value in options.items() if value is not None}


@command
def scan(
    options: ScanFlags,
    config: Annotated[Path | None, what_option("TOML file with any of these options; flags win.")] = None,
    resume: Resume = True,
    export: Annotated[
        list[Path] | None, output_option("Also write the rows: .csv, .parquet or .json; may be repeated.")
    ] = None,
    plan: Annotated[
        bool, output_option("Measure nothing: print cells, time, memory, and a script for SLURM.", "--plan")
    ] = False,
    as_json: AsJson = False,
    *,
    workers: ScanEngineOptions,
) -> None:
    """Measure every head (or layer, or the whole) of a model on windows of a text.

    Each number comes with its lower and upper ends, the three-path bound, and why it is as large as it is. A
    stopped scan continues where it was when the same command is given again.

    Examples:
      howsmooth scan minilm
      howsmooth scan minilm --text novel.txt --length 8,16,…,512 --windows 10 --what heads,attention
      howsmooth scan smollm2 --layers 0,2-4 --what "head\\[heads=0-2],layer" --out smollm2.sqlite
      howsmooth scan minilm --what heads,layer,model --reference random
      howsmooth scan net.onnx --input x.npy --what heads,attention,model
      howsmooth scan smollm2 --windows 100 --jobs 16 --plan
      howsmooth scan smollm2 --jobs 4 --out smollm2.sqlite
      howsmooth scan smollm2 --shard 2/8 --out shard-2.sqlite
      howsmooth scan --config scan.toml --rtol 1e-4 --export rows.csv --json
    """
    from howsmooth.reports import summary
    from howsmooth.scans import scan as run

    given = {name: value for name, value in vars(options).items() if value is not None}
    wanted = ({} if config is None else read_scan_file(config)) | given
    model = wanted.pop("model", None)
    if model is None:
        raise InvalidInput("no model is named: write `howsmooth scan minilm`, or set model in --config.")
    for path in export or []:
        if path.suffix not in EXPORTS:
            raise InvalidInput(f"cannot export to {path}: the name ends in {', '.join(EXPORTS)}.")
    given_input = wanted.pop("input", None)
    if given_input is not None:
        wanted["text"] = load_tokens(given_input)
    out = wanted.pop("out", None)
    out = default_store(model, workers.shard) if out is None else out
    distinct_files(
        read=[*_files_of(model), ("--text", options.text), ("--input", given_input), ("--config", config)],
        written=[("--out", out), *(("--export", path) for path in export or [])],
    )
    if plan:
        _print_plan(model, out, wanted, workers, as_json)
        return
    with storing(out) as progress:
        lengths = wanted.pop("length", None)
        scanned = run(model, lengths=lengths, out=out, resume=resume, progress=progress, **workers.options(), **wanted)
    for note in scanned.notes:
        typer.echo(f"howsmooth: note: {printable(note)}.", err=True)
    for path in export or []:
        getattr(scanned, EXPORTS[path.suffix])(path)
    if as_json:
        typer.echo(terminal_json(scanned.json()))
    else:
        if scanned.rows:  # none when every unit failed
            show(summary(scanned))
        show(f"Store: {out}")
    for failure in scanned.failures:
        complain(f"not measured: {failure}.")
    if scanned.failures:
        raise typer.Exit(USER_ERROR)
    if not all(row["converged"] for row in scanned.rows):
        raise typer.Exit(NOT_CONVERGED)


def default_store(model: str, shard: str | None = None) -> Path:
    """The store of a model, or of one shard of its scan, without --out.

    >>> default_store("org/some-model").name, default_store("minilm", "2/8").name
    ('scan-org-some-model.sqlite', 'scan-minilm-2-of-8.sqlite')
    """
    suffix = "" if shard is None else f"-{parse_shard(shard)}".replace("/", "-of-")
    return default_output(f"scan-{model}", f"{suffix}.sqlite")


def _files_of(model: str) -> list[tuple[str, Path]]:
    """The files that a model is read from, where it is no name."""
    try:
        path = Path(model)
        return [("MODEL", file) for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()]
    except (OSError, ValueError):  # no path at all
        return []


def read_scan_file(path: Path) -> dict[str, Any]:
    """The options of a TOML file, with the values that flags would have."""
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise InvalidInput(f"{path} is nested too deeply: write lines such as length = [64, 128].") from None
    except (ValueError, UnicodeDecodeError) as error:  # numbers of too many digits too
        raise InvalidInput(f"{path} is not TOML ({error}): write lines such as length = [64, 128].") from None
    kinds = {name: get_args(hint)[0] for name, hint in get_type_hints(ScanFlags).items()}
    for name, value in options.items():
        if name not in kinds:
            raise InvalidInput(f"{path} sets {name!r}, which is no option of a scan: choose from {', '.join(kinds)}.")
        kind = kinds[name] if kinds[name] in (int, float, bool) else str
        if type(value) not in ((kind, int, list) if name in ("what", "layers", "length") else (kind,)):
            raise InvalidInput(f"{path} sets {name} to {value!r:.60}: write it as on the command line.")
        if "\0" in str(value):
            raise InvalidInput(f"{path} sets {name} to a text with a zero byte: write it as on the command line.")
    return options | {name: Path(options[name]) for name in {"text", "input", "out"} & options.keys()}


@contextmanager
def storing(out: Path) -> Iterator[Callable[[Any], None]]:
    """A bar on stderr with the remaining time; after Ctrl-C one line that names what is stored."""
    columns = (BarColumn(), TextColumn("{task.fields[cells]}"), TimeElapsedColumn(), TimeRemainingColumn())
    cells = ""

    def content(stopped: KeyboardInterrupt) -> str:
        return f"{cells} are kept in {out}; the same command goes on from there" if cells else _stored_before(out)

    with stored(content), progress_line("opening the model", *columns, total=1.0, cells="") as update:

        def watch(now: Any) -> None:
            nonlocal cells
            cells = f"{now.cells} of {now.total} cells"
            update(description=now.label, completed=now.work, cells=cells)

        yield watch


def _stored_before(out: Path) -> str:
    """The content of a store when a scan is stopped before it has begun to measure."""
    from howsmooth.scans import Store

    try:
        with Store.reading(out) as store:
            count = store.count()
    except (HowsmoothError, OSError):
        count = 0
    return f"nothing new was measured; the {count} cells in {out} are kept" if count else "nothing was measured yet"


def _print_plan(model: str, out: Path, wanted: dict[str, Any], workers: ScanEngineOptions, as_json: bool) -> None:
    """Print the number of cells, time and memory, and a script that measures them as a job array."""
    import torch

    from howsmooth.scans.cost import predict, sbatch_script
    from howsmooth.scans.plan import ScanOptions
    from howsmooth.scans.run import prepare
    from howsmooth.scans.units import parse_shard

    options = {name: value for name, value in wanted.items() if name not in ("reference", "device", "dtype")}
    text, lengths = options.pop("text", None), options.pop("length", None)
    ready = prepare(model, text, ScanOptions(lengths=lengths, **options))
    plan = ready.plan if workers.shard is None else parse_shard(workers.shard).part(ready.plan)
    prediction = predict(ready, plan, workers.jobs or 1)
    flags = [word for name, value in wanted.items() for word in _flag(name, value)]
    command = ["howsmooth", "scan", model, *flags]
    script = sbatch_script(command, prediction, workers.jobs or 1, workers.cores or torch.get_num_threads(), str(out))
    if as_json:
        print_json(vars(prediction) | {"wall": prediction.wall, "script": script})
    else:
        print_line(f"{prediction}.\n\n{script}")


def _flag(name: str, value: Any) -> list[str]:
    """An option as it is written on a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
