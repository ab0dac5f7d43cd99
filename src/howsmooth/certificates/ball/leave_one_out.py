r"""All tokens but one: how far their mean value can move on a ball.

In the notation of `howsmooth.certificates.ball.head_ball` and `howsmooth.certificates.ball.weight_perturbation`, let
:math:`R \propto P_l,\ l \ne s`, be the weights of a row without token s and :math:`m = E_Rv^0`. Then :math:`P_s(v_s-o)
= P_s(1-P_s)(v_s-m)`: where s takes most of the row, the others hardly count, and they are often much closer to each
other than to s.

On the ball :math:`R \propto R^0e^{β'+a}` with :math:`β'_l = b'_l\cdot e_i`, :math:`b'_l = b_l - E_{R^0}b`, so that
:math:`E_{R^0}β' = 0`, :math:`|β'_l| \le B'_l = ε_i|b'_l|` and :math:`|a_l| \le κ_i`. For every point c

- by the query's own move, m moves by :math:`E_{R^0}[(r-1)(v^0-c)]`, :math:`r = e^{β'}/E_{R^0}e^{β'}`. Since
  :math:`E_{R^0}e^{β'} \ge 1`, :math:`E(r-1)^2 \le E_{R^0}(e^{β'}-1)^2 \le ρ_i^2`,
  :math:`ρ_i^2 = ε_i^2\|\sum_lR^0_lg(B'_l)^2b'_lb'^\top_l\|`, :math:`g(x) = (e^x-1)/x`;
- by the keys' tilt from there, it moves by :math:`E_{R^β}[(r-1)(v^0-c)]` with :math:`E(r-1)^2 \le \sinh^2κ_i`, and
  :math:`R^β_l \le R^0_le^{B'_l}`.

So :math:`Δm = \sum_l(R^0_le^{B'_l})^{1/2}(v^0_l-c)\,ξ_l` with :math:`|ξ| \le ρ_i + \sinhκ_i`. ∎

**Rounding.** :math:`R^0` is at most the upper weights over what the upper weight of s leaves, and at most 1. The mean
of the b_l is known to within the radius of one of them and :math:`e^{2ω}-1` times the largest distance, ω that of the
weights; the point c may be any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from howsmooth.bounds.own.three_path import TINY, root
from howsmooth.bounds.point_error import gamma
from howsmooth.bounds.three_paths import Paths
from howsmooth.certificates.ball.weight_perturbation import exponential_mean

LEFT = 1e-100
"""A weight that leaves less than this to the others is taken to leave nothing: quotients stay finite."""


class KeyMoment(Protocol):
    """‖Σ_j w_ij b_ij b_ijᵀ‖ from above, ``(g, n)``, of keys about centres that are off by a radius ``(g, n)``."""

    def __call__(self, weights: Tensor, centres: Tensor, radius: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Others:
    """Of every row: loads :math:`R^0e^{B'}` from above ``(g, n, n)``, points c ``(g, n, m)``, |ξ| ``(g, n)``."""

    loads: Tensor
    centres: Tensor
    size: Tensor

    @classmethod
    def than(
        cls, keys: Tensor, group: Paths, moves: Tensor, tilted: Tensor, radius: Tensor, moment: KeyMoment
    ) -> Others:
        """All but one token of every map, ``keys (g,)``.

        ``tilted`` is :math:`\\sinhκ_i`, ``radius`` how far off a :math:`b_{ij}` may be, ``(g, n)`` each.
        """
        chosen = torch.nn.functional.one_hot(keys, group.weights.shape[-1]).bool()[:, None]
        left = 1 - (group.upper_weights * chosen).sum(-1, keepdim=True)
        here = torch.where(left > LEFT, group.upper_weights / left.clamp_min(LEFT), group.seen.to(left))
        here = here.clamp_max(1.0).masked_fill(chosen, 0.0)
        plain = group.weights.masked_fill(chosen, 0.0)
        plain = plain / plain.sum(-1, keepdim=True).clamp_min(TINY)
        middle = plain @ group.pull
        apart = group.pull_distances(middle)
        wrong = torch.expm1(2 * group.radii.weights + gamma(4 * len(moves))) * apart.amax(-1)
        off = radius + wrong
        own = moves[:, None] * (apart + off[..., None])
        growth = exponential_mean(own).square()
        size = moves * root(moment(here * growth, middle, off)) + tilted
        return cls((here * torch.exp(own)).clamp_max(1.0), plain @ group.value, size)
