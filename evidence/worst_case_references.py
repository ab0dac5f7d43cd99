"""Known worst cases, and what the search reaches of them with and without the theorems' inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import differential_evolution

import howsmooth as hs
from evidence.reference_values import ONE, l2_infinity_ascent
from evidence.tables import table
from howsmooth.bounds import get
from howsmooth.search import worst_case, worst_measure

TITLE = "Known worst cases, found again"
EYE = torch.eye(2, dtype=torch.float64)
RADIUS = 8**0.5
ALONE = 32
"""Random starts of a search without the theorems' inputs."""
Value = Callable[[], float]


@dataclass(frozen=True)
class Known:
    """A worst case: the value it is known to have, what is wanted of the search, and ways to search for it.

    Attributes:
        target: the value known, from elsewhere than this search.
        share: of the target that the search must reach.
        search: with the theorems' inputs among the starts; None where there are none.
        alone: from random starts.
        upper: an upper bound by a theorem.
    """

    line: str
    target: Value
    share: float
    search: Value | None
    alone: Value
    upper: float


def known() -> Iterator[Known]:
    """All worst cases of the page."""
    yield from minus_identity()
    yield from l2_infinity()
    yield from two_atoms()


def minus_identity() -> Iterator[Known]:
    """A = −I, V = I, d = 2, R² = 8: best values of long ascents from many starts, rounded down."""
    for mask, n, target in ((None, 8, 16.1), (None, 32, 31.9), ("causal", 8, 15.1), ("causal", 32, 27.1)):
        head = hs.SelfAttention.from_bilinear(-EYE, EYE, mask=mask)
        yield Known(
            f"A = −I, d = 2, R² = 8, n = {n}, {mask or 'no mask'}",
            lambda target=target: target,
            1.0,
            lambda head=head, n=n: worst_case(head, n, over=hs.sets.Ball(RADIUS)).value,
            lambda head=head, n=n: (
                worst_case(head, n, over=hs.sets.Ball(RADIUS), constructions=False, starts=ALONE).value
            ),
            float(get("howsmooth.sqrt_n")(head, n=n, over=hs.sets.Ball(RADIUS))),
        )


def l2_infinity() -> Iterator[Known]:
    """L2 attention with D = H = 1, Lip_∞: the row of one token by L-BFGS, which shares no code with the search."""
    head = hs.L2SelfAttention(ONE, ONE)
    for n in (100, 200, 500, 1000):

        def search(n: int = n, **options: bool) -> float:
            starts, steps = (0, 30) if options.get("constructions", True) else (2, 200)
            return worst_case(head, n, norm=math.inf, starts=starts, steps=steps, **options).value

        yield Known(
            f"L2, D = H = 1, Lip_∞, N = {n}",
            lambda n=n: l2_infinity_ascent(n),
            0.995,
            search,
            lambda search=search: search(constructions=False),
            float(get("kim2021.lip_inf")(head, n=n)),
        )


def two_atoms() -> Iterator[Known]:
    """A = −b, V = 1, d = 1, R = 1, measures of two atoms: the supremum by differential evolution in scipy."""
    for b in range(1, 6):
        head = hs.SelfAttention.from_bilinear(-b * ONE, ONE)
        yield Known(
            f"measures, A = −{b}, R = 1, two atoms",
            lambda b=b: two_atom_supremum(float(b)),
            0.99,
            None,
            lambda head=head: worst_measure(head, 2, over=hs.sets.Ball(1.0)).value,
            float(get("howsmooth.mean_field")(head, over=hs.sets.Ball(1.0))),
        )


def two_atom_supremum(b: float) -> float:
    """The largest local constant over both places in [−1, 1] and the logarithm of the ratio of masses."""
    bounds = [(-1.0, 1.0), (-1.0, 1.0), (0.0, 2 * b + 4)]
    found = differential_evolution(lambda z: -two_atom_norm(b, *z), bounds, rng=0, tol=1e-12, popsize=20)
    return -float(found.fun)


def two_atom_norm(b: float, first: float, second: float, log_ratio: float) -> float:
    """‖D^{1/2}JD^{-1/2}‖ or the largest |∂Γ| at two atoms of masses 1 : e^{log_ratio}, written out for d = 1.

    >>> round(two_atom_norm(1.0, 0.0, 0.0, 0.0), 3)  # equal tokens: their mean
    1.0
    """
    x, ratio = np.array([first, second]), math.exp(log_ratio)
    mass: NDArray[np.float64] = np.array([1.0, ratio]) / (1 + ratio)
    weights = mass * np.exp(-b * np.outer(x, x))
    weights /= weights.sum(1, keepdims=True)
    mean = weights @ x
    variance = weights @ x**2 - mean**2
    jacobian = weights * (1 - b * x[:, None] * (x - mean[:, None])) - b * np.diag(variance)
    root = np.sqrt(mass)
    return max(float(np.linalg.norm(root[:, None] * jacobian / root, 2)), b * float(variance.max()))


def row(case: Known) -> list[str]:
    """The case with what was reached; the search with the theorems' inputs must reach its share, if there is one."""
    target, alone = case.target(), case.alone()
    best = alone if case.search is None else case.search()
    if max(best, alone) > case.upper * (1 + 1e-9):
        raise AssertionError(f"{case.line}: {max(best, alone)} is above the upper bound {case.upper}")
    shown = [f"{value:.5g} ({100 * value / target:.2f} %)" for value in (best, alone)]
    wanted = f"{100 * case.share:g} % of {target:.5g}"
    met = "yes" if best >= case.share * target else "NO"
    return [case.line, wanted, "–" if case.search is None else shown[0], shown[1], f"{case.upper:.4g}", met]


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    rows = []
    for case in known():
        progress(case.line)
        rows.append(row(case))
    missed = sum(line[-1] == "NO" for line in rows)
    return [
        "Values that are known from elsewhere: for A = −I from long ascents, rounded down; for L2 attention from "
        "L-BFGS on the row of one token in closed form; for measures from differential evolution on the closed form of "
        f"two atoms. Beside them what `hs.worst_case` and `worst_measure` reach, with the theorems' inputs among the "
        f"starts and from random starts alone, and the upper bound. Targets missed: {missed} of {len(rows)}.",
        table(["worst case", "wanted", "reached", "from random starts alone", "upper bound", "met"], rows),
    ]
