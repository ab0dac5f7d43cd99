"""Every lower bound against the value measured on its own construction: both branches, masked and not, n to 10⁵."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import howsmooth as hs
from evidence.tables import table
from howsmooth.bounds import get
from howsmooth.bounds.lower_bounds import two_cluster_input
from howsmooth.meanfield import Measure, local_constant
from howsmooth.sets.ellipsoid import Ellipsoid

TITLE = "Lower bounds on their own constructions"
RADIUS = 1.5
LENGTHS = (10, 100, 1000, 10**4, 10**5)
ENTRIES = ("castin2024.lower_sqrt_n", "howsmooth.two_cluster", "howsmooth.equal_tokens")
EYE = torch.eye(2, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One construction: the branch of the theorem (the eigenvalue of A), the mask and the length."""

    eigenvalue: float
    mask: str | None
    n: int

    @property
    def head(self) -> hs.SelfAttention:
        return hs.SelfAttention.from_bilinear(self.eigenvalue * EYE, EYE, mask=self.mask)

    def bound(self, name: str) -> float:
        return float(get(name)(self.head, n=self.n, over=hs.sets.Ball(RADIUS)))

    def construction(self, name: str) -> Tensor:
        """The tokens as the statement puts them, ``(n, 2)``: the outliers first."""
        if name == "howsmooth.two_cluster":
            return two_cluster_input(self.head, Ellipsoid.ball(RADIUS, 2), self.n)
        places = {"howsmooth.equal_tokens": (1.0, 1.0), "castin2024.lower_sqrt_n": (RADIUS, RADIUS / 2)}
        first, rest = (-RADIUS, RADIUS) if name.startswith("castin") and self.eigenvalue < 0 else places[name]
        x = torch.zeros(self.n, 2, dtype=torch.float64)
        x[:, 0], x[0, 0] = rest, first
        return x

    def measured(self, name: str) -> float:
        """The lower end of σ_max at the construction of a bound."""
        x = self.construction(name)
        first, rest = x[0], x[-1]
        if self.mask is None:  # n tokens are a measure of two atoms, exact at any length
            share = float((x == first).all(-1).double().mean())
            if share == 1:
                return float(hs.measure(self.head, x[:1]).value)
            weights = torch.tensor([share, 1 - share], dtype=torch.float64)
            return float(local_constant(self.head, Measure(torch.stack([first, rest]), weights)).value)
        # A start where the theorem looks: the outlier alone, or all tokens together. Two steps give a true lower end.
        start = torch.zeros_like(x)
        start[: None if torch.equal(first, rest) else 1] = first
        return float(hs.measure(self.head, x, start=start, max_steps=2 if self.n > 10**4 else 20).lower)


def cases(lengths: tuple[int, ...] = LENGTHS) -> Iterator[Case]:
    for eigenvalue in (-1.0, 8.0):
        for mask in (None, "causal"):
            for n in lengths:
                yield Case(eigenvalue, mask, n)


def parts(progress: Callable[[str], None] = lambda text: None, lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    """The page."""
    rows, above = [], 0
    for case in cases(lengths):
        progress(f"n = {case.n}, eigenvalue {case.eigenvalue:g}, {case.mask or 'no mask'}")
        cells = []
        for name in ENTRIES:
            bound = case.bound(name)
            if bound != bound:
                cells.append("–")
                continue
            measured = case.measured(name)
            above += bound > measured * (1 + 1e-9)
            cells.append(f"{bound:.4g} ≤ {measured:.4g}")
        rows.append([f"{case.eigenvalue:g}", case.mask or "none", case.n, *cells])
    return [
        f"A = λI, V = I, d = 2, R = {RADIUS:g}. The first branch has λ < 0 (x₁ = −Ru, the others Ru), the "
        "second λ > 0 (x₁ = Ru, the others Ru/2). Every cell: the lower bound, then the lower end of σ_max measured on "
        "the construction of that bound. A dash: the statement says nothing beyond n = 1 + e^{2γR²}. "
        f"Lower bounds above the measured value: {above}.",
        table(["λ", "mask", "n", *(f"`{name}`" for name in ENTRIES)], rows),
    ]
