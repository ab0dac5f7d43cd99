r"""JJᵀ of several heads together at one input, row by row, from the parts of its heads.

Let :math:`W_h = Q_hR_h`, and :math:`J_h` the Jacobian of head h behind :math:`R_h` (`howsmooth.certify.gram`). With the
heads stacked, :math:`J = QS`, :math:`Q = I_n \otimes [Q_1 \dots Q_H]`, :math:`S = [J_h]`, so
:math:`JJ^\top = Q(SS^\top)Q^\top`, and the block of :math:`SS^\top` between query i of head h and query i' of head g is

.. math:: \sum_jJ^h_{ij}J^{g\top}_{i'j},\qquad J^h_{ij} = P^h_{ij}V^h + S^h_{ij}u^h_{ij}t^{h\top}_i + [i = j]B^h_i,

which needs sums over j of products of weights and values, and products of V, t and B: O(n³K² + n²K²d) operations for
all heads, K their widths together, instead of O(n³K²d). Its Frobenius norm takes O(n²K³).

**Rounding.** As there: every entry is a nested sum of at most m = 8(n + d + K) products, and with absolute values
inside the sums have a Frobenius norm of at most :math:`(\sum_h\sqrt{k_h}\,\mathrm{size}_h)^2`, because
:math:`\|\,|Q_h|\,\|_F = \sqrt{k_h}`. A computed :math:`Q_h` is orthonormal to within :math:`γ`, and
:math:`Q_hR_h = W_h` to within the error that ‖J − Ĵ‖ of the heads holds already; that of Q_h is added once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.bounds.rounding import gamma
from howsmooth.certify.gram import HeadBlocks, head_blocks


@dataclass(frozen=True)
class StackedHeads:
    """The parts of all heads of a map, behind the triangular factors of their output matrices.

    Attributes:
        bases: Q, ``(d_out, heads·k)``. weights: P ``(heads, n, n)``. values: V ``(heads·k, d)``.
        pushed: S u ``(heads, n, n, k)``. push: t ``(heads, n, d)``. own: B ``(n, heads·k, d)``.
        off: ≥ ‖J − Ĵ‖. rounding: ≥ ‖computed Gram matrix − ĴĴᵀ‖ in the Frobenius norm.
    """

    bases: Tensor
    weights: Tensor
    values: Tensor
    pushed: Tensor
    push: Tensor
    own: Tensor
    off: float
    rounding: float

    @classmethod
    def of(cls, attention: AttentionMap, x: Tensor) -> StackedHeads | None:
        """At one input ``(n, d)``; None where keys or values differ in their derivatives, as with rotary positions."""
        heads, outputs = head_blocks(attention, x), attention.output_weight.double().mT
        narrow = outputs.shape[-2] > outputs.shape[-1]
        if not narrow or any(head.push.shape[1] > 1 or len(head.value) > 1 for head in heads):
            return None
        bases = torch.linalg.qr(outputs).Q
        return cls(
            torch.cat(list(bases), 1),
            torch.stack([head.weights for head in heads]),
            torch.cat([head.value[0] for head in heads]),
            torch.stack([head.slopes[..., None] * head.apart for head in heads]),
            torch.stack([head.push[:, 0] for head in heads]),
            torch.cat([head.own for head in heads], 1),
            *_errors(heads, outputs),
        )

    @cached_property
    def _fixed(self) -> tuple[Tensor, Tensor, Tensor]:
        """VVᵀ, V t of all heads and queries, and V Bᵀ of all queries."""
        return self.values @ self.values.mT, self.values @ self.push.flatten(0, 1).mT, self.values @ self.own.mT

    def rows(self, i: int) -> Tensor:
        """The rows of SSᵀ that belong to query i, ``(n, K, K)``: between its heads and those of every query."""
        heads, n, k = len(self.weights), self.weights.shape[1], self.pushed.shape[-1]
        squares, leans, crossed = self._fixed
        here, mine = self.weights[:, i], self.pushed[:, i]  # (h, j), (h, j, k)
        own, lean = self.own[i], leans.view(-1, heads, n)
        pairs = torch.einsum("hj,gej->hge", here, self.weights)
        mixed = torch.einsum("hj,gejl->hgel", here, self.pushed)
        theirs = torch.einsum("hjk,gej->hkge", mine, self.weights)
        dots = torch.einsum("hd,ged->hge", self.push[:, i], self.push)
        both = torch.einsum("hjk,gejl->hkgel", mine, self.pushed)
        blocks = pairs[:, None, :, :, None] * squares.view(heads, k, heads, 1, k)
        blocks = blocks + lean.view(heads, k, heads, n, 1) * mixed[:, None]
        blocks = blocks + theirs[..., None] * lean[:, :, i].view(heads, k, heads).permute(2, 0, 1)[:, None, :, None, :]
        blocks = blocks + dots[:, None, :, :, None] * both
        to_values, to_push = (own @ self.values.mT).view(heads, k, heads, 1, k), own @ self.push.flatten(0, 1).mT
        blocks = blocks + to_values * self.weights[:, :, i][None, None, :, :, None]
        blocks = blocks + to_push.view(heads, k, heads, n, 1) * self.pushed[:, :, i][None, None]
        result = blocks.permute(3, 0, 1, 2, 4).reshape(n, heads * k, heads * k)
        result = result + self.weights[:, i].T.repeat_interleave(k, 1)[..., None] * crossed
        reached = (self.push[:, i] @ self.own.mT).repeat_interleave(k, 1)  # t_i·B of every query, (e, h·k, K)
        result = result + mine.permute(1, 0, 2).reshape(n, -1, 1) * reached
        result[i] = result[i] + own @ own.mT
        return result

    def sums(self, basis: Tensor) -> tuple[float, Tensor]:
        """‖JJᵀ‖_F² and JJᵀU for U ``(n·d_out, r)``."""
        n, out = self.weights.shape[1], len(self.bases)
        squares, products, inside = 0.0, [], self.bases.mT @ basis.view(n, out, -1)
        for i in range(n):
            rows = self.rows(i)
            sizes = (self.bases @ rows[i:] @ self.bases.mT).square().sum((1, 2))  # the rest is their mirror image
            squares += float(2 * sizes.sum() - sizes[0])
            products.append(self.bases @ (rows @ inside).sum(0))
        return squares * (1 + gamma(n * n * out * out)), torch.cat(products)


def _errors(heads: list[HeadBlocks], outputs: Tensor) -> tuple[float, float]:
    n, k, d = heads[0].shape
    size = k**0.5 * sum(head.size for head in heads)
    turned = gamma(8 * outputs[0].numel()) * size  # Q off its exact self
    return sum(head.off for head in heads) + turned, 4 * gamma(8 * (n + d + k * len(heads))) * size**2
