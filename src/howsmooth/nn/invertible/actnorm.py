"""ActNorm: a scale and a shift for every feature, set from the first batch (Kingma, Dhariwal 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_finite, check_weights, validated
from howsmooth.errors import InvalidInput
from howsmooth.nn.invertible.log_determinant import LogDeterminant


class ActNorm(nn.Module):
    """y = e^s·(x + b) with s, b for every feature, or for every feature of every position.

    The first batch in training sets them so that y has mean 0 and variance 1 over the batch (and the tokens, unless
    every position has its own); from then on they are ordinary parameters. Before that the map is the identity.

    Args:
        width: features d of a token.
        tokens: number n of positions, each with its own scales and shifts; None for one set for all positions.

    >>> norm = ActNorm(1)
    >>> y = norm(torch.tensor([[[1.0], [3.0]], [[5.0], [7.0]]])).detach()
    >>> bool(y.mean().abs() < 1e-6), round(float(y.std(correction=0)), 4)
    (True, 1.0)
    """

    initialised: Tensor

    @validated
    def __init__(self, width: int, tokens: int | None = None):
        super().__init__()
        shape = (1 if tokens is None else check_count(tokens, "tokens"), check_count(width, "width"))
        check_weights(2 * shape[0] * shape[1], "ActNorm")
        self.tokens = tokens
        self.log_scale, self.shift = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("initialised", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        if self.training and not bool(self.initialised):
            self._initialise(x.detach())
        return (x + self.shift) * self.log_scale.exp()

    def inverse(self, y: Tensor) -> Tensor:
        """Return the x with forward(x) = y."""
        self._check(y)
        return y * (-self.log_scale).exp() - self.shift

    @torch.no_grad()
    def inverse_rounding(self, y: Tensor) -> Tensor:
        """Bound the rounding of `inverse`, entry by entry: of exp, a product and a sum that may cancel."""
        return 4 * torch.finfo(y.dtype).eps * (y.abs() * (-self.log_scale).exp() + self.shift.abs())

    def inverse_lipschitz(self) -> float:
        """Return the Lipschitz constant of the inverse, the same in every p-norm: the largest e^−s."""
        return float((-self.log_scale.detach().double()).exp().max())

    def log_det(self, x: Tensor) -> LogDeterminant:
        """Return the sum of s over all tokens, the same for every item."""
        self._check(x)
        value = self.log_scale.sum() * (x.shape[-2] if self.tokens is None else 1)
        zeros = torch.zeros(x.shape[:-2], dtype=value.dtype, device=value.device)
        return LogDeterminant(value.expand_as(zeros), zeros, zeros, "blocks")

    @torch.no_grad()
    def _initialise(self, x: Tensor) -> None:
        check_finite(x, "the first batch of ActNorm")
        samples = x.reshape(-1, x.shape[-1]) if self.tokens is None else x.reshape(-1, *x.shape[-2:])
        spread, mean = torch.std_mean(samples, dim=0, correction=0)
        spread = torch.where(
            spread > 1e-6 * (1 + mean.abs()), spread, 1.0
        )  # the scale of a constant feature is unchanged
        self.shift.copy_(-mean.view_as(self.shift))
        self.log_scale.copy_(-spread.log().view_as(self.log_scale))
        self.initialised.fill_(True)

    def _check(self, x: Tensor) -> None:
        n, width = self.log_scale.shape
        if x.dim() not in (2, 3) or x.shape[-1] != width or (self.tokens is not None and x.shape[-2] != n):
            expected = f"(…, {n if self.tokens is not None else 'n'}, {width})"
            raise InvalidInput(f"ActNorm takes tokens of shape {expected}, got {tuple(x.shape)}.")
