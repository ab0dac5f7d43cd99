r"""Several heads at once: less than the sum of their norms, by how little their outputs overlap.

Let :math:`M_h` have norm at most :math:`s_h` and its range in that of the output matrix :math:`W_h`, and let
:math:`Π_h` be the orthogonal projector on the range of :math:`W_h`. For all weights :math:`a_h > 0`, by Cauchy–Schwarz,

.. math:: \Big\|\sum_h M_h\Big\| = \Big\|\sum_h a_hΠ_h\cdot a_h^{-1}M_h\Big\|
          \le \Big\|\sum_h a_h^2Π_h\Big\|^{1/2}\Big(\sum_h s_h^2/a_h^2\Big)^{1/2}.

With :math:`a_h^2 = s_h` that is never above the sum, which it is where all heads write into the same directions; where
no two do it is :math:`(\max_h s_h\sum_h s_h)^{1/2}`, and :math:`(\sum_h s_h^2)^{1/2}` for a = 1.

**Rounding.** A computed basis spans the range of a matrix within :math:`e = γ\|W_h\|_F` of :math:`W_h` (Higham 2002,
Theorem 19.4), so its projector is off by at most :math:`e/(σ_{\min}(W_h) - e)`, and never by more than 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from howsmooth.attention import AttentionMap
from howsmooth.bounds.point_error import gamma

_POWERS = (0.0, 0.25, 0.5)
"""a_h = s_h to one of these powers."""


def norm_together(attention: AttentionMap, norms: Sequence[float]) -> float:
    """A bound on the norm of the sum of maps, one of a norm per head, that write where the heads write.

    >>> import howsmooth as hs
    >>> w = torch.eye(4, dtype=torch.float64)  # two heads, each with its own half of the output
    >>> round(norm_together(hs.SelfAttention(w, w, w, w, heads=2), [3.0, 4.0]), 9)
    5.0
    """
    sizes = torch.tensor(norms, dtype=torch.float64)
    plain = float(sizes.sum()) * (1 + gamma(len(sizes)))
    if not 0 < plain < torch.inf:
        return plain
    outputs = attention.output_weight.double().mT
    bases = torch.linalg.qr(outputs).Q
    error = gamma(16 * outputs[0].numel()) * torch.linalg.matrix_norm(outputs)
    least = torch.linalg.svdvals(outputs).amin(-1) - 2 * error
    off = torch.where(least > error, error / least.clamp_min(1e-300), 1.0).clamp_max(1.0)
    off = off + gamma(16 * outputs[0].numel())
    found = [plain]
    for power in _POWERS:
        weights = sizes.clamp_min(1e-9 * float(sizes.max())) ** power
        squares = weights.square()
        overlap = ((bases * squares[:, None, None]) @ bases.mT).sum(0)
        top = float(torch.linalg.eigvalsh(overlap)[-1]) + gamma(16 * sum(bases.shape)) * float(squares.sum())
        found.append((top + float((squares * off).sum())) ** 0.5 * float((sizes / weights).norm()))
    return min(found) * (1 + gamma(16 * len(sizes)))
