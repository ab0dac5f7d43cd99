"""Stability at a fixed learning rate: the maximum depth that trains without warm-up (Kim et al. 2021, Section 5)."""

from __future__ import annotations

from collections import Counter
from math import log2
from typing import Any

from matplotlib.figure import Figure

from howsmooth.papers.experiment import KIM, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.figure_style import finish, reference_line
from howsmooth.papers.language_models import bits_by_depth, trained
from howsmooth.papers.training import Corpus

_KINDS = {"dot-product": "post-norm", "l2": "post-norm", "contractive-2": "contractive"}
_SMALL = {"width": 64, "heads": 4, "length": 32, "batch_tokens": 256, "rate": 2e-3}
_PAPER = {"width": 512, "heads": 8, "length": 288, "batch_tokens": 288 * 32, "rate": 2e-3}


def cells(options: ExperimentOptions) -> list[Record]:
    """Kinds × depths at one rate, without warm-up, decay or clipping."""
    sizes: dict[str, Any] = options.pick(_SMALL | {"width": 32}, _SMALL, _PAPER)
    steps, depths = options.pick((100, (2, 10, 18)), (500, (2, 6, 10, 14, 18)), (20_000, (2, 6, 10, 14, 18)))
    fixed = {"schedule": "fixed", "warmup": 0, "clip": 0.0, "steps": steps, **sizes}
    return [
        {"attention": kind, "blocks": blocks, "depth": d, **fixed} for kind, blocks in _KINDS.items() for d in depths
    ]


def run(options: ExperimentOptions, cell: Record) -> list[Record]:
    """Bits per character, beside those of guessing characters by their frequencies."""
    row, corpus = trained(options, cell)
    return [row | {"guessing": unigram_bits(corpus)}]


def unigram_bits(corpus: Corpus) -> float:
    """Bits per character of the validation part under the frequencies of the training part, one added to each."""
    counts = Counter(corpus.train)
    total = len(corpus.train) + len(corpus.alphabet)
    return -sum(log2((counts[character] + 1) / total) for character in corpus.valid) / len(corpus.valid)


def draw(rows: Rows) -> Figure:
    """Bits against depth."""
    ax = bits_by_depth(rows, "A fixed learning rate")
    reference_line(ax, rows["guessing"].iloc[0], "guessing by frequency")
    return finish(ax)


def judge(rows: Rows) -> Finding:
    """The greatest depth at which each kind does better than guessing."""
    trained = rows[rows["bits"].notna() & (rows["bits"] < rows["guessing"])]
    deepest = {kind: int(trained[trained["attention"] == kind]["depth"].max() or 0) for kind in _KINDS}
    maximum = rows["depth"].max()
    as_claimed = deepest["dot-product"] <= 10 and min(deepest["l2"], deepest["contractive-2"]) == maximum
    return Finding.of(
        as_claimed and maximum > 10,
        f"deepest that trains, of {maximum}: "
        + ", ".join(f"{kind} {depth}" for kind, depth in deepest.items())
        + f". Width {rows['width'].max()}, {rows['steps'].max()} steps, rate {rows['rate'].max():g}.",
    )


EXPERIMENT = Experiment(
    "fixed-rate",
    KIM,
    "Stability at a fixed learning rate",
    "At a fixed rate dot-product attention fails to train beyond 10 layers; tied and contractive L2 train at 18.",
    "Alice in Wonderland (or --text), post-norm blocks, no warm-up, decay or clipping; --full has the paper's size.",
    cells,
    run,
    draw,
    judge,
    (1, 60, 40_000),
    frozenset({"text"}),
)
