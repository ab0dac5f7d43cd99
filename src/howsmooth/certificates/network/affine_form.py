"""A network around an input as an affine form: tokens, their derivatives, and bounded remainders.

Every hidden token is x_i(δ) = x⁰_i + Σ_s Σ_j A^s_ij e^s_j(δ) + ν_i(δ). Source 0 is the move of the input; every
nonlinear part adds its Taylor remainder as a source, multiplied by the exact derivative of all later parts; ν is the
rounding error. A *gauge* is a row of coefficients ≥ 0 of a bound that is linear in the |e_b|: the first entry is
constant, the others belong to the blocks (s, j) in order.

Proof: docs/theory/certificates-network.md, section "Affine forms".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.bounds.point_error import gamma

_SQUARINGS = 6


@dataclass(frozen=True)
class Stream:
    """Tokens of a network around an input.

    Attributes:
        value: x⁰ ``(n, d)``. slopes: A for every source, ``(n, d, m, b)``: m blocks of b numbers.
        drift: gauge of ‖ν‖, ``(1 + blocks,)``.
    """

    value: Tensor
    slopes: tuple[Tensor, ...]
    drift: Tensor

    @classmethod
    def moving(cls, x: Tensor, tokens: Sequence[int], together: bool = False) -> Stream:
        """Tokens of which some move, each in a ball of its own or all in one."""
        n, d = x.shape
        slopes = x.new_zeros(n, d, len(tokens), d)
        for block, token in enumerate(tokens):
            slopes[token, :, block] = torch.eye(d, dtype=x.dtype)
        slopes = slopes.reshape(n, d, 1, -1) if together else slopes
        drift = x.new_zeros(1 + slopes.shape[2])
        drift[0] = gamma(4) * float(x.detach().norm())  # the sum of embeddings and positions
        return cls(x, (slopes,), drift)

    @property
    def size(self) -> Tensor:
        """Gauge of the Frobenius norm of values and slopes: what roundings are relative to."""
        return torch.cat(
            [
                self.value.norm()[None],
                *(slope.square().sum((0, 1, 3)).clamp_min(1e-300).sqrt() for slope in self.slopes),
            ]
        )

    def linear(self, weight: Tensor, bias: Tensor | None) -> Stream:
        """x ↦ Wx + b of every token."""
        value = self.value @ weight.mT
        norm, lost = weight.norm(), gamma(weight.shape[1] + 8)
        drift = norm * (self.drift + lost * self.size)
        if bias is not None:
            value = value + bias
            drift = torch.cat([drift[:1] + lost * len(value) ** 0.5 * bias.norm(), drift[1:]])
        slopes = tuple(torch.einsum("pd,ndmb->npmb", weight, slope) for slope in self.slopes)
        return Stream(value, slopes, drift)

    def pool(self, how: str) -> Stream:
        """The mean of all tokens, or the first."""
        if how == "first":
            return Stream(self.value[:1], tuple(slope[:1] for slope in self.slopes), self.drift)
        drift = self.drift + gamma(len(self.value) + 4) * self.size
        return Stream(self.value.mean(0)[None], tuple(slope.mean(0)[None] for slope in self.slopes), drift)

    def plus(self, branch: Stream) -> Stream:
        """The sum with a branch that began here: it knows all sources of this stream, and more."""
        slopes = [*self.slopes, *(torch.zeros_like(slope) for slope in branch.slopes[len(self.slopes) :])]
        drift = torch.cat([self.drift, branch.drift.new_zeros(len(branch.drift) - len(self.drift))]) + branch.drift
        value = self.value + branch.value
        total = Stream(value, tuple(a + b for a, b in zip(slopes, branch.slopes, strict=True)), drift)
        return Stream(value, total.slopes, drift + gamma(4) * (total.size + branch.size))

    def after(self, value: Tensor, slopes: Sequence[Tensor], source: Tensor, rounded: Tensor | float = 0.0) -> Stream:
        """What comes out of a part that is not linear, with the source of its remainder, which takes the drift in.

        Args:
            rounded: times values and slopes, what rounding did behind the remainder.
        """
        made = Stream(value, (*slopes, source), torch.zeros_like(self.drift))
        return Stream(value, made.slopes, rounded * made.size)

    def token_gauge(self, skipped: int = 0) -> Tensor:
        """Rows that bound the moves of single tokens, ``(n, 1 + blocks)``, without the first sources."""
        without = [torch.zeros_like(slope[:, 0, :, 0]) for slope in self.slopes[:skipped]]
        with_ = [spectral_ceiling(slope.movedim(2, 1)) for slope in self.slopes[skipped:]]
        return gauge([*without, *with_], self.drift)

    def number_gauge(self) -> Tensor:
        """Rows that bound the moves of single numbers, ``(n, d, 1 + blocks)``."""
        return gauge([length(slope) for slope in self.slopes], self.drift)


def gauge(norms: Sequence[Tensor], drift: Tensor) -> Tensor:
    """Norms per source ``(…, m)`` and a drift that is added to all of them, as rows of a gauge."""
    rows = torch.cat([torch.zeros_like(norms[0][..., :1]), *norms], -1)
    return rows * (1 + gamma(2**10)) + drift


def length(vectors: Tensor) -> Tensor:
    """Euclidean norms along the last axis, with a derivative at zero."""
    return vectors.square().sum(-1).clamp_min(1e-300).sqrt()


def block_diagonal(block: Tensor, n: int) -> Tensor:
    """Slopes of a source that reaches every token by the same matrix ``(d, b)``, or its own ``(n, d, b)``."""
    blocks = block.expand(n, *block.shape[-2:])
    identity = torch.eye(n, dtype=block.dtype)
    return torch.einsum("ij,idb->idjb", identity, blocks)


def spectral_ceiling(matrices: Tensor) -> Tensor:
    r"""At least the spectral norms of matrices ``(…, p, q)``, within k^{1/128} of them, k = min(p, q).

    :math:`\|A\| \le (\mathrm{tr}\,G^{64})^{1/128}`, :math:`G = AA^\top`, by six squarings of G/tr G. One squaring is
    off by at most :math:`γ_k` times the square of a Frobenius norm ≤ 1, while the trace of the result is at least 1/k;
    of a relative error of the m-th square the root leaves :math:`2^{-m}`.

    >>> bool(2 <= spectral_ceiling(torch.diag(torch.tensor([2.0, 1.0, 0.0]).double())) < 2.0001)
    True
    """
    p, q = matrices.shape[-2:]
    gram = matrices @ matrices.mT if p <= q else matrices.mT @ matrices
    k = gram.shape[-1]
    log = torch.zeros_like(gram[..., 0, 0])
    for step in range(_SQUARINGS + 1):
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        log = log + trace.clamp_min(1e-300).log() / 2**step
        if step < _SQUARINGS:
            gram = gram / trace.clamp_min(1e-300)[..., None, None]
            gram = gram @ gram
    raised = 1 + gamma(8 * (_SQUARINGS + 2) * (k + max(p, q)) * k**2)
    return (0.5 * log).exp() * raised
