"""How a module of this folder is drawn, and what a case says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Expect = Literal["read", "partly", "refused", "either"]


@dataclass(frozen=True, eq=False)
class Case:
    """A module, its input, and what an ideal reader does with it.

    ``read``: nothing but affine maps, known activations, normalisations, gates, softmax attention, residuals, pooling.
    ``partly``: one operation is named and left to automatic differentiation. ``refused``: no fixed differentiable
    function of ``x``, or one whose gradient is not its derivative. ``either``: reading it rightly, naming the operation
    and refusing are all good answers, a wrong reading never is.
    """

    name: str
    make: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    expect: Expect
    why: str = ""
    others: tuple[Tensor, ...] = ()


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers from a seed of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """The module with parameters and running statistics drawn anew, so that no gain is one and no bias zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(0.25 * noise)
            else:
                rows = parameter.shape[1] if parameter.ndim == 3 else parameter[0].numel()
                parameter.copy_(noise / math.sqrt(rows))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.25 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return module


def built(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What the factory makes, randomised and in evaluation mode; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return randomised(factory(), seed).eval()
