r"""Tiles of attention weights that may be left out, and how much of the Jacobian goes with them.

Trained heads leave most of a long input nearly unseen. With D the entries of some tiles of P, everything else unchanged
(outputs o_i and sums of rows are those of all entries), products without D lose

.. math:: E\,(dq, dk, dv)_i = \sum_{j\in D_i} P_{ij}\,(dq_i\cdot k_j + q_i\cdot dk_j)\,(v_j - o_i)
                              + \sum_{j\in D_i} P_{ij}\,dv_j,

with D = ∂P in place of P under a soft-cap or sigmoid, which is no larger. Let tile (I, J) have the sizes

- in dq, which is block diagonal in i: :math:`a_{IJ} = \max_{i\in I} (\sum_{j\in J} P_{ij}|k_j|^2)^{1/2}
  (\sum_{j\in J} P_{ij}|(v_j - o_i)W_O|^2)^{1/2}`, by Cauchy–Schwarz;
- in dk, where the blocks are numbers :math:`P_{ij}|q_i||(v_j - o_i)W_O|` times a projection: their Frobenius norm
  :math:`b_{IJ}`;
- in dv, where it is :math:`P_D \otimes W_VW_O`: the Frobenius norm :math:`c_{IJ}` of the weights.

The norm of a matrix of blocks is at most that of the matrix of their norms, so without the tiles of a set S

.. math:: \|E\| \le \varepsilon = N_q\max_I\sum_{J: IJ\in S} a_{IJ} + N_k\,\|b_S\|_2 + N_v\,\|c_S\|_2

with bounds N_q, N_k, N_v on the maps from tokens to dq, dk and (through W_O) dv. It is gathered while the weights are
evaluated once and does not depend on any random start. By Weyl's inequality :math:`|\sigma(J - E) - \sigma(J)| \le
\varepsilon`; `howsmooth.norms.deflation` makes far more of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_OF_SUMS = 1 + 1e-3
"""For the rounding of the sums, of positive numbers in single precision."""
_LARGEST_MATRIX = 512
"""Up to so many tiles on a side the norm of the matrix of sizes is computed, beyond it bounded by Schur's test."""


@dataclass(frozen=True)
class LeftOut:
    """What was left out of every map: bounds in dq, dk and dv, ``(3, maps)``, and the share of all tiles."""

    sizes: Tensor
    share: float

    def select(self, index: Tensor) -> LeftOut:
        """That of some maps."""
        return LeftOut(self.sizes[:, index], self.share)


@dataclass(frozen=True)
class TileSizes:
    """The map, the row and the column of every tile, ``(3, tiles)``, and its sizes a, b, c, ``(3, tiles)``."""

    places: Tensor
    sizes: Tensor

    def least(self, norms: Tensor, budget: Tensor) -> Tensor:
        """The tiles of every map, least first, that stay within its budget together; norms: N_q, N_k, N_v."""
        gone = torch.zeros(self.sizes.shape[1], dtype=torch.bool)
        for m, most in enumerate(budget.tolist()):
            here = (self.places[0] == m).nonzero().flatten()
            order = here[(norms[:, m, None] * self.sizes[:, here]).sum(0).argsort()]
            low, high = 0, len(order)
            while low < high:
                middle = (low + high + 1) // 2
                within = float((norms[:, m] * self._bounds(order[:middle], exact=False)).sum()) <= most
                low, high = (middle, high) if within else (low, middle - 1)
            gone[order[:low]] = True
        return gone

    def left_out(self, gone: Tensor, maps: int) -> LeftOut:
        """The bounds for a set of tiles."""
        index = gone.nonzero().flatten()
        parts = [self._bounds(index[self.places[0, index] == m], exact=True) for m in range(maps)]
        return LeftOut(_OF_SUMS * torch.stack(parts, dim=1), len(index) / max(1, len(gone)))

    def _bounds(self, index: Tensor, exact: bool) -> Tensor:
        """The three bounds of some tiles of one map."""
        _, rows, columns = self.places[:, index]
        side = int(self.places[1:].max()) + 1
        by_row = torch.zeros(3, side, dtype=torch.float64).index_add_(1, rows, self.sizes[:, index])
        by_column = torch.zeros(3, side, dtype=torch.float64).index_add_(1, columns, self.sizes[:, index])
        most = by_row.amax(1)
        norms = (most * by_column.amax(1)).sqrt()
        if exact and side <= _LARGEST_MATRIX:
            matrix = torch.zeros(3, side, side, dtype=torch.float64)
            matrix[:, rows, columns] = self.sizes[:, index]
            norms = torch.minimum(norms, torch.linalg.matrix_norm(matrix, 2))
        return torch.stack([most[0], norms[1], norms[2]])


class TileSums:
    """The sizes of tiles, gathered band by band: the outputs o_i are known when a band of queries is complete.

    Values are taken as W_O sees them: v R with W_Oᵀ = Q R has the lengths of v W_O.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, output_weight: Tensor, centred: bool):
        triangle = torch.linalg.qr(output_weight.to(value).mT).R
        values = value @ triangle.mT.repeat(len(value) // len(triangle), 1, 1)
        squares = [t.square().sum(-1, keepdim=True) for t in (values, key)]
        self.query = query.square().sum(-1).double()
        self.by_key = torch.cat([values, squares[0], torch.ones_like(squares[0]), squares[1]], dim=-1)
        self.width, self.centred = values.shape[-1], centred
        self.rounding = 4 * value.shape[1] ** 0.5 * torch.finfo(value.dtype).eps
        self.band: list[tuple[tuple[slice, slice], tuple[int, int, int], Tensor, Tensor]] = []
        self.places: list[tuple[int, int, int]] = []
        self.sizes: list[Tensor] = []

    def add(
        self, queries: tuple[slice, slice], keys: tuple[slice, slice], place: tuple[int, int, int], weights: Tensor
    ) -> None:
        """Take in the weights of a tile of one map."""
        summands = self.by_key[keys]
        lone = torch.bmm(weights.square(), summands[..., :-1])
        self.band.append((queries, place, torch.bmm(weights, summands)[0].double(), lone[0].double()))

    def close(self) -> None:
        """The band is complete."""
        if not self.band:
            return
        (maps, rows), *_ = self.band[0]
        total: Tensor = sum((sums for _, _, sums, _ in self.band), torch.zeros(()))
        output = total[:, : self.width] / total[:, self.width + 1, None].clamp_min(1e-30)
        output = output if self.centred else torch.zeros_like(output)
        query = self.query[maps.start, rows]
        for _, place, sums, lone in self.band:
            apart, alone = self._apart(sums, output), self._apart(lone, output)
            in_query = (sums[:, -1] * apart).amax().sqrt()
            in_key, in_value = (query * alone).sum().sqrt(), lone[:, -1].sum().sqrt()
            self.sizes.append(torch.stack([in_query, in_key, in_value]))
            self.places.append(place)
        self.band.clear()

    def _apart(self, sums: Tensor, output: Tensor) -> Tensor:
        """Σ_j w_ij |v_j − o_i|² from Σ w v, Σ w |v|² and Σ w; never too small."""
        mean, square, mass = sums[:, : self.width], sums[:, self.width], sums[:, self.width + 1]
        far = output.square().sum(-1) * mass
        return (square - 2 * (output * mean).sum(-1) + far).clamp_min(0.0) + self.rounding * (square + far)

    def tile_sizes(self) -> TileSizes:
        """What has been gathered."""
        return TileSizes(torch.tensor(self.places).reshape(-1, 3).mT.contiguous(), torch.stack(self.sizes, dim=1).cpu())
