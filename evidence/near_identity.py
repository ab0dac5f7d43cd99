"""Does the stated probability hold for maps near the identity, where rounding can hide the largest singular value?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.stats import binom
from torch import Tensor

import howsmooth as hs
from evidence.tables import table
from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.norms import golub_kahan

TITLE = "Maps near the identity"
GAPS = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
RUNS = {10**3: 1000, 10**4: 1000, 10**5: 300, 10**6: 60}  # runs of each gap, by size
CONFIDENCE = 0.99
_COORDINATES = 10**6  # of all maps solved together


class NearIdentity(JacobianOperator):
    """``maps`` copies of I + δ a aᵀ in R^size, known through their products; the largest singular value is 1 + δ.

    ``spread`` False: a = e_N, the matrix diag(1, …, 1, 1 + δ). ``spread`` True: a has all entries N^(−½), and
    v + δ⟨a,v⟩a rounds to v itself when δ is small enough. ``top`` is the norm of the map as stored in this dtype.
    """

    method = "near the identity"

    def __init__(self, size: int, gap: float, maps: int, dtype: torch.dtype, spread: bool = False):
        self.batch_shape, self.in_shape, self.out_shape = torch.Size((maps,)), torch.Size((size,)), torch.Size((size,))
        self.size, self.gap, self.spread = size, gap, spread
        self.dtype, self.device = dtype, torch.device("cpu")
        self.entry = torch.tensor(size**-0.5, dtype=dtype)
        self.last = torch.tensor(1 + gap, dtype=torch.float64).to(dtype)
        self.top = 1 + gap * size * float(self.entry) ** 2 if spread else float(self.last)

    def matvec(self, v: Tensor) -> Tensor:
        if self.spread:
            return v + self.gap * (self.entry * v).sum(-1, keepdim=True) * self.entry
        return torch.cat([v[..., :-1], v[..., -1:] * self.last], -1)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.matvec(u)

    def subset(self, index: Tensor) -> NearIdentity:
        return NearIdentity(self.size, self.gap, len(index), self.dtype, self.spread)


@dataclass
class Coverage:
    """How the ends did over many random starts."""

    runs: int = 0
    lower_false: int = 0
    upper_false: int = 0
    converged: int = 0
    width: float = 0.0
    products: int = 0

    @property
    def allowed(self) -> int:
        """Failures that a promise kept exactly exceeds once in a thousand times."""
        return int(binom.ppf(0.999, self.runs, 1 - CONFIDENCE))

    def add(self, m: hs.Measurement, top: float) -> None:
        lower, upper = m.lower.reshape(-1), m.upper.reshape(-1)
        self.runs += len(lower)
        self.lower_false += int((lower > top).sum())
        self.upper_false += int((upper < top).sum())
        self.converged += int(m.converged.sum())
        self.width = max(self.width, float((upper / top - 1).max()))
        self.products += m.products * len(lower)

    def cell(self) -> str:
        share = f"{self.upper_false}" if self.upper_false <= self.allowed else f"**{self.upper_false}**"
        return f"{share} of {self.runs} ({self.allowed}), + {self.width:.1g}"


def coverage(size: int, gap: float, runs: int, dtype: torch.dtype, spread: bool = False) -> Coverage:
    """Measure one map from many random starts, at the default rtol."""
    found = Coverage()
    at_once = max(1, min(runs, _COORDINATES // size))
    for seed in range(-(-runs // at_once)):
        maps = min(at_once, runs - seed * at_once)
        op = NearIdentity(size, gap, maps, dtype, spread)
        found.add(golub_kahan(op, confidence=CONFIDENCE, seed=seed), op.top)
    return found


def residual_blocks(runs: int, gap: float = 1e-4, shape: tuple[int, int] = (100, 100)) -> Coverage:
    """x ↦ x + γ sin⟨a, x⟩ a through `howsmooth.measure`, in float32; the norm is 1 + γ cos⟨a, x⟩ |a|²."""
    found = Coverage()
    for seed in range(runs):
        generator = torch.Generator().manual_seed(seed)
        a = torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=(0, 1))
        x = torch.randn(*shape, generator=generator)

        def block(y: Tensor, a: Tensor = a) -> Tensor:
            return y + gap * torch.sin((a * y).sum((-2, -1), keepdim=True)) * a

        slope = torch.cos((a.double() * x.double()).sum()) * (a.double() ** 2).sum()
        found.add(hs.measure(block, x, seed=seed), max(1.0, float(1 + gap * slope)))
    return found


def parts(progress: Callable[[str], None], share: float = 1.0) -> list[str]:
    """The text and tables of the documentation page; ``share`` of the runs."""
    started = time.perf_counter()
    sections = []
    for spread, name in ((False, "diag(1, …, 1, 1 + δ)"), (True, "I + δ a aᵀ, a = (1, …, 1)/√N")):
        for dtype in (torch.float32, torch.float64):
            rows = []
            for size, runs in RUNS.items():
                progress(f"{name}, {dtype}, N = {size}")
                cells = [coverage(size, gap, max(1, int(share * runs)), dtype, spread) for gap in GAPS]
                assert not any(c.lower_false for c in cells)
                rows.append([f"{size:.0e}", *(c.cell() for c in cells), f"{cells[0].products / cells[0].runs:.1f}"])
            kind = str(dtype).removeprefix("torch.")
            head = ["N", *(f"δ = {gap:g}" for gap in GAPS), "products"]
            sections += [f"{name}, {kind}:", table(head, rows)]
    progress("residual blocks")
    blocks = residual_blocks(max(1, int(100 * share)))
    return [
        "The norm of a map close to a multiple of the identity is the hardest to bound: the largest singular value "
        "shows in the products only through the start's component on its vector, about N^(−½), times δ, and rounding "
        "can hide that. Cells: how often the 99 % upper end was below the truth, of how many random starts (and what a "
        "promise kept exactly exceeds once in a thousand times), then the largest relative distance of the upper end "
        "from the truth. Where float32 cannot tell 1 from 1 + δ the upper end is as far away as that. "
        "The lower end was true in every run. rtol = 1e-3.",
        *sections,
        f"x ↦ x + 1e-4 sin⟨a, x⟩ a on 100 × 100 inputs in float32 through `hs.measure`: upper end false in "
        f"{blocks.upper_false} of {blocks.runs} (allowed {blocks.allowed}), lower end in {blocks.lower_false}; "
        f"{blocks.converged} converged at 1e-3.",
        f"{time.perf_counter() - started:.0f} s.",
    ]
