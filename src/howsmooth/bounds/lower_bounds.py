r"""Lower bounds for dot-product attention: Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024
(arXiv 2312.14820), and this project's after them: two clusters, one token against all others.

One token sits at :math:`x_1`, the others at :math:`x_o`. For a token at :math:`x_o` that sees the outlier and m others,
with :math:`w = Ax_o + b`, :math:`\delta = x_1 - x_o` and :math:`E = e^{\delta\cdot w}`, the outlier has weight
:math:`p = E/(E+m)`, and moving it by y moves the output by

.. math:: J_{i1}\,y = V\big[p\,y + p(1-p)\,\delta\,(w\cdot y)\big].

Summing squares over the tokens at :math:`x_o`, :math:`\|J\|^2` is at least the largest eigenvalue of

.. math:: c_0 V^\top V + c_1 (V^\top V\delta\, w^\top + w\,\delta^\top V^\top V) + c_2 |V\delta|^2 w w^\top,
          \qquad c_k = \sum_i p_i^2 (1-p_i)^k.

Unmasked all :math:`p_i` are equal (m = n − 1); under a causal mask with the outlier first, m = 1, …, n − 1. On the line
of a unit vector u with :math:`u^\top A u = -\gamma` and :math:`x_1 = -Ru, x_o = Ru` this is
:math:`\|Vu\|\sqrt{n-1}\,p\,(1+2(1-p)\gamma R^2)` or more. Only the quadratic form :math:`u^\top A u` enters, so the
symmetric part of A gives the best lines and real eigenvalues are not needed.

With k equal outliers, all moved by y, the same holds with m = (n − k)/k, so unmasked the bound is the best over k.
Measures allow m to be any real number. Unmasked, with mass ratio :math:`m = sE`:
:math:`c_k = E\,s^{k+1}/(1+s)^{k+2}`, to be maximised over s; masked, as the outlier's mass tends to zero,
:math:`c_k = E\int_0^\infty s^k(1+s)^{-k-2}\,ds = E/(k+1)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.masks import Maps
from howsmooth.bounds.catalogue import (
    AT_LEAST_TWO,
    BALL,
    CAUSAL,
    FINITE,
    LINEAR,
    LINEAR_VALUES,
    NO_PLACES,
    NO_ROTARY,
    NO_SOFTCAP,
    PLAIN,
    UNMASKED_OR_CAUSAL,
    theorem,
)
from howsmooth.bounds.question_setting import Setting, query_key, value_matrices
from howsmooth.norms.small_matrices import spectral
from howsmooth.numerics.roundoff import gamma
from howsmooth.sets.ellipsoid import Ellipsoid


def lower_sqrt_n(response: Tensor, gamma: Tensor, radius: float, n: float) -> Tensor:
    r"""Proposition 3.4: :math:`\mathrm{Lip}(f|_{B_R^n}) \ge \tfrac12\|Vu\|\sqrt{n-1}` while
    :math:`n \le 1+e^{2\gamma R^2}`, masked or not; NaN for longer sequences.

    Here u is a unit eigenvector of A for a real eigenvalue: −γ (tokens −Ru, Ru, Ru, …) or 8γ (Ru, Ru/2, Ru/2, …).

    Args:
        response: ‖Vu‖. gamma: γ.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> float(lower_sqrt_n(one, one, radius=1.0, n=5)), float(lower_sqrt_n(one, one, radius=1.0, n=9))
    (1.0, nan)
    """
    holds = n <= 1 + torch.exp(2 * gamma * radius * radius)
    return torch.where(holds, 0.5 * response * (n - 1) ** 0.5, torch.nan)


def large_radius_limit(attention: AttentionMap, x: Tensor) -> Tensor:
    r"""For almost every X, :math:`\|J(RX)\| \to \|V\|\,\sqrt{\text{largest in-degree}}` as R → ∞, of each head.

    The in-degree of token j is the number of tokens whose largest logit is that of j (the hardmax map). Far out the
    weights are one-hot, the score path vanishes and the Jacobian is the 0–1 matrix of the hardmax map times V.
    Needs distinct logits in every row and linear queries, keys and values without biases.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.from_bilinear(-torch.eye(1), 2 * torch.eye(1))
    >>> float(large_radius_limit(head, torch.tensor([[-1.0], [2.0], [3.0]])))  # both positive tokens look at the first
    2.82842...
    """
    query, key, _ = query_key(attention)
    x = x.double()
    logits = (x @ query.mT) @ (x @ key.mT).mT
    logits = attention.terms.added_to(logits, Maps.every(1, attention.heads, len(x), logits))
    degree = torch.nn.functional.one_hot(logits.argmax(-1), len(x)).sum(1).amax(1)
    return spectral(value_matrices(attention)) * degree.double().sqrt()


def real_eigenpairs(attention: AttentionMap) -> tuple[Tensor, Tensor]:
    """The real eigenvalues of A = KᵀQ other than zero, ``(heads, min(k, d))`` (else NaN), and unit eigenvectors.

    A has rank k or less: for k ≤ d its eigenvalues are those of the k × k matrix QKᵀ, and Kᵀs is an eigenvector of A
    when s is one of it. An eigenvalue that is zero up to rounding has a vector that rounding chose: it is left out.
    """
    query, key, _ = query_key(attention)
    narrow = key.shape[-2] <= key.shape[-1]
    values, vectors = torch.linalg.eig(query @ key.mT if narrow else key.mT @ query)
    lifted = (key.mT @ vectors.real if narrow else vectors.real).mT  # (heads, min(k, d), d)
    size = lifted.norm(dim=-1, keepdim=True)
    lifted = lifted / size.clamp(min=1e-300)
    scale = key.flatten(1).norm(dim=-1) * query.flatten(1).norm(dim=-1)
    real = (values.imag.abs() <= 1e-12 * values.abs()) & (values.abs() > 1e-10 * scale[:, None])
    missed = (lifted @ query.mT @ key - values.real[..., None] * lifted).norm(dim=-1)
    real &= (size[..., 0] > 0) & (missed <= 1e-9 * values.abs())
    return torch.where(real, values.real, torch.nan), lifted


@theorem(
    "castin2024.lower_sqrt_n",
    r"\tfrac12\|Vu\|\sqrt{n-1},\ n\le 1+e^{2\gamma R^2},\ \gamma=\max(-\gamma_{\min},\gamma_{\max}/8)",
    reference="Castin, Ablin, Peyré 2024, Proposition 3.4",
    side="lower",
    scope="ball",
    assumptions=(*PLAIN, UNMASKED_OR_CAUSAL, BALL, FINITE, AT_LEAST_TWO),
)
def _lower_sqrt_n(where: Setting, folded: bool) -> Tensor:
    values, vectors = real_eigenpairs(where.map)
    gamma = torch.maximum(-values, values / 8)
    response = (value_matrices(where.map, folded) @ vectors.mT).norm(dim=-2)
    bounds = lower_sqrt_n(response, gamma, where.radius, where.count)
    return bounds.nan_to_num(nan=0.0).amax(-1) * (1 - 1e-9)  # the eigenvector is known to that accuracy


Sums = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""From the exponents δ·w to c_0, c_1, c_2."""
_LONGEST_SUM = 10**7
"""Terms of the masked sum that are added up; fewer terms only lower a lower bound."""
_LARGEST_EXPONENT = 600.0
"""c_k grows with E, so a smaller E keeps a lower bound true where e^{…} would overflow."""
_SOLVER = 1e-13
"""Relative accuracy of a singular value."""
_SCALES = torch.logspace(0, -1.5, 13, dtype=torch.float64)
_RATIOS = torch.logspace(-4, 4, 401, dtype=torch.float64)


