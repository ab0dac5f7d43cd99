"""The effect of restarts of a Golub–Kahan run on its random start: `howsmooth.norms.lanczos_bound` says why.

A restart that discards the Ritz values t_k multiplies the component of the start on the singular vector of λ by
π(λ)/ν, π(λ) = Π (λ − t_k), and rounding adds to it. All of it is kept, cycle by cycle, as functions of λ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def hidden_overlap(lam: Tensor, left: Tensor, right: Tensor, weights: Tensor, squares: Tensor, shape: Tensor) -> Tensor:
    """σ‖E‖|r| + ‖F‖|B r| with |r|² = Σ weights·shape², |B r|² = Σ squares·weights·shape² (over the last dimension)."""
    r2 = weights * shape**2
    return torch.sqrt(lam) * left * torch.sqrt(r2.sum(-1)) + right * torch.sqrt((squares * r2).sum(-1))


@dataclass
class Cycles:
    """The cycles that ended in a restart, ``(maps, cycles, …)``; all keep and discard the same number of Ritz values.

    Attributes:
        squares: θ_i² of all Ritz values.
        weights: (Qᵀh)_i², the squares of the start's coordinates in the Ritz vectors.
        log_filter: log π(θ_i²), −∞ for those discarded.
        shifts: the θ_i² discarded.
        log_norm: log ν.
        products: √products behind E, and behind F, of the cycle.
        drift: what reorthogonalisation removed, ``(maps, cycles, 2)``.
    """

    squares: Tensor
    weights: Tensor
    log_filter: Tensor
    shifts: Tensor
    log_norm: Tensor
    products: Tensor
    drift: Tensor

    def followed_by(self, later: Cycles) -> Cycles:
        """These cycles and then those."""
        return Cycles(*(torch.cat(pair, 1) for pair in zip(vars(self).values(), vars(later).values(), strict=True)))

    def of(self, mask: Tensor) -> Cycles:
        """The cycles of the maps where ``mask`` is true."""
        return Cycles(*(x[mask] for x in vars(self).values()))

    def at(self, lam: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """log of the factor on the start's overlap, and how much overlap rounding could have hidden: (…, maps) each.

        ``lam`` is (…, maps), and so is ``error``, that of one product.
        """
        log_pi = torch.log(lam[..., None, None] - self.shifts).sum(-1)
        gains = torch.cumsum(log_pi - self.log_norm, -1)
        shape = -torch.expm1(self.log_filter - log_pi[..., None]) / (lam[..., None, None] - self.squares)
        both = self.products * error[..., None]
        left, right = both + self.drift[..., 0], both + self.drift[..., 1]
        hidden = hidden_overlap(lam[..., None], left, right, self.weights, self.squares, shape)
        earlier = torch.cat([torch.zeros_like(gains[..., :1]), gains[..., :-1]], -1)
        return gains[..., -1], (hidden * torch.exp(-earlier)).sum(-1)
