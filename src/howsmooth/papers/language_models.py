"""Character language models against depth, five kinds of attention: the comparison of Kim et al. 2021, Section 5."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from howsmooth.models import alice
from howsmooth.papers.experiment import KIM, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.figure_style import finish, integer_ticks, median_bands, panels
from howsmooth.papers.training import Corpus, TrainingSettings, train

_KINDS = ("dot-product", "l2-untied", "l2", "contractive-inf", "contractive-2")
_SMALL = {"width": 64, "heads": 4, "length": 32, "batch_tokens": 256, "rate": 3e-3, "warmup": 50}
_PAPER = {"width": 512, "heads": 8, "length": 288, "batch_tokens": 288 * 32, "rate": 1e-4, "warmup": 400}


def cells(options: ExperimentOptions) -> list[Record]:
    """Kinds × depths × seeds; the contractive kinds in contractive blocks, the others in pre-norm blocks."""
    sizes: dict[str, Any] = options.pick(_SMALL, _SMALL | {"width": 128, "length": 64, "batch_tokens": 512}, _PAPER)
    steps, depths, seeds = options.pick((400, (1, 3), 1), (1000, (2, 4, 6), 2), (50_000, (2, 4, 6, 8, 10), 1))
    return [
        {"attention": kind, "depth": depth, "seed": seed, "steps": steps, **sizes}
        for kind in _KINDS
        for depth in depths
        for seed in range(seeds)
    ]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """Bits per character of the validation part at the end of training."""
    row, _ = trained(options, cell)
    return [row]


def trained(options: ExperimentOptions, cell: Record) -> tuple[Record, Corpus]:
    """Train the model of a cell, and return its settings and bits with the text."""
    corpus = Corpus.split(alice() if options.text is None else options.text)
    result = train(corpus, TrainingSettings(**cell))
    return {**asdict(result.settings), "bits": result.valid_bits, "seconds": result.seconds}, corpus


def draw(rows: Rows) -> Figure:
    """Bits against depth."""
    return finish(bits_by_depth(rows, "Character language models"))


def bits_by_depth(rows: Rows, title: str) -> Axes:
    """Draw validation bits against depth, one band for every kind of attention."""
    (ax,) = panels([title], "depth (layers)", "validation bits per character", log="")
    median_bands(ax, rows, ["attention"], "depth", "bits")
    integer_ticks(ax)
    return ax


def judge(rows: Rows) -> Finding:
    """Tied L2 is slightly worse than dot-product at equal depth; contractive is worse, and improves with depth."""
    best = rows.groupby("attention")["bits"].min()
    gap = rows[rows["depth"] == rows["depth"].max()].groupby("attention")["bits"].mean()
    usual, tied = gap["dot-product"], gap["l2"]
    contractive = gap[[kind for kind in gap.index if str(kind).startswith("contractive")]].min()
    shallow = rows[(rows["depth"] == rows["depth"].min()) & rows["attention"].str.startswith("contractive")][
        "bits"
    ].min()
    in_order, closing = usual < tied < min(1.15 * usual, contractive), shallow - contractive
    return Finding.of(
        in_order and closing > 0.01,
        f"dot-product, tied L2, contractive in this order: {'yes' if in_order else 'no'}; depth {rows['depth'].max()} "
        f"in place of {rows['depth'].min()} brings the best contractive kind {closing:.3f} bits (0.01 are asked for); "
        f"bits at depth {rows['depth'].max()}: "
        + ", ".join(f"{kind} {value:.3f}" for kind, value in gap.items())
        + "; best over depths: "
        + ", ".join(f"{kind} {value:.3f}" for kind, value in best.items())
        + f". Width {rows['width'].max()}, {rows['steps'].max()} steps: smaller than the paper's.",
    )


EXPERIMENT = Experiment(
    "language-models",
    KIM,
    "Character language models against depth",
    "Tied L2 attention is slightly worse than dot-product attention at equal depth; contractive L2 attention is "
    "clearly worse and catches up with depth.",
    "Alice in Wonderland (or --text, for example Penn Treebank); --full has the paper's width 512 and 8 heads.",
    cells,
    run,
    draw,
    judge,
    (1, 60, 60_000),
    frozenset({"text"}),
)
