"""Deeper and deeper at a fixed learning rate, without warm-up: which attention still trains?

`python -m evidence.training_depth` works on cells that nobody else works on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from evidence.tables import FOLDER
from evidence.training_grid import NARROW, RUNS, WINDOW, draw, run, summary, text
from howsmooth.papers.training import Corpus, Grid, TrainingSettings
from howsmooth.papers.training.grid import write_table
from howsmooth.papers.training.run_files import TrainingResult
from howsmooth.papers.training.training_settings import Attention

TITLE = "How deep does it train at a fixed learning rate?"
BASE = TrainingSettings(
    width=64, heads=4, length=32, batch_tokens=256, steps=800, rate=2e-3, schedule="fixed", warmup=0, clip=0.0
)
DEPTHS, SEEDS = (2, 6, 10, 14, 18), (0,)
USUAL: tuple[Attention, ...] = ("dot-product", "l2")


def grids(
    base: TrainingSettings = BASE, depths: Sequence[int] = DEPTHS, seeds: Sequence[int] = SEEDS
) -> dict[str, Grid]:
    """Dot-product and tied L2 attention with LayerNorm after and before the branches, and contractive blocks.

    The last also with a window, on which contractive attention is damped less.
    """
    return {
        "post-norm": Grid(replace(base, blocks="post-norm"), USUAL, depths, seeds),
        "pre-norm": Grid(replace(base, blocks="pre-norm"), USUAL, depths, seeds),
        "contractive": Grid(base, ("contractive-2", "contractive-inf"), depths, seeds),
        f"contractive{NARROW}": Grid(replace(base, window=WINDOW), ("contractive-2",), depths, seeds),
    }


def untrained(results: Sequence[TrainingResult], corpus: Corpus) -> list[str]:
    """The cells that did no better than guessing characters by how often they occur, or diverged."""
    limit = single_character_bits(corpus)
    return [
        f"`{r.settings.attention}` in {r.settings.depth} {r.settings.block_kind} blocks"
        for r in results
        if r.valid_bits is None or r.valid_bits > limit
    ]


def single_character_bits(corpus: Corpus) -> float:
    """Bits per character of the validation part under the frequencies of the training part (one added to each).

    >>> single_character_bits(Corpus("abab", "ab", ""))
    1.0
    """
    counts = {character: 1 + corpus.train.count(character) for character in corpus.alphabet}
    total = sum(counts.values())
    return -sum(math.log2(counts[character] / total) for character in corpus.valid) / len(corpus.valid)


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    name, corpus = text()
    wanted = grids()
    found = run(RUNS / "training-depth", corpus, wanted, progress)
    results = [result for some in found.values() for result in some]
    write_table(FOLDER, results, "training-depth.csv")
    draw(found, wanted, FOLDER / "training-depth.png")
    failed = untrained(results, corpus)
    total = sum(len(grid.cells()) for grid in wanted.values())
    return [
        f"Character language models on {name}, width {BASE.width}, {BASE.heads} heads, pieces of {BASE.length} "
        f"characters, {BASE.batch_tokens} characters in each of {BASE.steps:,} steps of AdamW at a fixed rate of "
        f"{BASE.rate:g}, without warm-up, decay of the rate or clipping of gradients. Validation bits per character, "
        "one seed; the rows are in [training-depth.csv](training-depth.csv).",
        summary(found, wanted),
        "![Validation bits against depth at a fixed learning rate](training-depth.png)",
        f"Guessing characters by how often they occur takes {single_character_bits(corpus):.2f} bits. No better than "
        f"that, or diverged: {', '.join(failed) if failed else 'none'}.",
        "Kim et al. (2021) report for Penn Treebank that dot-product attention fails to train beyond 10 layers at a "
        "fixed rate, while tied and contractive L2 attention are stable up to 18.",
        f"{len(results)} of {total} cells; {sum(result.seconds for result in results) / 60:.0f} minutes of training on "
        "one core in all.",
    ]


if __name__ == "__main__":
    run(RUNS / "training-depth", text()[1], grids(), lambda text: print(text, flush=True))
