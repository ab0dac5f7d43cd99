r"""Spectral norms of weights and caps on them, by a subspace that follows a matrix from step to step.

`SpectralNorm` is a warm-started estimate in training and exact at evaluation, differentiable in both. `SpectralCaps`
clips singular values at a cap c after every step of the optimiser: the projection of M on
:math:`\{\|M\|_2 \le c\}` is :math:`M - \sum_i(\sigma_i - c)_+u_iv_i^\top`, for which those above c are enough.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from howsmooth._util.validation import Count, check_count, check_finite, check_positive, validated
from howsmooth.errors import InvalidInput
from howsmooth.nn.layers.attention_layer import without_autocast
from howsmooth.norms.small_matrices import spectral

_START = 30
_SETTLED = 1e-4


class SpectralNorm(nn.Module):
    """‖M‖₂ of one matrix that changes slowly, as ⟨u, Mv⟩ with u, v held fixed: its gradient uvᵀ is that of the norm.

    **In training** a subspace of ``width`` vectors follows M by orthogonal iteration; each call iterates until a step
    lengthens the longest image by less than one part in 10,000, and v is the vector of the subspace with the longest
    image: a **lower estimate** of ‖M‖ up to rounding. One step is enough while weights move slowly. The power method
    with a single vector is too slow, because training pushes singular values together. **In evaluation** u and v
    come from a singular value decomposition in float64, and the value is exact up to the rounding of the product.

    Args:
        rows, columns: of the matrix. width: of the subspace.
        steps: maximum number of steps in one call.

    >>> norm, matrix = SpectralNorm(3, 2).eval(), torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    >>> norm(matrix)
    tensor(4.)
    """

    space: Tensor

    @validated
    def __init__(self, rows: Count, columns: Count, width: Count = 32, steps: Count = _START):
        super().__init__()
        self.steps = steps
        start = torch.randn(columns, min(width, rows, columns), generator=torch.Generator().manual_seed(rows))
        self.register_buffer("space", torch.linalg.qr(start).Q)
        self.decomposition = CachedSingularVectors()

    def forward(self, matrix: Tensor, follow: bool = True) -> Tensor:
        """Return the norm of ``matrix``, ``(rows, columns)``; without ``follow`` the subspace stays unchanged."""
        with without_autocast(matrix):
            if self.training:
                space, left, right = follow_singular_space(matrix.detach(), self.space, self.steps if follow else 0)
                if follow:
                    with torch.no_grad():
                        self.space.copy_(space)
            else:
                left, right = top_singular_vectors(matrix.detach(), self.decomposition.number)
            return left @ (matrix @ right)

    @torch.no_grad()
    def follow(self, matrix: Tensor, steps: int = _START) -> None:
        """Adapt the subspace to a new matrix."""
        space = self.space.to(matrix.dtype)
        for _ in range(steps):
            space = torch.linalg.qr(matrix.mT @ (matrix @ space)).Q
        self.space.copy_(space)


@torch.library.custom_op("howsmooth::follow_singular_space", mutates_args=())
def follow_singular_space(matrix: Tensor, space: Tensor, max_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a subspace closer to the top right singular vectors of M, and u, v of its longest image.

    An operator of its own, because the number of steps depends on the values.

    >>> space, left, right = follow_singular_space(torch.diag(torch.tensor([1.0, 5.0])), torch.ones(2, 1) / 2**0.5, 30)
    >>> left.abs().round(decimals=2), right.abs().round(decimals=2)
    (tensor([0., 1.]), tensor([0., 1.]))
    """
    space = space.to(matrix.dtype, copy=True)
    images = matrix @ space
    size, turn = _longest(images)
    for _ in range(max_steps):
        space = torch.linalg.qr(matrix.mT @ images).Q
        images, before = matrix @ space, size
        size, turn = _longest(images)
        if not size > before * (1 + _SETTLED):
            break
    right = space @ turn
    left = matrix @ right
    return space.contiguous(), left / left.norm().clamp(min=torch.finfo(left.dtype).tiny), right


