"""Do the ends hold where rounding decides: norms from 1e-30 to 1e30, and cancellation prescribed?

The truth is taken in 50-digit arithmetic from the numbers the map is made of, exactly as they are stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mpmath
import torch
from scipy.stats import binom
from torch import Tensor

import howsmooth as hs
from evidence.spectra import with_spectrum
from evidence.tables import table
from howsmooth.jacobians.operator import Accuracy, JacobianOperator
from howsmooth.norms import Measurement, operator_norm

TITLE = "Ends under rounding"
NORMS: tuple[float | str, ...] = (2, 1, math.inf, "fro")
SIZES = (1e-30, 1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e20, 1e30)
CANCELLATION = {torch.float32: (0.0, 1e1, 1e3, 1e5, 1e7), torch.float64: (0.0, 1e3, 1e7, 1e11, 1e15)}
OFFSETS = (0.0, 1.0, 1e2, 1e3, 1e5, 1e7, 1e9)  # of tokens or values, in units of their spread
VALUE_SIZES = (1e-30, 1.0, 1e30)
CONFIDENCE = 0.99
_DIGITS = 50


class Cancelling(JacobianOperator):
    """Maps that compute J v as (J + M) v − M v, with all the rounding this brings, and say so by their ``noise``.

    A computed product A v of a matrix with n columns is off by at most n·u·|A||v| in every coordinate, u = eps/2, so
    for unit v by n·u·‖A‖_F in length [1]; the difference rounds once more, relatively.

    References:
        [1] N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM (2002), section 3.5.
    """

    method = "cancelling"

    def __init__(self, total: Tensor, taken: Tensor):
        self.total, self.taken = total, taken
        self.batch_shape, self.out_shape, self.in_shape = total.shape[:-2], total.shape[-2:-1], total.shape[-1:]
        self.dtype, self.device = total.dtype, total.device
        parts = torch.stack([total, taken]).double()
        size = parts.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
        lengths = (torch.linalg.matrix_norm(parts / size) * size[..., 0, 0]).sum(0)
        error = max(total.shape[-2:]) * torch.finfo(self.dtype).eps / 2 * lengths * (taken != 0).any(-1).any(-1)
        self.accuracy = Accuracy(product=error)

    def matvec(self, v: Tensor) -> Tensor:
        return (self.total @ v.unsqueeze(-1) - self.taken @ v.unsqueeze(-1)).squeeze(-1)

    def rmatvec(self, u: Tensor) -> Tensor:
        return (self.total.mT @ u.unsqueeze(-1) - self.taken.mT @ u.unsqueeze(-1)).squeeze(-1)

    def subset(self, index: Tensor) -> Cancelling:
        shape = self.total.shape[-2:]
        return Cancelling(self.total.reshape(-1, *shape)[index], self.taken.reshape(-1, *shape)[index])

    def exact(self) -> list[mpmath.matrix]:
        """J of every map without rounding."""
        with mpmath.workdps(_DIGITS + 40):  # the difference of the two, however far apart
            pairs = zip(self.total.double().tolist(), self.taken.double().tolist(), strict=True)
            return [mpmath.matrix(total) - mpmath.matrix(taken) for total, taken in pairs]


def true_norm(matrix: mpmath.matrix, norm: float | str) -> mpmath.mpf:
    """A norm in 50-digit arithmetic."""
    with mpmath.workdps(_DIGITS):
        if norm == 2:
            size = mpmath.mnorm(matrix, mpmath.inf)
            return size * mpmath.svd_r(matrix / size, compute_uv=False)[0] if size else size
        return mpmath.mnorm(matrix, {1: 1, math.inf: mpmath.inf, "fro": "f"}[norm])


def matrix_maps(size: float, ratio: float, dtype: torch.dtype, maps: int, seed: int) -> Cancelling:
    """J of norm ``size`` with a geometric spectrum, and M ``ratio`` times as large."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = 0.7 ** torch.arange(6, dtype=torch.float64)
    wanted = size * with_spectrum(spectrum, maps, 8, 6, generator)
    taken = (ratio * size * with_spectrum(torch.ones(6).double(), maps, 8, 6, generator)).to(dtype)
    return Cancelling((wanted + taken.double()).to(dtype), taken)


