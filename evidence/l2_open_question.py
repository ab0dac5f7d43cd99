"""How large is the 2-norm constant of L2 attention? Ascents on the line, and what is proved on either side."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from evidence.tables import table
from howsmooth.bounds.l2_bounds import average_lip_2, phi_inverse, tight_input, wide_lower

TITLE = "How large is the 2-norm constant of L2 attention?"
COUNTS = (10, 30, 100, 300, 1000)


class Average:
    """The Gaussian average z ↦ Pz of n numbers, and products with its Jacobian: O(n²), nothing n × n but P."""

    def __init__(self, z: Tensor, causal: bool):
        hidden = torch.ones(len(z), len(z), dtype=torch.bool).triu(1) if causal else torch.zeros((), dtype=torch.bool)
        self.z, self.weights = z, torch.softmax((-(z[:, None] - z).square()).masked_fill(hidden, -math.inf), dim=-1)
        self.mean = self.weights @ z
        self.variance = self.weights @ z.square() - self.mean.square()

    def jvp(self, y: Tensor) -> Tensor:
        """2C_iy_i + Σ_j P_ijy_j − 2 Σ_j P_ij(z_j − m_i)(z_j − z_i)y_j."""
        z, m = self.z, self.mean
        plain, first, second = (self.weights @ torch.stack([y, z * y, z * z * y], -1)).unbind(-1)
        return 2 * self.variance * y + plain - 2 * (second - (m + z) * first + m * z * plain)

    def vjp(self, g: Tensor) -> Tensor:
        """The transpose of `jvp`."""
        z, m = self.z, self.mean
        plain, first, both = (self.weights.T @ torch.stack([g, (m + z) * g, m * z * g], -1)).unbind(-1)
        return 2 * self.variance * g + plain - 2 * (z * z * plain - z * first + both)


def ascend(z: Tensor, causal: bool, steps: int, rate: float = 0.03) -> float:
    """The largest |Jv|, |v| = 1, found from z: each step takes three power steps on JᵀJ and one along ∂(uᵀJv)/∂z.

    Whatever v is, |Jv| ≤ ‖J‖₂, so the result is a true lower bound.
    """
    z = z.clone().requires_grad_()
    optimiser = torch.optim.Adam([z], lr=rate, maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    v = torch.randn(len(z), dtype=z.dtype, generator=torch.Generator().manual_seed(0))
    best = 0.0
    for _ in range(steps):
        average = Average(z, causal)
        with torch.no_grad():
            for _ in range(3):
                u = average.jvp(v)
                v = average.vjp(u / u.norm())
                v = v / v.norm()
            u = average.jvp(v)
            best = max(best, float(u.norm()))
            u = u / u.norm()
        optimiser.zero_grad()
        torch.dot(u, average.jvp(v)).backward()
        optimiser.step()
        schedule.step()
    return best


def starts(n: int) -> list[Tensor]:
    """The two-cluster construction, the same shaken, and random tokens, narrow and wide."""
    generator = torch.Generator().manual_seed(n)
    random = torch.randn(3, n, dtype=torch.float64, generator=generator)
    clusters = tight_input(n)[:, 0]
    clusters[0] = clusters[-2].abs()  # for even n the far token joins a cluster
    return [clusters, clusters + 0.1 * random[0], random[1], 3 * random[2]]


def line_bound(n: int) -> float:
    r"""Lip₂ of the unmasked average on the line is at most 2c + √q + 2√(cv) with q and v that do not depend on n.

    Proof. As in `average_lip_2` with q_λ ≤ q + λv, q and v bounding Σ_i P_ij and Σ_i P_ij|z_i−z_j|². Cut the line at
    z_j + δℤ. Tokens of one cell see each other with weight at least e^{−δ²}, so the N_Q tokens of cell Q have
    r_i ≥ N_Q e^{−δ²}, and Σ_{i∈Q} h(|z_i−z_j|)/r_i ≤ e^{δ²} max_Q h, for h(x) = e^{−x²} and for h(x) = x²e^{−x²}. Sum
    over the cells. ∎
    In k dimensions the same argument gives constants that grow exponentially with k.
    """
    c = phi_inverse(n - 1)

    def bound(delta: float) -> float:
        edges = delta * torch.arange(math.ceil(8 / delta) + 2, dtype=torch.float64)
        moments = edges.square() * torch.exp(-edges.square())
        peaks = torch.maximum(moments[:-1], moments[1:])
        peaks[(edges[:-1] <= 1) & (edges[1:] >= 1)] = math.exp(-1)
        tail = 1e-20  # everything beyond 8
        q, v = (2 * math.exp(delta**2) * (float(part.sum()) + tail) for part in (torch.exp(-edges.square()), peaks))
        return 2 * c + q**0.5 + 2 * (c * v) ** 0.5

    return min(bound(0.02 * step) for step in range(10, 60))


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    rows = []
    for n in COUNTS:
        found = []
        for causal in (False, True):
            progress(f"{n} tokens, {'causal' if causal else 'unmasked'}")
            found.append(max(ascend(z, causal, 60 if n >= 1000 else 200) for z in starts(n)))
        least = 2 * phi_inverse(n - 1)
        bounds = (line_bound(n), average_lip_2(n, "full"), average_lip_2(n, "ordered"))
        rows.append(
            [n, f"{least:.3f}", *(f"{value:.3f}" for value in found), f"{max(found) - least:.3f}"]
            + [f"{bound:.1f}" for bound in bounds]
        )
    wide = []
    for power in (4, 6, 8, 10, 12):
        leaves = 10**power
        hubs = 2 * 10 ** (power // 2)
        n = leaves + hubs
        wide.append([f"10^{power}", f"{2 * phi_inverse(n - 1):.1f}", f"{wide_lower(leaves, hubs):.1f}"])
    return [
        "With c = φ⁻¹(N−1), the constant of the Gaussian average Z ↦ PZ in the 2-norm is at least 2c + 1/(1+c) for odd "
        "N. Is it 2c + O(1)? The answer depends on the width of the tokens.",
        "## On the line",
        "Heads of width one (D = H = 1, W = 1, s = 1): the best of four gradient ascents, from the two-cluster "
        "construction, the same shaken, and two random starts, on all N tokens; next to it what is proved. Nothing "
        "found exceeds 2c by more than a constant, masked or not, and the excess falls. Proved is 2c + O(√c) without a "
        "mask (the bound on the line); the gap between √c and a constant, and the causal case, are open.",
        table(
            [
                "N",
                "2c",
                "found, unmasked",
                "found, causal",
                "largest − 2c",
                "proved on the line, unmasked",
                "proved, any width, unmasked",
                "proved, any width, causal",
            ],
            rows,
        ),
        "## In wide heads",
        "When the width may grow with N the answer is no: with hubs at one place and leaves on axes of their own the "
        "constant is at least N^¼/√8 up to lower order, masked or not (`howsmooth.bounds.l2_bounds.wide_input`), which "
        "passes every multiple of log N. The upper bound, of order N^¼√(log N), has the right power.",
        table(["leaves", "2c", "hubs and leaves, exact"], wide),
    ]