@follow_singular_space.register_fake
def _(matrix: Tensor, space: Tensor, max_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = matrix.shape
    return matrix.new_empty(space.shape), matrix.new_empty(rows), matrix.new_empty(columns)


def _longest(images: Tensor) -> tuple[float, Tensor]:
    """Return the length of the longest image of a unit vector of the subspace, and that vector."""
    gram = (images.mT @ images).nan_to_num()  # weights of NaN give a norm of NaN, without an error here
    squares, turns = torch.linalg.eigh(gram)
    return max(0.0, float(squares[-1])) ** 0.5, turns[:, -1]


class CachedSingularVectors:
    """The top singular vectors of one matrix, cached until a bit of the matrix changes.

    Version counters would miss changes made through ``.data``, and hashes may collide: the matrix itself is stored and
    compared. A copy starts empty, so that two modules never share a cache.
    """

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self._cached: tuple[Tensor, Tensor, Tensor] | None = None
        _ALIVE[self.number] = self

    def __deepcopy__(self, memo: object) -> CachedSingularVectors:
        return CachedSingularVectors()

    def __reduce__(self) -> tuple[type[CachedSingularVectors], tuple[()]]:
        return CachedSingularVectors, ()

    def of(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unit vectors u, v with Mv = ‖M‖u."""
        cached = self._cached  # one assignment, so that threads see complete entries
        if cached is None or not _same(cached[0], matrix):
            check_finite(matrix, "a weight of the layer, or a product of weights,")
            left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
            cached = matrix.detach().clone(), left[:, 0].to(matrix.dtype), right[0].to(matrix.dtype)
            self._cached = cached
        return cached[1].clone(), cached[2].clone()


_NUMBERS = itertools.count()
_ALIVE: weakref.WeakValueDictionary[int, CachedSingularVectors] = weakref.WeakValueDictionary()


def _same(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and torch.equal(one, other)


@torch.library.custom_op("howsmooth::top_singular_vectors", mutates_args=())
def top_singular_vectors(matrix: Tensor, cache_number: int) -> tuple[Tensor, Tensor]:
    """Compute the unit vectors u, v with Mv = ‖M‖u in float64, and return them in the dtype of M.

    An operator of its own, so that `torch.compile` does not trace it; ``cache_number`` is the number of the
    `CachedSingularVectors` that holds the previous matrix.

    >>> cache = CachedSingularVectors()
    >>> left, right = top_singular_vectors(torch.diag(torch.tensor([1.0, 5.0])), cache.number)
    >>> left.abs(), right.abs()
    (tensor([0., 1.]), tensor([0., 1.]))
    """
    # An exported graph may outlive the module it was made from.
    return _ALIVE.get(cache_number, CachedSingularVectors()).of(matrix)


@top_singular_vectors.register_fake
def _(matrix: Tensor, cache_number: int) -> tuple[Tensor, Tensor]:
    return matrix.new_empty(matrix.shape[0]), matrix.new_empty(matrix.shape[1])


_WIDTH = 16
_TOLERANCE = 1e-3
_FUSED = {"in_proj.weight": 0, "in_proj_weight": 0, "c_attn.weight": 1}
"""Names of matrices that hold query, key and value, and the axis along which they are stacked."""


class SpectralCaps:
    """Clips the singular values of a module's weight matrices at ``cap``: call `step` after every optimiser step.

    Queries, keys and values that share one matrix are capped one by one; embeddings are not capped. A matrix whose
    Frobenius norm is within the cap is skipped. For the others a subspace of 16 vectors follows M by a step of
    orthogonal iteration, and its singular values above the cap are clipped. **Exact decomposition** replaces it when
    the subspace has not converged (residual above 0.1 % of the cap) or all its values exceed the cap, every
    ``exact_every`` steps, and in `exact`. In between the largest singular value may exceed the cap by a direction that
    the subspace misses; after `exact` it does not, up to rounding.

    Args:
        module: owner of the matrices; embeddings and weights tied to them are excluded.
        cap: largest singular value.
        exact_every: number of steps between exact projections.

    >>> layer = nn.Linear(4, 4)
    >>> caps = SpectralCaps(layer, cap=0.1)
    >>> caps.step()
    >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 0.1 * (1 + 1e-5))
    True
    """

    @validated
    def __init__(self, module: nn.Module, cap: float = 1.0, exact_every: int = 100):
        self.cap = check_positive(cap, "cap")
        self.exact_every = check_count(exact_every, "exact_every")
        self._module = module
        self._spaces: dict[str, Tensor] = {}
        self._steps = 0
        self.exact_count = 0
        if not any(True for _ in self.matrices()):
            raise InvalidInput(f"this {type(module).__name__} has no weight matrices to cap.")

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of the capped matrices, and the matrices as views of parameters."""
        embedded = {m.weight.data_ptr() for m in self._module.modules() if isinstance(m, nn.Embedding)}
        for name, parameter in self._module.named_parameters():
            if parameter.dim() != 2 or parameter.data_ptr() in embedded:
                continue
            axis = next((axis for end, axis in _FUSED.items() if name.endswith(end)), None)
            if axis is None:
                yield name, parameter.detach()
            else:
                parts = parameter.detach().chunk(3, dim=axis)
                yield from ((f"{name}[{letter}]", each) for letter, each in zip("qkv", parts, strict=True))

    @torch.no_grad()
    def step(self) -> None:
        """Clip singular values that have exceeded the cap since the last step."""
        self._steps += 1
        if self._steps % self.exact_every == 0:
            return self.exact()
        for name, matrix in self.matrices():
            if not float(matrix.double().norm()) <= self.cap and not self._follow(name, matrix):
                self._clip(name, matrix)
        return None

    @torch.no_grad()
    def exact(self) -> None:
        """Clip every singular value above the cap, by decompositions in float64."""
        for name, matrix in self.matrices():
            self._clip(name, matrix)

    def norms(self) -> dict[str, float]:
        """Return the exact largest singular value of each matrix."""
        return {name: float(spectral(matrix.double())) for name, matrix in self.matrices()}

    def _clip(self, name: str, matrix: Tensor) -> None:
        check_finite(matrix, f"the weight {name}")
        left, sizes, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        self.exact_count += 1
        self._spaces[name] = right[:_WIDTH].mT.to(torch.promote_types(matrix.dtype, torch.float32))
        if bool(sizes[0] > self.cap):
            matrix.copy_((left * sizes.clamp(max=self.cap)) @ right)

    def _follow(self, name: str, matrix: Tensor) -> bool:
        """Clip by the subspace, and return whether that was enough."""
        space = self._spaces.get(name)
        if space is None or space.shape[1] == min(matrix.shape):
            return False
        precise = matrix.to(space.dtype)
        check_finite(matrix, f"the weight {name}")
        space = torch.linalg.qr(precise.mT @ (precise @ space)).Q
        left, sizes, turn = torch.linalg.svd(precise @ space, full_matrices=False)
        space = space @ turn.mT  # Ritz vectors: M·space = left·sizes
        self._spaces[name] = space
        residual = torch.linalg.vector_norm(precise.mT @ left[:, 0] - sizes[0] * space[:, 0])
        if bool(residual > _TOLERANCE * self.cap) or bool(sizes[-1] > self.cap):
            return False
        over = (sizes - self.cap).clamp(min=0.0)
        if bool(over.any()):
            matrix.copy_(precise - (left * over) @ space.mT)
        return True