@dataclass
class Tally:
    """How often each promise was broken, and how wide the ends were."""

    maps: int = 0
    ends: int = 0
    lower_false: int = 0
    upper_false: int = 0
    crossed: int = 0
    converged: int = 0
    converged_wrongly: int = 0
    zero_lower: int = 0
    refused: int = 0
    chance: int = 0  # ends that hold with a probability below 1
    worst: list[str] = field(default_factory=list)

    @property
    def allowed(self) -> int:
        """Upper ends that may be false: what promises kept exactly exceed once in a thousand times."""
        return int(binom.ppf(0.999, self.chance, 1 - CONFIDENCE)) if self.chance else 0

    def add(self, m: Measurement, truths: list[mpmath.mpf], rtol: float, name: str) -> None:
        ends = zip(*(x.reshape(-1).tolist() for x in (m.value, m.lower, m.upper, m.converged)), truths, strict=True)
        for value, lower, upper, converged, truth in ends:
            self.ends += 1
            self.chance += m.confidence < 1
            self.crossed += not lower <= upper
            self.zero_lower += lower == 0
            self.converged += converged
            self.converged_wrongly += bool(converged) and abs(mpmath.mpf(value) - truth) > rtol * truth
            false = (mpmath.mpf(lower) > truth, mpmath.mpf(upper) < truth if math.isfinite(upper) else False)
            self.lower_false += false[0]
            self.upper_false += false[1]
            if any(false) and len(self.worst) < 10:
                self.worst.append(f"{name} {m.norm} {m.method}: {lower} ≤ {mpmath.nstr(truth, 17)} ≤ {upper}")

    def cells(self) -> list[object]:
        return [self.maps, self.ends, self.lower_false, f"{self.upper_false} ({self.allowed})", self.crossed,
                self.converged, self.converged_wrongly, self.zero_lower, self.refused]  # fmt: skip


def matrix_tally(size: float, ratio: float, dtype: torch.dtype, maps: int, seed: int = 0, rtol: float = 1e-3) -> Tally:
    """All norms, from the matrices, from products one by one and from samples."""
    op = matrix_maps(size, ratio, dtype, maps, seed)
    found = Tally(maps=maps)
    exact = op.exact()
    for norm in NORMS:
        truths = [true_norm(matrix, norm) for matrix in exact]
        for limits in ({}, {"dense_limit": 0}, {"dense_limit": 0, "exact_limit": 0}):
            found.add(operator_norm(op, norm, rtol=rtol, seed=seed, **limits), truths, rtol, f"{size:g} {ratio:g}")
    return found


def attention_truth(bilinear: Tensor, values: Tensor, x: Tensor) -> mpmath.matrix:
    """The Jacobian of x_i ↦ Σ_j P_ij V x_j, P = softmax(x_jᵀ A x_i), in 50 digits (rows of x are tokens).

    ∂f_i/∂x_k = P_ik V + Σ_j P_ij (V x_j) (∂_k s_ij − Σ_l P_il ∂_k s_il), ∂_k s_ij = δ_ik Aᵀx_j + δ_jk A x_i.
    """
    n, d = x.shape
    with mpmath.workdps(_DIGITS + 40):
        a, v, tokens = (mpmath.matrix(t.double().tolist()) for t in (bilinear, values, x))
        keys, queries, moved = (tokens * m for m in (a, a.T, v.T))  # rows: Aᵀx_j, A x_i, V x_j
        jacobian = mpmath.matrix(n * v.rows, n * d)
        for i in range(n):
            scores = [mpmath.fdot(tokens[i, :], keys[j, :]) for j in range(n)]
            weights = [mpmath.exp(s - max(scores)) for s in scores]
            p = [w / mpmath.fsum(weights) for w in weights]
            mean = [mpmath.fsum(p[j] * moved[j, r] for j in range(n)) for r in range(v.rows)]
            for r in range(v.rows):
                pull = [p[j] * (moved[j, r] - mean[r]) for j in range(n)]
                for c in range(d):
                    for k in range(n):
                        jacobian[i * v.rows + r, k * d + c] = p[k] * v[r, c] + pull[k] * queries[i, c]
                    jacobian[i * v.rows + r, i * d + c] += mpmath.fsum(pull[j] * keys[j, c] for j in range(n))
        return jacobian


