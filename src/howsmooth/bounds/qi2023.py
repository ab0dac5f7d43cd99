"""Scaled cosine attention: Qi et al., *LipsFormer: Introducing Lipschitz Continuity to Vision Transformers*, ICLR 2023
(arXiv 2304.09856)."""

from __future__ import annotations

from torch import Tensor

from howsmooth.attention import CosineAttention
from howsmooth.bounds.assumptions import FINITE, NO_ROTARY
from howsmooth.bounds.catalogue import theorem
from howsmooth.bounds.own.normalised import POSITIVE_EPS, VALUES_NORMALISED
from howsmooth.bounds.question_setting import Setting
from howsmooth.norms.small_matrices import spectral

REFERENCE = "Qi et al. 2023"


def cosine(query: Tensor, key: Tensor, value: Tensor, nu: float, tau: float, eps: float, n: float) -> Tensor:
    r"""For all inputs: :math:`n^2\nu\tau\varepsilon^{-1/2}\|K\| + n\nu\tau\varepsilon^{-1/2}\|Q\| +
    2n\nu\varepsilon^{-1/2}\|V\|`.

    It follows, term by term, from `howsmooth.bounds.own.normalised`, never larger, which needs no more: so it also
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
