r"""The three-path bound near an input: for all X with :math:`|x_j - x^0_j| \le \varepsilon`, every j.

For dot-product attention with linear queries, keys and values (:math:`M^q_i, M^k_j, M^v` constant; biases, masks,
additive logit terms and rotary positions as they are). Quantities with a 0 are those at :math:`X^0`; :math:`V = WM^v`,
c_i is the mean key and o_i the mean value under :math:`P^0_i`.

**Weights.** Moving tokens by at most ε changes the logits of row i, up to a shift of the whole row, by at most

.. math:: \delta_{ij} = \varepsilon\,|M^{q\top}_i(k^0_j - c_i)| + \varepsilon\,|M^{k\top}_jq^0_i|
          + \varepsilon^2\,\|M^{k\top}_jM^q_i\|.

A softmax weight grows with its own logit and falls with the others, so its largest value is reached in a corner:

.. math:: P_{ij} \le \hat P_{ij} = \frac{P^0_{ij}e^{\delta_{ij}}}{P^0_{ij}e^{\delta_{ij}}
          + \sum_{k\ne j}P^0_{ik}e^{-\delta_{ik}}} \;\le\; P^0_{ij}\,e^{\delta_{ij} + \max_k\delta_{ik}}.

**Value path.** Norms of nonnegative matrices are monotone and rows of P sum to one, so
:math:`\|P\| \le \min(\|\hat P\|, (\max_j\sum_i\hat P_{ij})^{1/2})`.

**Spreads.** A covariance is below the second moment about any centre, and for tokens moved by :math:`a_j`, |a_j| ≤ ε,
the matrix :math:`[\sqrt{P_{ij}}\,V a_j]_j` has norm at most ‖V‖ε. Hence :math:`\|W\mathrm{Cov}_i(v,v)W^\top\|^{1/2} \le
\ell_i` with

.. math:: \ell_i = \Big\|\sum_j\hat P_{ij}\,W(v^0_j-o_i)(v^0_j-o_i)^\top W^\top\Big\|^{1/2} + \|V\|\varepsilon,

and the norm is also at most the largest :math:`|W(v^0_j-o_i)|^2` among the tokens that i sees. In the same way
:math:`\|M^{q\top}_i\mathrm{Cov}_i(k,k)M^q_i\|^{1/2} \le \alpha_i`, with :math:`\max_{ij}\|M^{k\top}_jM^q_i\| =: \|A\|`
for ‖V‖.

**Together.** The diagonal path is at most :math:`\max_i \ell_i\alpha_i` by Cauchy–Schwarz, and in the cross path the
queries move by :math:`|M^{k\top}_j(q_i - q^0_i)| \le \|A\|\varepsilon`:

.. math:: \sup\|J\| \le \|P\|\,\|V\| + \max_i\ell_i\alpha_i + \max_j\Big[
          \Big\|M^{k\top}_j\sum_i\hat P_{ij}\ell_i^2q^0_iq^{0\top}_iM^k_j\Big\|^{1/2}
          + \|A\|\varepsilon\Big(\sum_i\hat P_{ij}\ell_i^2\Big)^{1/2}\Big]. \quad ∎
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.catalogue import LINEAR, NO_SOFTCAP, theorem
from howsmooth.bounds.point_bounds import (
    nonnegative_norm,
    nowhere_nan,
    psd_norm,
    push_radii,
    spread_norm,
    three_path_of,
)
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths, distances, mixed_pairs
from howsmooth.numerics.roundoff import gamma

_NOTHING = -1e30
"""The logarithm of nothing, finite so that derivatives are."""


def three_path_ball(attention: AttentionMap, x: Tensor, eps: float) -> Tensor:
    """The bound on the constant of every head over all inputs whose tokens are within ``eps`` of x's, ``(heads,)``.

    Never below `three_path` at x.

    >>> import howsmooth as hs
    >>> head, x = hs.SelfAttention.random(8, heads=2), torch.eye(5, 8)
    >>> near, far = (three_path_ball(head, x, eps) for eps in (0.1, 0.2))
    >>> bool((near < far).all() and (near > hs.measure_heads(head, x).value).all())
    True
    """
    return Setting(attention, len(x), None, x, eps).on_paths(three_path_ball_of, folded=True)


def softmax_ceiling(scores: Tensor, radius: Tensor) -> Tensor:
    r"""The largest each softmax weight can get when logit j of a row moves by at most ``radius[…, j]``.

    .. math:: \hat p_j = \frac{e^{s_j+\delta_j}}{e^{s_j+\delta_j} + \sum_{k\ne j}e^{s_k-\delta_k}},

    computed in logarithms: no overflow, at most 1, and 0 where the logit is −∞. With −radius it is the smallest each
    can get. What the others keep is summed without the own term, not by subtraction: a logit that moves by far more
    than the rest would leave nothing of them.

    >>> softmax_ceiling(torch.tensor([0.0, 0.0, -float("inf")]), torch.tensor([800.0, 800.0, 800.0]))
    tensor([1., 1., 0.])
    >>> softmax_ceiling(torch.tensor([0.0, 1.0]), -torch.tensor([800.0, 1.0]))
    tensor([0., 0.])
    """
    hidden = scores == float("-inf")
    low = (scores - radius).clamp_min(_NOTHING)
    nothing = torch.full_like(low[..., :1], _NOTHING)
    before = torch.cat([nothing, low[..., :-1].logcumsumexp(-1)], -1)
    after = torch.cat([low[..., 1:].flip(-1).logcumsumexp(-1).flip(-1), nothing], -1)
    logits = (scores + radius).masked_fill(hidden, 0.0)
    return torch.sigmoid(logits - torch.logaddexp(before, after)).masked_fill(hidden, 0.0)


def _ball(group: Paths, eps: float, value: Tensor, score: Tensor) -> Tensor:
    """The formula of this module, every ingredient raised by its radius (`howsmooth.bounds.point_error`)."""
    radii, width = group.radii, group.pull.shape[-1]
    gain = torch.ones_like(radii.pull) if group.pull_map is None else group.pull_map.norm(dim=(-2, -1))
    mean_key = group.weights @ group.pull
    away, most = 2 * group.pull.norm(dim=-1).amax(-1, keepdim=True), radii.pull.amax(-1, keepdim=True)
    key_radius = gain * (most + gamma(width) * away) + radii.pull_map * (away + most)
    pull, push = group.pull_distances(mean_key), group.push_lengths() + push_radii(group)
    moved = eps * (pull + key_radius[..., None] + push) + eps**2 * score[:, None, None]
    weights = softmax_ceiling(group.scores, moved + radii.weights[..., None])
    norm = torch.minimum(nonnegative_norm(weights), weights.sum(-2).amax(-1).sqrt())

    farthest = (distances(group.mean, group.value) * group.seen).amax(-1)
    spread = torch.minimum(spread_norm(weights, group.value, group.mean).sqrt(), farthest)
    spread = spread + radii.value.amax(-1, keepdim=True) + value[:, None] * eps
    longest = (pull * group.seen).amax(-1)
    lean = spread_norm(weights, group.pull, mean_key, group.pull_map).sqrt()
    if group.pull_map is not None:  # a product of three matrices is known to within the product of their norms
        lean = lean + gamma(4 * width) ** 0.5 * gain * spread_norm(weights, group.pull, mean_key).sqrt()
    lean = torch.minimum(lean, longest) + key_radius + score[:, None] * eps

    loads = weights * spread.square()[..., None]
    queries = mixed_pairs(loads.mT, group.push, group.push)
    off = (loads * push_radii(group).square()).sum(-2).sqrt()
    if group.push_map is not None:
        lengths = queries.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        off = off + gamma(4 * width) ** 0.5 * group.push_map.norm(dim=(-2, -1)) * lengths
        queries = group.push_map.mT @ queries @ group.push_map
    cross = psd_norm(queries).sqrt() + off + score[:, None] * eps * loads.sum(-2).sqrt()
    bound = norm * value + (spread * lean).amax(-1) + cross.amax(-1)
    return nowhere_nan(bound * group.allowance)


@theorem(
    "howsmooth.three_path_ball",
    r"\|\hat P\|\,\|V\|+\max_i\ell_i\alpha_i"
    r"+\max_j\bigl[\|\textstyle\sum_i\hat P_{ij}\ell_i^2w_iw_i^\top\|^{1/2}"
    r"+\|A\|\varepsilon(\sum_i\hat P_{ij}\ell_i^2)^{1/2}\bigr]",
    scope="neighbourhood",
    assumptions=(LINEAR, NO_SOFTCAP),
    on_paths=True,
)
def three_path_ball_of(group: Paths, where: Setting) -> Tensor:
    """The bound of each map of a group, ``(g,)``."""
    assert where.eps is not None
    return torch.maximum(_ball(group, where.eps, *where.norms(group)), three_path_of(group))
