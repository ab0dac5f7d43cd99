r"""The laws a constant may follow as the number of tokens grows, fitted to logarithms by least squares.

Values are positive and their errors multiply, so a law is a curve for :math:`y = \ln\text{value}` against
:math:`x = \ln n`, with independent Gaussian errors of one size:

==========  =====================================  ==========
law         ln value                               parameters
==========  =====================================  ==========
constant    c                                      c
log n       c + ln ln n                            c
n^1/4       c + x/4                                c
n^1/2       c + x/2                                c
power       c + αx                                 c, α
plateau     c + α·min(x, x₀), α > 0                c, α, x₀
==========  =====================================  ==========

and the size of the errors is one parameter more. With N numbers and residual sum of squares S the largest likelihood is
:math:`\ell = -\tfrac N2(\ln(2\pi S/N) + 1)`, and laws are compared by :math:`\mathrm{BIC} = -2\ell + k\ln N` (Schwarz
1978): a difference of 6 is strong evidence, odds of 20 to 1 (Kass and Raftery 1995).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput

STRONG = 6.0
"""Difference in BIC that counts as strong evidence."""
ROUNDING = 1e-9
"""Relative errors below this are rounding, and laws that close to the data are all exact."""
_SHAPES = {
    "constant": lambda x: np.zeros_like(x),
    "log n": lambda x: np.log(x, out=np.full_like(x, -np.inf), where=x > 0),
    "n^1/4": lambda x: x / 4,
    "n^1/2": lambda x: x / 2,
}


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law.

    Attributes:
        exponent: α of value ≈ c·n^α.
        error: its standard error; None with fewer than three points, which a line fits whatever they are.
        factor: c.
        points: their number.
    """

    exponent: float
    error: float | None
    factor: float
    points: int

    def at(self, n: float) -> float:
        """The fitted value at n."""
        return self.factor * n**self.exponent

    def __str__(self) -> str:
        return f"n^{self.exponent:.2f}" + ("" if self.error is None else f" ± {rounded_up(self.error)}")


def rounded_up(error: float) -> str:
    """An error in two decimals, rounded up; 0.00 for rounding alone.

    >>> rounded_up(0.0041), rounded_up(0.02), rounded_up(1e-12)
    ('0.01', '0.02', '0.00')
    """
    return f"{math.ceil(100 * (error - ROUNDING)) / 100:.2f}" if error > ROUNDING else "0.00"


@validated
def fit_power_law(lengths: Sequence[float], values: Sequence[float]) -> PowerLaw | None:
    """The power law through points (n, value); None with fewer than two lengths or a number without a logarithm.

    >>> str(fit_power_law([8, 16, 32], [2.0, 4.0, 8.0]))
    'n^1.00 ± 0.00'
    """
    if len(lengths) != len(values):
        raise InvalidInput(
            f"there are {len(lengths)} lengths and {len(values)} values: give one value for each length."
        )
    if len(set(lengths)) < 2 or not all(0 < number < math.inf for number in (*lengths, *values)):
        return None
    x, y = np.log(np.asarray(lengths, dtype=float)), np.log(np.asarray(values, dtype=float))
    line = fit_line(x, y, np.ones_like(x))
    free = len(x) - 2
    spread = float(np.sum((x - x.mean()) ** 2))
    error = None if free < 1 else math.sqrt(float(line.squares) / (free * spread))
    return PowerLaw(float(line.slope), error, math.exp(float(line.intercept)), len(x))


class Line(NamedTuple):
    """y = intercept + slope·min(x, start) through weighted points; every field has the leading axes of y."""

    slope: np.ndarray
    intercept: np.ndarray
    squares: np.ndarray
    start: Any = math.inf


def fit_line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> Line:
    """Weighted least squares along the last axis; ``squares`` is the weighted sum of squared residuals."""
    total = weights.sum()
    x_mean, y_mean = (weights * x).sum() / total, (weights * y).sum(-1) / total
    centred = x - x_mean
    slope = (weights * centred * y).sum(-1) / (weights * centred**2).sum()
    intercept = y_mean - slope * x_mean
    residuals = y - intercept[..., None] - slope[..., None] * x
    return Line(slope, intercept, (weights * residuals**2).sum(-1))


