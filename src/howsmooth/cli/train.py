"""`howsmooth train`: character language models of any attention, and the grid that compares them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_CEILING
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, TimeElapsedColumn
from rich.table import Table
from typer import Argument, Option

from howsmooth.cli.console import MOST_SEED, progress_line, stdout, written
from howsmooth.cli.engine_options import Place
from howsmooth.cli.exit_codes import INTERRUPTED, NOT_CONVERGED, complain, stop_word
from howsmooth.cli.options import Device, command
from howsmooth.errors import InvalidInput

FOLDER = Path("howsmooth-output")
_SAME = "the same command with --resume goes on from there"


@dataclass(frozen=True)
class Model:
    """What is trained and how; the fields of `howsmooth.papers.training.TrainingSettings`."""

    attention: Annotated[
        str,
        Option(
            help="dot-product, l2, l2-untied (not Lipschitz), contractive-2, contractive-inf, sigmoid, cosine, "
            "norm-controlled, gradient-step; with --table several, separated by commas."
        ),
    ] = ""
    depth: Annotated[str, Option(help="Blocks (2); with --table several: 2,4,6.")] = ""
    seed: Annotated[str, Option(help="Of weights and data (0); with --table several: 0,1.")] = ""
    width: Annotated[int, Option(max=2**20, help="Width of a token.")] = 128
    heads: Annotated[int, Option(max=2**20, help="Attention heads.")] = 4
    blocks: Annotated[
        str | None, Option(help="pre-norm, post-norm or contractive (contractive for contractive attention).")
    ] = None
    coefficient: Annotated[
        float, Option(help="Lipschitz constant of contractive branches; below 1 in contractive blocks.")
    ] = 0.9
    window: Annotated[
        int | None,
        Option(max=2**24, help="Tokens that a token sees, itself and those before (all).", show_default=False),
    ] = None
    lengths: Annotated[
        str, Option(help="fixed windows, chunks (cross-document masks) or a curriculum of growing lengths.")
    ] = "fixed"
    length: Annotated[int, Option(max=2**24, help="Tokens of the (longest) piece.")] = 64
    cycles: Annotated[int, Option(max=2**20, help="How often a curriculum goes from short to long.")] = 1
    steps: Annotated[int, Option(max=2**40, help="Optimiser steps.")] = 1000
    batch_tokens: Annotated[int, Option(max=2**28, help="Characters per step.")] = 1024
    rate: Annotated[float, Option(help="Learning rate.")] = 1e-3
    schedule: Annotated[str, Option(help="cosine decay, or a fixed rate.")] = "cosine"
    warmup: Annotated[int, Option(max=2**40, help="Steps of linear warm-up.")] = 100
    weight_decay: Annotated[float, Option(help="Of matrices.")] = 0.01
    clip: Annotated[float, Option(help="Largest norm of the gradient; 0 for none.")] = 1.0
    dropout: Annotated[float, Option(help="In pre-norm blocks.")] = 0.0

    def common(self) -> dict[str, Any]:
        """The settings that all cells of a grid share."""
        return {name: value for name, value in vars(self).items() if name not in ("attention", "depth", "seed")}


@command
def train(
    text: Annotated[Path, Argument(help="A text file, or Penn Treebank: ptb.train.txt or its folder.")],
    model: Model,
    out: Annotated[Path | None, Option(help="Folder of the run (howsmooth-output/train-TEXT-ATTENTION-…).")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the run in the folder.")] = False,
    table: Annotated[
        bool, Option("--table", help="Compare kinds of attention over depths and seeds; always goes on where it was.")
    ] = False,
    save_every: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 200,
    report_every: Annotated[int, Option(min=1, help="Steps between rows of numbers.")] = 50,
    device: Device = None,
    *,
    place: Place,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a character language model and report its bits per character and how smooth its attention is.

    A text file is split into its first 90 % to train and the rest to validate. Ctrl-C saves; --resume goes on, bit by
    bit as if nothing had happened. Checkpoint, rows of numbers and result are in the folder.

    Examples:\n
      howsmooth train shakespeare.txt --attention contractive-2 --depth 4 --window 4\n
      howsmooth train ptb/ --lengths curriculum --length 256 --steps 5000 --out run --resume\n
      howsmooth train shakespeare.txt --table --depth 2,4,6 --seed 0,1 --steps 2000\n
      howsmooth train shakespeare.txt --table --engine slurm --jobs 30 --time 600
    """
    from howsmooth.papers.training import Corpus, Intervals

    corpus = Corpus.read(text)
    options: dict[str, Any] = {"intervals": Intervals(report=report_every, save=save_every), "device": device}
    engine = place.engine_asked()
    if table:
        _grid(corpus, model, out or default_folder(text, "table"), as_json, executor=engine, **options)
    elif engine is not None:
        raise InvalidInput("--jobs and --engine run the cells of a grid: add --table, or leave them out.")
    else:
        _one(corpus, model, text, out, as_json, resume=resume, **options)


