"""Golub–Kahan–Lanczos bidiagonalisation of a batch of Jacobians, with the right basis kept orthonormal.

After m steps from v₁:  J V = U B,  Jᵀ U = V Bᵀ + β v_{m+1} e_mᵀ,  with B upper bidiagonal (α on the diagonal, β above)
until a thick restart puts a diagonal block and one full column in front [1, 2].

Reorthogonalising V alone is enough: J V = U B holds by construction, so an orthonormal V makes BᵀB the Rayleigh
quotient of JᵀJ, and U inherits its orthogonality up to the condition of B [3]. It is the cheaper half when V has the
shorter vectors. After a restart, which mixes the left vectors, or where α is small, U is reorthogonalised too, and from
then on where more than rounding has to be taken away from a right vector: maps with a null space, as every
normalisation has one, make B so ill-conditioned that U loses orthogonality within twenty steps. The part that
reorthogonalisation removes from a vector is the error of the relations above; it is added up for the upper bound.

A small β is no proof that the space is exhausted: rounding may hide a direction. The process continues along the
remainder, be it rounding, and only β = 0 ends it; the upper bound decides when the accuracy is reached.

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
from torch.nn.functional import pad

from howsmooth.norms.counted_products import FlatProducts, not_finite, overlaps, quick_lengths
from howsmooth.norms.lanczos_bound import RitzProjection

_FIRST_CAPACITY = 32
_NOTHING = 1e-2  # in eps of the map's size: rounding leaves more, unless the arithmetic happened to be exact
_SHORT = 0.1  # of the map's size: below this, a left vector may have lost its orthogonality
_DRIFTED = 16.0  # in eps of the map's size: when more is taken away from a right vector, the left ones have lost theirs


class Bidiagonalisation:
    """The growing factorisation of all maps still running.

    Attributes:
        size: m, the number of basis vectors on each side (v_{m+1} waits in the right basis).
        beta: the last β of every map, float64 on the CPU; zero where nothing at all was left.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> products = FlatProducts(MatrixOperator(torch.diag(torch.tensor([3.0, 4.0])).double()))
    >>> process = Bidiagonalisation(products, torch.tensor([[0.6, 0.8]], dtype=torch.float64), torch.Generator())
    >>> process.step()
    >>> process.step()
    >>> [round(float(s), 12) for s in process.project().theta[0]]
    [4.0, 3.0]
    """

    def __init__(self, products: FlatProducts, start: Tensor, generator: torch.Generator):
        op, maps = products.op, len(start)
        capacity = min(_FIRST_CAPACITY, op.in_size)
        self.products, self.generator = products, generator
        self.size = self._made = 0
        self.beta, self._scale = torch.zeros(2, maps, dtype=torch.float64)
        self._right = start.new_empty(maps, capacity + 1, op.in_size)
        self._left = start.new_empty(maps, capacity, op.out_size)
        self._b = torch.zeros(maps, capacity, capacity, dtype=torch.float64)
        self._right[:, 0] = start
        self._first: Tensor | None = products.calibrated(start)
        self._drift = torch.zeros(2, maps, capacity, dtype=torch.float64)  # the length removed from each u and v
        self._follows_left = False  # whether J v_m meets the left basis in its last vector only
        self._both = False  # whether left vectors are to be reorthogonalised too

    def step(self) -> None:
        """One more vector in both bases: one product with J and one with Jᵀ."""
        self.step_left()
        self.step_right()

    def step_left(self) -> None:
        """The first half of a step: one product with J."""
        m = self.size
        if m == self._left.shape[1]:
            self._grow()
        v = self._right[:, m]
        u, self._first = self.products.matvec(v) if self._first is None else self._first, None
        if self._follows_left:
            u = torch.addcmul(u, self.beta.to(u)[:, None], self._left[:, m - 1], value=-1)
        elif m:
            u = u - torch.bmm(self._b[:, None, :m, m].to(u), self._left[:, :m]).squeeze(1)
        short = self._both or bool((quick_lengths(u) < _SHORT * self._scale).any())
        self._left[:, m], self._b[:, m, m] = self._orthonormal(u, self._left[:, : m if short else 0], side=0)
        if self._follows_left:
            self._b[:, m - 1, m] = self.beta

    def step_right(self) -> None:
        """The second half: one product with Jᵀ."""
        m = self.size
        u, v, alpha = self._left[:, m], self._right[:, m], self._b[:, m, m]
        w = torch.addcmul(self.products.rmatvec(u), alpha.to(u)[:, None], v, value=-1)
        self._right[:, m + 1], self.beta = self._orthonormal(w, self._right[:, : m + 1], side=1)
        self.size, self._follows_left = m + 1, True
        self._made += 1

    def project(self) -> RitzProjection:
        """The singular value decomposition of B."""
        return RitzProjection.of(
            self._b[:, : self.size, : self.size], self.beta, self._made, self._drift[..., : self.size]
        )

    def project_halfway(self) -> RitzProjection:
        """That of B̂, between the two halves of a step."""
        m = self.size + 1
        left = self._left[:, :m]
        skew = overlaps(left, left).cpu() - torch.eye(m, dtype=torch.float64)
        drift = self._drift[..., :m].clone()
        drift[1, :, -1] = 0
        return RitzProjection.halfway(self._b[:, :m, :m], torch.linalg.matrix_norm(skew), self._made + 1, drift)

    def right_vectors(self, small: RitzProjection, maps: Tensor, k: int) -> Tensor:
        """The k leading right Ritz vectors of the running maps chosen by the mask: ``(chosen, k, in_size)``."""
        return self._combined(small.right[..., :k], self._right, maps)

    def images(self, small: RitzProjection, maps: Tensor, k: int) -> Tensor:
        """J v = U B q of those vectors, up to the errors of the products behind U: ``(chosen, k, out_size)``."""
        m = small.right.shape[1]
        return self._combined(self._b[:, :m, :m] @ small.right[..., :k], self._left, maps)

    def refresh(self, maps: Tensor) -> None:
        """Where the space is invariant, go on from a random direction orthogonal to it."""
        m = self.size
        nothing = self._right.new_zeros(int(maps.sum()), self._right.shape[-1])
        self._right[maps, m] = orthonormalised(nothing, self._right[maps, :m], self.generator)

    def restart(self, small: RitzProjection, keep: int) -> None:
        """Thick restart: the ``keep`` largest Ritz triplets lead the bases, v_{m+1} stays the next vector."""
        left = self._combined(small.left[..., :keep], self._left)
        right = self._combined(small.right[..., :keep], self._right)
        next_right = self._right[:, self.size].clone()
        self._left[:, :keep], self._right[:, :keep], self._right[:, keep] = left, right, next_right
        self._b.zero_()
        self._b[:, :keep, :keep] = torch.diag_embed(small.theta[:, :keep])
        self._b[:, :keep, keep] = small.residuals[:, :keep]
        self.size, self._follows_left, self._both = keep, False, True
        self._made += keep  # the rotation rounds like one more product each
        self._drift[..., 0] = self._drift.norm(dim=-1)  # a rotation keeps the sum of the squares
        self._drift[..., 1:] = 0

    def keep(self, mask: Tensor) -> None:
        """Go on with the maps where ``mask`` is true."""
        self.products.keep(mask)
        self._left, self._right = _moved_up(self._left, mask, self.size), _moved_up(self._right, mask, self.size + 1)
        self._b, self.beta, self._scale = self._b[mask], self.beta[mask], self._scale[mask]
        self._drift = self._drift[:, mask]

    def _combined(self, coefficients: Tensor, basis: Tensor, maps: Tensor | None = None) -> Tensor:
        chosen = slice(None) if maps is None or maps.all() else maps  # a slice does not copy the basis
        some = basis[chosen, : coefficients.shape[1]]
        return torch.bmm(coefficients[chosen].mT.to(some), some)

    def _orthonormal(self, x: Tensor, basis: Tensor, side: int) -> tuple[Tensor, Tensor]:
        length = quick_lengths(x)
        self._scale = torch.maximum(self._scale, length)
        if not torch.isfinite(self._scale).all():
            raise not_finite(self.products.op)
        if basis.shape[1] >= basis.shape[2]:  # the basis spans everything: the remainder is rounding
            unit, length, removed = torch.zeros_like(x), torch.zeros_like(length), length
        else:
            floor = _NOTHING * torch.finfo(x.dtype).eps * self._scale
            unit, length, removed = _orthonormalise(x, length, basis, floor)
        self._drift[side, :, self.size] = removed
        drifted = _DRIFTED * torch.finfo(x.dtype).eps * self._scale
        self._both |= side == 1 and bool((removed > drifted).any())
        return unit, length

    def _grow(self) -> None:
        more = min(self.size, self._right.shape[-1] - self.size)
        self._left, self._right = pad(self._left, (0, 0, 0, more)), pad(self._right, (0, 0, 0, more))
        self._b, self._drift = pad(self._b, (0, more, 0, more)), pad(self._drift, (0, more))


def _moved_up(basis: Tensor, mask: Tensor, used: int) -> Tensor:
    """The bases of the maps where ``mask`` is true, moved to the front of the same memory."""
    index = mask.nonzero().flatten().tolist()
    for target, source in enumerate(index):
        if target != source:
            basis[target, :used] = basis[source, :used]
    return basis[: len(index)]


def orthonormalised(x: Tensor, basis: Tensor, generator: torch.Generator) -> Tensor:
    """Unit vectors orthogonal to the bases ``(maps, m, size)``: along x where a part of x remains, else random."""
    nothing = torch.zeros(len(x), dtype=torch.float64)
    unit, length, _ = _orthonormalise(x, quick_lengths(x), basis, nothing)
    dead = length == 0
    if dead.any():
        w = torch.randn(int(dead.sum()), x.shape[-1], generator=generator, dtype=x.dtype).to(x.device)
        index = dead.to(x.device)
        unit[index], *_ = _orthonormalise(w, quick_lengths(w), basis[index], nothing[dead])
    return unit


def _orthonormalise(x: Tensor, length: Tensor, basis: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (of this length) minus its part in the span of the basis: unit vector and length, both zero up to ``floor``.

    The third is the length of that part. Gram–Schmidt, repeated while it removes a large part: twice is enough
    (Daniel, Gragg, Kaufman & Stewart 1976), once more when the remainder is rounding.
    """
    removed = torch.zeros_like(length)
    for _ in range(4 if basis.shape[1] else 0):
        shares = overlaps(basis, x.unsqueeze(1))
        x = x - torch.bmm(shares.mT.to(x), basis).squeeze(1)
        before, length = length, quick_lengths(x)
        removed = removed + quick_lengths(shares.squeeze(-1))
        if ((length >= 0.7 * before) | (length <= floor)).all():
            break
    alive = length > floor
    inverse = torch.where(alive, 1 / length, 0.0)
    return x * inverse.to(x)[:, None], torch.where(alive, length, 0.0), removed
