"""Golub–Kahan–Lanczos bidiagonalisation of a batch of Jacobians, with the right basis kept orthonormal.

After m steps from v₁:  J V = U B,  Jᵀ U = V Bᵀ + β v_{m+1} e_mᵀ,  with B upper bidiagonal (α on the diagonal, β above)
until a thick restart puts a diagonal block and one full column in front [1, 2].

Reorthogonalising V alone is enough: J V = U B holds by construction, so an orthonormal V makes BᵀB the Rayleigh
quotient of JᵀJ, and U inherits its orthogonality up to the condition of B [3]. It is the cheaper half when V has the
shorter vectors. After a restart, which mixes the left vectors, U is reorthogonalised too.

References:
    [1] G. Golub, W. Kahan, "Calculating the singular values and pseudo-inverse of a matrix", SIAM J. Numer. Anal. 2
        (1965).
    [2] J. Baglama, L. Reichel, "Augmented implicitly restarted Lanczos bidiagonalization methods", SIAM J. Sci. Comput.
        27 (2005).
    [3] H. Simon, H. Zha, "Low-rank matrix approximation using the Lanczos bidiagonalization process with applications",
        SIAM J. Sci. Comput. 21 (2000).
"""

from __future__ import annotations

import torch
from torch import Tensor

from howsmooth.norms.certificate import Projection
from howsmooth.norms.products import FlatProducts, not_finite

_FIRST_CAPACITY = 32


