r"""Attention whose queries and keys are brought to one length: scaled cosine attention, and q/k normalisation.

Queries, keys and values are token-wise maps with Jacobians of norm at most :math:`m_q, m_k, m_v` (`Reach.slope`) and
lengths at most :math:`\ell_q, \ell_k` (`Reach.most`). For any mask, additive logit bias or soft-cap,

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap, CosineAttention, Rotary, UnitNorm
from howsmooth.attention.stages import Scale
from howsmooth.bounds.catalogue import FINITE, LINEAR_VALUES, NO_PLACES, NO_ROTARY, Assumption, theorem
from howsmooth.bounds.head_constants import value_matrices
from howsmooth.bounds.question_setting import Setting
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


REFERENCE = "Qi et al. 2023"


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
    reference=REFERENCE,
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
