"""Spectral norms of weights: warm-started in training, exact at evaluation, differentiable in both."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from howsmooth.jacobians.checks import check_finite
from howsmooth.nn.base import without_autocast

_START = 30
_REMEMBERED = 512


class SpectralNorm(nn.Module):
    """‖M‖₂ of one matrix that changes slowly, as ⟨u, Mv⟩ with u, v held fixed: its gradient uvᵀ is that of the norm.

    **In training** a subspace of ``width`` vectors follows M by one step of orthogonal iteration for every call, and v
    is the vector in it that M stretches most: an **estimate**, never above ‖M‖ but for rounding. One vector alone (the
    power method) falls behind, because training pushes singular values together: in trials at width 64 it was 80 % off
    for the product of two norms, 32 vectors less than 0.1 %. **In evaluation** u and v come from a singular value
    decomposition in float64 (`top_singular_vectors`), and the value is exact up to the rounding of the product.

    >>> norm, matrix = SpectralNorm(3, 2).eval(), torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    >>> norm(matrix)
    tensor(4.)
    """

    space: Tensor

    def __init__(self, rows: int, columns: int, width: int = 32):
        super().__init__()
        start = torch.randn(columns, min(width, rows, columns), generator=torch.Generator().manual_seed(rows))
        self.register_buffer("space", torch.linalg.qr(start).Q)

    def forward(self, matrix: Tensor, follow: bool = True) -> Tensor:
        """The norm of ``matrix``, ``(rows, columns)``; without ``follow`` the subspace stays where it is."""
        with without_autocast(matrix):
            if self.training:
                if follow:
                    self.follow(matrix, steps=1)
                left, right = self._ritz(matrix)
            else:
                left, right = top_singular_vectors(matrix.detach())
            return left @ (matrix @ right)

    @torch.no_grad()
    def follow(self, matrix: Tensor, steps: int = _START) -> None:
        """Bring the subspace closer to a new matrix, from wherever it is."""
        space = self.space.to(matrix.dtype)
        for _ in range(steps):
            space = torch.linalg.qr(matrix.mT @ (matrix @ space)).Q
        self.space.copy_(space)

    @torch.no_grad()
    def _ritz(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        space = self.space.to(matrix.dtype)
        images = matrix @ space
        gram = (images.mT @ images).nan_to_num()  # weights that are NaN give NaN in the end, without an error here
        right = space @ torch.linalg.eigh(gram).eigenvectors[:, -1]
        left = matrix @ right
        return left / left.norm().clamp(min=torch.finfo(left.dtype).tiny), right


@torch.library.custom_op("howsmooth::top_singular_vectors", mutates_args=())
def top_singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vectors u, v with Mv = ‖M‖u, in float64 and then in the dtype of M.

    The last few hundred matrices are remembered by their content, so that weights which do not change are decomposed
    once. An operator of its own, so that `torch.compile` takes it as it is.

    >>> left, right = top_singular_vectors(torch.diag(torch.tensor([1.0, 5.0])))
    >>> left.abs(), right.abs()
    (tensor([0., 1.]), tensor([0., 1.]))
    """
    key = fingerprint(matrix)
    found = _DECOMPOSED.get(key)
    if found is None:
        check_finite(matrix, "a weight of the layer, or a product of weights,")
        left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        found = left[:, 0].to(matrix.dtype), right[0].to(matrix.dtype)
        _DECOMPOSED[key] = found
        while len(_DECOMPOSED) > _REMEMBERED:
            _DECOMPOSED.popitem(last=False)
    return found[0].clone(), found[1].clone()


@top_singular_vectors.register_fake
def _(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return matrix.new_empty(matrix.shape[0]), matrix.new_empty(matrix.shape[1])


_DECOMPOSED: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()


def fingerprint(matrix: Tensor) -> tuple[object, ...]:
    """A key that changes with the content: version counters would miss changes made through ``.data``.

    >>> a = torch.eye(2)
    >>> before = fingerprint(a)
    >>> a.data[0, 1] = 1e-3
    >>> fingerprint(a) == before
    False
    """
    rows, columns = (torch.arange(1, size + 1, device=matrix.device).to(matrix.dtype) for size in matrix.shape)
    sums = [float(rows.sin() @ (matrix @ columns.sin())), float(rows.cos() @ (matrix @ columns.cos()))]
    return tuple(matrix.shape), matrix.dtype, str(matrix.device), *sums, float(matrix.norm())
