r"""An upper bound on the norm, true with a probability, after a Golub–Kahan run from a random start.

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

**Between the halves of a step.** After J v_{m+1} and before Jᵀu_{m+1} the roles are those of Jᵀ: with B̂ the first m
rows of the next B, α its last diagonal entry, B̂ = P diag(θ) Qᵀ and now ρ_i = α Q_{m+1,i},

    J V_{m+1} = U_m B̂ + α u_{m+1} e_{m+1}ᵀ,    Jᵀ U_m = V_{m+1} B̂ᵀ,    so    Pᵀt = ω w,

where t = U_mᵀy and ω = ⟨u_{m+1}, y⟩ for the left singular vector y = Jx/√λ. For s = V h in the span of v₁ … v_m,
⟨s, x⟩ = ⟨J s, y⟩/√λ = (B̂h)ᵀt/√λ, and PᵀB̂h = diag(θ)Qᵀh, so that

    |⟨s, x⟩| ≤ |Σ_i (θ_i/√λ) (Qᵀh)_i w_i| / (1 + Σ_i w_i²)^{1/2}:

Christoffel's inequality for the measure t dμ(t). One product decides here where a step has two.

**After a restart.** Keeping p Ritz vectors keeps the filtered start s = π(JᵀJ)v₁/ν, π(λ) = Π_discarded (λ − θ_j²),
which lies in their span; its component on x is c·π(λ)/ν with ν² = Σ_kept (Qᵀh)_i² π(θ_i²)². So λ is excluded when
f(λ) < τ π(λ)/ν, and restarts multiply their factors. Both sides are monotone: excluded are the λ above one number.

**With rounding.** Products and vector operations are inexact: J V = U B + E, Jᵀ U = V Bᵀ + β v_{m+1} e_mᵀ + F. With
y = Jx/σ, σ = √λ, t = Uᵀy, these say σz = Bᵀt + Eᵀy and σt = Bz + βζe_m + Fᵀx, whatever U is; hence

    (λ − BᵀB) z = αβ ζ e_m + σ Eᵀy + Bᵀ Fᵀx,    Qᵀz = ζ w + n,    n_i = (σ Eᵀy + Bᵀ Fᵀx, q_i)/(λ − θ_i²).

From 1 ≥ |z|² + ζ² now |ζ|(1 + |w|²)^{1/2} ≤ 1 + |n|, and with r = (λ − BᵀB)⁻¹h = Q diag(1/(λ − θ_i²)) Qᵀh

    |⟨s, x⟩| ≤ (1 + |n|) f(λ) + σ Σ_j |e_j||r_j| + Σ_j |f_j||(B r)_j|,    |n| ≤ (σ‖E‖_F + θ₁‖F‖_F)/(λ − θ₁²),

e_j and f_j being the columns of E and F. Each is as long as the error of one product, η = κ·eps·σ + ν, with κ =
`PRODUCT_ROUNDING` for the last rounding in the product and those of the recursion, and ν the operator's own bound
(`Accuracy.product`, of which a share ``alignment`` can lie along y or x); to this comes what reorthogonalisation is
seen to remove. Nothing is assumed about the direction of these errors: they may hide x. (To say that the run is exact
for some J + E would not do: E knows the start, which is then not random for J + E. And it does happen: x + γ⟨a, x⟩a is
rounded to x, exactly, once γ⟨a, x⟩a_i is below half a unit in the last place of every x_i.) Errors of long sums inside
a product can exceed κ·eps·σ, but have no preferred direction: their component on y is smaller than their length by
N^{-½}.

For a map near a multiple of the identity the start is almost a singular vector itself, |r| ≈ 1/(λ − θ²), and λ is
excluded once 2ση/(λ − θ²) < τ: beyond a relative gap of η/(στ), about 80 √N η/σ at 99 %. What lies closer cannot be
told from rounding, and the bound says so. An ordinary map has (Qᵀh)₁ ≈ N^{-½}, which cancels the √N. Where f is below
an eighth of what rounding hides, more steps do not help (`LanczosBound.judge`), and a run ends.

Through a restart the overlap follows the exact rule up to χ(BᵀB)h, χ(t) = (π(λ) − π(t))/(λ − t), in the place of r:

    ⟨s, x⟩ = (ν/π(λ)) ⟨s', x⟩ + error,    |error| ≤ σ‖E‖_F |r'| + ‖F‖_F |B r'|,
    r' = Q diag((1 − π(θ_i²)/π(λ))/(λ − θ_i²)) Qᵀh.

Between the halves of a step the same substitution gives (λ − B̂B̂ᵀ) t = αω B̂e_{m+1} + B̂Eᵀy + σFᵀx and
⟨s, x⟩ = ((B̂h)ᵀt + (E h, y))/σ. Put together, as h + B̂ᵀ(λ − B̂B̂ᵀ)⁻¹B̂h = λ(λ − B̂ᵀB̂)⁻¹h, the terms of E and F are
σ yᵀE r + xᵀF B̂ r as before, with r = (λ − B̂ᵀB̂)⁻¹h, and |n| ≤ (θ₁‖E‖_F + σ‖F‖_F)/(λ − θ₁²). But left vectors are not
kept orthonormal: 1 + κ ≥ |t|² + ω² with κ = ‖UᵀU − 1‖, which is measured, so that (1 + κ)^{1/2} + |n| stands before f.

Every term decreases in λ: r and B r because (λ − BᵀB)⁻¹e₁ = Σ_k (BᵀB)^k e₁/λ^{k+1} has no negative entry (after a
restart the second form of the bound, σ‖E‖_F |r| + ‖F‖_F |B r|, is used), r' because its factor is
Σ_k Π_{l<k} (θ² − t_l)/(λ − t_l) · 1/(λ − t_k) over the discarded t_k. So excluded are still the λ above one number.

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
from howsmooth.norms.restart_filter import Cycles, hidden_overlap

SECTIONS, ROUNDS = 16, 11  # each round looks at all ends of so many sections at once: 16⁻¹¹ = 6e-14 of the bound
PRODUCT_ROUNDING = 1.0  # relative error, in eps, of one product and the vector operations that follow it


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
class RitzProjection:
    """The small problem B = P diag(θ) Qᵀ of every map; ``theta``, ``residuals``: (maps, m), the others (maps, m, m).

    ``products`` is the number of products that went into E, and as many into F; ``drift`` (2, maps, m) is the length of
    what reorthogonalisation removed, beyond what B tells, from each left and from each right vector. ``skew`` is None,
    or κ = ‖UᵀU − 1‖ of every map where B is the B̂ between the halves of a step, with a row of zeros below it.
    """

    theta: Tensor
    left: Tensor
    right: Tensor
    residuals: Tensor
    products: int
    drift: Tensor
    skew: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """|J v_i| of the right Ritz vectors: θ_i, or (θ_i² + ρ_i²)^{1/2} between the halves of a step."""
        return self.theta if self.skew is None else torch.hypot(self.theta, self.residuals)

    @classmethod
    def of(cls, b: Tensor, beta: Tensor, products: int | None = None, drift: Tensor | None = None) -> RitzProjection:
        """From the triangular matrices ``(maps, m, m)`` and the last β of each, ``(maps,)``, in float64."""
        left, theta, right_t = torch.linalg.svd(b)
        residuals = beta[:, None] * left[:, -1]
        made = b.shape[-1] if products is None else products
        drift = theta.new_zeros(2, *theta.shape) if drift is None else drift
        return cls(theta, left, right_t.mT, residuals, made, drift)

    @classmethod
    def halfway(cls, b: Tensor, skew: Tensor, products: int, drift: Tensor) -> RitzProjection:
        """Between the halves of a step, from the next triangular matrices ``(maps, m + 1, m + 1)``, α at their end."""
        last, above = b[:, -1, -1], b.clone()
        above[:, -1] = 0
        left, theta, right_t = torch.linalg.svd(above)
        return cls(theta, left, right_t.mT, last[:, None] * right_t[..., -1], products, drift, skew)


class LanczosBound:
    """The probabilistic upper bound of a batch of runs, each from its own random start in R^size.

    ``eps`` is that of the products (0: exact ones) and ``product_error`` their absolute error, one number per map.

    >>> b = torch.tensor([[[2.0, 0.5], [0.0, 1.5]]], dtype=torch.float64)
    >>> small = RitzProjection.of(b, beta=torch.tensor([1e-4], dtype=torch.float64))
    >>> upper = LanczosBound(maps=1, size=100, confidence=0.99).tighten(small)
    >>> rounded = LanczosBound(maps=1, size=100, confidence=0.99, eps=1e-7).tighten(small)
    >>> [round(float(x), 4) for x in (small.theta[0, 0], upper[0], rounded[0])]
    [2.1213, 2.1323, 2.1325]
    """

    def __init__(
        self,
        maps: int,
        size: int,
        confidence: float,
        eps: float = 0.0,
        product_error: Tensor | None = None,
        alignment: float = 1.0,
    ):
        self.tau = smallest_component(size, confidence)
        self.eps, self.alignment = eps, alignment
        self.product_error = torch.zeros(maps, dtype=torch.float64) if product_error is None else product_error
        self.upper = torch.full((maps,), math.inf, dtype=torch.float64)
        self._start = torch.ones(maps, 1, dtype=torch.float64)  # the filtered start in the leading basis vectors
        self._cycles: Cycles | None = None

    def excludes(self, lam: Tensor, small: RitzProjection) -> Tensor:
        """Whether ``lam > θ₁²``, ``(…, maps)``, is excluded as an eigenvalue of JᵀJ on the event of this confidence."""
        return self.judge(lam, small)[0] < 1

    def judge(self, lam: Tensor, small: RitzProjection) -> tuple[Tensor, Tensor]:
        """The largest overlap of start and singular vector in units of τ, below 1 where ``lam`` is excluded.

        The second is whether rounding alone decides, so that more steps would not exclude ``lam``.
        """
        seen, hidden = self._overlap(lam, small)
        return (seen + hidden) / self.tau, seen <= hidden / 8

    def tighten(self, small: RitzProjection) -> Tensor:
        """The best upper bound on σ₁ so far, this projection included; every bound holds on the same event."""
        low = small.theta[:, 0] ** 2
        high = 4 * torch.maximum(low, self.product_error**2)
        for _ in range(100):
            excluded = self.excludes(high, small) | (high == 0)
            if bool(excluded.all()):
                break
            high = torch.where(excluded, high, 4 * high)
        high = torch.where(excluded, high, math.inf)
        shares = torch.arange(1, SECTIONS, dtype=torch.float64)[:, None] / SECTIONS
        for _ in range(ROUNDS):  # what is kept is an excluded end, so the bound stays true
            inner = low + shares * (high - low)
            first = (~self.excludes(inner, small)).flip(0).cummax(0).values.flip(0).sum(0)  # excluded from there on
            ends = torch.cat([low[None], inner, high[None]])
            low, high = ends.gather(0, torch.stack([first, first + 1])).unbind(0)
        self.upper = torch.minimum(self.upper, torch.sqrt(high))
        return self.upper

    def restart(self, small: RitzProjection, keep: int) -> None:
        """Follow a restart that keeps the ``keep`` largest Ritz vectors as the leading basis vectors."""
        self.tighten(small)
        squares, overlaps = small.theta**2, self._overlaps(small)
        log_filter = torch.full_like(squares, -math.inf)
        log_filter[:, :keep] = torch.log(squares[:, :keep, None] - squares[:, None, keep:]).sum(-1)
        filtered = log_filter + torch.log(overlaps.abs())
        log_norm = torch.logsumexp(2 * filtered, -1) / 2
        self._start = (overlaps.sign() * torch.exp(filtered - log_norm[:, None]))[:, :keep]
        made = torch.full_like(log_norm, math.sqrt(small.products))
        drift = small.drift.norm(dim=-1).mT
        cycle = (squares, overlaps**2, log_filter, squares[:, keep:], log_norm, made, drift)
        now = Cycles(*(x.unsqueeze(1) for x in cycle))
        self._cycles = now if self._cycles is None else self._cycles.followed_by(now)

    def keep(self, mask: Tensor) -> None:
        """Go on with the maps where ``mask`` is true."""
        self.upper, self.product_error, self._start = self.upper[mask], self.product_error[mask], self._start[mask]
        self._cycles = None if self._cycles is None else self._cycles.of(mask)

    def _overlaps(self, small: RitzProjection) -> Tensor:
        return (self._start[:, None] @ small.right[:, : self._start.shape[-1]]).squeeze(1)

    def _overlap(self, lam: Tensor, small: RitzProjection) -> tuple[Tensor, Tensor]:
        """The largest overlap of the start with the singular vector of λ: the open part, and that of rounding."""
        squares, overlaps = small.theta**2, self._overlaps(small)
        assert small.skew is None or self._start.shape[-1] < squares.shape[-1]  # s in the span of v₁ … v_m
        shape = 1 / (lam[..., None] - squares)
        w = small.theta * small.residuals * shape
        sigma, top = torch.sqrt(lam), small.theta[:, 0]
        onto = overlaps if small.skew is None else overlaps * small.theta / sigma[..., None]
        seen = (onto * w).sum(-1).abs() / torch.sqrt(1 + (w * w).sum(-1))
        seen = seen + w.shape[-1] * torch.finfo(torch.float64).eps  # of the sum: it must not exclude anything
        error = PRODUCT_ROUNDING * self.eps * sigma + self.alignment * self.product_error
        left, right = (math.sqrt(small.products) * error + drift.norm(dim=-1) for drift in small.drift)
        if small.skew is None:
            seen = seen * (1 + (sigma * left + top * right) * shape[..., 0])
        else:
            seen = seen * (torch.sqrt(1 + small.skew) + (top * left + sigma * right) * shape[..., 0])
        if self._cycles is None:
            r = torch.einsum("imn,...in->...im", small.right, overlaps * shape).abs()
            b_r = torch.einsum("imn,...in->...im", small.left, small.theta * overlaps * shape).abs()
            left, right = ((error[..., None] + drift) for drift in small.drift)
            hidden = torch.sqrt(lam) * (left * r).sum(-1) + (right * b_r).sum(-1)
        else:
            hidden = hidden_overlap(lam, left, right, overlaps**2, squares, shape)
            log_gain, before = self._cycles.at(lam, error)
            seen, hidden = seen * torch.exp(-log_gain), hidden * torch.exp(-log_gain) + before
        return seen, hidden + self.eps  # the start itself is rounded
