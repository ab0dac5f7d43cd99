"""How a constant grows with the number of tokens: σ ≈ c·n^a, by least squares on logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Growth:
    """A fitted power law.

    Attributes:
        exponent: a of σ ≈ c·n^a.
        error: its standard error; None with fewer than three points, which a line fits whatever they are.
        factor: c.
        points: how many there were.
    """

    exponent: float
    error: float | None
    factor: float
    points: int = 0

    def at(self, n: float) -> float:
        """The fitted value at n."""
        return self.factor * n**self.exponent

    def __str__(self) -> str:
        return f"n^{self.exponent:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


def fit_growth(lengths: Sequence[float], values: Sequence[float]) -> Growth | None:
    """The power law through points (n, σ); None when there are fewer than two lengths or a value is not positive.

    >>> str(fit_growth([8, 16, 32], [2.0, 4.0, 8.0]))
    'n^1.00 ± 0.00'
    """
    if len(set(lengths)) < 2 or min(values) <= 0 or not math.isfinite(max(values)):
        return None
    x, y = np.log(np.asarray(lengths, dtype=float)), np.log(np.asarray(values, dtype=float))
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    intercept = float(y.mean() - slope * x.mean())
    free = len(x) - 2
    error = None if free < 1 else float(np.linalg.norm(y - intercept - slope * x)) / math.sqrt(free * spread)
    return Growth(slope, error, math.exp(intercept), len(x))
