"""Bounds at an input where float64 loses most: clusters far apart, logits far from zero; truth in 50 digits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mpmath
import torch
from torch import Tensor

import howsmooth as hs
from evidence.tables import table

TITLE = "Bounds at an input under rounding"
NAMES = (
    "howsmooth.three_path",
    "howsmooth.three_path_ball",
    "howsmooth.local",
    "howsmooth.softmax_jacobian",
    "yudin2025.softmax_jacobian",
    "nair2025.softmax_half",
)
LOGITS = (1e4, 1e5, 1e6, 1e7, 1e8, 3e8)
CLUSTERS = ((1e2, 0.1, 1e4), (1e4, 1e-3, 1e8), (1e6, 1e-3, 1e10), (1e7, 1.0, 1e3), (1e8, 0.3, 1e3), (1e8, 1e-3, 1e9))
"""Distance of two clusters from the middle, spread of each, size of A."""
_DIGITS = 50
_STEPS = 40


@dataclass(frozen=True)
class Case:
    """Attention P_ij ∝ exp(x_jᵀAx_i), f_i = VΣ_j P_ij x_j, at an input."""

    name: str
    score: Tensor
    value: Tensor
    x: Tensor


def large_logits(size: float, seed: int, n: int = 8) -> Case:
    """Tokens (M, s_j, 0) with A = diag(1, 1, 0) and V = e₃e₃ᵀ: the value path alone, behind logits of size M²."""
    x = torch.zeros(n, 3, dtype=torch.float64)
    x[:, 0] = size
    x[:, 1] = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    value = torch.zeros(3, 3, dtype=torch.float64)
    value[2, 2] = 1
    return Case(f"logits {size:g}²", torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)), value, x)


def far_clusters(apart: float, spread: float, slope: float, seed: int, n: int = 8) -> Case:
    """Half of the tokens near −D, half near D, and A = αe₁e₂ᵀ: all attend to one cluster, and ‖J‖ is α·its variance."""
    x = torch.zeros(n, 2, dtype=torch.float64)
    x[:, 0] = spread * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[: n // 2, 0] += apart
    x[n // 2 :, 0] -= apart
    x[:, 1] = 40 / (slope * apart)  # logits differ by 80 between the clusters
    score = torch.zeros(2, 2, dtype=torch.float64)
    score[0, 1] = slope
    return Case(f"clusters ±{apart:g}, spread {spread:g}, α = {slope:g}", score, torch.eye(2, dtype=torch.float64), x)


def truth(case: Case) -> mpmath.mpf:
    """A lower bound of ‖J‖ in 50 digits: power iteration on the exact Jacobian at the float64 input."""
    with mpmath.workdps(_DIGITS):
        jacobian = _jacobian(case)
        v = mpmath.matrix([mpmath.mpf(1) / (k + 1) for k in range(jacobian.cols)])
        for _ in range(_STEPS):
            v = jacobian.T * (jacobian * v)
            v /= mpmath.norm(v)
        return mpmath.norm(jacobian * v)


def _jacobian(case: Case) -> mpmath.matrix:
    x, a, v = (mpmath.matrix(part.tolist()) for part in (case.x, case.score, case.value))
    n, d = x.rows, x.cols
    logits = x * a * x.T  # [j, i]
    found = mpmath.matrix(n * d, n * d)
    for i in range(n):
        top = max(logits[:, i])
        powers = [mpmath.exp(logits[j, i] - top) for j in range(n)]
        total = mpmath.fsum(powers)
        weights = [power / total for power in powers]
        mean = sum((weights[j] * x[j, :] for j in range(1, n)), weights[0] * x[0, :])
        push = a * x[i, :].T
        own = mpmath.matrix(d, d)
        for j in range(n):
            away = x[j, :] - mean
            own += weights[j] * (away.T * away)
            block = weights[j] * (v + (v * away.T) * push.T)
            for p, q in itertools.product(range(d), repeat=2):
                found[i * d + p, j * d + q] += block[p, q]
        block = v * own * a
        for p, q in itertools.product(range(d), repeat=2):
            found[i * d + p, i * d + q] += block[p, q]
    return found


def ratios(case: Case) -> dict[str, float]:
    """Each bound over the truth: below one it would be false."""
    head, exact = hs.SelfAttention.from_bilinear(case.score, case.value), truth(case)
    where = {"over": hs.sets.Around(case.x, 0.0)}
    return {name: float(mpmath.mpf(float(hs.bounds.get(name)(head, **where))) / exact) for name in NAMES}


def cases(seeds: int, n: int = 8) -> Iterator[list[Case]]:
    """Groups of cases, one per line of the table."""
    for size in LOGITS:
        yield [large_logits(size, seed, n) for seed in range(seeds)]
    for apart, spread, slope in CLUSTERS:
        yield [far_clusters(apart, spread, slope, seed, n) for seed in range(seeds)]


def parts(report: Callable[[str], None], seeds: int = 12) -> Iterator[str]:
    """The page."""
    rows, false = [], 0
    for group in cases(seeds):
        report(group[0].name)
        found = [ratios(case) for case in group]
        false += sum(not value >= 1 for one in found for value in one.values())
        rows.append([group[0].name, *(f"{min(one[name] for one in found):.6g}" for name in NAMES)])
    yield (
        f"{seeds} inputs a line; each bound, computed in float64, over the constant computed in {_DIGITS} digits: the "
        f"smallest ratio. {false} bounds are below the truth. The derivation is in "
        "[the three-path bound](../theory/three-path.md#rounding)."
    )
    yield table(["input", *NAMES], rows)
