r"""Distances of values and keys from their means under the true weights, with the rounding of the computed ones.

Let P̂, Ŝ, v̂, k̂ be computed and P, S, v, k true, within the radii of `howsmooth.bounds.point_error`. Then
:math:`P_{ij} \le P^+_{ij} = \min(\hat P_{ij}e^{\omega_i}, 1)`, likewise :math:`S \le S^+`, and sums of nonnegative
terms are bounded by putting these in their place. What is a difference needs more. For row i write
:math:`a_j = \hat v_j - \hat m_i` and :math:`b_j = \hat k_j - c_i`, with :math:`\hat m_i` the computed mean (0 for
sigmoid weights) and :math:`c_i` any centre when a common shift of the keys changes nothing (softmax without a
soft-cap), else 0. Both are formed without cancellation that matters, pair by pair.

**The mean.** As :math:`\sum_jP_{ij} = 1`, :math:`o_i - \hat m_i = \sum_jP_{ij}(v_j-\hat v_j) + \sum_j(P_{ij}-\hat
P_{ij})a_j + \sum_j\hat P_{ij}a_j`; the last sum is what rounding left. With :math:`r_i^2 = \sum_jS^+_{ij}|a_j|^2`
and radii ε

.. math:: |o_i-\hat m_i| \le \mu_i = \max_j\varepsilon_j + (e^{\omega_i}-1)\,r_i
          + \gamma_{n+8}\Big(\sum_j\hat P_{ij}|\hat v_j| + |\hat m_i|\Big).

**Spreads.** :math:`\big(\sum_jS_{ij}|v_j-o_i|^2\big)^{1/2} \le r_i + E_i`, :math:`E_i = (\sum_jS^+_{ij}(\varepsilon_j
+ \mu_i)^2)^{1/2}`, and r_i is at most the farthest :math:`|a_j|` that i sees when the weights sum to one.

**Products.** By Cauchy–Schwarz under S, with :math:`r, E` of the values and :math:`r', E'` of the keys,

.. math:: \Big\|\sum_jS_{ij}(v_j-o_i)(k_j-c_i)^\top\Big\| \le \Big\|\sum_j\hat S_{ij}a_jb_j^\top\Big\|
          + (e^{\omega_i}-1)\,rr' + E(r'+E') + rE',

and it is at most :math:`(r+E)(r'+E')`. The sum on the right is computed as a difference of moments,
:math:`\sum_j\hat S_{ij}\hat v_j\hat k_j^\top - \hat m_i(\sum_j\hat S_{ij}\hat k_j)^\top`, to within
:math:`\gamma_{n+8}\,G_i`, :math:`G_i = 2\big((\sum_j\hat S_{ij}|\hat v_j|^2)^{1/2} + |\hat m_i|\big)
(\sum_j\hat S_{ij}|\hat k_j|^2)^{1/2}`. Where that is much, on clusters far apart, the second form is smaller. ∎
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.bounds.three_paths import Paths, distances
from howsmooth.numerics.roundoff import gamma

NOISY = 1e-2
"""Where rounding may be this much of the Cauchy–Schwarz form of a product, that form takes its place."""


@dataclass(frozen=True)
class Cloud:
    """Vectors seen from every row about a centre.

    Attributes:
        reach: r_i, ``(g, n)``. error: E_i. size: (Σ_j Ŝ_ij |vector_j|²)^½ + |centre_i|, what is lost to rounding.
        off: μ_i, by how much the centre may miss the true mean.
    """

    reach: Tensor
    error: Tensor
    size: Tensor
    off: Tensor

    @property
    def spread(self) -> Tensor:
        """≥ the true standard deviation, ``(g, n)``."""
        return self.reach + self.error


@torch.no_grad()
def about_means(group: Paths, vectors: Tensor, radius: Tensor | float) -> Cloud:
    """Vectors about their means under the weights, or about zero for sigmoid weights."""
    centres = group.weights @ vectors if group.softmax else torch.zeros_like(vectors)
    return _cloud(group, vectors, centres, radius, group.softmax)


@torch.no_grad()
def keys(group: Paths) -> Cloud:
    """Keys as queries see them, about their means where a shift of all keys changes nothing, else about zero."""
    centres = group.weights @ group.pull if group.shiftable else torch.zeros_like(group.pull)
    return _cloud(group, group.pull, centres, group.radii.pull, False)


def _cloud(group: Paths, vectors: Tensor, centres: Tensor, radius: Tensor | float, own_mean: bool) -> Cloud:
    upper, n = group.upper_slopes, vectors.shape[1]
    radius = torch.zeros_like(vectors[..., 0]) + radius
    apart = distances(centres, vectors) * group.seen
    lengths, middle = vectors.norm(dim=-1), centres.norm(dim=-1)
    reach = (upper * apart.square()).sum(-1).sqrt()
    widest = (radius[:, None] * group.seen).amax(-1)
    if group.softmax:
        reach = torch.minimum(reach, apart.amax(-1))
    reach = reach * (1 + gamma(4 * n + vectors.shape[-1]))
    off = torch.zeros_like(reach)
    if own_mean:
        lost = gamma(n + 8) * ((group.weights @ lengths[..., None])[..., 0] + middle)
        off = widest + torch.minimum(torch.expm1(group.radii.weights) * reach + lost, apart.amax(-1))
        off = off.masked_fill(~group.seen.any(-1), 0.0)
    error = (upper * (radius[:, None] + off[..., None]).square()).sum(-1).sqrt()
    if group.softmax:
        error = torch.minimum(error, widest + off)
    size = (group.slopes @ lengths.square()[..., None])[..., 0].sqrt() + middle
    return Cloud(reach, error * (1 + gamma(4 * n)), size, off)


@torch.no_grad()
def product_slack(group: Paths, left: Cloud, right: Cloud) -> tuple[Tensor, Tensor]:
    """The slack to add to the norm of each computed block Σ_j Ŝ_ij a_j b_jᵀ M_i, and a ceiling of the true norm."""
    n, width = group.weights.shape[-1], group.pull.shape[-1]
    gain, lean = 1.0, group.radii.pull_map
    if group.pull_map is not None:
        gain = group.pull_map.norm(dim=(-2, -1))
    slack = 2 * gamma(n + 8) * left.size * right.size
    slack = slack + torch.expm1(group.radii.slopes) * left.reach * right.reach
    slack = slack + left.error * right.spread + left.reach * right.error
    ceiling = left.spread * right.spread
    slack = slack * gain + ceiling * (lean + gamma(2 * width) * gain)
    return slack.nan_to_num(nan=torch.inf), (ceiling * (gain + lean)).nan_to_num(nan=torch.inf)