def attention_maps(
    offset: float, size: float, dtype: torch.dtype, maps: int, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Heads (A, V, x) on tokens ``offset`` times their spread away from the origin; V of norm about ``size``.

    In turn: all tokens on one side, with logits of order 1; and two clusters, with logits ± 30 or so that let most
    tokens see one of them only. Keys and values are large then, and what the Jacobian sees of them is not.
    """
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shrink = torch.tensor([1 / (1 + offset), 1.0], dtype=torch.float64)
    along = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for i in range(maps):
        clusters = i % 2 == 1
        side = gaussian(5, 1).sign() if clusters else torch.ones(5, 1, dtype=torch.float64)
        one_seen, all_seen = torch.outer(30 * shrink[0] * along, along.flip(0)), torch.outer(shrink, shrink)
        bilinear = one_seen if clusters else all_seen * gaussian(2, 2)
        yield bilinear.to(dtype), (size * gaussian(2, 2)).to(dtype), (gaussian(5, 2) + offset * side * along).to(dtype)


def attention_tally(offset: float, size: float, dtype: torch.dtype, maps: int, seed: int = 0) -> Tally:
    """All norms of attention heads through the public functions."""
    found = Tally()
    for bilinear, values, x in attention_maps(offset, size, dtype, maps, seed):
        head = hs.SelfAttention.from_bilinear(bilinear, values)
        exact = attention_truth(bilinear, values, x)
        found.maps += 1
        for norm in NORMS:
            truth = [true_norm(exact, norm)]
            name = f"offset {offset:g} values {size:g} {dtype}"
            try:
                for limits in ({}, {"dense_limit": 0}):
                    found.add(hs.measure(head, x, norm, seed=seed, **limits), truth, 1e-3, name)
                found.add(hs.measure_heads(head, x, norm, seed=seed), truth, 1e-3, name)
            except hs.InvalidInput:
                found.refused += 1
    return found


def merged(tallies: list[Tally]) -> Tally:
    """The sum of some tallies."""
    total = Tally()
    for one in tallies:
        for key in vars(total):
            setattr(total, key, getattr(total, key) + getattr(one, key))
    return total


def parts(progress: Callable[[str], None], maps: int = 25, heads: int = 10) -> list[str]:
    """The text and tables of the documentation page."""
    started = time.perf_counter()
    head = ["maps", "ends", "lower > truth", "upper < truth (allowed)", "crossed", "converged",
            "converged, error > rtol", "lower = 0", "refused"]  # fmt: skip
    rows, head_rows, total = [], [], 0
    for dtype, ratios in CANCELLATION.items():
        for ratio in ratios:
            progress(f"matrices, {dtype}, {ratio:g}")
            found = merged([matrix_tally(size, ratio, dtype, maps, seed) for seed, size in enumerate(SIZES)])
            total += found.maps
            rows.append([str(dtype).removeprefix("torch."), f"{ratio:g}", *found.cells()])
        for offset in OFFSETS if heads else ():
            progress(f"attention, {dtype}, {offset:g}")
            found = merged([attention_tally(offset, size, dtype, heads, seed) for seed, size in enumerate(VALUE_SIZES)])
            total += found.maps
            head_rows.append([str(dtype).removeprefix("torch."), f"{offset:g}", *found.cells()])
    attention = [
        "Attention heads on five tokens so many times their spread away from the origin, all on one side or in two "
        f"clusters, values of size {VALUE_SIZES[0]:g}, 1 and {VALUE_SIZES[-1]:g}; `hs.measure` and `hs.measure_heads`:",
        table(["dtype", "offset", *head], head_rows),
    ]
    return [
        f"{total} maps, all four norms, on every way the library has: from the matrix, from products line by line, and "
        "from a random start or samples. The truth is in 50-digit arithmetic. Counts in parentheses are those "
        "that ends of 99 % exceed once in a thousand times; ends without chance are counted with them. rtol = 1e-3, "
        "which estimates of the 1- and ∞-norm and sampled Frobenius norms hardly ever reach.",
        f"Maps computed as (J + M) v − M v, ‖J‖₂ from {SIZES[0]:g} to {SIZES[-1]:g} and ‖M‖₂ so many times as large. "
        "Where rounding leaves nothing of J, the lower end is 0:",
        table(["dtype", "‖M‖/‖J‖", *head], rows),
        *(attention if heads else []),
        f"{time.perf_counter() - started:.0f} s.",
    ]
