r"""Unit roundoff and :math:`\gamma_m`: the errors of m roundings, in the worst case and in mean square.

References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002, chapter 3; N. J. Higham,
T. Mary, *A new approach to probabilistic rounding error analysis*, SIAM J. Sci. Comput. 41 (2019).
"""

from __future__ import annotations

import math

import torch

UNIT = 2.0**-53
"""Unit roundoff of float64."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number.

    >>> unit_roundoff(torch.float64) == UNIT
    True
    """
    return torch.finfo(dtype).eps / 2


def gamma(steps: float, unit: float = UNIT) -> float:
    r""":math:`\gamma_m = mu/(1-mu)`, the relative error of m roundings; infinite from mu = ½ on.

    >>> gamma(1) == 2**-53 / (1 - 2**-53)
    True
    >>> gamma(2**30, unit_roundoff(torch.float32))
    inf
    """
    share = steps * unit
    return share / (1 - share) if share < 0.5 else math.inf


def norm_allowance(n: int, width: int) -> float:
    r"""Relative allowance for a norm, the root of the top eigenvalue λ of a Gram matrix: :math:`\gamma_{8(n+w)^2}`.

    A w × w Gram matrix of sums over n is computed to within :math:`\gamma_n` times its trace, at most wλ, its
    eigenvalues to within :math:`w^2u` times λ (LAPACK's backward error), and the products before it likewise.
    """
    return gamma(8 * (n + width) ** 2)


def spread_of_sum(terms: int) -> float:
    """Error of a sum of this many products in mean square, √terms·u, in units of eps = 2u.

    >>> spread_of_sum(16)
    2.0
    """
    return math.sqrt(terms) / 2
