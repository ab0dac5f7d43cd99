"""Depth in training: character language models with five kinds of attention, and depth at a fixed learning rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import product
from math import log2

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from howsmooth.models import alice
from howsmooth.papers.experiment import KIM, Experiment, ExperimentOptions, Finding, Record, Rows
from howsmooth.papers.figure_style import finish, integer_ticks, median_bands, panels, reference_line
from howsmooth.papers.training import Corpus, TrainingSettings, train
from howsmooth.papers.training.grid import COMPARED_KINDS

_SMALL = {"width": 64, "heads": 4, "length": 32, "batch_tokens": 256}
_PAPER = {"width": 512, "heads": 8, "length": 288, "batch_tokens": 288 * 32}
_BLOCKS = {"dot-product": "post-norm", "l2": "post-norm", "contractive-2": "contractive"}


class LanguageModels(Experiment):
    """Character language models against depth, five kinds of attention: the comparison of Kim et al., Section 5."""

    id = "language-models"
    paper = KIM
    title = "Character language models against depth"
    claim = (
        "Tied L2 attention is slightly worse than dot-product attention at equal depth; contractive L2 attention is "
        "clearly worse and catches up with depth."
    )
    setting = (
        "Alice in Wonderland (or --text, for example Penn Treebank); --full has the paper's width 512 and 8 heads."
    )
    minutes = (1, 60, 60_000)
    takes = frozenset({"text"})

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Kinds × depths × seeds; the contractive kinds in contractive blocks, the others in pre-norm blocks."""
        small = _SMALL | {"rate": 3e-3, "warmup": 50}
        medium = small | {"width": 128, "length": 64, "batch_tokens": 512}
        sizes: Record = options.pick(small, medium, _PAPER | {"rate": 1e-4, "warmup": 400})
        steps, depths, seeds = options.pick((400, (1, 3), 1), (1000, (2, 4, 6), 2), (50_000, (2, 4, 6, 8, 10), 1))
        return [
            {"attention": kind, "depth": depth, "seed": seed, "steps": steps, **sizes}
            for kind, depth, seed in product(COMPARED_KINDS, depths, range(seeds))
        ]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """Bits per character of the validation part at the end of training."""
        yield trained(options, cell)[0]

    def draw(self, rows: Rows) -> Figure:
        """Bits against depth."""
        return finish(bits_by_depth(rows, "Character language models"))

    def judge(self, rows: Rows) -> Finding:
        """Tied L2 is slightly worse than dot-product at equal depth; contractive is worse, and improves with depth."""
        best = rows.groupby("attention").bits.min()
        deep, shallow = (
            rows[rows.depth == depth].groupby("attention").bits for depth in (rows.depth.max(), rows.depth.min())
        )
        gap = deep.mean()
        usual, contractive = gap["dot-product"], gap.filter(like="contractive").min()
        in_order = usual < gap["l2"] < min(1.15 * usual, contractive)
        closing = shallow.min().filter(like="contractive").min() - contractive
        return Finding.of(
            in_order and closing > 0.01,
            f"dot-product, tied L2, contractive in this order: {'yes' if in_order else 'no'}; depth "
            f"{rows['depth'].max()} in place of {rows['depth'].min()} brings the best contractive kind {closing:.3f} "
            f"bits (0.01 are asked for); bits at depth {rows['depth'].max()}: {listed(gap, '.3f')}; best over "
            f"depths: {listed(best, '.3f')}. Width {rows['width'].max()}, {rows['steps'].max()} steps: smaller than "
            "the paper's.",
        )


def listed(numbers: pandas.Series, form: str) -> str:
    """Return the numbers with their names, for a sentence."""
    return ", ".join(f"{name} {value:{form}}" for name, value in numbers.items())


def trained(options: ExperimentOptions, cell: Record) -> tuple[Record, Corpus]:
    """Train the model of a cell, and return its settings and bits with the text."""
    corpus = Corpus.split(alice() if options.text is None else options.text)
    result = train(corpus, TrainingSettings(**cell))
    return {**asdict(result.settings), "bits": result.valid_bits, "seconds": result.seconds}, corpus


def bits_by_depth(rows: Rows, title: str) -> Axes:
    """Draw validation bits against depth, one band for every kind of attention."""
    (ax,) = panels([title], "depth (layers)", "validation bits per character", log="")
    median_bands(ax, rows, ["attention"], "depth", "bits")
    integer_ticks(ax)
    return ax


class FixedRate(Experiment):
    """Stability at a fixed learning rate: the maximum depth that trains without warm-up (Kim et al., Section 5)."""

    id = "fixed-rate"
    paper = KIM
    title = "Stability at a fixed learning rate"
    claim = (
        "At a fixed rate dot-product attention fails to train beyond 10 layers; tied and contractive L2 train at 18."
    )
    setting = (
        "Alice in Wonderland (or --text), post-norm blocks, no warm-up, decay or clipping; --full has the paper's size."
    )
    minutes = (1, 60, 40_000)
    takes = frozenset({"text"})

    def cells(self, options: ExperimentOptions) -> list[Record]:
        """Kinds × depths at one rate, without warm-up, decay or clipping."""
        sizes: Record = options.pick(_SMALL | {"width": 32}, _SMALL, _PAPER)
        steps, depths = options.pick((100, (2, 10, 18)), (500, (2, 6, 10, 14, 18)), (20_000, (2, 6, 10, 14, 18)))
        fixed = {"schedule": "fixed", "warmup": 0, "clip": 0.0, "steps": steps, **sizes, "rate": 2e-3}
        return [
            {"attention": kind, "blocks": blocks, "depth": depth, **fixed}
            for (kind, blocks), depth in product(_BLOCKS.items(), depths)
        ]

    def run(self, options: ExperimentOptions, cell: Record) -> Iterable[Record]:
        """Bits per character, beside those of guessing characters by their frequencies."""
        row, corpus = trained(options, cell)
        yield row | {"guessing": unigram_bits(corpus)}

    def draw(self, rows: Rows) -> Figure:
        """Bits against depth."""
        ax = bits_by_depth(rows, "A fixed learning rate")
        reference_line(ax, rows.guessing.iloc[0], "guessing by frequency")
        return finish(ax)

    def judge(self, rows: Rows) -> Finding:
        """The greatest depth at which each kind does better than guessing."""
        trained = rows.query("bits < guessing").groupby("attention").depth.max()
        deepest, maximum = trained.reindex(list(_BLOCKS), fill_value=0), rows.depth.max()
        as_claimed = deepest["dot-product"] <= 10 and min(deepest["l2"], deepest["contractive-2"]) == maximum
        return Finding.of(
            as_claimed and maximum > 10,
            f"deepest that trains, of {maximum}: {listed(deepest, 'd')}. Width {rows['width'].max()}, "
            f"{rows['steps'].max()} steps, rate {rows['rate'].max():g}.",
        )


def unigram_bits(corpus: Corpus) -> float:
    """Bits per character of the validation part under the frequencies of the training part, one added to each."""
    counts = Counter(corpus.train)
    total = len(corpus.train) + len(corpus.alphabet)
    return -sum(log2((counts[character] + 1) / total) for character in corpus.valid) / len(corpus.valid)
