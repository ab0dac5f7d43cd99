"""The norm of a sum of heads, which is less than the sum of their norms where their outputs overlap little.

For projectors Π_h on the ranges of the output matrices and all a_h > 0,
‖Σ_h M_h‖ ≤ ‖Σ_h a_h² Π_h‖^½ (Σ_h ‖M_h‖²/a_h²)^½.

Proof: docs/theory/certificates-ball.md, section "The norm of a sum of heads".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from howsmooth.attention import AttentionMap
from howsmooth.numerics.roundoff import gamma

_POWERS = (0.0, 0.25, 0.5)
"""a_h = s_h to one of these powers."""


def norm_of_head_sum(attention: AttentionMap, norms: Sequence[float]) -> float:
    """A bound on the norm of a sum of maps of given norms, one per head, with the heads' output spaces.

    >>> import howsmooth as hs
    >>> w = torch.eye(4, dtype=torch.float64)  # two heads, each with its own half of the output
    >>> round(norm_of_head_sum(hs.SelfAttention(w, w, w, w, heads=2), [3.0, 4.0]), 9)
    5.0
    """
    sizes = torch.tensor(norms, dtype=torch.float64)
    plain = float(sizes.sum()) * (1 + gamma(len(sizes)))
    if not 0 < plain < torch.inf:
        return plain
    outputs = attention.output_weight.double().mT
    bases = torch.linalg.qr(outputs).Q
    error = gamma(16 * outputs[0].numel()) * torch.linalg.matrix_norm(outputs)
    smallest = torch.linalg.svdvals(outputs).amin(-1) - 2 * error
    off = torch.where(smallest > error, error / smallest.clamp_min(1e-300), 1.0).clamp_max(1.0)
    off = off + gamma(16 * outputs[0].numel())
    found = [plain]
    for power in _POWERS:
        weights = sizes.clamp_min(1e-9 * float(sizes.max())) ** power
        squares = weights.square()
        overlap = ((bases * squares[:, None, None]) @ bases.mT).sum(0)
        top = float(torch.linalg.eigvalsh(overlap)[-1]) + gamma(16 * sum(bases.shape)) * float(squares.sum())
        found.append((top + float((squares * off).sum())) ** 0.5 * float((sizes / weights).norm()))
    return min(found) * (1 + gamma(16 * len(sizes)))
