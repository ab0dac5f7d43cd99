r"""How large can the norm still be, after a Golub–Kahan run from a random start?

A run of m steps gives orthonormal V = [v₁ … v_m], U and an upper triangular B with

    J V = U B,    Jᵀ U = V Bᵀ + β v_{m+1} e_mᵀ,    so    JᵀJ V = V BᵀB + αβ v_{m+1} e_mᵀ    (α = B_mm).

**Theorem.** Let x be a unit right singular vector of J with singular value √λ, √λ larger than every singular value
θ_i of B, with B = P diag(θ) Qᵀ. Put ρ_i = β P_mi (the residual of the i-th Ritz triplet) and w_i = θ_i ρ_i/(λ − θ_i²).
Every vector s in the span of V, s = V h, satisfies

    |⟨s, x⟩| ≤ f(λ) := |Σ_i (Qᵀh)_i w_i| / (1 + Σ_i w_i²)^{1/2}.

*Proof.* Let z = Vᵀx and ζ = ⟨v_{m+1}, x⟩. The last relation applied to x gives (λ − BᵀB) z = αβ ζ e_m. As
α Q_mi = θ_i P_mi, this says Qᵀz = ζ w. Since x is a unit vector, 1 ≥ |z|² + ζ² = ζ²(1 + |w|²), and ⟨s, x⟩ = hᵀz. ∎

For s = v₁ this is Christoffel's inequality c² ≤ 1/Σ_j p_j(λ)² for the mass c² that the spectral measure of v₁ can
have at λ, with p_j its orthonormal polynomials, hence f decreases in λ. It becomes an upper bound on the norm because a
random v₁ is not orthogonal to the top singular vector: for v₁ uniform on the sphere of R^N, c² ~ Beta(½, (N−1)/2).
With τ² its δ-quantile, c ≥ τ with probability 1−δ, and then every λ with f(λ) < τ is excluded, after *every* step:
one event covers all of them, so watching the bound and stopping when it is small enough costs nothing. [1]

**After a restart.** Keeping p Ritz vectors keeps the filtered start s = π(JᵀJ)v₁/ν, π(λ) = Π_discarded (λ − θ_j²),
which lies in their span; its component on x is c·π(λ)/ν with ν² = Σ_kept (Qᵀh)_i² π(θ_i²)². So λ is excluded when
f(λ) < τ π(λ)/ν, and restarts multiply their factors. Both sides are monotone: excluded are the λ above one number.

Rounding: the run is exact for some J + E, see `howsmooth.norms.products.rounding_allowance`; the solver adds that
allowance to the bound.

References:
    [1] M. E. Hochstenbach, "Probabilistic upper bounds for the matrix two-norm", J. Sci. Comput. 57 (2013) 464–476.
    [2] J. Kuczyński, H. Woźniakowski, "Estimating the largest eigenvalue by the power and Lanczos algorithms with a
        random start", SIAM J. Matrix Anal. Appl. 13 (1992) 1094–1122.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.special import betaincinv
from torch import Tensor

from howsmooth.errors import InvalidInput


def smallest_component(size: int, confidence: float) -> float:
    """τ such that a uniformly random unit vector of R^size has |first coordinate| ≥ τ with this probability.

    >>> round(smallest_component(2, 0.5), 4)    # on the circle |cos φ| ≥ cos 45° half of the time
    0.7071
    """
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence is a probability strictly between 0 and 1, not {confidence}.")
    return 1.0 if size == 1 else math.sqrt(betaincinv(0.5, (size - 1) / 2, 1 - confidence))


def kuczynski_wozniakowski1992(value: float, steps: int, size: int, confidence: float) -> float:
    """The a-priori upper bound on σ₁ [2], for comparison: it knows the number of steps but not their outcome.

    For the largest Ritz value θ after k steps from a random start, 0 < ε < 1:
    P(σ₁² − θ² > ε σ₁²) ≤ 1.648 √N e^{−√ε(2k−1)}.

    >>> kuczynski_wozniakowski1992(1.0, steps=4, size=100, confidence=0.99)
    inf
    >>> round(kuczynski_wozniakowski1992(1.0, steps=50, size=100, confidence=0.99), 4)
    1.0028
    """
    epsilon = (math.log(1.648 * math.sqrt(size) / (1 - confidence)) / (2 * steps - 1)) ** 2
    return value / math.sqrt(1 - epsilon) if epsilon < 1 else math.inf


@dataclass
class Projection:
    """The small problem B = P diag(θ) Qᵀ of every map; ``theta``, ``residuals``: (maps, m), the others (maps, m, m)."""

    theta: Tensor
    left: Tensor
    right: Tensor
    residuals: Tensor

    @classmethod
    def of(cls, b: Tensor, beta: Tensor) -> Projection:
        """From the triangular matrices ``(maps, m, m)`` and the last β of each, ``(maps,)``, in float64."""
        left, theta, right_t = torch.linalg.svd(b)
        return cls(theta, left, right_t.mT, beta[:, None] * left[:, -1])


class Certificate:
    """The probabilistic upper bound of a batch of runs, each from its own random start in R^size.

    >>> b = torch.tensor([[[2.0, 0.5], [0.0, 1.5]]], dtype=torch.float64)
    >>> small = Projection.of(b, beta=torch.tensor([1e-4], dtype=torch.float64))
    >>> certificate = Certificate(maps=1, size=100, confidence=0.99)
    >>> upper = certificate.tighten(small)
    >>> [round(float(x), 4) for x in (small.theta[0, 0], upper[0])]
    [2.1213, 2.1323]
    """

    def __init__(self, maps: int, size: int, confidence: float):
        self.log_tau = math.log(smallest_component(size, confidence))
        self.upper = torch.full((maps,), math.inf, dtype=torch.float64)
        self._start = torch.ones(maps, 1, dtype=torch.float64)  # the filtered start in the leading basis vectors
        self._shifts = torch.empty(maps, 0, dtype=torch.float64)
        self._log_norm = torch.zeros(maps, dtype=torch.float64)

    def excludes(self, lam: Tensor, small: Projection) -> Tensor:
        """Whether ``lam > θ₁²`` (one per map) is excluded as an eigenvalue of JᵀJ, on the event of this confidence."""
        w = small.theta * small.residuals / (lam[:, None] - small.theta**2)
        overlap = (self._overlaps(small) * w).sum(-1).abs() / torch.sqrt(1 + (w * w).sum(-1))
        rounding = w.shape[-1] * torch.finfo(torch.float64).eps  # of the sum: it must not exclude anything
        filtered = torch.log(lam[:, None] - self._shifts).sum(-1) - self._log_norm
        return torch.log(overlap + rounding) < self.log_tau + filtered

    def tighten(self, small: Projection) -> Tensor:
        """The best upper bound on σ₁ so far, this projection included; every bound holds on the same event."""
        low = small.theta[:, 0] ** 2
        high = 4 * low
        for _ in range(100):
            excluded = self.excludes(high, small) | (low == 0)
            if bool(excluded.all()):
                break
            high = torch.where(excluded, high, 4 * high)
        high = torch.where(excluded, high, math.inf)
        for _ in range(42):  # to 1e-12 of the bound; what is kept is the excluded end, so the bound stays true
            middle = (low + high) / 2
            out = self.excludes(middle, small)
            low, high = torch.where(out, low, middle), torch.where(out, middle, high)
        self.upper = torch.minimum(self.upper, torch.sqrt(high))
        return self.upper

    def restart(self, small: Projection, keep: int) -> None:
        """Follow a restart that keeps the ``keep`` largest Ritz vectors as the leading basis vectors."""
        self.tighten(small)
        squares = small.theta**2
        overlaps = self._overlaps(small)[:, :keep]
        filtered = torch.log(squares[:, :keep, None] - squares[:, None, keep:]).sum(-1) + torch.log(overlaps.abs())
        log_norm = torch.logsumexp(2 * filtered, -1) / 2
        self._start = overlaps.sign() * torch.exp(filtered - log_norm[:, None])
        self._shifts = torch.cat([self._shifts, squares[:, keep:]], -1)
        self._log_norm = self._log_norm + log_norm

    def keep(self, mask: Tensor) -> None:
        """Go on with the maps where ``mask`` is true."""
        self.upper, self._log_norm = self.upper[mask], self._log_norm[mask]
        self._start, self._shifts = self._start[mask], self._shifts[mask]

    def _overlaps(self, small: Projection) -> Tensor:
        return (self._start[:, None] @ small.right[:, : self._start.shape[-1]]).squeeze(1)
