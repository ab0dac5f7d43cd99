r"""Bounds by the Jacobian of softmax, :math:`S = \mathrm{diag}(p) - pp^\top`, in several norms.

Nair, *Softmax is 1/2-Lipschitz: A tight bound across all ℓp norms*, 2025 (arXiv 2510.23012).

The Jacobian has :math:`\|S\|_q \le 1/2` in every ℓ_q. Proof: the rows
of |S| sum to :math:`2p_j(1-p_j) \le 1/2`, which is the norm in ℓ_∞ and, S being symmetric, in ℓ_1; Riesz and Thorin
interpolate. ∎

For attention :math:`f_i = VX^\top p_i`, :math:`p_i = \mathrm{softmax}(XAx_i)`, the two score paths of the Jacobian are
:math:`VX^\top S_iXA\,y_i` and :math:`VX^\top S_iY\,Ax_i`; with :math:`\sum_i|Yw_i|^2 \le \|Y\|_F^2\|[w_i]\|^2` each is
at most :math:`\|V\|\|X\|\max_i\|S_i\|\,\|X\|\|A\|`. Adding the value path ‖P‖‖V‖ gives the bounds below, for any mask.

Yudin, Gaponov, Kudriashov, Rakhuba, *Pay Attention to Attention Distribution: A New Local Lipschitz Bound for
Transformers*, 2025 (arXiv 2507.07814).

With the two largest weights p₁ ≥ p₂, the Jacobian has
:math:`\|S\|_2 \le g(p) = p_1(1-p_1+p_2) \le \tfrac12`: small for flat weights and for weights on one token, which the
constant ½ cannot see.

Proof. Clear when p₁ = p₂ (S is below diag p) or p₁ = 1. Else the largest eigenvalue is the root in (p₂, p₁) of the
secular equation :math:`p_1^2/(p_1-\mu) - \sum_{j\ge2}p_j^2/(\mu-p_j) = 1`, whose left side increases. At μ = g(p) the
first term is :math:`p_1/(p_1-p_2)`, and the sum is at most :math:`(1-p_1)p_2/(g-p_2) = p_2/(p_1-p_2)`, as :math:`g -
p_2 = (1-p_1)(p_1-p_2)`. So the left side is at least 1 there, and the root is not beyond g. ∎

For attention the proof is that above, with g in the place of ½; `softmax_jacobian` is never larger.

**This project's bound** has g with centred tokens and a query bias. For attention :math:`f_i = VX^\top p_i`, :math:`p_i
= \mathrm{softmax}(XAx_i + Xb)`, the score paths of the Jacobian are :math:`VX^\top S_iXA\,y_i` and :math:`VX^\top
S_iYw_i`, :math:`w_i = Ax_i + b`, for any mask. Since :math:`S_i1 = 0`, tokens may be centred, :math:`X_c = X - 1\bar
x^\top`, wherever they meet :math:`S_i`; and :math:`\sum_i|Yw_i|^2 \le \|Y\|_F^2\|[w_i]\|^2`. With ‖S_i‖ ≤ g(P_i) the
bound follows. ∎

Sensitivity of attention weights: Emadi, *Exact Attention Sensitivity and the Geometry of Transformer Stability*,
2026 (arXiv 2602.18849).

**The norm of the softmax Jacobian from ℓ∞ to ℓ1.** With :math:`S = \mathrm{diag}(p) - pp^\top`,

.. math:: \|S\|_{\infty\to1} = \theta(p) = \max_A 4\,p(A)\,(1-p(A)) = 1 - \min_A\,(1-2p(A))^2 ,

the balanced mass: 1 where the weights split into two halves of the same mass, and small where one token has nearly all.

Proof. The norm is the largest :math:`\|Ss\|_1` over signs s, since a convex function on a cube is largest at a corner.
With A the tokens of sign +1 and m = p(A), :math:`p\cdot s = 2m-1` and :math:`(Ss)_j = p_j(s_j - (2m-1))`, which is
:math:`2(1-m)p_j` on A and :math:`-2mp_j` elsewhere; the sum of absolute values is :math:`4m(1-m)`. ∎

To find the best A is to split numbers evenly, which is hard in general; both ends are cheap (`balanced_mass`).

**Attention in the norm of the largest token.** The paper measures tokens by the largest of them. For every query i,
with all tokens moved by at most 1,

.. math:: \|J\|_{\mathrm{token}} \le \max_i\Bigl[\|V\| + \theta(P_i)\,
          \bigl(\max_j|M^{q\top}(k_j-c)| + |M^{k\top}q_i|\bigr)\,\max_j|v_j - c'|\Bigr]

for any centres c, c': the bound does not grow with n as such. (This form, with centres, is this project's; the paper's
own constants are products of norms of weights.)

Proof. Output i moves by :math:`\sum_jP_{ij}Vy_j + \sum_jdP_{ij}v_j`. The first is at most ‖V‖, the weights of a row
summing to one. As :math:`\sum_jdP_{ij} = 0`, the second is :math:`\sum_jdP_{ij}(v_j-c')`, at most
:math:`\|dP_i\|_1\max_j|v_j-c'|`, and :math:`dP_i = S_i\,ds_i` with :math:`\|dP_i\|_1\le\theta(P_i)\|ds_i\|_\infty`. The
logits move by :math:`ds_{ij} = y_i\cdot M^{q\top}k_j + M^{k\top}q_i\cdot y_j`, where a constant over j, such as
:math:`y_i\cdot M^{q\top}c`, changes no weight. ∎

How sharp attention can be: Zhai et al., *Stabilizing Transformer Training by Preventing Attention Entropy
Collapse*, ICML 2023 (arXiv 2303.06296).

Not a bound on a Lipschitz constant, so no entry of the catalogue: logits of bounded length leave entropy. Theorem 3.1
of the paper, with n tokens, logits :math:`XW_QW_K^\top X^\top`, :math:`\hat\sigma = \|W_KW_Q^\top\|\,\|XX^\top\|` and
:math:`\beta = e^{-\hat\sigma\sqrt{n/(n-1)}}`, states

.. math:: \mathrm{Ent}(P_i) \ge \ln(1+(n-1)\beta) + \frac{\hat\sigma\sqrt{n(n-1)}\,\beta}{1+(n-1)\beta} ,

the entropy of the row in which one logit stands out and the others are equal. Its first term is proved below. That no
other logits of the same length have less entropy, which the second term needs, is not proved here; random search and
descent have found none (``tests/bounds/test_sensitivity.py``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.bounds.catalogue import CATALOGUE, FINITE, LINEAR, NO_ROTARY, NO_SOFTCAP, PLAIN, theorem
from howsmooth.bounds.point_bounds import nowhere_nan, value_gain, weights_norm
from howsmooth.bounds.question_setting import Setting
from howsmooth.bounds.three_paths import Paths
from howsmooth.errors import InvalidInput
from howsmooth.norms.small_matrices import spectral
from howsmooth.numerics.roundoff import gamma

NAIR = "Nair 2025, softmax is 1/2-Lipschitz"


def softmax_jacobian_inf_norm(p: Tensor) -> Tensor:
    r""":math:`\max_j 2p_j(1-p_j) \le \tfrac12`: the norm of the Jacobian in ℓ_∞ and ℓ_1, a bound on it in every ℓ_q.

    >>> import torch
    >>> softmax_jacobian_inf_norm(torch.tensor([0.5, 0.25, 0.25]))
    tensor(0.5000)
    """
    return (2 * p * (1 - p)).amax(-1)


@theorem(
    "nair2025.ball",
    r"\|V\|\,\bigl(\sqrt n+nR^2\|A\|\bigr)",
    reference=NAIR,
    scope="ball",
    assumptions=(FINITE, *PLAIN),
    given=lambda where, folded: (*where.on_ball(folded), where.count),
)
def on_ball(value: Tensor, score: Tensor, radius: float, n: float) -> Tensor:
    """‖V‖(√n + nR²‖A‖), as ‖P‖ ≤ √n and ‖X‖ ≤ √n·R on the ball.

    >>> import torch
    >>> one = torch.ones(1)
    >>> on_ball(one, one, radius=1.0, n=4)
    tensor([6.])
    """
    return value * (n**0.5 + n * radius * radius * score)


def norms_at(group: Paths, where: Setting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """‖V‖, ‖P‖, ‖X‖ and ‖A‖ of every map at x, from above, for linear attention maps without positions."""
    tokens, score = spectral(where.point), where.norms(group)[1]
    return value_gain(group) * group.allowance, weights_norm(group), tokens * group.allowance, score * group.allowance


@theorem(
    "nair2025.softmax_half",
    r"\|V\|\,\bigl(\|P\|+\|X\|^2\|A\|\bigr)",
    reference=NAIR,
    scope="point",
    assumptions=PLAIN,
    on_paths=True,
)
def _softmax_half_at_point(group: Paths, where: Setting) -> Tensor:
    """‖V‖(‖P‖ + ‖X‖²‖A‖): g is at most ½."""
    return softmax_jacobian_bound(*norms_at(group, where), 0.5)


YUDIN = "Yudin, Gaponov, Kudriashov, Rakhuba 2025"


def softmax_jacobian_norm(p: Tensor) -> Tensor:
    r""":math:`g(p) = p_1(1-p_1+p_2) \ge \|\mathrm{diag}(p)-pp^\top\|_2` for weights along the last axis.

    >>> softmax_jacobian_norm(torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]))
    tensor([0.3750, 0.0000])
    """
    if p.shape[-1] == 1:
        return (p * (1 - p))[..., 0]
    first, second = p.topk(2, dim=-1).values.unbind(-1)
    return first * (1 - first + second)


def softmax_jacobian_bound(
    value: Tensor, weights: Tensor, tokens: Tensor, score: Tensor, sharpness: Tensor | float
) -> Tensor:
    r""":math:`\|V\|(\|P\| + 2\|X\|^2\|A\|\max_ig(P_i))`, from the norms of each head and max g."""
    return value * (weights + 2 * tokens.square() * score * sharpness)


def sharpness(group: Paths) -> Tensor:
    r"""max_i g(P_i) from above: :math:`p_1^+(\sum_{j\ne1}p_j^+ + p_2^+)` of the raised weights, at most ½.

    g grows with every weight when :math:`1-p_1` is written as the sum of the others, and if another weight is the
    largest of the true ones it is at most the :math:`p_2^+` counted here.
    """
    upper = group.upper_weights
    if upper.shape[-1] == 1:
        return torch.zeros_like(upper[:, 0, 0])
    first, largest = upper.max(-1, keepdim=True)
    others = upper.scatter(-1, largest, 0.0)
    return (first[..., 0] * (others.sum(-1) + others.amax(-1))).clamp(max=0.5).amax(-1)


@theorem(
    "yudin2025.softmax_jacobian",
    r"\|V\|\,\bigl(\|P\|+2\|X\|^2\|A\|\max_ig(P_i)\bigr),\quad g(p)=p_1(1-p_1+p_2)",
    reference=YUDIN,
    scope="point",
    assumptions=PLAIN,
    on_paths=True,
)
def _softmax_jacobian_at_point(group: Paths, where: Setting) -> Tensor:
    return softmax_jacobian_bound(*norms_at(group, where), sharpness(group)) * (1 + gamma(8))


@theorem(
    "howsmooth.softmax_jacobian",
    r"\|P\|\,\|V\|+\max_ig(P_i)\,\|VX_c^\top\|\,\bigl(\|X_cA\|+\|XA^\top+1b^\top\|\bigr)",
    scope="point",
    assumptions=(LINEAR, NO_ROTARY, NO_SOFTCAP),
    on_paths=True,
)
def softmax_jacobian(group: Paths, where: Setting | None = None) -> Tensor:
    r""":math:`\|P\|\|V\| + \max_ig(P_i)\,\|VX_c^\top\|\,(\|X_cA\| + \|[Ax_i+b]_i\|)`, ``(g,)``; linear, no positions.

    Never above `softmax_jacobian_bound`, and it takes a query bias.
    """
    radii = group.radii
    value, pull, push = (
        spectral(vectors) + radius.norm(dim=-1)
        for vectors, radius in ((group.value, radii.value), (group.pull, radii.pull), (group.push, radii.push))
    )
    bound = weights_norm(group) * value_gain(group) + sharpness(group) * value * (pull + push)
    return nowhere_nan(bound * group.allowance)


EMADI = "Emadi 2026"
_NAME = "emadi2026.balanced_mass"


def balanced_mass(p: Tensor) -> tuple[Tensor, Tensor]:
    r"""Both ends of θ(p) for weights along the last axis.

    From below the weights are dealt out, the largest first, always to the lighter half. From above no half is lighter
    than what the largest weight leaves: :math:`4t(1-t)` with :math:`t = \max(\tfrac12, \max_jp_j)`. The ends meet where
    one token has half of the mass or more.

    >>> [round(float(end), 3) for end in balanced_mass(torch.tensor([0.7, 0.2, 0.1]))]
    [0.84, 0.84]
    >>> [round(float(end), 3) for end in balanced_mass(torch.tensor([0.4, 0.3, 0.3]))]
    [0.96, 1.0]
    """
    halves = torch.zeros((*p.shape[:-1], 2), dtype=p.dtype, device=p.device)
    for weight in p.sort(dim=-1, descending=True).values.unbind(-1):
        lighter = halves.argmin(-1, keepdim=True)
        halves = halves.scatter_add(-1, lighter, weight[..., None])
    return 4 * halves[..., 0] * halves[..., 1], most_mass(1 - p.amax(-1))


def most_mass(rest: Tensor) -> Tensor:
    r""":math:`\theta` from above, by what all tokens but the heaviest have at most.

    >>> most_mass(torch.tensor([0.1, 0.5, 0.9]))
    tensor([0.3600, 1.0000, 1.0000])
    """
    light = rest.clamp(0.0, 0.5)
    return 4 * light * (1 - light)


@theorem(
    _NAME,
    r"\max_i\bigl[\|V\|+\theta(P_i)\,(\max_j|A^\top(x_j-c)|+|Ax_i+b|)\,\max_j|V(x_j-c')|\bigr]",
    reference=EMADI,
    norm="token",
    scope="point",
    assumptions=(LINEAR, NO_ROTARY, NO_SOFTCAP),
    block=lambda where: CATALOGUE[_NAME]._heads(where, True).sum(),
    on_paths=True,
)
def _balanced_mass(group: Paths, where: Setting | None = None) -> Tensor:
    upper, radii = group.upper_weights, group.radii
    heaviest = upper.argmax(-1, keepdim=True)
    mass = most_mass(upper.scatter(-1, heaviest, 0.0).sum(-1))  # (g, n)
    value, pull = (_reach(one, far) for one, far in ((group.value, radii.value), (group.pull, radii.pull)))
    push = group.push.norm(dim=-1) + radii.push
    rows = value_gain(group)[:, None] + mass * (pull[:, None] + push) * value[:, None]
    return nowhere_nan(rows.amax(-1) * group.allowance)


def _reach(vectors: Tensor, radius: Tensor) -> Tensor:
    """The largest distance from the mean of all, ``(g,)``, with the rounding of each."""
    centre = vectors.mean(1, keepdim=True)
    return ((vectors - centre).norm(dim=-1) + radius).amax(-1)


def entropy_floor(length: Tensor | float, n: int) -> Tensor:
    r"""No row of n weights whose logits have a 2-norm of at most ``length`` has less entropy than
    :math:`\ln(1 + (n-1)\beta)`, :math:`\beta = e^{-\mathrm{length}\sqrt{n/(n-1)}}`, in nats.

    Proof. Taking the mean from the logits u changes no weight and makes them no longer. With :math:`u_1` the largest,
    Jensen's inequality gives :math:`1/p_1 = 1+\sum_{j>1}e^{u_j-u_1} \ge 1+(n-1)e^{\bar u-u_1}` with :math:`\bar u` the
    mean of the others, which is :math:`-u_1/(n-1)`; so the exponent is :math:`-u_1n/(n-1)`. As
    :math:`|u|^2 \ge u_1^2 + (n-1)\bar u^2 = u_1^2n/(n-1)`, it is at least :math:`-\mathrm{length}\sqrt{n/(n-1)}`, and
    :math:`p_1 \le 1/(1+(n-1)\beta)`. The entropy is at least :math:`-\ln p_1`. ∎

    >>> float(entropy_floor(0.0, 4)) == math.log(4)
    True
    """
    if n < 2:
        raise InvalidInput(f"a row of {n} weights has no entropy: give at least two tokens.")
    gap = torch.as_tensor(length, dtype=torch.float64) * math.sqrt(n / (n - 1))
    return torch.log1p((n - 1) * torch.exp(-gap))


def printed_floor(length: Tensor | float, n: int) -> Tensor:
    """The right-hand side of the theorem as it is printed: the entropy of the row in which one logit stands out.

    >>> bool(printed_floor(3.0, 8) > entropy_floor(3.0, 8))
    True
    """
    first = entropy_floor(length, n)
    size = torch.as_tensor(length, dtype=torch.float64)
    beta = torch.exp(-size * math.sqrt(n / (n - 1)))
    return first + size * math.sqrt(n * (n - 1)) * beta / (1 + (n - 1) * beta)
