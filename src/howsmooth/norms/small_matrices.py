"""Norms of small matrices, many at once: weights of heads, blocks of Jacobians."""

from __future__ import annotations

import torch
from torch import Tensor


def spectral(matrices: Tensor) -> Tensor:
    r"""The largest singular value of every matrix, ``(…, m, k)`` → ``(…,)``, differentiable.

    It is :math:`\sqrt{\lambda_{\max}(AA^\top)}` with the shorter side of A first, a quarter of the time of a singular
    value decomposition and as accurate: rounding moves :math:`\lambda_{\max}` by a few units of its last place. Entries
    are divided by the largest, so that squares neither overflow nor vanish. An empty matrix has norm 0; one with an
    infinite entry has norm ∞, one with a NaN has none.

    >>> spectral(torch.tensor([[[3.0, 0.0], [0.0, -4.0]], [[0.0, 0.0], [0.0, 0.0]]]))
    tensor([4., 0.])
    >>> float(spectral(torch.zeros(0, 3)))
    0.0
    """
    rows, columns = matrices.shape[-2:]
    if not rows or not columns:
        return matrices.new_zeros(matrices.shape[:-2])
    size = matrices.detach().abs().amax((-2, -1))
    usable = size.isfinite() & (size > 0)
    scale = torch.where(usable, size, 1.0)
    # Ones in place of what has no direction: the derivative of the root stays finite, and none of it comes back.
    scaled = torch.where(usable[..., None, None], matrices / scale[..., None, None], 1.0)
    short = scaled if rows <= columns else scaled.mT
    return torch.where(usable, scale * torch.linalg.eigvalsh(short @ short.mT)[..., -1].sqrt(), size)