def fit_break(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> Line:
    """The broken line with the least squares, exactly, among those with two lengths at or before the break and two at
    or after it, of four lengths or more.

    Between neighbours x_k and x_{k+1} the best broken line is the best line on the left with the mean on the right
    where these meet in between, and otherwise has its break at one of the lengths. Lines that do not rise have no
    plateau and infinite squares. ``x`` is sorted; ``y`` may have leading axes.
    """
    breaks = []
    for k in range(1, len(x) - 1):
        bent = fit_line(np.minimum(x, x[k]), y, weights)
        breaks.append(bent._replace(start=x[k], squares=np.where(bent.slope > 0, bent.squares, np.inf)))
    for k in range(2, len(x) - 1):
        left, right = slice(None, k), slice(k, None)
        rise = fit_line(x[left], y[..., left], weights[left])
        level = (weights[right] * y[..., right]).sum(-1) / weights[right].sum()
        flat = (weights[right] * (y[..., right] - level[..., None]) ** 2).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            meeting = (level - rise.intercept) / rise.slope
        inside = (rise.slope > 0) & (meeting >= x[k - 1]) & (meeting <= x[k])
        breaks.append(rise._replace(start=meeting, squares=np.where(inside, rise.squares + flat, np.inf)))
    return reduce(_better, breaks)


def _better(one: Line, other: Line) -> Line:
    wins = other.squares < one.squares
    return Line(*(np.where(wins, b, a) for a, b in zip(one, other, strict=True)))


@dataclass(frozen=True, eq=False)
class Sample:
    """Data in the form on which the likelihood of a law depends.

    Attributes:
        x: ln n of every length, sorted.
        means: mean ln value at every length.
        counts: number of values behind each mean.
        within: sum of squares of the values around their means.
        points: number of independent values.
    """

    x: np.ndarray
    means: np.ndarray
    counts: np.ndarray
    within: float
    points: int

    def squares(self, shape: np.ndarray) -> float:
        """The least residual sum of squares of ln value = c + shape over c."""
        rest = self.means - shape
        if not np.isfinite(rest).all():
            return math.inf
        centre = (self.counts * rest).sum() / self.counts.sum()
        return self.within + float((self.counts * (rest - centre) ** 2).sum())


@dataclass(frozen=True)
class Law:
    """A law fitted to a sample.

    Attributes:
        name: of the table above.
        parameters: their number, with the size of the errors.
        log_likelihood: the largest.
        bic: smaller is better.
        weight: e^{−BIC/2} divided by the sum over all laws: the odds of the laws if all were as likely before.
    """

    name: str
    parameters: int
    log_likelihood: float
    bic: float
    weight: float


def compare_laws(sample: Sample) -> tuple[Law, ...]:
    """Every law that the sample has enough numbers for, the likeliest by BIC first.

    >>> x = np.log([8.0, 16.0, 32.0, 64.0, 128.0])
    >>> [law.name for law in compare_laws(Sample(x, 0.5 * x + 1, np.ones(5), 0.0, 5))][:2]
    ['n^1/2', 'power']
    """
    fits = {name: (2, sample.squares(shape(sample.x))) for name, shape in _SHAPES.items()}
    fits["power"] = 3, sample.within + float(fit_line(sample.x, sample.means, sample.counts).squares)
    if len(sample.x) >= 4:
        fits["plateau"] = 4, sample.within + float(fit_break(sample.x, sample.means, sample.counts).squares)
    n = sample.points
    rows = []
    for name, (parameters, squares) in fits.items():
        if n > parameters + 1:
            variance = max(squares / n, ROUNDING**2)
            likelihood = -n / 2 * (math.log(2 * math.pi * variance) + 1) if math.isfinite(variance) else -math.inf
            rows.append((name, parameters, likelihood, parameters * math.log(n) - 2 * likelihood))
    rows.sort(key=lambda row: row[-1])
    odds = [math.exp(-(row[-1] - rows[0][-1]) / 2) for row in rows]
    return tuple(Law(*row, odd / sum(odds)) for row, odd in zip(rows, odds, strict=True))
