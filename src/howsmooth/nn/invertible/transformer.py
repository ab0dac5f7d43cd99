r"""An invertible transformer: ActNorm, x + contractive attention, ActNorm, x + contractive network, and again.

Its inverse runs backwards layer by layer. An error e in the input of a layer's inverse becomes at most e/(1−c) for a
residual block and e·max e^{−s} for ActNorm; with the error of each layer itself, the bounds compose to one for x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.validation import Count, Probability, validated
from howsmooth.nn.invertible.actnorm import ActNorm
from howsmooth.nn.invertible.branches import AttentionBranch, Branch, ComposedBranch
from howsmooth.nn.invertible.contractive_mlp import ContractiveMLP
from howsmooth.nn.invertible.fixed_point import Contraction
from howsmooth.nn.invertible.log_determinant import LogDeterminant, sum_log_determinants
from howsmooth.nn.invertible.residual import Inversion, InvertibleResidual
from howsmooth.nn.layers.attention_layer import Mask
from howsmooth.nn.layers.contractive_layer import ContractiveL2Attention


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

    def residuals(self) -> Iterator[InvertibleResidual]:
        """Iterate over the residual blocks, in order."""
        return (layer for layer in self.layers if isinstance(layer, InvertibleResidual))


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
