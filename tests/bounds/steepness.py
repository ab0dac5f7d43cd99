"""Gradient ascent on the slope of a function: what a constant must not be passed by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

STARTS, WIDTH = 40, 5
SLACK = 1 + 1e-10


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slopes(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """σ_max of the dense autograd Jacobian of f at every item of x."""

    def one(item: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(jacrev(f)(item).reshape(-1, item.numel()), 2)

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be batched
        return vmap(one)(x)


def steepest(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    return float(slopes(f, x).detach().max())


def attack(
    f: Callable[[Tensor], Tensor],
    starts: Tensor,
    steps: int = 40,
    inside: Callable[[Tensor], Tensor] = lambda x: x,
) -> float:
    """The largest slope that projected gradient ascent finds from all starts; random search where slopes are flat."""
    x = inside(starts).clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.1, maximize=True)
    best = 0.0
    for _ in range(steps):
        found = slopes(f, x)
        best = max(best, float(found.detach().max()))
        if found.requires_grad:
            optimiser.zero_grad()
            found.sum().backward()
            optimiser.step()
        with torch.no_grad():
            x.copy_(inside(x if found.requires_grad else torch.randn_like(x)))
    return best


def in_ball(radius: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (radius / x.norm(dim=-1, keepdim=True)).clamp(max=1)


def with_variance(floor: float) -> Callable[[Tensor], Tensor]:
    def inside(x: Tensor) -> Tensor:
        mean, spread = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        return mean + (x - mean) * (floor / spread).sqrt().clamp(min=1)

    return inside
