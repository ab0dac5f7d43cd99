"""The n × n blocks of an attention Jacobian: J_ij, how output token i moves when input token j moves.

In one head, with D the slopes of the weights (see `howsmooth.jacobians.softmax_products`), M the derivatives of the
token stages and W the output matrix,

    J_ij = W [ P_ij M^v_j + D_ij (v_j − o_i)(q_iᵀ M^k_j) ] + δ_ij W Σ_l D_il (v_l − o_i)(k_lᵀ M^q_i),

(o_i only for softmax weights). A product with all blocks of one query takes O(n) head vectors and no n × n × width
product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.jacobians.attention_operator import AttentionJacobian
from howsmooth.jacobians.operator import Accuracy, JacobianOperator
from howsmooth.jacobians.tiles import Tile


class TokenBlocks(JacobianOperator):
    """The blocks J_ij for the queries ``rows`` and all keys, as a batch of d × d maps.

    Batch shape ``(rows, n)``, or ``(rows, heads, n)`` when the parent works head by head. The parent must hold a single
    input.
    """

    def __init__(self, parent: AttentionJacobian, rows: slice):
        mixing = parent.mixing
        everyone = slice(0, len(mixing.query))
        n = mixing.query.shape[1]
        weights, slopes = mixing.weights_of(Tile(everyone, rows, slice(0, n)))
        slopes = torch.zeros_like(slopes) if parent.path == "value" else slopes
        weights = torch.zeros_like(weights) if parent.path == "score" else weights
        self.query = mixing.query[:, rows].transpose(0, 1)[:, :, None]  # (rows, heads, 1, k)
        self.weights = weights.transpose(0, 1)[..., None]  # (rows, heads, n, 1)
        self.slopes = slopes.transpose(0, 1)[..., None]
        self.value = mixing.value  # (heads, n, v)
        self.centre = mixing.output[:, rows].transpose(0, 1)[:, :, None]  # (rows, heads, 1, v)
        if not mixing.softmax:
            self.centre = torch.zeros_like(self.centre)
        spread = self.slopes * (self.value - self.centre)  # (rows, heads, n, v)
        self.pull = mixing.key.mT @ spread  # Σ_l D_il k_l (v_l − o_i)ᵀ, (rows, heads, k, v)
        tokens = torch.arange(rows.start, rows.stop, device=weights.device)
        self.diagonal = tokens - rows.start, slice(None), tokens  # (row i, every head, key i) of (rows, heads, n, ·)
        self.parent, self.projection = parent, parent.projection
        self.by_head = parent.by_head
        count = rows.stop - rows.start
        self.batch_shape = torch.Size([count, len(mixing.query), n] if self.by_head else [count, n])
        self.in_shape, self.out_shape = parent.in_shape[1:], parent.out_shape[1:]
        self.dtype, self.device, self.method = parent.dtype, parent.device, parent.method
        longer = max(1.0, n / max(1, mixing.chain))  # sums are over all tokens here, not by tiles
        error = torch.as_tensor(parent.accuracy.product) * longer**0.5
        self.accuracy = Accuracy(parent.accuracy.point, error.reshape(-1, 1) if self.by_head else error.reshape(()))

    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        heads = zip(self.parent.chains, self.projection.into_heads(v), strict=True)
        query, key, value = (chain.jvp(self._split(t)) for chain, t in heads)
        mixed = self.weights * value
        mixed += self.slopes * (self.query * key).sum(-1, keepdim=True) * (self.value - self.centre)
        mixed[self.diagonal] += (query[self.diagonal][..., None, :] @ self.pull).squeeze(-2)
        return self.projection.combine(self._join(mixed))

    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        grad = self._split(self.projection.distribute(u))
        gvalue = self.weights * grad
        along = self.slopes * (grad * (self.value - self.centre)).sum(-1, keepdim=True)
        gkey = along * self.query
        gquery = torch.zeros_like(gkey)
        gquery[self.diagonal] = (self.pull @ grad[self.diagonal][..., None]).squeeze(-1)
        heads = zip(self.parent.chains, (gquery, gkey, gvalue), strict=True)
        return self.projection.from_heads(*(self._join(chain.vjp(t)) for chain, t in heads))

    def _split(self, tensor: Tensor) -> Tensor:
        return tensor if self.by_head else tensor.unflatten(0, (self.batch_shape[0], -1))

    def _join(self, tensor: Tensor) -> Tensor:
        return tensor if self.by_head else tensor.flatten(0, 1)
