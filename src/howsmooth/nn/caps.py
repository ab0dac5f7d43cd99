r"""Caps on spectral norms: after every step of the optimiser, singular values are clipped at a cap.

The projection of M on :math:`\{\|M\|_2 \le c\}` clips singular values: :math:`M - \sum_i(\sigma_i - c)_+u_iv_i^\top`.
Only those above c are needed, so that a subspace of a few vectors that follows M from step to step is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_finite, check_positive, validated
from howsmooth.errors import InvalidInput
from howsmooth.norms.small_matrices import spectral

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
