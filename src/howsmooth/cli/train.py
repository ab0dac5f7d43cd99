"""`howsmooth train`: character language models of any attention, and the grid that compares them."""

from __future__ import annotations

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
from typer import Argument

from howsmooth.cli.options import (
    AsJson,
    Device,
    EngineOptions,
    Resume,
    Seed,
    command,
    default_output,
    length_option,
    one_length,
    out_option,
    output_option,
    training_option,
)
from howsmooth.cli.terminal import NOT_CONVERGED, print_json, progress_line, show, stored, written
from howsmooth.errors import InvalidInput

_SAME = "the same command with --resume goes on from there"


@dataclass(frozen=True)
class ModelOptions:
    """A model and its training; the fields of `howsmooth.papers.training.TrainingSettings`."""

    attention: Annotated[
        str,
        training_option(
            "dot-product, l2, l2-untied (not Lipschitz), contractive-2, contractive-inf, sigmoid, cosine, "
            "norm-controlled, gradient-step; with --table several, separated by commas."
        ),
    ] = ""
    depth: Annotated[str, training_option("Blocks (2); with --table several: 2,4,6.")] = ""
    seed: Seed = 0
    seeds: Annotated[int, training_option("Number of seeds, from --seed on, with --table.", min=1, max=2**10)] = 2
    width: Annotated[int, training_option("Width of a token.", max=2**20)] = 128
    heads: Annotated[int, training_option("Attention heads.", max=2**20)] = 4
    blocks: Annotated[
        str | None, training_option("pre-norm, post-norm or contractive (contractive for contractive attention).")
    ] = None
    coefficient: Annotated[
        float, training_option("Lipschitz constant of contractive branches; below 1 in contractive blocks.")
    ] = 0.9
    window: Annotated[
        int | None,
        training_option("Tokens that a token sees, itself and those before (all).", max=2**24, show_default=False),
    ] = None
    lengths: Annotated[
        str,
        training_option("fixed windows, chunks (cross-document masks) or a growing curriculum.", "--pieces"),
    ] = "fixed"
    length: Annotated[str, length_option("Tokens of the (longest) piece.")] = "64"
    cycles: Annotated[int, training_option("Rounds of a curriculum from short to long.", max=2**20)] = 1
    steps: Annotated[int, training_option("Optimiser steps.", max=2**40)] = 1000
    batch_tokens: Annotated[int, training_option("Characters per step.", max=2**28)] = 1024
    rate: Annotated[float, training_option("Learning rate.")] = 1e-3
    schedule: Annotated[str, training_option("cosine decay, or a fixed rate.")] = "cosine"
    warmup: Annotated[int, training_option("Steps of linear warm-up.", max=2**40)] = 100
    weight_decay: Annotated[float, training_option("Weight decay of matrices.")] = 0.01
    clip: Annotated[float, training_option("Largest norm of the gradient; 0 for none.")] = 1.0
    dropout: Annotated[float, training_option("Dropout in pre-norm blocks.")] = 0.0

    def common(self) -> dict[str, Any]:
        """The settings that all cells of a grid share."""
        own = ("attention", "depth", "seed", "seeds")
        shared = {name: value for name, value in vars(self).items() if name not in own}
        return shared | {"length": one_length(self.length)}