def _one(corpus: Any, model: Model, text: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    from howsmooth.papers.training import TrainingSettings
    from howsmooth.papers.training import train as run

    depth, seed = _number("depth", model.depth or "2"), _number("seed", model.seed or "0")
    attention: Any = model.attention or "dot-product"
    settings = TrainingSettings(**model.common(), attention=attention, depth=depth, seed=seed)
    out = out or default_folder(text, f"{settings.attention}-depth{depth}-seed{seed}")
    with _watching(out) as show:
        result = run(corpus, settings, out, progress=lambda s: show("", s), **options)
    if as_json:
        typer.echo(json.dumps(result.to_dict() | {"folder": str(out)}, indent=2, allow_nan=False))
    else:
        console = stdout()
        for line in _summary(result):
            console.print(line, soft_wrap=True, markup=False)
        console.print(f"Folder: {out}", soft_wrap=True, markup=False)
    if result.diverged is not None:
        raise typer.Exit(NOT_CONVERGED)


def _grid(corpus: Any, model: Model, out: Path, as_json: bool, **options: Any) -> None:
    from howsmooth.papers.training import Grid, TrainingSettings, run_grid
    from howsmooth.papers.training.grid import COMPARED_KINDS, TABLE, row_of

    named: Any = tuple(name.strip() for name in model.attention.split(","))
    kinds = named if model.attention else COMPARED_KINDS
    depths = tuple(_number("depth", each) for each in (model.depth or "2,4,6").split(","))
    seeds = tuple(_number("seed", each) for each in (model.seed or "0,1").split(","))
    grid = Grid(TrainingSettings(**model.common(), depth=max(depths)), kinds, depths, seeds)
    with _watching(out) as show:

        def tell(cell: Any) -> None:
            show(f"{cell.name} ({cell.number}/{cell.total}) ", cell.status)

        results = run_grid(corpus, grid, out, progress=tell, **options)
    if as_json:
        typer.echo(json.dumps([row_of(result) for result in results], indent=2, allow_nan=False))
        return
    console = stdout()
    console.print(comparison(results, grid))
    console.print(f"{len(results)} of {len(grid.cells())} cells. Rows: {out / TABLE}", soft_wrap=True, markup=False)


def comparison(results: list[Any], grid: Any) -> Table:
    """Validation bits per character: a row per kind, a column per depth, the mean over seeds."""
    from howsmooth.papers.training.grid import gap_closed, mean_bits

    shown = Table(title="Validation bits per character, mean over seeds", title_justify="left")
    shown.add_column("attention")
    for depth in grid.depths:
        shown.add_column(f"depth {depth}", justify="right")
    for kind in grid.kinds:
        bits = [mean_bits(results, kind, depth) for depth in grid.depths]
        shown.add_row(kind, *("–" if value is None else f"{value:.3f}" for value in bits))
    gaps = [gap_closed(results, depth) for depth in grid.depths]
    if any(gap is not None for gap in gaps):
        shown.add_section()
        shown.add_row("gap closed", *("–" if gap is None else f"{100 * gap:.0f} %" for gap in gaps))
    return shown


def default_folder(text: Path, name: str) -> Path:
    """Where a run goes when nothing is said.

    >>> default_folder(Path("ptb/"), "l2-depth2-seed0").name
    'train-ptb-l2-depth2-seed0'
    """
    stem = text.name if text.is_dir() else text.name.split(".")[0]
    return FOLDER / f"train-{re.sub(r'[^A-Za-z0-9_]+', '-', stem).strip('-') or 'text'}-{name}"


def _summary(result: Any) -> Iterator[str]:
    from howsmooth.nn.layers.registry import LAYER_KINDS

    settings = result.settings
    yield (
        f"{settings.attention}, {settings.depth} {settings.block_kind} block(s) of width {settings.width}, "
        f"{result.parameters:,} parameters; {result.tokens:,} characters in {result.seconds:.0f} s."
    )
    yield f"Split: {result.how}."
    if result.diverged is not None:
        yield f"Diverged: the loss was no number after {result.diverged} steps. Try a smaller --rate or more --warmup."
        return
    yield f"Bits per character: {result.valid_bits:.4f} validation, {result.train_bits:.4f} training (last interval)."
    if result.bound is None:
        yield f"Attention: no Lipschitz bound exists for {settings.attention}."
    else:
        where = "" if LAYER_KINDS[settings.attention].lipschitz else " after its LayerNorm"
        norm = "∞" if (settings.attention, settings.block_kind) == ("contractive-inf", "contractive") else "2"
        window = "" if settings.window is None else f", window {settings.window}"
        said = f"largest Lipschitz bound of a block{where} in the {norm}-norm, n = {settings.length}{window}"
        yield f"Attention: {said}: {written(result.bound, ROUND_CEILING)}."


@contextmanager
def _watching(out: Path) -> Iterator[Callable[[str, Any], None]]:
    """A line on stderr with bits, bound, speed and time left; after Ctrl-C one line that says what is kept."""
    from howsmooth.papers.training.loop import TrainingStopped

    try:
        with progress_line("reading the text", BarColumn(bar_width=20), TimeElapsedColumn(), total=1.0) as update:

            def show(label: str, now: Any) -> None:
                update(description=label + described(now), completed=now.step / now.steps)

            yield show
    except TrainingStopped as stopped:
        complain(f"{stop_word()}: {stopped.step} steps are kept in {out}; {_SAME}.")
        raise SystemExit(INTERRUPTED) from None


def described(now: Any) -> str:
    """Where a run stands, in one line."""
    bound = "" if now.bound is None else f" · bound {written(now.bound)}"
    minutes, seconds = divmod(round(now.seconds_left), 60)
    speed = f"{now.steps_per_second:.1f} steps/s"
    return f"step {now.step}/{now.steps} · {now.bits:.3f} bits{bound} · {speed} · {minutes}:{seconds:02d} left"


def _number(name: str, text: str) -> int:
    most = {"depth": 2**16, "seed": MOST_SEED}[name]
    try:
        number = int(text)
    except ValueError:
        raise InvalidInput(f"--{name} is a whole number (with --table several, as in 2,4,6), got {text!r}.") from None
    if not 0 <= number <= most:
        raise InvalidInput(f"--{name} is a whole number from 0 to {most}, got {number}.")
    return number
