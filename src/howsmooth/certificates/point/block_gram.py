"""JJᵀ of all heads together at one input, row by row, from the blocks of the heads.

With W_h = Q_h R_h and S the stacked Jacobians of the heads behind R_h, JJᵀ = Q(SSᵀ)Qᵀ: O(n³K² + n²K²d) operations for
heads of total width K.

Proof: docs/theory/certificates-point.md, section "The Gram matrix of a block".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from howsmooth.certificates.point.head_gram import HeadBlocks, HeadsAt
from howsmooth.numerics.roundoff import gamma


@dataclass(frozen=True)
class StackedHeads:
    """The parts of all heads of a map, behind the triangular factors of their output matrices.

    Attributes:
        bases: Q, ``(d_out, heads·k)``. weights: P ``(heads, n, n)``. values: V ``(heads·k, d)``.
        pushed: S u ``(heads, n, n, k)``. push: t ``(heads, n, n or 1, d)``. own: B ``(n, heads·k, d)``.
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
    def of(cls, at: HeadsAt) -> StackedHeads | None:
        """At one input; None where derivatives of values differ, or a head is as wide as the output."""
        heads, outputs = list(at.blocks()), at.attention.output_weight.mT
        narrow = outputs.shape[-2] > outputs.shape[-1]
        if not narrow or any(len(head.value) > 1 for head in heads):
            return None
        bases = torch.linalg.qr(outputs).Q
        return cls(
            torch.cat(list(bases), 1),
            torch.stack([head.weights for head in heads]),
            torch.cat([head.value[0] for head in heads]),
            torch.stack([head.slopes[..., None] * head.apart for head in heads]),
            torch.stack([head.push for head in heads]),
            torch.cat([head.own for head in heads], 1),
            *_errors(heads, outputs),
        )

    @cached_property
    def _squares(self) -> Tensor:
        """VVᵀ, ``(heads, k, heads, 1, k)``."""
        heads, k = len(self.weights), self.pushed.shape[-1]
        return (self.values @ self.values.mT).view(heads, k, heads, 1, k)

    @cached_property
    def _leans(self) -> Tensor:
        """V t of all heads and queries, ``(heads, k, heads, n, n or 1)``."""
        return torch.einsum(
            "hkd,gejd->hkgej", self.values.view(len(self.weights), -1, self.values.shape[-1]), self.push
        )

    @cached_property
    def _crossed(self) -> Tensor:
        """VBᵀ of all queries, ``(n, heads·k, heads·k)``."""
        return self.values @ self.own.mT

    def rows(self, i: int) -> Tensor:
        """The rows of SSᵀ that belong to query i, ``(n, K, K)``: between its heads and those of every query."""
        heads, n, k = len(self.weights), self.weights.shape[1], self.pushed.shape[-1]
        here, mine, own = self.weights[:, i], self.pushed[:, i], self.own[i]  # (h, j), (h, j, k), (h·k, d)
        pairs = torch.einsum("hj,gej->hge", here, self.weights)
        blocks = pairs[:, None, :, :, None] * self._squares + self._pushed_rows(i)
        fixed = self.push[:, :, min(i, self.push.shape[2] - 1)]  # t_ei of every query e
        to_values, to_push = (own @ self.values.mT).view(heads, k, heads, 1, k), own @ fixed.flatten(0, 1).mT
        blocks = blocks + to_values * self.weights[:, :, i][None, None, :, :, None]
        blocks = blocks + to_push.view(heads, k, heads, n, 1) * self.pushed[:, :, i][None, None]
        result = blocks.permute(3, 0, 1, 2, 4).reshape(n, heads * k, heads * k)
        result = result + here.T.repeat_interleave(k, 1)[..., None] * self._crossed
        reached = self.push[:, i].transpose(0, 1) @ self.own.mT  # t_ie·B of every query e, (e, h, K)
        result = result + mine.permute(1, 0, 2).reshape(n, -1, 1) * reached.repeat_interleave(k, 1)
        result[i] = result[i] + own @ own.mT
        return result

    def _pushed_rows(self, i: int) -> Tensor:
        """The terms of the key paths in the rows of query i, ``(heads, k, heads, n, k)``."""
        here, mine, leans = self.weights[:, i], self.pushed[:, i], self._leans
        if self.push.shape[2] > 1:
            theirs = torch.einsum("hkgej,gejl->hkgel", here[:, None, None, None] * leans, self.pushed)
            felt = torch.einsum("hjk,glhj->hgjkl", mine, leans[:, :, :, i])
            dots = torch.einsum("hjd,gejd->hgej", self.push[:, i], self.push)
            both = torch.einsum("hgej,hjk,gejl->hkgel", dots, mine, self.pushed)
            return theirs + torch.einsum("hgjkl,gej->hkgel", felt, self.weights) + both
        mixed = torch.einsum("hj,gejl->hgel", here, self.pushed)
        theirs = torch.einsum("hjk,gej->hkge", mine, self.weights)
        dots = torch.einsum("hd,ged->hge", self.push[:, i, 0], self.push[:, :, 0])
        both = torch.einsum("hjk,gejl->hkgel", mine, self.pushed)
        blocks = leans * mixed[:, None] + dots[:, None, :, :, None] * both
        return blocks + theirs[..., None] * leans[:, :, :, i, 0].permute(2, 0, 1)[:, None, :, None, :]

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
