r"""Tiles of attention weights that may be left out, and how much of the Jacobian goes with them.

Trained heads leave most of a long input unseen: whole tiles of P hold no entry above some threshold. With D the entries
of such tiles, everything else unchanged (outputs o_i and sums of rows are those of all entries), the products lose

.. math:: E\,(dq, dk, dv)_i = \sum_{j\in D_i} P_{ij}\,(dq_i\cdot k_j + q_i\cdot dk_j)\,(v_j - o_i)
                              + \sum_{j\in D_i} P_{ij}\,dv_j,

with D = ∂P in place of P under a soft-cap or sigmoid, which is no larger. Three norms bound it:

- in dq it is block diagonal, and :math:`|v_j - o_i| \le |v_j| + |o_i|`, so at most
  :math:`\max_i \sum_j P_{ij}|k_j|(|v_j| + |o_i|)`;
- in dk the entries of the blocks are at most :math:`M_{ij} = P_{ij}|q_i|(|v_j| + |o_i|)`, and by Schur's test
  :math:`\|M\| \le (\max_i\sum_j M_{ij}\cdot\max_j\sum_i M_{ij})^{1/2}`;
- in dv it is :math:`P_D \otimes 1`, at most :math:`(\max_i\sum_j P_{ij}\cdot\max_j\sum_i P_{ij})^{1/2}`.

All sums run over D alone and are gathered while the weights are evaluated once. Times bounds on the maps from tokens to
dq, dk, dv and on the output projection they give ε ≥ ‖E‖, which does not depend on any random start: by Weyl's
inequality :math:`|\sigma(J - E) - \sigma(J)| \le \varepsilon`, and both ends of a measurement are moved by it
(`JacobianOperator.left_out`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention.base import AttentionMap
from howsmooth.jacobians.rounding import Noise, per_map, schatten_8

_OF_SUMS = 1 + 1e-3
"""For the rounding of the sums, of positive numbers in single precision."""


@dataclass(frozen=True)
class LeftOut:
    """What was left out of every map: bounds in dq, dk and dv, ``(3, maps)``, and the share of all tiles."""

    sizes: Tensor
    share: float

    def select(self, index: Tensor) -> LeftOut:
        """That of some maps."""
        return LeftOut(self.sizes[:, index], self.share)

    def bound(self, attention: AttentionMap, norms: Sequence[Tensor], dtype: torch.dtype, by_head: bool) -> Noise:
        """ε of the score path and of the value path; ``norms`` are those of the maps from x to q, k and v."""
        in_query, in_key, in_value = self.sizes
        output = attention.output_weight.to(dtype)
        out = per_map(schatten_8(output), in_query, attention) if by_head else schatten_8(output.flatten(0, 1))
        return Noise(out * (norms[0] * in_query + norms[1] * in_key), out * norms[2] * in_value)


class LeftOutSums:
    """The sums of rows and columns over the tiles left out, gathered tile by tile."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor):
        self.query, k, self.value = (torch.linalg.vector_norm(t, dim=-1) for t in (query, key, value))
        one = torch.ones_like(k)
        self.by_key = torch.stack([one, k, self.value, k * self.value], dim=-1)
        self.by_query = torch.stack([torch.ones_like(self.query), self.query], dim=-1)
        self.rows, self.columns = torch.zeros_like(self.by_key), torch.zeros_like(self.by_query)
        self.left_out = self.tiles = 0

    def add(self, queries: tuple[slice, slice], keys: tuple[slice, slice], weights: Tensor, skip: float) -> bool:
        """Take note of a tile; whether it is left out."""
        self.tiles += 1
        if float(weights.amax()) >= skip:
            return False
        self.left_out += 1
        self.rows[queries].baddbmm_(weights, self.by_key[keys])
        self.columns[keys].baddbmm_(weights.mT, self.by_query[queries])
        return True

    def sizes(self, output: Tensor) -> LeftOut:
        """The three bounds, once the outputs o_i are known."""
        o = torch.linalg.vector_norm(output, dim=-1).double()
        query, value = self.query.double(), self.value.double()
        total, of_key, of_value, of_both = self.rows.double().unbind(-1)
        column, of_query = self.columns.double().unbind(-1)
        in_query = (of_both + o * of_key).amax(-1)
        in_key = (query * (of_value + o * total)).amax(-1) * (of_query * (value + o.amax(-1, keepdim=True))).amax(-1)
        in_value = total.amax(-1) * column.amax(-1)
        return LeftOut(
            _OF_SUMS * torch.stack([in_query, in_key.sqrt(), in_value.sqrt()]), self.left_out / max(1, self.tiles)
        )
