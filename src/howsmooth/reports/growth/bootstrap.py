"""Bootstrap over inputs, for the interval of an exponent.

At every length as many inputs are drawn as there are, with replacement, and the line is fitted anew. m inputs
understate their own spread, so that deviations from the mean are first multiplied by √(m/(m−1)), and percentiles are
stretched about the estimate by the ratio of Student's quantile to the normal one (as in Hesterberg 2015, *What teachers
should know about the bootstrap*).

Inputs are drawn at every length independently, or together when they are paired: input k is then the same text at every
length, and what makes it rougher at all lengths does not disturb the exponent. Without pairing, the interval of such
data is too wide rather than too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

Numbers = NDArray[np.float64]
_AT_ONCE = 2**20


def resampled_means(rows: Sequence[Numbers], paired: bool, resamples: int, seed: int) -> Numbers:
    """The mean at every length, ``(resamples, lengths)``, with inputs drawn anew; each row has two values or more.

    >>> drawn = resampled_means([np.array([0.0, 2.0]), np.array([5.0, 5.0])], False, 1000, seed=0)
    >>> drawn.shape, round(float(drawn[:, 0].var()), 1), float(drawn[:, 1].var())  # s²/m = 1
    ((1000, 2), 1.0, 0.0)
    """
    random = np.random.default_rng(seed)
    wide = [math.sqrt(len(row) / (len(row) - 1)) * (row - row.mean()) for row in rows]
    together = [np.stack(wide)] if paired else [row[None] for row in wide]
    columns = []
    for block in together:
        size, means = block.shape[1], []
        step = max(1, _AT_ONCE // block.size)
        for start in range(0, resamples, step):
            drawn = random.integers(size, size=(min(step, resamples - start), size))
            means.append(block[:, drawn].mean(-1).T)
        columns.append(np.concatenate(means))
    return np.array([row.mean() for row in rows]) + np.concatenate(columns, axis=1)


def freedom_of_exponent(x: Numbers, rows: Sequence[Numbers]) -> float:
    """Degrees of freedom of the slope's error, each length with a spread of its own (Satterthwaite 1946)."""
    counts = np.array([len(row) for row in rows])
    pull = (x - (counts * x).sum() / counts.sum()) ** 2
    parts = pull * counts * np.array([row.var(ddof=1) for row in rows])
    return float(parts.sum() ** 2 / (parts**2 / (counts - 1)).sum()) if parts.any() else float((counts - 1).sum())


def student_ratio(freedom: float, confidence: float) -> float:
    """The ratio of Student's quantile to the normal one.

    >>> round(student_ratio(9, 0.95), 3)
    1.154
    """
    upper = tails(confidence)[1]
    return float(stdtrit(freedom, upper) / ndtri(upper))


def tails(confidence: float) -> list[float]:
    """The two probabilities that leave so much between them."""
    return [(1 - confidence) / 2, (1 + confidence) / 2]
