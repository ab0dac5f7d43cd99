r"""Attention other than dot products and distances: cosine, q/k-normalised, sigmoid, gradient-step, LipschitzNorm.

**Queries and keys of one length**: scaled cosine attention, and q/k normalisation. Queries, keys and values are
token-wise maps with Jacobians of norm at most :math:`m_q, m_k, m_v` (`Reach.slope`) and lengths at most :math:`\ell_q,
\ell_k` (`Reach.most`). For any mask, additive logit bias or soft-cap,

.. math:: \|J\| \le \sqrt n\,\|WM^v\| + \text{spread}\,\big(\ell_k m_q + \sqrt n\,\ell_q m_k\big),

with spread ≥ the standard deviation of the values under any weights, output matrix W included.

Proof. At token i, :math:`J(X)Y = W\big[\sum_j P_{ij}M^v_jy_j + \sum_j P_{ij}(v_j-o_i)(k_j\cdot M^q_iy_i)
+ \sum_j P_{ij}(v_j-o_i)(q_i\cdot M^k_jy_j)\big]`. By Cauchy–Schwarz under P_i the parts are at most
:math:`\|WM^v\|\,(\sum_j P_{ij}|y_j|^2)^{1/2}`, :math:`\text{spread}\cdot\ell_km_q|y_i|` and
:math:`\text{spread}\cdot\ell_qm_k(\sum_j P_{ij}|y_j|^2)^{1/2}`; summing squares over i brings the column sums of P, at
most n. Without masks and positions logits differ by at most :math:`2\ell_q\ell_k` in a row, so
:math:`P_{ij} \le e^{2\ell_q\ell_k}/n`, and :math:`e^{\ell_q\ell_k}` replaces √n. ∎

A normalisation :math:`x \mapsto c\,g\circ x/\sqrt{|x|^2+\varepsilon}` has length below :math:`c\max|g|` and a
derivative of norm at most :math:`c\max|g|/\sqrt{|x|^2+\varepsilon} \le c\max|g|\,\varepsilon^{-1/2}`; a bias before it
changes neither. Rotary positions are isometries up to their amplitude.

For scaled cosine attention there is also the bound of Qi et al., *LipsFormer: Introducing Lipschitz Continuity to
Vision Transformers*, ICLR 2023 (arXiv 2304.09856).

**Sigmoid attention**, at an input: Ramapuram et al., *Theory, Analysis, and Best Practices for Sigmoid Self-Attention*,
2024 (arXiv 2409.04431). On a set of tokens this project's bound, with biases, masks, a soft-cap and rotary positions:
J(X)Y at token i is

.. math:: \sum_j \big(P_{ij}V + P'_{ij}v_jw_{ij}^\top\big)y_j + \sum_j P'_{ij}v_j\,(g_{ij}\cdot y_i),\qquad
          P' = P(1-P),

with :math:`w_{ij}, g_{ij}` the derivatives of logit (i, j) in the key's and the query's token, and :math:`v_j` the
value, its bias included: weights do not sum to one here. Let :math:`|w| \le` push, :math:`|g| \le` pull,
:math:`|v| \le` size, and let every weight lie in [p₀, p₁]. A matrix of n × n blocks has at most n times the norm of its
largest block, and row i of the second sum at most n times its largest term, hence

.. math:: \|J\| \le n\Big[\max_{p_0\le p\le p_1}\big(p\,\|V\| + p(1-p)\,\text{size}\cdot\text{push}\big)
          + \max_{p_0\le p\le p_1}p(1-p)\cdot\text{size}\cdot\text{pull}\Big]. \qquad ∎

A soft-cap multiplies logit derivatives by factors in [0, 1]; a mask sets blocks to zero. With the usual shift −ln n and
logits of size S before it, np ≤ e^S: the bound stays finite as n grows.

**Gradient-step attention**, with one constant for all inputs of all lengths: x ↦ x − η Σ_j softmax_j(⟨x, Ay_j⟩)Ay_j
(Furuya et al. 2026), as a map of its queries.

Proof. The map is :math:`x - \eta\nabla\log\sum_j e^{\langle x, z_j\rangle}` with :math:`z_j = Ay_j`,
and the Hessian of log-sum-exp is the covariance C of the :math:`z_j` under the weights. So the Jacobian of a row is the
symmetric matrix I − ηC. A variance is at most a quarter of the squared range (Popoviciu), hence
:math:`0 \preceq C \preceq \rho^2 I` with ρ half the largest distance between two :math:`z_j`, and the eigenvalues lie
in :math:`[1 - \eta\rho^2,\ 1]`. Since :math:`\rho \le \max_j|z_j|`, the step of the paper keeps them in [−1, 1]. ∎

**LipschitzNorm attention**, likewise (Dasoulas, Scaman, Virmaux, *Lipschitz Normalization for Self-Attention Layers*,
ICML 2021, arXiv 2103.04886). The paper introduces the divisor c and bounds the map (Q, K, V) ↦ softmax(QKᵀ/c)V by the
constant e√3 + 2√6 ≈ 9.61. It follows from a smaller one in terms of the weights, `lipschitz_norm`.

Proof, for one head. Write :math:`u = \|Q\|_F`, κ and ω for the largest key and value, :math:`s_{ij} = q_i\cdot k_j/c`.

1. *Value path.* :math:`|s_{ij}| \le t_i := |q_i|/u \le 1` and :math:`\sum_i t_i^2 = 1`, so by
   :math:`e^t + (n-1)e^{-t} \ge 2\sqrt{n-1}` and the convexity of sinh

   .. math:: P_{ij} \le \frac{e^{t_i}}{e^{t_i} + (n-1)e^{-t_i}} = \frac1n + \frac{n-1}{n}\,
             \frac{2\sinh t_i}{e^{t_i} + (n-1)e^{-t_i}} \le \frac1n + \frac{\sqrt{n-1}}{n}\,\sinh(1)\,t_i.

   Since :math:`\sum_i t_i \le \sqrt n`, columns of P sum to at most 1 + sinh 1, and ‖P‖ ≤ √(1 + sinh 1).
2. *Score path.* Row i moves by at most :math:`\omega\,(\sum_j P_{ij}\,ds_{ij}^2)^{1/2}`. Distribute c over the factors:
   :math:`s_{ij} = (q_i/u)\cdot(k_j/\kappa)`, :math:`(q_i/u)\cdot(k_j/\omega)` or
   :math:`(q_i/\omega)\cdot(k_j/\kappa)` in the three branches of the maximum. In each, the one of u, κ, ω that is not
   divided by is the smallest of the three.
   dQ: :math:`Q/\|Q\|_F` has a derivative of norm at most 1/u, so this part is at most ‖dQ‖.
   dK: :math:`\sum_i |q_i|^2P_{ij}/u^2 =: a_j` sum to one; dividing by the largest key, number \*, moves key j by
   at most :math:`(|dk_j| + |dk_*|)/\kappa` (the key \* itself by :math:`|dk_*|/\kappa`), and
   :math:`\sum_{j\ne *} a_j(|dk_j| + |dk_*|)^2 + a_*|dk_*|^2 \le 2\|dK\|^2`: at most √2·‖dK‖.
   dω, in the branches that divide by it: :math:`\omega\,(\sum_i t_i^2)^{1/2}|d\omega|/\omega \le \|dV\|`. ∎

As a map of (Q, K, V) the constant is thus at most ((1 + √(1 + sinh 1))² + 3)^{1/2} < 3.03, which implies the constant
e√3 + 2√6 ≈ 9.61 that the paper is cited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap, CosineAttention, Rotary, UnitNorm
from howsmooth.attention.autodiff_maps import GradientStepAttention, LipschitzNormAttention, MeanOfSteps
from howsmooth.attention.masks import Maps, Terms
from howsmooth.attention.stages import Scale
from howsmooth.bounds.catalogue import (
    FINITE,
    LINEAR,
    LINEAR_VALUES,
    NO_PLACES,
    NO_QUERY_BIAS,
    NO_ROTARY,
    Assumption,
    no_bias,
    theorem,
)
from howsmooth.bounds.question_setting import HeadScores, Setting, output_factor, value_matrices
from howsmooth.bounds.three_paths import Paths
from howsmooth.norms.small_matrices import spectral
from howsmooth.sets.ellipsoid import Ellipsoid


@dataclass(frozen=True)
class Reach:
    """How long projected tokens get, and how fast they move; every entry is ``(heads,)``, float64.

    Attributes:
        least, most: bounds on the length of a projected token.
        slope: bound on the norm of its derivative in the token.
    """

    least: Tensor
    most: Tensor
    slope: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, stages: Iterable[nn.Module], tokens: Ellipsoid | None) -> Reach:
        """Of stages(weight·x + bias) for all x, or for those of a set.

        >>> Reach.of(torch.eye(2)[None], None, [UnitNorm(eps=0.25, length=3.0)], None)
        Reach(least=tensor([0.]..., most=tensor([3.]..., slope=tensor([6.]...
        """
        slope = spectral(weight.double())
        least, most = torch.zeros_like(slope), torch.full_like(slope, math.inf)
        if tokens is not None:
            middle = weight.double() @ tokens.centre + (0.0 if bias is None else bias.double())
            away = tokens.reach * spectral(weight.double() @ tokens.axes)
            least, most = (middle.norm(dim=-1) - away).clamp(min=0), middle.norm(dim=-1) + away
        reach = cls(least, most, slope)
        for stage in stages:
            reach = reach._through(stage)
        return reach

    def _through(self, stage: nn.Module) -> Reach:
        if isinstance(stage, UnitNorm):
            gain = abs(stage.length) * (1.0 if stage.gain is None else float(stage.gain.double().abs().max()))
            most = gain * (1 + stage.eps / self.most.square()).rsqrt()
            return Reach(torch.zeros_like(self.least), most, self.slope * gain * (self.least**2 + stage.eps).rsqrt())
        if isinstance(stage, Rotary):  # coordinates that do not turn keep their length
            short, long = min(1.0, abs(stage.amplitude)), max(1.0, abs(stage.amplitude))
        else:
            assert isinstance(stage, Scale)
            short = long = abs(stage.factor)
        return Reach(self.least * short, self.most * long, self.slope * long)


def normalised(value: Tensor, spread: Tensor, query: Reach, key: Reach, growth: Tensor | float) -> Tensor:
    r"""growth·value + spread·(ℓ_k m_q + growth·ℓ_q m_k), growth being √n, or e^{ℓ_qℓ_k} for every n at once.

    >>> import howsmooth as hs
    >>> attention = hs.CosineAttention(*torch.eye(2).repeat(3, 1, 1), temperature=2.0, eps=0.25)
    >>> float(hs.bounds.get("howsmooth.cosine")(attention, n=9))  # ε^{−½}(√n + τ + τ√n)
    22.0
    """
    return growth * value + spread * (key.most * query.slope + growth * query.most * key.slope)


def queries_and_keys(attention: AttentionMap, tokens: Ellipsoid | None) -> tuple[Reach, Reach]:
    """The reach of every head's queries and keys, for all tokens or for those of a set."""
    key_bias = None if attention.key_bias is None else attention.per_head(attention.key_bias)
    return (
        Reach.of(attention.query_weight, attention.query_bias, attention.query_stages, tokens),
        Reach.of(attention.per_head(attention.key_weight), key_bias, attention.key_stages, tokens),
    )


def _norms(stages: Iterable[nn.Module]) -> list[UnitNorm]:
    return [stage for stage in stages if isinstance(stage, UnitNorm)]


def _positive_eps(where: Setting) -> bool:
    stages = [*where.map.query_stages, *where.map.key_stages, *where.map.value_stages]
    return all(norm.eps > 0 for norm in _norms(stages))


QK_NORMALISED = Assumption(
    "queries and keys are normalised, and but for that scaled and turned",
    lambda where: all(
        _norms(stages) and all(isinstance(stage, UnitNorm | Rotary | Scale) for stage in stages)
        for stages in (where.map.query_stages, where.map.key_stages)
    ),
)
VALUES_NORMALISED = Assumption("values are normalised too", lambda where: bool(_norms(where.map.value_stages)))
POSITIVE_EPS = Assumption("the normalisation has ε > 0", _positive_eps)


@theorem(
    "howsmooth.cosine_mean_field",
    r"\nu\,\varepsilon^{-1/2}\,\|W\|\,\bigl(e^{\tau}\|V\|+\tau\|Q\|+\tau e^{\tau}\|K\|\bigr)",
    scope="mean-field W2",
    kinds=("cosine",),
    assumptions=(NO_PLACES, VALUES_NORMALISED, POSITIVE_EPS),
    needs=(),
    given=lambda where, folded: (where, folded, True),
)
@theorem(
    "howsmooth.cosine",
    r"\nu\,\varepsilon^{-1/2}\,\|W\|\,\bigl(\sqrt n\,\|V\|+\tau\|Q\|+\tau\sqrt n\,\|K\|\bigr)",
    scope="global",
    kinds=("cosine",),
    assumptions=(FINITE, VALUES_NORMALISED, POSITIVE_EPS),
)
def _own_cosine(where: Setting, folded: bool, every_n: bool = False) -> Tensor:
    attention = where.map
    query, key = queries_and_keys(attention, None)
    value = Reach.of(attention.per_head(attention.value_weight), None, attention.value_stages, None)
    output = spectral(attention.output_weight.double()) if folded else 1.0
    growth = torch.exp(query.most * key.most) if every_n else where.count**0.5
    return normalised(output * value.slope, output * value.most, query, key, growth)


@theorem(
    "howsmooth.qk_norm",
    r"\sqrt n\,\|V\|+\rho\|V\Gamma\|\,\bigl(\ell_km_q+\sqrt n\,\ell_qm_k\bigr)",
    scope="ball",
    kinds=("dot_product", "cosine"),
    assumptions=(FINITE, QK_NORMALISED, LINEAR_VALUES, POSITIVE_EPS),
)
def _qk_norm(where: Setting, folded: bool) -> Tensor:
    assert where.tokens is not None
    query, key = queries_and_keys(where.map, where.tokens)
    value = value_matrices(where.map, folded)
    spread = where.tokens.reach * spectral(value @ where.tokens.axes)
    return normalised(spectral(value), spread, query, key, where.count**0.5)


QI = "Qi et al. 2023"


def cosine(query: Tensor, key: Tensor, value: Tensor, nu: float, tau: float, eps: float, n: float) -> Tensor:
    r"""For all inputs: :math:`n^2\nu\tau\varepsilon^{-1/2}\|K\| + n\nu\tau\varepsilon^{-1/2}\|Q\| +
    2n\nu\varepsilon^{-1/2}\|V\|`.

    It follows, term by term, from `normalised`, never larger, which needs no more: so it also
    holds with biases (they are inside the normalisation) and under any mask. It needs normalised values: without, the
    score path grows with the tokens.

    Args:
        query, key, value: ‖Q‖, ‖K‖, ‖V‖ of each head. nu, tau, eps: value scale, temperature, ε.

    >>> import torch
    >>> one = torch.ones(1)
    >>> float(cosine(one, one, one, nu=1.0, tau=1.0, eps=0.25, n=2))  # 2·(4 + 2 + 4)
    20.0
    """
    return nu * eps**-0.5 * (n**2 * tau * key + n * tau * query + 2 * n * value)


@theorem(
    "qi2023.cosine",
    r"n^2\nu\tau\varepsilon^{-1/2}\|K\|+n\nu\tau\varepsilon^{-1/2}\|Q\|+2n\nu\varepsilon^{-1/2}\|V\|",
    reference=QI,
    scope="global",
    kinds=("cosine",),
    assumptions=(FINITE, VALUES_NORMALISED, POSITIVE_EPS, NO_ROTARY),
)
def _cosine(where: Setting, folded: bool) -> Tensor:
    attention = where.map
    assert isinstance(attention, CosineAttention)
    weights = (attention.query_weight, attention.key_weight, attention.value_weight)
    query, key, value = (attention.per_head(spectral(weight.double())) for weight in weights)
    output = spectral(attention.output_weight.double()) if folded else 1.0
    nu, tau = abs(attention.value_scale), abs(attention.temperature)
    return output * cosine(query, key, value, nu, tau, attention.eps, where.count)


RAMAPURAM = "Ramapuram et al. 2024"


def sigmoid_local(value: Tensor, score: Tensor, weights: Tensor, x: Tensor, slopes: Tensor | None = None) -> Tensor:
    r"""At X: :math:`\|V\|\,\bigl(n\sup\sigma + 2n\sup\sigma'\,\|A\|\cdot\tfrac1n\sum_i|x_i|^2\bigr)`, suprema over the
    logits at X.

    Proof. J(X)Y at i is :math:`V[\sum_j P_{ij}y_j + \sum_j P'_{ij}x_j\,(A^\top x_j\cdot y_i) +
    \sum_j P'_{ij}x_j\,(Ax_i\cdot y_j)]` with P = σ and P' = σ' at the logits. ‖P‖ is at most n times its largest entry;
    each of the other sums is at most :math:`\sup\sigma'\,\|A\|\sum_j|x_j|^2`, the last by Cauchy–Schwarz over j and the
    sum of squares over i. Masks and additive biases only change the entries of P, and a soft-cap shrinks logit
    derivatives. ∎

    Args:
        value, score: ‖V‖ and ‖A‖ of each head. weights: P, ``(heads, n, n)``. x: ``(n, d)``.
        slopes: P', when known more exactly than P(1 − P).

    >>> import torch
    >>> one, x = torch.ones(1), torch.ones(2, 1)
    >>> float(sigmoid_local(one, one, torch.full((1, 2, 2), 0.5), x))  # 2·½ + 2·2·¼
    2.0
    """
    largest = weights.amax((-2, -1))
    slope = (weights * (1 - weights) if slopes is None else slopes).amax((-2, -1))
    return value * (len(x) * largest + 2 * slope * score * x.square().sum())


NO_KEY_OR_VALUE_BIAS = Assumption(
    "keys and values have no bias (weights that do not sum to one let both through)",
    lambda where: no_bias(where.map.key_bias, where.map.value_bias),
)


@theorem(
    "ramapuram2024.local",
    r"\|V\|\,\bigl(n\sup\sigma+2n\sup\sigma'\,\|A\|\,\tfrac1n\textstyle\sum_i|x_i|^2\bigr)",
    reference=RAMAPURAM,
    scope="point",
    kinds=("sigmoid",),
    assumptions=(LINEAR, NO_QUERY_BIAS, NO_KEY_OR_VALUE_BIAS, NO_ROTARY),
    on_paths=True,
)
def _local(group: Paths, where: Setting) -> Tensor:
    return sigmoid_local(*where.norms(group), group.upper_weights, where.point, group.upper_slopes) * group.allowance


@dataclass(frozen=True)
class SigmoidNumbers:
    """Constants of each head of sigmoid attention on a set of tokens; every entry is ``(heads,)``, float64.

    Attributes:
        value: ‖V‖.
        size: ≥ |v_j|.
        push: ≥ |∂logit/∂x_j|.
        pull: ≥ |∂logit/∂x_i|.
        low, high: every logit lies between them, shift included.
    """

    value: Tensor
    size: Tensor
    push: Tensor
    pull: Tensor
    low: Tensor
    high: Tensor


def sigmoid(numbers: SigmoidNumbers, n: float) -> Tensor:
    r"""The bound of this module; on the ball, without biases, never above
    :math:`\|V\|\,(n\sup\sigma + 2n\sup\sigma'\,\|A\|R^2)`.

    >>> import howsmooth as hs
    >>> attention = hs.SigmoidAttention(*torch.eye(1).repeat(3, 1, 1))
    >>> bound, ball = hs.bounds.get("howsmooth.sigmoid"), hs.sets.Ball(1.0)
    >>> [round(float(bound(attention, n=n, over=ball)), 2) for n in (1, 100, 10**6)]
    [1.18, 7.8, 8.15]
    """
    low, high = torch.sigmoid(numbers.low), torch.sigmoid(numbers.high)
    cross = numbers.size * numbers.push
    # p·value + p(1−p)·cross is concave in p, with its peak at (value + cross)/(2·cross).
    peak = torch.where(cross > 0, (numbers.value + cross) / (2 * cross), 1.0)
    p = torch.minimum(torch.maximum(peak, low), high)
    steepest = torch.minimum(low.clamp(min=0.5), high)
    diagonal = steepest * (1 - steepest) * numbers.size * numbers.pull
    return n * (p * numbers.value + p * (1 - p) * cross + diagonal)


def sigmoid_numbers(attention: AttentionMap, tokens: Ellipsoid, n: int, folded: bool = True) -> SigmoidNumbers:
    """The numbers of every head of sigmoid attention with linear queries, keys and values.

    Queries are q₀ + QΓz and keys k₀ + KΓz on the set, |z| ≤ ρ; their dot product is multiplied out. Rotations are
    isometries (up to their amplitude), so with them every dot product is replaced by the product of its norms.
    """
    axes, centre, reach, scores = tokens.axes, tokens.centre, tokens.reach, HeadScores.of(attention, 1)
    query, key, rotary = scores.query, scores.key, scores.rotary
    q0, k0 = scores.at(centre)

    def meet(left: Tensor, right: Tensor) -> Tensor:
        if rotary is None:
            return spectral(left.mT @ right)
        # Coordinates that do not turn keep their length.
        return max(1.0, rotary.amplitude**2) * spectral(left) * spectral(right)

    swing = reach * (meet(k0, query @ axes) + meet(q0, key @ axes) + reach * meet(key @ axes, query @ axes))
    middle = (q0 * k0).sum((-2, -1))
    if rotary is not None:
        swing, middle = swing + meet(q0, k0), torch.zeros_like(middle)
    low, high = middle - swing, middle + swing
    if attention.softcap is not None:
        low, high = (attention.softcap * torch.tanh(end / attention.softcap) for end in (low, high))
    shift = _shift(attention, n)
    value, bias = value_matrices(attention, folded), _value_bias(attention, folded)
    return SigmoidNumbers(
        value=spectral(value),
        size=(value @ centre + bias).norm(dim=-1) + reach * spectral(value @ axes),
        push=meet(key, q0) + reach * meet(key, query @ axes),
        pull=meet(query, k0) + reach * meet(query, key @ axes),
        low=low + shift,
        high=high + shift,
    )


def _value_bias(attention: AttentionMap, folded: bool) -> Tensor | float:
    """The constant that `howsmooth.bounds.question_setting.value_matrices` leaves out of the values."""
    if attention.value_bias is None:
        return 0.0
    bias = attention.per_head(attention.value_bias.double())[..., None]
    return (output_factor(attention) @ bias if folded else bias)[..., 0]


def _shift(attention: AttentionMap, n: int) -> float:
    """The shift that SigmoidAttention adds to every logit: its last term."""
    maps = Maps.every(1, attention.heads, n, torch.zeros((), dtype=torch.float64))
    block = list(attention.terms)[-1].block(slice(0, 1), slice(0, 1), maps)
    assert block is not None
    return float(block)


ONLY_MASKED = Assumption(
    "nothing but a mask and the shift is added to the logits",
    lambda where: Terms(list(where.map.terms)[:-1]).hides_only,
)


@theorem(
    "howsmooth.sigmoid",
    r"n\bigl[\max_p\bigl(p\|V\|+p(1-p)\|v\|\,|w|\bigr)+\max_p p(1-p)\,\|v\|\,|g|\bigr]",
    scope="ball",
    kinds=("sigmoid",),
    assumptions=(LINEAR, FINITE, ONLY_MASKED),
)
def _sigmoid(where: Setting, folded: bool) -> Tensor:
    assert where.tokens is not None
    return sigmoid(sigmoid_numbers(where.map, where.tokens, int(where.count), folded), where.count)


FURUYA = "Furuya et al. 2026"


def longest_step(points: Tensor) -> Tensor:
    r"""2/max|Ay_j|²: up to this step the map is non-expansive.

    >>> float(longest_step(torch.tensor([[2.0, 0.0], [0.0, 1.0]])))
    0.5
    """
    return 2 / points.double().square().sum(-1).amax()


def steps_of(where: Setting) -> list[GradientStepAttention]:
    """One step per head: a mean of maps is bounded by the mean of their bounds."""
    steps = where.attention.steps if isinstance(where.attention, MeanOfSteps) else [where.attention]
    return [step for step in steps if isinstance(step, GradientStepAttention)]


GRADIENT_STEP: dict[str, Any] = {"scope": "global", "kinds": ("gradient_step",), "combine": "block", "needs": ()}
SHORT_STEP = Assumption(
    "the step is at most 2/max|Ay_j|²",
    lambda where: all(head.step <= float(longest_step(head.points)) for head in steps_of(where)),
)


@theorem(
    "furuya2026.nonexpansive",
    r"1\quad\text{for}\ 0\le\eta\le 2/\max_j|Ay_j|^2",
    reference=FURUYA,
    assumptions=(SHORT_STEP,),
    **GRADIENT_STEP,
)
def _nonexpansive(where: Setting) -> Tensor:
    return torch.ones((), dtype=torch.float64)


def gradient_step(points: Tensor, step: float) -> Tensor:
    r""":math:`\max(1,\ \eta\rho^2 - 1)`, ρ half the diameter of the points Ay_j, for every step η ≥ 0.

    With two points it is attained: at a query they tie for, C has the eigenvalue ρ². The 1 is needed from the outset:
    far out one point takes all the weight, and the map becomes a translation.

    >>> float(gradient_step(torch.tensor([[5.0, 1.0], [5.0, -1.0]]), step=2.0))  # far from the origin, close together
    1.0
    """
    points = points.double()
    apart = (points[:, None] - points).square().sum(-1).amax()
    return (step * apart / 4 - 1).clamp(min=1.0)


@theorem(
    "howsmooth.gradient_step",
    r"\max\bigl(1,\ \eta\rho^2-1\bigr),\quad \rho=\tfrac12\max_{jk}|Ay_j-Ay_k|",
    **GRADIENT_STEP,
)
def _gradient_step(where: Setting) -> Tensor:
    return torch.stack([gradient_step(head.points, head.step) for head in steps_of(where)]).mean()


def joint(output: Tensor | float, stacked: Tensor) -> Tensor:
    r""":math:`(e\sqrt3 + 2\sqrt6)\,\|W\|\,\|(W_Q, W_K, W_V)\|`: the paper's constant for the map of (Q, K, V).

    Args:
        output: ‖W‖. stacked: the norm of the three weights on top of each other. Both of each head.

    >>> round(float(joint(1.0, torch.ones(()))), 2)
    9.61
    """
    return (math.e * 3**0.5 + 2 * 6**0.5) * output * stacked


def projections_of(where: Setting) -> AttentionMap:
    """The attention map whose projections this attention takes."""
    assert isinstance(where.attention, LipschitzNormAttention)
    return where.attention.projections


LIPSCHITZ_NORM: dict[str, Any] = {"scope": "global", "kinds": ("lipschitz_norm",), "needs": ()}


@theorem(
    "dasoulas2021.joint",
    r"(e\sqrt3+2\sqrt6)\,\|W\|\,\|(W_Q,W_K,W_V)\|",
    reference="after Dasoulas, Scaman, Virmaux 2021",
    **LIPSCHITZ_NORM,
)
def _joint(where: Setting, folded: bool) -> Tensor:
    maps = projections_of(where)
    stacked = torch.cat([maps.query_weight, maps.key_weight, maps.value_weight], dim=1).double()
    return joint(spectral(maps.output_weight.double()) if folded else 1.0, spectral(stacked))


MIXING = math.sqrt(1 + math.sinh(1))
"""‖P‖ ≤ √(1 + sinh 1) ≈ 1.475, whatever the tokens."""


def lipschitz_norm(mixed: Tensor, output: Tensor | float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    r""":math:`\sqrt{1+\sinh1}\,\|WW_V\| + \|W\|(\|W_V\| + \|W_Q\| + \sqrt2\,\|W_K\|)`, for every input and every n.

    Args:
        mixed: ‖WW_V‖. output, query, key, value: ‖W‖, ‖W_Q‖, ‖W_K‖, ‖W_V‖. All of each head.

    >>> import torch, howsmooth as hs
    >>> attention = hs.LipschitzNormAttention(*torch.eye(2).repeat(3, 1, 1))
    >>> round(float(hs.bounds.get("howsmooth.lipschitz_norm")(attention)), 3)
    4.889
    """
    return MIXING * mixed + output * (value + query + 2**0.5 * key)


@theorem(
    "howsmooth.lipschitz_norm",
    r"\sqrt{1+\sinh 1}\,\|WW_V\|+\|W\|\bigl(\|W_V\|+\|W_Q\|+\sqrt2\,\|W_K\|\bigr)",
    reference="howsmooth, for the attention of Dasoulas, Scaman, Virmaux 2021",
    **LIPSCHITZ_NORM,
)
def _lipschitz_norm(where: Setting, folded: bool) -> Tensor:
    maps = projections_of(where)
    query, key, value = (spectral(w.double()) for w in (maps.query_weight, maps.key_weight, maps.value_weight))
    if not folded:
        return lipschitz_norm(value, 1.0, query, key, value)
    return lipschitz_norm(spectral(value_matrices(maps)), spectral(output_factor(maps)), query, key, value)
