"""A pre-norm block of nodes, and the function of torch that it stands for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.jacobians.tokenwise import Activation, Affine, Norm
from howsmooth.network.nodes import Attend, Node, Parallel, Series, Skip, Tokenwise

N, D = 5, 6


def tokens(seed: int = 0, n: int = N, d: int = D) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.double().requires_grad_(False).parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return module


def norm_stage(module: nn.LayerNorm) -> Norm:
    return Norm(module.normalized_shape[0], module.eps, module.weight, module.bias, centred=True)


def block(seed: int = 0, mask: str | None = "causal") -> tuple[Node, Callable[[Tensor], Tensor]]:
    """x + attention(norm x), then x + MLP(norm x)."""
    attention = hs.SelfAttention.random(D, heads=2, seed=seed, mask=mask, dtype=torch.float64)
    first, second = (randomised(nn.LayerNorm(D)) for _ in range(2))
    up, down = tokens(seed + 7, 9, D), tokens(seed + 8, D, 9)
    mlp = Tokenwise(Affine(up), Activation(F.gelu), Affine(down))
    node = Series(
        Parallel(Skip(), Series(Tokenwise(norm_stage(first)), Attend(attention))),
        Parallel(Skip(), Series(Tokenwise(norm_stage(second)), mlp)),
    )

    def function(x: Tensor) -> Tensor:
        x = x + attention(first(x))
        return x + F.gelu(second(x) @ up.T) @ down.T

    return node, function
