"""A network around an input as an affine form: tokens, their derivatives, and bounded remainders.

Every hidden token is x_i(δ) = x⁰_i + Σ_s Σ_j A^s_ij e^s_j(δ) + ν_i(δ). Source 0 is the move of the input; every
nonlinear part adds its Taylor remainder as a source, multiplied by the exact derivative of all later parts; ν is the
rounding error. A *gauge* is a row of coefficients ≥ 0 of a bound that is linear in the |e_b|: the first entry is
constant, the others belong to the blocks (s, j) in order.

Proof: docs/theory/certificates-network.md, section "Affine forms".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.numerics.roundoff import gamma

_SQUARINGS = 6


@dataclass(frozen=True)
class AffineForm:
    """Tokens of a network around an input.

    Attributes:
        value: x⁰ ``(n, d)``. slopes: A for every source, ``(n, d, m, b)``: m blocks of b numbers.
        rounding: gauge of ‖ν‖, ``(1 + blocks,)``.
    """

    value: Tensor
    slopes: tuple[Tensor, ...]
    rounding: Tensor

    @classmethod
    def moving(cls, x: Tensor, tokens: Sequence[int], together: bool = False) -> AffineForm:
        """The input, of which some tokens move, each in a ball of its own or all in one."""
        n, d = x.shape
        slopes = x.new_zeros(n, d, len(tokens), d)
        for block, token in enumerate(tokens):
            slopes[token, :, block] = torch.eye(d, dtype=x.dtype)
        slopes = slopes.reshape(n, d, 1, -1) if together else slopes
        rounding = x.new_zeros(1 + slopes.shape[2])
        rounding[0] = gamma(4) * float(x.detach().norm())  # the sum of embeddings and positions
        return cls(x, (slopes,), rounding)

    @property
    def size(self) -> Tensor:
        """Gauge of the Frobenius norm of values and slopes, the scale of rounding errors."""
        return torch.cat(
            [
                self.value.norm()[None],
                *(slope.square().sum((0, 1, 3)).clamp_min(1e-300).sqrt() for slope in self.slopes),
            ]
        )

    def linear(self, weight: Tensor, bias: Tensor | None) -> AffineForm:
        """x ↦ Wx + b of every token."""
        value = self.value @ weight.mT
        norm, unit = weight.norm(), gamma(weight.shape[1] + 8)
        rounding = norm * (self.rounding + unit * self.size)
        if bias is not None:
            value = value + bias
            rounding = torch.cat([rounding[:1] + unit * len(value) ** 0.5 * bias.norm(), rounding[1:]])
        slopes = tuple(torch.einsum("pd,ndmb->npmb", weight, slope) for slope in self.slopes)
        return AffineForm(value, slopes, rounding)

    def rearranged(self, index: Tensor, factor: Tensor | None = None, constant: Tensor | None = None) -> AffineForm:
        """y = factor · x.flat[index] (−1: nothing) + constant, ``(n', d')`` as the index."""
        absent, places = index < 0, index.clamp_min(0)
        weight = torch.ones(index.shape, dtype=self.value.dtype) if factor is None else factor.to(self.value)
        weight = weight.masked_fill(absent, 0.0)
        value = self.value.flatten()[places] * weight
        slopes = tuple(slope.flatten(0, 1)[places] * weight[..., None, None] for slope in self.slopes)
        sums = weight.detach().square().new_zeros(self.value.numel())
        norm = sums.index_add(0, places.flatten(), weight.detach().square().flatten()).amax().sqrt()
        unit = gamma(4) * (factor is not None)
        rounding = norm * (1 + gamma(8)) * (self.rounding + unit * self.size)
        if constant is not None:
            constant = constant.to(value)
            value = value + constant
            size = constant.detach().norm() + value.detach().norm()
            rounding = torch.cat([rounding[:1] + gamma(4) * size, rounding[1:]])
        return AffineForm(value, slopes, rounding)

    def mixed(self, matrix: Tensor) -> AffineForm:
        """M x: every token a sum of tokens."""
        matrix = matrix.to(self.value)
        rounding = matrix.norm() * (self.rounding + gamma(matrix.shape[1] + 8) * self.size)
        slopes = tuple(torch.einsum("pn,ndmb->pdmb", matrix, slope) for slope in self.slopes)
        return AffineForm(matrix @ self.value, slopes, rounding)

    def channels(self, start: int, stop: int) -> AffineForm:
        """Some numbers of every token."""
        return AffineForm(self.value[:, start:stop], tuple(s[:, start:stop] for s in self.slopes), self.rounding)

    @staticmethod
    def beside(forms: Sequence[AffineForm]) -> AffineForm:
        """The numbers of several forms with the same sources, side by side in each token."""
        slopes = tuple(torch.cat(several, 1) for several in zip(*(form.slopes for form in forms), strict=True))
        rounding = sum((form.rounding for form in forms[1:]), forms[0].rounding)
        return AffineForm(torch.cat([form.value for form in forms], -1), slopes, rounding)

    def with_sources_of(self, other: AffineForm) -> AffineForm:
        """The same form with slopes of zero in the sources that another has besides."""
        more = [self.value.new_zeros(*self.value.shape, *slope.shape[2:]) for slope in other.slopes[len(self.slopes) :]]
        rounding = pad(self.rounding, (0, len(other.rounding) - len(self.rounding)))
        return AffineForm(self.value, (*self.slopes, *more), rounding)

    def plus(self, other: AffineForm) -> AffineForm:
        """The sum with a form of the same sources."""
        slopes = [a + b for a, b in zip(self.slopes, other.slopes, strict=True)]
        total = AffineForm(self.value + other.value, tuple(slopes), self.rounding + other.rounding)
        return replace(total, rounding=total.rounding + gamma(4) * (total.size + other.size))

    def after(
        self, value: Tensor, slopes: Sequence[Tensor], source: Tensor, rounded: Tensor | float = 0.0
    ) -> AffineForm:
        """The form behind a nonlinear part, with the source of its remainder, which includes earlier rounding errors.

        Args:
            rounded: relative rounding error of values and slopes behind the remainder.
        """
        made = AffineForm(value, (*slopes, source), self.rounding)
        return replace(made, rounding=rounded * made.size)

    def token_gauge(self, skipped: int = 0) -> Tensor:
        """Rows that bound the moves of single tokens, ``(n, 1 + blocks)``, without the first sources."""
        without = [torch.zeros_like(slope[:, 0, :, 0]) for slope in self.slopes[:skipped]]
        with_ = [spectral_ceiling(slope.movedim(2, 1)) for slope in self.slopes[skipped:]]
        return gauge([*without, *with_], self.rounding)

    def number_gauge(self) -> Tensor:
        """Rows that bound the moves of single numbers, ``(n, d, 1 + blocks)``."""
        return gauge([length(slope) for slope in self.slopes], self.rounding)


def gauge(norms: Sequence[Tensor], rounding: Tensor) -> Tensor:
    """Norms per source ``(…, m)`` and a rounding that is added to all of them, as rows of a gauge."""
    rows = torch.cat([torch.zeros_like(norms[0][..., :1]), *norms], -1)
    return rows * (1 + gamma(2**10)) + rounding


def length(vectors: Tensor) -> Tensor:
    """Euclidean norms along the last axis, with a derivative at zero."""
    return vectors.square().sum(-1).clamp_min(1e-300).sqrt()


def block_diagonal(block: Tensor, n: int) -> Tensor:
    """Slopes of a source that reaches every token by the same matrix ``(d, b)``, or its own ``(n, d, b)``."""
    blocks = block.expand(n, *block.shape[-2:])
    identity = torch.eye(n, dtype=block.dtype)
    return torch.einsum("ij,idb->idjb", identity, blocks)


def spectral_ceiling(matrices: Tensor) -> Tensor:
    r"""Upper bounds on the spectral norms of matrices ``(…, p, q)``, within k^{1/128} of them, k = min(p, q).

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