Clusters = tuple[Tensor, Tensor]
"""Candidates for the outlier and for the others of each head, (heads, candidates, d)."""


def two_cluster(value: Tensor, delta: Tensor, push: Tensor, sums: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    r"""The largest eigenvalue above, square-rooted; found in the span of w, δ and the top direction of V.

    A subspace can only lower it, so the result is a lower bound whatever the subspace.

    Args:
        value: V, ``(…, v, d)``. delta, push: δ and w, ``(…, d)``. sums: c_0, c_1, c_2, ``(…,)``.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> float(two_cluster(one, -2 * one[0], -one[0], tuple(torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))))
    2.0
    """
    top = torch.linalg.svd(value, full_matrices=False).Vh[..., 0, :].expand_as(push)
    basis = torch.linalg.qr(torch.stack([push, delta, top], dim=-1)).Q  # (…, d, at most 3)
    image = value @ basis
    moved = (value @ delta[..., None])[..., 0]
    along = (push[..., None, :] @ basis)[..., 0, :]
    mixed = (image.mT @ moved[..., None])[..., 0]
    cross = mixed[..., :, None] * along[..., None, :]
    c0, c1, c2 = (c[..., None, None] for c in sums)
    outer = along[..., :, None] * along[..., None, :]
    form = c0 * image.mT @ image + c1 * (cross + cross.mT) + c2 * moved.square().sum(-1)[..., None, None] * outer
    largest = form.abs().amax((-2, -1), keepdim=True)
    largest = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    form = (form / largest).nan_to_num(0.0, 0.0, 0.0)  # 0 is a lower bound of what overflows
    return (torch.linalg.eigvalsh(form)[..., -1].clamp(min=0) * largest[..., 0, 0]).sqrt()


def outliers(n: float) -> Tensor:
    """Numbers k of outliers to try among n tokens without a mask."""
    return torch.logspace(0, math.log2(max(1.0, n / 2)), 49, base=2.0, dtype=torch.float64).round().unique()


def sums_for(exponent: Tensor, n: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """c_0, c_1, c_2 for n tokens, with E = e^{exponent}; one more axis over `outliers`, a single one under a mask."""
    if not causal:
        k = outliers(n)
        p = torch.sigmoid(exponent[..., None] - torch.log((n - k) / k))
        return _powers((n - k) / k * p.square(), 1 - p)
    sums = exponent.new_zeros(3, *exponent.shape, 1)
    last = int(min(n - 1, _LONGEST_SUM))
    for first in range(1, last + 1, 2**16):
        m = torch.arange(first, min(first + 2**16, last + 1), dtype=exponent.dtype)
        p = torch.sigmoid(exponent[..., None] - m.log())
        sums += torch.stack(_powers(p.square(), 1 - p)).sum(-1, keepdim=True)
    return sums[0], sums[1], sums[2]


def mean_field_sums(exponent: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same for measures: one more axis over mass ratios, under a mask their limit alone."""
    scale = exponent.clamp(max=_LARGEST_EXPONENT).exp()[..., None]
    if causal:
        return scale, scale / 2, scale / 3
    return _powers(scale * _RATIOS / (1 + _RATIOS).square(), _RATIOS / (1 + _RATIOS))


def clusters(attention: AttentionMap, tokens: Ellipsoid) -> Clusters:
    """Where to put the outlier and the others, in every head: six pairs, each at several scales.

    Along the extreme directions u of the symmetric part of ΓᵀAΓ: −u against u and u against −u (the first branch of
    the theorem), u against u/2 (the second); and the pair that maximises x_1ᵀAx_o. Far out p = 1 and only the value
    path is left; at the scale where E ≈ n both paths add up.
    """
    query, key, _ = query_key(attention)
    query, key = query @ tokens.axes, key @ tokens.axes
    # The form zᵀ(KᵀQ)z lives in the span of both factors: 2k dimensions instead of d.
    basis = torch.linalg.qr(torch.cat([query, key], dim=1).mT).Q
    form = (key @ basis).mT @ (query @ basis)
    lines = torch.linalg.eigh((form + form.mT) / 2).eigenvectors
    lowest, highest = basis @ lines[..., :1], basis @ lines[..., -1:]
    left, _, right = torch.linalg.svd(form)
    best, seen_from = basis @ left[..., :1], basis @ right.mT[..., :1]
    pairs = [(-lowest, lowest), (lowest, -lowest), (highest, highest / 2), (-highest, -highest / 2)]
    pairs += [(best, seen_from), (-best, -seen_from)]
    units = (torch.cat(ends, dim=-1).mT for ends in zip(*pairs, strict=True))
    outlier, others = (tokens.at((_SCALES[:, None, None] * z[:, None]).flatten(1, 2)) for z in units)
    return outlier, others


def two_cluster_input(attention: AttentionMap, tokens: Ellipsoid, n: int, head: int = 0) -> Tensor:
    """The input that attains the bound for one head: the outliers first, then the others, ``(n, d)``."""
    (outlier, others), causal = clusters(attention, tokens), attention.terms.is_causal
    values = _evaluate(attention, (outlier, others), partial(sums_for, n=n, causal=causal), folded=True)[head]
    best, share = divmod(int(values.argmax()), values.shape[1])
    count = 1 if causal else int(outliers(n)[share])
    return torch.cat([outlier[head, best].expand(count, -1), others[head, best].expand(n - count, -1)])


def _evaluate(attention: AttentionMap, at: Clusters, sums: Sums, folded: bool) -> Tensor:
    """The bound for every candidate and mass ratio, (heads, candidates, ratios), rounding taken off."""
    query, key, bias = query_key(attention)
    outlier, others = at
    push = (others @ query.mT + bias[:, None]) @ key  # w = Kᵀ(Qx_o + b_q)
    delta = outlier - others
    c = sums((delta * push).sum(-1))
    value = value_matrices(attention, folded)[:, None]
    first, second = _rounding(attention, others, delta, push, value)
    lost = c[0].sqrt() * first[..., None] + c[2].sqrt() * second[..., None]
    return (two_cluster(value[:, None], delta[:, :, None], push[:, :, None], c) - lost).clamp(min=0)


def _rounding(
    attention: AttentionMap, others: Tensor, delta: Tensor, push: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    r"""The largest effect of rounding on the bound: :math:`\sqrt{c_0}\,e_0 + \sqrt{c_2}\,e_2`.

    The exponent δ·w and w itself are computed to within β and :math:`e_w`, V to within :math:`e_V`. Since
    :math:`|dp| \le p(1-p)\beta`, the block :math:`V[pI + p(1-p)\delta w^\top]` moves by at most
    :math:`p\,(\beta\|V\|+e_V) + p(1-p)\,|\delta|\,(\|V\|(\beta|w|+e_w) + e_V|w|)`.
    """
    query, key, bias = query_key(attention)
    steps = gamma(64 + 2 * sum(query.shape[-2:]))
    lengths, norms = others.norm(dim=-1), [weight.norm(dim=(-2, -1))[:, None] for weight in (query, key)]
    push_error = steps * norms[1] * (norms[0] * lengths + bias.norm(dim=-1)[:, None])
    far = delta.norm(dim=-1)
    exponent = far * (push_error + steps * push.norm(dim=-1)) + steps
    size = value.norm(dim=(-2, -1))  # (heads, 1)
    inner = value_matrices(attention, folded=False).norm(dim=(-2, -1))[:, None]
    outer = attention.output_weight.double().norm(dim=(-2, -1))[:, None].clamp(min=1.0)
    value_error = gamma(8 * sum(attention.output_weight.shape[1:])) * inner * outer
    first = exponent * size + value_error
    second = far * (size * (exponent * push.norm(dim=-1) + push_error) + value_error * push.norm(dim=-1))
    return first, second


def _powers(first: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return first, first * factor, first * factor.square()


_AFTER_CASTIN: dict[str, Any] = {"reference": "howsmooth, after Castin et al. 2024", "side": "lower"}


@theorem(
    "howsmooth.masked_two_atom",
    r"\|Vu\|\,e^{\gamma R^2}\sqrt{1+2\gamma R^2+\tfrac43\gamma^2R^4}",
    **_AFTER_CASTIN,
    scope="mean-field d2",
    assumptions=(LINEAR, CAUSAL, NO_ROTARY, NO_SOFTCAP),
    given=lambda where, folded: (where, folded, partial(mean_field_sums, causal=True)),
)
@theorem(
    "howsmooth.two_atom",
    r"\sup_s \|Vu\|\,e^{\gamma R^2}\,\frac{\sqrt s}{1+s}\Bigl(1+\frac{2s}{1+s}\gamma R^2\Bigr)",
    **_AFTER_CASTIN,
    scope="mean-field W2",
    assumptions=(LINEAR, NO_PLACES, NO_SOFTCAP),
    given=lambda where, folded: (where, folded, partial(mean_field_sums, causal=False)),
)
@theorem(
    "howsmooth.two_cluster",
    r"\max_m\|Vu\|\sqrt m\,p\,(1+2(1-p)\gamma R^2),\quad p=\frac{e^{2\gamma R^2}}{e^{2\gamma R^2}+m}",
    **_AFTER_CASTIN,
    scope="ball",
    assumptions=(LINEAR, UNMASKED_OR_CAUSAL, NO_ROTARY, NO_SOFTCAP, FINITE, AT_LEAST_TWO),
    given=lambda where, folded: (where, folded, partial(sums_for, n=where.count, causal=where.map.terms.is_causal)),
)
def _best(where: Setting, folded: bool, sums: Sums) -> Tensor:
    assert where.tokens is not None
    return _evaluate(where.map, clusters(where.map, where.tokens), sums, folded).flatten(1).amax(1)


def _equal_tokens_block(where: Setting) -> Tensor:
    weights, values = where.map.output_weight.double(), value_matrices(where.map, folded=False)
    lost = gamma(8 * weights.shape[0] * weights.shape[1]) * weights.norm() * values.norm()
    return (spectral((weights.mT @ values).sum(0)) * (1 - _SOLVER) - lost).clamp(min=0)


@theorem(
    "howsmooth.equal_tokens",
    r"\bigl\|\sum_h W_hV_h\bigr\|",
    side="lower",
    scope="ball",
    kinds=("dot_product", "l2"),
    assumptions=(LINEAR_VALUES,),
    block=_equal_tokens_block,
    needs=("tokens",),
)
def _equal_tokens(where: Setting, folded: bool) -> Tensor:
    r"""Where all tokens are equal the Jacobian is P ⊗ V with row-stochastic P, so :math:`\|J\| \ge \|V\|`.

    Whatever the mask, biases and positions: no covariance is left, and moving all tokens by y moves the output by Vy.
    For a block V is :math:`\sum_h W_hV_h`.
    """
    value, plain = value_matrices(where.map, folded), value_matrices(where.map, folded=False)
    outer = where.map.output_weight.double().norm(dim=(-2, -1)) if folded else 1.0
    lost = gamma(8 * where.map.output_weight[0].numel()) * plain.norm(dim=(-2, -1)) * outer
    return (spectral(value) * (1 - _SOLVER) - lost).clamp(min=0)
