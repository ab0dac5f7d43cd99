r"""How sharp attention can be: Zhai et al., *Stabilizing Transformer Training by Preventing Attention Entropy
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

from howsmooth.errors import InvalidInput


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
