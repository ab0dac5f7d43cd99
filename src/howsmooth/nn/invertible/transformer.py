r"""An invertible transformer: ActNorm, x + contractive attention, ActNorm, x + contractive network, and again.

Its inverse runs backwards layer by layer. An error e in the input of a layer's inverse becomes at most e/(1−c) for a
residual block and e·max e^{−s} for ActNorm; with the error of each layer itself, the bounds compose to one for x.
ActNorm is a scale and a shift for every feature, set from the first batch (Kingma, Dhariwal 2018).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.validation import Count, Probability, check_count, check_finite, check_weights, validated
from howsmooth.errors import InvalidInput
from howsmooth.nn.invertible.branches import AttentionBranch, Branch, ComposedBranch, ContractiveMLP
from howsmooth.nn.invertible.fixed_point import Contraction
from howsmooth.nn.invertible.log_determinant import LogDeterminant, sum_log_determinants
from howsmooth.nn.invertible.residual import Inversion, InvertibleResidual
from howsmooth.nn.layers.attention_layer import Mask
from howsmooth.nn.layers.l2_layers import ContractiveL2Attention


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
        zeros = value.new_zeros(x.shape[:-2])
        return LogDeterminant(value.expand_as(zeros), zeros, zeros, "blocks")

    @torch.no_grad()
    def _initialise(self, x: Tensor) -> None:
        check_finite(x, "the first batch of ActNorm")
        samples = x.reshape(-1, x.shape[-1]) if self.tokens is None else x.reshape(-1, *x.shape[-2:])
        spread, mean = torch.std_mean(samples, dim=0, correction=0)
        # The scale of a constant feature is unchanged.
        spread = torch.where(spread > 1e-6 * (1 + mean.abs()), spread, 1.0)
        self.shift.copy_(-mean.view_as(self.shift))
        self.log_scale.copy_(-spread.log().view_as(self.log_scale))
        self.initialised.fill_(True)

    def _check(self, x: Tensor) -> None:
        n, width = self.log_scale.shape
        if x.dim() not in (2, 3) or x.shape[-1] != width or (self.tokens is not None and x.shape[-2] != n):
            raise InvalidInput(
                f"ActNorm takes tokens of shape (…, {self.tokens or 'n'}, {width}), got {tuple(x.shape)}."
            )


class InvertibleTransformer(nn.Module):
    """A transformer on sequences of any length that can be inverted, with its log-determinant.

    With ``mask="causal"`` the log-determinant is exact in O(n d³), and so is the likelihood of a flow made from it.

    Args:
        width: d of a token.
        heads: heads of the attention.
        depth: number of pairs of attention and network.
        hidden: width of the networks' hidden layer; 4·width by default.
        coefficient: c < 1 of every branch.
        mask: None, "causal", booleans (True = may look), or a `LogitBias`.
        attention_width: width of the attention, between two networks that map tokens to it and back; by default
            ``width``. Narrow tokens need it.
        tokens: fixed number of tokens; every position then has its own ActNorm scales and shifts.
        norm: 2 or inf, the norm in which branches contract.

    >>> model = InvertibleTransformer(2, depth=2, mask="causal").double().eval()
    >>> x = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> inverted = model.inverse(model(x))
    >>> bool(((inverted.x - x).flatten(1).norm(dim=1) <= inverted.error_bound).all()), inverted.by_theorem
    (True, True)
    >>> model.log_det(x).exact
    True
    """

    @validated
    def __init__(
        self,
        width: Count,
        heads: Count = 1,
        depth: Count = 2,
        hidden: Count | None = None,
        *,
        coefficient: Probability = 0.9,
        mask: Mask = None,
        attention_width: Count | None = None,
        tokens: Count | None = None,
        norm: float = 2,
    ):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        inner = width if attention_width is None else attention_width

        def attention() -> Branch:
            attend = AttentionBranch(
                ContractiveL2Attention(inner, heads, coefficient, "2" if norm == 2 else "inf"), mask
            )
            if attention_width is None:
                return attend
            there = ContractiveMLP(width, hidden, 1.0, out_width=inner, norm=norm)
            return ComposedBranch(there, attend, ContractiveMLP(inner, hidden, 1.0, out_width=width, norm=norm))

        layers: list[nn.Module] = []
        for _ in range(depth):
            for branch in (attention(), ContractiveMLP(width, hidden, coefficient, norm=norm)):
                layers += [ActNorm(width, tokens), InvertibleResidual(branch, norm=norm)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def inverse(self, y: Tensor, **options: Any) -> Inversion:
        """Return the x with forward(x) = y and a bound on its error; options as in `InvertibleResidual.inverse`.

        Iterations and accelerated steps are sums over the layers, the residual is the largest of theirs.
        """
        error = torch.zeros(y.shape[:-2], dtype=torch.promote_types(y.dtype, torch.float32), device=y.device)
        inversion: Inversion | None = None
        for layer in reversed(self.layers):
            if isinstance(layer, ActNorm):
                rounding = layer.inverse_rounding(y.detach())
                y = layer.inverse(y)
                error = error * layer.inverse_lipschitz() + _sizes(rounding, inversion)
                continue
            assert isinstance(layer, InvertibleResidual)
            step = layer.inverse(y, **options)
            y, error = step.x, error / (1 - step.contraction.coefficient) + step.error_bound
            inversion = step if inversion is None else _joined(inversion, step)
        assert inversion is not None
        return replace(inversion, x=y, error_bound=error)

    def log_det(self, x: Tensor, **options: Any) -> LogDeterminant:
        """Compute log|det| of the Jacobian at x; options as in `InvertibleResidual.log_det`."""
        return self.forward_and_log_det(x, **options)[1]

    def forward_and_log_det(self, x: Tensor, **options: Any) -> tuple[Tensor, LogDeterminant]:
        """Return the output and its log-determinant."""
        terms = []
        for layer in self.layers:
            assert isinstance(layer, InvertibleResidual | ActNorm)
            moved = layer(x)  # first: it sets up ActNorm
            terms.append(layer.log_det(x) if isinstance(layer, ActNorm) else layer.log_det(x, **options))
            x = moved
        return x, sum_log_determinants(terms)


def _sizes(x: Tensor, inversion: Inversion | None) -> Tensor:
    """Return the norm of every item, in the norm of the branches."""
    contraction = Contraction(0.0) if inversion is None else inversion.contraction
    sizes = contraction.size(x[None] if x.dim() == 2 else x)
    return sizes[0] if x.dim() == 2 else sizes


def _joined(so_far: Inversion, step: Inversion) -> Inversion:
    weaker = max(so_far.contraction, step.contraction, key=lambda c: c.coefficient)
    return replace(
        step,
        residual=torch.maximum(so_far.residual, step.residual),
        iterations=so_far.iterations + step.iterations,
        accelerated=so_far.accelerated + step.accelerated,
        converged=so_far.converged & step.converged,
        contraction=replace(weaker, by_theorem=so_far.by_theorem and step.by_theorem),
    )
