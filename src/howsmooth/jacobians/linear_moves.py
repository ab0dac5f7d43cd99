"""Jacobians of maps that move numbers about, and of sums of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.jacobians.operator import JacobianOperator
from howsmooth.numerics.spectral_norms import spectral_bound


class MoveJacobian(JacobianOperator):
    """y = factor · x.flat[index], with nothing where the index is −1; built at tokens x ``(…, n, d)``.

    >>> J = MoveJacobian(torch.zeros(2, 1), torch.tensor([[1, 1], [-1, 0]]))
    >>> J.matvec(torch.tensor([[3.0], [5.0]])), J.rmatvec(torch.ones(2, 2))
    (tensor([[5., 5.],
            [0., 3.]]), tensor([[1.],
            [2.]]))
    """

    method = "closed form"

    def __init__(self, x: Tensor, index: Tensor, factor: Tensor | None = None):
        self.batch_shape, self.in_shape, self.out_shape = x.shape[:-2], x.shape[-2:], index.shape
        self.dtype, self.device = x.dtype, x.device
        self.index, self.absent = index.clamp_min(0).to(x.device), (index < 0).to(x.device)
        self.factor = None if factor is None else factor.detach().to(x)
        self._like = x.new_empty(0)

    def matvec(self, v: Tensor) -> Tensor:
        y = v.to(self.dtype).flatten(-2)[..., self.index].masked_fill(self.absent, 0.0)
        return y if self.factor is None else y * self.factor

    def rmatvec(self, u: Tensor) -> Tensor:
        u = u.to(self.dtype) if self.factor is None else u.to(self.dtype) * self.factor
        flat = u.masked_fill(self.absent, 0.0).flatten(-2)
        back = flat.new_zeros(*flat.shape[:-1], self.in_size)
        return back.index_add_(-1, self.index.flatten(), flat).unflatten(-1, self.in_shape)

    def size(self) -> Tensor:
        """√(largest sum of squared factors with which a number comes in)."""
        weight = (
            torch.ones(self.index.shape, dtype=torch.float64) if self.factor is None else self.factor.double().cpu()
        )
        weight = weight.square().masked_fill(self.absent.cpu(), 0.0).flatten()
        columns = torch.zeros(self.in_size, dtype=torch.float64).index_add_(0, self.index.cpu().flatten(), weight)
        return columns.max().sqrt().expand(self.batch_shape)

    def rounded(self, dtype: torch.dtype) -> MoveJacobian:
        like = torch.empty((*self.batch_shape, *self.in_shape), dtype=dtype, device=self.device)
        index = self.index.masked_fill(self.absent, -1)
        return MoveJacobian(like, index, self.factor)

    def subset(self, index: Tensor) -> MoveJacobian:
        like = torch.empty((len(index), *self.in_shape), dtype=self.dtype, device=self.device)
        return MoveJacobian(like, self.index.masked_fill(self.absent, -1), self.factor)


class MixJacobian(JacobianOperator):
    """y = M x, every token a sum of tokens; built at tokens x ``(…, n, d)``.

    >>> MixJacobian(torch.zeros(2, 3), torch.full((1, 2), 0.5)).matvec(torch.ones(2, 3))
    tensor([[1., 1., 1.]])
    """

    method = "closed form"

    def __init__(self, x: Tensor, matrix: Tensor):
        self.batch_shape, self.in_shape = x.shape[:-2], x.shape[-2:]
        self.out_shape = torch.Size((len(matrix), x.shape[-1]))
        self.dtype, self.device, self.matrix = x.dtype, x.device, matrix

    def matvec(self, v: Tensor) -> Tensor:
        return self.matrix @ v.to(self.dtype)

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.matrix.mT @ u.to(self.dtype)

    def size(self) -> Tensor:
        return torch.as_tensor(spectral_bound(self.matrix)).double().cpu().expand(self.batch_shape)

    def rounded(self, dtype: torch.dtype) -> MixJacobian:
        like = torch.empty((*self.batch_shape, *self.in_shape), dtype=dtype, device=self.device)
        return MixJacobian(like, self.matrix.to(dtype))

    def subset(self, index: Tensor) -> MixJacobian:
        like = torch.empty((len(index), *self.in_shape), dtype=self.dtype, device=self.device)
        return MixJacobian(like, self.matrix)