@command
def train(
    text: Annotated[Path, Argument(help="A text file, or Penn Treebank: ptb.train.txt or its folder.")],
    model: ModelOptions,
    out: Annotated[Path | None, out_option("Folder of the run (howsmooth-output/train-TEXT-ATTENTION-…).")] = None,
    resume: Resume = False,
    table: Annotated[
        bool,
        training_option("Compare kinds of attention over depths and seeds; always resumes.", "--table"),
    ] = False,
    save_every: Annotated[int, output_option("Steps between checkpoints.", min=1)] = 200,
    report_every: Annotated[int, output_option("Steps between rows of numbers.", min=1)] = 50,
    device: Device = None,
    *,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Train a character language model and report its bits per character and how smooth its attention is.

    A text file is split into its first 90 % to train and the rest to validate. Ctrl-C saves; --resume continues, bit by
    bit as an uninterrupted run. Checkpoint, rows of numbers and result are in the folder.

    Examples:
      howsmooth train shakespeare.txt --attention contractive-2 --depth 4 --window 4
      howsmooth train ptb/ --pieces curriculum --length 256 --steps 5000 --out run --resume
      howsmooth train shakespeare.txt --table --depth 2,4,6 --seeds 2 --steps 2000
      howsmooth train shakespeare.txt --table --engine slurm --jobs 30 --time 600
    """
    from howsmooth.papers.training import Corpus, Intervals

    corpus = Corpus.read(text)
    options: dict[str, Any] = {"intervals": Intervals(report=report_every, save=save_every), "device": device}
    chosen = engine.chosen()
    if table:
        _grid(corpus, model, out or default_folder(text, "table"), as_json, executor=chosen, **options)
    elif chosen is not None:
        raise InvalidInput("--jobs and --engine run the cells of a grid: add --table, or leave them out.")
    else:
        _one(corpus, model, text, out, as_json, resume=resume, **options)


def _one(corpus: Any, model: ModelOptions, text: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    from howsmooth.papers.training import TrainingSettings
    from howsmooth.papers.training import train as run

    depth, seed = _depth(model.depth or "2"), model.seed
    attention: Any = model.attention or "dot-product"
    settings = TrainingSettings(**model.common(), attention=attention, depth=depth, seed=seed)
    out = out or default_folder(text, f"{settings.attention}-depth{depth}-seed{seed}")
    with _watching(out) as watch:
        result = run(corpus, settings, out, progress=lambda s: watch("", s), **options)
    if as_json:
        print_json(result.to_dict() | {"folder": out})
    else:
        show(*_summary(result), f"Folder: {out}")
    if result.diverged is not None:
        raise typer.Exit(NOT_CONVERGED)


def _grid(corpus: Any, model: ModelOptions, out: Path, as_json: bool, **options: Any) -> None:
    from howsmooth.papers.training import Grid, TrainingSettings, run_grid
    from howsmooth.papers.training.grid import COMPARED_KINDS, TABLE, row_of

    named: Any = tuple(name.strip() for name in model.attention.split(","))
    kinds = named if model.attention else COMPARED_KINDS
    depths = tuple(map(_depth, (model.depth or "2,4,6").split(",")))
    seeds = tuple(range(model.seed, model.seed + model.seeds))
    grid = Grid(TrainingSettings(**model.common(), depth=max(depths)), kinds, depths, seeds)
    with _watching(out) as watch:

        def tell(cell: Any) -> None:
            watch(f"{cell.name} ({cell.number}/{cell.total}) ", cell.status)

        results = run_grid(corpus, grid, out, progress=tell, **options)
    if as_json:
        print_json([row_of(result) for result in results])
        return
    show(comparison(results, grid), f"{len(results)} of {len(grid.cells())} cells. Rows: {out / TABLE}")


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
    """The folder of a run without --out.

    >>> default_folder(Path("ptb/"), "l2-depth2-seed0").name
    'train-ptb-l2-depth2-seed0'
    """
    stem = text.name if text.is_dir() else text.name.split(".")[0]
    return default_output(f"train-{stem or 'text'}-{name}")


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
        bound = f"largest Lipschitz bound of a block{where} in the {norm}-norm, n = {settings.length}{window}"
        yield f"Attention: {bound}: {written(result.bound, ROUND_CEILING)}."


@contextmanager
def _watching(out: Path) -> Iterator[Callable[[str, Any], None]]:
    """A line on stderr with bits, bound, speed and remaining time; after Ctrl-C one line that names what is stored."""
    from howsmooth.papers.training.loop import TrainingStopped

    line = progress_line("reading the text", BarColumn(bar_width=20), TimeElapsedColumn(), total=1.0)
    with stored(lambda stopped: f"{stopped.step} steps are kept in {out}; {_SAME}", TrainingStopped), line as update:

        def show(label: str, now: Any) -> None:
            update(description=label + described(now), completed=now.step / now.steps)

        yield show


def described(now: Any) -> str:
    """The state of a run in one line."""
    bound = "" if now.bound is None else f" · bound {written(now.bound)}"
    minutes, seconds = divmod(round(now.seconds_left), 60)
    speed = f"{now.steps_per_second:.1f} steps/s"
    return f"step {now.step}/{now.steps} · {now.bits:.3f} bits{bound} · {speed} · {minutes}:{seconds:02d} left"


def _depth(text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,5}\s*", text):
        raise InvalidInput(f"--depth is a whole number below 100000 (with --table several: 2,4,6), got {text!r:.60}.")
    return int(text)
