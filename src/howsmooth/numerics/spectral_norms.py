"""Upper bounds on spectral norms that cost a few products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SMALL = 128
"""Largest side of matrices whose norms are bounded by squarings of WWᵀ."""


def least_component(size: int, failing: float) -> float:
    """The τ below which a coordinate of a random unit vector is in absolute value with probability ``failing`` [1]_.

    A random unit vector v has such a component on the top singular vector, so that ‖(JᵀJ)^q v‖ ≥ σ^{2q} τ.

    .. [1] J. D. Dixon, *Estimating extremal eigenvalues and condition numbers of matrices*, SIAM J. Numer. Anal. 20
       (1983).

    >>> least_component(1, 0.01), round(least_component(100, 0.5), 4)
    (1.0, 0.0679)
    """
    from scipy.special import betaincinv

    return 1.0 if size == 1 else math.sqrt(betaincinv(0.5, (size - 1) / 2, failing))


def spectral_bound(weight: Tensor) -> Tensor:
    """An upper bound on ‖W‖₂ in float64: the Schatten 64-norm (Σ σ⁶⁴)^{1/64} = ‖(WWᵀ)¹⁶‖_F^{1/32}.

    Above ‖W‖₂ by at most rank^{1/64}. With more than 128 rows and columns `matrix_power_bound` is taken: squaring WWᵀ
    would cost as much as the products whose rounding is in question.
    """
    scale = weight.abs().amax((-2, -1), keepdim=True)
    scale = scale.masked_fill(scale == 0, 1.0)
    scaled, side = weight / scale, min(weight.shape[-2:])
    scaled = scaled if weight.shape[-2] == side else scaled.mT
    if side > _SMALL:
        return matrix_power_bound(scaled) * scale[..., 0, 0].double()
    power = scaled @ scaled.mT
    log = torch.zeros_like(scale[..., 0, 0], dtype=torch.float64)
    for _ in range(4):
        size = power.abs().amax((-2, -1), keepdim=True)
        power = power / size.masked_fill_(size == 0, 1.0)
        power = power @ power
        log = 2 * (log + size[..., 0, 0].double().log())
    return ((torch.linalg.matrix_norm(power.double()).log() + log) / 32).exp() * scale[..., 0, 0].double()


def matrix_power_bound(matrix: Tensor, steps: int = 16, starts: int = 8, failing: float = 1e-6) -> Tensor:
    """An upper bound on ‖W‖₂, true with probability 1 − ``failing``, from power iteration with several random starts.

    Unless all of them have a component below τ on the top singular vector, one has |(WWᵀ)^q v| ≥ σ^{2q} τ, τ being
    that of `least_component`.

    >>> bound = matrix_power_bound(torch.diag(torch.linspace(1, 2, 900)))
    >>> 2 <= float(bound) < 2.4
    True
    """
    size = matrix.shape[-2]
    tau = least_component(size, failing ** (1 / starts))
    v = torch.randn(starts, size, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype).to(matrix.device)
    v, log = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True), 0.0
    for _ in range(steps):
        v = (v @ matrix) @ matrix.mT
        length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        v, log = v / length.clamp_min(torch.finfo(v.dtype).tiny), log + length.double().log()
    return ((torch.as_tensor(log).squeeze(-1).amax(-1) - math.log(tau)) / (2 * steps)).exp()