class Bidiagonalisation:
    """The growing factorisation of all maps still running.

    Attributes:
        size: m, the number of basis vectors on each side (v_{m+1} waits in the right basis).
        beta: the last β of every map, float64 on the CPU; zero where the space is invariant and holds no more.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> products = FlatProducts(MatrixOperator(torch.diag(torch.tensor([3.0, 4.0])).double()))
    >>> process = Bidiagonalisation(products, torch.tensor([[0.6, 0.8]], dtype=torch.float64), torch.Generator())
    >>> process.step()
    >>> process.step()
    >>> [round(float(s), 12) for s in process.project().theta[0]]
    [4.0, 3.0]
    """

    def __init__(self, products: FlatProducts, start: Tensor, generator: torch.Generator):
        op = products.op
        self.products, self.generator = products, generator
        self.size = 0
        self.beta = torch.zeros(len(start), dtype=torch.float64)
        self._right = start.new_empty(len(start), min(_FIRST_CAPACITY, op.in_size) + 1, op.in_size)
        self._left = start.new_empty(len(start), min(_FIRST_CAPACITY, op.in_size), op.out_size)
        self._b = torch.zeros(len(start), *(2 * (self._left.shape[1],)), dtype=torch.float64)
        self._right[:, 0] = start
        self._scale = torch.zeros(len(start), dtype=torch.float64)
        self._follows_left = False  # whether J v_m meets the left basis in its last vector only
        self._restarted = False

    def step(self) -> None:
        """One more vector in both bases: one product with J and one with Jᵀ."""
        m = self.size
        if m == self._left.shape[1]:
            self._grow()
        v = self._right[:, m]
        u = self.products.matvec(v)
        if self._follows_left:
            u = torch.addcmul(u, self.beta.to(u)[:, None], self._left[:, m - 1], value=-1)
        u, alpha = self._orthonormal(u, self._left[:, : m if self._restarted else 0])
        w = torch.addcmul(self.products.rmatvec(u), alpha.to(u)[:, None], v, value=-1)
        w, beta = self._orthonormal(w, self._right[:, : m + 1])
        if self._follows_left:
            self._b[:, m - 1, m] = self.beta
        self._b[:, m, m] = alpha
        self._left[:, m], self._right[:, m + 1] = u, w
        self.beta, self.size, self._follows_left = beta, m + 1, True

    def project(self) -> Projection:
        """The singular value decomposition of B."""
        return Projection.of(self._b[:, : self.size, : self.size], self.beta)

    def right_vectors(self, small: Projection, maps: Tensor, k: int) -> Tensor:
        """The k leading right Ritz vectors of the running maps chosen by the mask: ``(chosen, k, in_size)``."""
        chosen = slice(None) if bool(maps.all()) else maps  # a slice does not copy the basis
        return _combine(small.right[chosen, :, :k], self._right[chosen, : self.size])

    def refresh(self, maps: Tensor) -> None:
        """Where the space is invariant, go on from a random direction orthogonal to it."""
        m = self.size
        w = torch.randn(int(maps.sum()), self._right.shape[-1], generator=self.generator, dtype=self._right.dtype)
        w = w.to(self._right.device)
        self._right[maps, m], _ = _orthonormalise(w, _norm(w), self._right[maps, :m], torch.zeros(len(w)))

    def restart(self, small: Projection, keep: int) -> None:
        """Thick restart: the ``keep`` largest Ritz triplets lead the bases, v_{m+1} stays the next vector."""
        left = _combine(small.left[..., :keep], self._left[:, : self.size])
        right = _combine(small.right[..., :keep], self._right[:, : self.size])
        next_right = self._right[:, self.size].clone()
        self._left[:, :keep], self._right[:, :keep], self._right[:, keep] = left, right, next_right
        self._b.zero_()
        self._b[:, :keep, :keep] = torch.diag_embed(small.theta[:, :keep])
        self._b[:, :keep, keep] = small.residuals[:, :keep]
        self.size, self._follows_left, self._restarted = keep, False, True

    def keep(self, mask: Tensor) -> None:
        """Go on with the maps where ``mask`` is true."""
        self.products.keep(mask)
        self._left, self._right = _moved_up(self._left, mask, self.size), _moved_up(self._right, mask, self.size + 1)
        self._b, self.beta, self._scale = self._b[mask], self.beta[mask], self._scale[mask]

    def _orthonormal(self, x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
        length = _norm(x)
        self._scale = torch.maximum(self._scale, length)
        if not bool(torch.isfinite(self._scale).all()):
            raise not_finite(self.products.op)
        if basis.shape[1] >= basis.shape[2]:  # the basis spans everything: what is left is rounding
            return torch.zeros_like(x), torch.zeros_like(self._scale)
        info = torch.finfo(x.dtype)
        return _orthonormalise(x, length, basis, (10 * info.eps * self._scale).clamp_min(info.tiny))

    def _grow(self) -> None:
        more = min(self.size, self._right.shape[-1] - self.size)
        self._left = torch.cat([self._left, self._left.new_empty(len(self.beta), more, self._left.shape[-1])], 1)
        self._right = torch.cat([self._right, self._right.new_empty(len(self.beta), more, self._right.shape[-1])], 1)
        self._b = torch.nn.functional.pad(self._b, (0, more, 0, more))


def _moved_up(basis: Tensor, mask: Tensor, used: int) -> Tensor:
    """The bases of the maps where ``mask`` is true, moved to the front of the same memory."""
    index = mask.nonzero().flatten().tolist()
    for place, source in enumerate(index):
        if place != source:
            basis[place, :used] = basis[source, :used]
    return basis[: len(index)]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).cpu()


def _combine(coefficients: Tensor, basis: Tensor) -> Tensor:
    return torch.bmm(coefficients.mT.to(basis), basis)


def _orthonormalise(x: Tensor, length: Tensor, basis: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """x (of this length) minus its part in the span of the basis: unit vector and length, both zero up to ``floor``.

    Gram–Schmidt, repeated while it removes a large part: twice is enough (Daniel, Gragg, Kaufman & Stewart 1976).
    """
    for _ in range(3 if basis.shape[1] else 0):
        x = x - torch.bmm(torch.bmm(basis, x.unsqueeze(-1)).mT, basis).squeeze(1)
        before, length = length, _norm(x)
        if bool(((length >= 0.7 * before) | (length <= floor)).all()):
            break
    alive = length > floor
    inverse = torch.where(alive, 1 / length, 0.0)
    return x * inverse.to(x)[:, None], torch.where(alive, length, 0.0)
