r"""A token-wise network with a Lipschitz constant of at most c, whatever its weights.

x ↦ c · W_k a(… a(W_1x + b_1) …) + b_k with every W_i divided by max(1, ‖W_i‖) and 1-Lipschitz activations: the constant
is at most c, for one token and hence for n (the Jacobian is block diagonal). Many hidden units under one spectral norm
have small rows, on which a smooth activation is almost linear. So every unit has its own sharpness β: t ↦ a(βt)/β is
1-Lipschitz like a, for every β > 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from howsmooth._util.validation import Count, check_one_of, check_positive, check_weights, validated
from howsmooth.nn.invertible.branches import Branch
from howsmooth.nn.layers.attention_layer import NormOrder, as_norm, glorot
from howsmooth.nn.layers.weight_norms import SpectralNorm
from howsmooth.norms.small_matrices import spectral

STEEPEST_SWISH = 1.09984
"""The largest slope of x·σ(x), 1.0998393…, at the root 2.3994 of 2 + x(1 − 2σ(x)) = 0, rounded up."""


def lip_swish(x: Tensor) -> Tensor:
    r"""x·σ(x)/1.09984: smooth, and 1-Lipschitz (Chen et al. 2019).

    >>> x = torch.linspace(-20, 20, 100_001, dtype=torch.float64, requires_grad=True)
    >>> slope, = torch.autograd.grad(lip_swish(x).sum(), x)
    >>> bool(0.999999 < slope.abs().max() <= 1)
    True
    """
    return functional.silu(x) / STEEPEST_SWISH


NONEXPANSIVE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "lip_swish": lip_swish,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "relu": torch.relu,
}
"""All 1-Lipschitz in every coordinate. Densities want smooth ones: not relu."""


class ContractiveMLP(Branch):
    """c · W_k a(… a(W_1x + b_1) …) + b_k on every token, with a Lipschitz constant of at most c.

    **In training** with norm 2 spectral norms are lower estimates from a warm-started iteration: the constant may
    exceed c slightly. **At evaluation** they are exact. `lipschitz_bound` is an upper bound in either
    mode. In the ∞-norm the norms (largest absolute row sums) are always exact.

    Args:
        width: d of a token.
        hidden: width of the hidden layers.
        coefficient: c > 0; below 1 the network contracts.
        depth: number of hidden layers.
        out_width: width of an output token; d by default.
        activation: a key of `NONEXPANSIVE_ACTIVATIONS`.
        norm: 2 or inf, in which the constant is c.

    >>> mlp = ContractiveMLP(4, 16, coefficient=0.5).eval()
    >>> mlp(torch.zeros(2, 3, 4)).shape, float(mlp.lipschitz_bound(n=3)) <= 0.5 * (1 + 1e-6)
    (torch.Size([2, 3, 4]), True)
    """

    reach = "token"

    @validated
    def __init__(
        self,
        width: Count,
        hidden: Count,
        coefficient: float = 0.9,
        *,
        depth: Count = 1,
        out_width: Count | None = None,
        activation: str = "lip_swish",
        norm: NormOrder = 2,
    ):
        super().__init__()
        out_width = width if out_width is None else out_width
        check_weights(hidden * (width + (depth - 1) * hidden + out_width), "the network")
        widths = [width, *[hidden] * depth, out_width]
        self.coefficient = check_positive(coefficient, "coefficient")
        self.activation, self.norm = check_one_of(activation, NONEXPANSIVE_ACTIVATIONS, "activation"), as_norm(norm)
        self.linears = nn.ModuleList(glorot(b, a, bias=True) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(SpectralNorm(b, a) for a, b in pairwise(widths))
        self.log_sharpness = nn.ParameterList(torch.zeros(hidden) for _ in range(depth))
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Spread the kinks over the range of tokens of size 1, and make them sharp on that scale."""
        for norm, linear in zip(self.norms, self.linears, strict=True):
            norm.follow(linear.weight)  # type: ignore[operator]
        for log_sharpness, weight, linear in zip(self.log_sharpness, self._weights(), self.linears, strict=False):
            rows = torch.linalg.vector_norm(weight, dim=1).clamp(min=1e-3)
            linear.bias.copy_((4 * torch.rand_like(rows) - 2) * rows)  # type: ignore[operator]
            log_sharpness.copy_((3 / rows).log())

    def _weights(self, follow: bool = True) -> list[Tensor]:
        """Return the weights in use: each divided by max(1, norm)."""
        weights = [linear.weight for linear in self.linears if isinstance(linear, nn.Linear)]
        if self.norm == 2:
            sizes = [norm(weight, follow) for norm, weight in zip(self.norms, weights, strict=True)]
        else:
            sizes = [torch.linalg.matrix_norm(weight, math.inf) for weight in weights]
        return [weight / size.clamp(min=1) for weight, size in zip(weights, sizes, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        activation, weights = NONEXPANSIVE_ACTIVATIONS[self.activation], self._weights()
        for weight, linear, log_sharpness in zip(weights, self.linears, self.log_sharpness, strict=False):
            beta = log_sharpness.exp()
            x = activation(beta * functional.linear(x, weight, linear.bias)) / beta  # type: ignore[arg-type]
        return functional.linear(x, self.coefficient * weights[-1], self.linears[-1].bias)  # type: ignore[arg-type]

    @torch.no_grad()
    def lipschitz_bound(self, n: int, norm: NormOrder = 2) -> Tensor:
        """Return c times the norms of the weights in use, in float64: the same for every n."""
        weights = [weight.double() for weight in self._weights(follow=False)]
        sizes = [spectral(w) if as_norm(norm) == 2 else torch.linalg.matrix_norm(w, math.inf) for w in weights]
        return self.coefficient * torch.stack(sizes).prod()
