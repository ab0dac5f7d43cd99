"""log|det(I + J)| against the dense determinant, over many maps: exact under causal masks, estimated otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evidence.tables import table
from howsmooth.nn import ContractiveL2Attention
from howsmooth.nn.invertible.branches import AttentionBranch, ComposedBranch, ContractiveMLP
from howsmooth.nn.invertible.log_determinant import Method
from howsmooth.nn.invertible.residual import InvertibleResidual

TITLE = "Log-determinants of residual attention"
CONFIDENCES = (0.9, 0.9999)
SAMPLES = 64


@dataclass(frozen=True)
class Case:
    """One residual block at one input ``(n, d)``."""

    block: InvertibleResidual
    x: Tensor

    def truth(self) -> float:
        """From the dense Jacobian of torch.func: an oracle that shares nothing but autograd with the block."""
        size = self.x.numel()
        jacobian = torch.func.jacrev(lambda x: self.block.branch(x[None])[0])(self.x).reshape(size, size)
        return float(torch.linalg.slogdet(torch.eye(size, dtype=self.x.dtype) + jacobian.detach()).logabsdet)

    def off(self, method: Method, seed: int = 0) -> tuple[float, float, float]:
        """The error, and the error bars at `CONFIDENCES`."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            found = self.block.log_det(self.x, method, samples=SAMPLES, generator=generator)
        narrow, wide = (float(found.error_bar(confidence)) for confidence in CONFIDENCES)
        return abs(float(found.value) - self.truth()), narrow, wide


def cases(count: int, mask: str | None) -> Iterator[Case]:
    """Blocks of every kind with random weights, widths, lengths and coefficients."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        n, heads = int(torch.randint(2, 9, (), generator=generator)), 1 + seed % 2
        width = heads * int(torch.randint(1, 4, (), generator=generator))
        c = (0.5, 0.7, 0.9)[seed % 3]
        norm = ("2", "2", "2", "inf")[seed % 4]
        attention = AttentionBranch(ContractiveL2Attention(width, heads, c, norm), mask)  # type: ignore[arg-type]
        branch = attention
        if seed % 5 == 0 and norm == "2":
            mlps = (ContractiveMLP(width, 8, 1.0), ContractiveMLP(width, 8, 1.0))
            branch = ComposedBranch(mlps[0], attention, mlps[1])  # type: ignore[assignment]
        block = InvertibleResidual(branch).double().eval()
        yield Case(block, 2 * torch.randn(n, width, dtype=torch.float64, generator=generator))


class Map(nn.Module):
    """A linear map with its Lipschitz constant."""

    def __init__(self, f: Callable[[Tensor], Tensor], constant: float):
        super().__init__()
        self.f, self.constant = f, constant

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)

    def lipschitz_bound(self, n: int) -> float:
        return self.constant


def _rank_one(size: int) -> Callable[[Tensor], Tensor]:
    u = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    u = u / u.norm()
    return lambda x: 0.9 * (x @ u)[..., None] * u


HARD: dict[str, tuple[Callable[[Tensor], Tensor], float, float, int, Method]] = {
    "0.9·uuᵀ, 300 coordinates": (_rank_one(300), 0.9, math.log(1.9), 300, "series"),
    "0.9·uuᵀ, 2 coordinates": (_rank_one(2), 0.9, math.log(1.9), 2, "series"),
    "0.9·swap": (lambda x: 0.9 * x.flip(-1), 0.9, math.log(1 - 0.81), 2, "series"),
    "−0.999·I, 4 coordinates": (lambda x: -0.999 * x, 0.999, 4 * math.log(0.001), 4, "roulette"),
}
"""Maps whose samples are as skewed as they can be, or all alike: map, constant, truth, coordinates, method."""


def coverage(case: str, samples: int, trials: int) -> dict[float, int]:
    """How many of the trials lie inside the bars at 95 % and at 99 %."""
    f, constant, truth, size, method = HARD[case]
    x, generator = torch.zeros(1, size, dtype=torch.float64), torch.Generator().manual_seed(0)
    covered = {0.95: 0, 0.99: 0}
    block = InvertibleResidual(Map(f, constant)).eval()
    apart = method == "roulette"  # which draws the number of terms for all items together
    for _ in range(trials if apart else 1):
        with torch.no_grad():
            items = x if apart else x.expand(trials, 1, size)
            found = block.log_det(items[None] if apart else items, method, samples=samples, generator=generator)
        for confidence in covered:
            covered[confidence] += int(((found.value - truth).abs() <= found.error_bar(confidence)).sum())
    return covered


def parts(progress: Callable[[str], None] = lambda text: None, count: int = 100) -> list[str]:
    """The page."""
    rows = []
    for mask, methods in (("causal", ("blocks", "dense")), (None, ("dense", "series", "roulette"))):
        for method in methods:
            progress(f"{method}, {mask or 'no mask'}")
            found = [case.off(method, seed) for seed, case in enumerate(cases(count, mask))]  # type: ignore[arg-type]
            worst = max(error for error, _, _ in found)
            cells = ["–"] * 3
            if any(wide > 0 for _, _, wide in found):
                cells = [f"{sum(wide for _, _, wide in found) / count:.1e}"]
                cells += [f"{sum(error <= bars[k] for error, *bars in found)} of {count}" for k in (0, 1)]
            rows.append([mask or "none", f"`{method}`", f"{worst:.1e}", *cells])
    hard = []
    for case in HARD:
        trials = count if HARD[case][-1] == "roulette" else 20 * count
        for samples in (4, 16, 64):
            progress(f"{case}, {samples} samples")
            inside = coverage(case, samples, trials)
            hard.append([case, f"`{HARD[case][-1]}`", samples, *(f"{100 * k / trials:.1f} %" for k in inside.values())])
    return [
        f"{count} residual blocks for every row: contractive L2 attention (by theorem in the 2-norm or the ∞-norm), "
        "alone or between contractive networks, 1 or 2 heads, widths to 6, 2 to 8 tokens, c = 0.5, 0.7, 0.9, float64. "
        "Truth: `slogdet` of the dense Jacobian by `torch.func`. "
        f"Estimates take {SAMPLES} random vectors; an error bar includes the proved bound on the cut, and at most "
        "one in ten may lie outside the bar at 90 %, one in ten thousand outside that at 99.99 %.",
        table(["mask", "method", "largest error", "mean bar, 99.99 %", "inside, 90 %", "inside, 99.99 %"], rows),
        f"How often the truth lies inside the bars where samples are as skewed as they can be, all alike, or cut "
        f"short: {20 * count} trials each, {count} of `roulette`, seed 0.",
        table(["Jacobian", "method", "samples", "inside, 95 %", "inside, 99 %"], hard),
    ]
