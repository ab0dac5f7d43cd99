r"""Growth of values with the number of tokens: an exponent with its interval, a plateau, and the law that fits best.

**Exponent.** α and c of value ≈ c·n^α by least squares of ln value on ln n through all points. That is the line through
the geometric means of every length, each weighted by its number of inputs; with the same inputs at every length, α is
also the mean of the exponents of the single inputs.

**Interval.** By bootstrap over inputs: at every length as many inputs are drawn as there are, with replacement, and the
line is fitted anew. m inputs understate their own spread, so that deviations from the mean are first multiplied by
√(m/(m−1)), and percentiles are stretched about the estimate by the ratio of Student's quantile to the normal one (as in
Hesterberg 2015, *What teachers should know about the bootstrap*). Inputs are drawn at every length independently, or
together when they are paired: input k is then the same text at every length, and what makes it rougher at all lengths
does not disturb the exponent. Without pairing, the interval of such data is too wide rather than too narrow. Values
without spread have no bootstrap; their interval comes from the regression, from how far the points are from the line,
and says so.

**Laws** are compared in `howsmooth.reports.growth.laws`. All statements are about the measured lengths and no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit
from torch import Tensor

from howsmooth._util.common import rounded
from howsmooth._util.display import card
from howsmooth._util.validation import Probability, validated
from howsmooth.errors import InvalidInput
from howsmooth.reports.growth.laws import (
    ROUNDING,
    STRONG,
    Law,
    PowerLaw,
    Sample,
    compare_laws,
    fit_break,
    fit_line,
    fit_power_law,
)

Numbers = NDArray[np.float64]
_AT_ONCE = 2**20
"""Number of values that are drawn at once."""
_WORDS = {"constant": "a constant", "power": "a free power", "plateau": "growth that ends in a plateau"}


@dataclass(frozen=True)
class Plateau:
    """Growth that ends: value ≈ c·n^α up to ``start`` and the same beyond.

    Attributes:
        start: the number of tokens where growth ends.
        interval: of the start, by bootstrap; None without one.
        exponent: α before.
        level: the value beyond.
    """

    start: float
    interval: tuple[float, float] | None
    exponent: float
    level: float


@dataclass(frozen=True, eq=False, repr=False)
class Growth(PowerLaw):
    """Growth of values with n: the fitted power law, and how sure it is; `growth` makes it.

    Attributes:
        interval: of the exponent; None with two points, whose spread cannot be measured.
        confidence: of the intervals.
        laws: all laws compared, the likeliest first.
        verdict: name of the law that the data single out, or None.
        plateau: where growth ends, when that is the verdict.
        lengths, values: the data, sorted by length.
        paired: whether value k belongs to the same input at every length.
    """

    interval: tuple[float, float] | None
    confidence: float
    laws: tuple[Law, ...]
    verdict: str | None
    plateau: Plateau | None
    lengths: tuple[float, ...]
    values: tuple[Numbers, ...]
    paired: bool
    draws: Numbers | None
    """Exponents and logarithms of the factor of the bootstrap, ``(resamples, 2)``, stretched like the interval."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # results with the same exponent may differ in the rest

    @property
    def method(self) -> Literal["bootstrap", "regression"] | None:
        """Source of the interval; None without one."""
        return None if self.interval is None else "regression" if self.draws is None else "bootstrap"

    def band(self, n: float) -> tuple[float, float] | None:
        """Interval of the fitted power law at n, from the same source as that of the exponent."""
        x = math.log(n)
        if self.draws is not None:
            low, high = np.quantile(self.draws @ [x, 1.0], _tails(self.confidence))
            return math.exp(low), math.exp(high)
        if self.interval is None:
            return None
        points = np.repeat(np.log(self.lengths), [len(row) for row in self.values])
        squares = float(((points - points.mean()) ** 2).sum())
        reach = (self.interval[1] - self.exponent) * math.sqrt(squares / len(points) + (x - points.mean()) ** 2)
        return self.at(n) * math.exp(-reach), self.at(n) * math.exp(reach)

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        first, last = self.lengths[0], self.lengths[-1]
        low, high = self.interval or (self.exponent, self.exponent)
        way = "change" if low <= 0 <= high else "grow" if low > 0 else "fall"
        trend = f"Over n = {first:g} … {last:g} the values {way} like n^{self.exponent:.2f} ({_doubt(self)})"
        standing = [_WORDS.get(law.name, law.name) for law in _standing(self.laws)]
        if self.plateau is not None:
            return f"{trend}, but a plateau describes them better, with strong evidence: {self._plateau_in_words()}."
        if self.verdict == "power":
            return f"{trend}; that describes them better than a constant, log n, n^1/4 and n^1/2, with strong evidence."
        if self.verdict is not None:
            against = "with strong evidence against the others" if len(standing) == 1 else "with no need of a freer law"
            return f"{trend}; {standing[0]} describes them best of the laws compared, {against}."
        if not standing:
            return f"{trend}; they are too few to compare laws."
        return f"{trend}; they cannot tell {', '.join(standing[:-1])} and {standing[-1]} apart."

    def _plateau_in_words(self) -> str:
        assert self.plateau is not None
        plateau, sure = self.plateau, ""
        if plateau.interval is not None:
            sure = f" ({100 * self.confidence:g} % interval {plateau.interval[0]:.0f} to {plateau.interval[1]:.0f})"
        lead = f"growth like n^{plateau.exponent:.2f} up to about n = {plateau.start:.0f}{sure}"
        return f"{lead}, and {rounded(plateau.level, digits=3)} beyond"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the data and the resamples, ready for JSON."""
        return {
            "exponent": self.exponent,
            "interval": self.interval and list(self.interval),
            "method": self.method,
            "confidence": self.confidence,
            "factor": self.factor,
            "verdict": self.verdict,
            "laws": {
                law.name: {
                    "log_likelihood": law.log_likelihood if math.isfinite(law.log_likelihood) else None,
                    "weight": law.weight,
                }
                for law in self.laws
            },
            "plateau": None if self.plateau is None else vars(self.plateau),
            "lengths": list(self.lengths),
            "inputs": [len(row) for row in self.values],
            "paired": self.paired,
            "sentence": self.sentence,
        }

    def __repr__(self) -> str:
        ends = "" if self.interval is None else " ({:.2f} … {:.2f})".format(*self.interval)
        return f"n^{self.exponent:.2f}{ends}"

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        laws = [(law.name, f"{100 * law.weight:.3g} % of the evidence") for law in self.laws]
        return card(repr(self), laws, [self.sentence])


@validated
def growth(
    values: Any,
    lengths: Sequence[float] | Any,
    *,
    paired: bool = False,
    confidence: Probability = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Growth:
    """Fit the growth of values with the number of tokens.

    Args:
        values: one row of values per length, as an array ``(lengths, inputs)`` or arrays of different sizes; or one
            value per entry of ``lengths``, which may repeat, as in columns: ``growth(rows.value, rows.length)``.
        lengths: n of every row, or of every value.
        paired: whether the k-th value of every length belongs to the same input, as the windows of a scan do.
        confidence: probability of the intervals.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    >>> n = [8, 16, 32, 64, 128, 256]
    >>> noise = np.random.default_rng(0).normal(0, 0.1, (6, 10))
    >>> grown = growth([0.7 * k**0.5 * np.exp(row) for k, row in zip(n, noise)], n)
    >>> grown
    n^0.51 (0.49 … 0.53)
    >>> grown.verdict
    'n^1/2'
    """
    if resamples < 100:
        raise InvalidInput(f"percentiles need at least 100 resamples, got {resamples}.")
    by_length = _read(values, lengths)
    rows = [np.log(row) for row in by_length.values()]
    if paired and (len({len(row) for row in rows}) > 1 or len(rows[0]) < 2):
        raise InvalidInput("paired values need the same inputs at every length, at least two: leave out `paired`.")
    if max(float(np.ptp(row)) for row in rows) <= ROUNDING:
        rows, paired = [row[:1] for row in rows], False  # copies of one number are one number
    x = np.log(np.array(list(by_length)))
    sample = _sample(x, rows, paired)
    points = np.repeat(x, [len(row) for row in rows])
    law = fit_power_law(np.exp(points).tolist(), np.exp(np.concatenate(rows)).tolist())
    assert law is not None
    means = _resampled_means(rows, paired, resamples, seed) if min(map(len, rows)) > 1 else None
    interval, draws = None, None
    if means is not None:
        line = fit_line(sample.x, means, sample.counts)
        centre = np.array([law.exponent, math.log(law.factor)])
        freedom = len(rows[0]) - 1 if paired else _freedom_of_exponent(sample.x, rows)
        draws = centre + _student_ratio(freedom, confidence) * (np.stack([line.slope, line.intercept], -1) - centre)
        low, high = np.quantile(draws[:, 0], _tails(confidence))
        interval = float(low), float(high)
    elif law.error is not None:
        reach = law.error * float(stdtrit(law.points - 2, (1 + confidence) / 2))
        interval = law.exponent - reach, law.exponent + reach
    laws = compare_laws(sample)
    verdict = _verdict(laws)
    plateau = _plateau(sample, means, confidence, min(map(len, rows)) - 1) if verdict == "plateau" else None
    data = tuple(np.exp(row) for row in rows)
    fitted = law.exponent, law.error, law.factor, law.points
    return Growth(*fitted, interval, confidence, laws, verdict, plateau, tuple(by_length), data, paired, draws)


def _read(values: Any, lengths: Any) -> dict[float, Numbers]:
    """Length → its values, sorted by length."""
    where = _floats(lengths, "the lengths")
    rows = values.to_numpy() if hasattr(values, "to_numpy") else values
    rows = [_floats(row, "the values") for row in (rows if hasattr(rows, "__len__") else [rows])]
    if where.ndim != 1 or len(rows) != len(where):
        raise InvalidInput(
            f"growth needs one value, or one row of values, per length, got {len(rows)} for {where.size}: give an "
            "array of shape (lengths, inputs)."
        )
    if not (np.isfinite(where) & (where > 0)).all():
        raise InvalidInput("lengths must be positive and finite numbers of tokens.")
    by_length: dict[float, Numbers] = {}
    for n, row in sorted(zip(where.tolist(), rows, strict=True), key=lambda pair: pair[0]):
        if row.ndim > 1 or row.size == 0:
            raise InvalidInput(f"the values at n = {n:g} must be a number or a list of them, got shape {row.shape}.")
        if not (np.isfinite(row) & (row > 0)).all():
            raise InvalidInput(f"the values at n = {n:g} are not all positive and finite, so they have no logarithm.")
        by_length[n] = np.concatenate([by_length.get(n, np.empty(0)), row.reshape(-1)])
    if len(by_length) < 2:
        raise InvalidInput("growth with n needs values at two different lengths or more.")
    return by_length


def _floats(numbers: Any, what: str) -> Numbers:
    try:
        plain = numbers.detach().cpu().double().numpy() if isinstance(numbers, Tensor) else numbers
        return np.asarray(plain, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} must be real numbers: {error}.") from error


def _sample(x: Numbers, rows: Sequence[Numbers], paired: bool) -> Sample:
    """Means and the spread around them; when paired, without what each input adds at every length."""
    means = np.array([row.mean() for row in rows])
    rest = [row - mean for row, mean in zip(rows, means, strict=True)]
    counts, points = np.array([float(len(row)) for row in rows]), sum(map(len, rows))
    if paired:
        rest, points = list(np.array(rest) - np.mean(rest, axis=0)), points - len(rows[0]) + 1
    return Sample(x, means, counts, float(sum((row**2).sum() for row in rest)), points)


def _resampled_means(rows: Sequence[Numbers], paired: bool, resamples: int, seed: int) -> Numbers:
    """The mean at every length, ``(resamples, lengths)``, with inputs drawn anew; each row has two values or more.

    >>> drawn = _resampled_means([np.array([0.0, 2.0]), np.array([5.0, 5.0])], False, 1000, seed=0)
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


def _freedom_of_exponent(x: Numbers, rows: Sequence[Numbers]) -> float:
    """Degrees of freedom of the slope's error, each length with a spread of its own (Satterthwaite 1946)."""
    counts = np.array([len(row) for row in rows])
    pull = (x - (counts * x).sum() / counts.sum()) ** 2
    parts = pull * counts * np.array([row.var(ddof=1) for row in rows])
    return float(parts.sum() ** 2 / (parts**2 / (counts - 1)).sum()) if parts.any() else float((counts - 1).sum())


def _student_ratio(freedom: float, confidence: float) -> float:
    """The ratio of Student's quantile to the normal one.

    >>> round(_student_ratio(9, 0.95), 3)
    1.154
    """
    upper = _tails(confidence)[1]
    return float(stdtrit(freedom, upper) / ndtri(upper))


def _tails(confidence: float) -> list[float]:
    """The two probabilities that leave so much between them."""
    return [(1 - confidence) / 2, (1 + confidence) / 2]


def _plateau(sample: Sample, means: Numbers | None, confidence: float, freedom: int) -> Plateau:
    """The break and its bootstrap interval, stretched about the estimate like that of the exponent.

    The lengths beside the break decide where it lies, so that the freedom is that of one length, not of all.
    """
    bend = fit_break(sample.x, sample.means, sample.counts)
    interval = None
    if means is not None:
        again = fit_break(sample.x, means, sample.counts)
        start = float(bend.start)
        moved = _student_ratio(freedom, confidence) * (again.start - start)
        low, high = np.exp(np.quantile(start + moved, _tails(confidence)))
        interval = float(low), float(high)
    level = math.exp(float(bend.intercept + bend.slope * bend.start))
    return Plateau(math.exp(float(bend.start)), interval, float(bend.slope), level)


def _standing(laws: Sequence[Law]) -> list[Law]:
    """The laws that no other has strong evidence against."""
    return [law for law in laws if law.bic < laws[0].bic + STRONG]


def _verdict(laws: Sequence[Law]) -> str | None:
    """The best law, unless one with as few or fewer parameters is nearly as good."""
    rivals = [law for law in _standing(laws)[1:] if law.parameters <= laws[0].parameters]
    return laws[0].name if laws and not rivals else None


def _doubt(growth: Growth) -> str:
    if growth.interval is None:
        return "two values, so no interval"
    low, high = growth.interval
    sure = f"{100 * growth.confidence:g} % interval {low:.2f} to {high:.2f}"
    if growth.method == "regression":
        few = "no spread of inputs" if all(len(row) == 1 for row in growth.values) else "a single input at some length"
        return f"{sure} from the regression: {few} to resample"
    counts = sorted({len(row) for row in growth.values})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{sure} by bootstrap over {many} {'paired ' if growth.paired else ''}inputs at each length"
